"""Profiles from a trace with torch.profiler's field names, and from counted launches."""

import itertools
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import queueing
import torch
import triton
import triton.language as tl

from labkit import (
    backend,
    child,
    clocks,
    device,
    machine,
    places,
    profiles,
    rows,
)
from labkit.measure import lock, traces

TRACE = Path(__file__).with_name("data") / "chrome_trace.json"
"""Made by hand: a product, a sum, a Triton kernel on another stream, and a graph of two nodes."""


interpreted = pytest.mark.skipif(
    not backend.interpreting(), reason="Profiles without times need interpreted kernels (TRITON_INTERPRET=1)."
)


@triton.jit
def fill(x_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x_ptr + offsets, 1.0, mask=offsets < n)


@pytest.fixture
def traced():
    return profiles.from_trace(json.loads(TRACE.read_text())["traceEvents"])


def test_kernels_are_in_order_and_start_with_the_hosts_first_event(traced):
    assert [kernel.name for kernel in traced.kernels] == [
        "elementwise_kernel<128, 4, MulFunctor>",
        "elementwise_kernel<128, 4, CUDAFunctor_add>",
        "affine",
        "affine",
        "Memcpy DtoD",
    ]
    first, *_, copy = traced.kernels
    assert (first.start_us, first.duration_us, first.stream) == (10.5, 20.0, 7)
    assert (first.grid, first.block) == ((80, 1, 1), (128, 1, 1))
    assert first.full_name.startswith(
        "void at::native::elementwise_kernel<128, 4, at::native::gpu_kernel_impl"
    )
    assert (copy.grid, copy.block) == ((), ())


def test_gaps_span_and_busy_time_know_overlap(traced):
    assert traced.gaps == [2.0, 0.0, 10.0, 2.0]
    assert traced.span_us == 106.0
    assert traced.busy_us == 92.0
    assert traced.timed


def test_launches_are_what_started_work_and_only_outermost_operations_are_kept(traced):
    assert traced.launches == 4  # five things ran; the graph started two
    assert [event.name for event in traced.host] == [
        "cudaLaunchKernel",
        "cudaLaunchKernel",
        "cuLaunchKernelEx",
        "cudaGraphLaunch",
    ]
    assert [event.name for event in traced.operations] == ["aten::mul", "aten::add"]
    assert (traced.operations[0].start_us, traced.operations[0].duration_us) == (0.0, 12.0)
    assert (traced.host[0].start_us, traced.host[0].duration_us) == (4.0, 5.0)


def test_the_table_adds_up_equal_kernels(traced):
    table = traced.table()
    assert list(table.columns) == ["kernel", "count", "us", "share"]
    assert list(table["count"]) == [1, 1, 2, 1]
    assert list(table["us"]) == [20.0, 10.0, 60.0, 4.0]
    assert table["share"].sum() == pytest.approx(1)


def test_kernels_with_one_short_name_stay_apart_in_the_table():
    event = {"ph": "X", "cat": "kernel", "tid": 7, "dur": 1.0, "args": {"stream": 7, "correlation": 1}}
    names = ["void a::k<float, 4>(int)", "void a::k<double, 4>(int)", "void a::k<float, 4>(int)"]
    profile = profiles.from_trace({**event, "name": name, "ts": float(i)} for i, name in enumerate(names))
    assert list(profile.table()["kernel"]) == ["k<4>", "k<4>"]
    assert list(profile.table()["count"]) == [2, 1]


def test_a_trace_in_which_nothing_ran():
    profile = profiles.from_trace([])
    assert (profile.launches, profile.gaps, profile.span_us, profile.busy_us) == (0, [], 0.0, 0.0)
    assert len(profile.table()) == 0


@interpreted
def test_without_a_gpu_there_are_launches_and_no_times():
    x, weight, bias = torch.randn(8, 160), torch.randn(160), torch.randn(160)

    def call():
        y = x * weight + bias
        fill[(2,)](y, y.numel(), BLOCK=1024)
        return y * 2

    profile = profiles.profile(call)
    assert not profile.timed
    assert profile.launches == 4
    assert (profile.kernels, profile.host, profile.gaps) == ([], [], [])
    assert profile.span_us is None and profile.busy_us is None
    table = profile.table().set_index("operation")
    assert list(table.index) == ["mul", "add", "fill"]
    assert table.loc["mul", "count"] == 2
    assert table.loc["fill", "programs"] == 2
    assert table.loc["fill", "bytes written"] == 8 * 160 * 4
    assert not any("us" in column for column in table.columns)
    assert (profile.kind, profile.device, profile.date) == ("live", "", "")
    assert "programs" not in profiles.profile(lambda: x * weight).table().columns, "there are none to count"


@interpreted
def test_linear_is_one_launch_and_affine_two():
    x, weight, bias = torch.randn(8, 160), torch.randn(160), torch.randn(160)
    matrix = torch.randn(160, 160)
    assert profiles.profile(lambda: x * weight + bias).launches == 2
    assert profiles.profile(lambda: torch.nn.functional.linear(x, matrix, bias)).launches == 1


@pytest.fixture
def recording(tmp_path, monkeypatch):
    """A lesson that is being recorded, and a folder of recorded devices; the lesson's tape."""
    monkeypatch.setenv(rows.TAPE, str(tmp_path / "01_toy@0123.jsonl"))
    monkeypatch.setattr(places, "RECORDED", tmp_path / "recorded")
    monkeypatch.setattr(traces, "_named", set())
    return tmp_path / "01_toy@0123.jsonl"


def publish(tape):
    """Put the one profile of a tape where those of recorded devices are."""
    (kept,) = rows.read(tape)
    rows.write(places.RECORDED / "simulated" / "toy.jsonl", [replace(kept, kind="recorded")])
    return kept


@pytest.fixture
def gpu(monkeypatch):
    """A GPU on which every call runs the trace; the calls of the profiler, with their warm-up runs."""
    traced = []

    def trace(call, warmup):
        traced.append((call, warmup))
        return json.loads(TRACE.read_text())["traceEvents"]

    here = machine.Identity("Simulated", "570.1", "2.13.0", "3.7.1", (9, 0), 2**30, 0, 4)
    monkeypatch.setattr(device, "has_gpu", lambda: True)
    monkeypatch.setattr(device, "uuid", lambda: "")
    monkeypatch.setattr(machine, "identity", lambda: here)
    monkeypatch.setattr(profiles, "_trace", trace)
    return traced


def refused():
    raise AssertionError("this call should not run")


def test_a_live_profile_names_its_device_and_date(gpu, recording, traced):
    profile = profiles.profile(refused, warmup=5)
    assert gpu == [(refused, 5), (refused, 0), (refused, 0)], "warmed up once, recorded three times"
    assert (profile.kind, profile.device) == ("live", "Simulated")
    assert profile.date[:10] == machine.stamp()["date"][:10]
    assert replace(profile, device="", date="") == traced
    assert not recording.exists(), "without a name it is not kept"


@pytest.mark.parametrize(
    "disturbed",
    [[("ab", 9.0, 10.0)], [("ab", 1.5, 5000.0)], [("ab", 9.0, 10.0), ("ab", 1.5, 5000.0)]],
    ids=["the device", "the host", "either"],
)
@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_of_three_profiles_a_disturbed_one_is_not_shown(gpu, recording, monkeypatch, order, disturbed):
    """Kernels took longer, or came late: not even if two of three were disturbed."""
    quiet = ran("a", "b", us=1.5, every=10.0)
    one, other = (ran(*names, us=us, every=every) for names, us, every in (disturbed * 2)[:2])
    assert of_three(monkeypatch, order, one, quiet, other) == quiet.kernels


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_of_three_profiles_those_that_saw_the_usual_kernels_count(gpu, recording, monkeypatch, order):
    usual, slow, fewer, more = ran("a", "b"), ran("a", "b"), ran("b"), ran("a", "b", "c")
    slow.kernels[0] = replace(slow.kernels[0], duration_us=9.0)  # the host is later: the span stays
    for odd in (fewer, more):
        assert of_three(monkeypatch, order, slow, odd, usual) == usual.kernels
    assert of_three(monkeypatch, order, fewer, usual, more) == more.kernels, "no two alike"


def of_three(monkeypatch, order, *three):
    """The kernels of the one that is shown when these are taken in this order."""
    left = [three[number] for number in order]
    monkeypatch.setattr(profiles, "_trace", lambda call, warmup: left.pop(0))
    monkeypatch.setattr(profiles, "from_trace", lambda events: events)
    return profiles.profile(refused).kernels


def test_a_call_that_runs_nothing_on_the_device_has_a_profile(gpu, recording, monkeypatch):
    monkeypatch.setattr(profiles, "_trace", lambda call, warmup: [])
    assert profiles.profile(refused).kernels == []


def test_what_is_recorded_on_a_gpu_is_shown_without_one(gpu, recording, monkeypatch):
    live = profiles.profile(refused, tape="toy/eager")
    kept = publish(recording)
    assert (kept.kind, kept.driver, kept.torch, kept.triton) == ("live", "570.1", "2.13.0", "3.7.1")
    monkeypatch.setattr(device, "has_gpu", lambda: False)
    profile = profiles.profile(refused, tape="toy/eager")
    assert (profile.kind, profile.device, profile.date) == ("recorded", "Simulated", live.date)
    assert profile.timed and profile.operations == []
    assert (profile.kernels, profile.host, profile.launches) == (live.kernels, live.host, 4)
    assert profile.table().equals(live.table())
    assert (profile.gaps, profile.span_us, profile.busy_us) == (live.gaps, live.span_us, live.busy_us)


def test_a_name_is_used_once_while_a_lesson_is_recorded(gpu, recording):
    profiles.profile(refused, tape="toy/eager")
    with pytest.raises(ValueError, match="tape: 'toy/eager'"):
        profiles.profile(refused, tape="toy/eager")


@interpreted
def test_without_a_gpu_nothing_is_kept_and_what_is_not_recorded_is_counted(recording):
    x = torch.randn(8, 160)
    profile = profiles.profile(lambda: x * x, tape="toy/eager")
    assert not profile.timed and profile.launches == 1
    assert not recording.exists()


@interpreted
def test_a_damaged_recording_is_named(recording):
    places.write_text(places.RECORDED / "simulated" / "toy.jsonl", "[\n")
    with pytest.raises(ValueError, match=r"simulated/toy\.jsonl is damaged"):
        profiles.profile(refused, tape="toy/eager")


def test_the_profilers_chatter_is_held_back_and_other_messages_are_not(capfd):
    with profiles._without_profiler_chatter():
        os.write(2, b"USDT:2026 profiler_start\nout of luck\n")
    assert capfd.readouterr().err == "out of luck\n"


@pytest.mark.filterwarnings("ignore:CUDA is not available:UserWarning")
def test_one_call_is_traced_after_those_that_warm_up():
    calls = []

    def call():
        calls.append(len(calls))
        for _ in calls:
            torch.ones(3).sigmoid()

    traced = profiles.from_trace(profiles._trace(call, warmup=2))
    assert calls == [0, 1, 2, 3], "two to warm up, one that the profiler drops, one that it keeps"
    assert [event.name for event in traced.operations].count("aten::sigmoid") == 4


def ran(*names, us=1.5, every=10.0, **stamp):
    kernels = [
        traces.KernelEvent(profiles.shorten(name), name, every * i, us, 7, (1, 1, 1), (32, 1, 1))
        for i, name in enumerate(names)
    ]
    return profiles.Profile(kernels, **stamp)


def test_the_census_has_a_row_for_each_case_and_sorts_its_launches():
    found = profiles.census(
        {
            "plain": ran("nvjet_tst_128x256_64x4_1x2_h_bz_coopA_bias_TNT"),
            "split": ran(
                "Memcpy DtoD (Device -> Device)",
                "nvjet_hsh_64x8_64x16_4x1_v_bz_splitK_TNT",
                "void cublasLt::splitKreduce_kernel<32, 16, int, float>(int)",
                "void at::native::elementwise_kernel<128, 4>(int)",
                "void at::native::elementwise_kernel<128, 4>(int)",
                kind="recorded",
                device="NVIDIA H200",
            ),
            "nothing": ran(),
        }
    ).set_index("case")
    counted = ["launches", "matrix products", "reductions", "copies", "other"]
    assert list(found.columns) == [*counted, "kernels", "us", "kind"]
    assert found[counted].to_numpy().tolist() == [[1, 1, 0, 0, 0], [5, 1, 1, 1, 2], [0, 0, 0, 0, 0]]
    assert found.loc["split", "kernels"] == (
        "Memcpy DtoD + nvjet_hsh_64x8_64x16_4x1_v_bz_splitK_TNT + splitKreduce_kernel‹32, 16› + "
        "2 x elementwise_kernel‹128, 4›"
    )
    assert found["us"].tolist() == [1.5, 7.5, 0.0]
    assert found["kind"].tolist() == ["live", "recorded", "live"]


def test_the_census_names_the_kernels_of_a_long_sequence_once():
    group = ("Memset (Device)", "nchwToNhwcKernel<4>", "nvjet_tst_64x8", "nhwcToNchwKernel<4>")
    found = profiles.census({"each group apart": ran("add_kernel", *group * 100)}).iloc[0]
    assert found["launches"] == 401 and found["matrix products"] == 100
    assert found["kernels"] == (
        "add_kernel + 100 x Memset + 100 x nchwToNhwcKernel‹4› + 100 x nvjet_tst_64x8 + "
        "100 x nhwcToNchwKernel‹4›"
    )


@interpreted
def test_the_census_of_counted_profiles_has_operations_and_no_times():
    x, matrix = torch.randn(8, 16), torch.randn(16, 16)
    made = profiles.profile(lambda: (x @ matrix + 1).relu())
    found = profiles.census({"written out": made}).iloc[0]
    assert found["kernels"] == "mm + add + relu"
    assert (found["launches"], found["matrix products"], found["other"]) == (3, 1, 2)
    assert found["us"] != found["us"] and found["kind"] == "counted"


SETUP = "x, w, b = (torch.randn(*size, device=device) for size in ((8, 4), (3, 4), (3,)))"


@interpreted
def test_text_is_profiled_in_another_process_with_other_variables(recording, monkeypatch):
    """The code looks at the variables; what it prints is dropped; no tape is kept without a GPU."""
    monkeypatch.setenv("KEPT", "from here")
    seen = "(os.environ['DISABLE_ADDMM_CUDA_LT'], os.environ['KEPT'], os.environ.get('LABKIT_TAPE'))"
    check = (
        f"import os; assert {seen} == ('1', 'from here', None), {seen}; assert os.getpid() != {os.getpid()}"
    )
    profile = profiles.profile_text(
        "print('dropped'); F.linear(x, w, b).relu()",
        setup=f"{check}\n{SETUP}",
        environment={"DISABLE_ADDMM_CUDA_LT": "1"},
        tape="toy/linear",
    )
    assert not profile.timed and [launch.name for launch in profile.counted.launches] == ["addmm", "relu"]
    assert profile == profiles.profile_text("F.linear(x, w, b).relu()", setup=SETUP)
    assert not recording.exists()


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ({"text": "F.linear(x)"}, "text: NameError: name 'x' is not defined"),
        ({"text": "1 +"}, "text: SyntaxError: invalid syntax"),
        ({"text": "1", "setup": "import nowhere"}, "setup: ModuleNotFoundError: No module named 'nowhere'"),
        ({"text": "raise SystemExit(0)"}, "text: SystemExit: 0"),
    ],
)
def test_what_the_text_raises_is_said(monkeypatch, code, message):
    monkeypatch.setattr(child, "run", lambda function, *code, **rest: function(*code))
    with pytest.raises(RuntimeError) as raised:
        profiles.profile_text(**code)
    assert str(raised.value) == message


def test_text_on_a_gpu_is_kept_and_shown_without_one(gpu, recording, monkeypatch, traced):
    """With the names, times and shapes that profile() finds."""
    asked = []

    def run(function, *code, environment, seconds):
        asked.append((environment, seconds))
        return function(*code)

    monkeypatch.setattr(child, "run", run)
    here = {name: value for name, value in os.environ.items() if name != rows.TAPE}
    live = profiles.profile_text("1", environment={"A": "1"}, tape="toy/text")
    assert asked == [({**here, "A": "1", lock.WITHIN: ""}, profiles.TEXT_LIMIT_S)]
    assert replace(live, device="", date="") == traced
    assert live.device == "Simulated" and live.date
    publish(recording)
    monkeypatch.setattr(device, "has_gpu", lambda: False)
    taped = profiles.profile_text("1", tape="toy/text")
    assert len(asked) == 1, "what is recorded is not run"
    assert (taped.kind, taped.device, taped.kernels) == ("recorded", "Simulated", live.kernels)


def test_text_is_profiled_in_a_turn_of_this_process_which_waits_for_it(gpu, tmp_path, monkeypatch):
    """And says so; the process that does the work does not wait for this one."""
    monkeypatch.setenv(lock.FOLDER, str(tmp_path))
    monkeypatch.setattr(lock, "GRACE_S", 0.0)
    monkeypatch.setattr(device, "uuid", lambda: "GPU-simulated")
    heard = []

    def run(function, *code, environment, seconds):
        heard.append("runs")
        assert lock.held()
        with monkeypatch.context() as there:
            for name, value in environment.items():
                there.setenv(name, value)
            process = queueing.begin(tmp_path, "GPU-simulated")
        heard.append(queueing.says(process))
        queueing.end(process)
        return function(*code)

    monkeypatch.setattr(child, "run", run)
    with queueing.other(tmp_path, "GPU-simulated") as first:
        token = lock.TELL.set(lambda said: (heard.append(said), queueing.end(first)))
        assert profiles.profile_text("1", environment={"A": "1"}).timed
        lock.TELL.reset(token)
    assert heard[0].startswith("1st in the queue for the GPU.")
    assert heard[1:] == ["", "runs", "has it"]
    assert not lock.held()


@pytest.mark.filterwarnings("ignore:CUDA is not available")
def test_a_call_is_profiled_in_a_turn_of_this_process(tmp_path, monkeypatch):
    monkeypatch.setenv(lock.FOLDER, str(tmp_path))
    monkeypatch.setattr(device, "uuid", lambda: "GPU-simulated")
    held = []
    assert profiles._trace(lambda: held.append(lock.held()), 1)
    assert list(map(bool, held)) == [False, True, True], "the first one warms up"
    assert not lock.held()


def test_the_profiler_is_told_to_leave_even_where_the_compiler_forbade_it(monkeypatch):
    monkeypatch.setenv("TEARDOWN_CUPTI", "0")
    monkeypatch.setenv("DISABLE_CUPTI_LAZY_REINIT", "1")
    seen = []
    profiles._trace(lambda: seen.append(os.environ.get("TEARDOWN_CUPTI")), 0)
    assert seen == ["1", "1"] and "DISABLE_CUPTI_LAZY_REINIT" not in os.environ


@pytest.mark.filterwarnings("ignore:CUDA is not available")
def test_a_profile_may_last_for_a_block(monkeypatch, capfd):
    seen = []

    def call():
        seen.append(os.environ.get("TEARDOWN_CUPTI"))

    with profiles.lasting(call):
        assert not seen or device.has_gpu(), "nothing is called without a GPU"
    seen.clear()
    monkeypatch.setattr(device, "has_gpu", lambda: True)
    monkeypatch.setattr(device, "synchronize", lambda: None)
    monkeypatch.setattr(device, "uuid", lambda: "")
    with pytest.raises(RuntimeError, match="in the block"), profiles.lasting(call):
        assert seen == ["0"]
        raise RuntimeError("in the block")
    assert os.environ["TEARDOWN_CUPTI"] == "1", "it has left, whatever happened"
    with pytest.raises(ZeroDivisionError), profiles.lasting(lambda: 1 / 0):
        pass
    assert os.environ["TEARDOWN_CUPTI"] == "1", "even before the block"
    assert not capfd.readouterr().err


@pytest.mark.skipif(not device.has_gpu(), reason="What cuBLASLt leaves to a second kernel needs a GPU.")
def test_text_on_a_real_gpu_obeys_its_variables():
    setup = "x, w = (torch.randn(n, 1024, device=device) for n in (4096, 1024)); b = w[0]"
    with_lt, without = (
        profiles.profile_text("F.linear(x, w, b)", setup=setup, environment={"DISABLE_ADDMM_CUDA_LT": value})
        for value in ("0", "1")
    )
    found = profiles.census({"with": with_lt, "without": without})
    assert found["matrix products"].tolist() == [1, 1]
    assert (found["copies"] + found["other"]).tolist() == [0, 1], "the bias is copied before it is added to"


@pytest.mark.skipif(not device.has_gpu(), reason="Recording real kernels needs a GPU.")
def test_a_real_profile_on_a_gpu():
    x, weight, bias = (torch.randn(n, 160, device="cuda") for n in (256, 1, 1))
    profile = profiles.profile(lambda: x * weight + bias)
    assert profile.timed and len(profile.kernels) == profile.launches == 2
    assert all(kernel.duration_us > 0 for kernel in profile.kernels)
    assert (profile.kind, profile.device) == ("live", torch.cuda.get_device_name())


@pytest.mark.skipif(not device.has_gpu(), reason="The profiler watches launches on a GPU only.")
def test_launches_cost_the_host_no_more_after_a_profile():
    x = torch.randn(256, 160, device="cuda")

    def call():
        for _ in range(50):
            x.add(1)

    def host_us():
        """The least of several: others may share the host's cores for seconds."""
        jobs = {"call": clocks.Job(call)}
        return min(clocks.measure(jobs, clock="host", cache="warm")["call"].median_us for _ in range(5))

    before = host_us()
    assert len(profiles.profile(call).kernels) == 50
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    assert len(profiles.profile(graph.replay).kernels) == 50
    assert host_us() < 1.2 * before
