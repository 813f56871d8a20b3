"""Lesson 5: what it teaches, the kernel of one block and the graph for one shape; its ladder's modules."""

from types import SimpleNamespace

import pytest
import torch
from taught import GPU, INTERPRETED, assert_no_backward, bf16, counted, fp32

from labkit import gpu
from labkit.exercises import simulated_gpu
from labkit.lessons import notebooks
from labkit.measure import correctness
from labkit.profiling import codegen
from labkit.workloads.stack import STACK, block, stack

pytestmark = pytest.mark.usefixtures("cache")


@pytest.fixture(scope="module")
def lesson(cache):
    return notebooks.load("05_cuda_graphs")


def drawn(shape):
    x, weight, bias, gain = STACK.inputs({"batch": shape[0], "width": shape[1], "depth": 1})
    return x.cpu(), weight[0].cpu(), bias[0].cpu(), gain[0].cpu()


def test_the_block_is_right_and_refuses_to_drop_a_gradient(lesson):
    shapes = ((33, 64), (5, 20), (1, 1), (40, 96), (0, 8))
    correctness.check(lesson.one_block, block, drawn, shapes=shapes, gradients=False)
    assert_no_backward("one_block", lesson.one_block, [t.to(gpu.device()) for t in drawn((4, 16))])


@INTERPRETED
def test_every_row_of_a_block_is_read_and_written_once(lesson):
    (launch,) = counted(lesson.one_block, *drawn((20, 24)))
    assert launch.bytes_written == 4 * 20 * 24
    assert launch.bytes_read == 4 * (20 * 24 + 2 * 24 * (24 + 2)), "two programs, each with the weight"


@pytest.mark.parametrize(
    ("target", "W", "dtype"), [("sm_80", 256, bf16), ("sm_90", 256, bf16), ("sm_120", 100, fp32)]
)
def test_the_block_compiles_and_fits(lesson, target, W, dtype):
    tensor = torch.empty(64, dtype=dtype, device="meta")
    sizes = dict(W=W, BM=16, BW=max(16, 1 << (W - 1).bit_length()), num_warps=8)
    code = codegen.compile(lesson.block_kernel, [*[tensor] * 5, 4096], target=target, **sizes)
    assert code.spills == 0 and code.matrix and code.shared_bytes <= 160 * 1024


def test_the_fused_stack_computes_what_the_plain_one_does(lesson):
    x, *weights = (t.to(gpu.device()) for t in STACK.inputs({"batch": 5, "width": 20, "depth": 2}))
    plain, fused = lesson.Stack(*weights), lesson.FusedStack(*weights)
    torch.testing.assert_close(plain(x), stack(x, *weights))
    torch.testing.assert_close(fused(x), plain(x), rtol=1e-4, atol=1e-5)
    upstream = torch.randn_like(x)
    for one in (plain, fused):
        one(x).mul(upstream).sum().backward()
    for mine, theirs in zip(fused.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-3, atol=1e-4)


@INTERPRETED
def test_the_graph_of_one_shape_follows_the_rules(lesson, monkeypatch):
    machine = simulated_gpu.SimulatedGpu()
    monkeypatch.setattr(lesson, "torch", SimpleNamespace(cuda=machine.cuda))
    weight, x = torch.randn(4, 4), torch.randn(3, 4)
    with torch.no_grad(), machine:
        before = x.clone()
        step = lesson.OneGraph(lambda x: x @ weight, x)
        for _ in range(3):
            new = torch.randn(3, 4)
            assert torch.equal(step(new), new @ weight)
        assert torch.equal(x, before), "x stays the caller's"
    assert (machine.captures, machine.replays, machine.conflicts) == (1, 3, [])
    assert machine.unwaited() == 0


@GPU
def test_the_graph_of_one_shape_gives_what_the_call_gives(lesson):
    x, *weights = STACK.inputs({"batch": 64, "width": 32, "depth": 3})
    step = lesson.OneGraph(lambda x: stack(x, *weights), x)
    for _ in range(3):
        new = torch.randn_like(x)
        torch.testing.assert_close(step(new), stack(new, *weights), rtol=1e-5, atol=1e-5)
