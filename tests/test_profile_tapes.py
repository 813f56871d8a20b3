"""Profiles on disk: the same after a round, small, and refused when anything about them is wrong."""

import copy
import json
import subprocess
import sys

import pytest

from labkit import places, profile_tapes
from labkit.profile_tapes import HostEvent, Kept, KernelEvent

STAMP = {
    "device": "NVIDIA H200",
    "driver": "570.1",
    "torch": "2.13.0",
    "triton": "3.7.1",
    "date": "2026-01-02T03:04:05+00:00",
}
MUL = "void at::native::elementwise_kernel<128, 4, at::native::BinaryFunctor<float, MulFunctor>>(int)"


def kernel(start=10.5, took=20.25, **changes):
    given = {"name": "mul", "full_name": MUL, "stream": 7, "grid": (80, 1, 1), "block": (128, 1, 1)}
    return KernelEvent(**{**given, "start_us": start, "duration_us": took, **changes})


def kept(name="toy/eager", **changes):
    copied = kernel(40.0, 1.5, name="Memcpy", full_name="Memcpy DtoD", grid=(), block=())
    given = {
        "kernels": [kernel(), kernel(31.0), copied],
        "host": [HostEvent("cudaLaunchKernel", 0.0, 4.125)],
    }
    return Kept(name, **{**given, **STAMP, **changes})


@pytest.fixture
def tapes(tmp_path, monkeypatch):
    """A folder of recorded devices, and no lesson that is being recorded."""
    monkeypatch.setattr(places, "RECORDED", tmp_path / "recorded")
    monkeypatch.delenv(profile_tapes.TAPE, raising=False)
    return tmp_path / "recorded"


def test_a_profile_is_the_same_after_a_round(tapes):
    path = tapes / "h200" / "01_toy.profiles.json"
    both = [kept(kind="recorded", source="notebooks/01_toy.ipynb@0123"), kept("toy/fused", kernels=[])]
    profile_tapes.write(path, both)
    assert profile_tapes.read(path) == both
    lines = path.read_text().splitlines()
    assert (len(lines), lines[0], lines[-1]) == (4, "[", "]")


def test_no_file_and_no_profiles_are_no_profiles(tapes):
    path = tapes / "01_toy.profiles.json"
    assert profile_tapes.read(path) == []
    profile_tapes.write(path, [])
    assert profile_tapes.read(path) == []


def test_times_are_kept_to_the_nanosecond():
    written = kept(kernels=[kernel(1 / 3, 2 / 3)]).to_json()
    assert written["kernels"]["when"] == [[0, 0.333, 0.667]]


def test_a_hundred_launches_of_long_names_are_below_20_kb(tapes):
    path = tapes / "01_toy.profiles.json"
    kinds = [f"void at::native::kernel_{i}<{'at::native::Functor<float>, ' * 20}4>(int)" for i in range(8)]
    kernels = [kernel(123456.789 + i, 1.875, full_name=kinds[i % 8]) for i in range(100)]
    host = [HostEvent("cudaLaunchKernel", 123456.789 + i, 4.125) for i in range(100)]
    profile_tapes.write(path, [kept(kernels=kernels, host=host)])
    assert path.stat().st_size < 20_000
    assert path.read_text().count("kernel_3<") == 1, "a description is written once"
    assert profile_tapes.read(path)[0].kernels == kernels


def put(place, value):
    """A way to damage a profile: another value at a place in it."""

    def damage(given):
        *outer, last = place
        for key in outer:
            given = given[key]
        given[last] = value

    return damage


def drop(name):
    return lambda given: given.pop(name)


DAMAGES = {
    "no kernels": drop("kernels"),
    "no host": drop("host"),
    "no name": drop("name"),
    "unknown field": put(["colour"], "red"),
    "device is a number": put(["device"], 4),
    "unknown kind": put(["kind"], "guessed"),
    "kernels are a list": put(["kernels"], []),
    "no descriptions": put(["kernels"], {"when": []}),
    "description of four parts": put(["kernels", "what", 0], ["mul", MUL, 7, [1]]),
    "number of no description": put(["kernels", "when", 0], [9, 1.0, 1.0]),
    "negative number": put(["kernels", "when", 0], [-1, 1.0, 1.0]),
    "event without a duration": put(["host", "when", 0], [0, 1.0]),
    "time is a word": put(["host", "when", 0], [0, "1", 1.0]),
    "time is not finite": put(["kernels", "when", 0], [0, float("nan"), 1.0]),
    "time of 400 digits": put(["host", "when", 0], [0, 10**400, 1.0]),
    "negative duration": put(["kernels", "when", 0], [0, 1.0, -1.0]),
    "name of a kernel is a number": put(["kernels", "what", 0, 0], 3),
    "full name is a number": put(["kernels", "what", 0, 1], 3),
    "stream is a word": put(["kernels", "what", 0, 2], "7"),
    "grid of words": put(["kernels", "what", 0, 3], ["80"]),
    "grid is a number": put(["kernels", "what", 0, 3], 80),
    "block of fractions": put(["kernels", "what", 0, 4], [0.5]),
    "name of a host event is empty": put(["host", "what", 0], [None]),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_profile_is_refused_by_the_name_of_its_file(tapes, damage):
    path = tapes / "h200" / "01_toy.profiles.json"
    given = copy.deepcopy(kept().to_json())
    places.write_text(path, json.dumps([given]))
    assert profile_tapes.read(path) == [kept()]
    damage(given)
    places.write_text(path, json.dumps([given]))
    with pytest.raises(ValueError, match=r"01_toy\.profiles\.json: not a profile"):
        profile_tapes.read(path)


@pytest.mark.parametrize("content", [b'[\n{"name":', b"{}", b"", b"\xff\xfe[]", b"[3]", b"3"])
def test_a_file_that_is_no_list_of_profiles_is_refused_by_name(tapes, content):
    path = tapes / "h200" / "01_toy.profiles.json"
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"^.*h200/01_toy\.profiles\.json: "):
        profile_tapes.read(path)


def test_a_lesson_that_is_recorded_keeps_its_profiles_beside_its_tape(tapes, monkeypatch):
    monkeypatch.setenv(profile_tapes.TAPE, str(tapes / "work" / "01_toy@0123.jsonl"))
    profile_tapes.keep(kept())
    profile_tapes.keep(kept("toy/fused"))
    written = tapes / "work" / "01_toy@0123.profiles.json"
    assert list((tapes / "work").iterdir()) == [written]
    assert profile_tapes.read(written) == [kept(), kept("toy/fused")]
    with pytest.raises(ValueError, match="tape: 'toy/eager' names another profile"):
        profile_tapes.keep(kept(kernels=[]))
    assert profile_tapes.read(written) == [kept(), kept("toy/fused")]


def test_elsewhere_nothing_is_kept(tapes):
    profile_tapes.keep(kept())
    assert not tapes.exists()


def test_the_first_device_that_has_a_profile_gives_it(tapes):
    for device, names in {"a10": ["toy/fused"], "h200": ["toy/eager", "toy/fused"]}.items():
        named = [kept(name, device=device, kind="recorded") for name in names]
        profile_tapes.write(tapes / device / "01_toy.profiles.json", named)
    assert profile_tapes.recorded("toy/eager").device == "h200"
    assert profile_tapes.recorded("toy/fused").device == "a10"
    assert profile_tapes.recorded("toy") is None


def test_nothing_recorded(tapes):
    assert profile_tapes.recorded("toy/eager") is None


def test_checking_what_is_recorded_does_not_import_torch():
    code = "import sys; from labkit import profile_tapes; print('torch' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout == "False\n"


def test_profiles_in_the_tree_are_small_and_each_has_a_name_of_its_own():
    files = sorted(places.RECORDED.glob(f"*/*{profile_tapes.SUFFIX}"))
    if not files:
        pytest.skip("No lesson's profiles are recorded in this copy of the course.")
    for path in files:
        assert all(len(line) < 50_000 for line in path.read_text().splitlines()), path
    names = [(path.parent.name, found.name) for path in files for found in profile_tapes.read(path)]
    assert len(set(names)) == len(names), "a name is looked up in the profiles of all lessons"
