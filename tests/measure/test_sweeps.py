"""Sweeps in virtual time: rows, gaps, what a stop keeps, and what a tape shows without a GPU."""

import itertools
from dataclasses import replace
from datetime import UTC, datetime

import pytest
import torch
from simulated import DOUBLING, doubling, out_of_memory
from taped import recorded

from labkit import paths
from labkit.measure import accuracy, clocks, cold_cache, roofline, rows, sweeps
from labkit.measure.contender import Contender

pytestmark = pytest.mark.usefixtures("own_folders")
POINTS = [{"batch": 2, "width": width} for width in (16, 32, 64)]


def failing(gpu, at, how, name="failing", call=lambda x: 2 * x):
    """Right, but at one width."""

    def launched(x):
        gpu.launch(4.0, 50.0)
        return how(x) if x.shape[1] == at else call(x)

    return Contender(name, launched, DOUBLING)


# Live


def test_every_contender_is_measured_at_every_point_with_all_that_the_contract_asks_for(gpu):
    before = datetime.now(UTC).replace(microsecond=0)
    pair = [doubling(gpu), doubling(gpu, "slow", 3.0)]
    table = sweeps.run("lesson/suite", pair, POINTS, dtype="float16", cache="warm")
    assert table[["contender", "batch", "width"]].to_numpy().tolist() == [
        [name, 2, width] for width in (16, 32, 64) for name in ("labkit", "slow")
    ]
    assert table["median_us"].tolist() == pytest.approx([16, 48, 32, 96, 64, 192])
    row = table.to_dict("records")[0]
    wanted = {
        "suite": "lesson/suite", "contender": "labkit", "direction": "forward", "dtype": "float16",
        "shape": {"batch": 2, "width": 16}, "clock": "graph", "cache": "warm", "kind": "live", "note": "",
        "min_bytes": 2 * 2 * 16 * 2, "flops": 2 * 16, "device": "Simulated", "driver": "570.1",
        "torch": "2.13.0", "triton": "3.7.1", "source": "",
    }  # fmt: skip
    assert {name: row[name] for name in wanted} == wanted
    assert row["p20_us"] <= row["median_us"] <= row["p80_us"]
    assert row["runs"] >= clocks.MIN_SAMPLES
    assert 0 <= row["relative_error"] < 1e-3
    assert before <= datetime.fromisoformat(row["date"]) <= datetime.now(UTC)


@pytest.mark.parametrize(("clock", "us"), [("host", 16), ("events", 20), ("graph", 16)])
def test_the_clock_is_the_one_asked_for_and_forward_is_timed_without_gradients(gpu, clock, us):
    seen, it = [], doubling(gpu)
    call = lambda x: seen.append(x.requires_grad) or it.call(x)  # noqa: E731
    table = sweeps.run("suite", [replace(it, call=call)], POINTS[:1], clock=clock)
    assert table["clock"].tolist() == [clock] and seen[-1] is False
    assert table["median_us"][0] == pytest.approx(us, rel=0.05)
    assert table["copy_us"].isna()[0] == (clock == "host")


def test_all_contenders_of_a_point_and_the_copies_are_measured_in_one_run(gpu, monkeypatch):
    runs, original = [], clocks.measure
    watched = lambda jobs, **given: runs.append((list(jobs), given)) or original(jobs, **given)  # noqa: E731
    monkeypatch.setattr(clocks, "measure", watched)
    sweeps.run("suite", [doubling(gpu), doubling(gpu, "slow", 3.0)], POINTS[:2], cache="warm", budget_s=0.01)
    copies = ["slow 256", "fast 256"], ["slow 512", "fast 512"]
    assert [names for names, _ in runs] == [["labkit", "slow", *each] for each in copies]
    assert all(o["clock"] == "graph" and o["cache"] == "warm" and o["budget_s"] == 0.01 for _, o in runs)


@pytest.mark.parametrize("width", [2**20, 2**20 // 3])
def test_the_copy_moves_the_same_bytes_and_the_faster_one_counts(gpu, width):
    """Large copies are rounded, and credited with what was asked for; each contender has its own."""
    heavy = doubling(gpu, "heavy", work=replace(DOUBLING, min_bytes=lambda *_: 2**16))
    table = sweeps.run("suite", [doubling(gpu), heavy], [*POINTS, {"batch": 4, "width": width}], cache="warm")
    *small, large = table["min_bytes"][0::2]
    assert (roofline.copied_bytes(large) > large) == (width != 2**20) and large > 2**23
    expected = [*(roofline.copied_bytes(size) / 10 for size in small), large / 10]
    assert table["copy_us"][0::2].tolist() == pytest.approx(expected)
    assert table["copy_us"][1::2].tolist() == pytest.approx([2**16 / 10] * 4)


def test_backward_is_timed_with_its_forward(gpu):
    it = doubling_with(lambda dy: gpu.launch(2.0, 7.0) or 2 * dy)
    call = lambda x: gpu.launch(2.0, 16.0) or it.call(x)  # noqa: E731
    table = sweeps.run("suite", [replace(it, call=call)], POINTS[:1], direction="forward_backward")
    assert table["median_us"][0] == pytest.approx(23.0)
    assert table["direction"][0] == "forward_backward" and table["min_bytes"][0] == 3 * 2 * 16 * 4


def test_a_contender_for_some_sizes_is_left_out_of_the_others(gpu):
    slow = doubling(gpu, "slow", sizes={"width": (32,)})
    table = sweeps.run("suite", [doubling(gpu), slow], POINTS[:2])
    found = table[["contender", "width"]].apply(tuple, axis=1).tolist()
    assert found == [("labkit", 16), ("labkit", 32), ("slow", 32)]
    assert sweeps.run("suite", [slow], POINTS[:1]).empty


def test_contenders_get_the_same_inputs(gpu):
    seen = []
    one = failing(gpu, 0, None, call=lambda x: seen.append(x.clone()) or 2 * x)
    random = replace(one, work=replace(DOUBLING, inputs=lambda s: (torch.randn(s["batch"], s["width"]),)))
    sweeps.run("suite", [random, replace(random, name="other")], POINTS[:1], cache="warm")
    assert all(torch.equal(each, seen[0]) for each in seen)


def test_a_cold_run_rotates_the_upstream_gradient_too(gpu, monkeypatch):
    jobs = {}
    monkeypatch.setattr(
        clocks,
        "measure",
        lambda given, **_: jobs.update(given) or dict.fromkeys(given, clocks.NotTimed("no")),
    )
    sweeps.run("suite", [doubling_with(lambda dy: 2 * dy)], POINTS[:1], direction="forward_backward")
    job = jobs["it"]
    assert [(*t.shape, *t.stride()) for t in job.inputs] == [(2, 16, 16, 1)] * 2, "x, and dy"
    first, second = cold_cache.rotating_inputs(cold_cache.TimedCall(job.call, job.inputs), 2**12)[:2]
    assert all(a.data_ptr() != b.data_ptr() for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("direction", ["forward", "forward_backward"])
def test_a_compiled_contender_is_compiled_and_checked_for_each_size_that_is_timed(
    gpu, monkeypatch, direction
):
    """For each size other code is made; that of the sampled size is not timed."""
    seen, made = [], []

    def watched(call, **options):
        made.append(options)
        return lambda x: seen.append(len(x)) or call(x)

    monkeypatch.setattr(torch, "compile", watched)
    good = replace(doubling_with(lambda dy: 2 * dy), compiled=True)
    points = [{"batch": 100, "width": 16}, {"batch": 100, "width": 8}]
    table = sweeps.run("suite", [good], points, direction=direction)
    assert table["note"].tolist() == ["", ""] and set(seen) == {100}
    assert made == [{"dynamic": False}] * 2
    bad = doubling(gpu, compiled=True, work=replace(DOUBLING, reference=lambda x: 3 * x))
    assert sweeps.run("suite", [bad], points[:1])["note"][0].startswith("wrong result")


# Gaps


def test_what_does_not_fit_fails_late_or_waits_says_so_beside_the_others(gpu):
    large = lambda shape: out_of_memory() if shape["width"] == 32 else DOUBLING.inputs(shape)  # noqa: E731
    table = sweeps.run("suite", [doubling(gpu, work=replace(DOUBLING, inputs=large))], POINTS)
    assert table["note"].tolist() == ["", "out of memory", ""]
    gpu.log.clear()
    late = lambda x: out_of_memory() if "side stream" in gpu.log else 2 * x  # noqa: E731
    waiting = lambda x: gpu.wait() or 2 * x  # noqa: E731
    three = [failing(gpu, 0, None, "late", late), failing(gpu, 0, None, "waiting", waiting), doubling(gpu)]
    table = sweeps.run("suite", three, POINTS[:1])
    assert table["note"][0] == "out of memory" and table["relative_error"].notna().all()
    assert table["clock"].tolist() == ["graph", "events", "graph"]
    assert table["note"][1].startswith("timed with events") and table["median_us"][1] == pytest.approx(54.0)


@pytest.mark.parametrize(
    ("how", "note"),
    [
        (out_of_memory, "out of memory"),
        (lambda x: [][0], "IndexError: list index out of range"),
        (lambda x: 2.01 * x, "wrong result: relative error 5.0e-03"),
        (lambda x: torch.full_like(x, torch.nan), "wrong result: relative error nan"),
        (lambda x: torch.full_like(x, torch.inf), "wrong result: relative error inf"),
    ],
)
def test_what_fails_at_one_width_is_a_gap_there_and_ends_nothing(gpu, how, note):
    table = sweeps.run("suite", [failing(gpu, 32, how), doubling(gpu)], POINTS)
    gaps = table[table["median_us"].isna()]
    assert gaps[["contender", "width", "note", "runs"]].to_numpy().tolist() == [["failing", 32, note, 0]]
    assert gaps[["p20_us", "p80_us", "copy_us"]].isna().all(axis=None)
    assert len(table) == 6
    assert table.loc[table["contender"] == "labkit", "median_us"].tolist() == pytest.approx([16, 32, 64])


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


@pytest.mark.parametrize("direction", ["forward", "forward_backward"])
def test_a_long_chain_in_half_precision_may_be_as_far_off_as_plain_pytorch(gpu, direction):
    """A sum with what is much larger loses digits; but not where plain PyTorch itself is far off."""

    def off_by(share, digits):
        losing = lambda x: (x + digits) - digits  # noqa: E731
        call = lambda x: gpu.launch(1.0, 50.0) or losing(x) * (1 + share)  # noqa: E731
        return Contender(f"{share} {digits}", call, replace(DOUBLING, reference=losing))

    contenders = [off_by(0, 20), off_by(0.02, 20), off_by(0.085, 20), off_by(0, 100)]
    table = sweeps.run("suite", contenders, POINTS[:1], dtype="bfloat16", direction=direction)
    assert table["relative_error"][0] > accuracy.ALLOWED_ERROR["bfloat16"], "or there is nothing to allow"
    assert [note.startswith("wrong result") for note in table["note"]] == [False, False, True, True]


def test_a_contender_of_full_precision_is_not_forgiven_what_plain_pytorch_loses(gpu):
    losing = lambda x: 2 * (x.bfloat16().float() if x.dtype is torch.float32 else x)  # noqa: E731
    it = failing(gpu, 0, None, call=lambda x: 2.004 * x)
    table = sweeps.run("suite", [replace(it, work=replace(DOUBLING, reference=losing))], POINTS[:1])
    assert table["note"][0].startswith("wrong result")


def test_gradients_are_right_at_full_size_too(gpu):
    """Right for the sampled batch, wrong for a large one: as when only the left-over rows are done."""
    contender = doubling_with(lambda dy: 2 * dy if len(dy) <= 64 else torch.zeros_like(dy))
    table = sweeps.run("suite", [contender], [{"batch": 200, "width": 16}], direction="forward_backward")
    assert table["note"].tolist() == ["wrong result: relative error 1.0e+00"]


@pytest.mark.parametrize("edge", [0, -1])
def test_a_large_batch_is_checked_small_and_at_both_ends(gpu, edge):
    """Right for the first 64 rows by themselves; wrong in the full size, in its first or last row."""

    def call(x):
        y = 2 * x
        y[edge] *= len(x) <= 64
        return y

    shapes = [{"batch": 64, "width": 16}, {"batch": 100, "width": 16}]
    table = sweeps.run("suite", [failing(gpu, 0, None, call=call)], shapes)
    assert [note.startswith("wrong result") for note in table["note"]] == [False, True]


def test_a_batch_is_sampled_for_the_reference(gpu):
    sizes = []
    work = replace(DOUBLING, reference=lambda x: sizes.append((len(x), x.dtype)) or 2 * x)
    sweeps.run("suite", [doubling(gpu, work=work)], [{"batch": 1000, "width": 4}])
    assert sizes == [(64, torch.float64), (len(accuracy.sampled_rows(1000)), torch.float64)]


def test_another_input_with_rows_is_taken_row_by_row_too(gpu):
    inputs = lambda s: (torch.randn(s["batch"], s["width"]), torch.randn(s["batch"], s["width"]))  # noqa: E731
    product = replace(DOUBLING, inputs=inputs, reference=torch.mul, batched=(0, 1))
    it = Contender("it", lambda x, other: gpu.launch(1.0, 50.0) or x * other, product)
    table = sweeps.run("suite", [it], [{"batch": 100, "width": 16}], direction="forward_backward")
    assert table["note"].tolist() == [""]


class Reusing(torch.autograd.Function):
    """Squares x; its backward leaves its result where the forward had saved x, as some libraries' do."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x.clone())
        return x * x

    @staticmethod
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        x.data.mul_(2 * dy)
        return x.clone()


def test_a_backward_that_cannot_be_repeated_is_timed_with_its_forward(gpu):
    squares = replace(DOUBLING, reference=torch.square)
    contender = Contender("it", lambda x: gpu.launch(1.0, 50.0) or Reusing.apply(x), squares)
    table = sweeps.run("suite", [contender], POINTS[:1], direction="forward_backward")
    assert table["note"].tolist() == [""] and table["median_us"].notna().all()


# What a wrong call is told


@pytest.mark.parametrize("has_gpu", [True, False])
def test_wrong_options_are_named_with_a_gpu_and_without(gpu, monkeypatch, has_gpu):
    monkeypatch.setattr("labkit.gpu.available", lambda: has_gpu)
    for name, value in {"direction": "sideways", "clock": "sundial", "cache": "lukewarm"}.items():
        with pytest.raises(ValueError, match=f"^{name}: {value!r}"):
            sweeps.run("suite", [doubling(gpu)], POINTS, **{name: value})
    with pytest.raises(ValueError, match=r"^contenders: .*labkit, labkit"):
        sweeps.run("suite", [doubling(gpu), doubling(gpu)], POINTS)


# Stopped


def test_stop_is_heard_while_a_point_is_measured_and_whole_points_are_kept(gpu):
    asked = itertools.count()
    table = sweeps.run("suite", [doubling(gpu)], POINTS, stop=lambda: next(asked) > 20)
    assert table.empty and list(table.columns[-2:]) == ["batch", "width"]
    assert next(asked) == 22, "and not asked again"
    seen = []
    one = failing(gpu, 0, None, call=lambda x: seen.append(x.shape[1]) or 2 * x)
    table = sweeps.run("suite", [one], POINTS, stop=lambda: 64 in seen)
    assert table["width"].tolist() == [16, 32]


# Without a GPU


def record(*taped):
    rows.write(paths.RECORDED / "nvidia-h200" / "old" / "01.jsonl", taped)


def untouchable(*_):
    raise AssertionError("without a GPU nothing is called")


UNTOUCHED = Contender("labkit", untouchable, replace(DOUBLING, inputs=untouchable, reference=untouchable))


def test_without_a_gpu_the_tape_is_shown_as_what_it_is(no_gpu):
    """Two sweeps of a lesson may have one suite: measured, each has its own contenders, and so recorded."""
    record(recorded(), recorded("eager", us=20.0), recorded("original", us=273.0), recorded(width=32))
    table = sweeps.run("suite", [UNTOUCHED, replace(UNTOUCHED, name="eager")], POINTS)
    assert table["kind"].tolist() == ["recorded"] * 3
    assert table["device"].tolist() == ["NVIDIA H200"] * 3
    assert table["median_us"].tolist() == [10.0, 20.0, 10.0]
    assert table["width"].tolist() == [16, 16, 32]


def test_only_rows_of_this_measurement_are_taken_from_a_tape(no_gpu):
    empty = sweeps.run("suite", [UNTOUCHED], POINTS)
    assert empty.empty and list(empty.columns) == [*rows.COLUMNS, "batch", "width"]
    others = {"suite": "suite/below", "dtype": "bfloat16", "direction": "backward", "cache": "warm"}
    note = "timed with events, a graph cannot hold it: no"
    record(
        *(recorded(**{name: value}) for name, value in others.items()),
        *(recorded(clock=clock) for clock in ("graph", "host", "events")),
        recorded("waiting", clock="events", note=note),
        recorded("large", clock="events", median_us=None, note="out of memory"),
    )
    asked = [UNTOUCHED, *(replace(UNTOUCHED, name=name) for name in ("waiting", "large"))]
    taken = sweeps.run("suite", asked, POINTS)["contender"]
    events = sweeps.run("suite", asked, POINTS, clock="events")["contender"]
    assert taken.tolist() == ["labkit", "waiting"]
    assert events.tolist() == ["labkit", "large"], "not the fallback of a graph sweep as well"


# grid and floors


def test_a_grid_is_a_run_for_every_combination(gpu):
    options = {"dtype": ("float32", "float16"), "clock": ("host", "graph")}
    table = sweeps.sweep("suite", [doubling(gpu)], iter(POINTS[:2]), **options)
    wanted = itertools.product(*options.values(), (16, 32))
    assert table[["dtype", "clock", "width"]].apply(tuple, axis=1).tolist() == list(wanted)
    assert table.index.tolist() == list(range(8))


# Noise


def test_a_disturbed_point_says_so_and_a_gap_does_not(gpu, monkeypatch):
    monkeypatch.setattr(clocks.noise, "throttle_bits", lambda: 0x4)
    table = sweeps.run("suite", [doubling(gpu), failing(gpu, 16, out_of_memory)], POINTS[:1])
    assert table["noise"].tolist() == ["slowed down by power limit", ""]


# What a lesson times itself


def test_each_timer_is_called_once_and_makes_a_row_or_without_a_gpu_shows_the_tapes(gpu, monkeypatch):
    called = []
    timers = {"wrong": lambda: called.append("wrong") or 3.0, "right": lambda: called.append("right") or 40.0}
    found = sweeps.custom_times("museum/x", timers, "bfloat16")
    assert called == found["contender"].tolist() == ["wrong", "right"]
    assert found["median_us"].tolist() == [3.0, 40.0] and set(found["dtype"]) == {"bfloat16"}
    assert set(found["device"]) == {"Simulated"} and set(found["kind"]) == {"live"}
    assert set(found["clock"]) == set(found["cache"]) == {""}, "they are no clock's"
    with pytest.raises(ZeroDivisionError):
        sweeps.custom_times("museum/x", {"wrong": lambda: 1 / 0})
    monkeypatch.setattr("labkit.gpu.available", lambda: False)
    record(recorded(suite="museum/x", clock="", cache="", us=4.0), recorded(suite="museum/x", us=9.0))
    assert sweeps.custom_times("museum/x", timers)["median_us"].tolist() == [4.0], "not the sweep's"
    assert called == ["wrong", "right"]
