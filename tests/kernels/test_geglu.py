"""labkit.kernels.mlp: the gated MLP on awkward shapes, what it keeps, its gradients."""

import math

import cases
import operators as op
import pytest
import torch
from cases import with_gate_up
from operators import Case, assert_close, bf16, drawn, fp16, meta
from peak import peak_bytes
from products import KERNELS, kept_is_right
from torch.nn import functional

from labkit import gpu
from labkit.kernels import common, linear, mlp
from labkit.kernels.mlp import fused_gate_up, gate_up_forward, geglu_mlp
from labkit.measure import correctness
from labkit.work import gate_up

MLP = cases.geglu_mlp(40)

SHAPES = ((64, 128), (37, 33), (70, 40), (1, 1), (3, 5, 24), (19,), (16,), (0, 8))
"""Full; ragged, by pointers and by descriptors; one element; three dimensions; one; no rows."""


# --- right on every shape -----------------------------------------------------------------------------


@pytest.mark.parametrize("keep", [False, True])
def test_gate_and_up_are_right_whether_or_not_it_keeps(keep):
    def half(x, w_gate_up):
        hidden, kept = fused_gate_up(x, w_gate_up, keep)
        assert (kept is not None) is keep
        return hidden

    shapes = (*(s for s in SHAPES if len(s) == 2), (4, 0))
    layouts = correctness.LAYOUTS if keep else ("contiguous",)
    op.examine(Case(half, gate_up.reference, with_gate_up(40)), *shapes, layouts=layouts, gradients=False)
    op.examine(Case(half, gate_up.reference, with_gate_up(33)), *shapes, gradients=False)


def test_geglu_mlp_is_right():
    op.examine(MLP, *SHAPES, layouts=correctness.LAYOUTS, roundings=3)
    op.examine(cases.geglu_mlp(33), (37, 33), (9, 40), roundings=3)
    for width, hidden in ((0, 8), (8, 0)):
        op.examine(cases.geglu_mlp(hidden), (4, width), roundings=3)


@pytest.mark.parametrize("has_tma", [True, False])
@pytest.mark.parametrize("hidden", [40, 8, 72, 1, 33, 63])
def test_gate_does_not_run_over_into_up(monkeypatch, has_tma, hidden):
    """They lie side by side in a row: a store of gate beyond its columns lands in up, inside all fences."""
    its = common.device_limits(torch.device(gpu.device()))
    op.pretend(monkeypatch, common.DeviceLimits(its.multiprocessors, its.shared_bytes, has_tma), linear)
    for dtype in correctness.DTYPES:
        kept_is_right(70, 40, hidden, dtype)


@pytest.mark.parametrize("dtype", [bf16, fp16], ids=str)
def test_a_deep_sum_is_rounded_once(dtype):
    """Sums in 16 bits, or a gate rounded before the product, would be far outside."""
    x, pair = drawn(with_gate_up(24), 20, 4096, dtype=dtype)
    hidden, kept = gate_up_forward(x, pair, True)
    for side, weight in enumerate(pair):
        op.assert_rounded_once(kept[:, side], x.double() @ weight.double().T)
    for each in (hidden, gate_up_forward(x, pair, False)[0]):
        op.assert_rounded_once(each, gate_up.reference(x.double(), pair.double()), times=3)


@pytest.mark.parametrize("hidden", [40, 33, 1])
def test_with_gate_and_up_by_cublas_it_is_right_too(monkeypatch, hidden):
    monkeypatch.setattr(mlp, "library_is_faster", lambda *_: True)
    op.examine(cases.geglu_mlp(hidden), (37, 33), (9, 40), (0, 8), (4, 0), roundings=4)


def test_cublas_computes_gate_and_up_where_tiles_leave_multiprocessors_idle():
    """Sizes at which both ways were timed on an H200: (M, H, K), and which was faster."""
    limits = common.DeviceLimits(132, 232448, has_tma=True)

    def faster(*sizes, dtype=bf16, keep=False):
        return mlp.library_is_faster(*sizes, keep, dtype, limits)

    assert faster(79, 2552, 5536) and faster(128, 1568, 4000) and faster(565, 1024, 4096)
    assert not faster(3998, 2816, 1024) and not faster(2048, 11008, 4096) and not faster(565, 3000, 1408)
    assert faster(1024, 1384, 3600, keep=True)  # the kernel stores gate and up as well, and saves less
    assert not faster(79, 2553, 5536)  # cuBLAS is slow where rows begin anywhere
    single = {"dtype": torch.float32}
    assert faster(487, 96, 7984, **single) and faster(82, 104, 1408, **single)
    assert not faster(290, 3176, 1000, **single) and not faster(606, 5144, 352, **single)


@pytest.mark.parametrize("spent", [False, True])
@pytest.mark.parametrize("dtype", [bf16, fp16], ids=str)
def test_the_backwards_pass_is_rounded_once_wherever_it_writes(dtype, spent):
    """The upstream gradient is that of the down product: through a unit matrix it is the MLP's own."""
    dy, kept, unit = drawn(
        lambda _: (torch.randn(37, 24), torch.randn(37, 2, 24), torch.eye(24)), dtype=dtype
    )
    leaf = kept.double().requires_grad_()
    want = functional.gelu(leaf[:, 0], approximate="tanh") * leaf[:, 1]
    (gradient,) = torch.autograd.grad(want, leaf, dy.double())
    before = kept.clone()
    hidden, dkept = mlp.gate_up_backward(dy, unit, kept, spent)
    assert (dkept.data_ptr() == kept.data_ptr()) is spent
    assert spent or torch.equal(kept, before)
    op.assert_rounded_once(hidden, want.detach(), times=2)
    op.assert_rounded_once(dkept, gradient, times=2)


@op.INTERPRETED
@pytest.mark.parametrize(("rows", "width", "hidden"), [(37, 33, 70), (5, 40, 1024), (1, 1, 1)])
def test_nothing_is_read_or_written_beyond_the_end(monkeypatch, rows, width, hidden):
    """By pointers, whose masks are ours: rows of tiles read both weights, columns of tiles x."""
    its = common.DeviceLimits(4, 0, False)
    op.pretend(monkeypatch, its, linear)
    *pad, made, backward = op.kernels_of(
        lambda *t: mlp.gate_up_backward(t[0], t[2], mlp.gate_up_forward(*t[:2], True)[1], False),
        *drawn(lambda _: (*with_gate_up(hidden)((rows, width)), torch.randn(width, hidden))),
    )
    assert len(pad) == (width % 4 > 0)
    width = 16 * math.ceil(width / 16) if pad else width  # of the copies
    BM, BN, *_ = linear.choose_tile(rows, 2 * hidden, 4, True, its)
    down, across = math.ceil(rows / BM), math.ceil(hidden / (BN // 2))
    assert made.programs == down * across
    assert made.bytes_read == 4 * width * (across * rows + down * 2 * hidden)
    assert made.bytes_written == 3 * 4 * rows * hidden
    assert backward.bytes_read == backward.bytes_written == 3 * 4 * rows * hidden


# --- what is kept, and gradients ----------------------------------------------------------------------


def test_what_was_kept_is_overwritten_once_it_is_spent_and_not_before():
    tensors = drawn(MLP, grad=True)
    y, saved = op.saved_by(geglu_mlp, tensors)
    given = {t.data_ptr() for t in tensors}
    (kept,) = (t for t in saved if t.data_ptr() not in given)
    before, version = kept.clone(), kept._version

    _, *want = op.exact(MLP, [t.detach() for t in tensors])
    for retain in (True, True, False):
        assert torch.equal(kept, before) and kept._version == version
        op.all_close(torch.autograd.grad(y, tensors, 2 * y.detach(), retain_graph=retain), want)
    assert not torch.equal(kept, before) and kept._version > version, "whoever saved it too must hear of it"
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.grad(y, tensors, y.detach())


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("how", ["compiled", "checkpoint", "reentrant checkpoint"])
def test_what_is_kept_may_be_computed_again_or_belong_to_the_compiler(how):
    tensors = drawn(MLP, grad=True)
    _, *want = op.exact(MLP, [t.detach() for t in tensors])
    if how == "compiled":
        y = op.compiled(geglu_mlp)(*tensors)
        op.all_close(torch.autograd.grad(y, tensors, 2 * y.detach(), retain_graph=True), want)
    else:
        y = torch.utils.checkpoint.checkpoint(geglu_mlp, *tensors, use_reentrant="reentrant" in how)
    y.backward(2 * y.detach())
    op.all_close([t.grad for t in tensors], want)


def test_gate_and_up_are_kept_only_for_a_backward(monkeypatch):
    launches = op.recorded(monkeypatch, KERNELS)
    for grad in (True, False):
        geglu_mlp(meta(8, 16, grad=grad), meta(2, 24, 16), meta(16, 24))
        assert (launches[-1].kept_gate is not None) is (launches[-1].kept_up is not None) is grad
    with torch.no_grad():
        geglu_mlp(meta(8, 16, grad=True), meta(2, 24, 16), meta(16, 24))
    assert launches[-1].kept_gate is None
    with pytest.raises(RuntimeError, match="fused_gate_up has no backward"):
        fused_gate_up(meta(8, 16, grad=True), meta(2, 24, 16))


@op.INTERPRETED  # on a GPU so small a call has two kernels, and keeps everything
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("grad", [True, False])
def test_a_compiled_call_keeps_something_only_for_a_backward(monkeypatch, grad):
    launches = op.recorded(monkeypatch, KERNELS)
    with torch.set_grad_enabled(grad):
        op.compiled(geglu_mlp)(*drawn(MLP, grad=True))
    assert (launches[-1].kept_gate is not None) is grad


# --- on a GPU; equal bits are tested with those of matmul ----------------------------------------------


@op.LARGE
@pytest.mark.parametrize("hidden", [1024, 1025])
def test_a_kept_pair_of_more_elements_than_32_bits_count(hidden):
    tensors = drawn(cases.geglu_mlp(hidden), 2**31 // 2048 + 70, 16, dtype=bf16)
    op.assert_right_in_parts(MLP, tensors, 2**12, roundings=3)


@op.GPU
@pytest.mark.parametrize("sizes", [(8192, 768, 3072), (4096, 1001, 2049)], ids=str)
@pytest.mark.parametrize("dtype", correctness.DTYPES, ids=str)
def test_large_shapes_are_right(sizes, dtype):
    rows, width, hidden = sizes
    tensors = drawn(cases.geglu_mlp(hidden), rows, width, dtype=dtype)
    roundings = 1 if dtype is torch.float32 else 3
    y, *got = op.gradients(geglu_mlp, tensors)
    want, *wants = op.exact(MLP, tensors, 2 * y.double())
    assert_close(y[-70:], want[-70:], dtype, roundings)
    for one, other in zip(got, wants, strict=True):
        assert correctness.relative_error(one, other) < roundings * correctness.TOLERANCE[dtype]


@op.GPU
@pytest.mark.usefixtures("fresh_compiler")
def test_training_takes_no_more_memory_than_compiled_by_pytorch():
    tensors = drawn(cases.geglu_mlp(3072), 4096, 768, dtype=bf16, grad=True)

    def peak(call):
        return peak_bytes(lambda: torch.autograd.grad(call(*tensors).sum(), tensors))

    assert peak(geglu_mlp) <= peak(torch.compile(MLP.reference))
