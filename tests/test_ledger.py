"""The ledger's entries, from clocks, profiler and roofs that are made up; bytes of what runs here."""

import dataclasses
import shutil

import pandas as pd
import pytest
import torch

from labkit import ledger
from labkit.counts import Counts
from labkit.machine import Roofs
from labkit.profile_tapes import HostEvent, KernelEvent
from labkit.profiles import Profile

ROOFS = Roofs(
    kind="live",
    device="Simulated",
    date="2026-01-01",
    copy=((1_000_000, 2.0), (1_000_000_000, 1000.0)),  # 1e6 bytes in a microsecond, at most
    matmul={"bfloat16": 1e14},  # 1e8 operations in a microsecond
    node_us=1.0,
    host_us=5.0,
)
COMPILES = pytest.mark.skipif(not shutil.which("g++"), reason="torch.compile needs g++ on a CPU")
STAMP = {
    "kind": "live",
    "device": "Simulated",
    "date": "2026-01-01",
    "clock": "host",
    "cache": "warm",
    "source": "here",
}
LAYERS = [(10e6, 4e8), (2e6, 5e8)]
"""10 us of bytes that hide 4 us of products; 5 us of products that hide 2 us of bytes."""


def table(column, **values):
    found = [{"contender": name, column: value, **STAMP} for name, value in values.items()]
    return pd.DataFrame(found, columns=["contender", column, *STAMP])


def profile(*durations, gap=3.0):
    starts = [sum(durations[:i]) + gap * i for i in range(len(durations))]
    kernels = [
        KernelEvent("k", "k", start, length, stream=7, grid=(1, 1, 1), block=(32, 1, 1))
        for start, length in zip(starts, durations, strict=True)
    ]
    return Profile(kernels=kernels, device="Simulated")


def entries(wall=100.0, alone=40.0, busy=(20.0, 15.0), moved=22e6):
    profiles = {"step": profile(*busy)}
    found = ledger.entries(
        table("median_us", step=wall),
        table("median_us", step=alone),
        profiles,
        table("peak_bytes", step=moved),
        LAYERS,
        ROOFS,
        "bfloat16",
    )
    (row,) = found.to_dict("records")
    return row


def test_each_entry_lies_between_two_instruments():
    row = entries()
    assert row["arithmetic"] == pytest.approx(9.0)
    assert row["traffic"] == pytest.approx(22.0 - (4.0 + 2.0)), "what products do not hide"
    assert row["waiting"] == pytest.approx(35.0 - 9.0 - 16.0), "the rest of the time in which kernels ran"
    assert row["between"] == pytest.approx(5.0), "what the graph clock has more than the kernels"
    assert row["launches"] == pytest.approx(60.0), "what the host adds to the graph clock"
    assert row["sum"] == pytest.approx(100.0) and row["wall"] == 100.0 and row["alone"] == 40.0
    assert row["kind"] == "live" and row["device"] == "Simulated"


def test_instruments_that_disagree_do_not_add_up():
    assert entries(busy=(80.0,))["sum"] == pytest.approx(140.0), "the profiler saw more than the graph clock"
    assert entries(busy=(80.0,))["between"] == 0.0
    assert entries(moved=200e6)["sum"] > 200, "the floors are above what was measured"
    assert entries(wall=30.0)["launches"] == 0.0, "no entry is below zero"


def test_what_was_not_seen_or_not_counted_has_no_row():
    wall, device = table("median_us", a=1.0, b=2.0, c=None), table("median_us")
    profiles = {"a": profile(1.0), "c": profile(1.0)}
    moved = table("peak_bytes", b=1e6, c=1e6)
    found = ledger.entries(wall, device, profiles, moved, LAYERS, ROOFS, "bfloat16")
    assert found.empty and {*ledger.PARTS, "sum", "wall", "alone"} <= set(found.columns)


def test_a_counted_profile_has_no_time_to_book():
    counted = dataclasses.replace(profile(), counted=Counts())
    wall, moved = table("median_us", a=1.0), table("peak_bytes", a=1e6)
    assert ledger.entries(wall, table("median_us"), {"a": counted}, moved, LAYERS, ROOFS, "bfloat16").empty


def test_eager_bytes_are_those_of_every_operation():
    x, bias = torch.randn(16, 8), torch.randn(8)
    N, row = 4 * 16 * 8, 4 * 8
    assert ledger.eager_bytes(lambda: torch.tanh(x)) == 2 * N
    assert ledger.eager_bytes(lambda: torch.tanh(x + bias)) == (2 * N + row) + 2 * N
    assert ledger.eager_bytes(lambda: x.view(8, 16).transpose(0, 1)) == 0


@COMPILES
@pytest.mark.usefixtures("fresh_compiler")
def test_compiled_bytes_are_those_that_fusing_leaves():
    x = torch.randn(64, 32)
    N = x.nbytes
    assert ledger.compiled_bytes(lambda x: torch.tanh(x) * 2 + x, x) == 2 * N
    assert ledger.eager_bytes(lambda: torch.tanh(x) * 2 + x) > 5 * N


@COMPILES
@pytest.mark.usefixtures("fresh_compiler")
def test_what_compiles_nothing_is_an_error():
    with pytest.raises(RuntimeError, match="nothing was compiled"):
        ledger.compiled_bytes(lambda x: x, torch.randn(3))


def launched(launches, kernels):
    """A profile of kernels that start when they are launched and the one before has ended."""
    host, device_, ready, done = [], [], 0.0, 0.0
    for launch in launches:
        host.append(HostEvent("cudaLaunchKernel", ready, launch))
        ready += launch
    ready = 0.0
    for launch, kernel in zip([*launches, *[0.0] * len(kernels)], kernels, strict=False):
        ready += launch
        done = max(done, ready)
        device_.append(KernelEvent("k", "k", done, kernel, 7, (1, 1, 1), (32, 1, 1)))
        done += kernel
    return Profile(kernels=device_, host=host, device="Simulated"), done


@pytest.mark.parametrize(
    ("launches", "kernels"),
    [([5.0] * 4, [2.0] * 4), ([5.0] * 3, [40.0, 25.0, 90.0]), ([9.0], [3.0, 4.0, 5.0])],
)
def test_nothing_changed_is_the_span_as_it_was(launches, kernels):
    made, end = launched(launches, kernels)
    assert ledger.what_if(made) == pytest.approx(end)


def test_what_the_slower_of_host_and_device_saves_shows_and_the_others_does_not():
    host_bound, _ = launched([10.0] * 10, [2.0] * 10)
    assert ledger.what_if(host_bound, kernels=0.5) == pytest.approx(101.0)
    assert ledger.what_if(host_bound, launches=0.5) == pytest.approx(52.0)
    graph, _ = launched([10.0], [20.0] * 10)
    assert ledger.what_if(graph, kernels=0.5) == pytest.approx(110.0)
    assert ledger.what_if(graph, launches=0.5) == pytest.approx(205.0)


def test_without_times_there_is_no_what_if():
    assert ledger.what_if(Profile()) is None
    assert ledger.what_if(dataclasses.replace(profile(1.0), counted=Counts())) is None
