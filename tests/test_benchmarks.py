"""The benchmarks: sizes that are drawn, contenders that are right, rows, and the page made of them."""

import itertools
import json
import shutil
from dataclasses import replace
from importlib import import_module

import pytest
import simulated
import torch

from benchmarks import __main__, geglu_mlp, min_gru, page, run
from labkit import gpu
from labkit.measure import clocks, session
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
        for way in operation.ways(direction, dtype, size, peers=False):
            given = session.drawn(way.work, size, getattr(torch, dtype), direction)
            assert not session.what_is_wrong(way, given, direction, run.ALLOWED_ERROR[dtype]), way.name


@pytest.mark.parametrize("work", [geglu_mlp.WORK, geglu_mlp.APART, min_gru.WORK], ids=lambda work: work.name)
def test_a_work_of_the_benchmarks_own_moves_each_tensor_once(work):
    given = work.inputs(TINY)
    y = work.reference(*given)
    kept = given if work is not min_gru.WORK else [given[0], y]  # from z and the states the rest is known
    read = sum(t.numel() for t in given)
    assert work.min_bytes(TINY, 2, "forward") == 2 * (read + y.numel())
    assert work.min_bytes(TINY, 2, "backward") == 2 * (sum(t.numel() for t in kept) + y.numel() + read)


def tiny(operation, **changes):
    """The operation with one size in its ranges."""
    ranges = {axis: (TINY[axis], TINY[axis], 1) for axis in operation.ranges[""]}
    return replace(operation, ranges={"": ranges}, **changes)


@pytest.fixture
def simulated_gpu(monkeypatch):
    """A GPU in virtual time, for which no size is too small."""
    monkeypatch.setattr(run, "LARGE", (0, 2**40))
    monkeypatch.setattr(run, "SMALL", (0, 2**40))
    return simulated.install(monkeypatch.setattr)


def measured(monkeypatch, operation, suite, outcome, **options):
    """The rows of one tiny size, where every call that is timed comes to ``outcome``."""
    monkeypatch.setattr(clocks, "measure", lambda calls, **how: {name: outcome(**how) for name in calls})
    return list(run.measure_size(operation, suite, 0, 1, **options))


def timing(clock, cache):
    return Timing(clock, cache, 2.0, 1.0, 3.0, 5)


@pytest.mark.usefixtures("simulated_gpu")
def test_a_contender_that_is_wrong_or_fails_is_a_row_with_a_note(monkeypatch):
    calls = {
        "labkit": OPERATIONS["affine"].work.reference,
        "wrong": lambda x, weight, bias: x * weight - bias,
        "flat": lambda x, weight, bias: (x * weight + bias).flatten(),
        "fails": lambda x, weight, bias: x @ weight[:3],
        "large": simulated.out_of_memory,
    }
    affine = tiny(OPERATIONS["affine"], contenders=calls)
    rows = measured(monkeypatch, affine, "", timing)
    assert [(row["contender"], row["median_us"]) for row in rows[:5]] == [
        *[("labkit", 2.0), ("wrong", None), ("flat", None), ("fails", None), ("large", None)]
    ]
    assert [row["note"].partition(":")[0] for row in rows[:5]] == [
        *["", "wrong result", "wrong result", "RuntimeError", "out of memory"]
    ]
    assert [bool(row["note"]) for row in rows[5:]] == [False, True, True, True, True], "backward"
    assert all(set(row) >= FIELDS and row["clock"] == "graph" for row in rows)
    rows = measured(monkeypatch, affine, "", lambda **_: NotTimed("no memory"))
    assert (rows[0]["note"], rows[0]["median_us"], rows[0]["copy_us"]) == ("no memory", None, None)


@pytest.mark.usefixtures("simulated_gpu")
def test_small_sizes_have_both_clocks_and_peers_that_are_not_installed_have_a_note(monkeypatch):
    calls = {
        "labkit": OPERATIONS["linear_recurrence"].work.reference,
        "accelerated-scan": lambda *_: import_module("not_installed"),
    }
    recurrence = tiny(OPERATIONS["linear_recurrence"], contenders=calls)
    rows = measured(monkeypatch, recurrence, "small", timing, peers=True)
    assert [row["clock"] for row in rows] == 2 * ["graph", "graph", "host", "host"]
    assert [row["note"].partition(":")[0] for row in rows] == 4 * ["", "ModuleNotFoundError"]
    assert all(
        row["cache"] == "warm" and bool(row["copy_us"]) is (row["clock"] == "graph") for row in rows[::2]
    )
    assert len(measured(monkeypatch, recurrence, "small", timing)) == 4


@pytest.mark.parametrize("name", ["geglu_mlp", "gru"])
@pytest.mark.usefixtures("simulated_gpu")
def test_forward_and_backward_together_move_the_bytes_of_both_beside_a_copy(name, monkeypatch):
    """Of a product cuBLAS is the roof, and no copy."""
    operation = tiny(OPERATIONS[name], contenders={"labkit": OPERATIONS[name].work.reference})
    *_, last = measured(monkeypatch, operation, "", timing)
    size, _ = operation.draw("", 0, 1)
    both = sum(operation.work.min_bytes(size, 4, each) for each in ("forward", "backward"))
    assert last["direction"] == "forward_backward" and not last["note"]
    kibibytes = -(-both // 1024)
    assert last["copy_us"] == (
        None if name == "geglu_mlp" else pytest.approx(2 * both / (1024 * kibibytes), abs=1e-4)
    )


def test_the_command_measures_and_appends_the_rows_to_a_file(monkeypatch, simulated_gpu, tmp_path, capsys):
    def taking(device_us):
        def call(x, weight, bias):
            simulated_gpu.launch(1.0, device_us)
            return x * weight + bias

        return call

    affine = import_module("benchmarks.affine")
    contenders = {"labkit": taking(400.0), "eager": taking(800.0)}
    monkeypatch.setattr(
        affine, "OPERATION", tiny(affine.OPERATION, contenders=contenders, directions=("forward",))
    )
    out = tmp_path / "new" / "rows.jsonl"
    monkeypatch.setattr("sys.argv", ["benchmarks", "affine", "--sizes", "2", "--out", str(out)])
    __main__.main()
    rows = page.read(out)
    times = {"labkit": 400.0, "eager": 800.0}
    assert [row["suite"] for row in rows] == 2 * ["affine"] + 4 * ["affine/small"] + 2 * ["affine"] + 4 * [
        "affine/small"
    ]
    assert all(abs(row["median_us"] - times[row["contender"]]) < 10 for row in rows)
    assert {row["device"] for row in rows} == {"Simulated"}
    assert "12 rows are in" in capsys.readouterr().out


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
