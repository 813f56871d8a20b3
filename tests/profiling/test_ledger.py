"""The ledger's entries, from clocks, profiler and roofs that are made up; bytes of what runs here."""

import dataclasses
import shutil

import pytest
import torch

from labkit.measure.results import Results
from labkit.measure.roofline import Roofs
from labkit.profiling import launch_counts, ledger
from labkit.profiling.launch_counts import Counts
from labkit.profiling.profiles import Profile
from labkit.profiling.recorded_profiles import HostEvent, KernelEvent

ROOFS = Roofs(
    **{"kind": "live", "device": "Simulated", "date": "2026-01-01", "node_us": 1.0, "host_us": 5.0},
    copy=((1_000_000, 2.0), (1_000_000_000, 1000.0)),  # 1e6 bytes in a microsecond, at most
    matmul={"bfloat16": 1e14, "float32": 2e13},  # 1e8 and 2e7 operations in a microsecond
)
COMPILES = pytest.mark.skipif(not shutil.which("g++"), reason="torch.compile needs g++ on a CPU")
STAMP = {"kind": "live", "device": "Simulated", "date": "2026-01-01"}
STAMP |= {"clock": "host", "cache": "warm", "source": "here"}
LAYERS = [(10e6, 4e8), (2e6, 5e8)]
"""10 us of bytes that hide 4 us of products; 5 us of products that hide 2 us of bytes."""


def table(column, **values):
    found = [{"contender": name, column: value, **STAMP} for name, value in values.items()]
    return Results(found, columns=["contender", column, *STAMP])


def kernel(start, length, stream=7):
    return KernelEvent("k", "k", start, length, stream=stream, grid=(1, 1, 1), block=(32, 1, 1))


def profile(*durations, gap=3.0):
    starts = [sum(durations[:i]) + gap * i for i in range(len(durations))]
    return Profile(kernels=list(map(kernel, starts, durations)), device="Simulated")


def booked(wall, alone, profiles, moved, dtype="bfloat16"):
    tables = table("median_us", **wall), table("median_us", **alone), profiles, table("peak_bytes", **moved)
    return ledger.entries(*tables, LAYERS, ROOFS, dtype)


def entries(wall=100.0, alone=40.0, busy=(20.0, 15.0), moved=22e6, dtype="bfloat16"):
    found = booked({"step": wall}, {"step": alone}, {"step": profile(*busy)}, {"step": moved}, dtype)
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


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({"busy": (80.0,)}, {"sum": 140.0, "between": 0.0}),  # the profiler saw more than the graph clock
        ({"wall": 30.0}, {"launches": 0.0}),  # no entry is below zero
        ({"moved": 200e6}, {"waiting": 0.0, "sum": 9.0 + 194.0 + 5.0 + 60.0}),  # more than was measured
        ({"moved": 5e6}, {"traffic": 0.0, "waiting": 35.0 - 9.0, "sum": 100.0}),  # 6 us hide all 5
        ({"dtype": "float32"}, {"arithmetic": 45.0, "traffic": 22.0 - 12.0}),  # 20 and 25 us hide 10 and 2
    ],
)
def test_instruments_that_disagree_do_not_add_up_and_no_entry_is_below_zero(changes, wanted):
    row = entries(**changes)
    assert {name: row[name] for name in wanted} == pytest.approx(wanted)


def test_each_contender_has_its_own_figures_in_the_order_of_the_wall_times():
    profiles = {"a": profile(35.0), "b": profile(20.0), "c": profile(30.0)}
    wall, moved = {"b": 50.0, "a": 100.0, "c": 80.0}, {"c": 10e6, "a": 22e6, "b": 16e6}
    found = booked(wall, {"a": 40.0, "b": 30.0, "c": None}, profiles, moved)
    assert list(found["contender"]) == ["b", "a"], "without a graph clock there is nothing to book"
    columns = ["wall", "alone", "launches", "traffic", "waiting"]
    assert found[columns].to_numpy().tolist() == [
        pytest.approx([50.0, 30.0, 20.0, 10.0, 1.0]),
        pytest.approx([100.0, 40.0, 60.0, 16.0, 10.0]),
    ]


def test_what_ran_side_by_side_is_booked_once_and_what_was_not_seen_has_no_row():
    both = Profile(kernels=[kernel(0.0, 20.0), kernel(10.0, 20.0, stream=8)], device="Simulated")
    found = booked({"a": 90.0}, {"a": 50.0}, {"a": both}, {"a": 6e6})
    assert list(found["waiting"]) == pytest.approx([30.0 - 9.0])
    found = booked({"a": 1.0, "b": 2.0}, {}, {"a": profile(1.0)}, {"b": 1e6})
    assert found.empty and {*ledger.PARTS, "sum", "wall", "alone"} <= set(found.columns)
    nothing = table("median_us"), table("median_us"), {}, table("peak_bytes"), LAYERS, None, "bfloat16"
    assert list(ledger.entries(*nothing)) == list(found), "nothing is recorded, and there is no GPU"


N, ROW = 4 * 16 * 8, 4 * 8
"""Bytes of a float32 tensor of 16 x 8, and of one row of it."""


@pytest.mark.parametrize(
    ("call", "wanted"),
    [
        # in place: what is changed is read, unless it is overwritten
        (lambda x, y: x.add_(y), [("add_", 2 * N, N)]),
        (lambda x, y: x.add_(y[0]), [("add_", N + ROW, N)]),
        (lambda x, y: x.copy_(y), [("copy_", N, N)]),
        (lambda x, y: x[1].zero_(), [("zero_", 0, ROW)]),
        (lambda x, y: torch.add(x, y, out=torch.empty(16, 8)), [("add", 2 * N, N)]),
        (lambda x, y: torch._foreach_mul_([x, y], 2.0), [("_foreach_mul_", 2 * N, 2 * N)]),
        # views move nothing, and what comes after touches only them
        (lambda x, y: (x.unbind(1), x.split(4), torch.empty_like(x)), []),
        (lambda x, y: x.contiguous().reshape(-1).to(torch.float32)[:].unsqueeze_(0), []),
        (lambda x, y: x[:4] * 2, [("mul", N // 4, N // 4)]),
        (lambda x, y: x[:1].expand(16, 8) * 1, [("mul", N // 16, N)]),
        (lambda x, y: x.t().reshape(-1), [("clone", N, N)]),  # where no view will do it copies
        # a tensor that lends its shape is not read
        (lambda x, y: torch.randn_like(x), [("randn_like", 0, N)]),
    ],
)
def test_each_operation_reads_and_writes_what_it_has_to(call, wanted):
    x, y = torch.randn(16, 8), torch.randn(16, 8)
    found = launch_counts.operations(lambda: call(x, y))
    assert [(o.name, o.bytes_read, o.bytes_written) for o in found] == wanted
    assert all(o.programs == 0 and o.distinct_bytes == o.bytes_read + o.bytes_written for o in found)


def test_operations_of_a_backward_pass_are_seen():
    x, w, dy = torch.randn(16, 8, requires_grad=True), torch.randn(8, requires_grad=True), torch.ones(16, 8)

    def seen(call):
        return sorted((o.name, o.bytes_read, o.bytes_written) for o in launch_counts.operations(call))

    tanh, scaled, doubled = x.tanh(), x * w, x * 2
    assert seen(lambda: torch.autograd.grad(tanh, x, dy)) == [("tanh_backward", 2 * N, N)]
    # dx; dw for each row, then over the rows
    assert seen(lambda: scaled.backward(dy)) == [("mul", N + ROW, N), ("mul", 2 * N, N), ("sum", N, ROW)]
    assert ("add_", 2 * N, N) in seen(lambda: doubled.backward(dy)), "a gradient that was there is added to"


@COMPILES
@pytest.mark.usefixtures("fresh_compiler")
def test_eager_bytes_are_those_of_every_operation_and_compiled_ones_those_that_fusing_leaves():
    x, bias = torch.randn(16, 8), torch.randn(8)
    assert ledger.eager_bytes(lambda: torch.tanh(x + bias)) == (2 * N + ROW) + 2 * N
    assert ledger.compiled_bytes(lambda x: torch.tanh(x) * 2 + x, x) == 2 * N


def launched(launches, kernels):
    """A profile of kernels that start when they are launched and the one before has ended."""
    host, device_, ready, done = [], [], 0.0, 0.0
    for launch in launches:
        host.append(HostEvent("cudaLaunchKernel", ready, launch))
        ready += launch
    ready = 0.0
    for launch, length in zip([*launches, *[0.0] * len(kernels)], kernels, strict=False):
        ready += launch
        done = max(done, ready)
        device_.append(kernel(done, length))
        done += length
    return Profile(kernels=device_, host=host, device="Simulated"), done


def test_what_the_slower_of_host_and_device_saves_shows_and_the_others_does_not():
    made, end = launched([5.0] * 3, [40.0, 25.0, 90.0])
    assert ledger.predicted_span_us(made) == pytest.approx(end), "nothing changed"
    host_bound, _ = launched([10.0] * 10, [2.0] * 10)
    assert ledger.predicted_span_us(host_bound, kernels=0.5) == pytest.approx(101.0)
    assert ledger.predicted_span_us(host_bound, launches=0.5) == pytest.approx(52.0)
    graph, _ = launched([10.0], [20.0] * 10)
    assert ledger.predicted_span_us(graph, kernels=0.5) == pytest.approx(110.0)
    assert ledger.predicted_span_us(graph, launches=0.5) == pytest.approx(205.0)
    assert ledger.predicted_span_us(dataclasses.replace(profile(1.0), counted=Counts())) is None
