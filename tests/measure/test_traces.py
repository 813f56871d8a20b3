"""Profiles on a tape: the same after a round, small, and refused when anything about them is wrong."""

import copy
import subprocess
import sys

import pytest

from labkit import places, rows
from labkit.measure import traces
from labkit.measure.traces import HostEvent, KernelEvent

STAMP = {"device": "NVIDIA H200", "driver": "570.1", "date": "2026-01-02T03:04:05+00:00"}
MUL = "void at::native::elementwise_kernel<128, 4, at::native::BinaryFunctor<float, MulFunctor>>(int)"


def kernel(start=10.5, took=20.25, **changes):
    given = {"name": "mul", "full_name": MUL, "stream": 7, "grid": (80, 1, 1), "block": (128, 1, 1)}
    return KernelEvent(**{**given, "start_us": start, "duration_us": took, **changes})


COPIED = kernel(40.0, 1.5, name="Memcpy", full_name="Memcpy DtoD", grid=(), block=())
KERNELS, HOST = [kernel(), kernel(31.0), COPIED], [HostEvent("cudaLaunchKernel", 0.0, 4.125)]


@pytest.fixture
def tape(tmp_path, monkeypatch):
    """The tape of a lesson that is being recorded."""
    monkeypatch.setattr(places, "RECORDED", tmp_path / "recorded")
    monkeypatch.setenv(rows.TAPE, str(tmp_path / "01_toy@0123.jsonl"))
    return tmp_path / "01_toy@0123.jsonl"


def test_a_profile_is_a_row_of_the_lessons_tape_and_the_same_after_a_round(tape):
    measured = rows.Row(
        "toy", "labkit", "forward", "float32", {}, "graph", "cold", 1.0, 1.0, 1.0, 1, 0, 0, None, None
    )
    rows.append(tape, measured)
    traces.keep("toy/eager", traces.pack(KERNELS, HOST), STAMP)
    traces.keep("toy/fused", traces.pack([], HOST), STAMP)
    assert list(tape.parent.iterdir()) == [tape]
    first, *profiles = rows.read(tape)
    assert first == measured and [row.suite for row in profiles] == ["profile/toy/eager", "profile/toy/fused"]
    assert {(row.clock, row.device) for row in profiles} == {("profiler", "NVIDIA H200")}
    assert [traces.unpack(row.trace) for row in profiles] == [(KERNELS, HOST), ([], HOST)]


def test_a_name_is_used_once_but_what_an_earlier_run_left_is_replaced(tape, monkeypatch):
    traces.keep("toy/eager", traces.pack(KERNELS, HOST), STAMP)
    with pytest.raises(ValueError, match="tape: 'toy/eager' names another profile"):
        traces.keep("toy/eager", traces.pack([], []), STAMP)
    monkeypatch.setattr(traces, "_named", set())  # as in the process that goes on with the recording
    traces.keep("toy/eager", traces.pack([COPIED], []), STAMP)
    assert [traces.unpack(row.trace) for row in rows.read(tape)] == [([COPIED], [])]


def test_elsewhere_nothing_is_kept(tape, monkeypatch):
    monkeypatch.delenv(rows.TAPE)
    traces.keep("toy/eager", traces.pack(KERNELS, HOST), STAMP)
    assert not tape.exists()


def test_a_hundred_launches_of_long_names_are_below_20_kb_at_the_nanosecond(tape):
    kinds = [f"void at::native::kernel_{i}<{'at::native::Functor<float>, ' * 20}4>(int)" for i in range(8)]
    kernels = [kernel(123456.789 + i, 1.875, full_name=kinds[i % 8]) for i in range(100)]
    host = [HostEvent("cudaLaunchKernel", 123456.789 + i + 1e-5 / 3, 4.125) for i in range(100)]
    traces.keep("toy/long", traces.pack(kernels, host), STAMP)
    assert tape.stat().st_size < 20_000
    assert tape.read_text().count("kernel_3<") == 1, "a description is written once"
    (row,) = rows.read(tape)
    assert traces.unpack(row.trace)[0] == kernels


def test_the_first_device_that_has_a_profile_gives_it(tape):
    assert traces.recorded("toy/eager") is None
    for device, names in {"a10": ["toy/fused"], "h200": ["toy/eager", "toy/fused"]}.items():
        for name in names:
            traces.keep(name, traces.pack([], []), {"device": device})
        traces._named.clear()
        (places.RECORDED / device).mkdir(parents=True)
        tape.rename(places.RECORDED / device / "toy.jsonl")
    assert traces.recorded("toy/eager").device == "h200"
    assert traces.recorded("toy/fused").device == "a10"
    assert traces.recorded("toy") is None


def put(place, value):
    """A way to damage a profile: another value at a place in it."""

    def damage(given):
        *outer, last = place
        for key in outer:
            given = given[key]
        given[last] = value

    return damage


DAMAGES = {
    "no kernels": lambda given: given.pop("kernels"),
    "no host": lambda given: given.pop("host"),
    "kernels are a list": put(["kernels"], []),
    "description of four parts": put(["kernels", "what", 0], ["mul", MUL, 7, [1]]),
    "number of no description": put(["kernels", "when", 0], [9, 1.0, 1.0]),
    "event without a duration": put(["host", "when", 0], [0, 1.0]),
    "time is a word": put(["host", "when", 0], [0, "soon", 1.0]),
    "grid is a number": put(["kernels", "what", 0, 3], 80),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_profile_is_refused(damage):
    given = copy.deepcopy(traces.pack(KERNELS, HOST))
    assert traces.unpack(given) == (KERNELS, HOST)
    damage(given)
    with pytest.raises(ValueError, match="not a profile"):
        traces.unpack(given)


def test_reading_a_tape_imports_neither_torch_nor_pandas():
    code = "import sys; from labkit.measure import traces; print({'torch', 'pandas'} & {*sys.modules})"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout == "set()\n"


def test_profiles_in_the_tree_are_small_and_each_has_a_name_of_its_own():
    """A name is looked up in the tapes of all lessons."""
    found = [
        (tape.parent.name, row)
        for tape in sorted(places.RECORDED.glob("*/*.jsonl"))
        for row in rows.read(tape)
        if row.trace is not None
    ]
    if not found:
        pytest.skip("No lesson's profiles are recorded in this copy of the course.")
    assert all(len(row.to_json()) < 50_000 for _, row in found)
    names = [(device, row.suite) for device, row in found]
    assert len(set(names)) == len(names)
