"""Lesson 2: its products, epilogues and MLP on awkward shapes, what they keep, their compiled code."""

import copy
import itertools
import math
import re
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import launches as launches_of
import pytest
import torch
from launches import FAMILIES, ROOM
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from labkit import checks, codegen, counts, device, lessons, machine, memory, ops
from labkit.mlp_works import chain, gate_up, geglu

pytestmark = pytest.mark.usefixtures("cache")
NAME = "02_kernel_fusion"
INTERPRETED = pytest.mark.skipif(
    device.has_gpu(),
    reason="tiles for other GPUs may not fit this one, and its kernels' accesses cannot be watched",
)
GPU = pytest.mark.skipif(
    not device.has_gpu(),
    reason="CUDA graphs, memory statistics and tf32 products exist on a GPU only",
)
LARGE = pytest.mark.skipif(
    machine.identity().memory_bytes < 48 * 2**30,
    reason="more than 2**31 elements, forward and backward, need a GPU with 48 GiB",
)
FLOAT32 = (torch.float32,)
SHAPES = ((64, 128), (37, 33), (70, 40), (1, 1), (3, 5, 24), (19,), (16,), (0, 8), (4, 0), (2, 0, 3))
"""Full; ragged, by pointers and by descriptors; one element; three dimensions; one; no rows; K = 0."""
RAGGED = ((37, 33), (70, 40), (1, 1), (0, 8), (4, 0))
MATRICES = tuple(shape for shape in SHAPES if len(shape) == 2)
ACTIVATIONS = {
    "none": lambda z: z,
    "relu": torch.relu,
    "gelu_tanh": lambda z: functional.gelu(z, approximate="tanh"),
    "silu": functional.silu,
}


@pytest.fixture(scope="module")
def lesson(cache):
    return lessons.load(NAME)


@pytest.fixture(params=["descriptors", "pointers"])
def path(request, monkeypatch):
    """How aligned tiles are loaded; those that are not aligned always go by pointers."""
    monkeypatch.setattr(device, "has_tile_copies", lambda: request.param == "descriptors")
    return request.param


def examine(call, reference, inputs, *shapes, layouts=("contiguous",), dtypes=FLOAT32, **options):
    """A check in some layouts only; all of them are the business of the whole grid."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checks, "LAYOUTS", {name: checks.LAYOUTS[name] for name in layouts})
        return checks.check(call, reference, inputs, shapes=shapes, dtypes=dtypes, **options)


def scaled(*shape):
    return torch.randn(shape) * max(shape[-1], 1) ** -0.5


def with_weight(out):
    return lambda shape: (torch.randn(shape), scaled(out, shape[-1]))


def with_bias(out):
    return lambda shape: (*with_weight(out)(shape), torch.randn(out))


def with_gate_up(hidden):
    return lambda shape: (torch.randn(shape), scaled(2, hidden, shape[-1]))


def with_mlp(hidden):
    return lambda shape: (*with_gate_up(hidden)(shape), scaled(shape[-1], hidden))


def on_device(tensors, dtype=torch.float32, grad=False):
    return [t.to(device.name(), dtype).requires_grad_(grad) for t in tensors]


def drawn(make, *shape, dtype=torch.float32, grad=False):
    torch.manual_seed(0)
    return on_device(make(shape), dtype, grad)


def assert_close(got, want, dtype=torch.float32, roundings=1):
    assert got.dtype is dtype and got.shape == want.shape
    assert not (
        problem := checks.diagnose(got.detach(), want.detach(), roundings * checks.TOLERANCE[dtype])
    ), problem


# --- launches, recorded instead of made ---------------------------------------------------------------

KERNELS = ("chain_kernel", "tile_kernel", "linear_kernel", "gate_up_kernel", "dz_kernel", "gated_kernel")


@pytest.fixture
def launches(lesson, monkeypatch):
    return launches_of.recorded(lesson, KERNELS, monkeypatch)


def tile_of(launch):
    return launch.BM, launch.BN, launch.BK, launch.num_warps, launch.num_stages


def pretend(lesson, patch, target, multiprocessors=132):
    """Let the host's part of the lesson believe that it is on this GPU."""
    patch.setattr(device, "shared_bytes", lambda: ROOM[target] * 1024)
    patch.setattr(device, "has_tile_copies", lambda: int(target.removeprefix("sm_")) >= 90)
    patch.setattr(lesson, "multiprocessors", lambda: multiprocessors)


def meta(*shape, dtype=torch.bfloat16, grad=False):
    return torch.empty(shape, dtype=dtype, device="meta", requires_grad=grad)


# --- right on every shape -----------------------------------------------------------------------------


def linear_of(lesson, activation):
    def linear_act(x, weight, bias=None):
        return lesson.linear_act(x, weight, bias, activation)

    return linear_act


def plain_linear(activation):
    return lambda *tensors: ACTIVATIONS[activation](functional.linear(*tensors))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_linear_act_is_right_with_a_bias(lesson, activation):
    """z and its gradient are rounded on the way from the output to the gradients of the inputs."""
    call, plain = linear_of(lesson, activation), plain_linear(activation)
    whole = activation == "gelu_tanh"  # the tiles and the host's part are the same for all
    layouts, shapes = (checks.LAYOUTS, SHAPES) if whole else (("contiguous",), RAGGED)
    examine(call, plain, with_bias(40), *shapes, layouts=layouts, dtypes=checks.DTYPES, roundings=3)
    examine(call, plain, with_bias(33), *shapes, dtypes=checks.DTYPES, roundings=3)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_linear_act_is_right_without_a_bias(lesson, activation):
    call, plain = linear_of(lesson, activation), plain_linear(activation)
    shapes = SHAPES if activation == "gelu_tanh" else RAGGED
    examine(call, plain, with_weight(40), *shapes, dtypes=checks.DTYPES, roundings=3)


def test_an_inner_size_of_zero_leaves_the_activation_of_the_bias(lesson):
    x, weight, bias = drawn(with_bias(5), 3, 0)
    for activation, plain in ACTIVATIONS.items():
        assert_close(lesson.linear_act(x, weight, bias, activation), plain(bias).expand(3, 5))
        assert not lesson.linear_act(x, weight, None, activation).any()


def test_gelu_is_the_default(lesson):
    x, weight, bias = drawn(with_bias(5), 3, 8)
    assert torch.equal(lesson.linear_act(x, weight, bias), lesson.linear_act(x, weight, bias, "gelu_tanh"))
    assert torch.equal(lesson.linear_act(x, weight), lesson.linear_act(x, weight, None, "gelu_tanh"))


def test_matmul_is_right(lesson):
    checks.check(lesson.matmul, functional.linear, with_weight(96), shapes=MATRICES, gradients=False)
    odd = (*MATRICES, (130, 40))
    examine(lesson.matmul, functional.linear, with_weight(33), *odd, dtypes=checks.DTYPES, gradients=False)


def test_the_pointwise_chain_is_right(lesson):
    def inputs(shape):
        return torch.randn(shape), torch.randn(shape[-1]), torch.randn(shape)

    checks.check(lesson.fused_chain, chain, inputs, shapes=(*checks.SHAPES, (3, 1024)), gradients=False)


@pytest.mark.parametrize("group", [1, 3, 8])
def test_the_first_step_of_the_product_is_right(lesson, group):
    @ops.contiguous
    def tiled(x, weight):
        (M, K), N = x.shape, weight.shape[0]
        y, sizes = x.new_empty(M, N), dict(GROUP=group, BM=32, BN=16, BK=16)
        if y.numel():
            lesson.tile_kernel[(-(-M // 32) * -(-N // 16),)](x, weight, y, M, N, K, **sizes)
        return y

    shapes, options = (*MATRICES, (150, 20)), dict(gradients=False, name="tiled")
    dtypes = checks.DTYPES if group == 3 else FLOAT32  # the order of the tiles is no matter of the dtype
    examine(tiled, functional.linear, with_weight(50), *shapes, dtypes=dtypes, **options)


@pytest.mark.parametrize("keep", [False, True])
def test_fused_gate_up_is_right_whether_or_not_it_keeps(lesson, keep):
    def half(x, w_gate_up):
        return lesson.fused_gate_up(x, w_gate_up, keep)[0]

    layouts = checks.LAYOUTS if keep else ("contiguous",)
    options = dict(layouts=layouts, dtypes=checks.DTYPES, gradients=False)
    examine(half, gate_up, with_gate_up(40), *MATRICES, **options)
    examine(half, gate_up, with_gate_up(33), *MATRICES, dtypes=checks.DTYPES, gradients=False)


def test_geglu_mlp_is_right(lesson):
    ragged = ((37, 33), (9, 40), (3, 5, 24))
    checks.check(lesson.geglu_mlp, geglu, with_mlp(40), shapes=ragged, roundings=3)
    shapes = [shape for shape in SHAPES if shape[-1]]
    examine(lesson.geglu_mlp, geglu, with_mlp(40), *shapes, dtypes=checks.DTYPES, roundings=3)
    examine(lesson.geglu_mlp, geglu, with_mlp(33), *ragged, dtypes=checks.DTYPES, roundings=3)


@pytest.mark.parametrize(("width", "hidden"), [(0, 8), (8, 0)])
def test_an_mlp_without_features_outside_or_inside_is_zero(lesson, width, hidden):
    examine(lesson.geglu_mlp, geglu, with_mlp(hidden), (4, width), dtypes=checks.DTYPES, roundings=3)


# --- both ways to load a tile, every tile, every split of the work ------------------------------------


def test_the_shapes_above_take_both_paths(lesson, launches):
    """A change of the conditions could leave them all on one path, and nothing would tell."""
    for width in (40, 24, 16, 33, 19):
        lesson.matmul(meta(70, width), meta(40, width))
    assert [made.TMA for made in launches] == [True, True, True, False, False]
    launches.clear()
    lesson.matmul(meta(70, 40), meta(33, 40))
    assert not launches[-1].TMA, "rows of the output that are not aligned"
    lesson.matmul(meta(70, 20, dtype=torch.float32), meta(40, 20, dtype=torch.float32))
    assert launches[-1].TMA, "20 times 4 bytes are aligned, 20 times 2 are not"
    lesson.matmul(meta(70, 20), meta(40, 20))
    assert not launches[-1].TMA


def test_a_base_that_is_not_aligned_goes_by_pointers(lesson, launches):
    block = torch.empty(70 * 40 + 1, dtype=torch.bfloat16)
    lesson.matmul(block[1:].view(70, 40), torch.empty(40, 40, dtype=torch.bfloat16))
    lesson.matmul(block[:-1].view(70, 40), torch.empty(40, 40, dtype=torch.bfloat16))
    assert [made.TMA for made in launches] == [False, True]


def test_aligned_sizes_are_right_by_either_path(lesson, path):
    options = dict(dtypes=checks.DTYPES, layouts=("contiguous", "misaligned"), roundings=3)
    examine(lesson.linear_act, plain_linear("gelu_tanh"), with_bias(104), (70, 40), **options)
    examine(lesson.geglu_mlp, geglu, with_mlp(72), (33, 40), **options)


TABLES = ("DEEP", "LARGE", "MIDDLE", "SMALL", "FP32", "ODD", "INTERPRETED")


def test_all_tables_of_tiles_are_tested(lesson):
    tables = {name for name, value in vars(lesson).items() if isinstance(value, list) and name.isupper()}
    assert tables == set(TABLES)


@INTERPRETED
@pytest.mark.parametrize("table", TABLES)
def test_every_tile_is_right_where_several_meet_and_the_last_are_ragged(lesson, monkeypatch, path, table):
    for BM, BN, BK, *rest in getattr(lesson, table):
        monkeypatch.setattr(lesson, "tiling", lambda *_, tile=(BM, BN, BK, *rest[:-1]): tile)
        # What is odd goes by pointers either way.
        for odd in (0,) if path == "descriptors" else (0, 1):
            x = (BM + 5, BK + 8 + odd)
            out = BN + BN // 2 + 8 + odd
            examine(lesson.linear_act, plain_linear("gelu_tanh"), with_bias(out), x)
            kept_is_right(lesson, *x, out - BN // 2)


def test_one_program_walks_over_all_tiles(lesson, monkeypatch):
    monkeypatch.setattr(lesson, "multiprocessors", lambda: 1)
    launched = spied_grids(lesson, monkeypatch)
    examine(lesson.linear_act, plain_linear("gelu_tanh"), with_bias(200), (300, 40))
    examine(lesson.matmul, functional.linear, with_weight(200), (300, 40), gradients=False)
    kept_is_right(lesson, 300, 40, 200)
    assert {grid for grid, tiles in launched} <= {1, 2} and min(tiles for _, tiles in launched) > 4


def spied_grids(lesson, patch):
    """(programs, tiles) of every launch that is made."""
    seen = []

    class Spy:
        def __init__(self, kernel, pair):
            self.kernel, self.pair = kernel, pair

        def __getitem__(self, grid):
            def run(*args, **options):
                rows, cols = args[-3 - (not self.pair) :][:2]
                wide = options["BN"] // (2 if self.pair else 1)
                seen.append((math.prod(grid), math.ceil(rows / options["BM"]) * math.ceil(cols / wide)))
                return self.kernel[grid](*args, **options)

            return run

    for name in ("linear_kernel", "gate_up_kernel"):
        patch.setattr(lesson, name, Spy(getattr(lesson, name), name == "gate_up_kernel"))
    return seen


@pytest.mark.parametrize("count", [1, 132])
def test_the_gradient_of_the_bias_is_right_however_its_rows_are_shared(lesson, monkeypatch, count):
    monkeypatch.setattr(lesson, "multiprocessors", lambda: count)
    for activation in ("relu", "silu"):
        examine(
            linear_of(lesson, activation), plain_linear(activation), with_bias(130), (1, 8), (200, 8), (77, 3)
        )


# --- what is kept for the backward --------------------------------------------------------------------


def kept_is_right(lesson, rows, width, hidden, dtype=torch.float32):
    """Gate, up and their product, each in its own place and nothing anywhere else."""
    fences = checks.Fences()
    x, w_gate_up = drawn(with_gate_up(hidden), rows, width, dtype=dtype)
    with fences:
        got, kept = lesson.fused_gate_up(*(fences.place(t, "contiguous") for t in (x, w_gate_up)), keep=True)
    gate, up = (x.double() @ w.double().T for w in w_gate_up)
    assert kept.shape == (rows, 2, hidden)
    assert_close(kept[:, 0], gate, dtype)
    assert_close(kept[:, 1], up, dtype)
    assert_close(got, ACTIVATIONS["gelu_tanh"](gate) * up, dtype)
    assert fences.broken() == 0


@pytest.mark.parametrize("hidden", [40, 8, 72, 1, 33, 63])
def test_gate_does_not_run_over_into_up(lesson, path, hidden):
    """They lie side by side in a row: a store of gate beyond its columns lands in up, inside all fences."""
    for dtype in checks.DTYPES:
        kept_is_right(lesson, 70, 40, hidden, dtype)


def test_nothing_is_kept_unless_asked(lesson):
    assert lesson.fused_gate_up(*drawn(with_gate_up(8), 4, 8))[1] is None


KEEPING = {
    "linear_act": (with_bias(40), lambda lesson: lesson.linear_act, plain_linear("gelu_tanh")),
    "geglu_mlp": (with_mlp(40), lambda lesson: lesson.geglu_mlp, geglu),
}


@pytest.fixture(params=KEEPING)
def operator(request, lesson):
    """(inputs, the lesson's function, the same in plain PyTorch)."""
    make, ours, plain = KEEPING[request.param]
    return make, ours(lesson), plain


def expected(plain, tensors):
    """Output and gradients in float64, upstream twice the output."""
    exact = [t.detach().double().requires_grad_() for t in tensors]
    y = plain(*exact)
    return [y.detach(), *torch.autograd.grad(y, exact, 2 * y.detach())]


def results(call, tensors, **options):
    y = call(*tensors)
    return [y.detach(), *torch.autograd.grad(y, tensors, 2 * y.detach(), **options)]


def saved_by(call, tensors):
    """The output, and the tensors saved beside the inputs."""
    saved = []

    def pack(tensor):
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = call(*tensors)
    given = {t.data_ptr() for t in tensors}
    return y, [t for t in saved if t.data_ptr() not in given]


def test_a_graph_that_is_retained_gives_the_same_gradients_twice(operator):
    make, call, plain = operator
    tensors = drawn(make, 37, 24, grad=True)
    y, (kept,) = saved_by(call, tensors)
    before, upstream = kept.clone(), 2 * y.detach()
    _, *want = expected(plain, tensors)
    for _ in range(3):
        got = torch.autograd.grad(y, tensors, upstream, retain_graph=True)
        assert torch.equal(kept, before)
        for one, other in zip(got, want, strict=True):
            assert_close(one, other)
    last = torch.autograd.grad(y, tensors, upstream)
    assert all(torch.equal(one, other) for one, other in zip(got, last, strict=True))
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.grad(y, tensors, upstream)


def test_the_mlp_writes_its_gradients_over_what_it_kept_once_that_is_spent(lesson):
    tensors = drawn(with_mlp(40), 37, 24, grad=True)
    y, (kept,) = saved_by(lesson.geglu_mlp, tensors)
    before, version = kept.clone(), kept._version
    torch.autograd.grad(y.sum(), tensors)
    assert not torch.equal(kept, before), "a tensor of its size more, at the peak"
    assert kept._version > version, "whoever else has saved it must hear of it"


@INTERPRETED
def test_the_mlps_backward_allocates_no_second_pair(lesson):
    tensors = drawn(with_mlp(40), 37, 24, grad=True)
    made = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            if function.overloadpacket in (torch.ops.aten.empty_like, torch.ops.aten.empty):
                made.append(result.numel())
            return result

    pair = 37 * 2 * 40
    for retain in (True, False):
        y = lesson.geglu_mlp(*tensors)
        made.clear()
        with Watch():
            torch.autograd.grad(y.sum(), tensors, retain_graph=retain)
        assert (pair in made) is retain


def test_nothing_is_kept_where_nobody_asks_for_gradients(operator):
    make, call, plain = operator
    tensors = drawn(make, 5, 24, grad=True)
    with torch.no_grad():
        y = call(*tensors)
    assert y.grad_fn is None
    assert_close(y, plain(*(t.detach().double() for t in tensors)))


@pytest.mark.parametrize("grad", [True, False])
def test_the_kernels_write_what_is_kept_only_for_a_backward(lesson, launches, grad):
    lesson.linear_act(meta(8, 16, grad=grad), meta(24, 16))
    lesson.geglu_mlp(meta(8, 16, grad=grad), meta(2, 24, 16), meta(16, 24))
    linear, pair = launches
    kept = [linear.kept, pair.kept_gate, pair.kept_up]
    assert [one is not None for one in kept] == [grad] * 3


def test_a_linear_layer_without_activation_keeps_nothing(lesson):
    _, saved = saved_by(linear_of(lesson, "none"), drawn(with_bias(40), 5, 24, grad=True))
    assert saved == []


SOME = [subset for subset in itertools.product((True, False), repeat=3) if any(subset)]


@pytest.mark.parametrize("needed", SOME, ids=str)
def test_gradients_of_some_inputs_only(operator, needed):
    make, call, plain = operator
    tensors = drawn(make, 37, 24)
    _, *want = expected(plain, tensors)
    for tensor, needs in zip(tensors, needed, strict=True):
        tensor.requires_grad_(needs)
    y = call(*tensors)
    y.backward(2 * y.detach())
    for tensor, needs, gradient in zip(tensors, needed, want, strict=True):
        assert (tensor.grad is not None) is needs
        if needs:
            assert_close(tensor.grad, gradient)


@INTERPRETED
@pytest.mark.parametrize(
    ("function", "make", "products"),
    [("linear_act", with_bias(40), (1, 1, 0)), ("geglu_mlp", with_mlp(40), (1, 1, 1))],
)
def test_a_gradient_that_nobody_wants_costs_no_product(lesson, function, make, products):
    """Of the MLP's backward one product, that of dhidden, is always needed."""
    always = {"linear_act": 0, "geglu_mlp": 1}[function]
    for needed in SOME:
        tensors = [t.requires_grad_(n) for t, n in zip(drawn(make, 5, 24), needed, strict=True)]
        y = getattr(lesson, function)(*tensors)
        wanted = [t for t in tensors if t.requires_grad]
        made = counts.count(lambda y=y, wanted=wanted: torch.autograd.grad(y.sum(), wanted)).launches
        assert sum(one.name == "mm" for one in made) == always + sum(
            count for count, needs in zip(products, needed, strict=True) if needs
        )


@pytest.mark.parametrize("dtype", checks.DTYPES, ids=str)
def test_the_backward_itself_returns_the_dtype_of_the_inputs(lesson, dtype):
    """Autograd would cast the gradients silently; a compiler believes what the operator promised."""
    x, weight, bias, z = drawn(lambda s: (*with_bias(40)(s), torch.randn(5, 40)), 5, 24, dtype=dtype)
    for activation, op in lesson.LINEAR_OPS.items():
        _, backward, *_ = op.made_of
        kept = () if activation == "none" else (z,)
        made = backward(z, x, weight, bias, *kept, wanted=(True, True, True))
        assert [gradient.dtype for gradient in made] == [dtype] * 3


def test_an_expanded_upstream_gradient(operator):
    make, call, plain = operator
    tensors = drawn(make, 37, 24, grad=True)
    exact = [t.detach().double().requires_grad_() for t in tensors]
    want = torch.autograd.grad(plain(*exact).sum(), exact)
    for got, other in zip(torch.autograd.grad(call(*tensors).sum(), tensors), want, strict=True):
        assert_close(got, other)


def test_a_second_derivative_is_refused(operator):
    make, call, _ = operator
    tensors = drawn(make, 4, 8, grad=True)
    dx, *_ = torch.autograd.grad(call(*tensors).square().sum(), tensors, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.sum().backward()


# --- inside torch.compile -----------------------------------------------------------------------------


def compiled(call, **options):
    return torch.compile(call, fullgraph=True, backend="aot_eager", **options)


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("shape", [(6, 24), (2, 3, 24), (24,), (0, 24), (5, 33)], ids=str)
def test_torch_compile_takes_it_whole(operator, shape):
    make, call, plain = operator
    tensors = drawn(make, *shape, grad=True)
    layer = compiled(lambda x, *weights: torch.tanh(call(x * 2, *weights)))
    want = expected(lambda x, *weights: torch.tanh(plain(x * 2, *weights)), tensors)
    for _ in range(2):
        for one, other in zip(results(layer, tensors), want, strict=True):
            assert_close(one, other)


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("activation", ["none", "relu", "silu"])
def test_torch_compile_takes_every_activation_without_bias(lesson, activation):
    tensors = drawn(with_weight(40), 6, 24, grad=True)
    want = expected(plain_linear(activation), tensors)
    for one, other in zip(results(compiled(linear_of(lesson, activation)), tensors), want, strict=True):
        assert_close(one, other)


@pytest.mark.usefixtures("fresh_compiler")
def test_the_number_of_rows_may_be_dynamic(operator):
    make, call, plain = operator
    layer = compiled(call, dynamic=True)
    for rows in (5, 6, 70):
        tensors = drawn(make, rows, 24, grad=True)
        for one, other in zip(results(layer, tensors), expected(plain, tensors), strict=True):
            assert_close(one, other)


@pytest.mark.usefixtures("fresh_compiler")
def test_a_compiled_graph_that_is_retained_gives_the_same_gradients_twice(operator):
    make, call, plain = operator
    tensors = drawn(make, 6, 24, grad=True)
    y = compiled(call)(*tensors)
    _, *want = expected(plain, tensors)
    for _ in range(2):
        got = torch.autograd.grad(y, tensors, 2 * y.detach(), retain_graph=True)
        for one, other in zip(got, want, strict=True):
            assert_close(one, other)


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("grad", [True, False])
def test_a_compiled_graph_keeps_something_only_for_a_backward(lesson, grad):
    graphs = []

    def record(graph, example_inputs):
        graphs.append(graph)
        return graph.forward

    block = lesson.GeGLU(24, 40, device=device.name())
    with torch.set_grad_enabled(grad):
        torch.compile(block, backend=record, fullgraph=True)(torch.randn(6, 24, device=device.name()))
    targets = [str(node.target) for node in graphs[0].graph.nodes if "labkit" in str(node.target)]
    assert targets == [f"labkit.geglu{'_training' if grad else ''}.default"]


@pytest.mark.usefixtures("fresh_compiler")
def test_the_module_compiles(lesson):
    block = lesson.GeGLU(24, 40, device=device.name())
    x = torch.randn(2, 3, 24, device=device.name(), requires_grad=True)
    leaves = [x, block.w_gate_up, block.w_down]
    y = compiled(block)(x)
    want = expected(geglu, leaves)
    got = [y.detach(), *torch.autograd.grad(y, leaves, 2 * y.detach())]
    for one, other in zip(got, want, strict=True):
        assert_close(one, other)


# --- wrong calls --------------------------------------------------------------------------------------

X, WEIGHT, BIAS = torch.ones(4, 6), torch.ones(3, 6), torch.ones(3)
WRONG_LINEAR = {
    "a scalar": ("x", torch.tensor(1.0), WEIGHT, BIAS),
    "a weight of other inputs": ("weight", X, torch.ones(3, 5), BIAS),
    "a weight the other way round": ("weight", X, WEIGHT.T, BIAS),
    "a vector as weight": ("weight", X, torch.ones(6), None),
    "a stack as weight": ("weight", X, torch.ones(2, 3, 6), BIAS),
    "a long bias": ("bias", X, WEIGHT, torch.ones(4)),
    "one bias for all": ("bias", X, WEIGHT, torch.ones(1)),
    "a matrix as bias": ("bias", X, WEIGHT, torch.ones(4, 3)),
    "whole numbers": ("x", X.int(), WEIGHT.int(), BIAS.int()),
    "double precision": ("x", X.double(), WEIGHT.double(), BIAS.double()),
    "complex numbers": ("x", X.cfloat(), WEIGHT.cfloat(), None),
    "a weight in half": ("weight", X, WEIGHT.half(), BIAS),
    "a weight in double": ("weight", X, WEIGHT.double(), BIAS),
    "a bias in bf16": ("bias", X, WEIGHT, BIAS.bfloat16()),
    "whole numbers as bias": ("bias", X, WEIGHT, BIAS.int()),
    "a weight elsewhere": ("weight", X, WEIGHT.to("meta"), BIAS),
    "a bias elsewhere": ("bias", X, WEIGHT, BIAS.to("meta")),
}
PAIR, DOWN = torch.ones(2, 5, 6), torch.ones(6, 5)
WRONG_MLP = {
    "a scalar": ("x", torch.tensor(1.0), PAIR, DOWN),
    "other features": ("w_gate_up", torch.ones(4, 7), PAIR, DOWN),
    "three weights": ("w_gate_up", X, torch.ones(3, 5, 6), DOWN),
    "one weight": ("w_gate_up", X, torch.ones(5, 6), DOWN),
    "both weights in one matrix": ("w_gate_up", X, torch.ones(10, 6), DOWN),
    "down for other hidden features": ("w_down", X, PAIR, torch.ones(6, 4)),
    "down to other features": ("w_down", X, PAIR, torch.ones(7, 5)),
    "down the other way round": ("w_down", X, PAIR, DOWN.T),
    "whole numbers": ("x", X.int(), PAIR.int(), DOWN.int()),
    "double precision": ("x", X.double(), PAIR.double(), DOWN.double()),
    "w_gate_up in half": ("w_gate_up", X, PAIR.half(), DOWN),
    "w_down in bf16": ("w_down", X, PAIR, DOWN.bfloat16()),
    "w_gate_up elsewhere": ("w_gate_up", X, PAIR.to("meta"), DOWN),
    "w_down elsewhere": ("w_down", X, PAIR, DOWN.to("meta")),
}
WRONG_PARTS = {
    "fused_chain: a short bias": ("fused_chain", "bias", X, torch.ones(5), X),
    "fused_chain: another shape": ("fused_chain", "other", X, torch.ones(6), torch.ones(1, 6)),
    "fused_chain: other in half": ("fused_chain", "other", X, torch.ones(6), X.half()),
    "matmul: other inputs": ("matmul", "weight", X, torch.ones(3, 5)),
    "matmul: a weight in half": ("matmul", "weight", X, WEIGHT.half()),
    "fused_gate_up: other inputs": ("fused_gate_up", "w_gate_up", X, torch.ones(2, 5, 7)),
    "fused_gate_up: three weights": ("fused_gate_up", "w_gate_up", X, torch.ones(3, 5, 6)),
}
WRONG_CALLS = {
    **WRONG_PARTS,
    **{f"linear_act: {what}": ("linear_act", *call) for what, call in WRONG_LINEAR.items()},
    **{f"geglu_mlp: {what}": ("geglu_mlp", *call) for what, call in WRONG_MLP.items()},
}


@pytest.mark.parametrize("call", WRONG_CALLS)
def test_a_wrong_call_names_the_argument(lesson, call):
    function, argument, *tensors = WRONG_CALLS[call]
    tensors = [t if t is None or t.device.type == "meta" else t.to(device.name()) for t in tensors]
    with pytest.raises(ValueError, match=rf"^{argument}: (has|is) .*should be"):
        getattr(lesson, function)(*tensors)


@pytest.mark.parametrize("activation", ["gelu", "GELU_TANH", "", None])
def test_an_unknown_activation_is_named_with_those_that_there_are(lesson, activation):
    tensors = on_device((X, WEIGHT, BIAS))
    with pytest.raises(ValueError, match=rf"^activation: {activation!r} .*none, relu, gelu_tanh, silu$"):
        lesson.linear_act(*tensors, activation)


# --- autocast and state_dict --------------------------------------------------------------------------

AUTOCAST = torch.bfloat16


def usual_linear(x, weight, bias):
    return functional.gelu(functional.linear(x, weight, bias), approximate="tanh")


MIXES = [
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.float32),
    (torch.float32, torch.bfloat16),
    (torch.float16, torch.float32),
]


@pytest.mark.parametrize(("first", "other"), MIXES, ids=str)
def test_inside_autocast_dtypes_are_those_of_linear(operator, first, other):
    make, call, plain = operator
    plain = usual_linear if plain is not geglu else geglu
    x, *weights = drawn(make, 6, 24)
    tensors = [t.to(d).requires_grad_() for t, d in zip((x, *weights), (first, other, other), strict=True)]
    made = []
    for one in (call, plain):
        with torch.autocast(device.name(), dtype=AUTOCAST):
            y = one(*tensors)
        made.append([y, *torch.autograd.grad(y.float().square().sum(), tensors)])
    for got, want in zip(*made, strict=True):
        assert got.dtype is want.dtype
        # each of the two rounds the tensors in between for itself
        tolerance = 4 * checks.TOLERANCE[AUTOCAST]
        assert not checks.diagnose(got.detach(), want.detach(), tolerance)


def test_inside_autocast_double_precision_is_refused_too(lesson):
    x, weight, bias = on_device((X, WEIGHT, BIAS))
    with torch.autocast(device.name(), dtype=AUTOCAST):  # noqa: SIM117
        with pytest.raises(ValueError, match=r"^weight: has dtype torch.float64"):
            lesson.linear_act(x, weight.double(), bias)


class Usual(nn.Module):
    """The MLP as it is usually written."""

    def __init__(self, d, h, **options):
        super().__init__()
        self.gate_proj = nn.Linear(d, h, bias=False, **options)
        self.up_proj = nn.Linear(d, h, bias=False, **options)
        self.down_proj = nn.Linear(h, d, bias=False, **options)

    def forward(self, x):
        return self.down_proj(functional.gelu(self.gate_proj(x), approximate="tanh") * self.up_proj(x))


def inside(block, **options):
    """A larger model with two of these blocks, at two depths."""
    deep = nn.ModuleDict({"mlp": block(24, 40, **options)})
    model = nn.Module()
    model.first, model.layers, model.last = block(24, 40, **options), nn.ModuleList([deep]), nn.Linear(24, 3)
    return model


def same(one, other):
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


def test_weights_go_from_three_linears_into_one_block_and_back(lesson):
    usual, fused, again = Usual(24, 40), lesson.GeGLU(24, 40), Usual(24, 40)
    assert fused.load_state_dict(usual.state_dict(), strict=True).missing_keys == []
    assert torch.equal(fused.w_gate_up[0], usual.gate_proj.weight)
    assert torch.equal(fused.w_gate_up[1], usual.up_proj.weight)
    assert torch.equal(fused.w_down, usual.down_proj.weight)
    same(fused.state_dict(), usual.state_dict())
    again.load_state_dict(fused.state_dict(), strict=True)
    same(again.state_dict(), usual.state_dict())
    x = torch.randn(5, 24)
    assert_close(fused.to(device.name())(x.to(device.name())).cpu(), again(x))


def test_its_own_state_comes_back(lesson):
    fused, other = lesson.GeGLU(24, 40), lesson.GeGLU(24, 40)
    other.load_state_dict(fused.state_dict())
    same(other.state_dict(), fused.state_dict())
    same(copy.deepcopy(fused).state_dict(), fused.state_dict())
    assert [name for name, _ in fused.named_parameters()] == ["w_gate_up", "w_down"]


def test_weights_find_their_way_inside_a_larger_model(lesson):
    usual, fused = inside(Usual), inside(lesson.GeGLU)
    state = usual.state_dict()
    names = list(state)
    fused.load_state_dict(state, strict=True)
    assert list(state) == names, "somebody else's dictionary"
    same(fused.state_dict(), state)
    assert torch.equal(fused.layers[0]["mlp"].w_down, usual.layers[0]["mlp"].down_proj.weight)
    again = inside(Usual)
    again.load_state_dict(fused.state_dict(prefix=""), strict=True)
    same(again.state_dict(), state)
    assert "a.w_gate_up" not in fused.first.state_dict(prefix="a.")
    assert set(fused.first.state_dict(prefix="a.")) == {f"a.{p}_proj.weight" for p in ("gate", "up", "down")}


def test_a_state_that_lasts_shares_memory_with_the_weights(lesson):
    """As every state_dict does: it is no copy, and costs no memory."""
    fused = lesson.GeGLU(24, 40)
    state = fused.state_dict()
    with torch.no_grad():
        fused.w_gate_up.fill_(7.0)
        fused.w_down.fill_(5.0)
    assert (state["gate_proj.weight"] == 7).all() and (state["up_proj.weight"] == 7).all()
    assert (state["down_proj.weight"] == 5).all()


@pytest.mark.parametrize("missing", ["gate", "up", "down"])
def test_a_missing_weight_is_reported(lesson, missing):
    fused = inside(lesson.GeGLU)
    state = inside(Usual).state_dict()
    del state[f"layers.0.mlp.{missing}_proj.weight"]
    lost = "w_down" if missing == "down" else "w_gate_up"
    with pytest.raises(RuntimeError, match=rf'Missing key\(s\) in state_dict: "layers.0.mlp.{lost}"'):
        fused.load_state_dict(state)
    found = fused.load_state_dict(state, strict=False)
    assert found.missing_keys == [f"layers.0.mlp.{lost}"]


def test_weights_of_another_size_are_refused_by_name(lesson):
    state = Usual(24, 40).state_dict()
    with pytest.raises(RuntimeError, match="size mismatch for w_down"):
        lesson.GeGLU(24, 48).load_state_dict(state)


def test_a_block_is_made_in_the_dtype_that_was_asked_for(lesson):
    block = lesson.GeGLU(24, 40, dtype=torch.float16)
    assert {p.dtype for p in block.parameters()} == {torch.float16}
    bound = max(p.abs().max().item() * p.shape[-1] ** 0.5 for p in block.parameters())
    assert 0.9 < bound < 1.01, "drawn as nn.Linear draws its weights"


# --- training -----------------------------------------------------------------------------------------


def losses(block, state, steps=10):
    torch.manual_seed(1)
    network = nn.Sequential(block(24, 40), nn.LayerNorm(24), block(24, 40)).to(device.name())
    network.load_state_dict(state)
    optimizer, curve = torch.optim.AdamW(network.parameters(), lr=3e-3), []
    for _ in range(steps):
        x = torch.randn(32, 24, device=device.name())
        loss = functional.mse_loss(network(x), torch.roll(x, 1, 1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        curve.append(loss.item())
    return curve


def test_training_follows_the_curve_of_the_usual_block(lesson):
    torch.manual_seed(0)
    state = nn.Sequential(Usual(24, 40), nn.LayerNorm(24), Usual(24, 40)).state_dict()
    usual, fused = losses(Usual, state), losses(lesson.GeGLU, state)
    assert fused == pytest.approx(usual, rel=1e-4)
    assert abs(usual[-1] - usual[0]) > 0.01 * usual[0], "a network that does not learn agrees with any other"


# --- which tile ---------------------------------------------------------------------------------------


def tiles_of(lesson, patch, target, M, N, K=1024, dtype=torch.bfloat16, aligned=True):
    pretend(lesson, patch, target)
    return lesson.tiling(M, N, K, dtype, aligned)


def waves(tile, M, N, multiprocessors=132):
    """How often the device is filled, and the elements it could have done in the time over those it did."""
    BM, BN, *_, programs = tile
    rounds = math.ceil(math.ceil(M / BM) * math.ceil(N / BN) / (programs * multiprocessors))
    return rounds, rounds * programs * multiprocessors * BM * BN / (M * N)


@pytest.mark.parametrize("target", ROOM)
def test_a_large_product_takes_the_first_tile_and_few_rows_a_small_one(lesson, monkeypatch, target):
    large = tiles_of(lesson, monkeypatch, target, 8192, 2 * 8192)
    assert large[:2] == (128, 128)
    for K in (256, 8192):
        few = tiles_of(lesson, monkeypatch, target, 64, 512, K)
        assert few[0] * few[1] < 128 * 128


def test_a_deep_product_takes_the_largest_tile_where_there_is_room(lesson, monkeypatch):
    """Its epilogue is short beside its sum: nobody else need work meanwhile."""
    for target in ROOM:
        tile = tiles_of(lesson, monkeypatch, target, 8192, 8192, 8192)
        assert (tile[:2] == (128, 256)) is (ROOM[target] >= 200)
        assert tiles_of(lesson, monkeypatch, target, 8192, 8192, 8192, torch.float32)[:2] != (128, 256)


def test_a_product_of_few_columns_wastes_less_of_the_device_than_by_the_largest_tile(lesson, monkeypatch):
    """8192 rows, 768 columns out of 3072: 384 of the largest tiles fill 264 places once and a half."""
    tile = tiles_of(lesson, monkeypatch, "sm_90", 8192, 768)
    largest = lesson.LARGE[0][:-1]
    assert tile != largest
    assert waves(tile, 8192, 768)[1] < waves(largest, 8192, 768)[1]


@pytest.mark.parametrize("target", ROOM)
def test_a_tile_is_one_that_the_compiler_takes(lesson, monkeypatch, target):
    rows, columns, depths = (1, 64, 512, 4096, 32768), (1, 256, 3072, 22016), (0, 768, 8192)
    for *sizes, dtype, aligned in itertools.product(rows, columns, depths, checks.DTYPES, (True, False)):
        tile = tiles_of(lesson, monkeypatch, target, *sizes, dtype, aligned)
        BM, BN, BK, warps, stages, programs = tile
        for size in (BM, BN, BN // 2, BK):
            assert size >= 16 and size & (size - 1) == 0
        assert warps in (4, 8) and stages >= 2 and programs in (1, 2)
        if not aligned:
            assert tile in [choice[:-1] for choice in lesson.ODD]


def test_launch_starts_no_more_programs_than_fit_where_they_walk(lesson, launches, monkeypatch):
    for target in ("sm_80", "sm_90"):
        pretend(lesson, monkeypatch, target)
        lesson.matmul(meta(8192, 1024), meta(8192, 1024))
    by_pointers, walking = launches
    assert by_pointers.grid == (64 * 64,) and not by_pointers.TMA
    assert walking.grid == (2 * 132,) and walking.TMA
    lesson.matmul(meta(64, 1024), meta(64, 1024))
    assert launches[-1].grid == (1,), "no program without a tile"


# --- more elements than 32 bits count -----------------------------------------------------------------


@pytest.mark.parametrize("count", [2**31 - 1025, 2**31 - 1024, 2**31, 2**31 - 2**11])
def test_the_chain_counts_in_64_bits_before_32_run_out(lesson, launches, count):
    x = meta(count)
    lesson.fused_chain(x.view(1, -1), x, x.view(1, -1))
    (made,) = launches
    assert made.LARGE or math.prod(made.grid) * made.BLOCK < 2**31, "the last lane's number, masked or not"
    assert math.prod(made.grid) * made.BLOCK >= count
    assert made.LARGE is (count > 2**31 - 1025)


def offsets_of(ttir, parameters):
    """Bits of the first offset that is added to each of the pointers, or to a splat of it."""
    found = {}
    for name in parameters:
        bases = {f"%{name}", *re.findall(rf"(%\w+) = tt\.splat %{name} :", ttir)}
        for base, types in re.findall(r"tt\.addptr (%\w+), %\w+ : (.*)", ttir):
            if base in bases:
                last = re.findall(r"(?:\b|x)i(\d+)\b", types.split(" loc(")[0])[-1]
                found.setdefault(name, set()).add(int(last))
    return found


FULL = {
    "chain_kernel": ("x", "other", "y"),
    "linear_kernel": ("x", "weight", "y", "kept"),
    "gate_up_kernel": ("x", "weight", "hidden", "kept_gate", "kept_up"),
    "dz_kernel": ("dy", "z", "dz"),
    "gated_kernel": ("dhidden", "kept", "dkept"),
}


def test_elements_beyond_two_to_the_31_are_addressed_in_64_bits(lesson, variants, monkeypatch):
    made = launches_of.recorded(lesson, KERNELS, monkeypatch)
    x = meta(2**31)
    lesson.fused_chain(x.view(1, -1), x, x.view(1, -1))
    large = codegen.request(made[0].kernel, made[0].arguments, **made[0].options)
    for launch, ttir in [
        (made[0], codegen.compile_many([large])[0].ttir),
        *((v.launch, v.compiled.ttir) for v in variants if v.training and v.launch.title != "chain_kernel"),
    ]:
        if not launch.options.get("TMA"):  # whose coordinates are rows and columns
            offsets = offsets_of(ttir, FULL[launch.title])
            assert offsets == {name: {64} for name in FULL[launch.title]}, launch


@LARGE
@pytest.mark.parametrize("out", [2048, 2049])
def test_a_linear_layer_of_more_elements_than_32_bits_count(lesson, out):
    rows = 2**31 // 2048 + 70
    x, weight, bias = drawn(with_bias(out), rows, 16, dtype=torch.bfloat16, grad=True)
    y = lesson.linear_act(x, weight, bias)
    plain = plain_linear("gelu_tanh")
    exact = [t.detach().double() for t in (weight, bias)]
    ends = (slice(None, 70), slice(rows // 2, rows // 2 + 70), slice(-70, None))
    for part in ends:
        assert_close(y[part], plain(x[part].double(), *exact), torch.bfloat16)
    upstream = y.detach()
    dx, dweight, dbias = torch.autograd.grad(y, (x, weight, bias), upstream)
    wants = []
    for part, up in zip(x.detach().split(2**16), upstream.split(2**16), strict=True):
        leaves = [part.double().requires_grad_(), *(t.clone().requires_grad_() for t in exact)]
        wants.append(torch.autograd.grad(plain(*leaves), leaves, up.double()))
    for part in ends:
        assert_close(dx[part], torch.cat([want[0] for want in wants])[part], torch.bfloat16, 3)
    assert_close(dweight, sum(want[1] for want in wants), torch.bfloat16, 3)
    assert_close(dbias, sum(want[2] for want in wants), torch.bfloat16, 3)


@LARGE
@pytest.mark.parametrize("width", [2048, 2047])
def test_a_chain_of_more_elements_than_32_bits_count(lesson, width):
    rows = 2**31 // width + 3
    x, other = (torch.randn(rows, width, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    bias = torch.randn(width, device="cuda", dtype=torch.bfloat16)
    y = lesson.fused_chain(x, bias, other)
    for part in (slice(None, 5), slice(rows // 2, rows // 2 + 5), slice(-5, None)):
        assert_close(y[part], chain(x[part].double(), bias.double(), other[part].double()), torch.bfloat16)


@LARGE
@pytest.mark.parametrize("hidden", [1024, 1025])
def test_an_mlp_whose_kept_pair_has_more_elements_than_32_bits_count(lesson, hidden):
    rows = 2**31 // 2048 + 70
    tensors = drawn(with_mlp(hidden), rows, 16, dtype=torch.bfloat16, grad=True)
    y = lesson.geglu_mlp(*tensors)
    dx, *_ = torch.autograd.grad(y, tensors, y.detach())
    x, *weights = (t.detach() for t in tensors)
    for part in (slice(None, 70), slice(rows // 2, rows // 2 + 70), slice(-70, None)):
        leaf = x[part].double().requires_grad_()
        want = geglu(leaf, *(w.double() for w in weights))
        assert_close(y[part], want, torch.bfloat16, 3)
        (gradient,) = torch.autograd.grad(want, leaf, y.detach()[part].double())
        assert_close(dx[part], gradient, torch.bfloat16, 3)


# --- every byte once ----------------------------------------------------------------------------------


def kernels_of(call, *tensors):
    """The launches of Triton kernels in a call, between fences, so that strays hit nothing else."""
    fences = checks.Fences()
    placed = [fences.place(tensor, "contiguous") for tensor in tensors]
    with fences:
        made = counts.count(lambda: call(*placed)).launches
    return [launch for launch in made if launch.programs]


@INTERPRETED
@pytest.mark.parametrize("shape", [(3, 500), (5, 1024), (37, 33)])
def test_pointwise_kernels_read_and_write_nothing_beyond_the_end(lesson, shape):
    """A load without its mask gives the right result wherever what it read too much is not used."""
    M, N = shape
    x, z, dz = drawn(lambda s: (torch.randn(s),) * 3, M, N)
    (fused,) = kernels_of(lesson.fused_chain, x, x[0].clone(), z)
    assert (fused.bytes_read, fused.bytes_written) == (3 * M * N * 4, M * N * 4)
    (dz,) = kernels_of(lambda dy, z: lesson.dz_and_db(dy, z, "silu"), x, z)
    groups = dz.programs // math.ceil(N / 128)
    assert (dz.bytes_read, dz.bytes_written) == (2 * M * N * 4, (M + groups) * N * 4)
    kept, dkept = x.new_empty(M, 2, N).normal_(), x.new_empty(M, 2, N)

    def backward(dhidden, kept, dkept):
        block = 512
        lesson.gated_kernel[(M, -(-N // block))](dhidden, kept, dkept, N, ACT="gelu_tanh", BLOCK=block)

    (gated,) = kernels_of(backward, x, kept, dkept)
    assert (gated.bytes_read, gated.bytes_written) == (3 * M * N * 4, 3 * M * N * 4)


@INTERPRETED
@pytest.mark.parametrize(("rows", "width", "out"), [(37, 33, 70), (70, 40, 40), (1, 1, 1)])
def test_products_read_and_write_nothing_beyond_the_end(lesson, rows, width, out):
    """By pointers, whose masks are ours: rows of tiles read the weight, columns of tiles x."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device, "has_tile_copies", lambda: False)
        made = kernels_of(lesson.matmul, *drawn(with_weight(out), rows, width))
        made += kernels_of(lesson.fused_gate_up, *drawn(with_gate_up(out), rows, width))
        made += kernels_of(lesson.linear_act, *drawn(with_bias(out), rows, width))
        BM, BN, *_ = lesson.tiling(rows, out, width, torch.float32, False)
    for one, columns, weights, bias in zip(made, (BN, BN // 2, BN), (1, 2, 1), (0, 0, 1), strict=True):
        down, across = math.ceil(rows / BM), math.ceil(out / columns)
        assert one.programs == down * across
        assert one.bytes_read == 4 * (width * (across * rows + down * weights * out) + down * bias * out)
        assert one.bytes_written == 4 * rows * out


# --- what the compiler makes of it, for GPUs that are not here ----------------------------------------

WIDE, DEEP, MIDDLING = (8192, 4096, 1024), (8192, 4096, 8192), (512, 768, 512)
FEW, ODD = (64, 512, 256), (4096, 1001, 99)
bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
CASES = {
    "sm_80": [(bf16, WIDE, True), (fp32, MIDDLING, False)],
    "sm_86": [(fp16, WIDE, True)],
    "sm_90": [
        *((bf16, sizes, True) for sizes in (WIDE, FEW, ODD, DEEP)),
        *((bf16, sizes, False) for sizes in (WIDE, MIDDLING)),
        (fp32, WIDE, True),
        (fp32, ODD, False),
    ],
    "sm_100": [(bf16, WIDE, True), (bf16, DEEP, True), (fp32, WIDE, False)],
    "sm_120": [(bf16, WIDE, True), (bf16, ODD, False), (fp32, FEW, False)],
}
"""By target: dtype, (rows, hidden, width), whether a backward follows, which also keeps what it needs."""
PRODUCTS = ("linear_kernel", "gate_up_kernel")
UNITS = {"sm_90": "wgmma", "sm_100": "tcgen05"}


class Variant(NamedTuple):
    """A kernel compiled as one launch would have it."""

    launch: launches_of.Launch
    target: str
    dtype: torch.dtype
    sizes: tuple[int, int, int]
    training: bool
    compiled: codegen.Compiled

    @property
    def aligned(self):
        return self.sizes != ODD

    def __repr__(self):
        return f"{self.launch.title} {self.target} {self.dtype} {self.sizes} training={self.training}"


def launch_all(lesson, dtype, sizes, training):
    """Every kernel of the lesson's functions, with the arguments that their host code gives them."""
    M, H, K = sizes
    x, weight, bias = (meta(*s, dtype=dtype, grad=training) for s in ((M, K), (H, K), (H,)))
    pair, down = (meta(*s, dtype=dtype, grad=training) for s in ((2, H, K), (K, H)))
    for call, tensors in ((lesson.linear_act, (x, weight, bias)), (lesson.geglu_mlp, (x, pair, down))):
        y = call(*tensors)
        if training:
            torch.autograd.grad(y.sum(), tensors)
    with torch.no_grad():
        hidden = meta(M, H, dtype=dtype)
        lesson.fused_chain(hidden, bias, hidden)


@pytest.fixture(scope="module")
def variants(lesson):
    """The cases above, compiled; two processes, because each does one kernel at a time."""
    asked = {}
    for target, cases in CASES.items():
        with pytest.MonkeyPatch.context() as patch:
            made = launches_of.recorded(lesson, KERNELS, patch)
            pretend(lesson, patch, target)
            for dtype, sizes, training in cases:
                made.clear()
                launch_all(lesson, dtype, sizes, training)
                for launch in made:
                    request = codegen.request(
                        launch.kernel, launch.arguments, target=target, **launch.options
                    )
                    asked.setdefault(request.key, (launch, target, dtype, sizes, training, request))
    requests = [request for *_, request in asked.values()]
    with ThreadPoolExecutor(2) as pool:
        halves = list(pool.map(codegen.compile_many, (requests[::2], requests[1::2])))
    ordered = [one for pair in itertools.zip_longest(*halves) for one in pair if one is not None]
    return [Variant(*rest, one) for (*rest, _), one in zip(asked.values(), ordered, strict=True)]


def products_of(variants):
    return [v for v in variants if v.launch.title in PRODUCTS]


def test_every_kernel_compiles_for_every_family_of_targets_without_spills_and_fits(variants):
    seen = {(v.launch.title, v.target) for v in variants}
    assert seen == set(itertools.product(FULL, FAMILIES)) and len(FULL) == 5
    for v in variants:
        assert v.compiled.spills == 0, v
        assert v.compiled.shared_bytes <= ROOM[v.target] * 1024, (v, v.compiled.shared_bytes)


def test_the_cases_reach_the_tiles_they_are_meant_for(lesson, variants):
    tables = {"sm_80": lesson.MIDDLE, "sm_90": lesson.LARGE, "sm_100": lesson.LARGE}
    for v in products_of(variants):
        table = tables.get(v.target, lesson.SMALL)
        table = lesson.DEEP if v.sizes == DEEP else table
        table = lesson.ODD if not v.aligned else lesson.FP32 if v.dtype is fp32 else table
        assert tile_of(v.launch) in [choice[:5] for choice in table], v
        assert v.launch.TMA is (v.aligned and v.target in ("sm_90", "sm_100", "sm_120")), v
    seen = {tile_of(v.launch) for v in products_of(variants) if v.target == "sm_90" and v.dtype is bf16}
    assert len(seen) >= 4, "the deepest and the largest of the others, a small one, and that of odd sizes"


def test_products_use_the_matrix_unit(variants):
    for v in products_of(variants):
        unit = UNITS.get(v.target, "mma")
        allowed = {unit} if v.aligned else {unit, "mma"}
        assert v.compiled.matrix and set(v.compiled.matrix) <= allowed, (v, v.compiled.matrix)


def test_float32_products_are_made_of_three_of_tf32(variants):
    """One alone has an error of 1e-3; plain fp32 would not use the matrix unit at all."""
    made = [v for v in products_of(variants) if v.dtype is fp32]
    assert made
    for v in made:
        assert "inputPrecision = tf32x3" in v.compiled.ttir, v
        assert "tf32" in v.compiled.ptx, v


def test_aligned_tiles_are_copied_whole_or_in_128_bits(variants):
    for v in products_of(variants):
        if not v.aligned:
            continue
        if v.launch.TMA:
            assert v.compiled.bulk_loads >= 4, v  # x and weight, ahead of the loop and in it
            outputs = 1 if not v.training else 2 if v.launch.title == "linear_kernel" else 3
            halves = 2 if v.launch.title == "linear_kernel" else 1
            assert v.compiled.bulk_stores >= outputs * halves, v
            assert not v.compiled.async_copies, v
            assert max(v.compiled.loads, default=0) in (0, 32, 64, 128), v  # the bias
        else:
            assert set(v.compiled.async_copies) == {128} and v.compiled.async_copies[128] >= 4, v
            assert max(v.compiled.stores) == 128, v


def test_as_many_programs_fit_a_multiprocessor_as_the_tile_says(lesson, variants, monkeypatch):
    for v in products_of(variants):
        M, H, K = v.sizes
        pretend(lesson, monkeypatch, v.target)
        N = 2 * H if v.launch.title == "gate_up_kernel" else H
        *tile, programs = lesson.tiling(M, N, K, v.dtype, v.aligned)
        assert tuple(tile) == tile_of(v.launch), v
        if not v.aligned:
            continue  # one tile for all: the number decides nothing there
        # one KiB for each block is the system's own, registers come in units of 8
        registers = math.ceil(v.compiled.registers / 8) * 8 * 32 * v.compiled.num_warps
        assert programs * (v.compiled.shared_bytes + 1024) <= (ROOM[v.target] + 1) * 1024, v
        assert programs * registers <= 65536, v


def test_pointwise_kernels_move_128_bits_at_a_time(variants):
    for v in variants:
        if v.launch.title in PRODUCTS or not v.aligned:
            continue
        if v.launch.options.get("BLOCK", 1024) < 1024:
            continue  # fewer elements than 16 bytes for each thread
        if v.launch.title == "dz_kernel":  # the next tiles of dy and z are on their way
            assert set(v.compiled.async_copies) == {128} and v.compiled.async_copies[128] >= 4, v
        else:
            assert set(v.compiled.loads) == {128} and v.compiled.loads[128] >= 3, v
            assert set(v.compiled.stores) == {128}, v
        assert v.compiled.stores[128] >= (3 if v.launch.title == "gated_kernel" else 1), v


def test_pointwise_arithmetic_is_in_float32_and_rounded_once(variants):
    for v in variants:
        if v.launch.title in PRODUCTS:
            continue
        half = re.findall(r"arith\.\w+f .*xb?f16>", v.compiled.ttir)
        assert not [line for line in half if not re.match(r"arith\.(extf|truncf) ", line)], v


def test_sums_are_added_in_a_fixed_order(variants):
    for v in variants:
        assert not re.search(r"\b(atom|red)\.", v.compiled.ptx), v


# --- on a GPU -----------------------------------------------------------------------------------------


@GPU
@pytest.mark.parametrize("shape", [(256, 128), (37, 33)], ids=str)
def test_both_directions_can_be_captured_in_a_graph(operator, shape):
    make, call, _ = operator
    tensors = drawn(make, *shape, dtype=torch.bfloat16, grad=True)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):  # compiles, and lets the libraries take their workspaces
            results(call, tensors)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = results(call, tensors)
    with torch.no_grad():
        tensors[0].copy_(torch.randn_like(tensors[0]))
    graph.replay()
    for got, want in zip(captured, results(call, tensors), strict=True):
        assert torch.equal(got, want)


@GPU
def test_the_forward_alone_can_be_captured(operator):
    make, call, _ = operator
    tensors = drawn(make, 256, 128, dtype=torch.bfloat16)
    replay = ops.replayed(call)
    assert torch.equal(replay(*tensors), call(*tensors))
    tensors[0].normal_()
    assert torch.equal(replay(*tensors), call(*tensors))


@GPU
@pytest.mark.parametrize("dtype", checks.DTYPES, ids=str)
def test_the_bits_are_the_same_from_run_to_run(operator, dtype):
    make, call, _ = operator
    tensors = drawn(make, 4096, 512, dtype=dtype, grad=True)
    first = results(call, tensors)
    for _ in range(5):
        for got, want in zip(results(call, tensors), first, strict=True):
            assert torch.equal(got, want)


@GPU
@pytest.mark.parametrize("sizes", [(8192, 768, 3072), (4096, 1001, 2049)], ids=str)
@pytest.mark.parametrize("dtype", checks.DTYPES, ids=str)
def test_large_shapes_are_right_in_rows_that_were_drawn(lesson, sizes, dtype):
    rows, width, hidden = sizes
    tensors = drawn(with_mlp(hidden), rows, width, dtype=dtype, grad=True)
    y, dx, dpair, ddown = results(lesson.geglu_mlp, tensors)
    some = torch.cat([torch.randperm(rows)[:60], torch.tensor([0, rows - 1])]).to(device.name())
    x, pair, down = (t.detach().double() for t in tensors)
    leaf = x[some].requires_grad_()
    want = geglu(leaf, pair, down)
    (gradient,) = torch.autograd.grad(want, leaf, 2 * y[some].double())
    for got, exact in ((y[some], want), (dx[some], gradient)):
        assert_close(got, exact, dtype, 3 if dtype is not torch.float32 else 1)
    leaves = [t.requires_grad_() for t in (pair, down)]
    wants = torch.autograd.grad(geglu(x, *leaves), leaves, 2 * y.double())
    for got, exact in zip((dpair, ddown), wants, strict=True):
        assert checks.relative_error(got, exact) < 3 * checks.TOLERANCE[dtype]


@GPU
@pytest.mark.parametrize("sizes", [(4096, 4096, 4096), (1001, 2049, 999)], ids=str)
def test_no_number_in_float32_is_worse_than_a_hundred_thousandth(lesson, sizes):
    """By tf32x3; a product in plain tf32 has errors of a thousandth."""
    rows, width, hidden = sizes
    x, weight = drawn(with_weight(hidden), rows, width)
    assert_close(lesson.matmul(x, weight), x.double() @ weight.double().T)
    x, pair = drawn(with_gate_up(hidden), rows, width)
    got, kept = lesson.fused_gate_up(x, pair, keep=True)
    assert_close(got, gate_up(x.double(), pair.double()))
    assert_close(kept[:, 1], x.double() @ pair[1].double().T)
    x, weight, bias = drawn(with_bias(hidden), rows, width)
    for activation in ACTIVATIONS:
        want = plain_linear(activation)(x.double(), weight.double(), bias.double())
        assert_close(lesson.linear_act(x, weight, bias, activation), want)


@GPU
@pytest.mark.usefixtures("fresh_compiler")
def test_training_takes_no_more_memory_than_compiled_by_pytorch(lesson):
    tensors = drawn(with_mlp(3072), 4096, 768, dtype=torch.bfloat16, grad=True)

    def peak(call):
        return memory.peak_bytes(lambda: torch.autograd.grad(call(*tensors).sum(), tensors))

    assert peak(lesson.geglu_mlp) <= peak(torch.compile(geglu))
