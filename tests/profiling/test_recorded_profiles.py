"""Profiles on a tape: the same after a round, small, and refused when anything about them is wrong."""

import pytest

from labkit import paths
from labkit.measure import rows
from labkit.profiling import recorded_profiles
from labkit.profiling.recorded_profiles import HostEvent, KernelEvent

STAMP = {"device": "NVIDIA H200", "driver": "570.1", "date": "2026-01-02T03:04:05+00:00"}
MUL = "void at::native::elementwise_kernel<128, 4, at::native::BinaryFunctor<float, MulFunctor>>(int)"


def kernel(start=10.5, took=20.25, **changes):
    given = {"name": "mul", "full_name": MUL}
    return KernelEvent(**{**given, "start_us": start, "duration_us": took, **changes})


COPIED = kernel(40.0, 1.5, name="Memcpy", full_name="Memcpy DtoD")
KERNELS, HOST = [kernel(), kernel(31.0), COPIED], [HostEvent("cudaLaunchKernel", 0.0, 4.125)]


@pytest.fixture
def tape(own_folders, tmp_path, monkeypatch):
    """The tape of a lesson that is being recorded."""
    monkeypatch.setenv(rows.TAPE, str(tmp_path / "01_toy@0123.jsonl"))
    return tmp_path / "01_toy@0123.jsonl"


def test_a_profile_is_a_row_of_the_lessons_tape_and_the_same_after_a_round(tape):
    measured = rows.Row(
        "toy", "labkit", "forward", "float32", {}, "graph", "cold", 1.0, 1.0, 1.0, 1, 0, 0, None, None
    )
    rows.append(tape, measured)
    recorded_profiles.write_profile("toy/eager", recorded_profiles.encode(KERNELS, HOST), STAMP)
    recorded_profiles.write_profile("toy/fused", recorded_profiles.encode([], HOST), STAMP)
    assert list(tape.parent.iterdir()) == [tape]
    first, *profiles = rows.read(tape)
    assert first == measured and [row.suite for row in profiles] == ["profile/toy/eager", "profile/toy/fused"]
    assert {(row.clock, row.device) for row in profiles} == {("profiler", "NVIDIA H200")}
    assert [recorded_profiles.decode(row.trace) for row in profiles] == [(KERNELS, HOST), ([], HOST)]


def test_a_name_is_used_once_but_what_an_earlier_run_left_is_replaced(tape, monkeypatch):
    with monkeypatch.context() as elsewhere:
        elsewhere.delenv(rows.TAPE)
        recorded_profiles.write_profile("toy/eager", recorded_profiles.encode(KERNELS, HOST), STAMP)
    assert not tape.exists(), "nothing is kept where no lesson is recorded"
    recorded_profiles.write_profile("toy/eager", recorded_profiles.encode(KERNELS, HOST), STAMP)
    with pytest.raises(ValueError, match="tape: 'toy/eager' names another profile"):
        recorded_profiles.write_profile("toy/eager", recorded_profiles.encode([], []), STAMP)
    monkeypatch.setattr(
        recorded_profiles, "_written", set()
    )  # as in the process that goes on with the recording
    recorded_profiles.write_profile("toy/eager", recorded_profiles.encode([COPIED], []), STAMP)
    assert [recorded_profiles.decode(row.trace) for row in rows.read(tape)] == [([COPIED], [])]


def test_a_hundred_launches_of_long_names_are_below_20_kb_at_the_nanosecond(tape):
    kinds = [f"void at::native::kernel_{i}<{'at::native::Functor<float>, ' * 20}4>(int)" for i in range(8)]
    kernels = [kernel(123456.789 + i, 1.875, full_name=kinds[i % 8]) for i in range(100)]
    host = [HostEvent("cudaLaunchKernel", 123456.789 + i + 1e-5 / 3, 4.125) for i in range(100)]
    recorded_profiles.write_profile("toy/long", recorded_profiles.encode(kernels, host), STAMP)
    assert tape.stat().st_size < 20_000
    assert tape.read_text().count("kernel_3<") == 1, "a description is written once"
    (row,) = rows.read(tape)
    assert recorded_profiles.decode(row.trace)[0] == kernels


def test_the_first_device_that_has_a_profile_gives_it(tape):
    assert recorded_profiles.recorded_profile("toy/eager") is None
    for device, names in {"a10": ["toy/fused"], "h200": ["toy/eager", "toy/fused"]}.items():
        for name in names:
            recorded_profiles.write_profile(name, recorded_profiles.encode([], []), {"device": device})
        recorded_profiles._written.clear()
        (paths.RECORDED / device).mkdir(parents=True)
        tape.rename(paths.RECORDED / device / "toy.jsonl")
    assert recorded_profiles.recorded_profile("toy/eager").device == "h200"
    assert recorded_profiles.recorded_profile("toy/fused").device == "a10"
    assert recorded_profiles.recorded_profile("toy") is None


@pytest.mark.parametrize(
    "damaged",
    [
        {"kernels": None},
        {"host": None},
        {"kernels": []},
        {"host": {"what": [["cudaLaunchKernel"]], "when": [[9, 1.0, 1.0]]}},
        {"host": {"what": [["cudaLaunchKernel"]], "when": [[0, "soon", 1.0]]}},
        {"kernels": {"what": [["mul", MUL, 7, 80, [1]]], "when": [[0, 1.0, 1.0]]}},
        {"kernels": {"what": [["mul", MUL, 7, [1]]], "when": [[0, 1.0, 1.0]]}},
    ],
    ids=str,
)
def test_a_damaged_profile_is_refused(damaged):
    whole = recorded_profiles.encode(KERNELS, HOST)
    assert recorded_profiles.decode(whole) == (KERNELS, HOST)
    with pytest.raises(ValueError, match="not a profile"):
        recorded_profiles.decode(whole | damaged)
