"""What this machine is and its roofs: measured in virtual time, kept, and distrusted when broken."""

import json
import os
import re
import subprocess
from dataclasses import replace
from datetime import datetime

import pandas as pd
import pytest
import torch
from simulated import Gpu

from labkit import clocks, device, machine, places, rows
from labkit.machine import Identity, Roofs

HERE = Identity("NVIDIA H200", "570.1", "2.13.0", "3.7.1", (9, 0), 4 * 2**20, 2**12, 132)


@pytest.fixture(autouse=True)
def folders(tmp_path, monkeypatch):
    monkeypatch.setenv("LABKIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(places, "RECORDED", tmp_path / "recorded")


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(device, "has_gpu", lambda: False)
    machine.identity.cache_clear()
    yield
    machine.identity.cache_clear()


@pytest.fixture
def gpu(monkeypatch):
    """A machine in virtual time: copies at 1 MB/us, matmuls at 1 TFLOP/s, bfloat16 at 4."""
    gpu = Gpu(l2_bytes=HERE.l2_bytes)
    monkeypatch.setattr(device, "has_gpu", lambda: True)
    monkeypatch.setattr(machine, "identity", lambda: HERE)
    monkeypatch.setattr(clocks, "Cuda", lambda: gpu)
    monkeypatch.setattr(machine, "COPY_BYTES", (2**12, 2**16, 2**20, 2**24))
    monkeypatch.setattr(machine, "MATMUL_SIDE", {"float32": 100, "tf32": 100, "bfloat16": 100})
    monkeypatch.setattr(machine, "COPIES", {"slow": copy(gpu, 2.0), "fast": copy(gpu, 1.0)})
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


@pytest.mark.parametrize(
    ("name", "slug"),
    [
        ("NVIDIA H200", "nvidia-h200"),
        ("NVIDIA GeForce RTX 4090 (Laptop)", "nvidia-geforce-rtx-4090-laptop"),
        ("CPU, interpreted", "cpu-interpreted"),
        ("../../etc/passwd", "etc-passwd"),
        ("A100 80GB\tPCIe\n", "a100-80gb-pcie"),
        ("Tesla® T4 / 16", "tesla-t4-16"),
    ],
)
def test_a_device_is_a_safe_name_of_a_folder(name, slug):
    assert replace(HERE, device=name).slug == slug
    assert re.fullmatch("[a-z0-9-]+", slug)


def test_a_gpu_is_identified_by_its_properties(monkeypatch):
    card = type("Card", (), {})()
    card.name, card.major, card.minor = "NVIDIA L4", 8, 9
    card.total_memory, card.L2_cache_size, card.multi_processor_count = 24 * 2**30, 48 * 2**20, 58
    monkeypatch.setattr(device, "has_gpu", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: card)
    monkeypatch.setattr(machine, "_driver", lambda: "535.2")
    machine.identity.cache_clear()
    try:
        here = machine.identity()
    finally:
        machine.identity.cache_clear()
    assert (here.device, here.driver, here.capability) == ("NVIDIA L4", "535.2", (8, 9))
    assert (here.memory_bytes, here.l2_bytes, here.multiprocessors) == (24 * 2**30, 48 * 2**20, 58)


@pytest.mark.parametrize("error", [FileNotFoundError(), subprocess.TimeoutExpired("nvidia-smi", 20)])
def test_a_machine_without_nvidia_smi_has_an_unknown_driver(monkeypatch, error):
    def fails(*_, **__):
        raise error

    monkeypatch.setattr(subprocess, "run", fails)
    assert machine._driver() == "unknown"


def test_a_stamp_says_where_and_when(gpu):
    stamp = machine.stamp()
    assert {name: stamp[name] for name in ("device", "driver", "torch", "triton")} == {
        "device": "NVIDIA H200",
        "driver": "570.1",
        "torch": "2.13.0",
        "triton": "3.7.1",
    }
    assert datetime.fromisoformat(stamp["date"]).utcoffset().total_seconds() == 0


# The copy beside a kernel


@pytest.mark.parametrize(
    ("asked", "moved"),
    [
        (1, 2**10),
        (2**10, 2**10),
        (2**10 + 1, 2**11),
        (2**23, 2**23),
        (2**23 + 1, 2**23 + 2**21),
        (161 * 4 * 50_000, 16 * 2**21),
    ],
)
def test_odd_sizes_of_a_copy_are_rounded_up(asked, moved):
    assert machine.copied_bytes(asked) == moved
    for job in machine.copy_jobs(asked).values():
        source, target = job.inputs
        assert source.nbytes + target.nbytes == moved
        assert source.data_ptr() != target.data_ptr()


def test_both_copies_copy():
    assert list(machine.COPIES) == ["Tensor.copy_", "Triton copy"]
    for name, job in machine.copy_jobs(10_000).items():
        source, target = job.inputs
        target.zero_()
        job.call(source, target)
        assert torch.equal(source, target), name


def test_tf32_is_allowed_inside_the_call_only():
    seen = []

    def call(x):
        seen.append(torch.backends.cuda.matmul.allow_tf32)
        if x is None:
            raise ValueError("broken")
        return x

    before = torch.backends.cuda.matmul.allow_tf32
    assert machine.with_tf32(call)(3) == 3
    with pytest.raises(ValueError, match="broken"):
        machine.with_tf32(call)(None)
    assert seen == [True, True]
    assert torch.backends.cuda.matmul.allow_tf32 is before is False


# Measuring the roofs


def test_roofs_are_what_the_machine_can_do(gpu):
    roofs = machine.roofs()
    assert (roofs.kind, roofs.device) == ("live", "NVIDIA H200")
    assert roofs.date == machine.stamp()["date"][:10]
    assert [size for size, _ in roofs.copy] == [2**12, 2**16, 2**20], "the largest does not fit twice"
    for size, us in roofs.copy:
        assert us == pytest.approx(1.0 + size / 1e6, rel=1e-3), "of the faster copy"
    assert roofs.matmul == {
        "float32": pytest.approx(1e12),
        "tf32": pytest.approx(4e12),
        "bfloat16": pytest.approx(4e12),
    }
    assert roofs.node_us == pytest.approx(1.5)
    assert roofs.host_us == pytest.approx(4.0, rel=0.01)
    assert roofs.bandwidth == pytest.approx(2**20 / (1.0 + 2**20 / 1e6) * 1e6)


def test_every_roof_is_a_stamped_row_of_the_schema(gpu):
    for row in machine.measure_roofs():
        assert rows.Row.from_json(row.to_json()) == row
        assert (row.device, row.driver, row.kind) == ("NVIDIA H200", "570.1", "live")
        assert row.runs >= clocks.MIN_SAMPLES
    caches = {row.suite: row.cache for row in machine.measure_roofs()}
    assert caches["roofs/copy"] == "cold"


def test_a_roof_that_cannot_be_measured_is_an_error(gpu, monkeypatch):
    def fails(source, target):
        raise torch.cuda.OutOfMemoryError

    monkeypatch.setattr(machine, "COPIES", {"broken": fails})
    with pytest.raises(RuntimeError, match="roofs/copy: the roof could not be measured: out of memory"):
        machine.roofs()
    assert not machine.cache_path().exists()


# The cache


@pytest.fixture
def measured(gpu, monkeypatch):
    """Roofs are in the cache; the list grows when they are measured again."""
    machine.roofs()
    times = []
    original = machine.measure_roofs
    monkeypatch.setattr(machine, "measure_roofs", lambda: times.append(1) or original())
    return times


def test_roofs_are_measured_once(measured):
    path = machine.cache_path()
    kept = path.read_bytes()
    first = machine.roofs()
    assert machine.roofs() == first
    assert not measured
    assert path.read_bytes() == kept
    assert path.is_relative_to(places.cache())


def test_they_are_measured_again_when_asked(measured):
    machine.roofs(again=True)
    assert measured == [1]


@pytest.mark.parametrize(
    "change", [{"driver": "580.2"}, {"torch": "2.11.0"}, {"triton": "3.6.0"}, {"device": "NVIDIA L4"}]
)
def test_another_driver_version_or_device_has_a_cache_of_its_own(measured, monkeypatch, change):
    before = machine.cache_path()
    monkeypatch.setattr(machine, "identity", lambda: replace(HERE, **change))
    assert machine.cache_path() != before
    machine.roofs()
    assert measured == [1]


def test_so_has_another_card_of_the_same_kind(measured, monkeypatch):
    before = machine.cache_path()
    monkeypatch.setattr(device, "uuid", lambda: "GPU-another")
    other = machine.cache_path()
    assert other != before and device.card() in other.name
    machine.roofs()
    assert measured == [1] and {row.card for row in rows.read(other)} == {device.card()}
    os.replace(before, other)
    machine.roofs()
    assert measured == [1, 1], "what is there was measured on another card"


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def rewrite(path, change):
    path.write_text("".join(json.dumps(change(row)) + "\n" for row in lines(path)))


def drop(suite):
    return lambda path: path.write_text(
        "".join(json.dumps(row) + "\n" for row in lines(path) if row["suite"] != suite)
    )


BROKEN = {
    "gone": lambda path: path.unlink(),
    "empty": lambda path: path.write_text(""),
    "not json": lambda path: path.write_text("roofs\nroofs\n"),
    "binary": lambda path: path.write_bytes(b"\xff\xfe\x00\x01" * 100),
    "torn in the middle": lambda path: path.write_text(path.read_text()[40:]),
    "torn at the end": lambda path: path.write_text(path.read_text()[: len(path.read_text()) // 2]),
    "no copies": drop("roofs/copy"),
    "no launches": drop("roofs/launch"),
    "another schema": lambda path: rewrite(path, lambda row: {"suite": row["suite"], "speed": 3}),
    "a shape without its size": lambda path: rewrite(path, lambda row: row | {"shape": {}}),
    "no shape": lambda path: rewrite(path, lambda row: row | {"shape": 7}),
    "no time": lambda path: rewrite(path, lambda row: row | {"median_us": None}),
    "time zero": lambda path: rewrite(path, lambda row: row | {"median_us": 0.0}),
    "a time in words": lambda path: rewrite(path, lambda row: row | {"median_us": "fast"}),
    "no operations": lambda path: rewrite(path, lambda row: row | {"flops": 0}),
    "more operations than there can be": lambda path: rewrite(path, lambda row: row | {"flops": 10**400}),
    "more bytes than there can be": lambda path: rewrite(
        path, lambda row: row | {"shape": {"bytes": 10**400}}
    ),
    "a size that is none": lambda path: rewrite(path, lambda row: row | {"shape": {"bytes": True}}),
    "a date that is none": lambda path: rewrite(path, lambda row: row | {"date": "today"}),
    "of another device": lambda path: rewrite(path, lambda row: row | {"device": "NVIDIA L4"}),
    "of another driver": lambda path: rewrite(path, lambda row: row | {"driver": "1"}),
}


@pytest.mark.parametrize("how", BROKEN)
def test_a_broken_or_foreign_cache_is_measured_again_and_replaced(measured, how):
    good = machine.roofs()
    BROKEN[how](machine.cache_path())
    again = machine.roofs()
    assert measured == [1]
    assert dict(again.copy) == pytest.approx(dict(good.copy))
    assert machine.roofs() == again
    assert measured == [1], "and trusted from then on"


def test_what_disturbed_the_roofs_is_kept_with_them(gpu):
    machine.roofs()
    first, *others = rows.read(machine.cache_path())
    noisy = replace(first, noise="another process worked on the GPU")
    rows.write(machine.cache_path(), [noisy, *(replace(row, noise="") for row in others)])
    assert machine.roofs().noise == ("another process worked on the GPU",)


# Without a GPU


def test_nothing_recorded_is_none(no_gpu):
    assert machine.roofs() is None


def test_recorded_roofs_stand_in_and_say_so(gpu, monkeypatch):
    measured = machine.roofs()
    tape = [replace(row, kind="recorded") for row in rows.read(machine.cache_path())]
    rows.write(places.RECORDED / HERE.slug / "roofs.jsonl", tape)
    monkeypatch.setattr(device, "has_gpu", lambda: False)
    recorded = machine.roofs()
    assert recorded == replace(measured, kind="recorded")
    assert recorded.table().columns.tolist() == [f"NVIDIA H200, recorded {measured.date}"]


# Reading the roofs


ROOFS = Roofs(
    kind="live",
    device="Simulated",
    date="2026-01-02",
    copy=((100, 2.0), (10_000, 2.0), (1_000_000, 200.0)),
    matmul={"float32": 5e13},
    node_us=1.25,
    host_us=4.5,
)


@pytest.mark.parametrize(
    ("size", "us"),
    [
        (100, 2.0),
        (10_000, 2.0),
        (1_000_000, 200.0),
        (100_000, 20.0),
        (1000, 2.0),
        (1, 2.0),
        (0, 2.0),
        (4_000_000, 800.0),
    ],
)
def test_copies_are_interpolated_between_sizes_and_go_on_at_the_last_bandwidth(size, us):
    assert ROOFS.copy_us(size) == pytest.approx(us)


def test_roofs_as_a_table_to_read():
    big = replace(ROOFS, copy=((2**10, 2.0), (2**24, 10.0), (2**32, 1000.0)))
    table = big.table()
    assert table.to_dict() == {
        "Simulated, live 2026-01-02": {
            "copy, 4 GiB or the largest that fits": "4.29 TB/s",
            "copy, 16 MiB": "1.68 TB/s",
            "matmul, float32": "50 TFLOP/s",
            "smallest kernel in a graph": "1.25 us",
            "smallest call from Python": "4.5 us",
        }
    }


def test_the_roofs_of_a_table_are_those_of_its_device(gpu, monkeypatch):
    here = machine.roofs()
    tape = [replace(row, kind="recorded", device="NVIDIA H100") for row in rows.read(machine.cache_path())]
    rows.write(places.RECORDED / "nvidia-h100" / "roofs.jsonl", tape)

    def table(*origins):
        return pd.DataFrame(origins, columns=["kind", "device"])

    assert machine.roofs_of(table(("recorded", "NVIDIA H100"))).device == "NVIDIA H100"
    assert machine.roofs_of(table(("recorded", "NVIDIA H100"), ("live", HERE.device))) == here, "live first"
    assert machine.roofs_of(table(("recorded", "somebody's"))) is None
    assert machine.roofs_of(table()) is None
    dated = table(("recorded", "NVIDIA H100")).assign(date="2026-01-01T12:00:00+00:00")
    times = dict(zip(("2026-01-01T11", "2026-01-01T13"), (1.0, 3.0), strict=True))
    sets = [
        [replace(row, date=f"{at}:00:00+00:00", median_us=us) for row in tape] for at, us in times.items()
    ]
    rows.write(places.RECORDED / "nvidia-h100" / "roofs.jsonl", [row for one in sets for row in one])
    assert machine.roofs_of(dated).node_us == 1.0, "of the machine that it was measured on"
    later = table(("recorded", "NVIDIA H100"), ("recorded", "somebody's")).assign(
        date=["2026-01-01T14:00:00+00:00", "2026-01-01T12:00:00+00:00"]
    )
    assert machine.roofs_of(later).node_us == 3.0, "another device's rows do not count"
    with monkeypatch.context() as without:
        without.setattr(device, "has_gpu", lambda: False)
        assert machine.roofs().node_us == 3.0, "the newest, where nothing is measured"
    same = [replace(row, device=HERE.device, kind="recorded", median_us=7.0) for row in tape]
    rows.write(places.RECORDED / "here" / "roofs.jsonl", same)
    assert machine.roofs_of(table(("recorded", HERE.device))).node_us == 7.0, "recorded, not live"
    assert machine.roofs_of(table(("live", HERE.device))) == here
    assert machine.roofs_of(pd.DataFrame({"width": [1]})) == here, "counted, or made up: no device is named"
    both = table(("recorded", HERE.device), ("live", HERE.device)).assign(date="2026-01-01T14:00:00+00:00")
    assert machine.roofs_of(both.assign(card=["another", device.card()])) == here, "live ones decide"
    assert machine.roofs_of(both.assign(card=["another", "another"])).node_us == 7.0, "kept, of another card"
