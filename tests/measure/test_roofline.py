"""The roofs: measured in virtual time, kept, and distrusted when broken; floors, and which is the highest."""

import json
from dataclasses import replace
from datetime import datetime

import pandas as pd
import pytest
import torch
from simulated import Gpu, out_of_memory

import labkit
from labkit import paths
from labkit.measure import clocks, machine, roofline, rows
from labkit.measure.machine import MachineInfo
from labkit.measure.roofline import Roofs

pytestmark = pytest.mark.usefixtures("own_folders")
HERE = MachineInfo("NVIDIA H200", "570.1", "2.13.0", "3.7.1", 4 * 2**20)


@pytest.fixture
def gpu(monkeypatch):
    """A machine in virtual time: copies at 1 MB/us, matmuls at 1 TFLOP/s, bfloat16 at 4."""
    gpu = Gpu(l2_bytes=2**12)
    monkeypatch.setattr("labkit.gpu.available", lambda: True)
    monkeypatch.setattr(machine, "identity", lambda: HERE)
    monkeypatch.setattr(clocks, "DeviceTimer", lambda: gpu)
    monkeypatch.setattr(roofline, "COPY_BYTES", (2**12, 2**16, 2**20, 2**24))
    monkeypatch.setattr(roofline, "MATMUL_SIDE", {"float32": 100, "bfloat16": 100})
    monkeypatch.setattr(roofline, "COPIES", {"slow": copy(gpu, 2.0), "fast": copy(gpu, 1.0)})
    monkeypatch.setattr(torch, "matmul", lambda a, b: gpu.launch(2.0, a.element_size() - 2 or 0.5))
    monkeypatch.setattr(torch.Tensor, "__add__", lambda *_: gpu.launch(4.0, 1.5))
    return gpu


def copy(gpu, us_per_megabyte):
    return lambda source, target: gpu.launch(1.0, 1.0 + 2 * source.nbytes / 1e6 * us_per_megabyte)


# The copy beside a kernel


@pytest.mark.parametrize(
    ("asked", "moved"), [(1, 2**10), (2**10 + 1, 2**11), (2**23 - 2**11,) * 2, (2**23 + 1, 2**23 + 2**21)]
)
def test_both_copies_copy_the_size_rounded_up(asked, moved):
    assert roofline.copied_bytes(asked) == moved
    assert list(roofline.COPIES) == ["Tensor.copy_", "Triton copy"]
    for name, job in roofline.copy_calls(asked).items():
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
    assert roofs.date == machine.row_columns()["date"][:10]
    assert [size for size, _ in roofs.copy] == [2**12, 2**16, 2**20], "the largest does not fit twice"
    for size, us in roofs.copy:
        assert us == pytest.approx(1.0 + size / 1e6, rel=1e-3), "of the faster copy"
    assert roofs.matmul == pytest.approx({"float32": 1e12, "bfloat16": 4e12})
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


def rewritten(**changes):
    return lambda text: "".join(json.dumps(json.loads(line) | changes) + "\n" for line in text.splitlines())


def without(suite):
    return lambda text: "".join(line + "\n" for line in text.splitlines() if f'"{suite}"' not in line)


BROKEN = {
    "not json": lambda text: "\udcff\n" * 2,
    "torn at the end": lambda text: text[: len(text) // 2],
    **{f"no {one}": without(f"roofs/{one}") for one in ("copy", "launch")},
    "another schema": rewritten(speed=3),
    **{f"time {us}": rewritten(median_us=us) for us in (None, 0.0)},
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


def test_the_roofs_of_a_table_are_those_of_its_device(gpu, monkeypatch):
    here, tape = roofline.roofs(), rows.read(roofline.cache_path())

    def record(folder, name, us):
        """Roofs of a device whose every row took so long."""
        same = {"kind": "recorded", "device": name, "median_us": us}
        rows.write(paths.RECORDED / folder / roofline.FILE, [replace(row, **same) for row in tape])

    def node_us(*origins):
        found = roofline.roofs_of(pd.DataFrame(origins, columns=["kind", "device"]))
        return found and found.node_us

    record("nvidia-h100", "NVIDIA H100", 3.0)
    other, recorded, live = ("recorded", "NVIDIA H100"), ("recorded", HERE.device), ("live", HERE.device)
    assert node_us(other) == 3.0
    assert node_us(other, live) == node_us(live) == here.node_us, "live first"
    assert node_us(("recorded", "somebody's")) is None and node_us() is None
    assert node_us(recorded) == here.node_us, "where it left none"
    record("here", HERE.device, 7.0)
    assert node_us(recorded) == 7.0, "recorded, not live"
    assert roofline.roofs_of(pd.DataFrame({"width": [1]})) == here, "counted, or made up: no device is named"
    monkeypatch.setattr("labkit.gpu.available", lambda: False)
    assert roofline.roofs().node_us == 7.0, "the first device's, where nothing is measured"


# Floors

# A megabyte and more in proportion to its size at 1 MB/us; small copies take 2 us.
FLOORS = Roofs(
    "live", "Simulated", "2026-01-02", copy=((1e3, 2.0), (2e6, 2.0), (2e9, 2000.0)),
    matmul={"float32": 1e12, "bfloat16": 8e12}, node_us=1.5, host_us=4.0,
)  # fmt: skip


@pytest.mark.parametrize(
    ("asked", "us"),
    [
        ({"min_bytes": 0}, 1.5),
        ({"min_bytes": 2e9}, 2000.0),
        ({"min_bytes": 0, "flops": 5e6}, 5.0),
        ({"min_bytes": 2e9, "flops": 5e9}, 5000.0),
        ({"min_bytes": 2e9, "flops": 5e8}, 2000.0),
        ({"min_bytes": 0, "flops": 8e9, "dtype": "bfloat16"}, 1000.0),
    ],
    ids=str,
)
def test_the_floor_is_the_largest_of_launches_memory_and_arithmetic(asked, us):
    assert roofline.floor_us(FLOORS, **asked) == pytest.approx(us)
    with pytest.raises(KeyError):
        roofline.floor_us(FLOORS, min_bytes=0, flops=1, dtype="int4")
