"""labkit.kernels.linear: the product and its epilogues on awkward shapes, their gradients and plans."""

import itertools
import math

import pytest
import torch
from products import (
    ACTIVATIONS,
    CALLS,
    SOME,
    assert_close,
    assert_rounded_once,
    assert_same_results,
    bf16,
    drawn,
    examine,
    expected,
    fp16,
    fp32,
    gpu,
    kept_is_right,
    kernels_of,
    linear_of,
    meta,
    plain_linear,
    pretend,
    recorded,
    results,
    saved_by,
    with_bias,
    with_weight,
)
from torch.nn import functional

from labkit import checks, counts, device
from labkit.kernels import common, linear
from labkit.kernels.graphs import replayed
from labkit.kernels.linear import linear_act, matmul

pytestmark = pytest.mark.usefixtures("cache")
INTERPRETED = pytest.mark.skipif(
    device.has_gpu(),
    reason="tiles for other GPUs may not fit this one, and its kernels' accesses cannot be watched",
)
GPU = pytest.mark.skipif(not device.has_gpu(), reason="CUDA graphs and tf32 products exist on a GPU only")
TWO = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there is no second GPU")
LARGE = pytest.mark.large
SHAPES = ((64, 128), (37, 33), (70, 40), (1, 1), (3, 5, 24), (19,), (16,), (0, 8), (4, 0), (2, 0, 3))
"""Full; ragged, by pointers and by descriptors; one element; three dimensions; one; no rows; K = 0."""
MATRICES = tuple(shape for shape in SHAPES if len(shape) == 2)
TABLES = ("DEEP", "LARGE", "MIDDLE", "SMALL", "FP32", "ODD", "INTERPRETED")


@pytest.fixture(params=["descriptors", "pointers"])
def path(request, monkeypatch):
    """How aligned tiles are loaded; those that are not aligned always go by pointers."""
    its = common.gpu_of(torch.device(device.name()))
    fields = dict(multiprocessors=its.multiprocessors, shared_bytes=its.shared_bytes)
    pretend(monkeypatch, common.Gpu(**fields, tile_copies=request.param == "descriptors"))
    return request.param


@pytest.fixture(params=["matmul", "linear_act"])
def operator(request):
    return CALLS[request.param]


# --- right on every shape -----------------------------------------------------------------------------


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("make", [with_bias, with_weight])
def test_linear_act_is_right(activation, make):
    """z and its gradient are rounded on the way from the output to the gradients of the inputs."""
    call, plain = linear_of(activation), plain_linear(activation)
    whole = activation == "gelu_tanh"  # the tiles and the host's part are the same for all
    layouts = checks.LAYOUTS if whole and make is with_bias else None
    examine(call, plain, make(40), *SHAPES[: None if whole else 4], layouts=layouts, roundings=3)
    examine(call, plain, make(33), (37, 33), (70, 40), roundings=3)


@pytest.mark.parametrize("out", [40, 33])
def test_matmul_is_right(out):
    layouts = checks.LAYOUTS if out == 40 else None
    examine(matmul, functional.linear, with_weight(out), *MATRICES, layouts=layouts, roundings=2)


def test_an_inner_size_of_zero_leaves_the_activation_of_the_bias():
    x, weight, bias = drawn(with_bias(5), 3, 0)
    for activation, plain in ACTIVATIONS.items():
        assert_close(linear_act(x, weight, bias, activation), plain(bias).expand(3, 5))
        assert not linear_act(x, weight, None, activation).any()
    assert torch.equal(linear_act(x, weight, bias), linear_act(x, weight, bias, "gelu_tanh"))


@pytest.mark.parametrize("dtype", [bf16, fp16], ids=str)
def test_a_deep_sum_is_rounded_once(dtype):
    """Sums in 16 bits, or parts of them, would be far outside: 128 tiles are added here."""
    x, weight, bias = drawn(with_bias(24), 20, 4096, dtype=dtype)
    exact = [t.double() for t in (x, weight, bias)]
    assert_rounded_once(matmul(x, weight), exact[0] @ exact[1].T)
    for activation in ACTIVATIONS:
        assert_rounded_once(linear_act(x, weight, bias, activation), plain_linear(activation)(*exact))


@pytest.mark.parametrize("activation", ["relu", "gelu_tanh", "silu"])
@pytest.mark.parametrize("multiprocessors", [1, 132])
@pytest.mark.parametrize("dtype", [bf16, fp16, fp32], ids=str)
def test_dz_and_its_sum_are_rounded_once_however_rows_are_shared(
    monkeypatch, activation, multiprocessors, dtype
):
    pretend(monkeypatch, common.Gpu(multiprocessors, 0, True))
    for rows, columns in ((600, 130), (1, 3)):
        dy, z = drawn(
            lambda shape: (torch.randn(shape), torch.randn(shape) + 0.5), rows, columns, dtype=dtype
        )
        leaf = z.double().requires_grad_()
        (want,) = torch.autograd.grad(ACTIVATIONS[activation](leaf), leaf, dy.double())
        dz, dbias = linear.linear_dz(dy, z, activation, True)
        for got, exact in ((dz, want), (dbias, want.sum(0))):
            assert_close(got, exact, dtype)
            if dtype is not fp32 and rows > 1:  # of few numbers the error is a matter of luck
                assert_rounded_once(got, exact)
        assert not linear.linear_dz(dy, z, activation, False)[1].numel(), "what nobody wants is not summed"


# --- both ways to load a tile, every tile, every split of the work ------------------------------------


def test_which_rows_go_by_descriptors(monkeypatch):
    """A change of the conditions could leave all shapes on one path, and no result would tell."""
    launches = recorded(monkeypatch)
    for width, out, dtype in ((40, 40, bf16), (24, 40, bf16), (16, 40, bf16), (20, 40, fp32)):
        matmul(meta(70, width, dtype=dtype), meta(out, width, dtype=dtype))
    assert all(made.TMA for made in launches)
    launches.clear()
    for width, out in ((33, 40), (19, 40), (20, 40), (40, 33)):  # the last: rows of the output
        matmul(meta(70, width), meta(out, width))
    block, weight = (torch.empty(n, dtype=bf16, device=device.name()) for n in (70 * 40 + 1, 40 * 40))
    matmul(block[1:].view(70, 40), weight.view(40, 40))
    assert not any(made.TMA for made in launches) and len(launches) == 5


def test_aligned_sizes_are_right_by_either_path(path):
    options = dict(layouts=("contiguous", "misaligned"), roundings=3)
    examine(linear_act, plain_linear("gelu_tanh"), with_bias(104), (70, 40), **options)


def test_all_tables_of_tiles_are_tested():
    assert set(TABLES) == {n for n, v in vars(linear).items() if isinstance(v, list) and n.isupper()}


@INTERPRETED
@pytest.mark.parametrize("table", TABLES)
def test_every_tile_is_right_where_several_meet_and_the_last_are_ragged(monkeypatch, path, table):
    for BM, BN, BK, *rest in getattr(linear, table):
        monkeypatch.setattr(linear, "tiling", lambda *_, tile=(BM, BN, BK, *rest[:-1]): tile)
        for odd in (0,) if path == "descriptors" else (0, 1):  # what is odd goes by pointers either way
            x, out = (BM + 5, BK + 8 + odd), BN + BN // 2 + 8 + odd
            examine(linear_act, plain_linear("gelu_tanh"), with_bias(out), x, dtypes=(fp32,))
            kept_is_right(*x, out - BN // 2)


def test_one_program_walks_over_all_tiles(monkeypatch):
    pretend(monkeypatch, common.Gpu(1, common.gpu_of(torch.device(device.name())).shared_bytes, True))
    examine(linear_act, plain_linear("gelu_tanh"), with_bias(200), (300, 40), dtypes=(fp32,))
    kept_is_right(300, 40, 200)
    launches = recorded(monkeypatch)
    matmul(meta(300, 40), meta(200, 40))
    (made,) = launches
    assert math.prod(made.grid) <= 2 and math.prod(made.grid) * made.BM * made.BN < 300 * 200


@INTERPRETED
@pytest.mark.parametrize(("rows", "width", "out"), [(37, 33, 70), (70, 40, 40), (1, 1, 1)])
def test_nothing_is_read_or_written_beyond_the_end(monkeypatch, rows, width, out):
    """By pointers, whose masks are ours: rows of tiles read the weight, columns of tiles x."""
    pretend(monkeypatch, common.Gpu(4, 0, False))
    made = kernels_of(matmul, *drawn(with_weight(out), rows, width))
    made += kernels_of(linear_act, *drawn(with_bias(out), rows, width))
    BM, BN, *_ = linear.tiling(rows, out, width, fp32, False, common.Gpu(4, 0, False))
    down, across = math.ceil(rows / BM), math.ceil(out / BN)
    for one, bias in zip(made, (0, 1), strict=True):
        assert one.programs == down * across
        assert one.bytes_read == 4 * (width * (across * rows + down * out) + down * bias * out)
        assert one.bytes_written == 4 * rows * out
    z = torch.randn(rows, out)
    (dz,) = kernels_of(lambda dy, z: linear.linear_dz(dy, z, "silu", False), z, z)
    groups = dz.programs // math.ceil(out / 128)
    assert (dz.bytes_read, dz.bytes_written) == (2 * 4 * rows * out, 4 * (rows + groups) * out)


# --- gradients ----------------------------------------------------------------------------------------


def test_a_graph_that_is_retained_gives_the_same_gradients_twice(operator):
    make, call, plain = operator
    tensors = drawn(make, 37, 24, grad=True)
    y = call(*tensors)
    _, *want = expected(plain, tensors)
    for retain in (True, True, False):
        got = torch.autograd.grad(y, tensors, 2 * y.detach(), retain_graph=retain)
        for one, other in zip(got, want, strict=True):
            assert_close(one, other)


def test_z_is_kept_only_for_a_backward_through_an_activation(monkeypatch):
    assert len(saved_by(linear_act, drawn(with_bias(40), 5, 24, grad=True))[1]) == 1
    assert not saved_by(linear_of("none"), drawn(with_bias(40), 5, 24, grad=True))[1]
    launches = recorded(monkeypatch)
    for grad in (True, False):
        linear_act(meta(8, 16, grad=grad), meta(24, 16))
        assert (launches[-1].kept is not None) is grad
    with torch.no_grad():
        assert linear_act(meta(8, 16, grad=True), meta(24, 16)).grad_fn is None
    assert launches[-1].kept is None


@pytest.mark.parametrize("needed", SOME, ids=str)
def test_gradients_of_some_inputs_only_and_no_product_for_the_others(needed):
    tensors = drawn(with_bias(40), 37, 24)
    _, *want = expected(plain_linear("gelu_tanh"), tensors)
    for tensor, needs in zip(tensors, needed, strict=True):
        tensor.requires_grad_(needs)
    y = linear_act(*tensors)
    if device.has_gpu():  # where products have other names
        y.backward(2 * y.detach())
    else:
        made = counts.count(lambda: y.backward(2 * y.detach())).launches
        assert sum(one.name == "mm" for one in made) == sum(needed[:2])
    for tensor, needs, gradient in zip(tensors, needed, want, strict=True):
        assert (tensor.grad is not None) is needs
        if needs:
            assert_close(tensor.grad, gradient)


def test_an_expanded_upstream_gradient(operator):
    make, call, plain = operator
    tensors = drawn(make, 37, 24, grad=True)
    exact = [t.detach().double().requires_grad_() for t in tensors]
    want = torch.autograd.grad(plain(*exact).sum(), exact)
    for got, other in zip(torch.autograd.grad(call(*tensors).sum(), tensors), want, strict=True):
        assert_close(got, other)


def test_derivatives_that_there_are_not_are_refused(operator):
    make, call, _ = operator
    tensors = drawn(make, 4, 8, grad=True)
    y = call(*tensors)
    with pytest.raises(RuntimeError, match="differentiable once"):
        torch.autograd.grad(y.sum(), tensors, create_graph=True)
    with pytest.raises(NotImplementedError, match=r"torch\.func"):
        torch.func.grad(lambda x: call(x, *tensors[1:]).sum())(tensors[0])
    with pytest.raises(NotImplementedError, match="forward-mode"):
        torch.func.jvp(lambda x: call(x, *tensors[1:]), (tensors[0],), (tensors[0],))


# --- torch.compile, autocast, wrong calls -------------------------------------------------------------


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_torch_compile_takes_it_whole(activation):
    layer, plain = linear_of(activation), plain_linear(activation)
    ours = torch.compile(
        lambda x, *w: torch.tanh(layer(x * 2, *w)), fullgraph=True, backend="aot_eager", dynamic=True
    )
    for make, shape in ((with_bias(40), (6, 24)), (with_bias(40), (5, 24)), (with_weight(33), (2, 3, 24))):
        assert_same_results(ours, lambda x, *w: torch.tanh(plain(x * 2, *w)), drawn(make, *shape, grad=True))


@pytest.mark.usefixtures("fresh_compiler")
def test_a_compiled_product_takes_a_tile_and_keeps_nothing_without_gradients():
    graphs = []

    def record(graph, _):
        graphs.append(graph)
        return graph.forward

    tensors = drawn(with_weight(40), 6, 24)
    tile = (32, 32, 16, 4, 2, 1)
    call = torch.compile(lambda *t: linear_act(matmul(*t, tile), *t[1:]), fullgraph=True, backend=record)
    with pytest.raises(ValueError, match="weight"):
        linear_act(matmul(*tensors), tensors[1])  # 40 columns for 24
    square = [tensors[0], tensors[1][:24]]
    exact = [t.double() for t in square]
    assert_close(call(*square), ACTIVATIONS["gelu_tanh"](exact[0] @ exact[1].T @ exact[1].T))
    targets = [str(node.target) for node in graphs[0].graph.nodes if "labkit" in str(node.target)]
    assert targets == ["labkit.linear_forward.default"] * 2


MIXES = [(fp32, fp32), (bf16, fp32), (fp32, bf16), (fp16, fp32)]


@pytest.mark.parametrize(("first", "other"), MIXES, ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_inside_autocast_dtypes_are_those_of_linear(name, first, other):
    make, call, plain = CALLS[name]
    x, *weights = drawn(make, 6, 24)
    tensors = [t.to(d).requires_grad_() for t, d in zip((x, *weights), (first, other, other), strict=False)]
    made = []
    for one in (call, plain):
        with torch.autocast(device.name(), dtype=bf16):
            y = one(*tensors)
        made.append([y, *torch.autograd.grad(y.float().square().sum(), tensors)])
    for got, want in zip(*made, strict=True):
        assert got.dtype is want.dtype
        # each of the two rounds the tensors in between for itself
        assert not checks.diagnose(got.detach(), want.detach(), 4 * checks.TOLERANCE[bf16])


X, WEIGHT, BIAS = torch.ones(4, 6), torch.ones(3, 6), torch.ones(3)
WRONG = {
    "a scalar": (linear_act, "x", torch.tensor(1.0), WEIGHT, BIAS),
    "a weight of other inputs": (linear_act, "weight", X, torch.ones(3, 5), BIAS),
    "a stack as weight": (linear_act, "weight", X, torch.ones(2, 3, 6), BIAS),
    "one bias for all": (linear_act, "bias", X, WEIGHT, torch.ones(1)),
    "a matrix as bias": (linear_act, "bias", X, WEIGHT, torch.ones(4, 3)),
    "whole numbers": (linear_act, "x", X.int(), WEIGHT.int(), BIAS.int()),
    "double precision": (linear_act, "x", X.double(), WEIGHT.double(), BIAS.double()),
    "a weight in half": (linear_act, "weight", X, WEIGHT.half(), BIAS),
    "a bias in bf16": (linear_act, "bias", X, WEIGHT, BIAS.bfloat16()),
    "a weight elsewhere": (linear_act, "weight", X, WEIGHT.to("meta"), BIAS),
    "a bias elsewhere": (linear_act, "bias", X, WEIGHT, BIAS.to("meta")),
    "a vector": (matmul, "x", X[0], WEIGHT),
    "a product of other inputs": (matmul, "weight", X, torch.ones(3, 5)),
    "a product with half": (matmul, "weight", X, WEIGHT.half()),
}


@pytest.mark.parametrize("call", WRONG.values(), ids=WRONG)
def test_a_wrong_call_names_the_argument(call):
    function, argument, *tensors = call
    tensors = [t if t.device.type == "meta" else t.to(device.name()) for t in tensors]
    with pytest.raises(ValueError, match=rf"^{argument}: (has|is) .*should be"):
        function(*tensors)


def test_an_unknown_activation_is_named_with_those_that_there_are():
    tensors = [t.to(device.name()) for t in (X, WEIGHT, BIAS)]
    for activation in ("gelu", None):
        with pytest.raises(ValueError, match=rf"^activation: {activation!r} .*none, relu, gelu_tanh, silu$"):
            linear_act(*tensors, activation)


# --- which tile ---------------------------------------------------------------------------------------


def waves(tile, M, N, multiprocessors=132):
    """The elements that the GPU could have done in the time, over those it did."""
    BM, BN, *_, programs = tile
    rounds = math.ceil(math.ceil(M / BM) * math.ceil(N / BN) / (programs * multiprocessors))
    return rounds * programs * multiprocessors * BM * BN / (M * N)


@pytest.mark.parametrize("target", ["sm_80", "sm_86", "sm_90", "sm_120"])
def test_the_tile_suits_the_product_and_the_compiler_takes_it(target):
    its = gpu(target)
    roomy = its.shared_bytes >= 200 * 1024
    assert linear.tiling(8192, 16384, 1024, bf16, True, its)[:2] == (128, 128)
    deep = linear.tiling(8192, 8192, 8192, bf16, True, its)
    assert (deep[:2] == (128, 256)) is roomy  # its epilogue is short beside its sum
    for K in (256, 8192):
        BM, BN, *_ = linear.tiling(64, 512, K, bf16, True, its)
        assert BM * BN < 128 * 128
    few = linear.tiling(8192, 768, 1024, bf16, True, its)  # 384 of the largest tiles are 1.5 rounds of 264
    if roomy:
        assert waves(few, 8192, 768) < waves(linear.LARGE[0][:-1], 8192, 768)
    rows, columns, depths = (1, 64, 4096), (1, 256, 22016), (0, 768, 8192)
    for *sizes, dtype, aligned in itertools.product(rows, columns, depths, checks.DTYPES, (True, False)):
        tile = BM, BN, BK, warps, stages, programs = linear.tiling(*sizes, dtype, aligned, its)
        assert all(size >= 16 and size & (size - 1) == 0 for size in (BM, BN // 2, BK))
        assert warps in (4, 8) and stages >= 2 and programs in (1, 2)
        assert aligned or tile in [choice[:-1] for choice in linear.ODD]


def test_no_more_programs_start_than_fit_where_they_walk(monkeypatch):
    launches = recorded(monkeypatch)
    for target, rows in (("sm_80", 8192), ("sm_90", 8192), ("sm_90", 64)):
        pretend(monkeypatch, gpu(target))
        matmul(meta(rows, 1024), meta(rows, 1024))
    assert [made.grid for made in launches] == [(64 * 64,), (2 * 132,), (1,)]
    assert [made.TMA for made in launches] == [False, True, True]


def test_plans_ask_the_tensors_own_device(monkeypatch):
    asked = []
    monkeypatch.setattr(linear, "gpu_of", lambda its: asked.append(its) or gpu("sm_90"))
    recorded(monkeypatch)
    tensors = meta(8, 16, grad=True), meta(24, 16), meta(24)
    linear_act(*tensors).sum().backward()
    assert asked == [torch.device("meta")] * 2


# --- on a GPU -----------------------------------------------------------------------------------------


@LARGE
@pytest.mark.parametrize("out", [2048, 2049])
def test_more_elements_than_32_bits_count(out):
    rows = 2**31 // 2048 + 70
    x, weight, bias = drawn(with_bias(out), rows, 16, dtype=bf16, grad=True)
    y = linear_act(x, weight, bias)
    plain = plain_linear("gelu_tanh")
    exact = [t.detach().double() for t in (weight, bias)]
    ends = (slice(None, 70), slice(rows // 2, rows // 2 + 70), slice(-70, None))
    for part in ends:
        assert_close(y[part], plain(x[part].double(), *exact), bf16)
    upstream = y.detach()
    dx, dweight, dbias = torch.autograd.grad(y, (x, weight, bias), upstream)
    wants = []
    for part, up in zip(x.detach().split(2**16), upstream.split(2**16), strict=True):
        leaves = [part.double().requires_grad_(), *(t.clone().requires_grad_() for t in exact)]
        wants.append(torch.autograd.grad(plain(*leaves), leaves, up.double()))
    for part in ends:
        assert_close(dx[part], torch.cat([want[0] for want in wants])[part], bf16, 3)
    assert_close(dweight, sum(want[1] for want in wants), bf16, 3)
    assert_close(dbias, sum(want[2] for want in wants), bf16, 3)


@GPU
@pytest.mark.parametrize("name", CALLS)
def test_both_directions_can_be_captured_in_a_graph(name):
    make, call, _ = CALLS[name]
    for shape in ((256, 128), (37, 33)):
        tensors = drawn(make, *shape, dtype=bf16, grad=True)
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
            tensors[0].normal_()
        graph.replay()
        for got, want in zip(captured, results(call, tensors), strict=True):
            assert torch.equal(got, want)
    with torch.no_grad():
        replay = replayed(call)
        assert torch.equal(replay(*tensors), call(*tensors))


@GPU
@pytest.mark.parametrize("dtype", checks.DTYPES, ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_the_bits_are_the_same_from_run_to_run(name, dtype):
    make, call, _ = CALLS[name]
    tensors = drawn(make, 4096, 512, dtype=dtype, grad=True)
    first = results(call, tensors)
    for _ in range(5):
        assert all(torch.equal(got, want) for got, want in zip(results(call, tensors), first, strict=True))


@GPU
@pytest.mark.parametrize("sizes", [(4096, 4096, 4096), (1001, 2049, 999)], ids=str)
def test_no_number_in_float32_is_worse_than_a_hundred_thousandth(sizes):
    """By tf32x3; a product in plain tf32 has errors of a thousandth."""
    rows, width, out = sizes
    x, weight, bias = drawn(with_bias(out), rows, width)
    exact = [t.double() for t in (x, weight, bias)]
    assert_close(matmul(x, weight), exact[0] @ exact[1].T)
    for activation in ACTIVATIONS:
        assert_close(linear_act(x, weight, bias, activation), plain_linear(activation)(*exact))


@TWO
@pytest.mark.parametrize("name", CALLS)
def test_tensors_on_a_gpu_that_is_not_the_current_one(name):
    make, call, plain = CALLS[name]
    tensors = [t.detach().to("cuda:1").requires_grad_() for t in drawn(make, 70, 24)]
    assert torch.cuda.current_device() == 0
    assert_same_results(call, plain, tensors)
