"""What the tests of the norm and the recurrences share: their modules, and the tests that all four pass."""

import importlib
import itertools
import math
from collections.abc import Iterable
from typing import Any

import cases
import operators as op
import pytest
import torch
from launches import POINTWISE
from operators import Case, Variant, bf16, fp16, fp32, gradients, meta, offsets
from torch import Tensor

from labkit.measure import correctness

__all__ = ["OperatorTests", "fp16", "gradients", "launch", "normed", "norms", "offsets", "steps"]
norms, steps, normed, sums = (  # the package's attribute rms_norm is the function
    importlib.import_module(f"labkit.kernels.{name}")
    for name in ("rms_norm", "recurrence", "rms_recurrence", "affine")
)
KERNELS = {
    norms: (
        "rms_norm_kernel",
        "rms_norm_grad_kernel",
    ),
    sums: ("column_sum_kernel",),
    steps: ("states_kernel", "states_grad_kernel"),
    normed: ("rms_recurrence_kernel", "rms_recurrence_grad_kernel"),
}
WIDTHS = (1, 20, 32, 33, 64, 100, 128, 129, 256, 512, 513, 1024, 2048, 4096)


def examine(case: Case, *shapes: Any, dtypes: Any = (fp32,), **options: Any) -> None:
    """With a norm in the loop the backward reads a rounded h at each step."""
    roundings = 8 if case.call is cases.RMS.call else 1
    op.examine(case, *shapes, dtypes=dtypes, **{"roundings": roundings} | options)


def launch(call: Any, *shapes: tuple[int, ...], dtype: torch.dtype = fp32) -> None:
    """On meta tensors of these shapes: what would be launched both ways, with its arguments."""
    op.launch_both_ways(call, *(meta(*shape, dtype=dtype) for shape in shapes))


class OperatorTests:
    """What each of the operators in ``kept`` passes."""

    tested: tuple[Case, ...]
    shapes: tuple[tuple[int, ...], ...]
    asked: dict[str, list[tuple[Any, ...]]]
    """By target what is compiled: the arguments of ``launch``, and the dtype at the end."""
    spills: int = 0

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        if "case" in metafunc.fixturenames:
            metafunc.parametrize("case", self.tested, ids=repr)
        if "shape" in metafunc.fixturenames:
            metafunc.parametrize("shape", self.shapes, ids=str)

    def test_every_layout_and_dtype_is_right(self, case: Case) -> None:
        examine(case, layouts=correctness.LAYOUTS, dtypes=correctness.DTYPES)

    def test_any_shape_is_right(self, case: Case, shape: tuple[int, ...]) -> None:
        examine(case, shape)

    def test_float32_is_off_by_little_and_at_most_twice_as_far_as_eager(self, case: Case) -> None:
        tensors = op.drawn(case, 4, 33, 100)
        found = gradients(case.call, tensors), gradients(case.reference, tensors), op.exact(case, tensors)
        errors = [
            (correctness.relative_error(a, c), correctness.relative_error(b, c))
            for a, b, c in zip(*found, strict=True)
        ]
        (ours, eager), *others = errors
        assert ours < (2 * eager if case is cases.RMS else 1e-6)
        assert all(one <= 2 * other for one, other in others)

    @op.INTERPRETED
    def test_without_rows_or_steps_no_kernel_is_launched(self, case: Case) -> None:
        for shape in ((0, 3, 4), (2, 0, 4)):
            examine(case, shape)
            assert not any(op.both_ways_of(case.call, op.drawn(case, *shape))), "a GPU refuses an empty grid"

    @pytest.fixture(scope="class")
    @classmethod
    def variants(cls, cache: None) -> list[Variant]:
        def launched(call: Any, *shapes_and_dtype: Any) -> None:
            launch(call, *shapes_and_dtype[:-1], dtype=shapes_and_dtype[-1])

        ones = [(case.call, *(t.shape for t in case.inputs((1, 1, 1))), fp32) for case in cls.tested]
        """Triton makes constants of sizes of one."""
        return op.variants_of(KERNELS, cls.asked | {"sm_90": cls.asked["sm_90"] + ones}, launched)

    @pytest.fixture
    def large(self, variants: list[Variant]) -> list[Variant]:
        """Those of usual sizes."""
        return [v for v in variants if max(v.case[1]) > 1]

    @op.INTERPRETED
    def test_every_kernel_compiles_for_old_and_new_targets_and_fits(self, variants: list[Variant]) -> None:
        assert {v.target for v in variants} == set(POINTWISE)
        for v in variants:
            op.assert_fits([v], 0 if v.target == "sm_90" else self.spills)
        op.assert_far(variants, "weight", "parts", "dweight", "dbias")

    @op.GPU
    @pytest.mark.parametrize("dtype", [fp32, bf16], ids=str)
    def test_two_thousand_steps_are_right_and_the_same_from_run_to_run(
        self, case: Case, dtype: torch.dtype
    ) -> None:
        assert_right_and_the_same(case, (64, 2048, 256), dtype)

    @op.LARGE
    def test_more_elements_than_32_bits_count(self, case: Case) -> None:
        """The first and the last sequence of many, or rows as many."""
        count = 2**31 // (64 * 256) + 3
        near = op.drawn(case, 1, 64, 256, dtype=bf16)
        first, *rest = (t if t.dim() == 1 else t.expand(count, *t.shape[1:]).contiguous() for t in near)
        y = case.call(first.requires_grad_(), *rest)
        small, want, *_ = gradients(case.call, near)
        (dx,) = torch.autograd.grad(y, first, 2 * y.detach())
        for got, one in ((y.detach(), small), (dx, want)):
            torch.testing.assert_close(got[:1], one)
            torch.testing.assert_close(got[-1:], one)


def assert_right_and_the_same(case: Case, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Right once, and the same bits five times more."""
    tensors = op.drawn(case, *shape, dtype=dtype)
    first = gradients(case.call, tensors)
    for got, want in zip(first, op.exact(case, tensors, 2 * first[0].double()), strict=True):
        assert correctness.relative_error(got, want) < (1e-5 if dtype is fp32 else 3e-2)
    for _ in range(5):
        assert op.equal(gradients(case.call, tensors), first)


def assert_each_number_is_written_once(case: Case, shape: tuple[int, int, int]) -> None:
    """The states, and the gradients of a, b and h0: programs in order hide what one writes for another."""
    tensors = op.drawn(case, *shape)
    (forward,), (back,) = op.both_ways_of(case.call, tensors)
    states, first = tensors[0].numel(), tensors[-1].numel()
    assert op.moved(forward)[1] == states
    assert op.moved(back)[1] == 2 * states + first


def assert_nan_stays(case: Case, shape: tuple[int, int, int], places: Iterable[tuple[int, int]]) -> None:
    """A NaN in a or b, of sequence 1 at this step and feature, is in no other sequence or feature."""
    tensors = op.drawn(case, *shape)
    want = gradients(case.call, tensors)
    for (t, n), which in itertools.product(places, (0, 1)):
        given = [x.clone() for x in tensors]
        given[which][1, t, n] = math.nan
        got = gradients(case.call, given)
        assert got[0][1, t:, n].isnan().all()
        for one, other in zip(got, want, strict=True):
            one[1, ..., n] = other[1, ..., n]
            torch.testing.assert_close(one, other)


def in_reverse(case: Case, dh: Tensor, given: list[Tensor], h: Tensor) -> list[Tensor]:
    """The gradients in float64, from the states as they were stored, and so rounded."""
    (a, b), h0, norm = given[:2], given[-1], case is cases.RMS
    last = torch.cat([h0[:, None], h[:, :-1]], 1)
    gates = 1 - a if case is cases.GRU else a
    u = gates * last + (a * b if case is cases.GRU else b)
    scale = (u.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
    unit, g, du, carry = u * scale, torch.zeros_like(u), torch.zeros_like(u), torch.zeros_like(h0)
    for t in reversed(range(dh.shape[1])):
        g[:, t] = du[:, t] = dh[:, t] + carry
        if norm:
            wg = given[2] * g[:, t]
            du[:, t] = scale[:, t] * (wg - unit[:, t] * (wg * unit[:, t]).mean(-1, keepdim=True))
        carry = gates[:, t] * du[:, t]
    first, second = (du * (b - last), du * a) if case is cases.GRU else (du * last, du)
    return [first, second, *[(g * unit).sum((0, 1))] * norm, carry]
