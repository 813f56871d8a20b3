"""Kernels at sizes that no memory here holds: what their programs at the corners of the grid do."""

import re
from pathlib import Path

import pytest
from test_judge import LESSONS, found

from labkit import gpu, notebooks
from labkit.exercises import judge, vast

VAST = [
    (lesson, name)
    for lesson in LESSONS[5:]  # the first five do not ask for 64 bits
    for name, each in judge.find(lesson).items()
    if each.vast
]


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize(("lesson", "name"), VAST)
def test_addresses_in_32_bits_are_found_where_the_solution_has_64(lesson, name, tmp_path):
    solution = notebooks.solution_cells(notebooks.resolve(lesson))[name]
    narrow = re.sub(r"\.to\(tl\.int64\)", "", re.sub(r"tl\.cast\((\w+), tl\.int64\)", r"\1", solution))
    finding = found(lesson, name, narrow, tmp_path)
    assert (finding.status, finding.mistake) == ("wrong", "32-bits"), finding
    assert "elements away from any tensor" in finding.observed


@pytest.mark.usefixtures("one_process")
def test_a_grid_that_does_not_grow_with_the_tensor_is_found(tmp_path):
    solution = notebooks.solution_cells(notebooks.resolve("01"))["affine"]
    capped = solution.replace("= triton.cdiv(x.numel(), 1024)", "= min(200, triton.cdiv(x.numel(), 1024))")
    assert capped != solution
    finding = found("01_launch_overhead", "affine", capped, tmp_path)
    assert (finding.status, finding.mistake) == ("wrong", "left-out-at-size"), finding


@pytest.fixture
def softmax():
    """A task with vast cases, and its solution."""
    exercise = judge.find("11_row_reductions")["softmax"]
    return exercise, getattr(judge.solutions("11_row_reductions"), exercise.answer)


@pytest.mark.skipif(gpu.available(), reason="it runs in this process, where kernels are compiled for the GPU")
def test_where_no_such_address_space_is_handed_out_nothing_is_said(softmax, monkeypatch):
    exercise, solution = softmax
    found, calls = vast.run(exercise, solution, Path("cell.py"))
    assert found is None and len(calls) == len(exercise.vast) + 1

    def refuse(*_, **__):
        raise OSError("Cannot allocate memory")

    monkeypatch.setattr(vast.mmap, "mmap", refuse)
    assert vast.run(exercise, solution, Path("cell.py")) == (None, [])


def test_what_an_answer_raises_at_such_a_size_alone_is_told(softmax):
    exercise, solution = softmax

    def answer(x):
        if len(x) > 2**20:
            raise OverflowError("too many rows")
        return solution(x)

    found, _ = vast.run(exercise, answer, Path("cell.py"))
    assert found is not None and found.status == "error"
    assert "OverflowError: too many rows (With x (33554433, 70)" in found.observed
