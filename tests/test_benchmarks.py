"""The benchmarks: sizes that are drawn, contenders that are right, rows, and the page made of them."""

import itertools
import json
import shutil
from dataclasses import replace
from importlib import import_module

import pytest
import torch

from benchmarks import __main__, page, run
from labkit import gpu
from labkit.measure import clocks
from labkit.measure.clocks import NotTimed, Timing

OPERATIONS = {name: import_module(f"benchmarks.{name}").OPERATION for name in __main__.OPERATIONS}
TINY = {"batch": 8, "width": 16, "out": 24, "hidden": 24, "groups": 4, "time": 5}
FIELDS = {
    *("suite", "contender", "direction", "dtype", "shape", "clock", "cache", "median_us", "p20_us", "p80_us"),
    *("copy_us", "device", "torch", "triton", "date", "note", "peer", "seed"),
}


@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS)
def test_the_same_seed_draws_the_same_sizes_within_the_ranges(operation):
    for suite, number in itertools.product((*operation.ranges, "small"), range(4)):
        size, dtype = operation.draw(suite, 0, number)
        assert (size, dtype) == operation.draw(suite, 0, number) != operation.draw(suite, 1, number)
        for axis, (low, high, step) in operation.ranges.get(suite, operation.ranges[""]).items():
            assert low <= size[axis] <= high and size[axis] % step == 0
        moved = operation.work.min_bytes(size, getattr(torch, dtype).itemsize, "forward")
        least, most = run.SMALL if suite == "small" else run.LARGE
        assert least <= moved <= most


@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS)
def test_every_contender_is_right(operation):
    torch.manual_seed(0)
    size = {axis: TINY[axis] for axis in operation.ranges[""]}
    for dtype, direction in itertools.product(run.DTYPES, operation.directions):
        drawn = operation.work.inputs(size)
        inputs = tuple(t.to(gpu.device(), getattr(torch, dtype)).requires_grad_() for t in drawn)
        wanted = run.exact(operation.work, inputs)
        for name, call in operation.contenders.items():
            if name not in run.PEERS and operation.only.get(name, lambda *_: True)(direction, dtype, size):
                assert not run.check(operation.whole(name, call), inputs, wanted, direction), name


def measured(monkeypatch, operation, suite, outcome, **options):
    """The rows of one tiny size, where every call that is timed comes to ``outcome``."""
    monkeypatch.setattr(run, "LARGE", (0, 2**40))
    monkeypatch.setattr(run, "SMALL", (0, 2**40))
    monkeypatch.setattr(clocks, "measure", lambda calls, **how: {name: outcome(**how) for name in calls})
    ranges = {axis: (TINY[axis], TINY[axis], 1) for axis in operation.ranges[""]}
    return list(run.measure_size(replace(operation, ranges={"": ranges}), suite, 0, 1, **options))


def timing(clock, cache):
    return Timing(clock, cache, 2.0, 1.0, 3.0, 5)


def test_a_contender_that_is_wrong_or_fails_is_a_row_with_a_note(monkeypatch):
    calls = {
        "labkit": OPERATIONS["affine"].contenders["labkit"],
        "wrong": lambda x, weight, bias: x * weight - bias,
        "flat": lambda x, weight, bias: (x * weight + bias).flatten(),
        "fails": lambda x, weight, bias: x @ weight[:3],
    }
    affine = replace(OPERATIONS["affine"], contenders=calls)
    rows = measured(monkeypatch, affine, "", timing)
    assert [(row["contender"], row["median_us"]) for row in rows[:4]] == [
        *[("labkit", 2.0), ("wrong", None), ("flat", None), ("fails", None)]
    ]
    assert [row["note"].partition(":")[0] for row in rows[4:]] == ["", *2 * ["wrong result"], "RuntimeError"]
    assert all(set(row) >= FIELDS and row["clock"] == "graph" for row in rows)
    rows = measured(monkeypatch, affine, "", lambda **_: NotTimed("no memory"), clock="host")
    assert (rows[0]["note"], rows[0]["median_us"], rows[0]["clock"]) == ("no memory", None, "host")


def test_small_sizes_have_both_clocks_and_peers_that_are_not_installed_have_a_note(monkeypatch):
    contenders = OPERATIONS["linear_recurrence"].contenders
    few = {name: contenders[name] for name in ("labkit", "fla, in chunks")}
    recurrence = replace(OPERATIONS["linear_recurrence"], contenders=few)
    monkeypatch.setitem(few, "fla, in chunks", lambda *_: import_module("not_installed"))
    rows = measured(monkeypatch, recurrence, "small", timing, peers=True)
    assert [row["clock"] for row in rows] == 2 * ["graph", "graph", "host", "host"]
    assert [row["note"].partition(":")[0] for row in rows] == 4 * ["", "ModuleNotFoundError"]
    assert len(measured(monkeypatch, recurrence, "small", timing)) == 4


def test_without_a_gpu_nothing_is_timed(monkeypatch):
    monkeypatch.setattr(gpu, "available", lambda: False)
    monkeypatch.setattr("sys.argv", ["benchmarks", "affine"])
    with pytest.raises(SystemExit, match="needs a GPU"):
        __main__.main()


def test_the_page_says_how_ours_stands_to_the_best_other():
    same = {"suite": "affine", "direction": "forward", "dtype": "float32", "device": "card", "clock": "graph"}
    times = [("labkit", 9.0, 8), ("labkit", 3.0, 8), ("eager", 2.0, 8), ("Liger", 6.0, 8), ("bmm", None, 8)]
    times += [("labkit", 2.0, 9), ("eager", 4.0, 9)]
    rows = [
        same | {"contender": name, "median_us": us, "shape": {"width": width}, "copy_us": 1.0}
        for name, us, width in times
    ]
    rows.append(rows[0] | {"clock": "host", "copy_us": None})
    by_graph, by_host = page.groups(page.cases(rows)).to_numpy().tolist()
    assert by_graph == [
        "affine",
        "forward",
        "float32",
        2,
        1.0,
        1.5,
        pytest.approx(5 / 12),
        pytest.approx(1 / 3),
    ]
    assert by_host[0] == "affine, host" and str(by_host[4:]) == "[nan, nan, nan, nan]"


def test_the_page_and_the_readme_are_those_of_what_is_recorded(tmp_path):
    files = sorted(page.RECORDED.glob("*.jsonl"))
    assert files and all(set(json.loads(line)) >= FIELDS for path in files for line in path.open())
    (tmp_path / "docs").mkdir()
    for name in ("README.md", "docs/benchmark.md"):
        shutil.copy(page.ROOT / name, tmp_path / name)
    page.make(root=tmp_path)
    assert (tmp_path / "docs" / "benchmark.png").read_bytes().startswith(b"\x89PNG")
    for name in ("README.md", "docs/benchmark.md"):  # else run python -m benchmarks.page
        assert (tmp_path / name).read_text() == (page.ROOT / name).read_text(), (
            "run python -m benchmarks.page"
        )
    with pytest.raises(ValueError, match="has not one line"):
        page.renew(files[0], "")
