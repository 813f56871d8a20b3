"""What the layers of the course move and compute, by the measurement contract."""

import pandas as pd
import pytest
import torch

from labkit import device, machine, works
from labkit.machine import Roofs
from labkit.works import AFFINE, LINEAR, RESIDUAL

SHAPE = {"batch": 7, "width": 5}
DIRECTIONS = ("forward", "backward", "forward_backward")
ROOFS = Roofs(
    kind="live",
    device="toy",
    date="2026-01-01",
    copy=((1000, 1e-3), (10**10, 1e4)),  # 10^6 bytes per microsecond at every size
    matmul={"float32": 1e14, "bfloat16": 4e14},
    node_us=2.0,
    host_us=9.0,
)


def panel(*widths, batch=1000, dtype="float32"):
    return pd.DataFrame({"width": widths, "batch": batch, "dtype": dtype})


@pytest.fixture
def measured(monkeypatch):
    monkeypatch.setattr(machine, "roofs", lambda: ROOFS)


@pytest.mark.parametrize("itemsize", [2, 4])
def test_bytes_follow_the_contract(itemsize):
    x, w = 7 * 5, 5 * 5
    assert [AFFINE.min_bytes(SHAPE, itemsize, d) for d in DIRECTIONS] == [
        2 * x * itemsize,  # x and y
        3 * x * itemsize,  # x, dy, dx
        5 * x * itemsize,
    ]
    assert [LINEAR.min_bytes(SHAPE, itemsize, d) for d in DIRECTIONS] == [
        (2 * x + w) * itemsize,  # X + Y + W
        (3 * x + 2 * w) * itemsize,  # X + dY + dX + W + dW
        (5 * x + 3 * w) * itemsize,
    ]


def test_operations_are_those_of_the_formulas():
    elements, product = 7 * 5, 2 * 7 * 5 * 5
    assert [AFFINE.flops(SHAPE, d) for d in DIRECTIONS] == [2 * elements, 4 * elements, 6 * elements]
    assert [LINEAR.flops(SHAPE, d) for d in DIRECTIONS] == [product, 2 * product, 3 * product]


@pytest.mark.parametrize(
    ("work", "sizes"),
    [(AFFINE, [(7, 5), (5,), (5,)]), (LINEAR, [(7, 5), (5, 5), (5,)])],
    ids=["affine", "linear"],
)
def test_inputs_are_float32_of_the_layers_shapes(work, sizes):
    tensors = work.inputs(SHAPE)
    assert [tuple(t.shape) for t in tensors] == sizes
    assert {t.dtype for t in tensors} == {torch.float32}
    assert {t.device.type for t in tensors} == {device.name()}
    assert not torch.equal(tensors[0], work.inputs(SHAPE)[0]), "random ones, every time"


def test_inputs_are_normal_and_outputs_of_size_one():
    torch.manual_seed(0)
    shape = {"batch": 400, "width": 300}
    x, *rest = LINEAR.inputs(shape)
    assert abs(x.mean().item()) < 0.02 and 0.98 < x.std().item() < 1.02
    assert 1.3 < LINEAR.reference(x, *rest).std().item() < 1.5, "the product and the bias, one each"


def test_references_are_the_formulas():
    torch.manual_seed(0)
    x, w, b = (t.double() for t in AFFINE.inputs(SHAPE))
    expected = torch.stack([row * w + b for row in x])
    assert torch.equal(AFFINE.reference(x, w, b), expected)
    x, w, b = (t.double() for t in LINEAR.inputs(SHAPE))
    torch.testing.assert_close(LINEAR.reference(x, w, b), torch.einsum("bi,oi->bo", x, w) + b)


@pytest.mark.parametrize(("reads", "second"), [(1, (5,)), (1, (7, 1)), (2, (7, 5))])
def test_a_product_reads_its_second_operand_as_often_as_told(reads, second):
    work = works.product(lambda batch, width: works.draw(*second), reads)
    x, other = work.inputs(SHAPE)
    assert (tuple(x.shape), tuple(other.shape)) == ((7, 5), second)
    assert torch.equal(work.reference(x, other), x * other)
    assert work.min_bytes(SHAPE, 2, "forward") == (reads + 1) * 7 * 5 * 2
    assert work.flops(SHAPE, "forward") == 35


def test_a_product_is_forward_only_and_checked_in_full():
    work = works.product(works.draw, 2)
    with pytest.raises(ValueError, match=r"direction: .* forward only, not backward"):
        work.min_bytes(SHAPE, 2, "backward")
    # rows of a sample would be compared with the whole second operand
    assert not work.sample


@pytest.mark.parametrize(("width", "expected"), [(16, 2.0), (400, 3.84), (2000, 80.0)])
def test_the_floor_is_the_highest_of_three(measured, width, expected):
    """2 us for a launch; (2 B N + N N) 4 bytes at 10^6 per us; 2 B N N operations at 10^8 per us."""
    line = works.floors(linear=LINEAR)(panel(16, 4096))["floor of linear"]
    assert line(width) == pytest.approx(expected)


def test_floors_are_of_the_panels_batch_and_dtype(measured):
    of = works.floors(affine=AFFINE, linear=LINEAR)
    assert list(of(panel(16))) == ["floor of affine", "floor of linear"]
    width = 2000  # 2 B N elements; arithmetic is far below
    for batch, dtype, itemsize in ((1000, "float32", 4), (1000, "bfloat16", 2), (5000, "float32", 4)):
        line = of(panel(16, batch=batch, dtype=dtype))["floor of affine"]
        assert line(width) == pytest.approx(2 * batch * width * itemsize / 1e6)


@pytest.mark.parametrize(("dtype", "borders"), [("float32", (224.7, 500.0)), ("bfloat16", (414.2, 1333.3))])
def test_regimes_change_where_the_floors_cross(measured, dtype, borders):
    """fp32: 8e-3 N + 4e-6 NN = 2, then 2e-5 NN = 8e-3 N + 4e-6 NN; bf16: half the bytes, 4 times the rate."""
    spans = works.regimes(LINEAR)(panel(16, 256, 8192, dtype=dtype))
    assert [name for _, _, name in spans] == ["launch", "memory", "arithmetic"]
    (start, first, _), (first_again, second, _), (second_again, end, _) = spans
    assert (start, end) == pytest.approx((16, 8192))
    assert (first, second) == (first_again, second_again) == pytest.approx(borders, rel=0.04)


def test_an_elementwise_layer_has_no_arithmetic_regime(measured):
    spans = works.regimes(AFFINE)(panel(16, 8192))
    assert [name for _, _, name in spans] == ["launch", "memory"]


def test_nothing_is_drawn_without_rows(measured):
    assert works.floors(linear=LINEAR)(panel()) == {}
    assert works.regimes(LINEAR)(panel()) == []


def test_nothing_is_drawn_before_a_device_was_measured(monkeypatch):
    monkeypatch.setattr(machine, "roofs", lambda: None)
    assert works.floors(linear=LINEAR)(panel(16, 32)) == {}
    assert works.regimes(LINEAR)(panel(16, 32)) == []


def test_a_residual_block_moves_three_tensors_and_is_forward_only():
    assert RESIDUAL.min_bytes(SHAPE, 2, "forward") == 3 * 7 * 5 * 2
    assert RESIDUAL.flops(SHAPE, "forward") == 4 * 7 * 5
    with pytest.raises(ValueError, match="direction"):
        RESIDUAL.min_bytes(SHAPE, 2, "backward")
    x, weight, bias, residual = RESIDUAL.inputs(SHAPE)
    assert [t.shape for t in (x, weight, bias, residual)] == [(7, 5), (5,), (5,), (7, 5)]
    expected = torch.where(x * weight + bias > 0, x * weight + bias, 0.0) + residual
    torch.testing.assert_close(RESIDUAL.reference(x, weight, bias, residual), expected)
    assert not RESIDUAL.sample, "checked in full: the residual has as many rows as x"
