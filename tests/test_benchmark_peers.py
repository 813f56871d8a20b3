"""Contenders from packages that need not be there."""

import re
import sys
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from types import SimpleNamespace

import pytest
import torch

import labkit
from benchmarks import run
from benchmarks.linear_recurrence import logarithm
from benchmarks.workloads import peers
from benchmarks.workloads.recurrent import EPS, LINEAR_RECURRENCE, RMS_NORM, linear_recurrence, rms_norm

SEQUENCES = {"batch": 2, "time": 5, "width": 3}
LOG_RECURRENCE = replace(
    LINEAR_RECURRENCE,
    inputs=lambda shape: logarithm(*LINEAR_RECURRENCE.inputs(shape)),
    reference=lambda log_a, b: linear_recurrence(log_a.exp(), b),
)
"""The recurrence from logarithms of its gates, as fla takes them."""
CALLS = {
    "liger_rms_norm": ("liger_kernel", "liger-kernel", RMS_NORM),
    "fla_recurrence": ("fla", "fla-core", LOG_RECURRENCE),
    "fla_chunked_recurrence": ("fla", "fla-core", LOG_RECURRENCE),
    "accelerated_scan": ("accelerated_scan", "accelerated-scan", LINEAR_RECURRENCE),
}
"""What is imported for each call, the package that has it, and what it computes."""
FLA = {"fused_recurrent_hgrn": peers.fla_recurrence, "chunk_hgrn": peers.fla_chunked_recurrence}


def installed(package):
    try:
        return bool(version(package))
    except PackageNotFoundError:
        return False


def on_gpu_with(package, whose):
    return pytest.mark.skipif(
        not (labkit.gpu.available() and installed(package)),
        reason=f"{whose} kernels need a GPU, and {package} installed",
    )


def agrees(call, work, shape, dtype="float32", direction="forward_backward"):
    """A call, and its gradients, are right beside float64; the result has the dtype of the inputs."""
    inputs = tuple(
        t.to(labkit.gpu.device(), getattr(torch, dtype)).requires_grad_() for t in work.inputs(shape)
    )
    assert not run.check(call, inputs, run.exact(work, inputs), direction)
    assert call(*inputs).dtype == inputs[0].dtype


class Without:
    """The finders of this Python, but for one package."""

    def __init__(self, package):
        self.package = package

    def find_spec(self, name, path=None, target=None):
        if name == self.package:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def stand_in(monkeypatch, module, **names):
    """A module that has these names only, and no other module."""
    monkeypatch.setattr(peers, "import_module", {module: SimpleNamespace(**names)}.__getitem__)


@pytest.mark.parametrize("name", CALLS)
def test_what_is_not_installed_is_named_with_the_remedy(name, monkeypatch):
    module, package, work = CALLS[name]
    for loaded in [loaded for loaded in sys.modules if loaded.split(".")[0] == module]:
        monkeypatch.delitem(sys.modules, loaded)
    monkeypatch.setattr(sys, "meta_path", [Without(module), *sys.meta_path])
    said = re.escape(f"{package} is not installed: pip install -e '.[peers]'")
    with pytest.raises(peers.MissingError, match=said):
        getattr(peers, name)(*work.inputs(SEQUENCES))


def test_a_package_that_lacks_something_itself_says_what(monkeypatch):
    def no_module(name):
        raise ModuleNotFoundError("No module named 'transformers'", name="transformers")

    monkeypatch.setattr(peers, "import_module", no_module)
    with pytest.raises(ModuleNotFoundError, match="transformers"):
        peers.liger_rms_norm(*RMS_NORM.inputs(SEQUENCES))


def test_a_package_is_called_with_what_its_kernel_takes(monkeypatch):
    def liger(x, weight, *options):
        assert options == (EPS, 0.0, "gemma", False), "in float32, and in memory of its own"
        return rms_norm(x, weight)

    stand_in(monkeypatch, "liger_kernel.ops.rms_norm", LigerRMSNormFunction=SimpleNamespace(apply=liger))
    agrees(peers.liger_rms_norm, RMS_NORM, SEQUENCES)
    for entry, call in FLA.items():
        hgrn = {entry: lambda x, g: (linear_recurrence(g.exp(), x), None)}
        stand_in(monkeypatch, "fla.ops.hgrn", **hgrn)
        agrees(call, LOG_RECURRENCE, SEQUENCES)


@pytest.mark.parametrize(("time", "padded"), [(3, 4), (4, 4), (5, 8)])
def test_the_scan_is_padded_for_gradients_alone(time, padded, monkeypatch):
    sizes = []

    def scan(forget, inputs):
        assert forget.is_contiguous() and inputs.is_contiguous()
        sizes.append(tuple(inputs.shape))
        return linear_recurrence(forget.transpose(1, 2), inputs.transpose(1, 2)).transpose(1, 2).contiguous()

    stand_in(monkeypatch, "accelerated_scan.scalar", scan=scan)
    monkeypatch.setattr(peers, "SCAN_STEPS", 4)
    shape = SEQUENCES | {"time": time}
    agrees(peers.accelerated_scan, LINEAR_RECURRENCE, shape)
    assert set(sizes) == {(2, 3, padded)}
    sizes.clear()
    agrees(torch.no_grad()(peers.accelerated_scan), LINEAR_RECURRENCE, shape, direction="forward")
    assert set(sizes) == {(2, 3, time)}


@on_gpu_with("liger-kernel", "Liger's")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("width", [128, 640])
def test_liger_computes_the_norm_and_its_gradients_and_leaves_the_upstream_one(width, dtype):
    agrees(peers.liger_rms_norm, RMS_NORM, {"batch": 4, "time": 33, "width": width}, dtype)
    inputs = [t.requires_grad_() for t in RMS_NORM.inputs(SEQUENCES)]
    upstream = torch.randn_like(inputs[0])
    before = upstream.clone()
    peers.liger_rms_norm(*inputs).backward(upstream)
    assert torch.equal(upstream, before)


@on_gpu_with("fla-core", "flash-linear-attention's")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(  # in chunks of 128 steps, whose gradients are off where the last one is not full
    ("name", "time"), [*((name, time) for name in FLA for time in (100, 256)), ("fused_recurrent_hgrn", 300)]
)
def test_fla_computes_the_recurrence_and_its_gradients(name, time, dtype):
    agrees(FLA[name], LOG_RECURRENCE, {"batch": 3, "time": time, "width": 80}, dtype)


@on_gpu_with("accelerated-scan", "accelerated-scan's")
@pytest.mark.parametrize("direction", ["forward", "forward_backward"])
@pytest.mark.parametrize("time", [100, peers.SCAN_STEPS, peers.SCAN_STEPS + 1])
def test_accelerated_scan_computes_the_recurrence_and_its_gradients(time, direction):
    shape = {"batch": 3, "time": time, "width": 20}
    agrees(peers.accelerated_scan, LINEAR_RECURRENCE, shape, "float32", direction)
