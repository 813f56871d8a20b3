"""What every finished kernel does as an operator: gradients, autocast, torch.compile, graphs, wrong calls."""

import inspect
import math

import cases
import operators as op
import pytest
import torch
import triton
from operators import bf16, fp16, fp32
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from labkit import gpu, kernels
from labkit.kernels import linear
from labkit.measure import correctness

MLP = cases.geglu_mlp(40)
KEPT = {
    cases.AFFINE: ((0, 1), 0),
    cases.GELU_MUL: ((0, 1, 2), 0),
    cases.RMS_NORM: ((0, 1), 0),
    cases.LINEAR: ((0, 2, -1), 0),
    cases.GRU: ((0, 1, 2, -1), 0),
    cases.RMS: ((0, 1, 2, 3, -1), 0),
    cases.matmul(40): ((0, 1), 0),
    MLP: ((0, 1, 2), 1),
    cases.GROUPED: ((0, 1), 0),
}
"""Inputs that the backward reads, -1 for the output, and how many tensors are kept beside them."""
TRAINED = [*KEPT]
PROMOTED = [cases.RMS_NORM, cases.LINEAR, cases.GRU, cases.RMS]
"""Norms and recurrences, of which autocast casts nothing down."""
ROUNDED = [case for case in TRAINED[1:] if case not in PROMOTED]
"""Products, and GELU beside one, which autocast rounds."""
every_case = pytest.mark.parametrize("case", TRAINED, ids=repr)


# --- gradients -------------------------------------------------------------------------------------------


@every_case
def test_gradients_of_some_inputs_with_an_expanded_upstream(case):
    tensors = op.drawn(case)
    like, everything = case.reference(*tensors), range(len(tensors))
    row = torch.randn(like.shape[-1], device=like.device)
    wants = op.exact(case, tensors, row.double().expand_as(like))[1:]
    for needed in ((), *((n,) for n in everything), everything):
        given = [t.clone().requires_grad_(n in needed) for n, t in enumerate(tensors)]
        y = case.call(*given)
        assert y.requires_grad is bool(needed)
        if needed:
            y.backward(row.expand_as(y))
        for n, (tensor, want) in enumerate(zip(given, wants, strict=True)):
            assert (tensor.grad is not None) is (n in needed)
            if tensor.grad is not None:
                op.assert_close(tensor.grad, want)


@every_case
def test_a_graph_that_is_retained_gives_the_same_gradients_again(case):
    tensors = op.drawn(case, grad=True)
    y = case.call(*tensors)
    upstream = 2 * y.detach()
    first, again = (torch.autograd.grad(y, tensors, upstream, retain_graph=True) for _ in "12")
    assert op.equal(first, again)


@pytest.mark.parametrize("case", KEPT, ids=repr)
def test_what_the_backward_reads_is_kept_and_nothing_without_one(case):
    tensors, (which, others) = op.drawn(case, grad=True), KEPT[case]
    y, saved = op.saved_by(case.call, tensors)
    places = [t.data_ptr() for t in (*tensors, y)]
    kept = {t.data_ptr() for t in saved}
    assert kept & {*places} == {places[n] for n in which} and len(kept - {*places}) == others
    with torch.no_grad():
        y, saved = op.saved_by(case.call, tensors)
    assert not saved and not y.requires_grad


@every_case
def test_what_has_no_derivative_is_refused(monkeypatch, case):
    monkeypatch.setattr(linear, "library_is_fast", lambda *_: False)  # cuBLAS has all derivatives
    tensors = op.drawn(case, grad=True)
    y = case.call(*tensors)
    with pytest.raises(RuntimeError, match="differentiable once"):
        torch.autograd.grad(y.sum(), tensors, create_graph=True)
    with pytest.raises(NotImplementedError, match=r"torch\.func"):
        torch.func.vmap(case.call)(*(t.detach().to(bf16)[None] for t in tensors))


# --- autocast, torch.compile --------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [bf16, fp16], ids=str)
@pytest.mark.parametrize("case", ROUNDED, ids=repr)
def test_autocast_computes_products_in_half_and_gives_gradients_in_float32(case, dtype):
    tensors = op.drawn(case, grad=case in TRAINED)
    rounded = [t.detach().to(dtype) for t in tensors]
    with torch.autocast(gpu.device(), dtype=dtype):
        y, mixed = case.call(*tensors), case.call(tensors[0].to(dtype), *tensors[1:])
        with torch.no_grad():
            assert torch.equal(case.call(*tensors), case.call(*rounded))
    want, *wants = op.gradients(case.call, rounded) if case in TRAINED else [case.call(*rounded)]
    assert y.dtype is dtype and op.equal((y, mixed), (want, want))
    if case in TRAINED:
        made = torch.autograd.grad(y, tensors, 2 * y.detach())
        assert op.equal(made, [gradient.float() for gradient in wants])


@pytest.mark.parametrize("dtype", [bf16, fp16], ids=str)
@pytest.mark.parametrize("case", PROMOTED, ids=repr)
def test_autocast_casts_nothing_of_norms_and_recurrences_down(case, dtype):
    """This file once asked for the opposite: that they compute in half, as products do.

    It was wrong. A gate of 0.9995 is 1 in bfloat16, so states that end at 1742 were 4096; and PyTorch's
    autocast casts no input down of what is not a product: it promotes, or casts to float32.
    """
    tensors = op.drawn(case, grad=True)
    with torch.autocast(gpu.device(), dtype=dtype):
        y = case.call(*tensors)
        halves = case.call(*(t.detach().to(dtype) for t in tensors))
    made = y, *torch.autograd.grad(y, tensors, 2 * y.detach())
    assert halves.dtype is dtype, "nor is anything cast up that is of one dtype"
    assert {t.dtype for t in made} == {fp32} and op.equal(made, op.gradients(case.call, tensors))


@pytest.mark.parametrize("which", [0, -1])
@pytest.mark.parametrize("case", [case for case in PROMOTED if case is not cases.RMS_NORM], ids=repr)
def test_autocast_promotes_norms_and_recurrences_to_the_widest_dtype(case, which):
    """rms_norm returns x's, see its own test."""
    mixed = [t.detach() for t in op.drawn(case)]
    mixed[which] = mixed[which].to(bf16)
    leaves = [t.clone().requires_grad_() for t in mixed]
    with torch.autocast(gpu.device(), dtype=bf16):
        y = case.call(*leaves)
        assert case.call(mixed[0].to(fp16), *(t.to(bf16) for t in mixed[1:])).dtype is fp32
    want, *wants = op.gradients(case.call, [t.float() for t in mixed])
    made = torch.autograd.grad(y, leaves, 2 * y.detach())
    assert y.dtype is fp32 and torch.equal(y, want)
    assert op.equal(made, [one.to(leaf.dtype) for one, leaf in zip(wants, leaves, strict=True)])


@pytest.mark.parametrize("dtypes", [(bf16, fp32, fp32), (fp32, bf16, fp16)], ids=str)
def test_affine_reads_parameters_of_other_dtypes_under_autocast(dtypes):
    tensors = [t.to(d).requires_grad_() for t, d in zip(op.drawn(cases.AFFINE), dtypes, strict=True)]
    with torch.autocast(gpu.device(), dtype=bf16):
        y = cases.AFFINE.call(*tensors)
    made = [y, *torch.autograd.grad(y, tensors, 2 * y.detach())]
    wants = op.exact(cases.AFFINE, [t.detach() for t in tensors])
    for got, want, dtype in zip(made, wants, (bf16, *dtypes), strict=True):
        assert got.dtype is dtype
        assert not correctness.diagnose(got.detach(), want, 2 * correctness.TOLERANCE[bf16])


@every_case
@pytest.mark.usefixtures("fresh_compiler")
def test_torch_compile_takes_it_whole(case):
    def layer(first, *rest):
        return torch.tanh(case.call(0.5 * first, *rest))

    op.assert_compiles(layer, op.drawn(case))
    with torch.no_grad():
        halves = op.drawn(case, dtype=bf16)
        assert torch.equal(torch.compile(layer, fullgraph=True, backend="aot_eager")(*halves), layer(*halves))


# --- on GPUs ------------------------------------------------------------------------------------------


@op.GPU
@pytest.mark.parametrize("dtype", [fp32, bf16], ids=str)
@every_case
def test_both_directions_can_be_captured_in_a_graph(case, dtype):
    made, want = op.captured(case.call, op.drawn(case, dtype=dtype))
    assert op.equal(made, want)


@op.TWO_GPUS
@every_case
def test_a_second_gpu_is_made_current(case):
    tensors = [t.to("cuda:1") for t in op.drawn(case)]
    op.all_close(op.gradients(case.call, tensors), op.exact(case, tensors))
    halves = [t.to(bf16) for t in tensors]
    assert (
        correctness.relative_error(case.call(*halves), case.reference(*(t.double() for t in halves))) < 0.02
    )
    assert torch.cuda.current_device() == 0


# --- tensors without numbers, and calls that are traced ----------------------------------------------------


def shapes_of(made):
    return [(t.shape, t.stride(), t.dtype) for t in made]


@every_case
def test_meta_and_fake_tensors_launch_nothing_and_have_the_results_shapes(monkeypatch, case):
    """On a GPU a launch with a meta tensor is one with null pointers, after which no call works any more."""
    tensors = op.drawn(case)
    want = shapes_of(op.gradients(case.call, tensors))
    monkeypatch.setattr(triton.runtime.jit.JITFunction, "__getitem__", None)
    monkeypatch.setattr(triton.runtime.interpreter.InterpretedFunction, "__getitem__", None)
    made = op.gradients(case.call, [t.to("meta") for t in tensors])
    assert {t.device.type for t in made} == {"meta"} and shapes_of(made) == want
    with FakeTensorMode() as mode:
        made = op.gradients(case.call, [mode.from_tensor(t) for t in tensors])
    assert {t.device for t in made} == {tensors[0].device} and shapes_of(made) == want


@pytest.mark.parametrize("mode", ["fake", "symbolic"])
@every_case
def test_make_fx_records_operators_that_compute_the_same_for_other_numbers(case, mode):
    tensors = op.drawn(case)

    def both_ways(*given):
        return op.gradients(case.call, given)

    graph = make_fx(both_ways, tracing_mode=mode)(*tensors)
    names = [str(node.target) for node in graph.graph.nodes]
    assert any(name.startswith("labkit.") for name in names), names
    others = [torch.randn_like(t) * 0.5 for t in tensors]
    before = [t.clone() for t in others]
    assert op.equal(graph(*others), both_ways(*others))
    assert op.equal(others, before)


# --- wrong calls --------------------------------------------------------------------------------------

LEADS = {cases.GROUPED: "weight"}
"""The argument whose dtype and device the others should have, where it is not the first."""


def wrong(name, value, leads):
    """What is no such argument."""
    yield from (3.0, value.double(), value.long())
    if not leads:
        yield from (value.half(), value.to("meta"), value[..., :-1], torch.cat([value, value], -1))
        if name not in ("x", "z", "states"):  # which may have any leading dimensions
            yield from (value[None], value.flatten()[0])


@every_case
def test_a_wrong_argument_is_named(case):
    tensors = op.drawn(case)
    names = list(inspect.signature(getattr(case.call, "func", case.call)).parameters)[: len(tensors)]
    for n, (name, tensor) in enumerate(zip(names, tensors, strict=True)):
        for value in wrong(name, tensor, leads=name == LEADS.get(case, names[0])):
            with pytest.raises(ValueError, match=rf"^{name}: (has|is) .*should be"):
                case.call(*tensors[:n], value, *tensors[n + 1 :])


X, SEQUENCES, STATE, FOUR = torch.ones(2, 6), torch.ones(2, 3, 4), torch.ones(2, 4), torch.ones(4)
PAIR, DOWN = torch.ones(2, 5, 6), torch.ones(6, 5)
NO_EPS = None, torch.tensor(1e-6), -1e-6, math.nan, math.inf, "1e-6"
SPARSE = torch.ones(2, 4).to_sparse()


def far(*shape):
    return torch.empty(shape, device="meta", dtype=bf16)


WRONG = [
    (kernels.affine, "x", "any", torch.tensor(1.0), FOUR, FOUR),
    (kernels.affine, "weight", "(6)", X, torch.ones(1), torch.ones(6)),
    (kernels.gelu_mul, "other", "(2, 6)", X, torch.ones(6), torch.ones(6)),
    *((kernels.rms_norm, "eps", "0 or more", X, torch.ones(6), eps) for eps in NO_EPS),
    *((kernels.rms_recurrence, "eps", "0 or more", SEQUENCES, SEQUENCES, FOUR, None, eps) for eps in NO_EPS),
    (kernels.affine, "x", "dense tensor", SPARSE, FOUR, FOUR),
    (kernels.affine, "weight", "dense tensor", X[:, :4], FOUR.to_sparse(), FOUR),
    (kernels.linear_recurrence, "b", "dense tensor", SEQUENCES, SEQUENCES.to_sparse()),
    (kernels.linear_recurrence, "a", "(any, any, any)", STATE, STATE),
    (kernels.linear_recurrence, "b", "(2, 3, 4)", SEQUENCES, SEQUENCES[:1]),
    (kernels.linear_recurrence, "h0", "(2, 4)", SEQUENCES, SEQUENCES, STATE[:1]),
    (kernels.linear_recurrence, "a", "2**31", *[far(1, 2**16, 2**15)] * 2),
    (kernels.min_gru, "z", "2**31", *[far(1, 2**31 - 8, 1)] * 2),  # of which steps ahead are more
    (kernels.rms_recurrence, "a", "2**31", *[far(1, 2**20, 2**11)] * 2, far(2**11)),
    (kernels.rms_recurrence, "weight", "1 to 4096", *[torch.ones(1, 1, 4097)] * 2, torch.ones(4097)),
    (kernels.rms_recurrence, "weight", "1 to 4096", *[SEQUENCES[..., :0]] * 2, FOUR[:0]),
    (kernels.matmul, "x", "(any, any)", X[0], X),
    (kernels.geglu_mlp, "w_gate_up", "(2, any, 6)", X, torch.ones(3, 5, 6), DOWN),
    (kernels.geglu_mlp, "w_down", "(6, 5)", X, PAIR, DOWN.T),
    (kernels.fused_gate_up, "x", "(any, any)", X[None], PAIR),
    (kernels.fused_gate_up, "w_gate_up", "(2, any, 6)", X, torch.ones(2, 5, 7)),
    (kernels.grouped_linear, "weight", "2**31 features", far(1, 2**31), far(2**27, 16, 1)),
]
"""What is called, the argument that is named, a word of what is said, and the arguments."""


@pytest.mark.parametrize("call", WRONG, ids=lambda call: f"{call[0].__name__}, {call[1]}, {call[2]}")
def test_a_call_that_is_wrong_in_another_way_names_the_argument(call):
    function, argument, word, *given = call
    given = [t.to(gpu.device()) if isinstance(t, torch.Tensor) and not t.is_meta else t for t in given]
    with pytest.raises(ValueError) as caught:
        function(*given)
    assert str(caught.value).startswith(f"{argument}: ") and word in str(caught.value)


def test_a_tensor_that_is_only_marked_as_negative_is_refused():
    """Its memory holds the numbers with the other sign, which a kernel would read."""
    x = torch.ones(2, 4, dtype=torch.complex64, device=gpu.device()).conj().imag
    assert x.is_neg()
    for given in ((x, x[0], x[0]), (x.resolve_neg(), x[0], x[0])):
        with pytest.raises(ValueError, match=r"^(x|weight): is a lazy negative, should be a dense tensor"):
            kernels.affine(*given)
