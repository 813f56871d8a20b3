"""Sweeps in virtual time: rows, gaps, what is kept of an interruption, and the figures taken from a table."""

import functools
import importlib.util
import itertools
import shutil
import textwrap
import threading
import time
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from enum import Enum
from typing import NamedTuple

import pytest
import torch
from reusing import Reusing
from simulated import DOUBLING, doubling, install, out_of_memory
from taped import recorded

from labkit import accuracy, clocks, code_hash, device, machine, places, rows, sweeps, tables
from labkit.measure import lock
from labkit.mlp_works import GEGLU, geglu
from labkit.sweeps import Contender, Work

POINTS = [{"batch": 2, "width": width} for width in (16, 32, 64)]


@pytest.fixture(autouse=True)
def folders(tmp_path, monkeypatch):
    monkeypatch.setenv("LABKIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv(rows.TAPE, raising=False)
    monkeypatch.setattr(places, "RECORDED", tmp_path / "recorded")
    return tmp_path


@pytest.fixture
def gpu(monkeypatch):
    """A machine in virtual time whose faster copy moves 10 bytes a microsecond."""
    return install(monkeypatch.setattr)


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(device, "has_gpu", lambda: False)


def failing(gpu, at, how, name="failing"):
    """Right, but at one width."""

    def call(x):
        gpu.launch(4.0, 50.0)
        return how(x) if x.shape[1] == at else 2 * x

    return Contender(name, call, DOUBLING)


def wrong(x):
    return 2.01 * x


def error(x):
    raise ValueError("width: too odd")


# Live


def test_every_contender_is_measured_at_every_point(gpu):
    table = sweeps.run("suite", [doubling(gpu), doubling(gpu, "slow", 3.0)], POINTS)
    assert table[["contender", "batch", "width"]].to_numpy().tolist() == [
        [name, 2, width] for width in (16, 32, 64) for name in ("labkit", "slow")
    ]
    assert table["median_us"].tolist() == pytest.approx([16, 48, 32, 96, 64, 192])


def test_a_row_holds_everything_that_the_contract_asks_for(gpu):
    before = datetime.now(UTC).replace(microsecond=0)
    table = sweeps.run(
        "lesson/suite", [doubling(gpu)], [{"batch": 2, "width": 16}], dtype="float16", cache="warm"
    )
    (row,) = table.to_dict("records")
    assert {name: row[name] for name in ("suite", "contender", "direction", "dtype", "shape")} == {
        "suite": "lesson/suite",
        "contender": "labkit",
        "direction": "forward",
        "dtype": "float16",
        "shape": {"batch": 2, "width": 16},
    }
    assert (row["clock"], row["cache"], row["kind"], row["note"]) == ("graph", "warm", "live", "")
    assert (row["min_bytes"], row["flops"]) == (2 * 2 * 16 * 2, 2 * 16)
    assert row["p20_us"] <= row["median_us"] <= row["p80_us"]
    assert row["runs"] >= clocks.MIN_SAMPLES
    assert 0 <= row["relative_error"] < 1e-3
    assert (row["device"], row["driver"], row["torch"], row["triton"]) == (
        "Simulated",
        "570.1",
        "2.13.0",
        "3.7.1",
    )
    assert before <= datetime.fromisoformat(row["date"]) <= datetime.now(UTC)
    assert row["peer"] is None


@pytest.mark.parametrize("taped", [False, True])
def test_for_a_tape_the_turn_on_the_gpu_is_held_for_all_of_a_point(gpu, tmp_path, monkeypatch, taped):
    monkeypatch.setenv(lock.FOLDER, str(tmp_path / "turns"))
    monkeypatch.setattr(device, "uuid", lambda: "GPU-simulated")
    held = []

    def call(x):
        held.append(lock.held())
        gpu.launch(4.0, 50.0)
        return 2 * x

    tape = tmp_path / "tape.jsonl" if taped else None
    sweeps.run(
        "suite", [Contender("one", call, DOUBLING)], POINTS, tape=tape,
        progress=lambda *_: held.append(not lock.held()),
    )  # fmt: skip
    assert all(held) if taped else not held[0] and any(held)
    assert not lock.held()


def test_a_peer_brings_its_version(gpu):
    table = sweeps.run("suite", [doubling(gpu, peer="numpy")], POINTS[:1])
    assert (table["peer"][0], table["peer_version"][0]) == ("numpy", machine.version("numpy"))


@pytest.mark.parametrize("clock", ["host", "events", "graph"])
def test_the_clock_is_the_one_asked_for(gpu, clock):
    table = sweeps.run("suite", [doubling(gpu)], POINTS[:1], clock=clock)
    assert table["clock"].tolist() == [clock]
    assert table["median_us"][0] == pytest.approx({"host": 16, "events": 20, "graph": 16}[clock], rel=0.05)


def test_all_contenders_of_a_point_and_the_copies_are_measured_in_one_run(gpu, monkeypatch):
    runs = []
    original = clocks.measure
    monkeypatch.setattr(
        clocks, "measure", lambda jobs, **o: runs.append((list(jobs), o)) or original(jobs, **o)
    )
    sweeps.run("suite", [doubling(gpu), doubling(gpu, "slow", 3.0)], POINTS[:2], cache="warm", budget_s=0.01)
    assert [names for names, _ in runs] == [
        ["labkit", "slow", "slow 256", "fast 256"],
        ["labkit", "slow", "slow 512", "fast 512"],
    ]
    assert all(o["clock"] == "graph" and o["cache"] == "warm" and o["budget_s"] == 0.01 for _, o in runs)


@pytest.mark.parametrize("width", [2**20, 2**20 // 3])
def test_the_copy_moves_the_same_bytes_and_the_faster_one_counts(gpu, width):
    """Large copies are rounded, and credited with what was asked for."""
    table = sweeps.run("suite", [doubling(gpu)], [*POINTS, {"batch": 4, "width": width}], cache="warm")
    *small, large = table["min_bytes"]
    assert (machine.copied_bytes(large) > large) == (width != 2**20) and large > 2**23
    expected = [*(machine.copied_bytes(size) / 10 for size in small), large / 10]
    assert table["copy_us"].tolist() == pytest.approx(expected)


def test_contenders_that_move_different_bytes_get_copies_of_their_own(gpu):
    heavy = replace(DOUBLING, min_bytes=lambda s, size, _: 2**16)
    table = sweeps.run("suite", [doubling(gpu), doubling(gpu, "heavy", work=heavy)], POINTS[-1:])
    assert table["copy_us"].tolist() == pytest.approx([1024 / 10, 2**16 / 10])


def test_the_host_clock_has_no_copy(gpu):
    assert sweeps.run("suite", [doubling(gpu)], POINTS[:1], clock="host")["copy_us"].isna().all()


@pytest.mark.parametrize(("direction", "us", "passes"), [("backward", 7.0, 3), ("forward_backward", 23.0, 3)])
def test_backward_is_timed_alone_or_with_its_forward(gpu, direction, us, passes):
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            gpu.launch(2.0, 16.0)
            return 2 * x

        @staticmethod
        def backward(ctx, dy):
            gpu.launch(2.0, 7.0)
            return 2 * dy

    table = sweeps.run("suite", [Contender("it", Double.apply, DOUBLING)], POINTS[:1], direction=direction)
    assert table["median_us"][0] == pytest.approx(us)
    assert table["direction"][0] == direction
    assert table["min_bytes"][0] == passes * 2 * 16 * 4


def test_forward_is_timed_without_autograd(gpu):
    seen = []

    def call(x):
        seen.append((torch.is_grad_enabled(), x.requires_grad))
        gpu.launch(1.0, 50.0)
        return 2 * x

    sweeps.run("suite", [Contender("it", call, DOUBLING)], POINTS[:1])
    assert seen[-1] == (False, False)


@pytest.mark.parametrize("mode", [None, "max-autotune-no-cudagraphs"])
def test_a_compiled_contender_is_compiled_afresh_at_each_point_in_its_mode(gpu, monkeypatch, mode):
    made = []
    monkeypatch.setattr(torch, "compile", lambda call, **options: made.append(options) or call)
    sweeps.run("suite", [doubling(gpu, compiled=True, mode=mode), doubling(gpu, "eager")], POINTS)
    assert made == [{"dynamic": False, "mode": mode}] * 3


def test_what_is_compiled_is_checked_at_the_size_that_is_timed_only(gpu, monkeypatch):
    """For each size other code is made; that of the sampled size is not timed."""
    seen = []

    def watched(call, **_):
        def compiled(x):
            seen.append(len(x))
            return call(x)

        return compiled

    monkeypatch.setattr(torch, "compile", watched)
    point = [{"batch": 100, "width": 16}]
    for direction in ("forward", "backward", "forward_backward"):
        good = replace(doubling_with(lambda dy: 2 * dy), compiled=True)
        assert sweeps.run("suite", [good], point, direction=direction)["note"].tolist() == [""]
        assert set(seen) == {100}
    bad = doubling(gpu, compiled=True, work=replace(DOUBLING, reference=lambda x: 3 * x))
    assert sweeps.run("suite", [bad], point)["note"][0].startswith("wrong result")


def test_a_mode_without_torch_compile_is_refused(gpu):
    with pytest.raises(ValueError, match=r"mode: 'max-autotune' .* slow needs compiled=True"):
        doubling(gpu, "slow", mode="max-autotune")


# Memory


def wasteful(gpu, name="wasteful"):
    """Right, by way of two more tensors, of which one is alive beside the result."""

    def call(x):
        gpu.launch(4.0, 50.0)
        return (x + x) * 1.0

    return Contender(name, call, DOUBLING)


def test_a_row_has_the_memory_of_one_call(gpu):
    contenders = [wasteful(gpu), doubling(gpu), wasteful(gpu, "again")]
    for cache in ("cold", "warm"):
        table = sweeps.run("suite", contenders, POINTS, cache=cache)
        one = 2 * table["width"] * 4
        assert table["peak_bytes"].tolist() == [
            tensors * size for size, tensors in zip(one, [2, 1, 2] * 3, strict=True)
        ]


@pytest.mark.parametrize("direction", ["backward", "forward_backward"])
def test_memory_of_a_backward_is_that_of_both_passes(gpu, direction):
    def call(x):
        gpu.launch(4.0, 50.0)
        return x.exp().log() * 2  # exp is kept for log's backward, and the output lives on

    table = sweeps.run("suite", [Contender("it", call, DOUBLING)], POINTS[:1], direction=direction)
    one = 2 * 16 * 4
    # exp, log and the product; at the end exp, output, and two gradients (upstream times 2, then over exp)
    assert table["peak_bytes"][0] in (4 * one, 5 * one)


def test_a_compiled_backward_alone_has_no_memory(gpu, monkeypatch):
    """It is made to be repeated, and may not reuse what it could in a training step."""
    monkeypatch.setattr(torch, "compile", lambda call, **_: call)
    pair = [
        doubling_with(lambda dy: 2 * dy),
        replace(doubling_with(lambda dy: 2 * dy), name="c", compiled=True),
    ]
    for direction, known in {"backward": [True, False], "forward_backward": [True, True]}.items():
        table = sweeps.run("suite", pair, POINTS[:1], direction=direction)
        assert table["median_us"].notna().all()
        assert table["peak_bytes"].notna().tolist() == known


@pytest.mark.skipif(not shutil.which("g++"), reason="torch.compile needs g++ to make code for the CPU")
def test_a_compiled_backward_is_right_however_often_it_runs(gpu, monkeypatch, tmp_path):
    """Code that reuses what the forward saved is in the cache by then, and must not be taken."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    contender = Contender("torch.compile", geglu, GEGLU, compiled=True)
    jobs = {}
    monkeypatch.setattr(clocks, "measure", lambda given, **_: jobs.update(given) or {})
    shape = {"batch": 8, "width": 16}
    for direction in ("forward_backward", "backward"):
        how = sweeps._How("suite", "float32", direction, "graph", "cold", 0.1)
        assert how.measure([contender], shape, lambda: False)["torch.compile"].note == ""
    job = jobs["torch.compile"]
    output, inputs_, upstream = job.setup(*job.inputs)
    want = torch.autograd.grad(geglu(*inputs_), inputs_, upstream)
    for _ in range(3):
        for got, wanted in zip(job.call(output, inputs_, upstream), want, strict=True):
            torch.testing.assert_close(got, wanted)


def test_a_contender_for_some_sizes_is_left_out_of_the_others(gpu):
    wide = {**POINTS[0], "width": 2 * POINTS[0]["width"]}
    everywhere, slow = doubling(gpu), doubling(gpu, "slow", sizes={"width": (wide["width"],)})
    heard = []
    table = sweeps.run(
        "suite",
        [everywhere, slow],
        [POINTS[0], wide],
        progress=lambda done, total, row: heard.append((done, total)),
    )
    found = table[["contender", "width"]].apply(tuple, axis=1).tolist()
    assert found == [("labkit", POINTS[0]["width"]), ("labkit", wide["width"]), ("slow", wide["width"])]
    assert heard == [(1, 3), (2, 3), (3, 3)]


def test_a_contender_for_some_dtypes_is_left_out_of_the_others(gpu):
    everywhere, single = doubling(gpu), doubling(gpu, "tf32", dtypes=("float32", "float64"))
    assert everywhere.takes("bfloat16") and single.takes("float64") and not single.takes("bfloat16")
    heard = []
    for dtype, who in {"float32": ["labkit", "tf32"], "bfloat16": ["labkit"]}.items():
        table = sweeps.run(
            "suite",
            [everywhere, single],
            POINTS[:1],
            dtype=dtype,
            progress=lambda done, total, row: heard.append((done, total)),
        )
        assert table["contender"].tolist() == who
    assert heard == [(1, 2), (2, 2), (1, 1)]


def test_two_contenders_may_share_a_name_when_they_never_meet(gpu):
    pair = [doubling(gpu, dtypes=("float32",)), doubling(gpu, us=2.0, dtypes=("float16",))]
    assert sweeps.run("suite", pair, POINTS[:1])["median_us"].tolist() == pytest.approx([16])
    assert sweeps.run("suite", pair, POINTS[:1], dtype="float16")["median_us"].tolist() == pytest.approx([32])


def test_the_source_of_a_live_row_is_the_code_that_was_measured(gpu):
    first, other = doubling(gpu), doubling(gpu, "other", 2.0)
    table = sweeps.run("suite", [first, other], POINTS[:1])
    assert table["source"].tolist() == [sweeps.code(first), sweeps.code(other)]
    assert sweeps.code(first) == f"code {first.fingerprint()}" != sweeps.code(other)


def test_a_point_is_measured_while_no_other_thread_measures(gpu):
    """A cell that holds the device keeps a sweep in another thread waiting, and stoppable."""
    stop, told = threading.Event(), []

    def sweep():
        told.append(sweeps.run("suite", [doubling(gpu)], POINTS, stop=stop.is_set))

    with clocks.turn():
        thread = threading.Thread(target=sweep)
        thread.start()
        time.sleep(0.15)
        assert not told
        stop.set()
        thread.join(5)
        assert told[0].empty


def test_contenders_get_the_same_inputs(gpu):
    seen = []

    def recording(x):
        seen.append(x.clone())
        gpu.launch(1.0, 500.0)
        return 2 * x

    random = replace(DOUBLING, inputs=lambda s: (torch.randn(s["batch"], s["width"]),))
    pair = [Contender(name, recording, random) for name in "ab"]
    sweeps.run("suite", pair, POINTS[:1], cache="warm")
    assert all(torch.equal(each, seen[0]) for each in seen)


# Gaps


@pytest.mark.parametrize(
    ("how", "note"),
    [
        (out_of_memory, "out of memory"),
        (error, "ValueError: width: too odd"),
        (wrong, "wrong result: relative error 5.0e-03"),
        (lambda x: torch.full_like(x, torch.nan), "wrong result: relative error nan"),
        (lambda x: torch.full_like(x, torch.inf), "wrong result: relative error inf"),
    ],
)
def test_what_fails_at_one_width_is_a_gap_there_and_ends_nothing(gpu, how, note):
    table = sweeps.run("suite", [failing(gpu, 32, how), doubling(gpu)], POINTS)
    gaps = table[table["median_us"].isna()]
    assert gaps[["contender", "width", "note", "runs"]].to_numpy().tolist() == [["failing", 32, note, 0]]
    assert gaps[["p20_us", "p80_us", "copy_us", "peak_bytes"]].isna().all(axis=None)
    assert len(table) == 6
    assert table.loc[table["contender"] == "labkit", "median_us"].tolist() == pytest.approx([16, 32, 64])


def test_inputs_that_do_not_fit_are_a_gap(gpu):
    def large(shape):
        return out_of_memory() if shape["width"] == 32 else DOUBLING.inputs(shape)

    table = sweeps.run("suite", [doubling(gpu, work=replace(DOUBLING, inputs=large))], POINTS)
    assert table["note"].tolist() == ["", "out of memory", ""]


def test_a_call_that_only_fails_while_it_is_timed_is_a_gap(gpu):
    def call(x):
        if gpu.log and gpu.log[-1] == "queued":
            raise AssertionError("unreachable")
        if "side stream" in gpu.log:
            out_of_memory()
        return 2 * x

    table = sweeps.run("suite", [Contender("late", call, DOUBLING), doubling(gpu)], POINTS[:1])
    assert table["note"].tolist() == ["out of memory", ""]
    assert table["relative_error"].notna().all(), "it was right before it failed"


def test_what_a_graph_cannot_hold_is_a_row_of_the_events_clock(gpu):
    def call(x):
        gpu.launch(0.0, 50.0)
        gpu.wait()
        return 2 * x

    table = sweeps.run("suite", [Contender("waiting", call, DOUBLING), doubling(gpu)], POINTS[:1])
    assert table["clock"].tolist() == ["events", "graph"]
    assert table["note"][0].startswith("timed with events")
    assert table["median_us"][0] == pytest.approx(50.0)


def doubling_with(gradient):
    """Doubles its input; its gradient is what ``gradient`` makes of the upstream one."""

    class Doubling(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return 2 * x

        @staticmethod
        def backward(ctx, dy):
            return gradient(dy)

    return Contender("it", Doubling.apply, DOUBLING)


def test_wrong_gradients_are_a_wrong_result(gpu):
    contender = doubling_with(lambda dy: torch.full_like(dy, torch.nan))
    table = sweeps.run("suite", [contender], POINTS[:1], direction="backward")
    assert table["note"].tolist() == ["wrong result: relative error nan"]
    assert sweeps.run("suite", [contender], POINTS[:1])["note"].tolist() == [""]


def losing(digits):
    """A sum with what is much larger."""
    return lambda x: (x + digits) - digits


def off_by(share, digits, gpu):
    """A contender beside a reference that loses digits, off by more than that."""

    def call(x):
        gpu.launch(1.0, 50.0)
        return losing(digits)(x) * (1 + share)

    return Contender(f"off by {share}", call, replace(DOUBLING, reference=losing(digits)))


def refused(contenders, direction="forward"):
    table = sweeps.run("suite", contenders, POINTS[:1], dtype="bfloat16", direction=direction)
    assert table["relative_error"][0] > sweeps.ALLOWED_ERROR["bfloat16"], "or there is nothing to allow"
    return [note.startswith("wrong result") for note in table["note"]]


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_long_chain_in_half_precision_may_be_as_far_off_as_plain_pytorch(gpu, direction):
    contenders = [off_by(share, 20, gpu) for share in (0, 0.02, 0.085)]
    assert refused(contenders, direction) == [False, False, True]


def test_but_not_where_plain_pytorch_itself_is_far_off(gpu):
    assert refused([off_by(0, 100, gpu)]) == [True]


def test_where_plain_pytorch_fails_in_half_precision_there_is_nothing_to_go_by(gpu):
    def reference(x):
        if x.dtype is torch.bfloat16:
            raise out_of_memory()
        return losing(20)(x)

    one = off_by(0, 20, gpu)
    (note,) = sweeps.run(
        "suite", [replace(one, work=replace(DOUBLING, reference=reference))], POINTS[:1], dtype="bfloat16"
    )["note"]
    assert note.startswith("wrong result")


def test_a_contender_of_full_precision_is_not_forgiven_what_plain_pytorch_loses(gpu):
    def reference(x):
        return 2 * (x.bfloat16().float() if x.dtype is torch.float32 else x)

    def call(x):
        gpu.launch(1.0, 50.0)
        return 2.004 * x

    contender = Contender("it", call, replace(DOUBLING, reference=reference))
    assert sweeps.run("suite", [contender], POINTS[:1])["note"][0].startswith("wrong result")


@pytest.mark.parametrize("cheap", [10**11, 0])
def test_gradients_are_right_at_full_size_too_at_least_in_some_rows(gpu, monkeypatch, cheap):
    """Right for the sampled batch, wrong for a large one: as when only the left-over rows are done."""
    monkeypatch.setattr(sweeps, "CHECKED_FLOPS", cheap)
    contender = doubling_with(lambda dy: 2 * dy if len(dy) <= 64 else torch.zeros_like(dy))
    table = sweeps.run("suite", [contender], [{"batch": 200, "width": 16}], direction="backward")
    assert table["note"].tolist() == ["wrong result: relative error 1.0e+00"]


@pytest.mark.parametrize("direction", ["backward", "forward_backward"])
def test_a_cold_run_rotates_the_upstream_gradient_too(gpu, monkeypatch, direction):
    jobs = {}
    monkeypatch.setattr(clocks, "measure", lambda given, **_: jobs.update(given) or {})
    how = sweeps._How("suite", "float32", direction, "graph", "cold", 0.1)
    inputs_ = tuple(t.requires_grad_() for t in DOUBLING.inputs(POINTS[0]))
    job = how._job(lambda x: 2 * x, inputs_)
    first, second = clocks.rotation(clocks.Job(job.call, job.inputs), 2**12)[:2]
    assert all(a.data_ptr() != b.data_ptr() for a, b in zip(first, second, strict=True))
    assert len(first) == 2, "x and the upstream gradient"


def test_a_copy_that_does_not_fit_is_left_out(gpu, monkeypatch):
    def none(size):
        raise out_of_memory()

    monkeypatch.setattr(machine, "copy_jobs", none)
    table = sweeps.run("suite", [doubling(gpu)], POINTS[:1])
    assert table["median_us"].notna().all() and table["copy_us"].isna().all()


@pytest.mark.parametrize("edge", [0, -1])
def test_a_large_batch_is_checked_small_and_at_both_ends(gpu, edge):
    """Right for the first 64 rows by themselves; wrong in the full size, in its first or last row."""

    def call(x):
        gpu.launch(1.0, 50.0)
        y = 2 * x
        if x.shape[0] > 64:
            y[edge] = 0
        return y

    shapes = [{"batch": 64, "width": 16}, {"batch": 100, "width": 16}]
    table = sweeps.run("suite", [Contender("it", call, DOUBLING)], shapes)
    assert [note.startswith("wrong result") for note in table["note"]] == [False, True]


def test_a_batch_is_sampled_for_the_reference(gpu):
    sizes = []

    def reference(x):
        sizes.append((len(x), x.dtype))
        return 2 * x

    work = replace(DOUBLING, reference=reference)
    sweeps.run("suite", [doubling(gpu, work=work)], [{"batch": 1000, "width": 4}])
    assert sizes == [(64, torch.float64), (len(accuracy.spread(1000)), torch.float64)]


@pytest.mark.parametrize("direction", ["forward", "forward_backward"])
def test_another_input_with_rows_is_taken_row_by_row_too(gpu, direction, monkeypatch):
    monkeypatch.setattr(accuracy, "CHUNK_ROWS", 64)
    product = Work(
        inputs=lambda s: (torch.randn(s["batch"], s["width"]), torch.randn(s["batch"], s["width"])),
        reference=torch.mul,
        min_bytes=lambda s, size, _: 3 * s["batch"] * s["width"] * size,
        flops=lambda s, _: s["batch"] * s["width"],
        batched=(0, 1),
    )

    def cut(x, other):  # right for the sampled batch, and in the first rows of a large one
        gpu.launch(1.0, 50.0)
        return torch.cat([x[:64] * other[:64], x[64:] * other[: len(x) - 64]])

    def whole(x, other):
        gpu.launch(1.0, 50.0)
        return x * other

    contenders = [Contender("whole", whole, product), Contender("cut", cut, product)]
    point = {"batch": 100, "width": 16}
    for cheap in (10**11, 0):  # gradients of all rows, of some
        monkeypatch.setattr(sweeps, "CHECKED_FLOPS", cheap)
        table = sweeps.run("suite", contenders, [point], direction=direction)
        assert [note.startswith("wrong result") for note in table["note"]] == [False, True]


def test_a_backward_that_cannot_be_repeated_is_a_gap_and_timed_with_its_forward(gpu):
    def call(x):
        gpu.launch(1.0, 50.0)
        return Reusing.apply(x)

    contender = Contender("it", call, replace(DOUBLING, reference=torch.square))
    (note,) = sweeps.run("suite", [contender], POINTS[:1], direction="backward")["note"]
    assert "overwrites what the forward saved; time forward_backward" in note and len(note) < 200
    table = sweeps.run("suite", [contender], POINTS[:1], direction="forward_backward")
    assert table["note"].tolist() == [""] and table["median_us"].notna().all()


def test_a_random_result_is_not_checked(gpu):
    work = replace(DOUBLING, reference=None)
    contender = Contender("it", lambda x: gpu.launch(1.0, 50.0) or torch.rand(3), work)
    table = sweeps.run("suite", [contender], POINTS[:1])
    assert table["relative_error"].isna().all()
    assert table["note"].tolist() == [""]


def test_an_interruption_from_the_keyboard_comes_through(gpu):
    def interrupted(x):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sweeps.run("suite", [failing(gpu, 32, interrupted)], POINTS)


# What a wrong call is told


@pytest.mark.parametrize("has_gpu", [True, False])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"direction": "sideways"}, "direction: 'sideways' is none of forward, backward, forward_backward"),
        ({"clock": "sundial"}, "clock: 'sundial' is none of host, events, graph"),
        ({"cache": "lukewarm"}, "cache: 'lukewarm' is neither cold nor warm"),
    ],
)
def test_unknown_options_are_named_with_a_gpu_and_without(gpu, monkeypatch, has_gpu, options, message):
    monkeypatch.setattr(device, "has_gpu", lambda: has_gpu)
    with pytest.raises(ValueError, match=message):
        sweeps.run("suite", [doubling(gpu)], POINTS, **options)


def test_two_contenders_of_one_name_are_refused(gpu):
    with pytest.raises(ValueError, match="two of them have one name among labkit, labkit"):
        sweeps.run("suite", [doubling(gpu), doubling(gpu)], POINTS)


# Stopped; what is kept of it is tried in measure/test_journal


def test_stop_is_heard_while_a_point_is_measured(gpu):
    asked = itertools.count()
    table = sweeps.run("suite", [doubling(gpu)], POINTS, stop=lambda: next(asked) > 20)
    assert table.empty
    assert list(table.columns[-2:]) == ["batch", "width"]
    assert next(asked) == 22, "and not asked again"


def test_stop_is_heard_between_the_checks_of_two_contenders(gpu):
    seen = []

    def noting(one):
        return replace(one, call=lambda x: seen.append(one.name) or one.call(x))

    pair = [noting(doubling(gpu, name)) for name in ("first", "second")]
    sweeps.run("suite", pair, POINTS, stop=lambda: bool(seen))
    assert set(seen) == {"first"}


# Edited code


MODULE = """
import triton
import triton.language as tl

SIZE = 16
LIMIT = tl.constexpr(4)

@triton.jit
def inner_kernel(x):
    return x * 2

@triton.autotune([triton.Config({})], key=[])
@triton.jit
def kernel(x, y, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(y + at, inner_kernel(tl.load(x + at)) + LIMIT)

def helper(x):
    return x + 1

def call(x):
    kernel[(1,)](x, x, BLOCK=SIZE)
    return helper(x)

def unrelated(x):
    return x - 1

def reference(x):
    return x * 3

class Step:
    def __init__(self):
        self.x = 1

def stepped(x):
    return x * Step().x

def made(flag, size=7):
    return lambda x, n=size: call(x) if flag else n
"""


def called(module):
    return Contender("it", module.call, DOUBLING)


def referred(module):
    return Contender("it", module.call, replace(DOUBLING, reference=module.reference))


def decorated(module):
    """By a decorator of a library, that holds it."""

    def decorated(x):
        return call(x)

    call, decorated.__module__ = module.call, "torch.somewhere"
    return Contender("it", decorated, DOUBLING)


@pytest.fixture
def fingerprint(tmp_path):
    """The fingerprint of a contender of the module above, after an edit."""
    numbers = itertools.count()

    def of(old="", new="", contender=called):
        assert not old or old in MODULE
        path = tmp_path / f"edited_{next(numbers)}.py"
        path.write_text(textwrap.dedent(MODULE.replace(old, new) if old else MODULE))
        spec = importlib.util.spec_from_file_location("edited", path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return contender(module).fingerprint()

    return of


def test_code_that_was_not_edited_keeps_its_fingerprint(fingerprint):
    assert fingerprint() == fingerprint()
    assert fingerprint("x - 1", "x - 2") == fingerprint(), "nothing uses it"


@pytest.mark.parametrize(
    ("old", "new", "contender"),
    [
        ("    return helper(x)", "    return helper(x) * 1", called),
        ("x + 1", "x + 2", called),
        ("tl.load(x + at)", "tl.load(x + at, at < 9)", called),
        ("x * 2", "x + x", called),
        ("SIZE = 16", "SIZE = 32", called),
        ("constexpr(4)", "constexpr(5)", called),
        ("self.x = 1", "self.x = 2", lambda module: Contender("it", module.stepped, DOUBLING)),
        ("x + 1", "x + 2", lambda module: Contender("it", machine.with_tf32(module.call), DOUBLING)),
        ("x * 3", "x * 4", referred),
        ("x + 1", "x + 2", decorated),
    ],
    ids=[
        "call", "helper", "tuned kernel", "kernel of the kernel", "size", "constant of the kernel", "class",
        "below a wrapper", "work", "below a decorator",
    ],
)  # fmt: skip
def test_an_edit_changes_the_fingerprint(fingerprint, old, new, contender):
    assert fingerprint(old, new, contender) != fingerprint(contender=contender)


def test_what_a_closure_holds_and_defaults_count(fingerprint):
    def of(*values):
        return fingerprint(contender=lambda module: Contender("it", module.made(*values), DOUBLING))

    assert of(True) == of(True) == of(True, 7)
    assert of(True) != of(False)
    assert of(True) != of(True, 8)


def test_a_built_in_function_has_a_fingerprint():
    plain = Contender("it", torch.mul, DOUBLING)
    assert plain.fingerprint() == Contender("it", torch.mul, DOUBLING).fingerprint()
    compiled = replace(plain, compiled=True)
    tuned = replace(compiled, mode="max-autotune-no-cudagraphs")
    assert len({each.fingerprint() for each in (plain, compiled, tuned)}) == 3


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.mm, torch.bmm),
        (torch.nn.functional.linear, torch.nn.functional.gelu),
        (torch.nn.functional.silu, torch.nn.functional.rms_norm),
    ],
)
def test_functions_of_a_library_are_told_apart_by_name(one, other):
    assert Contender("it", one, DOUBLING).fingerprint() != Contender("it", other, DOUBLING).fingerprint()


def test_code_is_the_same_beside_another_python():
    """What namedtuple, dataclass and Enum make is another Python's; what is written beside it counts."""

    class Plan(NamedTuple):
        rows: int

        def tiles(self):
            return self.rows // 16

        @functools.cache  # noqa: B019 - as people do
        def half(self):
            return self.rows // 2

    @dataclass(frozen=True, slots=True)
    class Size:
        rows: int

    class Kind(Enum):
        ONE = 1

    sources = [source for one in (Plan, Size, Kind) for source in code_hash.sources(one, set())]
    assert ["def tiles" in source or "def half" in source for source in sources] == [True, True]


# Without a GPU


def record(*taped):
    rows.write(places.RECORDED / "nvidia-h200" / "01.jsonl", taped)


def untouchable(*_):
    raise AssertionError("without a GPU nothing is called")


UNTOUCHED = Contender("labkit", untouchable, replace(DOUBLING, inputs=untouchable, reference=untouchable))


def test_without_a_gpu_the_tape_is_shown_as_what_it_is(no_gpu):
    record(recorded(), recorded("eager", us=20.0), recorded(width=32))
    table = sweeps.run("suite", [UNTOUCHED], POINTS)
    assert table["kind"].tolist() == ["recorded"] * 3
    assert table["device"].tolist() == ["NVIDIA H200"] * 3
    assert table["median_us"].tolist() == [10.0, 20.0, 10.0]
    assert table["width"].tolist() == [16, 16, 32]


def test_only_rows_of_this_measurement_are_taken_from_a_tape(no_gpu):
    record(
        recorded(),
        recorded(suite="suite/below"),
        recorded(dtype="bfloat16"),
        recorded(direction="backward"),
        recorded(clock="host"),
        recorded(cache="warm"),
        recorded(clock="events"),
        recorded("waiting", clock="events", note="timed with events, a graph cannot hold it: no"),
        recorded("large", clock="events", median_us=None, note="out of memory"),
    )
    table = sweeps.run("suite", [UNTOUCHED], POINTS)
    assert table["contender"].tolist() == ["labkit", "waiting"]
    events = sweeps.run("suite", [UNTOUCHED], POINTS, clock="events")
    assert events["contender"].tolist() == ["labkit", "large"], "not the fallback of a graph sweep as well"


def test_without_a_tape_the_table_is_empty_but_has_its_columns(no_gpu):
    table = sweeps.run("suite", [UNTOUCHED], POINTS)
    assert table.empty
    assert list(table.columns) == [*rows.COLUMNS, "batch", "width"]


def test_everything_that_a_lesson_does_with_a_table_works_with_an_empty_one(no_gpu):
    table = sweeps.run("suite", [UNTOUCHED], POINTS)
    table = table[(table.batch == 2) & (table.width >= 16)]
    speedup = tables.speedup(table, "labkit", "eager")
    assert speedup.empty
    assert tables.growth(speedup) is None
    assert tables.at(table, "labkit", width=16) is None
    assert tables.ratio(table, "labkit", "eager", width=16) is None
    assert tables.lowest(table, "copy_us", contender="labkit") is None
    assert tables.worst(table, "labkit", "eager") is None
    assert tables.pivot(table, "median_us", "contender", "width").empty
    assert tables.speedups(table, "labkit", "eager", "dtype", ["batch", "width"]).empty


# grid and floors


def test_a_grid_is_a_run_for_every_combination(gpu):
    table = sweeps.grid(
        "suite",
        [doubling(gpu)],
        (point for point in POINTS[:2]),
        clock=("host", "graph"),
        dtype=("float32", "float16"),
    )
    assert table[["clock", "dtype", "width"]].to_numpy().tolist() == [
        [clock, dtype, width]
        for clock in ("host", "graph")
        for dtype in ("float32", "float16")
        for width in (16, 32)
    ]
    assert table.index.tolist() == list(range(8))


def test_the_floor_of_a_work_follows_its_bytes_and_operations():
    roofs = machine.Roofs(
        kind="live",
        device="Simulated",
        date="2026-01-02",
        copy=((1, 1e-3), (10**9, 1e6)),
        matmul={"float32": 1e9, "tf32": 4e9, "float16": 8e9},
        node_us=1e-6,
        host_us=1.0,
    )
    work = replace(DOUBLING, flops=lambda s, direction: 10**6)
    light = replace(DOUBLING, flops=lambda s, direction: 0)
    shape = {"batch": 10, "width": 100}
    assert light.floor_us(shape, "float32", roofs) == pytest.approx(8.0)
    assert light.floor_us(shape, "float16", roofs) == pytest.approx(4.0)
    assert light.floor_us(shape, "tf32", roofs) == pytest.approx(8.0)
    assert light.floor_us(shape, "float32", roofs, "backward") == pytest.approx(12.0)
    assert [work.floor_us(shape, dtype, roofs) for dtype in roofs.matmul] == pytest.approx(
        [1000.0, 250.0, 125.0]
    )


# Noise

WORKED = "another process worked on the GPU"


@pytest.fixture
def disturbances(monkeypatch):
    """What the gauge finds, one run after another; then nothing. Also how often it was asked."""
    found = []

    class Gauge:
        def look(self):
            pass

        def finding(self):
            asked.append(1)
            return found.pop(0) if found else ""

    asked = []
    monkeypatch.setattr(clocks.noise, "Gauge", Gauge)
    return found, asked


def test_a_disturbed_point_says_so_in_its_rows_alone(gpu, disturbances):
    found, _ = disturbances
    found += ["", WORKED]
    table = sweeps.run("suite", [doubling(gpu), doubling(gpu, "slow", 3.0)], POINTS)
    noise = table.set_index(["contender", "width"])["noise"]
    assert noise["labkit"].tolist() == noise["slow"].tolist() == ["", WORKED, *[""] * (len(POINTS) - 2)]


def test_a_gap_is_not_noisy(gpu, disturbances):
    disturbances[0].append(WORKED)
    table = sweeps.run("suite", [doubling(gpu), failing(gpu, 16, out_of_memory, "full")], POINTS[:1])
    assert table.set_index("contender")["noise"].to_dict() == {"labkit": WORKED, "full": ""}


def test_for_a_tape_a_disturbed_point_is_measured_again_and_the_quiet_run_is_kept(
    gpu, tmp_path, disturbances
):
    found, asked = disturbances
    found += ["first", "second"]
    table = sweeps.run("suite", [doubling(gpu)], POINTS[:1], tape=tmp_path / "tape.jsonl")
    assert len(asked) == 3 and table["noise"].tolist() == [""]
    assert [row.noise for row in rows.read(tmp_path / "tape.jsonl")] == [""]


def test_for_a_tape_under_way_it_is_the_same_and_what_stays_disturbed_is_kept_and_says_so(
    gpu, tmp_path, monkeypatch, disturbances
):
    found, asked = disturbances
    monkeypatch.setenv(rows.TAPE, str(tmp_path / "tape.jsonl"))
    found += ["first", "second", "third"]
    for _ in range(2):
        table = sweeps.run("suite", [doubling(gpu)], POINTS[:1])
        assert len(asked) == 1 + sweeps.REPEATS, "once recorded, it is not measured again"
        assert table["noise"].tolist() == ["first"]


def timed(us, noise=""):
    return clocks.Timing("graph", "cold", us, us, us, 5, noise=noise)


FULL = clocks.Gap("out of memory")


@pytest.mark.parametrize(
    ("made", "kept"),
    [
        (
            [(timed(1, "wide"), timed(2, "wide")), (timed(3), timed(4, "wide")), (timed(5, "wide"),) * 2],
            (3, 4),
        ),
        ([(timed(1, "wide"),) * 2, (timed(2, "wide"), FULL), (timed(2, "wide"), FULL)], (1, 1)),
        ([(timed(1, "wide"),) * 2, (timed(2), FULL), (timed(2), timed(2))], (2, 2)),
        ([(timed(1, "wide"),) * 2, (timed(2), FULL), (timed(2), FULL)], (1, 1)),
        ([(timed(1, "wide"), FULL), (timed(2), FULL)], (2, None)),
    ],
    ids=["fewest disturbed, whole", "no gap", "no gap, then quiet", "a gap is not quiet", "all have the gap"],
)
def test_of_several_runs_for_a_tape_the_quietest_of_those_with_fewest_gaps_is_kept(
    gpu, tmp_path, monkeypatch, made, kept
):
    runs = [dict(zip("ab", outcomes, strict=True)) for outcomes in made]
    monkeypatch.setattr(clocks, "measure", lambda *_, **__: runs.pop(0))
    pair = [doubling(gpu, name) for name in "ab"]
    sweeps.run("suite", pair, POINTS[:1], tape=tmp_path / "tape.jsonl")
    assert tuple(row.median_us for row in rows.read(tmp_path / "tape.jsonl")) == kept and not runs


def test_elsewhere_a_disturbed_point_is_measured_once(gpu, disturbances):
    found, asked = disturbances
    found.append("first")
    assert sweeps.run("suite", [doubling(gpu)], POINTS[:1])["noise"].tolist() == ["first"]
    assert len(asked) == 1
