"""Contenders from packages that need not be there."""

import re
import sys
from importlib.metadata import PackageNotFoundError, version
from types import SimpleNamespace

import pandas as pd
import pytest
import torch
from simulated import install

import labkit
from labkit.measure import rows, sweeps
from labkit.measure.accuracy import ALLOWED_ERROR
from labkit.measure.contender import Contender
from labkit.workloads import peers
from labkit.workloads.gru import GRU, gru
from labkit.workloads.mlp import GEGLU_APART as GEGLU
from labkit.workloads.mlp import geglu_apart as geglu
from labkit.workloads.mlp import gelu
from labkit.workloads.recurrent import (
    EPS,
    LINEAR_RECURRENCE,
    LOG_RECURRENCE,
    RMS_NORM,
    linear_recurrence,
    log_recurrence,
    rms_norm,
)

SHAPE = {"batch": 6, "width": 8, "hidden": 20}
SEQUENCES = {"batch": 2, "time": 5, "width": 3}
LIGER = Contender("Liger", peers.liger_geglu, GEGLU, peer="liger-kernel")
CALLS = {
    "liger_geglu": ("liger_kernel", "liger-kernel", GEGLU, SHAPE),
    "liger_rms_norm": ("liger_kernel", "liger-kernel", RMS_NORM, SEQUENCES),
    "fla_recurrence": ("fla", "fla-core", LOG_RECURRENCE, SEQUENCES),
    "fla_chunked_recurrence": ("fla", "fla-core", LOG_RECURRENCE, SEQUENCES),
    "accelerated_scan": ("accelerated_scan", "accelerated-scan", LINEAR_RECURRENCE, SEQUENCES),
    "torchrl_gru": ("torchrl", "torchrl", GRU, SEQUENCES),
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


class Without:
    """The finders of this Python, but for one package."""

    def __init__(self, package):
        self.package = package

    def find_spec(self, name, path=None, target=None):
        if name == self.package:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def without(monkeypatch, package):
    for name in [name for name in sys.modules if name.split(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Without(package), *sys.meta_path])


def stand_in(monkeypatch, module, **names):
    """A module that has these names only, and no other module."""
    monkeypatch.setattr(peers, "import_module", {module: SimpleNamespace(**names)}.__getitem__)


@pytest.mark.parametrize("name", CALLS)
def test_what_is_not_installed_is_named_with_the_remedy(name, monkeypatch):
    module, package, work, shape = CALLS[name]
    without(monkeypatch, module)
    said = re.escape(f"{package} is not installed: pip install -e '.[peers]'")
    with pytest.raises(peers.MissingError, match=said):
        getattr(peers, name)(*work.inputs(shape))


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    """A simulated GPU, and nothing measured before."""
    monkeypatch.setenv("LABKIT_CACHE", str(tmp_path))
    monkeypatch.delenv(rows.TAPE, raising=False)
    return install(monkeypatch.setattr)


def test_what_is_not_installed_is_a_gap_with_the_reason(monkeypatch, gpu):
    def eager(*tensors):
        gpu.launch(4.0, 50.0)
        return geglu(*tensors)

    without(monkeypatch, "liger_kernel")
    contenders = [Contender("eager", eager, GEGLU, peer="no-such-package-of-ours"), LIGER]
    table = sweeps.run("suite", contenders, [SHAPE]).set_index("contender")
    assert table["median_us"].notna().tolist() == [True, False]
    assert table["note"]["Liger"] == "MissingError: liger-kernel is not installed: pip install -e '.[peers]'"
    assert table["peer"]["Liger"] == "liger-kernel" and pd.isna(table["peer_version"]["eager"])

    def no_module(name):
        raise ModuleNotFoundError("No module named 'transformers'", name="transformers")

    monkeypatch.setattr(peers, "import_module", no_module)  # installed, and lacks something itself
    with pytest.raises(ModuleNotFoundError, match="transformers"):
        peers.liger_geglu(*GEGLU.inputs(SHAPE))


def liger_norm(x, weight, *options):
    assert options == (EPS, 0.0, "gemma", False), "in float32, and in memory of its own"
    return rms_norm(x, weight)


STAND_INS = {
    "liger_geglu": ("liger_kernel.ops.geglu", "LigerGELUMulFunction", lambda gate, up: gelu(gate) * up),
    "liger_rms_norm": ("liger_kernel.ops.rms_norm", "LigerRMSNormFunction", liger_norm),
    "fla_recurrence": (
        "fla.ops.hgrn", "fused_recurrent_hgrn", lambda x, g: (linear_recurrence(g.exp(), x), None)
    ),
    "fla_chunked_recurrence": (
        "fla.ops.hgrn", "chunk_hgrn", lambda x, g: (linear_recurrence(g.exp(), x), None)
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", STAND_INS)
def test_a_package_is_called_with_what_its_kernel_takes(name, monkeypatch):
    module, entry, call = STAND_INS[name]
    stand_in(monkeypatch, module, **{entry: SimpleNamespace(apply=call) if "Liger" in entry else call})
    *_, work, shape = CALLS[name]
    comparison = sweeps.accuracy.Comparison(getattr(peers, name), work.reference, "forward_backward")
    assert comparison.complete([t.double().requires_grad_() for t in work.inputs(shape)]) < 1e-12


@pytest.fixture
def scanned(monkeypatch):
    """The sizes (B, H, T) that a stand-in for accelerated-scan was called with."""
    sizes = []

    def scan(forget, inputs):
        assert forget.is_contiguous() and inputs.is_contiguous()
        sizes.append(tuple(inputs.shape))
        return linear_recurrence(forget.transpose(1, 2), inputs.transpose(1, 2)).transpose(1, 2).contiguous()

    stand_in(monkeypatch, "accelerated_scan.scalar", scan=scan)
    return sizes


@pytest.mark.parametrize(("time", "padded"), [(3, 4), (4, 4), (5, 8)])
def test_the_scan_is_padded_for_gradients_alone(time, padded, scanned, monkeypatch):
    monkeypatch.setattr(peers, "SCAN_STEPS", 4)
    comparison = sweeps.accuracy.Comparison(peers.accelerated_scan, linear_recurrence, "forward_backward")
    inputs = [t.double().requires_grad_() for t in LINEAR_RECURRENCE.inputs(SEQUENCES | {"time": time})]
    assert comparison.complete(inputs) < 1e-12
    with torch.no_grad():
        got = peers.accelerated_scan(*inputs)
    assert got.is_contiguous() and scanned == [(2, 3, padded), (2, 3, time)], "the steps last, and back"
    torch.testing.assert_close(got, linear_recurrence(*inputs))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_torchrl_gets_wide_tensors_states_of_zeros_and_no_reset_and_tunes_for_each_batch(dtype, monkeypatch):
    kernel = SimpleNamespace(keys=["T", "H"])
    narrow = dtype in ("float16", "bfloat16")
    wide = torch.float32 if narrow else getattr(torch, dtype)

    def gru_triton(x, zeros, *others, input_precision):
        *weights, begins_anew, compute_dtype = others
        assert zeros.shape == (2, 5, 3) and not zeros.any() and not begins_anew.any()
        assert begins_anew.shape == (2, 5) and begins_anew.dtype == torch.bool
        assert {t.dtype for t in (x, zeros, *weights)} == {wide} and compute_dtype == getattr(torch, dtype)
        assert input_precision == ("tf32" if narrow else "high-prec")
        return gru(x, *weights), None

    module = "torchrl.modules.tensordict_module._rnn_triton"
    stand_in(monkeypatch, module, gru_triton=gru_triton, _gru_fwd_kernel=kernel, _gru_bwd_kernel=kernel)
    inputs = [t.to(getattr(torch, dtype)).requires_grad_() for t in GRU.inputs(SEQUENCES)]
    comparison = sweeps.accuracy.Comparison(peers.torchrl_gru, gru, "forward_backward")
    assert comparison.complete(inputs) < (ALLOWED_ERROR | {"float64": 1e-12})[dtype]
    assert peers.torchrl_gru(*inputs).dtype == inputs[0].dtype and kernel.keys == ["T", "H", "B"]


def agrees(call, work, shape, dtype, direction="forward_backward"):
    """A call, and its gradients, beside float64; the result has the dtype of the inputs."""
    inputs = [t.to(getattr(torch, dtype)).requires_grad_() for t in work.inputs(shape)]
    comparison = sweeps.accuracy.Comparison(call, work.reference, direction)
    assert comparison.complete(inputs) < ALLOWED_ERROR[dtype]
    assert call(*inputs).dtype == inputs[0].dtype


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


@on_gpu_with("liger-kernel", "Liger's")
def test_liger_computes_geglu_and_its_gradients():
    agrees(peers.liger_geglu, GEGLU, {"batch": 64, "width": 128}, "bfloat16")


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


@on_gpu_with("torchrl", "TorchRL's")
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("width", [40, 128])
def test_torchrl_computes_the_layer_and_its_gradients(width, dtype):
    agrees(peers.torchrl_gru, GRU, {"batch": 33, "time": 20, "width": width}, dtype)


def test_a_peer_is_tuned_at_these_shapes_forward_and_backward_where_there_is_a_gpu_and_the_package(
    monkeypatch,
):
    seen = []

    def call(log_a, b):
        seen.append(tuple(b.shape))
        return log_recurrence(log_a, b)

    def missing(*_):
        raise peers.MissingError("fla-core")

    contenders = [Contender("peer", each, LOG_RECURRENCE) for each in (missing, call)]
    for has_gpu in (False, True):
        monkeypatch.setattr("labkit.gpu.available", lambda has_gpu=has_gpu: has_gpu)
        assert seen == []
        with torch.no_grad():
            peers.tune(contenders, [SEQUENCES, SEQUENCES | {"time": 4}])
    assert seen == [(2, 5, 3), (2, 4, 3)]
