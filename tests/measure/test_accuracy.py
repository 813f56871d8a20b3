"""What the check of a sweep's contenders sees: at full size too, and in the gradients."""

import pytest
import torch

from labkit.measure.accuracy import EDGE_ROWS, SPREAD_ROWS, Comparison, sampled_rows

BATCH, WIDTH = 1000, 12


def reference(x, w, other):
    return (x * other) @ w.T


def right(x, w, other):
    return reference(x, w, other)


def inputs(batch=BATCH, grad=True, dtype=torch.float32):
    torch.manual_seed(0)
    drawn = torch.randn(batch, WIDTH), torch.randn(WIDTH, WIDTH), torch.randn(batch, WIDTH)
    return tuple(t.to(dtype).requires_grad_(grad) for t in drawn)


def of(call, direction="forward_backward"):
    return Comparison(call, reference, direction, batched=(0, 2))


def hooked(which, spoil):
    """Right, but for the gradient of one input, which ``spoil`` changes."""

    def call(*tensors):
        passed = list(tensors)
        if passed[which].requires_grad:
            passed[which] = passed[which] * 1.0
            passed[which].register_hook(spoil)
        return reference(*passed)

    return call


@pytest.mark.parametrize("batch", [1, 5, 16, 17, 64, 1000, 2**15])
def test_the_rows_are_both_ends_and_some_between(batch):
    rows = sampled_rows(batch).tolist()
    assert rows == sorted(set(rows)) and rows[0] == 0 and rows[-1] == batch - 1
    assert set(range(min(EDGE_ROWS, batch))) <= set(rows)
    assert set(range(max(0, batch - EDGE_ROWS), batch)) <= set(rows)
    assert min(batch, SPREAD_ROWS) <= len(rows) <= SPREAD_ROWS + 2 * EDGE_ROWS
    assert max(b - a for a, b in zip([-1, *rows], rows, strict=False)) <= batch // (SPREAD_ROWS - 1) + 1


@pytest.mark.parametrize("direction", ["forward", "forward_backward"])
@pytest.mark.parametrize("batch", [1, 7, BATCH])
def test_what_is_right_passes(direction, batch):
    comparison = of(right, direction)
    given = inputs(batch, grad=direction != "forward")
    assert comparison.complete(given) < 1e-6
    assert comparison.at_full_size(given) < 1e-6


@pytest.mark.parametrize("direction", ["forward", "forward_backward"])
def test_where_each_row_comes_of_all_inputs_all_are_compared(direction):
    """As in a recurrence whose rows are steps."""
    x, weight, _ = inputs(grad=direction != "forward")
    plain, late = (
        (lambda x, w: (x @ w).cumsum(0)),
        (lambda x, w: (x @ w).cumsum(0) * (torch.arange(BATCH) != 500)[:, None]),
    )
    for call, good in ((plain, True), (late, False)):
        error = Comparison(call, plain, direction, batched=()).at_full_size((x, weight))
        assert (error < 1e-5) == good


@pytest.mark.parametrize("row", [0, 7, 999, 992])
def test_a_wrong_row_at_an_end_of_the_output_is_seen(row):
    def call(*tensors):
        y = reference(*tensors)
        return torch.cat([y[:row], y[row : row + 1] + 3, y[row + 1 :]])

    assert of(call, "forward").at_full_size(inputs(grad=False)) > 0.05


@pytest.mark.parametrize(
    ("which", "spoil"),
    [
        (0, lambda g: g * 1.1),
        (1, lambda g: g * 1.1),
        (2, lambda g: g * 1.1),
        (0, lambda g: torch.cat([g[:64], torch.zeros_like(g[64:])])),
        (2, lambda g: torch.cat([g[:-16], g[:16]])),
        (0, lambda g: torch.full_like(g, torch.nan)),
        (2, lambda g: g.index_fill(0, torch.tensor([500]), torch.nan)),  # between the rows that are compared
        (0, lambda g: g.index_fill(0, torch.tensor([500]), 1000.0)),
        (1, lambda g: g.flip(0)),
    ],
)
def test_a_wrong_gradient_is_seen(which, spoil):
    error = of(hooked(which, spoil)).at_full_size(inputs())
    assert not error <= 0.05


def test_a_weight_gradient_without_the_last_rows_is_seen():
    """As when a kernel sums whole tiles of rows only."""

    def call(x, w, other):
        cut = len(x) // 64 * 64
        left = reference(x[cut:], w.detach(), other[cut:])
        return torch.cat([reference(x[:cut], w, other[:cut]), left])

    assert of(call).at_full_size(inputs()) > 0.05
    assert of(call).complete(inputs(batch=64)) < 1e-6, "and at a sampled size it is not"
