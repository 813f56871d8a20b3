"""Lesson 5: its taught kernels, solved, and its execution. The finished ones are tried in tests/kernels."""

import re

import pytest
import torch
from counting import calls_checked
from taught import GPU, INTERPRETED, assert_no_backward, bf16, counted, drawn, examine, fp32

from labkit.workloads.stack import STACK, block, stack

pytestmark = pytest.mark.usefixtures("cache")
NAME = "old/05_cuda_graphs"


def stacked(shape, depth=3):
    return [each.cpu() for each in STACK.inputs({"batch": shape[0], "width": shape[1], "depth": depth})]


def single(shape):
    x, *three = stacked(shape, depth=1)
    return x, *(each[0] for each in three)


def test_the_block_is_right_and_refuses_to_drop_a_gradient(lesson):
    examine(lesson.one_block, block, single, (33, 64), (5, 20), (1, 1), (40, 96), layouts=("strided",))
    assert_no_backward("one_block", lesson.one_block, drawn(single, 4, 16))


@pytest.mark.parametrize("dtype", [fp32, bf16])
def test_the_network_is_right_beyond_one_program_and_in_any_depth(lesson, dtype):
    for depth in (1, 3):
        shapes = (33, 64), (5, 20), (1, 1), (40, 96)
        examine(
            lesson.network, stack, lambda shape, depth=depth: stacked(shape, depth), *shapes, dtypes=(dtype,)
        )
    assert_no_backward("network", lesson.network, drawn(stacked, 4, 16))


@INTERPRETED
def test_rows_are_read_and_written_once_and_each_program_reads_every_weight(lesson):
    (launch,) = counted(lesson.network, *drawn(stacked, 20, 24))
    assert launch.bytes_written == 4 * 20 * 24
    assert launch.bytes_read == 4 * (20 * 24 + 2 * 3 * 24 * (24 + 2)), "two programs, three blocks"


@GPU
def test_the_exercises_capture_gives_what_the_call_gives(lesson):
    x, *weights = STACK.inputs({"batch": 64, "width": 32, "depth": 3})
    step = lesson.graphed(torch.cuda, lambda x: stack(x, *weights), x)
    for _ in range(3):
        new = torch.randn_like(x)
        torch.testing.assert_close(step(new), stack(new, *weights), rtol=1e-5, atol=1e-5)


# --- the lesson as a whole ----------------------------------------------------------------------------------


def test_it_runs_to_its_end_in_silence_and_checks_the_block(checks_passed):
    assert checks_passed.keys() == {"one_block"}
    assert checks_passed["one_block"] >= sum(calls_checked(shape) for shape in ((33, 64), (5, 20)))


def test_what_goes_wrong_does_so_on_every_machine(outputs):
    said = "".join(output.get("text", "") for output in outputs)
    for line in (
        "the replay computes what the call does: True",
        "y belongs to the new x:  False",
        "after a copy it does:    True",
        "what was kept is intact: False",
        "the first call is in the capture: refused\nthe first call was made before: captured",
        "times the number and the tensor: 1.0 3.0",
        "the same random numbers: False",
        "4 rows\n  yours:       (4, 16) torch.float32, calls: 2\n  GraphedStep: (4, 16)",
        "1 row\n  yours:       (4, 16) torch.float32, calls: 3\n  GraphedStep: (1, 16)",
        "GraphedStep: (4, 16) torch.float32, calls: 1\n",
        "GraphedStep: (1, 16) torch.float32, calls: 2\n",
        "GraphedStep: input 0: is torch.float64, should be torch.float32 as in the first call",
        "GraphedStep: input 0: requires a gradient, and a replay gives none",
        "exhibit 1: all the same: True",
    ):
        assert line in said, line


def test_a_training_step_is_replayed_on_every_machine_and_follows_its_rate(outputs):
    said = "".join(output.get("text", "") for output in outputs)
    still, learning = (
        [float(loss) for loss in re.search(rf"rate {rate}: losses (.*)", said)[1].split()]
        for rate in ("0.0", "0.01")
    )
    assert len({*still}) > 1 and max(still) - min(still) < 0.1 * still[0], "dropout alone changes it"
    assert learning[-1] < 0.9 * min(still)
