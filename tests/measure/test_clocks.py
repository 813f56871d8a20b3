"""The three clocks, on a device in virtual time: what a timing means, to the microsecond."""

import itertools
import time
import weakref

import pytest
import torch
from simulated import L2_BYTES, Gpu, out_of_memory, ticking

from labkit.measure import clocks
from labkit.measure.clocks import NotTimed, TimedCall

CLOCKS = ("host", "events", "graph")


@pytest.fixture
def gpu(monkeypatch):
    return install(monkeypatch, Gpu())


def install(monkeypatch, gpu):
    monkeypatch.setattr("labkit.gpu.available", lambda: True)
    monkeypatch.setattr("labkit.gpu.uuid", lambda: "")
    monkeypatch.setattr(clocks, "DeviceTimer", lambda: gpu)
    return gpu


def measure(call, **options):
    """The timing of one call without inputs."""
    return clocks.measure({"it": TimedCall(call)}, **options)["it"]


# What each clock counts


@pytest.mark.parametrize(
    ("clock", "launches", "us"),
    [
        ("host", [(5.0, 2.0)], 5.0), ("host", [(2.0, 7.0)], 7.0),  # it waits for the device to be done
        ("events", [(0.0, 1.0), (6.0, 1.0)], 7.0),  # the gap between two kernels counts
        ("graph", [(0.0, 1.0), (6.0, 1.0)], 2.0), *((clock, [], 0.0) for clock in CLOCKS),
    ],
)  # fmt: skip
@pytest.mark.parametrize("cache", ["cold", "warm"])
def test_what_a_clock_counts(gpu, clock, cache, launches, us):
    calls = []

    def call():
        calls.append(len(gpu.log))
        for launch in launches:
            gpu.launch(*launch)

    timing = measure(call, clock=clock, cache=cache)
    assert timing.median_us == pytest.approx(us, rel=0.01)
    assert (timing.clock, timing.cache, timing.note) == (clock, cache, "")
    if clock == "host" and launches:
        samples = [len(list(group)) for _, group in itertools.groupby(calls)][-timing.runs :]
        assert min(samples) >= 140, "many calls to a sample, and the clock does nothing between them"


def test_events_time_each_call_by_itself(gpu, monkeypatch):
    monkeypatch.setattr(clocks, "BUDGET_US", 1000.0)
    timing = measure(ticking(gpu, 3.0, 5.0, 40.0), clock="events")
    assert (timing.median_us, timing.p20_us, timing.p80_us) == (5.0, 3.0, 40.0)
    assert timing.runs % clocks.EVENT_CALLS == 0


def test_graph_divides_one_replay_by_its_number_of_calls(gpu):
    timing = measure(lambda: gpu.launch(8.0, 3.0), clock="graph")
    assert timing.median_us == pytest.approx(3.0)
    replays = [entry for entry in gpu.log if entry.startswith("replay")][-timing.runs :]
    assert len(set(replays)) == 1, "one graph"
    assert int(replays[0].split()[1]) >= 300
    assert gpu.log[-2 * timing.runs :] == ["queued", replays[0]] * timing.runs, "nothing else in a sample"


@pytest.mark.parametrize("clock", ["host", "graph"])
@pytest.mark.parametrize("us", [1.0, 2.0, 30.0, 5000.0])
def test_honest_to_a_microsecond(monkeypatch, clock, us):
    """Starting the clock costs ten times the shortest call, and launching one four times."""
    gpu = install(monkeypatch, Gpu(start_us=10.0))
    cost = (us, 0.0) if clock == "host" else (4.0, us)
    timing = measure(lambda: gpu.launch(*cost), clock=clock, cache="warm")
    assert timing.median_us == pytest.approx(us, rel=0.015)


# How many samples


@pytest.mark.parametrize("clock", CLOCKS)
def test_samples_fit_the_budget_between_the_least_and_the_most(gpu, clock):
    each = clocks.EVENT_CALLS if clock == "events" else 1

    def samples(device_us):
        return measure(lambda: gpu.launch(0.0, device_us), clock=clock).runs // each

    found = samples(10_000.0 / each), samples(100_000.0), samples(2.0)
    assert found == ((5, 5, 21) if clock == "host" else (15, 5, 40)), (
        "of one round of seven by the host clock"
    )


# Contenders, interleaved


def test_contenders_are_interleaved_in_shuffled_order(gpu):
    def order():
        """In which the samples of three contenders of equal cost were taken."""
        taken = []

        def call(name):
            if gpu.log[-1] == "host" and taken[-1:] != [name]:
                taken.append(name)
            gpu.launch(600.0, 1.0)

        clocks.measure({name: TimedCall(call, (name,)) for name in "abc"}, clock="host")
        return taken

    first = order()
    assert order() == first, "the same in each run"
    assert first.count("a") > 20, "not one after the other"
    assert len({tuple(first[i : i + 3]) for i in range(len(first))}) > 6


# Cold and warm


@pytest.mark.parametrize("clock", CLOCKS)
@pytest.mark.parametrize("elements", [1, 300, 512, 2 * L2_BYTES // 4, 2 * L2_BYTES // 4 + 1])
def test_cold_calls_rotate_through_more_than_twice_the_l2_and_warm_ones_through_nothing(gpu, clock, elements):
    gpu._l2_bytes = 40 if elements == 1 else L2_BYTES
    for cache, least in (("cold", 2 * gpu.l2_bytes()), ("warm", 0)):
        seen = []
        call = lambda x, seen=seen: seen.append(x.data_ptr()) or gpu.launch(0.1, 1.0)  # noqa: E731
        clocks.measure({"it": TimedCall(call, (torch.zeros(elements),))}, cache=cache, clock=clock)
        sets = list(dict.fromkeys(seen))
        assert (len(sets) - 1) * 4 * elements <= least < len(sets) * 4 * elements, "no more than needed"
        turns = [sets.index(pointer) for pointer in seen]
        assert turns == [i % len(sets) for i in range(len(seen))], "each in turn: none is still in the cache"


@pytest.mark.parametrize(
    ("cache", "elements", "us", "sample"),
    [
        ("cold", 300, 400.0, ["queued", "replay 7"]),  # seven sets equally often, though three calls fill it
        ("cold", 300, 3000.0, ["queued", "flush", "replay 1"]), ("warm", 300, 3000.0, ["queued", "replay 1"]),
        ("cold", 4 * L2_BYTES, 3000.0, ["queued", "replay 1"]),
    ],
)  # fmt: skip
def test_a_graph_of_one_call_starts_with_the_l2_flushed_or_never_warm(gpu, cache, elements, us, sample):
    job = TimedCall(lambda *_: gpu.launch(0.0, us), (torch.zeros(elements),))
    timing = clocks.measure({"it": job}, cache=cache)["it"]
    assert gpu.log[-len(sample) * timing.runs :] == sample * timing.runs
    assert timing.median_us == pytest.approx(us)


@pytest.mark.parametrize(("cache", "most"), [("cold", 7), ("warm", 1)])
def test_as_many_outputs_are_alive_as_there_are_sets(gpu, cache, most):
    alive, counts = weakref.WeakSet(), []

    def call(x):
        alive.add(output := torch.empty(4))
        counts.append(len(alive))
        gpu.launch(0.0, 1.0)
        return output

    clocks.measure({"it": TimedCall(call, (torch.zeros(300),))}, clock="host", cache=cache)
    assert max(counts) == counts[-1] == most


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(8, 6).T, torch.randn(6, 16)[:, ::2], torch.randn(8).expand(6, 8), torch.tensor(3.0),
        torch.randn(6, 1).expand(6, 8), torch.arange(8).half(), torch.randn(6, 8, requires_grad=True),
    ],
)  # fmt: skip
def test_clones_keep_values_dtype_strides_and_what_requires_gradients(tensor):
    first, *sets = clocks.rotating_inputs(TimedCall(lambda x: x, (tensor,)), 500)
    assert first[0] is tensor and len(sets) > 1
    for (clone,) in sets:
        assert (clone.dtype, clone.shape, clone.stride()) == (tensor.dtype, tensor.shape, tensor.stride())
        assert torch.equal(clone, tensor)
        assert clone.is_leaf and clone.requires_grad == tensor.requires_grad
    assert len({values[0].data_ptr() for values in (first, *sets)}) == len(sets) + 1


def test_all_inputs_of_a_set_are_cloned_and_others_are_shared():
    first, second, text = torch.zeros(50), torch.ones(50), "sum"
    sets = clocks.rotating_inputs(TimedCall(lambda *_: None, (first, second, text, 3)), 1000)
    assert len(sets) == 6, "six sets of 400 bytes exceed 2000"
    assert all(values[2] is text and values[3] == 3 for values in sets)
    assert len({values[1].data_ptr() for values in sets}) == 6
    row = torch.zeros(10).expand(1000, 10)
    assert len(clocks.rotating_inputs(TimedCall(len, (row,)), 400)) == 21, "what is in memory counts"
    for inputs in ((), (torch.zeros(0),), ("text",)):
        assert clocks.rotating_inputs(TimedCall(lambda *_: None, inputs), 1000) == [inputs]


def test_warm_up_runs_on_the_stream_of_the_capture(gpu):
    """Autograd launches a backward pass on the stream of its forward: both must be where graphs record."""
    order = []
    measure(lambda: order.append(list(gpu.log)))
    assert order[0] == ["side stream"]


# What fails


@pytest.mark.parametrize("clock", CLOCKS)
def test_a_failing_job_is_a_gap_and_leaves_the_others_alone(gpu, clock):
    def fail(error):
        raise error

    def good():
        gpu.launch(0.0, 3.0)

    def late(calls=itertools.count()):  # noqa: B008 - while it is sampled, by the clocks that call it then
        good() if next(calls) < 100 else out_of_memory()

    gaps = {
        "broken": (lambda: fail(ValueError("must be even\nand more")), "ValueError: must be even"),
        "silent": (lambda: fail(ValueError()), "ValueError: no message"),
        "large": (out_of_memory, "out of memory"),
        "late": (late, "out of memory"),
    }
    calls = {"z": good, **{name: call for name, (call, _) in gaps.items()}, "a": good}
    outcomes = clocks.measure({name: TimedCall(call) for name, call in calls.items()}, clock=clock)
    assert list(outcomes) == list(calls)
    assert all(outcomes[name] == NotTimed(note) for name, (_, note) in gaps.items()), outcomes
    assert outcomes["z"].median_us == outcomes["a"].median_us == pytest.approx(3.0)
    assert outcomes["a"].runs == outcomes["z"].runs >= 20
    with pytest.raises(KeyboardInterrupt):
        measure(lambda: fail(KeyboardInterrupt()), clock=clock)


def test_without_a_gpu_nothing_is_timed_and_wrong_words_are_named_with_and_without(gpu, monkeypatch):
    for has_gpu in (True, False):
        monkeypatch.setattr("labkit.gpu.available", lambda has_gpu=has_gpu: has_gpu)
        for name, value in {"clock": "sundial", "cache": "lukewarm"}.items():
            with pytest.raises(ValueError, match=f"^{name}: {value!r}"):
                measure(lambda: None, **{name: value})
    with pytest.raises(RuntimeError, match="interpret"):
        measure(lambda: pytest.fail("it runs"))


@pytest.mark.parametrize(("cache", "sets"), [("cold", 7), ("warm", 1)])
def test_what_cannot_be_captured_is_timed_with_events_and_says_so(gpu, cache, sets):
    seen = set()

    def call(x):
        seen.add(x.data_ptr())
        gpu.launch(0.0, 4.0)
        gpu.wait()

    timing = clocks.measure({"it": TimedCall(call, (torch.zeros(300),))}, cache=cache)["it"]
    assert (timing.clock, timing.median_us, timing.cache) == ("events", 4.0, cache)
    assert "cannot hold it: RuntimeError: operation not permitted" in timing.note and len(seen) == sets


# The real device's own small logic, with torch.cuda replaced


@pytest.mark.parametrize(("queued", "flush"), [(False, False), (True, False), (True, True)])
def test_clocks_stand_right_around_the_run(monkeypatch, queued, flush):
    log, now = [], itertools.count()

    class Event:
        def __init__(self, enable_timing):
            self.record = lambda: log.append("event")

        def elapsed_time(self, end):
            return 0.25 if log[-1] == "synchronize" else None

    for where, name, does in (
        (torch.cuda, "Event", Event),
        (torch.cuda, "synchronize", lambda: log.append("synchronize") or next(now)),
        (torch.cuda, "_sleep", lambda cycles: log.append("sleep")),
        (torch, "zeros", lambda size, **_: log.append(f"flush {size}")),
        (time, "perf_counter", lambda: 3e-6 * next(now)),
        (clocks.DeviceTimer, "l2_bytes", lambda _: 100),
    ):
        monkeypatch.setattr(where, name, does)
    cuda = object.__new__(clocks.DeviceTimer)
    assert cuda.device_us(lambda: log.append("run"), queued=queued, flush=flush) == 250.0
    before = ["flush 200"] * flush + ["sleep"] * queued
    assert log == ["synchronize", *before, "event", "run", "event", "synchronize"]
    log.clear()
    assert cuda.host_us(lambda: log.append("run")) == pytest.approx(6.0), "the wait at the end counts"
    assert log == ["synchronize", "run", "synchronize"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="how a capture fails is seen on a GPU only")
def test_a_call_that_cannot_be_captured_leaves_the_others_their_graphs():
    x, before = torch.randn(1024, device="cuda"), torch.cuda.current_stream()
    calls = {"bad": lambda t: t.sum().item(), "idle": lambda t: t, "good": lambda t: t + 1}
    timings = clocks.measure({name: TimedCall(call, (x,)) for name, call in calls.items()}, cache="warm")
    assert [timing.clock for timing in timings.values()] == ["events", "events", "graph"]
    assert "a graph cannot hold it" in timings["bad"].note
    assert "nothing was captured" in timings["idle"].note
    assert torch.cuda.current_stream() == before


# What disturbed it


def test_the_hosts_clock_shows_the_best_of_seven_rounds(gpu):
    """Others share the core but in one of them."""
    seen = []

    def call():
        seen.append(gpu.log.count("host"))
        quiet = 60 < seen[-1] <= 95
        gpu.launch(5.0 if quiet else 9.0, 2.0)

    timing = measure(call, clock="host")
    assert seen[-1] > 110 and timing.median_us == pytest.approx(5.0, rel=0.01)
    assert timing.noise == "" and timing.p20_us == pytest.approx(timing.p80_us), "of this round alone"
    always = measure(lambda: gpu.launch(9.0, 2.0), clock="host")
    assert always.median_us == pytest.approx(9.0, rel=0.01)


def test_a_wide_spread_is_noise_and_a_tick_of_the_clock_is_not(gpu, monkeypatch):
    assert measure(ticking(gpu, 3.0, 5.0, 40.0), clock="events").noise == "spread above 30%"
    assert measure(ticking(gpu, 1.0, 1.2, 1.4), clock="events").noise == ""
    seen = iter([0x0, 0x4, *[0x0] * 100])
    monkeypatch.setattr("labkit.gpu.throttle_bits", lambda: next(seen))
    even, uneven = lambda: gpu.launch(0.0, 30.0), ticking(gpu, 3.0, 5.0, 40.0)
    timings = clocks.measure({"even": TimedCall(even), "uneven": TimedCall(uneven)}, clock="events")
    assert timings["even"].noise == "slowed down by power limit", "all of the run"
    assert timings["uneven"].noise == "slowed down by power limit; spread above 30%"


def test_a_disturbance_is_named_by_the_measure_of_its_clock():
    said = {
        (0, "graph", 100.0, 10.0): "", (0, "graph", 100.0, 10.1): "spread above 10%",
        (0, "graph", 1.4, 0.4): "",
        (0, "events", 20.0, 5.9): "", (0, "events", 20.0, 6.1): "spread above 30%",
        (0, "host", 100.0, 31.0): "spread above 30%",
        (0x1 | 0x2 | 0x100, "graph", 9.0, 0.0): "",  # idle, or set so by somebody
        (0x20, "graph", 9.0, 0.0): "slowed down by temperature",
        (0x88, "graph", 9.0, 0.0): "slowed down by hardware slowdown and power supply",
        (0x4, "host", 100.0, 31.0): "slowed down by power limit; spread above 30%",
    }  # fmt: skip
    assert {given: clocks.disturbance(*given) for given in said} == said
