"""What launch_counts.count sees: operations of PyTorch, interpreted kernels, and what must not count."""

import pytest
import torch
import triton
import triton.language as tl

from labkit import backend
from labkit.measure import launch_counts

pytestmark = pytest.mark.skipif(
    not backend.interpreting(), reason="Counting needs interpreted kernels (TRITON_INTERPRET=1)."
)


@triton.jit
def scale(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    tl.store(y_ptr + offsets, 2 * tl.load(x_ptr + offsets, mask=mask), mask=mask)


@triton.jit
def total(x_ptr, sum_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.atomic_add(sum_ptr, tl.sum(tl.load(x_ptr + offsets, mask=offsets < n, other=0.0)))


@triton.jit
def copy_tile(x, y, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    source = tl.make_tensor_descriptor(x, [3, 4], [4, 1], [ROWS, COLUMNS])
    target = tl.make_tensor_descriptor(y, [3, 4], [4, 1], [ROWS, COLUMNS])
    target.store([0, 0], source.load([0, 0]))


@torch.library.custom_op("labkit_test::double", mutates_args=())
def double(x: torch.Tensor) -> torch.Tensor:
    y = torch.empty_like(x)
    scale[(triton.cdiv(x.numel(), 64),)](x, y, x.numel(), BLOCK=64)
    return y.add(1)


def names(launches: list[launch_counts.Launch]) -> list[str]:
    return [launch.name for launch in launches]


FULL, LINE = 256 * 160 * 4, 160 * 4
X, Y, WEIGHT, SQUARE = torch.randn(256, 160), torch.randn(16), torch.randn(160), torch.randn(160, 160)
OPERATIONS = {
    "affine": (lambda: X * WEIGHT + WEIGHT, ["mul", "add"], 2 * (FULL + LINE), 2 * FULL),
    "linear": (
        lambda: torch.nn.functional.linear(X, SQUARE, WEIGHT), ["addmm"], FULL + 160 * LINE + LINE, FULL
    ),
    "views": (lambda: torch.empty(4, 4).reshape(16)[3:].unsqueeze(0).expand(5, -1).t().detach(), [], 0, 0),
    "one tensor twice": (lambda: Y * Y, ["mul"], 64, 64),
    "broadcast": (lambda: Y * Y[:1].expand(16), ["mul"], 64 + 4, 64),
    "empty": (lambda: X[:0] * 2, ["mul"], 0, 0),
    "copy": (lambda: Y.clone().copy_(Y), ["clone", "copy_"], 64 + 64, 64 + 64),
    "in place": (lambda: Y.clone().add_(Y), ["clone", "add_"], 64 + 128, 64 + 64),
    "out": (lambda: torch.add(Y, Y, out=torch.empty(16)), ["add"], 64, 64),
    "own operator": (lambda: double(Y) * 2, ["scale", "add", "mul"], 3 * 64, 3 * 64),
}  # fmt: skip


@pytest.mark.parametrize("name", OPERATIONS)
def test_each_operation_is_a_launch_that_reads_and_writes_its_tensors_once(name):
    call, operations, read, written = OPERATIONS[name]
    result = launch_counts.count(call)
    assert names(result) == operations
    assert sum(launch.bytes_read for launch in result) == read
    assert sum(launch.bytes_written for launch in result) == written


def test_a_backward_pass_is_counted():
    x = torch.randn(8, 4, requires_grad=True)
    result = launch_counts.count(lambda: (x * 3).sum().backward())
    assert names(result)[:2] == ["mul", "sum"]
    assert "mul" in names(result)[2:] and not any(launch.programs for launch in result)


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
    found = launch_counts.count(lambda: call(x, y))
    assert [(o.name, o.bytes_read, o.bytes_written) for o in found] == wanted
    assert all(o.programs == 0 for o in found)


def test_operations_of_a_backward_pass_are_seen():
    x, w, dy = torch.randn(16, 8, requires_grad=True), torch.randn(8, requires_grad=True), torch.ones(16, 8)

    def seen(call):
        return sorted((o.name, o.bytes_read, o.bytes_written) for o in launch_counts.count(call))

    tanh, scaled, doubled = x.tanh(), x * w, x * 2
    assert seen(lambda: torch.autograd.grad(tanh, x, dy)) == [("tanh_backward", 2 * N, N)]
    # dx; dw for each row, then over the rows
    assert seen(lambda: scaled.backward(dy)) == [("mul", N + ROW, N), ("mul", 2 * N, N), ("sum", N, ROW)]
    assert ("add_", 2 * N, N) in seen(lambda: doubled.backward(dy)), "a gradient that was there is added to"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_kernel_moves_the_bytes_of_its_unmasked_lanes(dtype):
    x, y = torch.randn(100).to(dtype), torch.empty(100).to(dtype)
    (launch,) = launch_counts.count(
        lambda: scale[lambda meta: (triton.cdiv(100, meta["BLOCK"]), 1)](x, y, 100, BLOCK=32)
    )
    assert launch == launch_counts.Launch("scale", 4, x.nbytes, y.nbytes)
    assert type(launch.bytes_read) is int
    torch.testing.assert_close(y, 2 * x)


def test_atomics_read_and_write_and_descriptors_count_what_lies_inside():
    x, into = torch.ones(100), torch.zeros(1)
    (launch,) = launch_counts.count(lambda: total[(2,)](x, into, 100, BLOCK=64))
    assert (launch.bytes_read, launch.bytes_written) == (400 + 2 * 4, 2 * 4)
    assert into.item() == 100
    x, y = torch.randn(3, 4), torch.empty(3, 4)
    (launch,) = launch_counts.count(lambda: copy_tile[(1,)](x, y, ROWS=4, COLUMNS=4))
    assert (launch.bytes_read, launch.bytes_written) == (48, 48)


def test_nothing_stays_patched_after_an_error():
    def broken():
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        launch_counts.count(broken)
    x, y = torch.randn(64), torch.empty(64)
    scale[(1,)](x, y, 64, BLOCK=64)
    assert launch_counts.count(lambda: None) == []


def test_a_gpu_is_refused(monkeypatch):
    monkeypatch.setattr("labkit.gpu.available", lambda: True)
    with pytest.raises(RuntimeError, match=r"profiles\.profile"):
        launch_counts.count(lambda: None)
