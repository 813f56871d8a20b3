"""What this machine is and its roofs: measured in virtual time, kept, and distrusted when broken."""

import json
import os
import re
from dataclasses import replace
from datetime import datetime
from types import SimpleNamespace

import pandas as pd
import pytest
import torch
from simulated import Gpu, out_of_memory

import labkit
from labkit import paths
from labkit.measure import clocks, machine, roofline, rows
from labkit.measure.machine import Identity
from labkit.measure.roofline import Roofs

HERE = Identity("NVIDIA H200", "570.1", "2.13.0", "3.7.1", (9, 0), 4 * 2**20, 2**12, 132)


@pytest.fixture(autouse=True)
def folders(tmp_path, monkeypatch):
    monkeypatch.setenv("LABKIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(paths, "RECORDED", tmp_path / "recorded")


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr("labkit.gpu.available", lambda: False)
    machine.identity.cache_clear()
    yield
    machine.identity.cache_clear()


@pytest.fixture
def gpu(monkeypatch):
    """A machine in virtual time: copies at 1 MB/us, matmuls at 1 TFLOP/s, bfloat16 at 4."""
    gpu = Gpu(l2_bytes=HERE.l2_bytes)
    monkeypatch.setattr("labkit.gpu.available", lambda: True)
    monkeypatch.setattr(machine, "identity", lambda: HERE)
    monkeypatch.setattr(clocks, "Cuda", lambda: gpu)
    monkeypatch.setattr(roofline, "COPY_BYTES", (2**12, 2**16, 2**20, 2**24))
    monkeypatch.setattr(roofline, "MATMUL_SIDE", {"float32": 100, "tf32": 100, "bfloat16": 100})
    monkeypatch.setattr(roofline, "COPIES", {"slow": copy(gpu, 2.0), "fast": copy(gpu, 1.0)})
    monkeypatch.setattr(torch, "matmul", lambda a, b: gpu.launch(2.0, 2.0 if tf32_or_float(a) else 0.5))
    monkeypatch.setattr(torch.Tensor, "__add__", lambda *_: gpu.launch(4.0, 1.5))
    return gpu


def tf32_or_float(tensor):
    return tensor.dtype == torch.float32 and not torch.backends.cuda.matmul.allow_tf32


def copy(gpu, us_per_megabyte):
    return lambda source, target: gpu.launch(1.0, 1.0 + 2 * source.nbytes / 1e6 * us_per_megabyte)


# Who is here


def test_without_a_gpu_the_device_is_said_to_be_none(no_gpu):
    here = machine.identity()
    assert (here.device, here.driver, here.capability, here.memory_bytes) == ("CPU, interpreted", "", None, 0)
    assert here.torch == torch.__version__
    assert re.fullmatch(r"\d+\.\d+.*", here.triton)


def test_a_gpu_is_identified_by_its_properties_with_a_driver_or_without(no_gpu, monkeypatch):
    card = SimpleNamespace(name="NVIDIA L4", major=8, minor=9, total_memory=24 * 2**30)
    card.L2_cache_size, card.multi_processor_count = 48 * 2**20, 58
    monkeypatch.setattr("labkit.gpu.available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: card)
    monkeypatch.setattr(machine.subprocess, "run", lambda *_, **__: os.stat("/no/nvidia-smi"))
    here = machine.identity()
    assert (here.device, here.driver, here.capability) == ("NVIDIA L4", "unknown", (8, 9))
    assert (here.memory_bytes, here.l2_bytes, here.multiprocessors) == (24 * 2**30, 48 * 2**20, 58)


def test_a_device_is_a_safe_name_of_a_folder():
    names = {
        "NVIDIA GeForce RTX 4090 (Laptop)": "nvidia-geforce-rtx-4090-laptop",
        "../../etc/passwd": "etc-passwd", "Tesla® A100 80GB\tPCIe\n": "tesla-a100-80gb-pcie",
    }  # fmt: skip
    assert [replace(HERE, device=name).slug for name in names] == list(names.values())


# The copy beside a kernel


@pytest.mark.parametrize(
    ("asked", "moved"),
    [(1, 2**10), (2**10 + 1, 2**11), (2**23 - 2**11,) * 2, (2**23 + 1, 2**23 + 2**21)],
)
def test_both_copies_copy_the_size_rounded_up(asked, moved):
    assert roofline.copied_bytes(asked) == moved
    assert list(roofline.COPIES) == ["Tensor.copy_", "Triton copy"]
    for name, job in roofline.copy_jobs(asked).items():
        source, target = job.inputs
        assert source.nbytes + target.nbytes == moved and source.data_ptr() != target.data_ptr()
        if moved < 2**20:
            target.zero_()
            job.call(source, target)
            assert torch.equal(source, target), name


# Measuring the roofs


def test_roofs_are_what_the_machine_can_do(gpu):
    roofs = roofline.roofs()
    assert (roofs.kind, roofs.device) == ("live", "NVIDIA H200")
    assert roofs.date == machine.stamp()["date"][:10]
    assert [size for size, _ in roofs.copy] == [2**12, 2**16, 2**20], "the largest does not fit twice"
    for size, us in roofs.copy:
        assert us == pytest.approx(1.0 + size / 1e6, rel=1e-3), "of the faster copy"
    assert roofs.matmul == pytest.approx({"float32": 1e12, "tf32": 4e12, "bfloat16": 4e12})
    assert (roofs.node_us, roofs.host_us) == pytest.approx((1.5, 4.0), rel=0.01)
    assert roofs.bandwidth == pytest.approx(2**20 / (1.0 + 2**20 / 1e6) * 1e6)
    first, *others = kept = rows.read(roofline.cache_path())
    for row in kept:
        assert (row.device, row.driver, row.kind) == ("NVIDIA H200", "570.1", "live")
        assert row.runs >= clocks.MIN_SAMPLES and (row.suite != "roofs/copy" or row.cache == "cold")
        assert datetime.fromisoformat(row.date).utcoffset().total_seconds() == 0
    rows.write(roofline.cache_path(), [replace(first, noise="somebody"), *others])
    assert roofline.roofs().noise == ("somebody",)


def test_a_roof_that_cannot_be_measured_is_an_error(gpu, monkeypatch):
    monkeypatch.setattr(roofline, "COPIES", {"broken": out_of_memory})
    with pytest.raises(RuntimeError, match="roofs/copy: the roof could not be measured: out of memory"):
        roofline.roofs()
    assert not roofline.cache_path().exists()


# The cache


@pytest.fixture
def measured(gpu, monkeypatch):
    """Roofs are in the cache; the list grows when they are measured again."""
    roofline.roofs()
    times, original = [], roofline.measure_roofs
    monkeypatch.setattr(roofline, "measure_roofs", lambda: times.append(1) or original())
    return times


def test_roofs_are_measured_once_or_when_asked(measured):
    kept, first = roofline.cache_path().read_bytes(), roofline.roofs()
    assert roofline.roofs() == first and roofline.cache_path().read_bytes() == kept and not measured
    assert roofline.cache_path().is_relative_to(paths.cache())
    roofline.roofs(again=True)
    assert measured == [1]


@pytest.mark.parametrize("change", ["driver", "torch", "triton", "device", "card"])
def test_another_driver_version_device_or_card_has_a_cache_of_its_own(measured, monkeypatch, change):
    before = roofline.cache_path()
    if change == "card":
        monkeypatch.setattr("labkit.gpu.uuid", lambda: "GPU-another")
        assert labkit.gpu.card() in roofline.cache_path().name
    else:
        monkeypatch.setattr(machine, "identity", lambda: replace(HERE, **{change: "another"}))
    after = roofline.cache_path()
    assert after != before
    roofline.roofs()
    assert measured == [1] and {row.card for row in rows.read(after)} == {labkit.gpu.card()}
    os.replace(before, after)
    roofline.roofs()
    assert measured == [1, 1], "what is there was measured elsewhere"


def rewritten(**changes):
    return lambda text: "".join(json.dumps(json.loads(line) | changes) + "\n" for line in text.splitlines())


def without(suite):
    return lambda text: "".join(line + "\n" for line in text.splitlines() if f'"{suite}"' not in line)


BROKEN = {
    "not json": lambda text: "\udcff\n" * 2,
    "torn at the end": lambda text: text[: len(text) // 2],
    **{f"no {one}": without(f"roofs/{one}") for one in ("copy", "launch")},
    "another schema": rewritten(speed=3),
    "a size that is none": rewritten(shape={"bytes": True}),
    **{f"time {us}": rewritten(median_us=us) for us in (None, 0.0)},
    "more operations than there can be": rewritten(flops=10**400),
    "a date that is none": rewritten(date="today"),
}


@pytest.mark.parametrize("how", BROKEN)
def test_a_broken_cache_is_measured_again_and_replaced(measured, how):
    good, path = roofline.roofs(), roofline.cache_path()
    path.write_text(BROKEN[how](path.read_text()), errors="surrogateescape")
    again = roofline.roofs()
    assert measured == [1]
    assert dict(again.copy) == pytest.approx(dict(good.copy))
    assert roofline.roofs() == again and measured == [1], "and trusted from then on"


# Without a GPU


def test_recorded_roofs_stand_in_and_say_so(gpu, monkeypatch):
    with monkeypatch.context() as without:
        without.setattr("labkit.gpu.available", lambda: False)
        assert roofline.roofs() is None, "nothing is recorded yet"
    measured = roofline.roofs()
    tape = [replace(row, kind="recorded") for row in rows.read(roofline.cache_path())]
    rows.write(paths.RECORDED / HERE.slug / "roofs.jsonl", tape)
    monkeypatch.setattr("labkit.gpu.available", lambda: False)
    recorded = roofline.roofs()
    assert recorded == replace(measured, kind="recorded")
    table = replace(recorded, copy=((2**10, 2.0), (2**24, 10.0))).table()
    assert table.loc["copy, 16 MiB"].to_dict() == {f"NVIDIA H200, recorded {measured.date}": "1.68 TB/s"}


# Reading the roofs


COPY = ((100, 2.0), (10_000, 2.0), (1_000_000, 200.0))
ROOFS = Roofs("live", "Simulated", "2026-01-02", COPY, {"float32": 5e13}, 1.25, 4.5)


def test_copies_are_interpolated_between_sizes_and_go_on_at_the_last_bandwidth():
    expected = dict(COPY) | {0: 2.0, 1: 2.0, 1000: 2.0, 100_000: 20.0, 4_000_000: 800.0}
    assert {size: ROOFS.copy_us(size) for size in expected} == pytest.approx(expected)


def test_the_roofs_of_a_table_are_those_of_its_device(gpu, monkeypatch):
    here, tape = roofline.roofs(), rows.read(roofline.cache_path())

    def record(folder, name, **times):
        """Roofs of a device whose every row took so long, by the hour at which they were measured."""
        sets = [
            replace(row, kind="recorded", device=name, date=f"2026-01-01T{at[1:]}:00:00+00:00", median_us=us)
            for at, us in times.items() for row in tape
        ]  # fmt: skip
        rows.write(paths.RECORDED / folder / "roofs.jsonl", sets)

    def node_us(*origins, **columns):
        found = roofline.roofs_of(pd.DataFrame(origins, columns=["kind", "device"]).assign(**columns))
        return found and found.node_us

    record("nvidia-h100", "NVIDIA H100", h11=1.0, h13=3.0)
    record("here", HERE.device, h09=6.0, h11=7.0)
    other, recorded, live = ("recorded", "NVIDIA H100"), ("recorded", HERE.device), ("live", HERE.device)
    noon, two = "2026-01-01T12:00:00+00:00", "2026-01-01T14:00:00+00:00"
    assert node_us(other) == 3.0 and node_us(other, date=noon) == 1.0, "of when it was measured"
    stranger = ("recorded", "somebody's")
    assert node_us(other, stranger, date=[two, noon]) == 3.0, "another device's rows do not count"
    assert node_us(other, live) == node_us(live) == here.node_us, "live first"
    assert node_us(stranger) is None and node_us() is None
    assert node_us(recorded) == 7.0, "recorded, not live"
    assert roofline.roofs_of(pd.DataFrame({"width": [1]})) == here, "counted, or made up: no device is named"
    cards = ["another", labkit.gpu.card()]
    assert node_us(recorded, live, date=two, card=cards) == here.node_us, "live ones decide"
    assert node_us(recorded, live, date=two, card="another") == 7.0, "kept, of another card"
    monkeypatch.setattr("labkit.gpu.available", lambda: False)
    assert roofline.roofs().node_us == 7.0, "the first device's, where nothing is measured"
