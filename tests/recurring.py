"""What the tests of the norm and the recurrences share: inputs, references, other GPUs, and the tests that
all four operators pass."""

import importlib
import itertools
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from launches import ROOM, Launch, Recorder
from products import assert_close, bf16, fp16, fp32, gpu
from torch import Tensor

from labkit import checks, codegen, counts, device
from labkit import recurrent_works as work
from labkit.kernels import linear_recurrence, min_gru, rms_norm, rms_recurrence
from labkit.kernels.common import Gpu

norms, steps, normed = (  # the package's attributes of these names are functions
    importlib.import_module(f"labkit.kernels.{name}") for name in ("rms_norm", "recurrence", "rms_recurrence")
)
KERNELS = {
    norms: ("rms_norm_kernel", "rms_norm_grad_kernel", "sum_kernel"),
    steps: ("states_kernel", "states_grad_kernel"),
    normed: ("rms_recurrence_kernel", "rms_recurrence_grad_kernel"),
}
HALF = 2.0**-11
"""The largest relative error of rounding to float16 once. (To bfloat16 the interpreter cuts off.)"""
WIDTHS = (1, 20, 32, 33, 64, 100, 128, 129, 256, 512, 513, 1024, 2048, 4096)
GPU = pytest.mark.skipif(not device.has_gpu(), reason="two thousand steps and CUDA graphs need a GPU")
LARGE = pytest.mark.large
INTERPRETED = pytest.mark.skipif(
    device.has_gpu(), reason="a kernel's accesses can be watched where it is interpreted"
)

# --- inputs, and what comes out of them


def weight_of(width: int) -> Tensor:
    """Every fourth is zero: what it was multiplied with cannot be told from the product."""
    weight = 1 + 0.1 * torch.randn(width)
    weight[1::4] = 0
    return weight


def rows_of(shape: tuple[int, ...]) -> tuple[Tensor, ...]:
    """Rows of different sizes: that one was normalised by another's would not show otherwise."""
    return torch.randn(shape) * torch.randn(*shape[:-1], 1).exp(), weight_of(shape[-1])


def sequences(shape: tuple[int, ...]) -> tuple[Tensor, ...]:
    return torch.sigmoid(1 + torch.randn(shape)), torch.randn(shape), torch.randn(shape[0], shape[2])


def normed_sequences(shape: tuple[int, ...]) -> tuple[Tensor, ...]:
    a, b, h0 = sequences(shape)
    return a, b, weight_of(shape[2]), h0


class Case(NamedTuple):
    """An operator, the same in plain PyTorch, and inputs for a shape, with h0 last where there is one."""

    call: Callable[..., Tensor]
    reference: Callable[..., Tensor]
    inputs: Callable[[tuple[int, ...]], tuple[Tensor, ...]]
    state: bool = True

    def __repr__(self) -> str:
        return f"{self.call.__name__}{'' if self.state else ', no h0'}"

    @property
    def without_h0(self) -> "Case":
        return self._replace(inputs=lambda shape: self.inputs(shape)[:-1], state=False)


RMS_NORM = Case(rms_norm, work.rms_norm, rows_of)
LINEAR = Case(linear_recurrence, work.linear_recurrence, sequences)
GRU = Case(min_gru, work.min_gru, sequences)
RMS = Case(rms_recurrence, work.rms_recurrence, normed_sequences)


def drawn(case: Case, *shape: int, dtype: torch.dtype = fp32, grad: bool = False) -> list[Tensor]:
    torch.manual_seed(0)
    return [t.to(device.name(), dtype).requires_grad_(grad) for t in case.inputs(shape)]


def examine(
    case: Case, *shapes: Any, layouts: Any = ("contiguous",), dtypes: Any = (fp32,), **options: Any
) -> None:
    """Into NaN between fences, gradients of a correlated upstream, twice. With a norm in the loop the
    backward reads a rounded h at each step."""
    options = {"roundings": 8 if case.reference is work.rms_recurrence else 1, "name": repr(case)} | options
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checks, "LAYOUTS", {name: checks.LAYOUTS[name] for name in layouts})
        checks.check(case.call, case.reference, case.inputs, shapes=shapes, dtypes=dtypes, **options)


def gradients(call: Any, tensors: Any, upstream: Tensor | None = None) -> list[Tensor]:
    """The output and the gradient of every tensor; upstream twice the output where nothing else is given."""
    leaves = [t.detach().requires_grad_() for t in tensors]
    y = call(*leaves)
    return [y.detach(), *torch.autograd.grad(y, leaves, 2 * y.detach() if upstream is None else upstream)]


def exact(case: Case, tensors: Any, upstream: Tensor | None = None) -> list[Tensor]:
    return gradients(case.reference, [t.double() for t in tensors], upstream)


def all_close(got: Any, want: Any) -> None:
    for one, other in zip(got, want, strict=True):
        assert_close(one, other.double())


def assert_rounded_once(got: Tensor, want: Tensor, slack: float = 1e-6) -> None:
    """Every element: a carry, a sum or a part of a sum in 16 bits is off by more. ``slack`` is float32's."""
    assert got.dtype is fp16
    error, allowed = (got.double() - want).abs(), 1.001 * HALF * want.abs()
    worst = (error / (allowed + slack * want.abs().max())).max().item()
    assert worst <= 1, f"{worst:.2f} times what rounding once may cost"


def assert_compiles(layer: Any, tensors: list[Tensor]) -> None:
    """Into one graph, with and without gradients."""
    whole = torch.compile(layer, fullgraph=True, backend="aot_eager")
    all_close(gradients(whole, tensors), gradients(layer, tensors))
    with torch.no_grad():
        assert_close(whole(*tensors), layer(*tensors))


def equal(one: Any, other: Any) -> bool:
    return all(torch.equal(*pair) for pair in zip(one, other, strict=True))


# --- other GPUs, and launches that are recorded


def pretend(patch: pytest.MonkeyPatch, its: Gpu) -> None:
    """Let the host's part believe that tensors are on this GPU."""
    for module in (norms, normed):
        patch.setattr(module, "gpu_of", lambda where: its)


def recorded(patch: pytest.MonkeyPatch) -> list[Launch]:
    """The list that fills with the launches of all kernels while ``patch`` lasts."""
    made: list[Launch] = []
    for module, name in ((module, name) for module, names in KERNELS.items() for name in names):
        patch.setattr(module, name, Recorder(getattr(module, name), made))
    return made


def meta(*shape: int, dtype: torch.dtype = fp32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta", requires_grad=True)


def both_ways(call: Any, *tensors: Tensor) -> None:
    """On meta tensors: what would be launched, with its arguments."""
    y = call(*tensors)
    torch.autograd.grad(y, tensors, torch.empty_like(y))


class Variant(NamedTuple):
    """A kernel compiled as one launch would have it."""

    launch: Launch
    target: str
    compiled: codegen.Compiled
    dtype: torch.dtype


def compiled(launch_all: Callable[[str], None]) -> list[Variant]:
    """What ``launch_all(target)`` would launch on each target's GPU."""
    asked = []
    for target in codegen.TARGETS:
        with pytest.MonkeyPatch.context() as patch:
            made = recorded(patch)
            pretend(patch, gpu(target))
            launch_all(target)
        asked += [(launch, target) for launch in made]
    results = codegen.compile_many(
        codegen.request(launch.kernel, launch.arguments, target=target, **launch.options)
        for launch, target in asked
    )
    pairs = zip(asked, results, strict=True)
    return [Variant(*of, one, next(iter(of[0].arguments.values())).dtype) for of, one in pairs]


def offsets(ttir: str) -> list[tuple[str, str]]:
    """(argument, type of the offset) of every address that is computed from an argument at once."""
    splats = dict(re.findall(r"(%\w+) = tt\.splat %([a-z]\w*) :", ttir))
    blocks = re.findall(r"tt\.addptr (%\w+), %\w+ : \S+>>, tensor<\S*?(i\d+)>", ttir)
    single = re.findall(r"tt\.addptr %([a-z]\w*), %\w+ : !tt\.ptr<\w+>, (i\d+)", ttir)
    return [(splats[base], bits) for base, bits in blocks if base in splats] + single


def kernels_of(call: Any, tensors: Any) -> tuple[list[Any], list[Any]]:
    """The launches of Triton kernels, forward and backward, between fences: strays hit nothing else."""
    fences, made = checks.Fences(), []
    leaves = [fences.place(t.detach(), "contiguous").requires_grad_() for t in tensors]
    upstream = fences.place(torch.randn_like(tensors[0]), "contiguous")
    with fences:
        forward = counts.count(lambda: made.append(call(*leaves))).launches
        back = counts.count(lambda: torch.autograd.grad(made[0], leaves, upstream)).launches
    forward, back = ([one for one in launches if one.programs] for launches in (forward, back))
    return forward, back


def moved(launch: Any) -> tuple[int, int]:
    """Numbers of float32 that a launch reads and writes."""
    return launch.bytes_read // 4, launch.bytes_written // 4


# --- what all four pass


class OperatorTests:
    """What each of the operators in ``kept`` passes."""

    kept: dict[Case, tuple[int, ...]]
    """By operator the numbers of the inputs that the backward reads, and -1 for the output."""
    shapes: tuple[tuple[int, ...], ...]
    spills: int = 0
    wrong: dict[str, tuple[Any, ...]]
    """Operator, argument that is named, what it should be, and the arguments."""

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        if "case" in metafunc.fixturenames:
            metafunc.parametrize("case", self.kept, ids=repr)
        if "shape" in metafunc.fixturenames:
            metafunc.parametrize("shape", self.shapes, ids=str)
        if "call" in metafunc.fixturenames:
            metafunc.parametrize("call", self.wrong)

    def test_every_layout_and_dtype_is_right(self, case: Case) -> None:
        examine(case, (2, 3, 20), layouts=checks.LAYOUTS, dtypes=checks.DTYPES)

    def test_any_shape_is_right(self, case: Case, shape: tuple[int, ...]) -> None:
        examine(case, shape)

    def test_a_wrong_call_names_the_argument_and_what_it_should_be(self, call: str) -> None:
        case, argument, wanted, *given = self.wrong[call]
        wanted = re.escape(wanted.replace("cpu", device.name()))
        there = [t.to(device.name()) if isinstance(t, Tensor) and not t.is_meta else t for t in given]
        with pytest.raises(ValueError, match=rf"^{argument}: .*{wanted}"):
            case.call(*there)

    def test_float32_is_off_by_little_and_at_most_twice_as_far_as_eager(self, case: Case) -> None:
        tensors = drawn(case, 4, 33, 100)
        want = exact(case, tensors)
        ours, eager = (
            [checks.relative_error(*pair) for pair in zip(gradients(call, tensors), want, strict=True)]
            for call in (case.call, case.reference)
        )
        assert ours[0] < (2 * eager[0] if case.reference is work.rms_recurrence else 1e-6)
        assert all(one <= 2 * other for one, other in zip(ours[1:], eager[1:], strict=True))

    def test_gradients_of_some_inputs_with_an_expanded_upstream(self, case: Case) -> None:
        tensors, row = drawn(case, 2, 3, 5), torch.randn(5, device=device.name())
        wants = exact(case, tensors, row.double().expand(2, 3, 5))
        for needed in itertools.product((True, False), repeat=len(tensors)):
            given = [t.clone().requires_grad_(needs) for t, needs in zip(tensors, needed, strict=True)]
            y = case.call(*given)
            assert y.requires_grad is any(needed)
            if any(needed):
                y.backward(row.expand(2, 3, 5))
            for tensor, want, needs in zip(given, wants[1:], needed, strict=True):
                assert (tensor.grad is not None) is needs
                if tensor.grad is not None:
                    assert_close(tensor.grad, want)

    def test_what_the_backward_reads_is_kept_and_nothing_else(self, case: Case) -> None:
        tensors, saved = drawn(case, 2, 3, 5, grad=True), []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: (saved.append(t), t)[1], lambda t: t):
            y = case.call(*tensors)
        places = [t.data_ptr() for t in (*tensors, y)]
        assert {t.data_ptr() for t in saved} == {places[which] for which in self.kept[case]}

    def test_what_has_no_derivative_is_refused(self, case: Case) -> None:
        tensors = drawn(case, 2, 3, 5, grad=True)
        y = case.call(*tensors)
        with pytest.raises(RuntimeError, match="differentiable once"):
            torch.autograd.grad(y, tensors, torch.ones_like(y), create_graph=True)
        with pytest.raises(NotImplementedError, match=r"torch\.func"):
            torch.func.vmap(case.call)(*(t.detach()[None] for t in tensors))

    def test_autocast_computes_in_half_and_gives_gradients_in_float32(self, case: Case) -> None:
        tensors = drawn(case, 2, 3, 20, grad=True)
        for dtype in (bf16, fp16):
            with torch.autocast(device.name(), dtype=dtype):
                y, mixed = case.call(*tensors), case.call(tensors[0].to(dtype), *tensors[1:])
            rounded = [t.detach().to(dtype) for t in tensors]
            assert torch.equal(y, mixed) and torch.equal(y, case.call(*rounded)) and y.dtype is dtype
            made = torch.autograd.grad(y, tensors, 2 * y.detach())
            assert equal(made, [want.float() for want in gradients(case.call, rounded)[1:]])

    def test_torch_compile_takes_it_whole(self, case: Case, fresh_compiler: None) -> None:
        def layer(first: Tensor, *rest: Tensor) -> Tensor:
            return torch.tanh(case.call(0.5 * first, *rest))

        for one in (case, case.without_h0) if case.reference is not work.rms_norm else (case,):
            assert_compiles(layer, drawn(one, 2, 9, 20))

    @INTERPRETED
    def test_without_rows_or_steps_no_kernel_is_launched(self, case: Case) -> None:
        for shape in ((0, 3, 4), (2, 0, 4)):
            examine(case, shape)
            assert not any(kernels_of(case.call, drawn(case, *shape))), "a GPU refuses an empty grid"

    @staticmethod
    def launch(target: str) -> None:
        """Launch, with meta tensors, what is to be compiled for a target."""
        raise NotImplementedError

    @pytest.fixture(scope="class")
    @classmethod
    def variants(cls, cache: None) -> list[Variant]:
        return compiled(cls.launch)

    @INTERPRETED
    def test_every_kernel_compiles_for_every_target_and_fits(self, variants: list[Variant]) -> None:
        assert {v.target for v in variants} == set(codegen.TARGETS)
        for v in variants:
            c, near = v.compiled, ("weight", "parts", "total")
            assert c.spills <= (0 if v.target == "sm_90" else self.spills), (c, c.spills)
            assert c.shared_bytes <= ROOM[v.target] * 1024, c
            found = offsets(c.ttir)
            assert found and all(bits == "i64" or name in near for name, bits in found), (c, found)
            assert not re.search(r"\b(atom|red)\.", c.ptx), "sums are added in a fixed order"

    @INTERPRETED
    def test_sizes_of_one_compile(self, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
        """Triton makes constants of them."""
        made = recorded(monkeypatch)
        both_ways(case.call, *(meta(*t.shape) for t in case.inputs((1, 1, 1))))
        requests = [codegen.request(one.kernel, one.arguments, **one.options) for one in made]
        assert len(codegen.compile_many(requests)) == len(requests) >= 2

    @GPU
    def test_both_directions_can_be_captured_in_a_graph(self, case: Case) -> None:
        tensors = drawn(case, 8, 33, 100)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            gradients(case.call, tensors)  # compiles
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = gradients(case.call, tensors)
        tensors[0].mul_(0.5)
        graph.replay()
        assert equal(captured, gradients(case.call, tensors))

    @GPU
    @pytest.mark.parametrize("dtype", [fp32, bf16], ids=str)
    def test_two_thousand_steps_are_right_and_the_same_from_run_to_run(
        self, case: Case, dtype: torch.dtype
    ) -> None:
        tensors = drawn(case, 64, 2048, 256, dtype=dtype)
        first = gradients(case.call, tensors)
        for got, want in zip(first, exact(case, tensors, 2 * first[0].double()), strict=True):
            assert checks.relative_error(got, want) < (1e-5 if dtype is fp32 else 3e-2)
        for _ in range(5):
            assert equal(gradients(case.call, tensors), first)

    @pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there is one GPU or none")
    def test_a_second_gpu_is_made_current(self, case: Case) -> None:
        tensors = [t.to("cuda:1") for t in drawn(case, 4, 33, 100)]
        all_close(gradients(case.call, tensors), exact(case, tensors))
        assert torch.cuda.current_device() == 0

    @LARGE
    def test_more_elements_than_32_bits_count(self, case: Case) -> None:
        """The first and the last sequence of many, or rows as many."""
        count = 2**31 // (64 * 256) + 3
        near = drawn(case, 1, 64, 256, dtype=bf16)
        first, *rest = (t if t.dim() == 1 else t.expand(count, *t.shape[1:]).contiguous() for t in near)
        y = case.call(first.requires_grad_(), *rest)
        small, want, *_ = gradients(case.call, near)
        (dx,) = torch.autograd.grad(y, first, 2 * y.detach())
        for got, one in ((y.detach(), small), (dx, want)):
            torch.testing.assert_close(got[:1], one)
            torch.testing.assert_close(got[-1:], one)
