"""What `labkit bench` measures: a function for each suite makes its parts, of contenders, sizes and ranges.

Contenders whose name begins with `labkit` are ours. Those of other packages name it as their ``peer``.
"""

import math
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.functional import linear

from labkit import kernels
from labkit.bench.gru_suite import gru
from labkit.bench.suite_part import Ranges, SuitePart
from labkit.gpu import randn
from labkit.kernels.graphs import release_cublas_workspaces
from labkit.measure.contender import Contender, Shape, Work
from labkit.workloads import elementwise, mlp, network, peers, published, recurrent, stack
from labkit.workloads import grouped as many_linears

BOTH, TRAINING = ("forward", "backward"), ("backward", "forward_backward")
FLOAT32, BOTH_DTYPES = ("float32",), ("bfloat16", "float32")
POINTWISE: Ranges = {"batch": (1, 2**20, 1), "width": (1, 16384, 1)}
MANY_ROWS, ALIGNED, UNALIGNED = (64, 16384, 1), (64, 8192, 8), (64, 8192, 1)


def _shapes(axes: str, *sizes: tuple[int, ...]) -> tuple[Shape, ...]:
    return tuple(dict(zip(axes.split(), each, strict=True)) for each in sizes)


def _contenders(work: Work, plain: Callable[..., Any], ours: Callable[..., Any]) -> tuple[Contender, ...]:
    """Plain PyTorch, the same compiled, and ours."""
    compiled = Contender("torch.compile", plain, work, compiled=True)
    return Contender("eager", plain, work), compiled, Contender("labkit", ours, work)


# ---- pointwise layers and products -------------------------------------------------------------------------


def _addcmul(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return torch.addcmul(bias, x, weight)


def affine() -> list[SuitePart]:
    """x*w+b; its fixed sizes are a little more than 96 MiB, which no last cache holds."""
    work = elementwise.AFFINE
    who = (*_contenders(work, elementwise.affine, kernels.affine), Contender("addcmul", _addcmul, work))
    float32, bfloat16 = (
        _shapes("batch width", *((size // width + 1, width) for width in (160, 161, 1024, 4096)))
        for size in (24 * 2**20, 48 * 2**20)
    )
    return [
        SuitePart(who, float32, dtypes=FLOAT32, directions=BOTH),
        SuitePart(who, bfloat16, directions=BOTH, ranges=POINTWISE),
    ]


def chain() -> list[SuitePart]:
    """gelu(x + bias) * other."""
    who = _contenders(mlp.CHAIN, mlp.chain, kernels.gelu_mul)
    return [
        SuitePart(who, _shapes("batch width", (8192, 3072), (32768, 4096)), directions=BOTH, ranges=POINTWISE)
    ]


def matmul() -> list[SuitePart]:
    """x Wᵀ beside cuBLAS; drawn are sizes that are multiples of 8, any sizes, and few rows."""
    who = (Contender("cuBLAS", linear, mlp.MATMUL), Contender("labkit", kernels.matmul, mlp.MATMUL))
    fixed = _shapes("batch width out", (4096, 4096, 4096), (8192, 8192, 8192), (8192, 3072, 768))
    aligned: Ranges = {"batch": MANY_ROWS, "width": ALIGNED, "out": ALIGNED}
    return [
        SuitePart(who, fixed, ranges=aligned),
        SuitePart(who, fixed[:1], dtypes=FLOAT32),
        SuitePart(who, (), "any", ranges=aligned | {"width": UNALIGNED, "out": UNALIGNED}),
        SuitePart(who, (), "few_rows", ranges=aligned | {"batch": (1, 64, 1)}),
    ]


def _vendor(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """cuBLAS with its own epilogue, forward only."""
    result: Tensor = torch._addmm_activation(bias, x, weight.T, use_gelu=True)
    return result


LAYERS: Ranges = {"batch": MANY_ROWS, "width": ALIGNED, "hidden": ALIGNED}


def linear_gelu() -> list[SuitePart]:
    """A Linear with GELU, forward and backward."""
    who = _contenders(mlp.LINEAR_GELU, mlp.linear_gelu, kernels.linear_act)
    vendor = Contender("_addmm_activation", _vendor, mlp.LINEAR_GELU)
    sizes = (32768, 512, 2048), (8192, 768, 3072), (8192, 2048, 8192), (4096, 4096, 4096)
    fixed = _shapes("batch width hidden", *sizes)
    return [
        SuitePart((*who, vendor), fixed, ranges=LAYERS),
        SuitePart(who, fixed, directions=("backward",), ranges=LAYERS),
    ]


def _stacked_mlp(x: Tensor, w_gate_up: Tensor, w_down: Tensor) -> Tensor:
    gate, up = linear(x, w_gate_up.view(-1, w_gate_up.shape[-1])).chunk(2, 1)
    return linear(mlp.gelu(gate) * up, w_down)


def geglu() -> list[SuitePart]:
    """The GeGLU MLP forward, and both passes in one; at two sizes its backward alone, which Liger's, running
    once for each forward, refuses."""
    eager, compiled, _ = _contenders(mlp.GEGLU_APART, mlp.geglu_apart, kernels.geglu_mlp)
    who = (
        eager,
        compiled,
        Contender("stacked, compiled", _stacked_mlp, mlp.GEGLU, compiled=True),
        Contender("Liger", peers.liger_geglu, mlp.GEGLU_APART, peer="liger-kernel"),
        Contender("labkit", kernels.geglu_mlp, mlp.GEGLU),
    )
    sizes = (4096, 768, 3072), (8192, 768, 3072), (32768, 512, 2048), (8192, 2048, 8192), (8192, 4096, 11008)
    fixed = _shapes("batch width hidden", *sizes)
    return [
        SuitePart(who, fixed, directions=("forward", "forward_backward"), ranges=LAYERS),
        SuitePart(who, fixed[1:4:2], directions=("backward",)),
    ]


# ---- many small Linears ------------------------------------------------------------------------------------


def _rectangular(work: Work, keep: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> Work:
    """The work for groups that need not be square: ``out`` features, the width where left out.

    ``keep`` makes of weight (G, D_in, D_out) and bias (G, D_out) what the work's contenders keep.
    """

    def inputs(shape: Shape) -> tuple[Tensor, ...]:
        groups, width, out = shape["groups"], shape["width"], shape.get("out", shape["width"])
        weight = randn(groups, width, out, scale=width**-0.5)
        return randn(shape["batch"], groups * width), *keep(weight, randn(groups, out))

    return replace(
        work,
        inputs=inputs,
        min_bytes=lambda shape, *how: shape["groups"] * mlp.MATMUL.min_bytes(shape, *how),
        flops=lambda shape, way: shape["groups"] * mlp.MATMUL.flops(shape, way),
    )


GROUPED = _rectangular(many_linears.GROUPED, lambda weight, bias: (weight, bias))
CONV = _rectangular(
    many_linears.GROUPED_CONV, lambda weight, bias: (weight.mT.flatten(0, 1)[..., None], bias.flatten())
)


def _by_group(x: Tensor, groups: int) -> Tensor:
    return x.view(len(x), groups, -1).transpose(0, 1)


def _conv(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Data (B, C, T)."""
    return functional.conv1d(x, weight, bias, groups=x.shape[1] // weight.shape[1])


def _conv_of_rows(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """The rows as one long sequence, channels first."""
    return _conv(x.T[None], weight, bias)[0].T.contiguous()


def _conv_of_ones(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Each row as a sequence of length 1."""
    return _conv(x[..., None], weight, bias)[..., 0]


def _einsum_of_channels(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    y = torch.einsum("bgit,gio->bgot", x.unflatten(1, weight.shape[:2]), weight) + bias[..., None]
    return y.flatten(1, 2)


def _bmm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Written where it belongs, without a copy; out= has no gradient."""
    y = x.new_empty(len(x), bias.numel())
    torch.bmm(_by_group(x, len(weight)), weight, out=_by_group(y, len(weight)))
    return y.add_(bias.flatten())


def _grouped_mm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """PyTorch's own, for mixtures of experts; bfloat16."""
    y: Tensor = functional.grouped_mm(_by_group(x, len(weight)), weight)
    return (y + bias[:, None]).transpose(0, 1).flatten(1)


def _of_channels(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return kernels.grouped_linear(x.mT, weight, bias).mT


def grouped() -> list[SuitePart]:
    """The strategies of PyTorch that are near the front; gradients; data (B, C, T)."""
    trained = (
        Contender("Conv1d", _conv_of_rows, CONV),
        Contender("Conv1d, length 1", _conv_of_ones, CONV),
        *_contenders(GROUPED, many_linears.grouped_reference, kernels.grouped_linear),
    )
    who = (
        *trained,
        Contender("bmm, out=", _bmm, GROUPED),
        Contender("grouped_mm", _grouped_mm, GROUPED, dtypes=("bfloat16",)),
    )
    channels = (
        Contender("Conv1d", _conv, many_linears.CHANNELS_CONV),
        *_contenders(many_linears.CHANNELS, _einsum_of_channels, _of_channels),
    )
    forum = tuple((4096, 100, width) for width in (16, 32, 64, 100, 128))
    fixed = _shapes("batch groups width", *forum, (16384, 64, 64), (16384, 16, 256))
    side = (8, 256, 1)
    ranges: Ranges = {"batch": (64, 65536, 1), "groups": (2, 256, 1), "width": side, "out": side}
    return [
        SuitePart(who, fixed, ranges=ranges),
        SuitePart(who, fixed[:3], dtypes=FLOAT32),
        SuitePart(trained, fixed[1:5], directions=TRAINING),
        SuitePart(channels, fixed[2:4], "channels"),
        SuitePart(trained, directions=("backward",), ranges=ranges),
    ]


# ---- graphs, and a small network ---------------------------------------------------------------------------


def _built_for_inputs(make: Callable[..., Any], call: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The call, made anew for the inputs it is first called with by ``make``, which gets it as a function of
    x alone, and x."""
    made: list[Any] = []  # inputs, their weights, what was made; a dict would count as the call's code

    def replay(x: Tensor, *weights: Tensor) -> Tensor:
        if not made or made[0] is not x:
            made[:] = x, weights, make(lambda x: call(x, *weights), x)
        return cast(Tensor, made[2](x))

    return replay


def _step(call: Callable[..., Tensor], x: Tensor) -> Callable[..., Any]:
    return kernels.GraphedStep(call)


def _compiled_step(call: Callable[..., Tensor], x: Tensor) -> Callable[..., Any]:
    return kernels.GraphedStep(torch.compile(call, dynamic=False))


def _graphed_callable(call: Callable[..., Tensor], x: Tensor) -> Callable[..., Any]:
    release_cublas_workspaces()
    return cast(Callable[..., Any], torch.cuda.make_graphed_callables(call, (x.clone(),)))


def _fused_stack(x: Tensor, weight: Tensor, bias: Tensor, gain: Tensor) -> Tensor:
    """The stack with bias, norm and GELU in one kernel."""
    for matrix, shift, scale in zip(weight, bias, gain, strict=True):
        x = kernels.norm_gelu(linear(x, matrix), shift, scale)
    return x


def graphs() -> list[SuitePart]:
    """Eight blocks: device time without launches; a step as Python sees it; forward with backward."""
    work, plain, one_launch = stack.STACK, stack.stack, kernels.fused_mlp(99)
    eager, compiled, fused = _contenders(work, plain, _fused_stack)
    launched = {"labkit, a launch a block": kernels.fused_mlp(1), "labkit, one launch": one_launch}
    replayed = {
        "make_graphed_callables": _built_for_inputs(_graphed_callable, plain),
        "labkit, GraphedStep": _built_for_inputs(_step, plain),
        "labkit, GraphedStep, compiled": _built_for_inputs(_compiled_step, plain),
        "labkit, GraphedStep, one launch": _built_for_inputs(_step, one_launch),
    }
    alone = (eager, compiled, *(Contender(name, call, work) for name, call in launched.items()))
    in_graphs = (
        Contender("reduce-overhead", plain, work, compiled=True, mode="reduce-overhead"),
        *(Contender(name, call, work) for name, call in replayed.items()),
    )
    fixed = _shapes("batch width depth", (256, 64, 8), (256, 128, 8), (256, 256, 8), (4096, 256, 8))
    return [
        SuitePart(alone, fixed, cache="warm"),
        SuitePart((*alone, *in_graphs), fixed, "host", clocks=("host",), cache="warm"),
        SuitePart((eager, compiled, fused), fixed, "training", directions=TRAINING, cache="warm"),
    ]


def _cell_of_operators(gates: Tensor, gain: Tensor, groups: int) -> Tensor:
    logit, candidate = network.split_gates(gates, groups)
    z = logit.sigmoid()
    return kernels.rms_recurrence(1 - z, kernels.min_gru(z, candidate), gain)


def _three_kernels(x: Tensor, *weights: Tensor) -> Tensor:
    gates = kernels.gated_heads(x, *weights[:5])
    return kernels.mlp_outputs(kernels.gated_cell(gates, weights[5], len(weights[3])), *weights[6:])


def ledger() -> list[SuitePart]:
    """The network of lesson 9: device time; a pass as Python sees it; forward with backward."""
    work, plain = network.NETWORK, network.network
    operators = network.assemble(cell=_cell_of_operators)
    apart = network.assemble(kernels.grouped_linear, kernels.rms_norm, kernels.gated_cell, kernels.geglu_mlp)
    three = (
        Contender("eager", plain, work),
        Contender("compiled, recurrences as operators", operators, work, compiled=True),
        Contender("labkit", _three_kernels, work),
    )
    in_graphs = (
        Contender("eager, in a graph", _built_for_inputs(_step, plain), work),
        Contender("reduce-overhead", operators, work, compiled=True, mode="reduce-overhead"),
        Contender("labkit, in a graph", _built_for_inputs(_step, _three_kernels), work),
    )
    fixed = _shapes("batch time width", (1024, 64, 128), (64, 64, 128))
    four = (*three, Contender("labkit, eight kernels", apart, work))
    return [
        SuitePart(four, fixed, dtypes=BOTH_DTYPES, cache="warm"),
        SuitePart((*three, *in_graphs), fixed, "host", clocks=("host",), cache="warm"),
        SuitePart(three, fixed[:1], "training", directions=TRAINING, cache="warm"),
    ]


# ---- norms and recurrences ---------------------------------------------------------------------------------

PUBLISHED_THREE = _shapes("batch time width", (512, 64, 128), (512, 64, 256), (1024, 64, 512))
"""The published shapes at which all contenders are measured."""
RECURRENCE_SHAPES = (*PUBLISHED_THREE[1:], *_shapes("batch time width", (64, 2048, 256)))
ANY_SEQUENCES: Ranges = {"batch": (1, 4096, 1), "time": (1, 8192, 1), "width": (1, 8192, 1)}
LONG_SEQUENCES: Ranges = {"batch": (1, 8, 1), "time": (2**14, 2**20, 1), "width": (1, 512, 1)}
LOOP_SIZES = {"time": range(1, 257)}
"""Steps that a loop of PyTorch takes."""


def _published_except(left_out: Sequence[Shape]) -> tuple[Shape, ...]:
    """The published shapes that are not measured with all contenders already."""
    return tuple(shape for shape in published.rms_norm_shapes() if shape not in left_out)


def _scan(a: Tensor, b: Tensor) -> Tensor:
    """linear_recurrence of a and b (B, T, H), in about sqrt(T) blocks side by side, then from block to block.

    A reference that took a million steps one by one would take most of a run.
    """
    steps = b.shape[1]
    block = math.isqrt(steps - 1) + 1
    spare = (0, 0, 0, -steps % block)
    a = functional.pad(a, spare, value=1.0).unflatten(1, (-1, block))  # (B, blocks, block, H)
    b = functional.pad(b, spare).unflatten(1, (-1, block))
    # the states if each block began with zeros, and what is left in them of the state before their block
    inside = recurrent.linear_recurrence(a.flatten(0, 1), b.flatten(0, 1)).view_as(b)
    left = a.cumprod(2)
    ends = recurrent.linear_recurrence(left[:, :, -1], inside[:, :, -1])  # the state after each block
    before = functional.pad(ends, (0, 0, 1, -1)).unsqueeze(2)  # (B, blocks, 1, H)
    return (inside + left * before).flatten(1, 2)[:, :steps]


def _log_scan(log_a: Tensor, b: Tensor) -> Tensor:
    return _scan(log_a.exp(), b)


def _gru_scan(z: Tensor, candidate: Tensor) -> Tensor:
    return _scan(1 - z, z * candidate)


def rms_norm() -> list[SuitePart]:
    """At all published shapes in float32, at three of them in bfloat16 too."""
    work = recurrent.RMS_NORM
    peer = Contender("Liger", peers.liger_rms_norm, work, peer="liger-kernel")
    who = (*_contenders(work, recurrent.rms_norm, kernels.rms_norm), peer)
    return [
        SuitePart(who, PUBLISHED_THREE, "", BOTH_DTYPES, BOTH, ranges=ANY_SEQUENCES),
        SuitePart(who, _published_except(PUBLISHED_THREE), "", FLOAT32, BOTH),
    ]


def linear_recurrence() -> list[SuitePart]:
    """Beside a loop and other packages' scans; ours and fla, step by step, at the published shapes."""
    work = replace(recurrent.LINEAR_RECURRENCE, reference=_scan)
    log_work = replace(recurrent.LOG_RECURRENCE, reference=_log_scan)
    ours = Contender("labkit", kernels.linear_recurrence, work)
    loop = Contender("eager loop", recurrent.linear_recurrence, work, sizes=LOOP_SIZES)
    fla = Contender("fla, step by step", peers.fla_recurrence, log_work, peer="fla-core", dtypes=FLOAT32)
    chunks = replace(fla, name="fla, in chunks", call=peers.fla_chunked_recurrence)
    scan = Contender(
        "accelerated-scan", peers.accelerated_scan, work, peer="accelerated-scan", dtypes=FLOAT32
    )
    whole_blocks = replace(scan, sizes={"time": (peers.SCAN_STEPS,)})
    return [
        SuitePart((loop, fla, chunks, whole_blocks, ours), RECURRENCE_SHAPES, "", FLOAT32, BOTH),
        SuitePart((ours,), RECURRENCE_SHAPES, directions=BOTH),
        SuitePart((fla, ours), _published_except(RECURRENCE_SHAPES), "", FLOAT32, BOTH),
        SuitePart((loop, scan, ours, fla), directions=BOTH, ranges=ANY_SEQUENCES),
        SuitePart((scan, ours, chunks), (), "few_long", directions=BOTH, ranges=LONG_SEQUENCES),
    ]


def min_gru() -> list[SuitePart]:
    """A minimal GRU beside a loop of PyTorch."""
    work = replace(recurrent.MIN_GRU, reference=_gru_scan)
    loop = Contender("eager loop", recurrent.min_gru, work, sizes=LOOP_SIZES)
    ours = Contender("labkit", kernels.min_gru, work)
    return [
        SuitePart((loop, ours), RECURRENCE_SHAPES, "", FLOAT32, BOTH, ranges=ANY_SEQUENCES),
        SuitePart((ours,), (), "few_long", directions=BOTH, ranges=LONG_SEQUENCES),
    ]


def rms_recurrence() -> list[SuitePart]:
    """Beside a loop of PyTorch, and one that torch.compile unrolls; ours at the published shapes."""
    work = recurrent.RMS_RECURRENCE
    ours = Contender("labkit", kernels.rms_recurrence, work)
    loop = Contender("eager loop", recurrent.rms_recurrence, work, dtypes=FLOAT32, sizes=LOOP_SIZES)
    # each step more takes longer to compile
    unrolled = replace(loop, name="compiled loop", compiled=True, sizes={"time": (16,)})
    timed = (*PUBLISHED_THREE, *_shapes("batch time width", (64, 64, 512), (1024, 16, 512)))
    ranges: Ranges = {"batch": (256, 16384, 1), "time": (1, 512, 1), "width": (1, 4096, 1)}
    few = ranges | {"batch": (64, 64, 1), "time": (1, 2048, 1)}
    return [
        SuitePart((loop, unrolled, ours), timed, "", BOTH_DTYPES, BOTH),
        SuitePart((ours,), _published_except(timed), "", FLOAT32, BOTH),
        SuitePart((loop, ours), directions=BOTH, ranges=ranges),
        SuitePart((loop, ours), (), "batch_64", directions=BOTH, ranges=few),
    ]


# ---- the table ---------------------------------------------------------------------------------------------

SUITES: dict[str, Callable[[], list[SuitePart]]] = {
    made.__name__: made
    for made in (
        affine, chain, matmul, linear_gelu, geglu, grouped, graphs,
        rms_norm, linear_recurrence, min_gru, rms_recurrence, gru, ledger,
    )
}  # fmt: skip
"""The suites by name, in the order of the lessons; each gives its parts, and measures nothing."""
WITHOUT_RANGES = ("graphs", "ledger")


def chosen(names: Iterable[str], *, drawn: bool = False) -> list[str]:
    """The named suites, each once, in their order; where none is named all, or all that can be ``drawn``.

    ValueError for a name that is no suite.
    """
    wanted = set(names) or set(SUITES).difference(WITHOUT_RANGES if drawn else ())
    unknown = sorted(wanted - set(SUITES))
    if unknown:
        raise ValueError(f"no suite is called {unknown[0]!r}; there are: {', '.join(SUITES)}")
    return [name for name in SUITES if name in wanted]


def parts(name: str, *, peers: bool) -> list[SuitePart]:
    """A suite at its fixed sizes; with ``peers`` also the contenders from other packages."""
    return [part for part in _named("bench", name, peers) if part.shapes]


def random_parts(name: str, *, peers: bool, count: int, seed: int, small: bool = False) -> list[SuitePart]:
    """A suite at ``count`` sizes drawn from the ranges of each of its parts, the same for the same seed.

    The work moves 16 MB or more, with ``small`` less. ValueError for a suite without ranges, or
    where they hold too few such sizes.
    """
    ranged = [part for part in _named("random", name, peers) if part.ranges]
    if not ranged:
        raise ValueError(f"the suite {name!r} has no ranges to draw sizes from")
    made = []
    for number, part in enumerate(ranged):
        rng = np.random.default_rng([seed, zlib.crc32(part.suite.encode()), number])
        suite = f"{part.suite}/small" if small else part.suite
        made += replace(part, suite=suite).drawn(count, rng, small=small)
    return made


def _named(kind: str, name: str, peers: bool) -> list[SuitePart]:
    """All parts of a suite, by their whole names, with the contenders that are wanted."""
    return [
        replace(
            part,
            suite="/".join(filter(None, (kind, name, part.suite))),
            contenders=tuple(one for one in part.contenders if peers or one.peer is None),
        )
        for part in SUITES[name]()
    ]
