"""Races: a learner's kernel at size in a process of its own, and what is counted without a GPU."""

from contextlib import nullcontext

import pytest
import torch

from labkit import gpu, notebooks
from labkit.exercises import judge, race

LESSON = "01_launch_overhead"
SOLUTIONS = notebooks.solution_cells(notebooks.resolve(LESSON))
AFFINE = SOLUTIONS["affine"] + '\n\n\ntasks.check("affine", affine)\n'
STORE = "tl.store(y + at, "
ON_GPU = pytest.mark.skipif(not gpu.available(), reason="a kernel at size needs a GPU to run on")


def problem(source, folder):
    file = folder / "answer.py"
    file.write_text(source)
    return race.problem_at_size(LESSON, judge.find(LESSON)["affine"], file)


INSIDE = "    inside = at < count"


@ON_GPU
@pytest.mark.parametrize(
    ("old", "new", "status", "said"),
    [
        (STORE, STORE, None, ""),
        (STORE, "tl.store(y + at + 10**11, ", "crashed", "failed"),
        (STORE, "tl.store(y + at + 3 * 10**7, ", "wrong", "outside of its tensors"),
        ("x.numel(), x.shape[-1]", "min(x.numel(), 2**14), x.shape[-1]", "wrong", "elements are wrong"),
        (
            INSIDE,
            INSIDE + "\n    while count > 0:\n        tl.store(y, 0.0)",
            "stopped",
            "5 s",
        ),  # with an effect
    ],
    ids=["right", "wild", "far outside", "wrong at size", "endless"],
)
def test_at_size_an_accident_is_a_verdict(monkeypatch, tmp_path, old, new, status, said):
    assert old in AFFINE
    monkeypatch.setattr(race, "LIMIT_S", 60.0 if status != "stopped" else 5.0)
    found = problem(AFFINE.replace(old, new), tmp_path)
    assert (found and found.status) == status and (found is None or said in found.observed)
    assert gpu.available() and problem(AFFINE, tmp_path) is None, "this process and the GPU are well"


def test_a_run_at_size_ends_after_its_limit(monkeypatch, tmp_path):
    def run(function, *args, seconds):
        assert seconds == race.LIMIT_S == 60
        raise TimeoutError

    monkeypatch.setattr(gpu, "available", lambda: True)
    monkeypatch.setattr(gpu, "locked", nullcontext)
    monkeypatch.setattr(race.child_process, "run", run)
    found = problem(AFFINE, tmp_path)
    assert found.status == "stopped" and "after 60 s" in found.observed


@pytest.mark.skipif(gpu.available(), reason="launches are counted where kernels are interpreted")
def test_of_a_race_backward_only_the_backward_pass_is_counted():
    def product(x, w):
        return x * w

    given = [torch.randn(4, 8), torch.randn(4, 8)]
    bytes_each = given[0].nbytes
    forward = race.moved(*race.counted(product, given, "forward"))
    assert forward == (1, 2 * bytes_each, bytes_each, 3 * bytes_each)
    backward = race.moved(*race.counted(product, given, "backward"))  # dx = dy * w, and dw = dy * x
    assert backward == (2, 4 * bytes_each, 2 * bytes_each, 6 * bytes_each)
