"""Lesson 5: RMSNorm and recurrences of every shape, their gradients, what they read, what is compiled."""

import dataclasses
import itertools
import math
import re
from typing import Any, NamedTuple

import launches as launches_of
import numpy as np
import pytest
import torch
import triton.language as tl
from launches import POINTWISE, ROOM
from torch.nn import functional
from triton.runtime import interpreter

from labkit import checks, codegen, counts, device, lessons
from labkit import recurrent_works as work

NAME = "05_recurrent_kernel"
pytestmark = pytest.mark.usefixtures("cache")
GPU = pytest.mark.skipif(not device.has_gpu(), reason="two thousand steps and CUDA graphs need a GPU")
INTERPRETED = pytest.mark.skipif(
    device.has_gpu(),
    reason="accesses are counted, and kernels compiled for other GPUs, where there is none",
)
bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
KERNELS = (
    "rms_norm_kernel", "rms_norm_grad_kernel", "sum_kernel", "states_kernel", "states_grad_kernel",
    "rms_recurrence_kernel", "rms_recurrence_grad_kernel", "looped_kernel", "scan_kernel", "original_kernel",
)  # fmt: skip


@pytest.fixture(scope="module")
def lesson(cache):
    return lessons.load(NAME)


# --- inputs and references ----------------------------------------------------------------------------


def weight_of(width):
    """Every fourth is zero: what it was multiplied with cannot be told from the product."""
    weight = 1 + 0.1 * torch.randn(width)
    weight[1::4] = 0
    return weight


def rows_of(shape):
    return torch.randn(shape) * torch.randn(*shape[:-1], 1).exp(), weight_of(shape[-1])


def sequences(shape):
    return torch.sigmoid(1 + torch.randn(shape)), torch.randn(shape), torch.randn(shape[0], shape[2])


def normed_sequences(shape):
    a, b, h0 = sequences(shape)
    return a, b, weight_of(shape[2]), h0


class Case(NamedTuple):
    """One of the lesson's operators."""

    name: str
    reference: Any
    inputs: Any
    """With h0 last, where there is one."""

    def __repr__(self):
        return self.name


RMS_NORM = Case("rms_norm", work.rms_norm, rows_of)
LINEAR = Case("linear_recurrence", work.linear_recurrence, sequences)
GRU = Case("min_gru", work.min_gru, sequences)
RMS = Case("rms_recurrence", work.rms_recurrence, normed_sequences)
CASES = (RMS_NORM, LINEAR, GRU, RMS)
RECURRENT = CASES[1:]
every_case = pytest.mark.parametrize("case", CASES, ids=repr)
every_recurrence = pytest.mark.parametrize("case", RECURRENT, ids=repr)


def drawn(case, *shape, dtype=fp32, grad=False):
    torch.manual_seed(0)
    return [t.to(device.name(), dtype).requires_grad_(grad) for t in case.inputs(shape)]


def without_h0(case):
    return case._replace(inputs=lambda shape: case.inputs(shape)[:-1])


def examine(call, case, *shapes, layouts=("contiguous",), dtypes=(fp32,), **options):
    """A check in some layouts only; a recurrence with a norm rounds h at each step."""
    options = {"roundings": 8 if case.name == RMS.name else 1, "name": case.name} | options
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checks, "LAYOUTS", {name: checks.LAYOUTS[name] for name in layouts})
        return checks.check(call, case.reference, case.inputs, shapes=shapes, dtypes=dtypes, **options)


def gradients(call, tensors, upstream=None):
    """The output and the gradient of every tensor; upstream twice the output where nothing else is given."""
    leaves = [t.detach().requires_grad_() for t in tensors]
    y = call(*leaves)
    return [y.detach(), *torch.autograd.grad(y, leaves, 2 * y.detach() if upstream is None else upstream)]


def assert_close(got, want, dtype=fp32, roundings=1):
    assert got.dtype is dtype and got.shape == want.shape
    problem = checks.diagnose(got.detach(), want.detach(), roundings * checks.TOLERANCE[dtype])
    assert not problem, problem


def all_close(got, want, dtype=fp32):
    for one, other in zip(got, want, strict=True):
        assert_close(one, other.double(), dtype)


def equal(one, other):
    return all(torch.equal(*pair) for pair in zip(one, other, strict=True))


def clear(lesson):
    for plan in (lesson.norm_grad_plan, lesson.recurrence_plan, lesson.rms_recurrence_plan):
        plan.cache_clear()


@pytest.fixture
def on_gpu(lesson, monkeypatch):
    """Let the plans believe that they are made for a GPU of so many multiprocessors."""

    def believe(multiprocessors=132, target="sm_90"):
        monkeypatch.setattr(device, "shared_bytes", lambda: ROOM[target] * 1024)
        monkeypatch.setattr(lesson, "multiprocessors", lambda: multiprocessors)
        clear(lesson)

    yield believe
    clear(lesson)


# --- right on every shape -----------------------------------------------------------------------------


@every_case
def test_every_layout_and_dtype_is_right(lesson, case):
    shape = (2, 2 if case in (LINEAR, GRU) else 3, 20)
    examine(getattr(lesson, case.name), case, shape, layouts=checks.LAYOUTS, dtypes=checks.DTYPES)


@pytest.mark.parametrize("dtype", [fp32, bf16], ids=str)
@pytest.mark.parametrize(
    "shape", [(3, 33), (1, 1), (0, 8), (2, 0, 5), (5, 64), (70, 100), (19,), (3, 600), (3, 1, 513)], ids=str
)
def test_the_norm_is_right_for_rows_of_any_number_and_width(lesson, shape, dtype):
    examine(lesson.rms_norm, RMS_NORM, shape, dtypes=(dtype,))


TIMES = (1, 2, 7, 8, 9, 15, 16, 17, 33)
"""Around the steps that a ring holds: 16 forward, 8 backward."""


@pytest.mark.parametrize(
    ("case", "time"),
    [*((LINEAR, n) for n in TIMES), *((GRU, n) for n in TIMES if n in (1, 8, 9, 17))],
    ids=str,
)
def test_any_number_of_steps_is_right(lesson, case, time):
    examine(getattr(lesson, case.name), case, (1, time, 5))


@pytest.mark.parametrize("time", [1, 2, 5, 16, 33])
def test_any_number_of_steps_with_a_norm_is_right(lesson, time):
    examine(lesson.rms_recurrence, RMS, (2, time, 5))


@every_recurrence
@pytest.mark.parametrize(
    "shape", [(1, 2, 1), (3, 2, 33), (2, 2, 32), (2, 1, 100), (0, 3, 8), (2, 0, 8)], ids=str
)
def test_sequences_of_any_number_and_width_are_right(lesson, case, shape):
    examine(getattr(lesson, case.name), case, shape)


@pytest.mark.parametrize(("width", "dtype"), [(130, fp32), (256, fp32), (257, bf16), (512, bf16)], ids=str)
@pytest.mark.parametrize("case", [LINEAR, GRU], ids=repr)
def test_several_programs_share_a_sequence(lesson, case, width, dtype):
    examine(getattr(lesson, case.name), case, (2, 2, width), dtypes=(dtype,))


def test_no_features_are_no_work(lesson):
    for case in (LINEAR, GRU):
        examine(getattr(lesson, case.name), case, (2, 3, 0))


@every_recurrence
@pytest.mark.parametrize("time", [0, 1, 9])
def test_without_a_first_state_it_is_zero(lesson, case, time):
    examine(getattr(lesson, case.name), without_h0(case), (2, time, 5))


def test_wide_states_with_a_norm_have_several_warps(lesson):
    examine(lesson.rms_recurrence, RMS, (1, 2, 513), dtypes=(fp32, bf16))


@pytest.mark.parametrize("stages", [1, 12])
def test_the_looped_kernel_is_right(lesson, stages):
    options = dict(dtypes=checks.DTYPES, gradients=False)
    shapes = ((2, 3, 130), (1, 1, 1), (3, 2, 20))
    examine(lesson.looped(stages), without_h0(LINEAR), *shapes, layouts=("contiguous", "strided"), **options)


@pytest.mark.parametrize("time", [0, 1, 2, 5, 16, 129])
def test_the_tree_is_right(lesson, time):
    examine(lesson.scanned, without_h0(LINEAR), (2, time, 9), gradients=False)


def test_the_tree_takes_every_layout_and_dtype(lesson):
    options = dict(layouts=checks.LAYOUTS, dtypes=checks.DTYPES, gradients=False)
    examine(lesson.scanned, without_h0(LINEAR), (2, 5, 3), (0, 3, 8), **options)


def test_the_tree_of_many_lanes_is_right(lesson):
    """Its blocks of 64 steps and 32 features, where a sequence ends in the middle of the second."""
    a, b, _ = drawn(LINEAR, 1, 70, 40)
    h = torch.full_like(a, math.nan)
    lesson.scan_kernel[(1, 2)](a, b, h, 70, H=40, BT=64, BH=32, num_warps=4)
    assert_close(h, work.linear_recurrence(a.double(), b.double()))


@pytest.mark.parametrize("shape", [(70, 20), (3, 25, 4), (1, 8)], ids=str)
def test_the_original_rebuilt_is_right(lesson, shape):
    examine(lesson.original_norm, RMS_NORM, shape, layouts=("contiguous", "transposed"))


@pytest.mark.parametrize("eps", [0.5, 1e-3])
def test_eps_is_added_to_the_mean_square(lesson, eps):
    for number in (eps, 2 * eps, eps):  # an operator for each
        norm = RMS_NORM._replace(
            reference=lambda x, weight, e=number: functional.rms_norm(x, weight.shape, weight, e)
        )
        examine(lambda x, weight, e=number: lesson.rms_norm(x, weight, e), norm, (3, 20))
        steps = RMS._replace(reference=lambda *given, e=number: work.rms_recurrence(*given, eps=e))
        examine(lambda *given, e=number: lesson.rms_recurrence(*given, eps=e), steps, (2, 3, 5))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_without_eps_rows_that_fill_up_a_tile_do_not_count(lesson):
    norm = RMS_NORM._replace(reference=lambda x, weight: functional.rms_norm(x, weight.shape, weight, 0.0))
    examine(lambda x, weight: lesson.rms_norm(x, weight, 0.0), norm, (3, 20))


@pytest.mark.parametrize("size", [1e-4, 1e4])
def test_rows_of_any_size_are_right(lesson, size):
    def scaled(shape):
        x, weight = rows_of(shape)
        return size * x, weight

    examine(lesson.rms_norm, RMS_NORM._replace(inputs=scaled), (5, 20), dtypes=(fp32, bf16))


# --- how far off --------------------------------------------------------------------------------------


def errors(call, tensors, exact):
    return [checks.relative_error(*pair) for pair in zip(gradients(call, tensors), exact, strict=True)]


@every_case
def test_float32_is_off_by_little_and_at_most_twice_as_far_as_eager(lesson, case):
    tensors = drawn(case, 4, 33, 100)
    exact = gradients(case.reference, [t.double() for t in tensors])
    result, *ours = errors(getattr(lesson, case.name), tensors, exact)
    eager, *theirs = errors(case.reference, tensors, exact)
    assert result < (2 * eager if case is RMS else 1e-6)
    for one, other in zip(ours, theirs, strict=True):
        assert one <= 2 * other


def test_half_precision_keeps_the_state_in_float32(lesson):
    """One, and 63 times a 512th, which a sum in bf16 would not notice."""
    ones = torch.ones(1, 64, 1, dtype=bf16, device=device.name())
    small, h0 = ones / 512, torch.zeros_like(ones[:, 0])
    for first, last in ((0, -1), (-1, 0)):
        given = small.clone()
        given[:, first] = 1
        if first == 0:
            sums = [call(ones, given)[:, last] for call in (lesson.linear_recurrence, lesson.scanned)]
        else:
            sums = gradients(lesson.linear_recurrence, [ones, small, h0], given)[-1:]
        for total in sums:
            assert total.item() == pytest.approx(1 + 63 / 512, abs=2**-7)


# --- sums over rows, in parts -------------------------------------------------------------------------


@pytest.mark.parametrize("multiprocessors", [1, 2, 132])
@pytest.mark.parametrize("dtype", [fp32, bf16], ids=str)
def test_the_weights_gradient_is_right_in_any_number_of_parts(lesson, on_gpu, dtype, multiprocessors):
    on_gpu(multiprocessors)
    examine(lesson.rms_norm, RMS_NORM, (300, 20), dtypes=(dtype,))


@pytest.mark.parametrize("parts", [1, 2, 511, 512, 513, 1100])
@pytest.mark.parametrize("width", [1, 8, 20])
def test_any_number_of_parts_is_added(lesson, parts, width):
    fences = checks.Fences()
    given = fences.place(torch.randn(parts, width, device=device.name()), "contiguous")
    for dtype in (fp32, bf16):
        with fences:
            total = lesson.added(given, torch.empty(width, dtype=dtype, device=device.name()))
        assert_close(total, given.double().sum(0), dtype)
    assert not fences.broken()


@pytest.mark.parametrize("case", [RMS_NORM, RMS], ids=repr)
def test_gradients_agree_to_the_last_bit_from_run_to_run(lesson, on_gpu, case):
    on_gpu(132)
    tensors = drawn(case, 20, 5, 33)
    call = getattr(lesson, case.name)
    assert equal(gradients(call, tensors), gradients(call, tensors))


# --- autograd -----------------------------------------------------------------------------------------


@every_case
def test_gradients_of_some_inputs_only(lesson, case):
    tensors = drawn(case, 2, 3, 5)
    wants = gradients(case.reference, [t.double() for t in tensors])
    for needed in itertools.product((True, False), repeat=len(tensors)):
        given = [t.clone().requires_grad_(needs) for t, needs in zip(tensors, needed, strict=True)]
        y = getattr(lesson, case.name)(*given)
        assert y.requires_grad is any(needed)
        if any(needed):
            y.backward(2 * y.detach())
        for tensor, want, needs in zip(given, wants[1:], needed, strict=True):
            assert (tensor.grad is not None) is needs
            if needs:
                assert_close(tensor.grad, want)


@every_case
def test_inputs_and_result_are_kept_but_nothing_else(lesson, case):
    tensors, saved = drawn(case, 2, 3, 5, grad=True), []

    def pack(tensor):
        saved.append(tensor.data_ptr())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = getattr(lesson, case.name)(*tensors)
    assert set(saved) == {t.data_ptr() for t in tensors} | ({y.data_ptr()} if case in RECURRENT else set())


@every_case
def test_an_expanded_upstream_gradient(lesson, case):
    tensors = drawn(case, 2, 3, 5)
    row = torch.randn(5, device=device.name())
    got = gradients(getattr(lesson, case.name), tensors, row.expand(2, 3, 5))
    all_close(got, gradients(case.reference, [t.double() for t in tensors], row.double().expand(2, 3, 5)))


@every_case
def test_a_second_derivative_is_refused(lesson, case):
    tensors = drawn(case, 2, 3, 5, grad=True)
    y = getattr(lesson, case.name)(*tensors).square().sum()
    first, *_ = torch.autograd.grad(y, tensors, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


@every_case
def test_autocast_computes_in_half_and_gives_gradients_in_float32(lesson, case):
    call, tensors = getattr(lesson, case.name), drawn(case, 2, 3, 20, grad=True)
    for dtype in (bf16, fp16):
        with torch.autocast(device.name(), dtype=dtype):
            y = call(*tensors)
            mixed = call(tensors[0].to(dtype), *tensors[1:])
        assert torch.equal(y, mixed)
        rounded = [t.detach().to(dtype) for t in tensors]
        assert torch.equal(y, call(*rounded)) and y.dtype is dtype
        made = torch.autograd.grad(y, tensors, 2 * y.detach())
        wants = gradients(call, rounded)[1:]
        assert equal(made, [want.float() for want in wants])


COMPILED = (*CASES, *map(without_h0, RECURRENT))


@pytest.mark.usefixtures("fresh_compiler")
def test_operators_of_several_eps_compile_once_they_were_called(lesson):
    x, weight = drawn(RMS_NORM, 3, 20)

    def layer(x, weight):
        return lesson.rms_norm(x, weight, 0.5) - lesson.rms_norm(x, weight, 0.25) + lesson.rms_norm(x, weight)

    want = layer(x, weight)
    assert torch.equal(torch.compile(layer, fullgraph=True, backend="aot_eager")(x, weight), want)


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("case", COMPILED, ids=repr)
def test_torch_compile_takes_it_whole(lesson, case):
    call, tensors = getattr(lesson, case.name), drawn(case, 2, 9, 20)

    def layer(first, *rest):
        return torch.tanh(call(0.5 * first, *rest))

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    all_close(gradients(compiled, tensors), gradients(layer, tensors))


# --- a number that is not finite ----------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("case", [LINEAR, GRU], ids=repr)
def test_nan_and_infinity_stay_in_their_sequence_and_feature(lesson, case):
    tensors = drawn(case, 3, 3, 6)
    upstream = torch.randn(3, 3, 6, device=device.name())
    want = gradients(getattr(lesson, case.name), tensors, upstream)
    for which, at in enumerate(((1,), (1,), ())):
        given = [t.clone() for t in tensors]
        given[which][(0, *at, 2)], given[which][(1, *at, 4)] = math.inf, math.nan
        got = gradients(getattr(lesson, case.name), given, upstream)
        assert not got[0][0, sum(at) :, 2].isfinite().any() and got[0][1, sum(at) :, 4].isnan().all()
        if at:
            assert torch.equal(got[0][:, 0], want[0][:, 0]), "what was before"
        for one, other in zip(got, want, strict=True):
            for row, feature in ((0, 2), (1, 4)):
                one[row, ..., feature] = other[row, ..., feature]
            assert torch.equal(one, other)


def test_with_a_norm_nan_stays_in_its_sequence(lesson):
    tensors = drawn(RMS, 3, 3, 6)
    upstream = torch.randn(3, 3, 6, device=device.name())
    want = gradients(lesson.rms_recurrence, tensors, upstream)
    for which, at in ((0, (1, 1, 4)), (1, (1, 1, 4)), (3, (1, 4))):
        given = [t.clone() for t in tensors]
        given[which][at] = math.nan
        y, da, db, dweight, dh0 = gradients(lesson.rms_recurrence, given, upstream)
        assert which == 3 or torch.equal(y[1, 0], want[0][1, 0])
        assert y[1, 1:].isnan().all() and dweight.isnan().all()
        for got, other in zip((y, da, db, dh0), (want[n] for n in (0, 1, 2, 4)), strict=True):
            assert equal([got[0], got[2]], [other[0], other[2]])


def test_nan_stays_in_its_row(lesson):
    x, weight = drawn(RMS_NORM, 5, 20)
    upstream = torch.randn(5, 20, device=device.name())
    want = gradients(lesson.rms_norm, [x, weight], upstream)
    x[2, 3] = math.nan
    y, dx, dweight = gradients(lesson.rms_norm, [x, weight], upstream)
    others = [0, 1, 3, 4]
    assert y[2].isnan().all() and dx[2].isnan().all() and dweight.isnan().all()
    assert equal([y[others], dx[others]], [want[0][others], want[1][others]])


def test_nan_does_not_run_back_in_the_tree(lesson):
    a, b, _ = drawn(LINEAR, 2, 9, 20)
    want = lesson.scanned(a, b)
    b[1, 5, 3] = math.nan
    got = lesson.scanned(a, b)
    assert got[1, 5:, 3].isnan().all()
    got[1, 5:, 3] = want[1, 5:, 3] = 0
    assert torch.equal(got, want)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_what_grows_overflows_as_it_does_eagerly(lesson):
    a, b, h0 = drawn(LINEAR, 2, 20, 5)
    tensors = [200 * torch.ones_like(a), b, h0]
    ours, eager = (gradients(call, tensors, a) for call in (lesson.linear_recurrence, work.linear_recurrence))
    assert eager[0].isinf().any() and eager[0].isfinite().any()
    for got, want in zip(ours, eager, strict=True):
        torch.testing.assert_close(got, want, equal_nan=True)
    tensors[0].neg_()
    torch.testing.assert_close(lesson.min_gru(*tensors), work.min_gru(*tensors), equal_nan=True)


# --- wrong calls --------------------------------------------------------------------------------------

X, STATE, WEIGHT = torch.ones(2, 3, 4), torch.ones(2, 4), torch.ones(4)
ROWS = "rms_norm"
WRONG = {
    "a weight of two dimensions": (ROWS, "weight", "(any)", X, STATE),
    "a scalar as weight": (ROWS, "weight", "(any)", X, torch.tensor(1.0)),
    "a weight of another length": (ROWS, "x", "(..., 5)", X, torch.ones(5)),
    "a scalar as x": (ROWS, "x", "(..., 4)", torch.tensor(1.0), WEIGHT),
    "no features": (ROWS, "weight", "1 to 8192", torch.ones(3, 0), torch.ones(0)),
    "too many features": (ROWS, "weight", "1 to 8192", torch.ones(1, 8193), torch.ones(8193)),
    "whole numbers": (ROWS, "weight", "float16 or bfloat16", X.int(), WEIGHT.int()),
    "x in half": (ROWS, "x", "torch.float32", X.half(), WEIGHT),
    "x elsewhere": (ROWS, "x", "cpu", X.to("meta"), WEIGHT),
    "one sequence": (LINEAR, "a", "(any, any, any)", STATE, STATE),
    "four dimensions": (LINEAR, "a", "(any, any, any)", X[None], X[None]),
    "b of other steps": (LINEAR, "b", "(2, 3, 4)", X, X[:, :2]),
    "b to be spread": (LINEAR, "b", "(2, 3, 4)", X, X[:1]),
    "b in bf16": (LINEAR, "b", "torch.float32", X, X.bfloat16()),
    "b elsewhere": (LINEAR, "b", "cpu", X, X.to("meta")),
    "double precision": (LINEAR, "a", "float16 or bfloat16", X.double(), X.double()),
    "h0 with its step": (LINEAR, "h0", "(2, 4)", X, X, STATE[:, None]),
    "one h0 for all": (LINEAR, "h0", "(2, 4)", X, X, WEIGHT),
    "h0 in half": (LINEAR, "h0", "torch.float32", X, X, STATE.half()),
    "h0 elsewhere": (LINEAR, "h0", "cpu", X, X, STATE.to("meta")),
    "too long a sequence": (LINEAR, "a", "2**31", *[torch.empty(1, 2**16, 2**15, device="meta")] * 2),
    "too long below a norm": (RMS, "a", "2**31", *[torch.empty(1, 2**20, 2**11, device="meta")] * 2, WEIGHT),
    "z": (GRU, "z", "(any, any, any)", STATE, STATE),
    "candidate": (GRU, "candidate", "(2, 3, 4)", X, X[..., :3]),
    "h0 of another width": (GRU, "h0", "(2, 4)", X, X, torch.ones(2, 3)),
    "a below a norm": (RMS, "a", "(any, any, any)", STATE, STATE, WEIGHT),
    "b below a norm": (RMS, "b", "(2, 3, 4)", X, X[:1], WEIGHT),
    "a weight too long": (RMS, "weight", "(4)", X, X, torch.ones(5)),
    "a weight for each sequence": (RMS, "weight", "(4)", X, X, STATE),
    "a weight in half": (RMS, "weight", "torch.float32", X, X, WEIGHT.half()),
    "a weight elsewhere": (RMS, "weight", "cpu", X, X, WEIGHT.to("meta")),
    "a flat h0": (RMS, "h0", "(2, 4)", X, X, WEIGHT, WEIGHT),
    "no features below a norm": (RMS, "weight", "1 to 4096", X[..., :0], X[..., :0], WEIGHT[:0]),
    "too many below a norm": (RMS, "weight", "1 to 4096", *[torch.ones(1, 1, 4097)] * 2, torch.ones(4097)),
}  # fmt: skip


@pytest.mark.parametrize("call", WRONG)
def test_a_wrong_call_names_the_argument_and_what_it_should_be(lesson, call):
    case, argument, wanted, *tensors = WRONG[call]
    wanted = wanted.replace("cpu", device.name())
    tensors = [t if t.is_meta else t.to(device.name()) for t in tensors]
    with pytest.raises(ValueError, match=rf"^{argument}: .*{re.escape(wanted)}"):
        getattr(lesson, getattr(case, "name", case))(*tensors)


def test_the_widest_rows_are_taken(lesson):
    for case, width in ((RMS_NORM, 8192), (RMS, 4096)):
        tensors = drawn(case, 1, 1, width)
        y = getattr(lesson, case.name)(*tensors)
        assert_close(y, case.reference(*(t.double() for t in tensors)))


# --- every byte once ----------------------------------------------------------------------------------


def counted(call, tensors):
    """Operations and kernels of a call, and those of its backward pass, between fences, so that strays hit
    nothing else."""
    fences, made = checks.Fences(), []
    leaves = [fences.place(t, "contiguous").requires_grad_() for t in tensors]
    upstream = fences.place(torch.randn_like(tensors[0]), "contiguous")
    with fences:
        forward = counts.count(lambda: made.append(call(*leaves))).launches
        if not made[0].requires_grad:
            return forward
        back = counts.count(lambda: torch.autograd.grad(made[0], leaves, upstream)).launches
    return forward, back


def moved(launch):
    """Numbers of float32 that a launch reads and writes."""
    return launch.bytes_read // 4, launch.bytes_written // 4


@INTERPRETED
@pytest.mark.parametrize("shape", [(33, 20), (5, 100), (3, 600), (2, 3, 1)], ids=str)
def test_the_norm_reads_and_writes_every_number_once(lesson, on_gpu, shape):
    on_gpu(1)
    tensors = drawn(RMS_NORM, *shape)
    N, H = tensors[0].numel(), shape[-1]
    (forward,), (back, total) = counted(lesson.rms_norm, tensors)
    assert moved(forward) == (N + forward.programs * H, N)
    assert moved(back) == (2 * N + back.programs * H, N + back.programs * H)
    assert moved(total) == (back.programs * H, H)


@INTERPRETED
@pytest.mark.parametrize("state", [True, False])
@pytest.mark.parametrize("shape", [(2, 3, 33), (1, 17, 5), (3, 1, 130)], ids=str)
@pytest.mark.parametrize("case", [LINEAR, GRU], ids=repr)
def test_a_recurrence_reads_and_writes_every_number_once(lesson, case, shape, state):
    (B, T, H), gru = shape, case is GRU
    tensors = drawn(case if state else without_h0(case), *shape)
    N, S = B * T * H, state * B * H
    (forward,), (back,) = counted(getattr(lesson, case.name), tensors)
    assert moved(forward) == (2 * N + S, N)
    assert moved(back) == ((3 + gru) * N - B * H + S, 2 * N + S), "all of h but the last state"


@INTERPRETED
@pytest.mark.parametrize("state", [True, False])
@pytest.mark.parametrize("shape", [(2, 5, 33), (1, 3, 5), (3, 1, 600)], ids=str)
def test_with_a_norm_every_number_is_read_and_written_once(lesson, shape, state):
    B, T, H = shape
    tensors = drawn(RMS if state else without_h0(RMS), *shape)
    N, S = B * T * H, state * B * H
    (forward,), (back, total) = counted(lesson.rms_recurrence, tensors)
    assert moved(forward) == (2 * N + B * H + S, N)
    assert moved(back) == (4 * N + S, 2 * N + B * H + S), "the weight, and all of h but the last state"
    assert moved(total) == (B * H, H)


@INTERPRETED
def test_the_loop_and_the_tree_read_and_write_every_number_once(lesson):
    calls = ((lesson.looped(4), (2, 3, 130)), (lesson.scanned, (2, 9, 20)), (lesson.scanned, (1, 130, 3)))
    for call, shape in calls:
        (made,) = counted(call, drawn(LINEAR, *shape)[:2])
        N = math.prod(shape)
        assert moved(made) == (2 * N, N)


@INTERPRETED
def test_the_original_reads_a_row_for_each_of_its_numbers(lesson):
    N, H = 70 * 20, 20
    (forward,), (back, *_) = counted(lesson.original_norm, drawn(RMS_NORM, 70, H))
    assert forward.touched == 4 * (2 * N + H) and moved(forward)[0] >= 2 * N
    assert back.bytes_read >= 2 * 4 * N * H and back.bytes_written == 2 * 4 * N


@INTERPRETED
@every_case
def test_without_rows_or_steps_no_kernel_is_launched(lesson, case):
    for shape in ((0, 3, 4), (2, 0, 4)):
        forward, back = counted(getattr(lesson, case.name), drawn(case, *shape))
        assert not {launch.name for launch in (*forward, *back)} & set(KERNELS), "a GPU refuses an empty grid"
    assert not counted(lesson.scanned, drawn(LINEAR, 2, 0, 4)[:2])


# --- more elements than 32 bits count -----------------------------------------------------------------


@pytest.fixture
def overflow_is_an_error(monkeypatch):
    """Before an address that ran over could be read."""
    builder = interpreter.interpreter_builder
    monkeypatch.setattr(builder, "options", dataclasses.replace(builder.options, debug=True))


WRITTEN = {
    "rms_norm_kernel": ("y",),
    "rms_norm_grad_kernel": ("dx", "parts"),
    "states_kernel": ("h",),
    "states_grad_kernel": ("da", "db", "dh0"),
    "rms_recurrence_kernel": ("h",),
    "rms_recurrence_grad_kernel": ("da", "db", "parts", "dh0"),
    "looped_kernel": ("h",),
    "scan_kernel": ("h",),
}
"""What a kernel writes, by the names of its parameters."""


class Spy(launches_of.Recorder):
    """Stands before a kernel: its launches are recorded, and made."""

    def __getitem__(self, grid):
        record = super().__getitem__(grid)

        def launch(*args, **options):
            record(*args, **options)
            return self.kernel[grid](*args, **options)

        return launch


@pytest.fixture
def seen(lesson, monkeypatch):
    made = []
    for name in KERNELS:
        monkeypatch.setattr(lesson, name, Spy(getattr(lesson, name), made))
    return made


def made_far_away(launch, monkeypatch):
    """The programs of a launch once more, for sequences (or tiles) behind 2**31 elements; nearly all of that
    memory is never touched."""
    full = max(t.numel() for t in launch.arguments.values() if isinstance(t, torch.Tensor))
    before = 2**31 // full + 1
    far = {}
    for name, value in launch.arguments.items():
        if isinstance(value, torch.Tensor) and value.dim() > 1:
            block = torch.empty(before + 1, value.numel(), dtype=value.dtype)
            block[-1] = math.nan if name in WRITTEN[launch.title] else value.flatten()
            value = block
        far[name] = (before + 1) * value if name == "M" else value
    builder, grid = interpreter.interpreter_builder, launch.grid

    def program(axis):
        number = builder.grid_idx[axis] + (0 if axis else before * grid[0])
        return interpreter.TensorHandle(np.array([number], np.int32), tl.int32)

    with monkeypatch.context() as patch:
        patch.setattr(builder, "create_get_program_id", program)
        launch.kernel[grid](**far, **launch.options)
    return far


FAR = [
    (RMS_NORM, (16, 50)),
    (LINEAR, (1, 2, 300)),
    (GRU, (1, 2, 20)),
    (RMS, (1, 2, 20)),
    (LINEAR._replace(name="looped"), (1, 2, 20)),
    (LINEAR._replace(name="scanned"), (1, 2, 20)),
]


@INTERPRETED
@pytest.mark.usefixtures("overflow_is_an_error")
@pytest.mark.parametrize(("case", "shape"), FAR, ids=str)
def test_rows_whose_address_needs_64_bits(lesson, on_gpu, seen, monkeypatch, case, shape):
    on_gpu(1)
    tensors = drawn(case, *shape, dtype=bf16)
    if case.name in ("looped", "scanned"):
        (lesson.looped(3) if case.name == "looped" else lesson.scanned)(*tensors[:2])
    else:
        gradients(getattr(lesson, case.name), tensors)
    kernels = [launch for launch in seen if launch.title != "sum_kernel"]
    assert len(kernels) == (1 if case.name in ("looped", "scanned") else 2)
    for launch in kernels:
        far = made_far_away(launch, monkeypatch)
        for name in WRITTEN[launch.title]:
            assert torch.equal(far[name][-1], launch.arguments[name].flatten()), (launch.title, name)
            assert not far[name][0].isnan().any()


STEPS = {"looped_kernel": dict(STAGES=2), "scan_kernel": dict(BT=4)}


@INTERPRETED
@pytest.mark.usefixtures("overflow_is_an_error")
@pytest.mark.parametrize("kernel", STEPS)
def test_steps_whose_address_needs_64_bits(lesson, kernel):
    """Three steps of 2**30 features, of which the first program has four."""
    H, T = 2**30, 3
    near = drawn(without_h0(LINEAR), 1, T, 4, dtype=bf16)

    def far(values):
        block = torch.empty(1, T, H, dtype=bf16)
        block[..., :4] = values
        return block

    output = far(math.nan)
    getattr(lesson, kernel)[1, 1](*map(far, near), output, T, H=H, BH=4, **STEPS[kernel])
    assert_close(output[..., :4], lesson.linear_recurrence(*near).double(), bf16)


# --- how the work is cut up ---------------------------------------------------------------------------


@pytest.fixture
def launches(lesson, monkeypatch):
    return launches_of.recorded(lesson, KERNELS, monkeypatch)


def meta(*shape, dtype=fp32):
    return torch.empty(shape, dtype=dtype, device="meta", requires_grad=True)


def launch_both_ways(call, *tensors):
    """On meta tensors: what would be launched, with its arguments."""
    y = call(*tensors)
    torch.autograd.grad(y, tensors, torch.empty_like(y))


def is_power(n):
    return n >= 1 and n & (n - 1) == 0


WIDTHS = (1, 20, 32, 33, 64, 100, 128, 129, 256, 512, 513, 1024, 2048, 4096)


def test_a_lane_has_at_least_four_bytes(lesson):
    for width, itemsize in itertools.product(WIDTHS, (2, 4)):
        columns = lesson.columns(width, itemsize)
        assert is_power(columns) and columns >= width and columns * itemsize >= 4 * 32
        assert columns < 2 * width or columns * itemsize == 4 * 32


def test_programs_of_the_norm_cover_all_rows(lesson, launches):
    for width, dtype, rows in itertools.product((*WIDTHS, 8192), (bf16, fp32), (1, 15, 16, 17, 1000)):
        launches.clear()
        lesson.rms_norm(meta(rows, width, dtype=dtype), meta(width, dtype=dtype))
        (made,) = launches
        (programs,), height, columns = made.grid, made.BM, made.BH
        row = width * dtype.itemsize
        assert rows == made.M and programs == math.ceil(rows / height)
        assert width <= columns and is_power(height)
        assert height * row >= 2048 or 2 * height * columns > 1024, "two KB, or a lane's share of numbers"
        assert height == 1 or (height // 2 * row < 2048 and height * columns <= 1024), "and no more"
        assert is_power(made.num_warps) and columns <= 512 * made.num_warps
        assert width > 512 or made.num_warps == 1


@pytest.mark.parametrize(("multiprocessors", "target"), [(1, "sm_86"), (132, "sm_90")])
def test_gradients_of_the_norm_take_few_programs_that_have_as_much_to_do(
    lesson, on_gpu, multiprocessors, target
):
    on_gpu(multiprocessors, target)
    for rows, width, itemsize in itertools.product((1, 33, 4096, 65537), (*WIDTHS, 8192), (2, 4)):
        programs, sizes = lesson.norm_grad_plan(rows, width, itemsize)
        height, columns, warps, stages = (sizes[name] for name in ("BM", "BH", "num_warps", "STAGES"))
        tiles = math.ceil(rows / height)
        places = multiprocessors * max(1, 16 // (itemsize * warps))
        rounds = math.ceil(tiles / places)
        assert 1 <= programs <= min(tiles, places) and math.ceil(tiles / programs) == rounds
        assert programs == 1 or math.ceil(tiles / (programs - 1)) > rounds
        assert is_power(height) and sizes["H"] == width <= columns
        assert height * columns == 1024 * warps or height == 1
        assert width >= 512 or warps == 1
        tile, room = 2 * height * columns * itemsize, ROOM[target] * 1024 - 4096
        assert 2 <= stages <= 3 and (stages - 1) * tile <= room
        assert stages == 3 or stages * tile > room


def test_no_program_adds_up_parts_of_no_column(lesson, launches):
    for width in (1, 7, 8, 9, 4096):
        launches.clear()
        lesson.added(meta(3, width), meta(width))
        (made,) = launches
        (programs,), columns = made.grid, made.BH
        assert (programs - 1) * columns < width <= programs * columns


def test_a_ring_holds_no_more_steps_than_there_are(lesson):
    for (batch, time, width), itemsize, most in itertools.product(
        itertools.product((1, 3), (1, 2, 3, 8, 9, 16, 17, 100), WIDTHS), (2, 4), (8, 16)
    ):
        (programs,), sizes = lesson.recurrence_plan(batch, time, width, itemsize, most)
        columns, steps, lane = sizes["BH"], sizes["U"], sizes["BH"] * itemsize // (32 * sizes["num_warps"])
        assert is_power(columns) and is_power(steps) and sizes["H"] == width
        assert programs == batch * math.ceil(width / columns)
        assert steps == most if time > most // 2 else time <= steps < 2 * time
        assert lane == (8 if itemsize == 4 and width > 32 else lane) and lane in (4, 8, 16)
        assert lane == (16 if itemsize == 2 and width > 128 else lane)


@pytest.mark.parametrize("target", ["sm_86", "sm_90"])
def test_as_many_steps_run_ahead_as_the_memory_needs_and_room_allows(lesson, on_gpu, target):
    on_gpu(100, target)
    needed, room = 100 * lesson.FLIGHT, ROOM[target] * 1024 - 4096
    for batch, width, itemsize, tensors in itertools.product((1, 64, 1024, 8192), WIDTHS, (2, 4), (2, 4)):
        plan = lesson.rms_recurrence_plan(batch, width, itemsize, tensors)
        ahead, step, held = (
            plan["STAGES"],
            batch * tensors * width * itemsize,
            tensors * plan["BH"] * itemsize,
        )
        assert 2 <= ahead <= 24 and (ahead - 1) * held <= room
        assert ahead * step >= needed or ahead == 24 or ahead * held > room
        assert (ahead - 1) * step < needed or ahead <= 4
        assert width <= plan["BH"] <= 512 * plan["num_warps"] and (width > 512 or plan["num_warps"] == 1)


def test_without_a_gpu_there_is_room_for_the_smallest(lesson, monkeypatch):
    monkeypatch.setattr(device, "shared_bytes", lambda: 0)
    assert lesson.stages_in_room(2**14) == 1 + 95 // 16


def test_the_tree_takes_more_steps_at_once_where_there_are_few_lanes(lesson, launches):
    for batch, width, time, tile in (
        (1, 8192, 1000, (128, 8)),
        (1, 8193, 1000, (64, 32)),
        (512, 128, 17, (32, 32)),
        (4, 20, 3, (4, 8)),
    ):
        launches.clear()
        lesson.scanned(meta(batch, time, width), meta(batch, time, width))
        (made,) = launches
        _, columns = tile
        assert tile == (made.BT, made.BH) and made.grid == (batch, math.ceil(width / columns))


# --- what the compiler makes of it, for GPUs that are not here ----------------------------------------

NORMED = {
    "sm_80": [(bf16, 1, 4096)],
    "sm_90": [(fp32, 1024, 512), (fp32, 4096, 100), (bf16, 4096, 32)],
    "sm_120": [(fp32, 1, 4096), (bf16, 1024, 512)],
}
"""By target: dtype, sequences, features of what has a norm."""
LINEAR_ONES = {
    "sm_80": [(LINEAR, bf16, 512, 4, True), (GRU, fp32, 128, 4, False)],
    "sm_90": [(LINEAR, fp32, 512, 64, False), (GRU, bf16, 512, 64, False)],
    "sm_120": [(LINEAR, fp32, 100, 4, True), (GRU, bf16, 100, 4, True)],
}
"""The operator, dtype, features, steps (a ring of 16 takes a second), whether a first state is given."""
LONE = ("rms_norm_kernel", "rms_recurrence_kernel", "rms_recurrence_grad_kernel")


class Variant(NamedTuple):
    """A kernel compiled as one launch would have it."""

    launch: launches_of.Launch
    target: str
    compiled: codegen.Compiled

    @property
    def dtype(self):
        return next(iter(self.launch.arguments.values())).dtype

    @property
    def width(self):
        return self.launch.H

    def __repr__(self):
        return f"{self.launch.title} {self.target} {self.dtype} {self.width} {self.launch.options}"


def launch_norms(lesson, dtype, batch, time, width):
    """What has a norm, both ways."""
    x, weight = meta(batch, time, width, dtype=dtype), meta(width, dtype=dtype)
    launch_both_ways(lesson.rms_norm, x, weight)
    launch_both_ways(lesson.rms_recurrence, x, x, weight, meta(batch, width, dtype=dtype))


def launch_linear(lesson, case, dtype, width, time, state, batch=1024):
    x, h0 = meta(batch, time, width, dtype=dtype), meta(batch, width, dtype=dtype)
    launch_both_ways(getattr(lesson, case.name), x, x, *[h0] * state)


def alone(launch):
    """The same launch in one warp, and with one stage."""
    stage = {"STAGES": 1} if "STAGES" in launch.options else {}
    return launch._replace(options=launch.options | stage | {"num_warps": 1})


@pytest.fixture(scope="module")
def variants(lesson):
    """The cases above, compiled."""
    asked = {}
    for target, cases in NORMED.items():
        with pytest.MonkeyPatch.context() as patch:
            made = launches_of.recorded(lesson, KERNELS, patch)
            patch.setattr(device, "shared_bytes", lambda target=target: ROOM[target] * 1024)
            patch.setattr(lesson, "multiprocessors", lambda: 132)
            clear(lesson)
            for dtype, batch, width in cases:
                launch_norms(lesson, dtype, batch, 64, width)
            for one in LINEAR_ONES[target]:
                launch_linear(lesson, *one)
            clear(lesson)
        lone = [alone(launch) for launch in made if launch.title in LONE and launch.H == 512]
        for launch in (*made, *lone):
            request = codegen.request(launch.kernel, launch.arguments, target=target, **launch.options)
            asked.setdefault(request.key, (launch, target, request))
    compiled = codegen.compile_many(request for *_, request in asked.values())
    return [Variant(*rest, one) for (*rest, _), one in zip(asked.values(), compiled, strict=True)]


def of_kernels(variants, *names):
    found = [v for v in variants if v.launch.title in names]
    assert {v.launch.title for v in found} == set(names)
    return found


def spills_allowed(v):
    """Of a ring of steps a few registers, once a round: ptxas leaves others free."""
    return 0 if v.target == "sm_90" or not v.launch.title.startswith("states") else 384


@INTERPRETED
def test_every_kernel_compiles_for_every_family_of_targets_and_fits(variants):
    seen = {(v.launch.title, v.target) for v in variants}
    timed = ("looped_kernel", "scan_kernel", "original_kernel")
    assert seen == set(itertools.product(set(KERNELS) - set(timed), POINTWISE))
    for v in variants:
        assert v.compiled.spills <= spills_allowed(v), (v, v.compiled.spills)
        assert v.compiled.shared_bytes <= ROOM[v.target] * 1024, (v, v.compiled.shared_bytes)


@INTERPRETED
def test_places_of_rows_are_counted_in_64_bits(variants):
    for v in variants:
        assert re.search(r"arith\.muli .*: (tensor<\w+x)?i64", v.compiled.ttir), v


@INTERPRETED
def test_one_warp_adds_up_by_shuffles_alone(variants):
    """Five for each sum of a row, and nothing in shared memory."""
    lone = [v for v in of_kernels(variants, *LONE) if v.launch.num_warps == 1 and v.width == 512]
    lone = [v for v in lone if v.launch.options.get("STAGES", 1) == 1]
    assert {(v.launch.title, v.target) for v in lone} == set(itertools.product(LONE, ("sm_90", "sm_120")))
    for v in lone:
        sums = v.launch.options.get("BM", 1) * (2 if "grad" in v.launch.title else 1)
        assert v.compiled.shuffles["bfly"] == 5 * sums, (v, v.compiled.shuffles)
        others = set(v.compiled.shuffles) - {"bfly"}  # the weight's gradient on its way from 16 to 32 bits
        assert not others or (others, v.dtype) == ({"idx"}, bf16), v
        assert not v.compiled.barriers and not v.compiled.shared_bytes, v


@INTERPRETED
def test_without_a_norm_no_lane_waits_for_another(variants):
    for v in of_kernels(variants, "states_kernel", "states_grad_kernel"):
        c = v.compiled
        assert not c.shuffles and not c.barriers and not c.shared_bytes and not c.async_copies, v


@INTERPRETED
def test_steps_run_ahead_in_registers(variants):
    """U of them before the loop, and for each of U as many in it, beside the first state."""
    for v in of_kernels(variants, "states_kernel", "states_grad_kernel"):
        tensors = 2 if v.launch.title == "states_kernel" else 4 if v.launch.GRU else 3
        assert sum(v.compiled.loads.values()) == 2 * v.launch.U * tensors + (v.launch.h0 is not None), v


@INTERPRETED
def test_with_a_norm_steps_run_ahead_in_shared_memory(variants):
    for v in of_kernels(variants, *LONE[1:], "rms_norm_grad_kernel"):
        tensors = 4 if v.launch.title == "rms_recurrence_grad_kernel" else 2
        rows, stages = v.launch.options.get("BM", 1), v.launch.STAGES
        held = (stages - 1) * tensors * rows * v.launch.BH * v.dtype.itemsize
        assert held <= v.compiled.shared_bytes <= held + 4096, v
        assert bool(v.compiled.async_copies) is (stages > 1), v


@INTERPRETED
def test_rows_of_a_norm_are_loaded_in_128_bits(variants):
    """Copied into shared memory too. 100 features in bf16 begin at multiples of 8 bytes only."""
    for v in of_kernels(variants, *LONE, "rms_norm_grad_kernel"):
        if v.width >= 512 // v.dtype.itemsize or (v.width, v.dtype) == (100, fp32):
            assert set(v.compiled.loads) == {128} and set(v.compiled.async_copies) <= {128}, v
            assert max(v.compiled.stores) == 128, v
        if (v.width, v.dtype) == (100, bf16):
            assert set(v.compiled.loads) == {64}, v


@INTERPRETED
def test_steps_of_a_linear_recurrence_are_loaded_in_64_or_128_bits(variants):
    """Two warps of eight bytes a lane for float32: measured, they are faster than one of sixteen."""
    for v in of_kernels(variants, "states_kernel", "states_grad_kernel"):
        if v.dtype is fp32 and v.width >= 100:
            assert v.compiled.num_warps == 2 and set(v.compiled.loads) == {64}, v
        if v.dtype is bf16 and v.width >= 256:
            assert v.compiled.num_warps == 1 and set(v.compiled.loads) == {128}, v


@INTERPRETED
def test_sums_are_added_in_a_fixed_order(variants):
    for v in variants:
        assert not re.search(r"\b(atom|red)\.", v.compiled.ptx), v


@INTERPRETED
def test_sizes_of_one_compile(lesson, on_gpu, launches):
    """Triton makes constants of them."""
    on_gpu(132)
    launch_norms(lesson, fp32, 1, 1, 1)
    launch_linear(lesson, LINEAR, fp32, 1, 1, True, batch=1)
    launch_linear(lesson, GRU, fp32, 1, 1, False, batch=1)
    requests = [codegen.request(m.kernel, m.arguments, **m.options) for m in launches]
    assert len(codegen.compile_many(requests)) == len(requests)


# --- on a GPU -----------------------------------------------------------------------------------------


@GPU
@pytest.mark.parametrize("dtype", [fp32, bf16], ids=str)
@every_case
def test_two_thousand_steps_are_right_and_the_same_from_run_to_run(lesson, case, dtype):
    tensors = drawn(case, 64, 2048, 256, dtype=dtype)
    first = gradients(getattr(lesson, case.name), tensors)
    exact = [t.double() for t in tensors]
    for got, want in zip(first, gradients(case.reference, exact, 2 * first[0].double()), strict=True):
        assert checks.relative_error(got, want) < (1e-5 if dtype is fp32 else 3e-2)
    for _ in range(5):
        assert equal(gradients(getattr(lesson, case.name), tensors), first)


@GPU
def test_the_tree_is_right_after_two_thousand_steps(lesson):
    for batch, width in ((2, 40), (64, 256)):
        a, b, _ = drawn(LINEAR, batch, 2048, width)
        assert_close(lesson.scanned(a, b), work.linear_recurrence(a.double(), b.double()))


@GPU
@every_case
def test_both_directions_can_be_captured_in_a_graph(lesson, case):
    tensors = drawn(case, 8, 33, 100)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):  # compiles
            gradients(getattr(lesson, case.name), tensors)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = gradients(getattr(lesson, case.name), tensors)
    tensors[0].mul_(0.5)
    graph.replay()
    assert equal(captured, gradients(getattr(lesson, case.name), tensors))
