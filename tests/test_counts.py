"""What counts.count sees: operations of PyTorch, interpreted kernels, and what must not count."""

import pytest
import torch
import triton
import triton.language as tl

from labkit import backend, counts, device

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


def names(result: counts.Counts) -> list[str]:
    return [launch.name for launch in result.launches]


def test_each_operation_of_pytorch_is_a_launch():
    x, weight, bias = torch.randn(256, 160), torch.randn(160), torch.randn(160)
    result = counts.count(lambda: x * weight + bias)
    assert names(result) == ["mul", "add"]
    assert result.programs == 0
    full, row = 256 * 160 * 4, 160 * 4
    assert result.bytes_read == 2 * (full + row)
    assert result.bytes_written == 2 * full


def test_linear_is_one_launch_and_views_and_allocations_are_none():
    x, weight, bias = torch.randn(2, 8, 160), torch.randn(160, 160), torch.randn(160)
    linear = counts.count(lambda: torch.nn.functional.linear(x, weight, bias))
    assert names(linear) == ["addmm"]
    views = counts.count(lambda: torch.empty(4, 4).reshape(16)[3:].unsqueeze(0).expand(5, -1).t().detach())
    assert names(views) == []


def test_a_backward_pass_is_counted():
    x = torch.randn(8, 4, requires_grad=True)
    result = counts.count(lambda: (x * 3).sum().backward())
    assert names(result)[:2] == ["mul", "sum"]
    assert "mul" in names(result)[2:]


def test_a_tensor_counts_once_a_broadcast_one_for_its_memory_and_an_empty_one_not():
    x = torch.randn(16)
    assert counts.count(lambda: x * x).bytes_read == 64
    assert counts.count(lambda: x * torch.ones(1).expand(16)).launches[-1].bytes_read == 64 + 4
    assert counts.count(lambda: torch.ones(0, 7) * 2).launches[-1].bytes_read == 0


def test_in_place_operations_write_what_they_change():
    x, y = torch.randn(16), torch.randn(16)
    (copy,) = counts.count(lambda: x.copy_(y)).launches
    assert (copy.bytes_read, copy.bytes_written) == (64, 64)
    (added,) = counts.count(lambda: x.add_(y)).launches
    assert (added.bytes_read, added.bytes_written) == (128, 64)
    (out,) = counts.count(lambda: torch.add(x, y, out=torch.empty(16))).launches
    assert (out.bytes_read, out.bytes_written) == (128, 64)


def test_a_kernel_moves_the_bytes_of_its_unmasked_lanes():
    x, y = torch.randn(100), torch.empty(100)
    result = counts.count(lambda: scale[(2,)](x, y, 100, BLOCK=64))
    assert result.launches == [counts.Launch("scale", 2, bytes_read=400, bytes_written=400, touched=800)]
    assert type(result.bytes_read) is int
    assert result.programs == 2
    torch.testing.assert_close(y, 2 * x)


def test_a_kernel_with_a_callable_grid_and_half_precision():
    x, y = torch.randn(100).half(), torch.empty(100).half()
    result = counts.count(
        lambda: scale[lambda meta: (triton.cdiv(100, meta["BLOCK"]), 1)](x, y, 100, BLOCK=32)
    )
    assert result.launches == [counts.Launch("scale", 4, bytes_read=200, bytes_written=200, touched=400)]


@triton.jit
def scale_by_column(x, weight, y, count, width, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    tl.store(y + at, tl.load(x + at, inside) * tl.load(weight + at % width, inside), inside)


def test_an_address_is_touched_once_a_launch_however_many_lanes_load_it():
    x, weight, y = torch.randn(100), torch.randn(10), torch.empty(100)

    def call():
        scale_by_column[(2,)](x, weight, y, 100, 10, BLOCK=64)

    (launch,) = counts.count(call).launches
    assert (launch.bytes_read, launch.bytes_written, launch.touched) == (800, 400, 400 + 40 + 400)
    assert counts.count(lambda: (call(), call())).touched == 2 * 840, "nothing is kept between launches"
    assert counts.count(lambda: (x * 2) + 1).touched == 4 * 400, "the intermediate goes out and comes back"
    (again,) = counts.count(lambda: scale[(2,)](x, x, 100, BLOCK=64)).launches
    assert again.touched == 800, "read and written are two passages"


def test_atomics_read_and_write():
    x, into = torch.ones(100), torch.zeros(1)
    (launch,) = counts.count(lambda: total[(2,)](x, into, 100, BLOCK=64)).launches
    assert (launch.bytes_read, launch.bytes_written) == (400 + 2 * 4, 2 * 4)
    assert into.item() == 100


def test_descriptors_count_what_lies_inside():
    x, y = torch.randn(3, 4), torch.empty(3, 4)
    (launch,) = counts.count(lambda: copy_tile[(1,)](x, y, ROWS=4, COLUMNS=4)).launches
    assert (launch.bytes_read, launch.bytes_written) == (48, 48)


def test_inside_an_operator_of_ones_own_the_launches_are_counted():
    x = torch.randn(100)
    result = counts.count(lambda: double(x) * 2)
    assert names(result) == ["scale", "add", "mul"]


def test_nothing_stays_patched_after_an_error():
    def broken():
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        counts.count(broken)
    x, y = torch.randn(64), torch.empty(64)
    scale[(1,)](x, y, 64, BLOCK=64)
    assert counts.count(lambda: None).launches == []


def test_a_gpu_is_refused(monkeypatch):
    monkeypatch.setattr(device, "has_gpu", lambda: True)
    with pytest.raises(RuntimeError, match=r"profiles\.profile"):
        counts.count(lambda: None)
