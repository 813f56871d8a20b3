"""Lesson 9: the network's rungs, from PyTorch's loop to three kernels, against the same reference."""

import pytest
import torch
from products import assert_close, bf16, fp32
from recurring import gradients
from taught import GPU, INTERPRETED

from labkit import gpu
from labkit.kernels import geglu_mlp, grouped_linear
from labkit.lessons import notebooks
from labkit.measure import correctness
from labkit.profiling import launch_counts
from labkit.workloads import network as work

pytestmark = pytest.mark.usefixtures("cache")
SHAPE = {"batch": 3, "time": 5, "width": 32}
RUNGS = {
    "eager": lambda lesson: lesson.network(),
    "operators": lambda lesson: lesson.network(cell=lesson.cell_of_operators),
    "GeGLU": lambda lesson: lesson.network(cell=lesson.cell_of_operators, mlp=geglu_mlp),
    "heads": lambda lesson: lesson.network(heads=grouped_linear),
    "labkit": lambda lesson: lesson.network(**lesson.PARTS),
    "three kernels": lambda lesson: lesson.whole,
}


@pytest.fixture(scope="module")
def lesson(cache):
    return notebooks.load("09_microsecond_ledger")


def inputs_of(shape=SHAPE, dtype=fp32):
    torch.manual_seed(0)
    return [t.to(gpu.device(), dtype) for t in work.NETWORK.inputs(shape)]


@pytest.mark.parametrize("rung", RUNGS)
def test_every_rung_computes_the_network_and_its_gradients(lesson, rung):
    inputs = inputs_of()
    made = gradients(RUNGS[rung](lesson), inputs)
    for got, want in zip(made, gradients(work.network, [t.double() for t in inputs]), strict=True):
        assert_close(got, want, roundings=8)


def test_in_half_precision_our_kernels_are_off_no_further_than_eager(lesson):
    inputs = inputs_of(dtype=bf16)
    doubles = [t.double() for t in inputs]
    exact = gradients(work.network, doubles)
    far = [
        max(
            correctness.relative_error(got, want)
            for got, want in zip(gradients(RUNGS[name](lesson), inputs), exact, strict=True)
        )
        for name in ("labkit", "eager")
    ]
    assert far[0] < 2 * far[1]
    three, eager = (
        correctness.relative_error(RUNGS[n](lesson)(*inputs), exact[0]) for n in ("three kernels", "eager")
    )
    assert three < 2 * eager


@INTERPRETED
def test_the_last_rung_is_three_kernels_that_write_nothing_twice(lesson):
    B, T, H = 2, 33, 32
    inputs = inputs_of({"batch": B, "time": T, "width": H}, bf16)
    found = launch_counts.count(lambda: lesson.whole(*inputs)).launches
    assert [launch.name for launch in found] == ["gates_kernel", "cell_kernel", "outputs_kernel"]
    assert [one.bytes_written for one in found] == [2 * B * T * n for n in (2 * H, H, work.OUTPUTS)]


@GPU
@pytest.mark.parametrize("rung", ["labkit", "three kernels"])
def test_in_a_graph_the_network_is_the_same(lesson, rung):
    x, *weights = inputs_of({"batch": 64, "time": 64, "width": 128}, bf16)
    call = RUNGS[rung](lesson)
    graphed = lesson.replayed(call)
    with torch.no_grad():
        for _ in range(3):
            assert torch.equal(graphed(x, *weights), call(x, *weights))
            x.normal_()
