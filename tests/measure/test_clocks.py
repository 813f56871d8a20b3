"""The three clocks, on a device in virtual time: what a timing means, to the microsecond."""

import itertools
import math
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import queueing
import torch
from simulated import L2_BYTES, Gpu, out_of_memory, ticking

from labkit.measure import clocks, cold_cache, lock, noise
from labkit.measure.clocks import NotTimed
from labkit.measure.cold_cache import TimedCall

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


def test_events_time_each_call_by_itself(gpu):
    timing = measure(ticking(gpu, 3.0, 5.0, 40.0), clock="events", budget_s=0.001)
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
        return measure(lambda: gpu.launch(0.0, device_us), clock=clock, budget_s=0.15).runs // each

    found = samples(10_000.0 / each), samples(100_000.0), samples(2.0)
    assert found == (15, clocks.MIN_SAMPLES, clocks.MAX_SAMPLES)


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
    first, *sets = cold_cache.rotating_inputs(TimedCall(lambda x: x, (tensor,)), 500)
    assert first[0] is tensor and len(sets) > 1
    for (clone,) in sets:
        assert (clone.dtype, clone.shape, clone.stride()) == (tensor.dtype, tensor.shape, tensor.stride())
        assert torch.equal(clone, tensor)
        assert clone.is_leaf and clone.requires_grad == tensor.requires_grad
    assert len({values[0].data_ptr() for values in (first, *sets)}) == len(sets) + 1


def test_all_inputs_of_a_set_are_cloned_and_others_are_shared():
    first, second, text = torch.zeros(50), torch.ones(50), "sum"
    sets = cold_cache.rotating_inputs(TimedCall(lambda *_: None, (first, second, text, 3)), 1000)
    assert len(sets) == 6, "six sets of 400 bytes exceed 2000"
    assert all(values[2] is text and values[3] == 3 for values in sets)
    assert len({values[1].data_ptr() for values in sets}) == 6
    row = torch.zeros(10).expand(1000, 10)
    assert len(cold_cache.rotating_inputs(TimedCall(len, (row,)), 400)) == 21, "what is in memory counts"
    for inputs in ((), (torch.zeros(0),), ("text",)):
        assert cold_cache.rotating_inputs(TimedCall(lambda *_: None, inputs), 1000) == [inputs]


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
    assert outcomes["a"].runs >= clocks.MAX_SAMPLES
    with pytest.raises(KeyboardInterrupt):
        measure(lambda: fail(KeyboardInterrupt()), clock=clock)


def test_without_a_gpu_nothing_is_timed_and_wrong_words_are_named_with_and_without(gpu, monkeypatch):
    for has_gpu in (True, False):
        monkeypatch.setattr("labkit.gpu.available", lambda has_gpu=has_gpu: has_gpu)
        for name, value in {"clock": "sundial", "cache": "lukewarm"}.items():
            with pytest.raises(ValueError, match=f"^{name}: {value!r}"):
                measure(lambda: None, **{name: value})
    with pytest.raises(clocks.CannotTimeError, match="interpret"):
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


# Stop


def test_stop_is_asked_before_every_sample(gpu):
    """So that it takes no longer than a sample does."""
    asked = []

    def stop():
        asked.append(len(gpu.log))
        return len(asked) > 20

    with pytest.raises(lock.StoppedError):
        measure(lambda: gpu.launch(0.0, 1.0), stop=stop)
    assert len(asked) == 21
    assert gpu.log[asked[-1] :] == [], "nothing ran after it"
    assert all(later - earlier == 2 for earlier, later in itertools.pairwise(asked[2:]))


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


def test_tf32_is_off_while_it_measures_and_as_it_was_afterwards(gpu):
    seen, matmul = [], torch.backends.cuda.matmul
    before, matmul.allow_tf32 = matmul.allow_tf32, True
    try:
        measure(lambda: seen.append(matmul.allow_tf32) or gpu.launch(1.0, 5.0))
        assert not any(seen) and matmul.allow_tf32
    finally:
        matmul.allow_tf32 = before


# Threads take turns


def test_who_waits_for_its_turn_can_be_stopped_and_who_has_it_can_nest(gpu):
    stop = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        with pytest.raises(ZeroDivisionError), lock.thread_lock():
            assert measure(lambda: gpu.launch(1.0, 30.0), budget_s=0.0).median_us == pytest.approx(30.0)
            waiting = pool.submit(measure, lambda: pytest.fail("not its turn"), stop=stop.is_set)
            time.sleep(0.15)
            assert not waiting.done()
            stop.set()
            with pytest.raises(lock.StoppedError, match="another measurement had the GPU"):
                waiting.result(5)
            _ = 1 / 0
        assert pool.submit(measure, lambda: None, budget_s=0.0).result(5), "a turn ends with an error, too"


# Processes take turns


@pytest.fixture
def queue(gpu, tmp_path, monkeypatch):
    """A GPU that others may want, and the folder where they meet."""
    monkeypatch.setenv(lock.LOCK_FOLDER_VARIABLE, str(tmp_path))
    monkeypatch.setattr("labkit.gpu.uuid", lambda: "GPU-simulated")
    monkeypatch.setattr(noise, "nvml", lambda: None)
    return tmp_path


@pytest.mark.parametrize("clock", CLOCKS)
def test_the_turn_is_held_while_samples_are_taken_and_not_while_calls_are_warmed_up(gpu, queue, clock):
    held = []

    def call():
        held.append(lock.held_gpu())
        gpu.launch(1.0, 3000.0)

    measure(call, clock=clock, budget_s=0.0)
    assert not any(held[: clocks.WARMUPS]) and all(held[clocks.WARMUPS :])
    assert not lock.held_gpu()


def test_a_long_cell_keeps_only_its_own_panel_waiting(gpu, queue, monkeypatch):
    """The thread that waits for the cell lets the other processes go first."""
    monkeypatch.setattr(lock, "BUSY_CELL_S", 0.1)
    served = []

    def cell():
        while lock._waiting.empty():
            time.sleep(0.001)
        process = queueing.begin(queue, "GPU-simulated")
        while (said := queueing.says(process)) not in ("has it", ""):
            pass  # it waits
        served.append(said)
        queueing.end(process)

    timing = measured_in_a_thread(gpu, cell, clock="events")
    assert served == ["has it"]
    assert timing.median_us == pytest.approx(9.0) and not lock.held_gpu(), "the launch counts"


# What disturbed it


def test_samples_of_a_slowed_host_are_taken_again_until_patience_ends(gpu):
    gpu.slow_until = 1e5
    timing = measure(lambda: gpu.launch(5.0, 2.0), clock="host")
    assert gpu.host > gpu.slow_until and timing.noise == ""
    assert timing.p80_us == pytest.approx(timing.p20_us, rel=0.01) == timing.median_us
    assert timing.median_us == pytest.approx(5.0, rel=0.01), "twice as long in the slow moments"
    gpu.slow_until = math.inf
    timing = measure(lambda: gpu.launch(5.0, 2.0), clock="host", budget_s=0.002)
    assert timing.median_us == pytest.approx(10.0, rel=0.01)
    assert timing.noise == "the host was slowed down"
    for clock in ("events", "graph"):
        assert measure(lambda: gpu.launch(5.0, 500.0), clock=clock).noise == "", "a device never waits"


def test_a_wide_spread_is_noise_and_a_tick_of_the_clock_is_not(gpu, monkeypatch):
    assert measure(ticking(gpu, 3.0, 5.0, 40.0), clock="events").noise == "spread above 30%"
    assert measure(ticking(gpu, 1.0, 1.2, 1.4), clock="events").noise == ""
    monkeypatch.setattr(noise.GpuWatch, "finish", lambda _: "another process worked on the GPU")
    even, uneven = lambda: gpu.launch(0.0, 30.0), ticking(gpu, 3.0, 5.0, 40.0)
    timings = clocks.measure({"even": TimedCall(even), "uneven": TimedCall(uneven)}, clock="events")
    assert timings["even"].noise == "another process worked on the GPU", "all of the run"
    assert timings["uneven"].noise == "another process worked on the GPU; spread above 30%"


# In a thread, beside the cells of a notebook


def measured_in_a_thread(gpu, busy, stop=lambda: False, **options):
    """The timing that a thread measures while this one is ``busy()`` and then serves."""
    here = threading.current_thread()

    def work():
        lock.RUN_ON_MAIN_THREAD.set(lambda act: lock.on_main_thread(act, lambda _: None, stop))
        return measure(call, stop=stop, **options)

    def call():
        assert gpu.captured is None or threading.current_thread() is here, "a capture beside a cell"
        gpu.launch(2.0, 7.0)

    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(work)
        busy()
        while not future.done():
            lock.run_waiting()
        return future.result()


def test_graphs_are_captured_on_the_thread_of_the_cells_which_may_measure_as_well(gpu):
    def cell():
        time.sleep(0.2)  # the thread has its turn, and waits for this one to capture
        assert "capture" not in gpu.log and not gpu.log.count("replay 1"), "nothing beside a cell"
        assert measure(lambda: gpu.launch(2.0, 3.0)).median_us == pytest.approx(3.0)

    assert measured_in_a_thread(gpu, cell).median_us == pytest.approx(7.0)


def test_stop_ends_the_wait_for_a_long_cell(gpu):
    stop = threading.Event()
    threading.Timer(0.1, stop.set).start()
    with pytest.raises(lock.StoppedError):
        measured_in_a_thread(gpu, lambda: time.sleep(0.4), stop.is_set)
    assert "capture" not in gpu.log, "what was not begun is not done later"


def test_a_cell_that_is_interrupted_while_it_serves_keeps_its_interrupt():
    def interrupted():
        raise KeyboardInterrupt

    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(lock.on_main_thread, interrupted, lambda _: None, lambda: False)
        with pytest.raises(KeyboardInterrupt):
            while not future.done():
                lock.run_waiting()
    assert isinstance(future.exception(), lock.StoppedError), "an interrupt would end the event loop"


@pytest.mark.parametrize("clock", CLOCKS)
def test_stop_in_any_section_is_no_gap(gpu, clock):
    """Also in the last one, after which nobody asks again whether to stop."""

    def sections_until(last):
        """Measure two jobs, stopped in the section of this number; how many began."""
        begun = itertools.count(1)

        def section(act):
            if next(begun) == last:
                raise lock.StoppedError("stopped while a cell was running")
            return act()

        token = lock.RUN_ON_MAIN_THREAD.set(section)
        try:
            clocks.measure({name: TimedCall(lambda: gpu.launch(2.0, 7.0)) for name in "ab"}, clock=clock)
        finally:
            lock.RUN_ON_MAIN_THREAD.reset(token)
        return next(begun)

    for number in range(1, sections_until(None)):
        with pytest.raises(lock.StoppedError):
            sections_until(number)
