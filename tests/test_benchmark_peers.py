"""Contenders from packages that need not be there."""

import sys
from importlib.metadata import PackageNotFoundError, version
from types import SimpleNamespace

import pytest
import torch

from benchmarks import peers
from benchmarks.linear_recurrence import FROM_LOGARITHMS
from labkit import gpu
from labkit.measure import session
from labkit.work import linear_recurrence, rms_norm

ROWS, SEQUENCES = {"batch": 10, "width": 3}, {"batch": 2, "time": 5, "width": 3}


def installed(package):
    try:
        return bool(version(package))
    except PackageNotFoundError:
        return False


def on_gpu_with(package, whose):
    return pytest.mark.skipif(
        not (gpu.available() and installed(package)),
        reason=f"{whose} kernels need a GPU, and {package} installed",
    )


def agrees(call, work, shape, dtype="float32", direction="forward_backward"):
    """A call, and its gradients, are right beside float64; the result has the dtype of the inputs."""
    given = session.drawn(work, shape, getattr(torch, dtype), direction)
    way = session.Way("peer", call, work)
    assert not session.what_is_wrong(way, given, direction, session.ALLOWED[dtype])


def stand_in(monkeypatch, module, **names):
    """A module that has these names only."""
    monkeypatch.setitem(sys.modules, module, SimpleNamespace(**names))


def test_a_package_is_called_with_what_its_kernel_takes(monkeypatch):
    def liger(x, weight, *options):
        assert options == (peers.EPS, 0.0, "gemma", False), "in float32, and in memory of its own"
        return rms_norm.reference(x, weight)

    stand_in(monkeypatch, "liger_kernel.ops.rms_norm", LigerRMSNormFunction=SimpleNamespace(apply=liger))
    agrees(peers.liger_rms_norm, rms_norm, ROWS)
    fla = {"fused_recurrent_hgrn": lambda x, g: (linear_recurrence.reference(g.exp(), x), None)}
    stand_in(monkeypatch, "fla.ops.hgrn", **fla)
    agrees(peers.fla_recurrence, FROM_LOGARITHMS, SEQUENCES)


@pytest.mark.parametrize(("time", "padded"), [(3, 4), (4, 4), (5, 8)])
def test_the_scan_is_padded_for_gradients_alone(time, padded, monkeypatch):
    sizes = []

    def scan(forget, inputs):
        assert forget.is_contiguous() and inputs.is_contiguous()
        sizes.append(tuple(inputs.shape))
        states = linear_recurrence.reference(forget.transpose(1, 2), inputs.transpose(1, 2))
        return states.transpose(1, 2).contiguous()

    stand_in(monkeypatch, "accelerated_scan.scalar", scan=scan)
    monkeypatch.setattr(peers, "SCAN_STEPS", 4)
    shape = SEQUENCES | {"time": time}
    agrees(peers.accelerated_scan, linear_recurrence, shape)
    assert set(sizes) == {(2, 3, padded)}
    sizes.clear()
    agrees(peers.accelerated_scan, linear_recurrence, shape, direction="forward")
    assert set(sizes) == {(2, 3, time)}


@on_gpu_with("liger-kernel", "Liger's")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("width", [128, 640])
def test_liger_computes_the_norm_and_its_gradients_and_leaves_the_upstream_one(width, dtype):
    agrees(peers.liger_rms_norm, rms_norm, {"batch": 132, "width": width}, dtype)
    inputs = [t.requires_grad_() for t in rms_norm.inputs(ROWS)]
    upstream = torch.randn_like(inputs[0])
    before = upstream.clone()
    peers.liger_rms_norm(*inputs).backward(upstream)
    assert torch.equal(upstream, before)


@on_gpu_with("fla-core", "flash-linear-attention's")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("time", [100, 300])
def test_fla_computes_the_recurrence_and_its_gradients(time, dtype):
    agrees(peers.fla_recurrence, FROM_LOGARITHMS, {"batch": 3, "time": time, "width": 80}, dtype)


@on_gpu_with("accelerated-scan", "accelerated-scan's")
@pytest.mark.parametrize("direction", ["forward", "forward_backward"])
@pytest.mark.parametrize("time", [100, peers.SCAN_STEPS, peers.SCAN_STEPS + 1])
def test_accelerated_scan_computes_the_recurrence_and_its_gradients(time, direction):
    shape = {"batch": 3, "time": time, "width": 20}
    agrees(peers.accelerated_scan, linear_recurrence, shape, "float32", direction)
