"""What many small Linears side by side move and compute, however their weight is kept."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from labkit import device
from labkit.accuracy import Comparison
from labkit.grouped_works import (
    CHANNELS,
    CHANNELS_CONV,
    CHANNELS_LINEARS,
    GROUPED,
    GROUPED_CONV,
    GROUPED_DENSE,
    GROUPED_LINEARS,
    conv_reference,
    grouped_reference,
    linears_reference,
    packed,
)
from labkit.sweeps import Contender, Work

SHAPE = {"batch": 6, "groups": 4, "width": 5, "time": 3}
DIRECTIONS = ("forward", "backward", "forward_backward")
FORWARD_ONLY = {"dense": GROUPED_DENSE, "packed": packed(2)}
BOTH_WAYS = {
    "grouped": GROUPED,
    "linears": GROUPED_LINEARS,
    "conv": GROUPED_CONV,
    "channels": CHANNELS,
    "channels, linears": CHANNELS_LINEARS,
    "channels, conv": CHANNELS_CONV,
}
WORKS = BOTH_WAYS | FORWARD_ONLY
ROWS, CHANNELS_FIRST = (6, 20), (2, 20, 3)
SIZES = {
    "grouped": [ROWS, (4, 5, 5), (4, 5)],
    "linears": [ROWS, (4, 5, 5), (4, 5)],
    "conv": [ROWS, (20, 5, 1), (20,)],
    "channels": [CHANNELS_FIRST, (4, 5, 5), (4, 5)],
    "channels, linears": [CHANNELS_FIRST, (4, 5, 5), (4, 5)],
    "channels, conv": [CHANNELS_FIRST, (20, 5, 1), (20,)],
    "dense": [ROWS, (20, 20), (20,)],
    "packed": [ROWS, (2, 10, 10), (2, 10)],
}


def sizes_of(work: Work, shape: dict[str, int]) -> list[tuple[int, ...]]:
    return [tuple(t.shape) for t in work.inputs(shape)]


def by_hand(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """x (rows, groups * in), weight (groups, in, out), bias (groups, out)."""
    groups, width, _ = weight.shape
    parts = [x[:, g * width : (g + 1) * width] @ weight[g] + bias[g] for g in range(groups)]
    return torch.cat(parts, 1)


# Inputs


@pytest.mark.parametrize("name", WORKS)
def test_inputs_are_float32_of_the_layouts_shapes(name):
    tensors = WORKS[name].inputs(SHAPE)
    assert [tuple(t.shape) for t in tensors] == SIZES[name]
    assert {t.dtype for t in tensors} == {torch.float32}
    assert {t.device.type for t in tensors} == {device.name()}
    assert all(t.is_contiguous() for t in tensors)
    again = WORKS[name].inputs(SHAPE)
    assert not any(torch.equal(*pair) for pair in zip(tensors, again, strict=True)), "random, every time"


@pytest.mark.parametrize("name", WORKS)
def test_the_result_has_the_layout_of_x(name):
    x, *weights = WORKS[name].inputs(SHAPE)
    assert WORKS[name].reference(x, *weights).shape == x.shape


@pytest.mark.parametrize("name", WORKS)
def test_there_are_a_hundred_groups_where_left_out(name):
    shape = {"batch": 3, "width": 2}
    assert sizes_of(WORKS[name], shape) == sizes_of(WORKS[name], {**shape, "groups": 100})
    assert WORKS[name].inputs(shape)[0].shape[1] == 200
    assert WORKS[name].min_bytes(shape, 2, "forward") == 2 * 100 * (3 * 2 + 3 * 2 + 2 * 2)
    assert WORKS[name].flops(shape, "forward") == 100 * 2 * 3 * 2 * 2


@pytest.mark.parametrize("name", WORKS)
def test_outputs_have_size_one(name):
    torch.manual_seed(0)
    inputs = WORKS[name].inputs({"batch": 128, "groups": 6, "width": 50})
    assert abs(inputs[0].mean().item()) < 0.02 and 0.98 < inputs[0].std().item() < 1.02
    assert 1.3 < WORKS[name].reference(*inputs).std().item() < 1.5, "with a bias: the square root of 2"


def test_one_row_and_one_group_are_enough():
    shape = {"batch": 1, "groups": 1, "width": 1}
    for name, work in {**BOTH_WAYS, "dense": GROUPED_DENSE, "packed": packed(1)}.items():
        assert {t.numel() for t in work.inputs(shape)} == {1}, name
        assert work.reference(*work.inputs(shape)).numel() == 1


@pytest.mark.parametrize(
    ("shape", "x"),
    [
        ({"batch": 1024, "groups": 2, "width": 1}, (2, 2, 512)),
        ({"batch": 48, "groups": 2, "width": 1}, (1, 2, 48)),
        ({"batch": 48, "groups": 2, "width": 1, "time": 100}, (1, 2, 48)),
        ({"batch": 48, "groups": 2, "width": 1, "time": 16}, (3, 2, 16)),
    ],
)
def test_a_sequence_has_512_positions_where_left_out_and_never_more_than_the_rows(shape, x):
    for work in (CHANNELS, CHANNELS_LINEARS, CHANNELS_CONV):
        assert sizes_of(work, shape)[0] == x


def test_rows_have_to_fill_the_sequences():
    for work in (CHANNELS, CHANNELS_LINEARS, CHANNELS_CONV):
        with pytest.raises(ValueError, match="batch: 600 rows are no whole number of sequences of 512"):
            work.inputs({"batch": 600, "groups": 2, "width": 1})


def test_zeros_are_off_the_blocks_and_nowhere_else():
    _, dense, _ = GROUPED_DENSE.inputs(SHAPE)
    _, wide, _ = packed(2).inputs(SHAPE)
    on = torch.block_diag(*torch.ones(4, 5, 5)).bool()
    assert torch.equal(dense.cpu() != 0, on)
    assert torch.equal(wide.cpu() != 0, torch.stack([on[:10, :10]] * 2))


def test_groups_that_cannot_be_packed_are_named():
    with pytest.raises(ValueError, match="groups: 10 is no multiple of the 4 that are packed together"):
        packed(4).inputs({"batch": 2, "groups": 10, "width": 3})
    assert sizes_of(packed(4), {"batch": 2, "width": 3}) == [(2, 300), (25, 12, 12), (25, 12)]


# References


def doubles() -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    return tuple(t.double() for t in GROUPED.inputs(SHAPE))


def test_references_agree_when_the_weight_is_kept_otherwise():
    x, weight, bias = doubles()
    want = by_hand(x, weight, bias)
    turned = weight.mT  # (groups, out, in)
    filters, row = turned.reshape(20, 5, 1), bias.flatten()
    wide = torch.stack([torch.block_diag(*weight[:2]), torch.block_diag(*weight[2:])])
    found = {
        "grouped": (x, weight, bias),
        "linears": (x, turned, bias),
        "conv": (x, filters, row),
        "dense": (x, torch.block_diag(*turned), row),
        "packed": (x, wide, bias.view(2, 10)),
    }
    for name, inputs in found.items():
        torch.testing.assert_close(WORKS[name].reference(*inputs), want)
    for name in ("grouped", "linears", "conv"):
        _, *weights = found[name]
        sequences = x.view(2, 3, 20).transpose(1, 2)
        got = WORKS[f"channels, {name}" if name != "grouped" else "channels"].reference(sequences, *weights)
        torch.testing.assert_close(got.transpose(1, 2).reshape(6, 20), want)


def test_references_are_what_pytorch_computes():
    x, weight, bias = doubles()
    torch.testing.assert_close(
        torch.baddbmm(bias[:, None], x.view(6, 4, 5).transpose(0, 1), weight).transpose(0, 1).reshape(6, 20),
        grouped_reference(x, weight, bias),
    )
    for name in ("conv", "channels, conv"):
        x, weight, bias = (t.double() for t in WORKS[name].inputs(SHAPE))
        sequences = x if x.ndim == 3 else x.unsqueeze(2)
        want = functional.conv1d(sequences, weight, bias, groups=4).view_as(x)
        torch.testing.assert_close(WORKS[name].reference(x, weight, bias), want)


def test_references_take_groups_that_are_not_square_and_no_rows():
    for rows in (0, 7):
        x, weight, bias = (
            torch.randn(rows, 6).double(),
            torch.randn(2, 3, 4).double(),
            torch.randn(2, 4).double(),
        )
        want = by_hand(x, weight, bias)
        assert want.shape == (rows, 8)
        torch.testing.assert_close(grouped_reference(x, weight, bias), want)
        torch.testing.assert_close(linears_reference(x, weight.mT, bias), want)
        torch.testing.assert_close(conv_reference(x, weight.mT.reshape(8, 3, 1), bias.flatten()), want)


# Bytes and operations


@pytest.mark.parametrize("name", BOTH_WAYS)
def test_bytes_and_operations_follow_the_contract(name):
    """6 rows of 4 groups of 5: X and Y have 120 elements, W has 100."""
    work = BOTH_WAYS[name]
    for itemsize in (2, 4):
        found = [work.min_bytes(SHAPE, itemsize, d) for d in DIRECTIONS]
        assert found == [340 * itemsize, 560 * itemsize, 900 * itemsize]
    assert [work.flops(SHAPE, d) for d in DIRECTIONS] == [1200, 2400, 3600]


def test_the_hundred_linears_of_the_lesson_in_numbers():
    shape = {"batch": 4096, "width": 100}
    for name, work in WORKS.items():
        assert work.min_bytes(shape, 2, "forward") == 165_840_000, name
        assert work.flops(shape, "forward") == 8_192_000_000
    assert GROUPED.min_bytes(shape, 2, "backward") == 249_760_000
    assert GROUPED.flops(shape, "forward_backward") == 24_576_000_000


@pytest.mark.parametrize("name", BOTH_WAYS)
def test_forward_bytes_are_those_of_inputs_and_output(name):
    x, weight, bias = BOTH_WAYS[name].inputs(SHAPE)
    y = BOTH_WAYS[name].reference(x, weight, bias)
    assert BOTH_WAYS[name].min_bytes(SHAPE, 4, "forward") == 4 * (x.numel() + y.numel() + weight.numel())


@pytest.mark.parametrize("name", FORWARD_ONLY)
def test_zeros_are_no_work_and_weights_with_zeros_are_forward_only(name):
    work = FORWARD_ONLY[name]
    assert work.min_bytes(SHAPE, 2, "forward") == 680
    assert work.flops(SHAPE, "forward") == 1200
    for direction in ("backward", "forward_backward"):
        message = f"direction: a block-diagonal weight is measured forward only, not {direction}"
        with pytest.raises(ValueError, match=message):
            work.min_bytes(SHAPE, 2, direction)


# What a sweep does with them


@pytest.mark.parametrize("name", WORKS)
@pytest.mark.parametrize("all_rows", [True, False])
def test_every_work_can_be_checked_row_by_row(name, all_rows):
    """A sequence is a row: what comes first in x comes first in the result."""
    direction = "forward" if name in FORWARD_ONLY else "forward_backward"
    shape = {"batch": 400, "groups": 2, "width": 6, "time": 2}
    inputs = [t.requires_grad_() for t in WORKS[name].inputs(shape)]
    comparison = Comparison(WORKS[name].reference, WORKS[name].reference, direction, WORKS[name].batched)
    assert comparison.at_full_size(inputs, all_rows=all_rows) < 1e-5


@pytest.mark.parametrize(
    ("shape", "x"),
    [
        ({"batch": 4096, "time": 512}, (4, 2, 16)),
        ({"batch": 3200, "time": 100}, (4, 2, 16)),
        ({"batch": 4096, "time": 8}, (8, 2, 8)),
        ({"batch": 4096}, (1, 2, 64)),
    ],
)
def test_what_is_checked_at_a_smaller_size_is_whole_sequences(shape, x):
    shape = {**shape, "groups": 2, "width": 1}
    for work in (CHANNELS, CHANNELS_LINEARS, CHANNELS_CONV):
        capped = {axis: min(size, work.sample.get(axis, size)) for axis, size in shape.items()}
        assert sizes_of(work, capped)[0] == x
    assert {work.sample["batch"] for work in WORKS.values()} == {64}


def test_contenders_of_works_that_differ_are_told_apart():
    """Else a sweep would go on with rows of another layout."""
    works = [*WORKS.values(), packed(4)]
    assert len({Contender("one", torch.mul, work).fingerprint() for work in works}) == len(works)
    assert (
        Contender("one", torch.mul, packed(2)).fingerprint()
        == Contender("one", torch.mul, packed(2)).fingerprint()
    )
