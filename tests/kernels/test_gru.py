"""labkit.kernels.gru: against float64 and nn.GRU, resets, what is compiled of it."""

import dataclasses
import functools
import importlib
import math
import re

import operators as op
import pytest
import torch
import triton
import triton.language as tl
from launches import FAMILIES
from operators import Case, bf16, fp16, fp32, gradients
from torch import nn

import labkit
from labkit.kernels import gru
from labkit.kernels.gru_kernels import candidate
from labkit.measure import correctness

module = importlib.import_module("labkit.kernels.gru")
KERNELS = {module: ("gru_kernel", "gru_input_kernel", "gru_grad_kernel", "step_kernel", "step_grad_kernel")}
NAMES = ("x", "weight_ih", "weight_hh", "bias_ih", "bias_hh", "h0", "reset")


def reference(x, weight_ih, weight_hh, bias_ih=None, bias_hh=None, h0=None, reset=None):
    """By the formula, step by step."""
    h = x.new_zeros(len(x), weight_hh.shape[1]) if h0 is None else h0
    states = []
    for t in range(x.shape[1]):
        if reset is not None:
            h = torch.where(reset[:, t, None], 0.0, h)
        from_x = nn.functional.linear(x[:, t], weight_ih, bias_ih).chunk(3, -1)
        from_h = nn.functional.linear(h, weight_hh, bias_hh).chunk(3, -1)
        r, z = (torch.sigmoid(a + b) for a, b in zip(from_x[:2], from_h[:2], strict=True))
        n = torch.tanh(from_x[2] + r * from_h[2])
        h = (1 - z) * n + z * h
        states.append(h)
    return torch.stack(states, 1) if states else x.new_zeros(*x.shape[:2], weight_hh.shape[1])


def inputs(shape):
    """x, weights, biases and h0 for (B, T, I, H)."""
    B, T, width, H = shape
    scale = max(H, 1) ** -0.5
    weights = (scale * torch.randn(3 * H, n) for n in (width, H))
    return torch.randn(B, T, width), *weights, torch.randn(3 * H), torch.randn(3 * H), torch.randn(B, H)


LAYER = Case(gru, reference, inputs, (3, 4, 5, 20), "gru")
LARGE = LAYER._replace(shape=(3, 4, 5, 33), name="gru, step by step")
every_path = pytest.mark.parametrize("case", [LAYER, LARGE], ids=repr)


def resetting(case, B, T, chance=0.4):
    """The case with resets at some steps, the same ones for every call."""
    where = torch.rand(B, T, generator=torch.Generator().manual_seed(1)).to(labkit.gpu.device()) < chance
    call, plain = case.call, case.reference
    return case._replace(call=lambda *t: call(*t, where), reference=lambda *t: plain(*t, where)), where


def test_a_step_counts_states_beyond_32_bits():
    """The first of 2**32 features; the others have no memory, and no program here."""
    B, H, ones = 2**22, 2**10, torch.ones(4 * 256 + 2 * 2**10, device=labkit.gpu.device())
    state, h = torch.zeros(256, device=ones.device), torch.zeros(256, device=ones.device)
    operand = torch.zeros_like(state)
    module.step_kernel[(1,)](ones, ones, None, state, operand, h, None, B, 1, 0, H, BLOCK=256, FAST=False)
    assert state.all() and h.all() and operand.all()


# --- right -----------------------------------------------------------------------------------------------


@every_path
def test_every_layout_and_dtype_is_right(case):
    op.examine(case, layouts=correctness.LAYOUTS, roundings=6)


@pytest.mark.parametrize(
    "shape",
    [(1, 1, 1, 1), (9, 2, 3, 3), (2, 5, 4, 16), (17, 3, 2, 32), (1, 3, 7, 33), (2, 1, 40, 65), (33, 2, 1, 5)],
    ids=str,
)
def test_any_shape_is_right(shape):
    op.examine(LAYER, shape, dtypes=(fp32,))


@pytest.mark.parametrize("shape", [(3, 4, 5, 17), (3, 4, 5, 2), (9, 3, 6, 31), (1, 1, 1, 1)], ids=str)
def test_in_16_bits_an_odd_number_of_features_is_right_too(shape):
    """Two features are a word of memory, which an odd number of them does not fill."""
    op.examine(LAYER, shape, dtypes=(bf16, fp16), roundings=6)


@pytest.mark.parametrize("shape", [(0, 3, 4, 5), (2, 0, 4, 5), (2, 0, 4, 40)], ids=str)
def test_without_sequences_or_steps_there_is_nothing(shape):
    y, *found = gradients(gru, op.drawn(LAYER, *shape))
    assert y.shape == (*shape[:2], shape[3]) and not any(one.any() for one in found)


@every_path
@pytest.mark.parametrize("dtype", [fp32, bf16], ids=str)
@pytest.mark.parametrize("size", [1e-4, 1e-6])
def test_small_states_have_as_many_digits_as_others(case, size, dtype):
    """A tanh that is off by 1e-7 of 1 would be off by 1e-3 of states of 1e-4, by 0.1 of those of 1e-6."""
    x, weight_ih, weight_hh, *_, h0 = op.drawn(case, dtype=dtype)
    given = [size * x, weight_ih, weight_hh, size * h0]

    def of(function):
        return lambda x, w, v, h0: function(x, w, v, h0=h0)

    upstream = torch.randn(h0.shape[0], x.shape[1], h0.shape[1], device=x.device).to(dtype)
    found = gradients(of(gru), given, upstream)
    want = gradients(of(reference), [t.double() for t in given], upstream.double())
    assert want[0].abs().max() < 10 * size
    op.all_close(found, want, dtype, roundings=1 if dtype is fp32 else 6)


@triton.jit
def candidate_kernel(x, y, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(y + at, candidate(tl.load(x + at), False, True))


def test_the_tanh_of_16_bits_is_off_by_a_few_units_of_float32_at_most():
    x = torch.linspace(-20, 20, 2**14, device=labkit.gpu.device())
    y = torch.empty_like(x)
    candidate_kernel[(1,)](x, y, BLOCK=len(x))
    assert (y - x.double().tanh()).abs().max() < 5e-7


@every_path
def test_with_resets_it_is_right(case):
    examined, _ = resetting(case, *case.shape[:2])
    op.examine(examined, roundings=12)


@every_path
@pytest.mark.parametrize("given", [(0, 1, 2), (0, 1, 2, 3), (0, 1, 2, 3, 4)], ids=len)
def test_biases_and_a_first_state_may_be_left_out(case, given):
    tensors = op.drawn(case)
    part = [tensors[n] for n in given]
    op.all_close(gradients(gru, part), gradients(reference, [t.double() for t in part]))
    only_state = [*tensors[:3], tensors[5]]
    found = gradients(lambda x, w, v, h0: gru(x, w, v, h0=h0), only_state)
    want = gradients(lambda x, w, v, h0: reference(x, w, v, h0=h0), [t.double() for t in only_state])
    op.all_close(found, want)


@every_path
def test_gradients_of_some_inputs_with_an_expanded_upstream(case):
    tensors = op.drawn(case)
    row = torch.randn(case.shape[3], device=labkit.gpu.device())
    like = reference(*tensors)
    wants = op.exact(case, tensors, row.double().expand_as(like))[1:]
    for needed in range(6):
        given = [t.clone().requires_grad_(n == needed) for n, t in enumerate(tensors)]
        y = gru(*given)
        y.backward(row.expand_as(y))
        assert [t.grad is not None for t in given] == [n == needed for n in range(6)]
        op.assert_close(given[needed].grad, wants[needed])


def test_an_upstream_gradient_may_begin_in_the_middle_of_a_word():
    tensors = op.drawn(LAYER, dtype=bf16)
    y = gru(*tensors)
    flat = torch.randn(y.numel() + 1, device=y.device).to(bf16)
    shifted = flat[1:].view_as(y)
    assert shifted.is_contiguous() and shifted.data_ptr() % 4
    assert op.equal(gradients(gru, tensors, shifted), gradients(gru, tensors, shifted.clone()))


@pytest.mark.parametrize("ahead", [1, 2])
def test_whatever_the_plan_chooses_it_is_right(ahead, monkeypatch):
    """Steps that are written out together, of which the last ones may lie beyond the end.

    In float32 it is one always, and in 16 bits four where nothing else is said.
    """
    usual = module.gru_plan

    def plan(*its):
        return usual(*its) | dict(AHEAD=ahead)

    monkeypatch.setattr(module, "gru_plan", plan)
    for steps in (1, 5):
        examined, _ = resetting(LAYER, 9, steps)
        for case in (LAYER, examined):
            op.examine(case, (9, steps, 3, 20), dtypes=(bf16,), roundings=12)


# --- many sequences, without gradients: the kernel that multiplies the input itself ----------------------


def takes_the_input(B, width, H, dtype=bf16):
    limits = module.device_limits(torch.device(labkit.gpu.device()))
    return module.input_plan(B, width, H, dtype.itemsize, limits) is not None


@pytest.fixture
def few_are_many(monkeypatch):
    """The path that a GPU of one multiprocessor takes, wherever the test runs."""
    usual = module.device_limits
    monkeypatch.setattr(module, "device_limits", lambda d: dataclasses.replace(usual(d), multiprocessors=1))


@pytest.mark.usefixtures("few_are_many")
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((35, 4, 5, 20), fp16), ((33, 1, 20, 32), bf16), ((32, 2, 3, 17), bf16), ((135, 2, 1, 1), bf16)],
    ids=str,
)
def test_many_sequences_without_gradients_are_right(shape, dtype):
    """With and without biases, h0 and resets; the last tile of sequences has a part of them."""
    assert takes_the_input(shape[0], *shape[2:], dtype)
    tensors = op.drawn(LAYER, *shape, dtype=dtype)
    reset = torch.rand(shape[:2], device=tensors[0].device) < 0.4
    for given in ((0, 1, 2), (0, 1, 2, 3), (0, 1, 2, 4, 5), (0, 1, 2, 3, 4, 5)):
        for where in (None, reset)[len(given) % 2 :]:
            named = {NAMES[n]: tensors[n] for n in given} | dict(reset=where)
            with torch.no_grad():
                y = gru(**named)
            exact = {n: t.double() if n != "reset" else t for n, t in named.items() if t is not None}
            op.assert_close(y, reference(**exact), dtype, roundings=6)


@op.INTERPRETED
@pytest.mark.usefixtures("few_are_many")
@pytest.mark.parametrize("shape", [(35, 3, 5, 20), (67, 2, 20, 32), (135, 2, 1, 1)], ids=str)
def test_many_sequences_move_each_byte_once_and_none_beyond_the_end(shape):
    """A load without its mask gives the right result wherever what it read too much is not used."""
    (B, T, width, H), tensors = shape, op.drawn(LAYER, *shape, dtype=bf16)[:5]
    (kernel,) = op.kernels_of(lambda *given: module.gru_forward(*given, None, None, False), *tensors)
    programs = math.ceil(B / (16 if B > 64 else 8))
    assert kernel.bytes_read == 2 * (B * T * width + programs * (3 * H * (width + H) + 6 * H))
    assert kernel.bytes_written == 2 * B * T * H


@pytest.mark.usefixtures("few_are_many")
def test_many_sequences_are_right_in_any_layout():
    tensors = op.drawn(LAYER, 35, 3, 5, 20, dtype=bf16)
    with torch.no_grad():
        want = gru(*tensors)
        for strided in (tensors[0].transpose(0, 1).contiguous().transpose(0, 1), tensors[0].flip(1).flip(1)):
            assert torch.equal(gru(strided, *tensors[1:]), want)
        shifted = torch.zeros(tensors[0].numel() + 1, dtype=bf16, device=want.device)[1:].view_as(tensors[0])
        assert torch.equal(gru(shifted.copy_(tensors[0]), *tensors[1:]), want)
        columns = [t.T.contiguous().T for t in tensors[1:3]]
        assert torch.equal(gru(tensors[0], *columns, *tensors[3:]), want)


@pytest.mark.usefixtures("few_are_many")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_of_many_sequences_too_what_was_before_a_reset_does_not_matter(value):
    tensors = op.drawn(LAYER, 35, 4, 5, 20, dtype=bf16)
    reset = torch.zeros(35, 4, dtype=torch.bool, device=tensors[0].device)
    reset[:, 2] = True
    with torch.no_grad():
        want = gru(tensors[0][:, 2:], *tensors[1:5])
        assert torch.equal(gru(*tensors[:5], torch.full_like(tensors[5], value), reset)[:, 2:], want)
        tensors[0][:, :2] = value
        assert torch.equal(gru(*tensors, reset)[:, 2:], want)


# --- resets ----------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@every_path
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_what_was_before_a_reset_does_not_matter(case, value):
    """The states from it on are those of a new sequence, to the last bit, and so are all gradients."""
    (B, T, _, H), at = case.shape, 2
    tensors = op.drawn(case)
    reset = torch.zeros(B, T, dtype=torch.bool, device=labkit.gpu.device())
    reset[:, at] = True
    upstream = torch.randn(B, T - at, H, device=labkit.gpu.device())
    later = [tensors[0][:, at:], *tensors[1:5]]
    want, *wants = gradients(gru, later, upstream)
    tensors[5] = torch.full_like(tensors[5], value)
    leaves = [t.clone().requires_grad_() for t in tensors]
    y = gru(*leaves, reset)
    assert torch.equal(y[:, at:], want)
    dx, *found, dh0 = torch.autograd.grad(y[:, at:], leaves, upstream)
    assert not dx[:, :at].any() and not dh0.any()
    op.all_close([dx[:, at:], *found], wants)


@every_path
def test_a_reset_at_the_first_step_leaves_h0_unread_and_without_gradient(case):
    tensors = op.drawn(case)
    reset = torch.zeros(*case.shape[:2], dtype=torch.bool, device=labkit.gpu.device())
    reset[:, 0] = True
    *_, dh0 = gradients(lambda *t: gru(*t, reset), [*tensors[:5], torch.full_like(tensors[5], math.inf)])
    assert not dh0.any()
    assert torch.equal(gru(*tensors[:5], reset=reset), gru(*tensors[:5]))
    strided = reset.T.contiguous().T
    assert torch.equal(gru(*tensors[:5], reset=strided), gru(*tensors[:5]))


# --- as an operator --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [bf16, fp16], ids=str)
def test_autocast_computes_in_half_and_gives_gradients_in_float32(dtype):
    tensors = op.drawn(LAYER, grad=True)
    rounded = [t.detach().to(dtype) for t in tensors]
    with torch.autocast(labkit.gpu.device(), dtype=dtype):
        y, mixed = gru(*tensors), gru(tensors[0].to(dtype), *tensors[1:])
    want, *wants = gradients(gru, rounded)
    assert y.dtype is dtype and op.equal((y, mixed), (want, want))
    assert op.equal(torch.autograd.grad(y, tensors, 2 * y.detach()), [one.float() for one in wants])


@every_path
def test_compiles_into_one_graph(case, fresh_compiler):
    op.assert_compiles(gru, op.drawn(case))


def test_what_has_no_derivative_is_refused():
    tensors = op.drawn(LAYER, grad=True)
    with pytest.raises(RuntimeError, match="differentiable once"):
        torch.autograd.grad(gru(*tensors).sum(), tensors, create_graph=True)


def test_a_retained_graph_gives_the_same_gradients_again():
    tensors = op.drawn(LAYER, grad=True)
    y = gru(*tensors)
    first, again = (torch.autograd.grad(y, tensors, 2 * y.detach(), retain_graph=True) for _ in "12")
    assert op.equal(first, again)


def test_kept_are_the_gates_and_one_product_and_without_gradients_nothing():
    tensors = op.drawn(LAYER, grad=True)
    y, saved = op.saved_by(gru, tensors)
    B, T, _, H = LAYER.shape
    given = {t.data_ptr() for t in (*tensors, y)}
    assert sum(t.numel() for t in saved if t.data_ptr() not in given) == 4 * B * T * H
    with torch.no_grad():
        assert not op.saved_by(gru, tensors)[1]


@op.GPU
def test_a_graph_replays_for_other_numbers():
    made, want = op.captured(gru, op.drawn(LAYER, 64, 9, 20, 128, dtype=bf16))
    assert op.equal(made, want)


@op.GPU
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("dtype", [fp32, bf16, fp16], ids=str)
@pytest.mark.parametrize("shape", [(5, 9, 20, 200), (70, 33, 256, 256)], ids=str)
def test_what_cudnn_computes_is_right_and_in_float32_without_tf32(shape, dtype):
    """Too wide for the kernels with all steps. Also without a bias, without h0, and under no_grad."""
    x, weight_ih, weight_hh, *rest = op.drawn(LAYER, *shape, dtype=dtype)
    assert module.library_is_fast(x, shape[3])
    for some in (rest, [None, None], [rest[0], None]):
        places = [n for n, t in enumerate(some) if t is not None]

        def placed(function, *given, some=some, places=places):
            others = dict(zip(places, given[3:], strict=True))
            return function(*given[:3], *(others.get(n) for n in range(len(some))))

        tensors = [x, weight_ih, weight_hh, *(some[n] for n in places)]
        got = gradients(functools.partial(placed, gru), tensors)
        want = gradients(functools.partial(placed, reference), [t.double() for t in tensors])
        for one, right in zip(got, want, strict=True):
            error = float((one.double() - right).norm() / right.norm())
            assert error < (1e-5 if dtype is fp32 else 2e-2), (some, error)
        with torch.no_grad():
            assert torch.equal(placed(gru, *tensors), got[0])


@op.TWO_GPUS
def test_the_second_gpu_computes_the_same():
    tensors = op.drawn(LAYER)
    second = [one.cpu() for one in gradients(gru, [t.to("cuda:1") for t in tensors])]
    assert op.equal(second, [one.cpu() for one in gradients(gru, tensors)])


WRONG = {
    "x": [torch.zeros(2, 5), torch.zeros(2, 3, 5).double(), None],
    "weight_ih": [torch.zeros(60, 6), torch.zeros(20, 5), torch.zeros(60, 5).half()],
    "weight_hh": [torch.zeros(60, 21), torch.zeros(20, 20), torch.zeros(20)],
    "bias_ih": [torch.zeros(20), torch.zeros(60, 1)],
    "bias_hh": [torch.zeros(20), 1.0],
    "h0": [torch.zeros(20), torch.zeros(1, 3, 20), torch.zeros(2, 20)],
    "reset": [torch.zeros(3, 4), torch.zeros(3, 5, dtype=torch.bool), True],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name in WRONG for value in WRONG[name]])
def test_a_wrong_call_names_the_argument(name, value):
    given = dict(zip(NAMES, op.drawn(LAYER), strict=False))
    value = value.to(labkit.gpu.device()) if isinstance(value, torch.Tensor) else value
    with pytest.raises(ValueError, match=f"^{name}: "):
        gru(**given | {name: value})


# --- in the place of nn.GRU --------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [True, False])
def test_its_arguments_are_the_parameters_of_nn_gru(bias):
    torch.manual_seed(0)
    usual = nn.GRU(5, 20, bias=bias, batch_first=True, device=labkit.gpu.device())
    x, h0 = torch.randn(3, 4, 5).to(labkit.gpu.device()), torch.randn(3, 20).to(labkit.gpu.device())
    found = []
    for call in (
        lambda: gru(x, *usual.parameters(), h0=h0),
        lambda: usual.double()(x.double(), h0.double()[None])[0],  # cuDNN's own error would count
    ):
        h = call()
        found.append((h, *torch.autograd.grad(h.square().sum(), list(usual.parameters()))))
    op.all_close(*found)


# --- what is compiled ------------------------------------------------------------------------------------


def launch(shape, dtype, training):
    B, T, width, H = shape
    sizes = (B, T, width), (3 * H, width), (3 * H, H), (3 * H,), (3 * H,), (B, H)
    tensors = [op.meta(*size, dtype=dtype) for size in sizes]
    if training:
        op.launch_both_ways(gru, *tensors)
    else:
        gru(*tensors)


CASES = {
    "sm_80": [((2048, 64, 64, 64), bf16, False)],
    "sm_86": [((2048, 64, 128, 128), bf16, True)],
    "sm_90": [
        *(((B, 64, H, H), bf16, False) for B, H in ((64, 64), (2048, 64), (2048, 128))),
        *(((B, 64, H, H), bf16, True) for B, H in ((64, 128), (5000, 64))),
        *(((B, 64, 40, H), dtype, True) for B, H, dtype in ((2048, 100, fp16), (64, 64, fp32))),
    ],
    "sm_100": [((64, 64, 128, 128), bf16, True)],
    "sm_120": [((64, 64, 100, 100), fp16, True)],
}
"""By target: (B, T, width, H), dtype, whether a backward follows."""


@pytest.fixture(scope="module")
def variants(cache):
    return op.variants_of(KERNELS, CASES, launch)


def loop_of(ptx):
    """The text between the last label that is jumped back to, and that jump."""
    lines, seen, best = ptx.splitlines(), {}, (0, 0)
    for number, line in enumerate(lines):
        words = line.split()
        if words and words[0].startswith("$L") and words[0].endswith(":"):
            seen[words[0][:-1]] = number
        target = words[-1].rstrip(";") if "bra" in line and words else ""
        if target in seen:
            best = max(best, (number - seen[target], seen[target]))
    return "\n".join(lines[best[1] : best[1] + best[0]])


@op.INTERPRETED
def test_every_kernel_compiles_for_every_family_of_targets_and_fits(variants):
    assert {v.target for v in variants} == set(FAMILIES)
    assert {v.title for v in variants} == {"gru_kernel", "gru_input_kernel", "gru_grad_kernel"}
    for v in variants:
        few = 32 if v.title == "gru_grad_kernel" else 0  # bytes
        # float32's weights are two numbers each; the plans were made with compilers before 3.8
        op.assert_fits([v], None if v.dtype is fp32 or triton.__version__ >= "3.8" else few)


@op.INTERPRETED
def test_sums_of_many_programs_are_addressed_in_64_bits(variants):
    """Each has 4 H of them, and of 2**25 sequences of 128 features there are 2**31."""
    summed = [v for v in variants if v.title == "gru_grad_kernel" and v.launch.sums is not None]
    assert {v.target for v in summed} == {*FAMILIES} - {"sm_80"}
    for v in summed:
        assert {bits for name, bits in op.offsets(v.code.ttir) if name == "sums"} == {"i64"}, v


@op.INTERPRETED
def test_weights_stay_in_registers_from_step_to_step(variants):
    """In the loop no more of them is loaded than the states, gates and their like: 96 registers a thread."""
    for v in variants:
        if v.title == "gru_kernel" and v.target == "sm_90":
            loop = loop_of(v.code.ptx)
            products = loop.count("wgmma.mma_async.sync") + loop.count("mma.sync.aligned")
            assert v.dtype is fp32 or products >= 3 * v.launch.AHEAD * v.launch.H // 16, (v, products)
            assert loop.count("ldmatrix") <= 12 * v.launch.AHEAD, (v, loop.count("ldmatrix"))


@op.INTERPRETED
def test_weights_of_the_input_stay_in_shared_memory(variants):
    """Those of two steps' inputs are one product; with 16 sequences no operand is loaded into registers."""
    every = [v for v in variants if v.title == "gru_input_kernel" and v.target == "sm_90"]
    assert {(v.launch.BH, v.launch.BM) for v in every} == {(64, 8), (128, 16)}
    for v in (v for v in every if v.launch.BM == 8):
        assert loop_of(v.code.ptx).count("wgmma.mma_async.sync") >= 3 * v.launch.BK // 16, v
    for v in (v for v in every if v.launch.BM == 16):
        loop = loop_of(v.code.ptx)
        products = loop.count("wgmma.mma_async.sync")
        assert products == 3 * (v.launch.BK + 2 * v.launch.BH) // 16, (v, products)
        assert not loop.count("ldmatrix") and not loop.count("ld.shared"), v


@op.INTERPRETED
def test_tiles_of_unlike_layouts_do_not_share_an_address(variants):
    """ptxas 12.8 would take the one's descriptors, constants added to the address, for the other's."""
    for v in variants:
        kinds, descriptor = {}, r"(?:or|add)\.[bs]64\s+%rd\d+, (%rd\d+), (-?\d{18,});"
        for address, constant in re.findall(descriptor, v.code.ptx):
            kinds.setdefault(address, set()).add(int(constant) >> 32)
        assert kinds or v.title != "gru_input_kernel" or v.target != "sm_90", v
        assert all(len(k) == 1 for k in kinds.values()), (v, kinds)


@op.INTERPRETED
@pytest.mark.skipif(
    triton.__version__ >= "3.8", reason="other barriers, of wgmma, which it takes for 8 columns, too"
)
def test_a_step_has_two_barriers_in_reverse_four(variants):
    """Around the exchange of what is multiplied, in reverse also around that of the products' sum."""
    resident = [v for v in variants if v.title in ("gru_kernel", "gru_grad_kernel")]
    seen = [v for v in resident if v.target == "sm_90" and v.dtype is not fp32]
    assert {v.title for v in seen} == {"gru_kernel", "gru_grad_kernel"}
    for v in seen:
        barriers, most = loop_of(v.code.ptx).count("bar.sync"), 2 if v.title == "gru_kernel" else 4
        assert barriers <= most * v.launch.AHEAD, (v, barriers)


def test_the_plan_holds_what_fits_and_leaves_the_rest_to_single_steps():
    hopper, consumer = op.limits_of("sm_90"), op.limits_of("sm_86")
    for H, itemsize, gpu, fits in (
        (128, 2, hopper, True), (129, 2, hopper, False), (64, 4, hopper, True), (65, 4, hopper, False),
        (1, 2, hopper, True), (64, 2, consumer, True), (128, 2, consumer, True), (129, 2, consumer, False),
    ):  # fmt: skip
        assert (module.gru_plan(16, H, itemsize, gpu, False) is not None) is fits, (H, itemsize)
    for B, width, H, itemsize, gpu, taken in (
        (2048, 128, 128, 2, hopper, True), (2048, 129, 128, 2, hopper, False),
        (521, 1, 128, 2, hopper, True), (520, 128, 128, 2, hopper, False),
        (2048, 64, 64, 4, hopper, False), (2048, 0, 64, 2, hopper, False),
        (2048, 64, 64, 2, consumer, True), (2048, 17, 4, 2, hopper, False),
        (2048, 128, 129, 2, hopper, False),
    ):  # fmt: skip
        assert (module.input_plan(B, width, H, itemsize, gpu) is not None) is taken, (B, width, H, itemsize)
    for B, H, BM in (
        (1024, 64, 8), (4224, 64, 8), (4225, 64, 16), (6336, 64, 16), (1056, 128, 8), (1057, 128, 16),
    ):  # fmt: skip
        assert module.input_plan(B, H, H, 2, hopper)["BM"] == BM, (B, H)
    for B in (1, 16, 1024, 2048, 4096, 10**6):
        for H, at_once in ((100, 132), (64, 3 * 132)):
            plan, back = (module.gru_plan(B, H, 2, hopper, backward) for backward in (False, True))
            assert plan["BH"] == max(64, 128 * (H > 64)) and 8 <= plan["BM"] <= 16
            assert math.ceil(B / plan["BM"]) <= at_once or plan["BM"] == 16
            assert back["BM"] == 8
