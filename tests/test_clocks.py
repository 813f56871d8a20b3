"""The three clocks, on a device in virtual time: what a timing means, to the microsecond."""

import gc
import itertools
import math
import os
import subprocess
import sys
import threading
import time
import warnings
import weakref
from types import SimpleNamespace

import pytest
import queueing
import torch
from simulated import L2_BYTES, Gpu, out_of_memory, ticking

from labkit import clocks, device, noise
from labkit.clocks import Gap, Job, Timing
from labkit.measure import lock

CLOCKS = ("host", "events", "graph")


@pytest.fixture
def gpu(monkeypatch):
    return install(monkeypatch, Gpu())


def install(monkeypatch, gpu):
    monkeypatch.setattr(device, "has_gpu", lambda: True)
    monkeypatch.setattr(device, "uuid", lambda: "")
    monkeypatch.setattr(clocks, "Cuda", lambda: gpu)
    return gpu


def measure(call, **options):
    """The timing of one call without inputs."""
    return clocks.measure({"it": Job(call)}, **options)["it"]


# What each clock counts


def test_host_counts_wall_time_of_many_calls_with_one_synchronisation(gpu):
    calls = []

    def call():
        calls.append(len(gpu.log))
        gpu.launch(5.0, 2.0)

    timing = measure(call, clock="host")
    assert timing.median_us == pytest.approx(5.0, rel=0.01)
    samples = [len(list(group)) for _, group in itertools.groupby(calls)][-timing.runs :]
    assert min(samples) >= 190, "many calls to a sample, and the clock does nothing between them"
    assert [what for what in gpu.log if what == "host"][-timing.runs :] == ["host"] * timing.runs


def test_host_waits_for_the_device_to_be_done(gpu):
    assert measure(lambda: gpu.launch(2.0, 7.0), clock="host").median_us == pytest.approx(7.0, rel=0.01)


def test_events_time_each_call_by_itself(gpu):
    timing = measure(ticking(gpu, 3.0, 5.0, 40.0), clock="events", budget_s=0.001)
    assert timing.clock == "events"
    assert (timing.median_us, timing.p20_us, timing.p80_us) == (5.0, 3.0, 40.0)
    assert timing.runs % clocks.EVENT_CALLS == 0


def test_events_count_the_gap_between_two_kernels(gpu):
    def two():
        gpu.launch(0.0, 1.0)
        gpu.launch(6.0, 1.0)

    assert measure(two, clock="events").median_us == 7.0
    assert measure(two, clock="graph").median_us == pytest.approx(2.0)


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


@pytest.mark.parametrize("cache", ["cold", "warm"])
def test_a_graph_is_long_enough_although_the_host_is_slow(monkeypatch, cache):
    gpu = install(monkeypatch, Gpu(start_us=10.0))
    job = Job(lambda _: gpu.launch(50.0, 1.0), (torch.zeros(100),))
    assert clocks.measure({"it": job}, cache=cache)["it"].median_us == pytest.approx(1.0, rel=0.015)


def test_a_call_that_launches_nothing_ends(gpu):
    for clock in CLOCKS:
        assert measure(lambda: None, clock=clock).median_us == 0.0


def test_a_timing_is_the_median_with_p20_and_p80():
    timing = Timing.of([5.0, 1.0, 2.0, 4.0, 3.0, 100.0], "graph", "cold")
    assert (timing.median_us, timing.p20_us, timing.p80_us, timing.runs) == (3.5, 2.0, 5.0, 6)
    assert timing.spread_us == 3.0


def test_a_timing_says_how_it_was_made(gpu):
    for clock, cache in itertools.product(CLOCKS, ("cold", "warm")):
        timing = measure(lambda: gpu.launch(1.0, 1.0), clock=clock, cache=cache)
        assert (timing.clock, timing.cache, timing.note) == (clock, cache, "")


# How many samples


def samples_of(gpu, device_us, **options):
    timing = measure(lambda: gpu.launch(0.0, device_us), **options)
    return timing.runs // (clocks.EVENT_CALLS if timing.clock == "events" else 1)


@pytest.mark.parametrize("clock", CLOCKS)
def test_samples_fit_the_budget_between_the_least_and_the_most(gpu, clock):
    per_sample = clocks.EVENT_CALLS if clock == "events" else 1
    assert samples_of(gpu, 10_000.0 / per_sample, clock=clock, budget_s=0.15) == 15
    assert samples_of(gpu, 100_000.0, clock=clock) == clocks.MIN_SAMPLES
    assert samples_of(gpu, 2.0, clock=clock) == clocks.MAX_SAMPLES


# Contenders, interleaved


def order_of(gpu, seed):
    """The order in which the samples of three contenders with equal cost were taken."""
    taken = []

    def contender(name):
        def call():
            if gpu.log[-1] == "host" and (not taken or taken[-1] != name):
                taken.append(name)
            gpu.launch(600.0, 1.0)

        return Job(call)

    clocks.measure({name: contender(name) for name in "abc"}, clock="host", seed=seed)
    return taken


def test_contenders_are_interleaved_in_shuffled_order(gpu):
    order = order_of(gpu, seed=0)
    assert order_of(gpu, seed=0) == order, "the seed decides"
    assert order_of(gpu, seed=1) != order
    assert order.count("a") > 20, "not one after the other"
    assert len({tuple(order[i : i + 3]) for i in range(len(order))}) > 6


def test_every_round_takes_each_contender_once(monkeypatch):
    gpu = install(monkeypatch, Gpu())
    taken = []

    class Recording(clocks._Sampler):
        def take(self):
            taken.append(self)
            return super().take()

    monkeypatch.setattr(clocks, "_Sampler", Recording)
    jobs = {name: Job(lambda: gpu.launch(0.0, 1.0)) for name in "abcd"}
    outcomes = clocks.measure(jobs)
    rounds = [taken[i : i + 4] for i in range(0, len(taken), 4)]
    assert len(rounds) == clocks.MAX_SAMPLES
    assert all(len({id(sampler) for sampler in each}) == 4 for each in rounds)
    assert len({tuple(map(id, each)) for each in rounds}) > 10
    assert {outcome.runs for outcome in outcomes.values()} == {clocks.MAX_SAMPLES}


def test_drift_of_the_device_hits_contenders_alike(gpu):
    """The device slows down to half its speed during the run: equal contenders still measure equal."""
    began = [None]

    def call():
        slow = 1.0 + min(gpu.host / 8e6, 1.0)
        began[0] = began[0] or slow
        gpu.launch(0.0, 600.0 * slow)

    outcomes = clocks.measure({"a": Job(call), "b": Job(call)}, clock="events")
    a, b = outcomes["a"], outcomes["b"]
    assert a.spread_us > 5.0, "the simulation drifts"
    assert abs(a.median_us - b.median_us) < max(a.spread_us, b.spread_us) / 4


def test_outcomes_keep_the_order_of_the_jobs(gpu):
    jobs = {"z": Job(lambda: gpu.launch(0.0, 1.0)), "bad": Job(out_of_memory), "a": Job(lambda: None)}
    assert list(clocks.measure(jobs)) == ["z", "bad", "a"]


def test_no_jobs_are_no_outcomes(gpu):
    assert clocks.measure({}) == {}


# Cold and warm


def touched(cache, clock, tensor, gpu, device_us=1.0):
    """Which memory a job's calls read in turn during the last sample."""
    seen = []

    def call(x):
        seen.append(x.data_ptr())
        gpu.launch(0.1, device_us)

    clocks.measure({"it": Job(call, (tensor,))}, cache=cache, clock=clock)
    return seen


@pytest.mark.parametrize("clock", CLOCKS)
@pytest.mark.parametrize("elements", [1, 300, 512, 2 * L2_BYTES // 4, 2 * L2_BYTES // 4 + 1])
def test_cold_calls_rotate_through_more_than_twice_the_l2(gpu, clock, elements):
    tensor = torch.zeros(elements)
    if elements == 1:
        gpu._l2_bytes = 40
    seen = touched("cold", clock, tensor, gpu)
    sets = list(dict.fromkeys(seen))
    assert len(sets) * tensor.nbytes > 2 * gpu.l2_bytes()
    assert (len(sets) - 1) * tensor.nbytes <= 2 * gpu.l2_bytes(), "and not through more than needed"
    turns = [sets.index(pointer) for pointer in seen]
    assert turns == [i % len(sets) for i in range(len(seen))], "each in turn, so none is still in the cache"


def test_a_cold_graph_holds_every_set_equally_often(gpu):
    job = Job(lambda *_: gpu.launch(0.0, 400.0), (torch.zeros(300),))  # seven sets, three calls fill a sample
    clocks.measure({"it": job})
    assert gpu.log[-1] == "replay 7"


def test_a_cold_graph_of_one_call_starts_with_the_l2_flushed(gpu):
    job = Job(lambda *_: gpu.launch(0.0, 3000.0), (torch.zeros(300),))
    timing = clocks.measure({"it": job})["it"]
    assert gpu.log[-3 * timing.runs :] == ["queued", "flush", "replay 1"] * timing.runs
    assert timing.median_us == 3000.0


@pytest.mark.parametrize(("cache", "elements"), [("warm", 300), ("cold", 4 * L2_BYTES)])
def test_nothing_is_flushed_where_it_is_warm_or_larger_than_the_cache(gpu, cache, elements):
    job = Job(lambda *_: gpu.launch(0.0, 3000.0), (torch.zeros(elements),))
    clocks.measure({"it": job}, cache=cache)
    assert "flush" not in gpu.log


@pytest.mark.parametrize("clock", CLOCKS)
def test_warm_calls_use_one_set(gpu, clock):
    tensor = torch.zeros(300)
    assert set(touched("warm", clock, tensor, gpu)) == {tensor.data_ptr()}


@pytest.mark.parametrize(("cache", "most"), [("cold", 7), ("warm", 1)])
def test_as_many_outputs_are_alive_as_there_are_sets(gpu, cache, most):
    alive, counts = weakref.WeakSet(), []

    def call(x):
        output = torch.empty(4)
        alive.add(output)
        counts.append(len(alive))
        gpu.launch(0.0, 1.0)
        return output

    clocks.measure({"it": Job(call, (torch.zeros(300),))}, clock="host", cache=cache)
    assert max(counts) == most
    assert counts[-1] == most


def test_nothing_stays_alive_after_a_measurement(gpu):
    inputs = torch.zeros(300)
    made = weakref.WeakSet()

    def call(x):
        made.add(x)
        gpu.launch(0.0, 1.0)

    clocks.measure({"it": Job(call, (inputs,))})
    gc.collect()
    assert set(map(id, made)) <= {id(inputs)}


STRIDED = {
    "contiguous": torch.randn(6, 8),
    "transposed": torch.randn(8, 6).T,
    "every second": torch.randn(6, 16)[:, ::2],
    "expanded": torch.randn(8).expand(6, 8),
    "expanded column": torch.randn(6, 1).expand(6, 8),
    "half": torch.randn(6, 8).half(),
    "whole numbers": torch.arange(8),
    "a number": torch.tensor(3.0),
}


@pytest.mark.parametrize("name", STRIDED)
def test_clones_keep_values_dtype_and_strides(name):
    tensor = STRIDED[name]
    sets = clocks.rotation(Job(lambda x: x, (tensor,)), 500)
    assert sets[0][0] is tensor
    assert len(sets) > 2
    for (clone,) in sets[1:]:
        assert clone.dtype == tensor.dtype
        assert clone.shape == tensor.shape
        assert clone.stride() == tensor.stride()
        assert torch.equal(clone, tensor)
    assert len({values[0].data_ptr() for values in sets}) == len(sets)


def test_an_expanded_input_counts_what_is_in_memory():
    row = torch.zeros(10).expand(1000, 10)
    assert len(clocks.rotation(Job(lambda x: x, (row,)), 400)) == 21


@pytest.mark.parametrize("wanted", [True, False])
def test_clones_are_leaves_that_require_what_the_input_requires(wanted):
    tensor = torch.randn(8, requires_grad=wanted)
    for (each,) in clocks.rotation(Job(lambda x: x, (tensor,)), 100):
        assert each.requires_grad is wanted
        assert each.is_leaf


def test_all_inputs_of_a_set_are_cloned_and_others_are_shared():
    first, second, text = torch.zeros(50), torch.ones(50), "sum"
    sets = clocks.rotation(Job(lambda *_: None, (first, second, text, 3)), 1000)
    assert len(sets) == 6, "six sets of 400 bytes exceed 2000"
    assert all(values[2] is text and values[3] == 3 for values in sets)
    assert len({values[1].data_ptr() for values in sets}) == 6


@pytest.mark.parametrize("inputs", [(), (torch.zeros(0),), ("text",)])
def test_without_memory_to_rotate_there_is_one_set(inputs):
    assert clocks.rotation(Job(lambda *_: None, inputs), 1000) == [inputs]


def test_setup_runs_once_for_each_set_outside_the_timed_region(gpu):
    prepared, received = [], []

    def setup(x):
        gpu.launch(1000.0, 1000.0)
        prepared.append(x.data_ptr())
        return (x + 1,)

    def call(x):
        received.append(x[0].item())
        gpu.launch(0.0, 2.0)

    job = Job(call, (torch.zeros(300),), setup)
    assert clocks.measure({"it": job})["it"].median_us == pytest.approx(2.0)
    assert len(prepared) == len(set(prepared)) == 7
    assert set(received) == {1.0}


def test_warm_up_runs_on_the_stream_of_the_capture(gpu):
    """Autograd launches a backward pass on the stream of its forward: both must be where graphs record."""
    order = []
    measure(lambda: order.append(list(gpu.log)))
    assert order[0] == ["side stream"]


# What fails


@pytest.mark.parametrize("clock", CLOCKS)
def test_a_failing_job_is_a_gap_and_leaves_the_others_alone(gpu, clock):
    def broken():
        raise ValueError("width: must be even\nand more")

    jobs = {"broken": Job(broken), "large": Job(out_of_memory), "good": Job(lambda: gpu.launch(0.0, 3.0))}
    outcomes = clocks.measure(jobs, clock=clock)
    assert outcomes["broken"] == Gap("ValueError: width: must be even")
    assert outcomes["large"] == Gap("out of memory")
    assert outcomes["good"].median_us == pytest.approx(3.0)
    assert outcomes["good"].runs >= clocks.MAX_SAMPLES


def test_a_job_that_fails_while_it_is_sampled_is_a_gap(gpu):
    calls = itertools.count()

    def fails_later():
        if next(calls) == 3000:
            out_of_memory()
        gpu.launch(10.0, 1.0)

    jobs = {"late": Job(fails_later), "good": Job(lambda: gpu.launch(10.0, 1.0))}
    outcomes = clocks.measure(jobs, clock="host")
    assert outcomes["late"] == Gap("out of memory")
    assert outcomes["good"].runs == clocks.MAX_SAMPLES


def test_a_clone_that_does_not_fit_is_a_gap(gpu, monkeypatch):
    monkeypatch.setattr(clocks, "_clone", out_of_memory)
    jobs = {"it": Job(lambda _: gpu.launch(0.0, 1.0), (torch.zeros(300),))}
    assert clocks.measure(jobs)["it"] == Gap("out of memory")


@pytest.mark.parametrize(("cache", "sets"), [("cold", 7), ("warm", 1)])
def test_what_cannot_be_captured_is_timed_with_events_and_says_so(gpu, cache, sets):
    seen = set()

    def call(x):
        seen.add(x.data_ptr())
        gpu.launch(0.0, 4.0)
        gpu.wait()

    timing = clocks.measure({"it": Job(call, (torch.zeros(300),))}, cache=cache)["it"]
    assert (timing.clock, timing.median_us, timing.cache) == ("events", 4.0, cache)
    assert timing.note == (
        "timed with events, a graph cannot hold it: "
        "RuntimeError: operation not permitted when stream is capturing"
    )
    assert len(seen) == sets


def test_a_capture_without_memory_is_a_gap_not_a_fallback(gpu, monkeypatch):
    monkeypatch.setattr(gpu, "capture", out_of_memory)
    assert measure(lambda: gpu.launch(0.0, 4.0)) == Gap("out of memory")


def test_a_gap_says_so_also_without_words(gpu):
    def broken():
        raise RuntimeError

    assert measure(broken) == Gap("RuntimeError: no message")
    assert len(clocks.describe(RuntimeError("x" * 5000))) <= 200


@pytest.mark.skipif(torch.cuda.is_available(), reason="it is about what PyTorch says without a GPU")
@pytest.mark.parametrize("act", [torch.cuda.current_device, torch.ones(1).cuda])
def test_a_call_that_needs_a_gpu_says_so_in_three_words(act):
    with pytest.raises((RuntimeError, AssertionError)) as caught:
        act()
    assert clocks.describe(caught.value) == "needs a GPU"
    assert clocks.describe(RuntimeError("of another kind")) == "RuntimeError: of another kind"


def test_an_interruption_from_the_keyboard_ends_everything(gpu):
    def interrupted():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure(interrupted)


def test_without_a_gpu_nothing_is_timed_and_nothing_runs(monkeypatch):
    monkeypatch.setattr(device, "has_gpu", lambda: False)
    ran = []
    with pytest.raises(clocks.CannotTimeError) as caught:
        measure(lambda: ran.append(1))
    assert not ran
    sentence, advice = str(caught.value).split(". ", 1)
    assert sentence.startswith("Nothing is timed here")
    assert "interpret" in sentence
    assert "counts.count(call)" in advice


def test_the_real_interpreter_is_refused():
    """In a process of its own, with nothing replaced."""
    script = "from labkit import clocks; clocks.measure({'it': clocks.Job(lambda: None)})"
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment)
    assert ran.returncode == 1
    assert ran.stderr.strip().splitlines()[-1].startswith("labkit.clocks.CannotTimeError: Nothing is timed")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"clock": "sundial"}, "clock: 'sundial' is none of host, events, graph"),
        ({"cache": "lukewarm"}, "cache: 'lukewarm' is neither cold nor warm"),
    ],
)
@pytest.mark.parametrize("has_gpu", [True, False])
def test_unknown_clocks_and_caches_are_named(monkeypatch, options, message, has_gpu):
    monkeypatch.setattr(device, "has_gpu", lambda: has_gpu)
    with pytest.raises(ValueError, match=message):
        measure(lambda: None, **options)


# Stop


def test_stop_before_the_first_job_measures_nothing(gpu):
    ran = []
    with pytest.raises(clocks.StoppedError):
        measure(lambda: ran.append(1), stop=lambda: True)
    assert not ran


def test_stop_is_asked_before_every_sample(gpu):
    """So that it takes no longer than a sample does."""
    asked = []

    def stop():
        asked.append(len(gpu.log))
        return len(asked) > 20

    with pytest.raises(clocks.StoppedError):
        measure(lambda: gpu.launch(0.0, 1.0), stop=stop)
    assert len(asked) == 21
    assert gpu.log[asked[-1] :] == [], "nothing ran after it"
    assert all(later - earlier == 2 for earlier, later in itertools.pairwise(asked[2:]))


def test_stop_comes_through_in_a_moment_of_real_time(gpu):
    """Calls that take a millisecond, a budget of an hour, and a stop after a tenth of a second."""
    began = time.monotonic()

    def call():
        time.sleep(0.001)
        gpu.launch(1000.0, 1.0)

    with pytest.raises(clocks.StoppedError):
        clocks.measure(
            {str(i): Job(call) for i in range(50)},
            clock="host",
            budget_s=3600,
            stop=lambda: time.monotonic() - began > 0.1,
        )
    assert time.monotonic() - began < 10, "a moment, however busy the machine"


# The real device's own small logic, with torch.cuda replaced


@pytest.mark.parametrize(("queued", "flush"), [(False, False), (True, False), (True, True)])
def test_events_stand_right_around_the_run(monkeypatch, queued, flush):
    log = []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            log.append("event")

        def elapsed_time(self, end):
            return 0.25 if log[-1] == "synchronize" else None

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: log.append("synchronize"))
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: log.append("sleep"))
    monkeypatch.setattr(torch, "zeros", lambda size, dtype, device: log.append(f"flush {size}"))
    monkeypatch.setattr(clocks.Cuda, "l2_bytes", lambda _: 100)
    cuda = object.__new__(clocks.Cuda)
    assert cuda.device_us(lambda: log.append("run"), queued=queued, flush=flush) == 250.0
    before = ["flush 200"] * flush + ["sleep"] * queued
    assert log == ["synchronize", *before, "event", "run", "event", "synchronize"]


def test_the_wall_clock_starts_idle_and_ends_done(monkeypatch):
    log, now = [], [0.0]

    def wait():
        log.append("synchronize")
        now[0] += 3e-6

    monkeypatch.setattr(torch.cuda, "synchronize", wait)
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    cuda = object.__new__(clocks.Cuda)
    assert cuda.host_us(lambda: log.append("run")) == pytest.approx(3.0), "the wait at the end counts"
    assert log == ["synchronize", "run", "synchronize"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="how a capture fails is seen on a GPU only")
def test_a_call_that_cannot_be_captured_leaves_the_others_their_graphs():
    x = torch.randn(1024, device="cuda")
    before = torch.cuda.current_stream()
    jobs = {"bad": Job(lambda t: t.sum().item(), (x,)), "good": Job(lambda t: t + 1, (x,))}
    timings = clocks.measure(jobs, cache="warm")
    assert (timings["bad"].clock, timings["good"].clock) == ("events", "graph")
    assert "a graph cannot hold it" in timings["bad"].note
    assert torch.cuda.current_stream() == before


@pytest.mark.skipif(not torch.cuda.is_available(), reason="how a capture fails is seen on a GPU only")
def test_a_call_that_does_nothing_on_the_gpu_has_no_time_in_a_graph():
    timing = clocks.measure({"idle": Job(lambda t: t, (torch.ones(1, device="cuda"),))}, cache="warm")["idle"]
    assert timing.clock == "events" and "nothing was captured" in timing.note


def test_that_a_graph_is_empty_is_told_and_other_warnings_are_given():
    with pytest.warns(UserWarning, match="mind the gap") as given, clocks._told_if_empty() as empty:
        warnings.warn("The CUDA Graph is empty. This usually means ...", stacklevel=1)
        warnings.warn("mind the gap", stacklevel=1)
    assert len(given) == 1 and len(empty) == 1
    with clocks._told_if_empty() as empty:
        pass
    assert empty == []


def test_tf32_is_off_while_it_measures_and_as_it_was_afterwards(gpu):
    seen = []
    matmul = torch.backends.cuda.matmul
    before, matmul.allow_tf32 = matmul.allow_tf32, True
    try:
        clocks.measure({"it": Job(lambda: (seen.append(matmul.allow_tf32), gpu.launch(1.0, 5.0))[1])})
        assert not any(seen) and matmul.allow_tf32
    finally:
        matmul.allow_tf32 = before


# Threads take turns


def test_measurements_of_two_threads_take_turns(gpu):
    inside, most = [], []

    def call():
        inside.append(1)
        most.append(len(inside))
        time.sleep(0.0005)
        inside.pop()
        gpu.launch(1.0, 300.0)

    threads = [threading.Thread(target=measure, args=(call,), kwargs={"budget_s": 0.0}) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert max(most) == 1


def test_who_waits_for_its_turn_can_be_stopped_and_who_has_it_can_nest(gpu):
    stop, told = threading.Event(), []

    def waiting():
        with pytest.raises(clocks.StoppedError, match="another measurement had its turn"):
            measure(lambda: pytest.fail("not its turn"), stop=stop.is_set)
        told.append(time.monotonic())

    with clocks.turn():
        assert measure(lambda: gpu.launch(1.0, 30.0), budget_s=0.0).median_us == pytest.approx(30.0)
        thread = threading.Thread(target=waiting)
        thread.start()
        time.sleep(0.15)
        assert not told
        stop.set()
        stopped = time.monotonic()
        thread.join(5)
        assert told and told[0] - stopped < 0.5


def test_a_turn_ends_with_an_error_too(gpu):
    with pytest.raises(ZeroDivisionError), clocks.turn():
        _ = 1 / 0
    entered = []

    def enter():
        with clocks.turn(stop=lambda: True):
            entered.append(True)

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join(5)
    assert entered, "another thread gets it"


# Processes take turns


@pytest.fixture
def queue(gpu, tmp_path, monkeypatch):
    """A GPU that others may want, and the folder where they meet."""
    monkeypatch.setenv(lock.FOLDER, str(tmp_path))
    monkeypatch.setattr(device, "uuid", lambda: "GPU-simulated")
    monkeypatch.setattr(noise, "library", lambda: None)
    return tmp_path


@pytest.mark.parametrize("clock", CLOCKS)
def test_the_turn_is_held_while_samples_are_taken_and_not_while_calls_are_warmed_up(gpu, queue, clock):
    held = []

    def call():
        held.append(lock.held())
        gpu.launch(1.0, 3000.0)

    measure(call, clock=clock, budget_s=0.0)
    assert not any(held[: clocks.WARMUPS]) and all(held[clocks.WARMUPS :])
    assert not lock.held()


def test_what_waits_for_its_turn_takes_no_samples_and_loses_none(gpu, queue):
    alone, given_up = measure(lambda: gpu.launch(1.0, 30.0)), threading.Event()

    def stop():
        assert given_up.is_set() or not {"device", "queued", "capture"} & set(gpu.log)
        return False

    with queueing.other(queue, "GPU-simulated") as process:
        gpu.log.clear()
        threading.Timer(0.3, lambda: (given_up.set(), queueing.end(process))).start()
        assert measure(lambda: gpu.launch(1.0, 30.0), stop=stop) == alone
        assert given_up.is_set()


def test_a_long_cell_keeps_only_its_own_panel_waiting(gpu, queue, monkeypatch):
    """The thread that waits for the cell lets the other processes go first."""
    monkeypatch.setattr(clocks, "BUSY_S", 0.1)
    served = []

    def cell():
        end = time.monotonic() + 10
        while not served and time.monotonic() < end:
            process = queueing.begin(queue, "GPU-simulated")
            if queueing.says(process) == "has it" or queueing.says(process) == "served":
                served.append(process)
            queueing.end(process)

    timing, threads = measured_in_a_thread(gpu, cell)
    assert served and timing.median_us == pytest.approx(7.0)
    assert set(threads) == {threading.current_thread()}
    assert not lock.held()


class Recorder:
    """NVML as far as it says who worked on the GPU and when: this process always."""

    NVMLError = RuntimeError

    def __init__(self):
        self.others = []
        """When another process worked; in microseconds since 1970."""

    def work(self):
        self.others.append(time.time_ns() // 1000)

    def nvmlDeviceGetProcessUtilization(self, _, since):  # noqa: N802
        pids = [os.getpid()] + [1 for at in self.others if at > since]
        return [SimpleNamespace(pid=pid, smUtil=90) for pid in pids]

    def nvmlDeviceGetComputeRunningProcesses(self, _):  # noqa: N802
        return [SimpleNamespace(pid=os.getpid())]

    def nvmlDeviceGetHandleByUUID(self, _):  # noqa: N802
        return "handle"

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, _):  # noqa: N802
        return 0


@pytest.mark.parametrize("beside", [False, True])
def test_what_others_do_in_their_turn_disturbs_no_sample(gpu, queue, monkeypatch, beside):
    """In the midst of the samples a cell keeps the panel waiting, and another process has its turn."""
    monkeypatch.setattr(clocks, "BUSY_S", 0.1)
    driver, served = Recorder(), []
    monkeypatch.setattr(noise, "library", lambda: driver)

    def cell():
        end = time.monotonic() + 60
        while clocks._waiting.empty() and time.monotonic() < end:
            time.sleep(0.001)
        process = queueing.begin(queue, "GPU-simulated")
        while (said := queueing.says(process)) not in ("has it", ""):
            pass  # it waits
        driver.work()
        served.append(said)
        queueing.end(process)

    during = driver.work if beside else lambda: None
    timing, _ = measured_in_a_thread(gpu, cell, during=during, clock="events")
    assert served == ["has it"]
    assert timing.noise == ("another process worked on the GPU" if beside else "")


# What disturbed it


def test_samples_of_a_slowed_host_are_taken_again(gpu):
    gpu.slow_until = 1e5
    timing = measure(lambda: gpu.launch(5.0, 2.0), clock="host")
    assert gpu.host > gpu.slow_until
    assert timing.p80_us == pytest.approx(timing.p20_us, rel=0.01)
    assert timing.median_us == pytest.approx(5.0, rel=0.01), "twice as long in the slow moments"
    assert timing.noise == ""


def test_a_host_that_stays_slow_is_measured_and_said(gpu):
    gpu.slow_until = math.inf
    timing = measure(lambda: gpu.launch(5.0, 2.0), clock="host", budget_s=0.002)
    assert timing.median_us == pytest.approx(10.0, rel=0.01)
    assert timing.noise == "the host was slowed down"
    for clock in ("events", "graph"):
        assert measure(lambda: gpu.launch(5.0, 500.0), clock=clock).noise == "", (
            "of a device that never waits"
        )


def test_waiting_for_a_cell_costs_no_patience(gpu, monkeypatch):
    gpu.slow_until = 1e5
    waited = []

    def section(act):
        if not waited:
            waited.append(time.sleep(0.2))
        return act()

    monkeypatch.setattr(clocks, "SECTION", SimpleNamespace(get=lambda: section))
    assert measure(lambda: gpu.launch(5.0, 2.0), clock="host", budget_s=0.015).noise == ""


def test_who_waits_for_a_quiet_host_can_be_stopped(gpu):
    gpu.slow_until = math.inf
    asked = itertools.count()
    with pytest.raises(clocks.StoppedError):
        measure(lambda: gpu.launch(5.0, 2.0), clock="host", budget_s=1e6, stop=lambda: next(asked) > 50)


def test_a_wide_spread_is_noise_and_a_tick_of_the_clock_is_not(gpu):
    assert measure(ticking(gpu, 3.0, 5.0, 40.0), clock="events").noise == "spread above 30%"
    assert measure(ticking(gpu, 1.0, 1.2, 1.4), clock="events").noise == ""
    assert measure(lambda: gpu.launch(1.0, 30.0)).noise == ""


def test_what_disturbed_the_run_disturbed_all_of_it_and_the_gauge_stays_out_of_the_samples(gpu, monkeypatch):
    class Gauge:
        def __init__(self):
            gpu.log.append("gauge")

        look = __init__

        def finding(self):
            return "another process worked on the GPU"

    monkeypatch.setattr(noise, "Gauge", Gauge)
    jobs = {"even": lambda: gpu.launch(0.0, 30.0), "uneven": ticking(gpu, 3.0, 5.0, 40.0)}
    timings = clocks.measure({name: Job(call) for name, call in jobs.items()}, clock="events", budget_s=0.0)
    assert timings["even"].noise == "another process worked on the GPU"
    assert timings["uneven"].noise == "another process worked on the GPU; spread above 30%"
    start = gpu.log.index("gauge")
    round_ = ["side stream", *["device"] * clocks.EVENT_CALLS] * 2
    assert gpu.log[start:] == ["gauge", *[*round_, "gauge"] * clocks.MIN_SAMPLES]


# In a thread, beside the cells of a notebook


def measured_in_a_thread(gpu, busy, stop=lambda: False, during=lambda: None, **options):
    """Measure in a thread while this one is ``busy()`` and then serves; the timing, or the error.

    ``during`` is called by each call that is measured.
    """
    wakes = []

    def work():
        clocks.SECTION.set(lambda act: clocks.on_main_thread(act, wakes.append, stop))
        try:
            found.append(measure(lambda: record(gpu), stop=stop, **options))
        except clocks.StoppedError as error:
            found.append(error)

    found, threads = [], []

    def record(gpu):
        threads.append(threading.current_thread() if gpu.captured is not None else None)
        during()
        gpu.launch(2.0, 7.0)

    thread = threading.Thread(target=work)
    thread.start()
    busy()
    while thread.is_alive():
        clocks.serve()
        thread.join(0.001)
    return found[0], [thread for thread in threads if thread]


def test_graphs_are_captured_on_the_thread_of_the_cells_between_two_of_them(gpu):
    def cell():
        time.sleep(0.2)
        assert "capture" not in gpu.log and not gpu.log.count("replay 1"), "nothing beside a cell"

    timing, threads = measured_in_a_thread(gpu, cell)
    assert timing.median_us == pytest.approx(7.0)
    assert set(threads) == {threading.current_thread()}


def test_a_cell_that_measures_does_not_wait_for_a_thread_that_waits_for_it(gpu):
    def cell():
        time.sleep(0.05)  # the thread has its turn, and waits for this one to capture
        assert measure(lambda: gpu.launch(2.0, 3.0)).median_us == pytest.approx(3.0)

    timing, _ = measured_in_a_thread(gpu, cell)
    assert timing.median_us == pytest.approx(7.0)


def test_stop_ends_the_wait_for_a_long_cell(gpu):
    stop = threading.Event()

    def cell():
        time.sleep(0.1)
        stop.set()
        time.sleep(0.3)

    error, _ = measured_in_a_thread(gpu, cell, stop.is_set)
    assert isinstance(error, clocks.StoppedError)
    assert "capture" not in gpu.log, "what was not begun is not done later"


def test_what_goes_wrong_in_a_section_goes_wrong_in_the_thread_that_asked(gpu):
    with pytest.raises(KeyError, match="mine"):
        clocks.on_main_thread(lambda: {}["mine"], lambda serve: serve(), lambda: False)


def test_a_cell_that_is_interrupted_while_it_serves_keeps_its_interrupt(gpu):
    def interrupted():
        raise KeyboardInterrupt

    found = []

    def work():
        try:
            clocks.on_main_thread(interrupted, lambda _: None, lambda: False)
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        while thread.is_alive():
            clocks.serve()
    thread.join(10)
    assert [type(error) for error in found] == [clocks.StoppedError], "it would end the kernel's event loop"


@pytest.mark.parametrize("clock", CLOCKS)
def test_stop_in_any_section_is_no_gap(gpu, clock):
    """Also in the last one, after which nobody asks again whether to stop."""

    def sections_until(last):
        """Measure two jobs, stopped in the section of this number; how many began."""
        begun = []

        def section(act):
            begun.append(act)
            if len(begun) == last:
                raise clocks.StoppedError("stopped while a cell was running")
            return act()

        token = clocks.SECTION.set(section)
        try:
            clocks.measure({name: Job(lambda: gpu.launch(2.0, 7.0)) for name in "ab"}, clock=clock)
        finally:
            clocks.SECTION.reset(token)
        return len(begun)

    for number in range(1, sections_until(None) + 1):
        with pytest.raises(clocks.StoppedError):
            sections_until(number)


def test_long_samples_leave_the_cells_alone(gpu):
    threads = []

    def call():
        if gpu.captured is None:
            threads.append(threading.current_thread())
        gpu.launch(2.0, clocks.LONG_US + 1)

    found = []
    thread = threading.Thread(
        target=lambda: (
            clocks.SECTION.set(lambda act: clocks.on_main_thread(act, lambda _: None, lambda: False)),
            found.append(measure(call, clock="events")),
        )
    )
    thread.start()
    thread.join(10)  # nobody serves
    assert found and set(threads) == {thread}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="random numbers meet a capture on a GPU only")
def test_a_cell_draws_random_numbers_while_a_thread_captures():
    x = torch.randn(1024, device="cuda")
    found, wakes = [], []

    def work():
        clocks.SECTION.set(lambda act: clocks.on_main_thread(act, wakes.append, lambda: False))
        jobs = {str(n): Job(lambda t: t + 1, (x,)) for n in range(20)}
        found.append(clocks.measure(jobs, cache="warm", budget_s=0.01))

    thread = threading.Thread(target=work)
    thread.start()
    while thread.is_alive():
        torch.randn(64, device="cuda").sum().item()  # fails beside a capture
        clocks.serve()
    assert all(timing.clock == "graph" for timing in found[0].values())
