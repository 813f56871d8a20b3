"""The ledger's entries, from clocks, profiler and roofs that are made up; bytes of what runs here."""

import dataclasses
import shutil

import pandas as pd
import pytest
import torch

from labkit import counts, ledger
from labkit.counts import Counts
from labkit.machine import Roofs
from labkit.measure.traces import HostEvent, KernelEvent
from labkit.profiles import Profile

ROOFS = Roofs(
    kind="live",
    device="Simulated",
    date="2026-01-01",
    copy=((1_000_000, 2.0), (1_000_000_000, 1000.0)),  # 1e6 bytes in a microsecond, at most
    matmul={"bfloat16": 1e14, "float32": 2e13},  # 1e8 and 2e7 operations in a microsecond
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


def entries(wall=100.0, alone=40.0, busy=(20.0, 15.0), moved=22e6, dtype="bfloat16"):
    profiles = {"step": profile(*busy)}
    found = ledger.entries(
        table("median_us", step=wall),
        table("median_us", step=alone),
        profiles,
        table("peak_bytes", step=moved),
        LAYERS,
        ROOFS,
        dtype,
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
    assert {key: row[key] for key in STAMP} == STAMP
    assert list(row) == ["contender", *ledger.PARTS, "sum", "wall", "alone", *STAMP]


def test_instruments_that_disagree_do_not_add_up():
    assert entries(busy=(80.0,))["sum"] == pytest.approx(140.0), "the profiler saw more than the graph clock"
    assert entries(busy=(80.0,))["between"] == 0.0
    assert entries(moved=200e6)["sum"] > 200, "the floors are above what was measured"
    assert entries(wall=30.0)["launches"] == 0.0, "no entry is below zero"
    assert entries(moved=200e6)["waiting"] == 0.0
    assert entries(moved=200e6)["sum"] == pytest.approx(9.0 + 194.0 + 5.0 + 60.0)


def test_products_hide_no_more_than_all_traffic():
    row = entries(moved=5e6)
    assert row["traffic"] == 0.0, "6 us are hidden, 5 us of bytes are there"
    assert row["waiting"] == pytest.approx(35.0 - 9.0) and row["sum"] == pytest.approx(100.0)


def test_arithmetic_has_the_roof_of_its_dtype():
    row = entries(dtype="float32")  # 20 and 25 us: they hide 10 and 2 us of bytes
    assert row["arithmetic"] == pytest.approx(45.0)
    assert row["traffic"] == pytest.approx(22.0 - 12.0)


def test_each_contender_has_its_own_figures_in_the_order_of_the_wall_times():
    wall, device = table("median_us", b=50.0, a=100.0, c=80.0), table("median_us", a=40.0, b=30.0, c=None)
    profiles = {"a": profile(35.0), "b": profile(20.0), "c": profile(30.0)}
    moved = table("peak_bytes", c=10e6, a=22e6, b=16e6)
    found = ledger.entries(wall, device, profiles, moved, LAYERS, ROOFS, "bfloat16")
    assert list(found["contender"]) == ["b", "a"], "without a graph clock there is nothing to book"
    assert list(found["wall"]) == [50.0, 100.0] and list(found["alone"]) == [30.0, 40.0]
    assert list(found["launches"]) == pytest.approx([20.0, 60.0])
    assert list(found["traffic"]) == pytest.approx([10.0, 16.0])
    assert list(found["waiting"]) == pytest.approx([1.0, 10.0])


def test_what_ran_side_by_side_is_booked_once():
    both = [
        KernelEvent("k", "k", start, 20.0, stream=stream, grid=(1, 1, 1), block=(32, 1, 1))
        for start, stream in ((0.0, 7), (10.0, 8))
    ]
    profiles = {"a": Profile(kernels=both, device="Simulated")}
    found = ledger.entries(
        table("median_us", a=90.0),
        table("median_us", a=50.0),
        profiles,
        table("peak_bytes", a=6e6),
        LAYERS,
        ROOFS,
        "bfloat16",
    )
    assert list(found["waiting"]) == pytest.approx([30.0 - 9.0])


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


def seen(call):
    """Name, bytes read and bytes written of each operation."""
    return [(o.name, o.bytes_read, o.bytes_written) for o in counts.operations(call)]


def test_in_place_operations_read_what_they_change_unless_they_overwrite_it():
    x, y = torch.randn(16, 8), torch.randn(16, 8)
    N, row = 4 * 16 * 8, 4 * 8
    assert seen(lambda: x.add_(y)) == [("add_", 2 * N, N)]
    assert seen(lambda: x.add_(y[0])) == [("add_", N + row, N)]
    assert seen(lambda: x.add_(x)) == [("add_", N, N)]
    assert seen(lambda: x.mul_(2)) == [("mul_", N, N)]
    assert seen(lambda: x.copy_(y)) == [("copy_", N, N)]
    assert seen(lambda: x.zero_()) == [("zero_", 0, N)]
    assert seen(lambda: x[1].zero_()) == [("zero_", 0, row)]
    assert seen(lambda: torch.add(x, y, out=torch.empty(16, 8))) == [("add", 2 * N, N)]
    several = seen(lambda: torch._foreach_mul_([x, y], 2.0))  # an optimizer's: it returns nothing
    assert several == [("_foreach_mul_", 2 * N, 2 * N)]
    assert [o.touched for o in counts.operations(lambda: x.add_(y))] == [3 * N]


def test_views_move_nothing_and_what_comes_after_touches_only_them():
    x = torch.randn(16, 8)
    N = 4 * 16 * 8
    views = (
        lambda: x.unbind(1),
        lambda: x.split(4),
        lambda: x[2:, 0].detach().unsqueeze(0).expand(3, -1),
        lambda: x.contiguous().reshape(-1).to(torch.float32),
        lambda: x[:].t_().unsqueeze_(0).squeeze_(0),
        lambda: torch.empty_like(x),
    )
    assert [seen(view) for view in views] == [[]] * len(views)
    assert seen(lambda: x[:4] * 2) == [("mul", N // 4, N // 4)]
    assert seen(lambda: x[:1].expand(16, 8) * 1) == [("mul", N // 16, N)]
    assert seen(lambda: x.t().reshape(-1)) == [("clone", N, N)], "where no view will do it copies"


def test_a_tensor_that_lends_its_shape_is_not_read():
    x = torch.randn(16, 8)
    N = 4 * 16 * 8
    for call in (torch.zeros_like, torch.ones_like, torch.randn_like, lambda x: torch.full_like(x, 2.0)):
        ((_, read, written),) = seen(lambda call=call: call(x))
        assert (read, written) == (0, N)
    assert seen(lambda: x.new_zeros(3)) == [("new_zeros", 0, 12)]
    assert seen(lambda: x.new_full((3,), 2.0)) == [("new_full", 0, 12)]


def test_operations_of_a_backward_pass_are_seen():
    x, w = torch.randn(16, 8, requires_grad=True), torch.randn(8, requires_grad=True)
    N, row = 4 * 16 * 8, 4 * 8
    dy = torch.ones(16, 8)
    y = x.tanh()
    assert seen(lambda: torch.autograd.grad(y, x, dy)) == [("tanh_backward", 2 * N, N)]
    y = x * w
    back = seen(lambda: y.backward(dy))
    assert sorted(back) == sorted(
        [("mul", N + row, N), ("mul", 2 * N, N), ("sum", N, row)]  # dx; dw for each row, then over the rows
    )
    y = x * 2
    assert seen(lambda: y.backward(dy))[-1] == ("add_", 2 * N, N), "a gradient that was there is added to"


def test_operations_are_listed_and_the_call_has_its_effect():
    x = torch.zeros(4)
    assert [o.name for o in counts.operations(lambda: x.add_(1).mul_(3))] == ["add_", "mul_"]
    assert x.tolist() == [3.0] * 4
    assert counts.operations(lambda: None) == []
    assert [o.programs for o in counts.operations(lambda: x + 1)] == [0]


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
