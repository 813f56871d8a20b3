"""labkit.kernels.geglu: the gated MLP on awkward shapes, what it keeps, its gradients, its module."""

import copy
import math

import pytest
import torch
from products import (
    SOME,
    assert_close,
    assert_rounded_once,
    assert_same_results,
    bf16,
    drawn,
    examine,
    expected,
    fp16,
    gpu,
    kept_is_right,
    kernels_of,
    meta,
    pretend,
    recorded,
    results,
    saved_by,
    with_gate_up,
    with_mlp,
)
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from labkit import checks, counts, device, memory
from labkit.kernels import common, geglu, linear
from labkit.kernels.geglu import GeGLU, fused_gate_up, geglu_mlp
from labkit.mlp_works import gate_up
from labkit.mlp_works import geglu as plain_mlp

pytestmark = pytest.mark.usefixtures("cache")
INTERPRETED = pytest.mark.skipif(device.has_gpu(), reason="a GPU's kernels' accesses cannot be watched")
GPU = pytest.mark.skipif(not device.has_gpu(), reason="memory statistics exist on a GPU only")
LARGE = pytest.mark.large
SHAPES = ((64, 128), (37, 33), (70, 40), (1, 1), (3, 5, 24), (19,), (16,), (0, 8))
"""Full; ragged, by pointers and by descriptors; one element; three dimensions; one; no rows."""


# --- right on every shape -----------------------------------------------------------------------------


@pytest.mark.parametrize("keep", [False, True])
def test_fused_gate_up_is_right_whether_or_not_it_keeps(keep):
    def half(x, w_gate_up):
        hidden, kept = fused_gate_up(x, w_gate_up, keep)
        assert (kept is not None) is keep
        return hidden

    shapes = (*(s for s in SHAPES if len(s) == 2), (4, 0))
    layouts = checks.LAYOUTS if keep else None
    examine(half, gate_up, with_gate_up(40), *shapes, layouts=layouts, gradients=False)
    examine(half, gate_up, with_gate_up(33), *shapes, gradients=False)


def test_geglu_mlp_is_right():
    examine(geglu_mlp, plain_mlp, with_mlp(40), *SHAPES, layouts=checks.LAYOUTS, roundings=3)
    examine(geglu_mlp, plain_mlp, with_mlp(33), (37, 33), (9, 40), roundings=3)


@pytest.mark.parametrize(("width", "hidden"), [(0, 8), (8, 0)])
def test_an_mlp_without_features_outside_or_inside_is_zero(width, hidden):
    examine(geglu_mlp, plain_mlp, with_mlp(hidden), (4, width), roundings=3)


@pytest.mark.parametrize("tile_copies", [True, False])
@pytest.mark.parametrize("hidden", [40, 8, 72, 1, 33, 63])
def test_gate_does_not_run_over_into_up(monkeypatch, tile_copies, hidden):
    """They lie side by side in a row: a store of gate beyond its columns lands in up, inside all fences."""
    its = common.gpu_of(torch.device(device.name()))
    pretend(monkeypatch, common.Gpu(its.multiprocessors, its.shared_bytes, tile_copies))
    for dtype in checks.DTYPES:
        kept_is_right(70, 40, hidden, dtype)


@pytest.mark.parametrize("dtype", [bf16, fp16], ids=str)
def test_a_deep_sum_is_rounded_once(dtype):
    """Sums in 16 bits, or a gate rounded before the product, would be far outside."""
    x, pair = drawn(with_gate_up(24), 20, 4096, dtype=dtype)
    hidden, kept = fused_gate_up(x, pair, keep=True)
    for side, weight in enumerate(pair):
        assert_rounded_once(kept[:, side], x.double() @ weight.double().T)
    assert_rounded_once(hidden, gate_up(x.double(), pair.double()))
    assert torch.equal(hidden, fused_gate_up(x, pair)[0])


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
    hidden, dkept = geglu.gate_up_backward(dy, unit, kept, spent)
    assert (dkept.data_ptr() == kept.data_ptr()) is spent
    assert spent or torch.equal(kept, before)
    assert_rounded_once(hidden, want.detach())
    assert_rounded_once(dkept, gradient)


@INTERPRETED
@pytest.mark.parametrize(("rows", "width", "hidden"), [(37, 33, 70), (5, 40, 1024), (1, 1, 1)])
def test_nothing_is_read_or_written_beyond_the_end(monkeypatch, rows, width, hidden):
    """By pointers, whose masks are ours: rows of tiles read both weights, columns of tiles x."""
    its = common.Gpu(4, 0, False)
    pretend(monkeypatch, its)
    made, backward = kernels_of(
        lambda *t: geglu.gate_up_backward(t[0], t[2], geglu.gate_up_training(*t[:2])[1], False),
        *drawn(lambda _: (*with_gate_up(hidden)((rows, width)), torch.randn(width, hidden))),
    )
    BM, BN, *_ = linear.tiling(rows, 2 * hidden, width, torch.float32, False, its)
    down, across = math.ceil(rows / BM), math.ceil(hidden / (BN // 2))
    assert made.programs == down * across
    assert made.bytes_read == 4 * width * (across * rows + down * 2 * hidden)
    assert made.bytes_written == 3 * 4 * rows * hidden
    assert backward.bytes_read == backward.bytes_written == 3 * 4 * rows * hidden


# --- what is kept, and gradients ----------------------------------------------------------------------


def test_what_was_kept_is_overwritten_once_it_is_spent_and_not_before():
    tensors = drawn(with_mlp(40), 37, 24, grad=True)
    y, (kept,) = saved_by(geglu_mlp, tensors)
    before, version, upstream = kept.clone(), kept._version, 2 * y.detach()
    _, *want = expected(plain_mlp, tensors)
    for retain in (True, True, False):
        assert torch.equal(kept, before) and kept._version == version
        got = torch.autograd.grad(y, tensors, upstream, retain_graph=retain)
        for one, other in zip(got, want, strict=True):
            assert_close(one, other)
    assert not torch.equal(kept, before), "a tensor of its size more, at the peak"
    assert kept._version > version, "whoever else has saved it must hear of it"
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.grad(y, tensors, upstream)


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_is_kept_may_be_computed_again(reentrant):
    tensors = drawn(with_mlp(40), 37, 24, grad=True)
    _, *want = expected(plain_mlp, tensors)
    y = torch.utils.checkpoint.checkpoint(geglu_mlp, *tensors, use_reentrant=reentrant)
    y.backward(2 * y.detach())
    for tensor, gradient in zip(tensors, want, strict=True):
        assert_close(tensor.grad, gradient)


@INTERPRETED
def test_the_backward_allocates_no_second_pair():
    tensors = drawn(with_mlp(40), 37, 24, grad=True)
    made = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            if function.overloadpacket in (torch.ops.aten.empty_like, torch.ops.aten.empty):
                made.append(result.numel())
            return result

    for retain in (True, False):
        y = geglu_mlp(*tensors)
        made.clear()
        with Watch():
            torch.autograd.grad(y.sum(), tensors, retain_graph=retain)
        assert (37 * 2 * 40 in made) is retain


def test_gate_and_up_are_kept_only_for_a_backward(monkeypatch):
    launches = recorded(monkeypatch)
    for grad in (True, False):
        y = geglu_mlp(meta(8, 16, grad=grad), meta(2, 24, 16), meta(16, 24))
        assert (launches[-1].kept_gate is not None) is (launches[-1].kept_up is not None) is grad
        assert y.requires_grad is grad
    with torch.no_grad():
        geglu_mlp(meta(8, 16, grad=True), meta(2, 24, 16), meta(16, 24))
    assert launches[-1].kept_gate is None


@pytest.mark.parametrize("needed", SOME, ids=str)
def test_gradients_of_some_inputs_only_and_no_product_for_the_others(needed):
    tensors = drawn(with_mlp(40), 37, 24)
    _, *want = expected(plain_mlp, tensors)
    for tensor, needs in zip(tensors, needed, strict=True):
        tensor.requires_grad_(needs)
    y = geglu_mlp(*tensors)
    if device.has_gpu():  # where products have other names
        y.backward(2 * y.detach())
    else:
        made = counts.count(lambda: y.backward(2 * y.detach())).launches
        assert sum(one.name == "mm" for one in made) == 1 + sum(needed)  # one for dhidden
    for tensor, needs, gradient in zip(tensors, needed, want, strict=True):
        assert (tensor.grad is not None) is needs
        if needs:
            assert_close(tensor.grad, gradient)


def test_an_expanded_upstream_gradient():
    tensors = drawn(with_mlp(40), 37, 24, grad=True)
    exact = [t.detach().double().requires_grad_() for t in tensors]
    want = torch.autograd.grad(plain_mlp(*exact).sum(), exact)
    for got, other in zip(torch.autograd.grad(geglu_mlp(*tensors).sum(), tensors), want, strict=True):
        assert_close(got, other)


def test_derivatives_that_there_are_not_are_refused():
    x, pair, down = tensors = drawn(with_mlp(40), 4, 8, grad=True)
    y = geglu_mlp(*tensors)
    with pytest.raises(RuntimeError, match="differentiable once"):
        torch.autograd.grad(y.sum(), tensors, create_graph=True)
    with pytest.raises(NotImplementedError, match=r"torch\.func"):
        torch.func.grad(lambda x: geglu_mlp(x, pair, down).sum())(x)
    with pytest.raises(RuntimeError, match="fused_gate_up has no backward"):
        fused_gate_up(x, pair)
    with torch.no_grad():
        assert fused_gate_up(x, pair)[0].grad_fn is None


# --- torch.compile and wrong calls --------------------------------------------------------------------


@pytest.mark.usefixtures("fresh_compiler")
def test_torch_compile_takes_it_whole():
    ours = torch.compile(
        lambda x, *w: torch.tanh(geglu_mlp(x * 2, *w)), fullgraph=True, backend="aot_eager", dynamic=True
    )
    for make, shape in ((with_mlp(40), (6, 24)), (with_mlp(40), (70, 24)), (with_mlp(33), (2, 3, 24))):
        tensors = drawn(make, *shape, grad=True)
        assert_same_results(ours, lambda x, *w: torch.tanh(plain_mlp(x * 2, *w)), tensors)


@pytest.mark.usefixtures("fresh_compiler")
def test_a_compiled_backward_leaves_what_was_kept_alone():
    tensors = drawn(with_mlp(40), 6, 24, grad=True)
    y = torch.compile(geglu_mlp, fullgraph=True, backend="aot_eager")(*tensors)
    _, *want = expected(plain_mlp, tensors)
    for retain in (True, False):
        got = torch.autograd.grad(y, tensors, 2 * y.detach(), retain_graph=retain)
        for one, other in zip(got, want, strict=True):
            assert_close(one, other)


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("grad", [True, False])
def test_a_compiled_module_keeps_something_only_for_a_backward(grad):
    graphs = []

    def record(graph, _):
        graphs.append(graph)
        return graph.forward

    block = GeGLU(24, 40, device=device.name())
    with torch.set_grad_enabled(grad):
        torch.compile(block, backend=record, fullgraph=True)(torch.randn(6, 24, device=device.name()))
    nested = [module for graph in graphs for module in graph.modules() if hasattr(module, "graph")]
    names = {str(node.target) for module in nested for node in module.graph.nodes}
    assert ("labkit.gate_up_training.default" in names) is grad
    assert ("labkit.gate_up_forward.default" in names) is not grad


X, PAIR, DOWN = torch.ones(4, 6), torch.ones(2, 5, 6), torch.ones(6, 5)
WRONG = {
    "a scalar": (geglu_mlp, "x", torch.tensor(1.0), PAIR, DOWN),
    "other features": (geglu_mlp, "w_gate_up", torch.ones(4, 7), PAIR, DOWN),
    "three weights": (geglu_mlp, "w_gate_up", X, torch.ones(3, 5, 6), DOWN),
    "both weights in one matrix": (geglu_mlp, "w_gate_up", X, torch.ones(10, 6), DOWN),
    "down the other way round": (geglu_mlp, "w_down", X, PAIR, DOWN.T),
    "whole numbers": (geglu_mlp, "x", X.int(), PAIR.int(), DOWN.int()),
    "double precision": (geglu_mlp, "x", X.double(), PAIR.double(), DOWN.double()),
    "w_gate_up in half": (geglu_mlp, "w_gate_up", X, PAIR.half(), DOWN),
    "w_down in bf16": (geglu_mlp, "w_down", X, PAIR, DOWN.bfloat16()),
    "w_down elsewhere": (geglu_mlp, "w_down", X, PAIR, DOWN.to("meta")),
    "three dimensions": (fused_gate_up, "x", X[None], PAIR),
    "a part of other inputs": (fused_gate_up, "w_gate_up", X, torch.ones(2, 5, 7)),
}


@pytest.mark.parametrize("call", WRONG.values(), ids=WRONG)
def test_a_wrong_call_names_the_argument(call):
    function, argument, *tensors = call
    tensors = [t if t.device.type == "meta" else t.to(device.name()) for t in tensors]
    with pytest.raises(ValueError, match=rf"^{argument}: (has|is) .*should be"):
        function(*tensors)


def test_programs_walk_over_tiles_of_both_weights(monkeypatch):
    launches = recorded(monkeypatch)
    pretend(monkeypatch, gpu("sm_90"))
    for rows, hidden in ((8192, 4096), (64, 64)):
        fused_gate_up(meta(rows, 1024), meta(2, hidden, 1024))
    for made, (rows, hidden) in zip(launches, ((8192, 4096), (64, 64)), strict=True):
        tiles = math.ceil(rows / made.BM) * math.ceil(hidden / (made.BN // 2))
        assert math.prod(made.grid) == min(2 * 132, tiles)


# --- the module ---------------------------------------------------------------------------------------


class Usual(nn.Module):
    """The MLP as it is usually written."""

    def __init__(self, d, h):
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(d, h, bias=False), nn.Linear(d, h, bias=False)
        self.down_proj = nn.Linear(h, d, bias=False)

    def forward(self, x):
        return self.down_proj(functional.gelu(self.gate_proj(x), approximate="tanh") * self.up_proj(x))


def inside(block):
    """A larger model with two of these blocks, at two depths."""
    model = nn.Module()
    model.first, model.last = block(24, 40), nn.Linear(24, 3)
    model.layers = nn.ModuleList([nn.ModuleDict({"mlp": block(24, 40)})])
    return model


def same(one, other):
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


def test_weights_go_from_three_linears_into_one_block_and_back():
    usual, fused, again = Usual(24, 40), GeGLU(24, 40), Usual(24, 40)
    fused.load_state_dict(usual.state_dict(), strict=True)
    assert torch.equal(fused.w_gate_up[0], usual.gate_proj.weight)
    assert torch.equal(fused.w_gate_up[1], usual.up_proj.weight)
    assert torch.equal(fused.w_down, usual.down_proj.weight)
    again.load_state_dict(fused.state_dict(), strict=True)
    same(again.state_dict(), usual.state_dict())
    same(copy.deepcopy(fused).state_dict(), fused.state_dict())
    assert [name for name, _ in fused.named_parameters()] == ["w_gate_up", "w_down"]
    x = torch.randn(5, 24)
    assert_close(fused.to(device.name())(x.to(device.name())).cpu(), again(x))


def test_weights_find_their_way_inside_a_larger_model():
    usual, fused = inside(Usual), inside(GeGLU)
    state = usual.state_dict()
    names = list(state)
    fused.load_state_dict(state, strict=True)
    assert list(state) == names, "somebody else's dictionary"
    same(fused.state_dict(), state)
    assert set(fused.first.state_dict(prefix="a.")) == {f"a.{p}_proj.weight" for p in ("gate", "up", "down")}


def test_a_state_shares_memory_with_the_weights():
    fused = GeGLU(24, 40)
    state = fused.state_dict()
    with torch.no_grad():
        fused.w_gate_up.fill_(7.0)
        fused.w_down.fill_(5.0)
    assert [state[f"{p}_proj.weight"].unique().tolist() for p in ("gate", "up", "down")] == [[7], [7], [5]]


@pytest.mark.parametrize("missing", ["gate", "up", "down"])
def test_a_missing_weight_is_reported(missing):
    fused, state = inside(GeGLU), inside(Usual).state_dict()
    del state[f"layers.0.mlp.{missing}_proj.weight"]
    lost = "w_down" if missing == "down" else "w_gate_up"
    with pytest.raises(RuntimeError, match=rf'Missing key\(s\) in state_dict: "layers.0.mlp.{lost}"'):
        fused.load_state_dict(state)
    with pytest.raises(RuntimeError, match="size mismatch for w_down"):
        GeGLU(24, 48).load_state_dict(Usual(24, 40).state_dict())


def test_a_block_is_drawn_as_linears_are_in_the_dtype_that_was_asked_for():
    block = GeGLU(24, 40, dtype=torch.float16)
    assert {p.dtype for p in block.parameters()} == {torch.float16}
    bound = max(p.abs().max().item() * p.shape[-1] ** 0.5 for p in block.parameters())
    assert 0.9 < bound < 1.01


def losses(block, state):
    torch.manual_seed(1)
    network = nn.Sequential(block(24, 40), nn.LayerNorm(24), block(24, 40)).to(device.name())
    network.load_state_dict(state)
    optimizer, curve = torch.optim.AdamW(network.parameters(), lr=3e-3), []
    for _ in range(10):
        x = torch.randn(32, 24, device=device.name())
        loss = functional.mse_loss(network(x), torch.roll(x, 1, 1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        curve.append(loss.item())
    return curve


def test_training_follows_the_curve_of_the_usual_block():
    torch.manual_seed(0)
    state = nn.Sequential(Usual(24, 40), nn.LayerNorm(24), Usual(24, 40)).state_dict()
    usual, fused = losses(Usual, state), losses(GeGLU, state)
    assert fused == pytest.approx(usual, rel=1e-4)
    assert abs(usual[-1] - usual[0]) > 0.01 * usual[0], "a network that does not learn agrees with any other"


# --- on a GPU; graphs, equal bits and a second GPU are tested with those of linear_act ----------------


@LARGE
@pytest.mark.parametrize("hidden", [1024, 1025])
def test_a_kept_pair_of_more_elements_than_32_bits_count(hidden):
    rows = 2**31 // 2048 + 70
    tensors = drawn(with_mlp(hidden), rows, 16, dtype=bf16, grad=True)
    y = geglu_mlp(*tensors)
    dx, *_ = torch.autograd.grad(y, tensors, y.detach())
    x, *weights = (t.detach() for t in tensors)
    for part in (slice(None, 70), slice(rows // 2, rows // 2 + 70), slice(-70, None)):
        leaf = x[part].double().requires_grad_()
        want = plain_mlp(leaf, *(w.double() for w in weights))
        assert_close(y[part], want, bf16, 3)
        (gradient,) = torch.autograd.grad(want, leaf, y.detach()[part].double())
        assert_close(dx[part], gradient, bf16, 3)


@GPU
@pytest.mark.parametrize("sizes", [(8192, 768, 3072), (4096, 1001, 2049)], ids=str)
@pytest.mark.parametrize("dtype", checks.DTYPES, ids=str)
def test_large_shapes_are_right(sizes, dtype):
    rows, width, hidden = sizes
    tensors = drawn(with_mlp(hidden), rows, width, dtype=dtype, grad=True)
    roundings = 1 if dtype is torch.float32 else 3
    y, *got = results(geglu_mlp, tensors)
    exact = [t.detach().double().requires_grad_() for t in tensors]
    want = plain_mlp(*exact)
    assert_close(y[-70:], want[-70:], dtype, roundings)
    for one, other in zip(got, torch.autograd.grad(want, exact, 2 * y.double()), strict=True):
        assert checks.relative_error(one, other) < roundings * checks.TOLERANCE[dtype]


@GPU
@pytest.mark.usefixtures("fresh_compiler")
def test_training_takes_no_more_memory_than_compiled_by_pytorch():
    tensors = drawn(with_mlp(3072), 4096, 768, dtype=bf16, grad=True)

    def peak(call):
        return memory.peak_bytes(lambda: torch.autograd.grad(call(*tensors).sum(), tensors))

    assert peak(geglu_mlp) <= peak(torch.compile(plain_mlp))
