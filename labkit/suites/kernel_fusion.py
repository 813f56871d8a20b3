"""The suites of lesson 2: a matrix product, a linear layer with GELU, a pointwise chain; a GeGLU MLP."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from labkit import lessons, peers
from labkit import mlp_works as work
from labkit.bench_plan import Part
from labkit.kernels.geglu import fused_gate_up, geglu_mlp
from labkit.kernels.linear import linear_act, matmul
from labkit.sweeps import Contender, Shape

LAYERS = ((32768, 512, 2048), (8192, 768, 3072), (8192, 2048, 8192), (4096, 4096, 4096))
MLPS = ((4096, 768, 3072), (8192, 768, 3072), (32768, 512, 2048), (8192, 2048, 8192), (8192, 4096, 11008))


def _sized(sizes: tuple[tuple[int, int, int], ...]) -> tuple[Shape, ...]:
    return tuple(dict(zip(("batch", "width", "hidden"), each, strict=True)) for each in sizes)


def linear() -> list[Part]:
    """The product beside cuBLAS, the layer with its activation forward and backward, the chain forward."""
    lesson = lessons.load("02_kernel_fusion")
    products = (
        Contender("cuBLAS", functional.linear, work.MATMUL),
        Contender("labkit", matmul, work.MATMUL),
    )
    squares = tuple({"batch": side, "width": side} for side in (4096, 8192))
    layers = (
        Contender("eager", work.linear_gelu, work.LINEAR_GELU),
        Contender("torch.compile", work.linear_gelu, work.LINEAR_GELU, compiled=True),
        Contender("labkit", linear_act, work.LINEAR_GELU),
    )
    vendor = Contender("_addmm_activation", _vendor, work.LINEAR_GELU)
    chains = (
        Contender("eager", work.chain, work.CHAIN),
        Contender("torch.compile", work.chain, work.CHAIN, compiled=True),
        Contender("labkit", lesson.fused_chain, work.CHAIN),
    )
    return [
        Part(products, (*squares, {"batch": 8192, "width": 3072, "out": 768}), "matmul"),
        Part(products, squares[:1], "matmul", dtypes=("float32",)),
        Part((vendor, *layers), _sized(LAYERS), "linear_gelu"),
        Part(layers, _sized(LAYERS), "linear_gelu", directions=("backward",)),
        Part(chains, ({"batch": 8192, "width": 3072}, {"batch": 32768, "width": 4096}), "chain"),
    ]


def geglu() -> list[Part]:
    """Gate and up forward; the MLP forward, and both passes in one; at two sizes its backward alone, which
    Liger's, running once for each forward, refuses."""
    halves = (
        Contender("eager", work.gate_up, work.GATE_UP),
        Contender("torch.compile", work.gate_up, work.GATE_UP, compiled=True),
        Contender("one GEMM, compiled rest", _stacked_gate_up, work.GATE_UP, compiled=True),
        Contender("labkit", _first_of(fused_gate_up), work.GATE_UP),
    )
    whole = (
        Contender("eager", work.geglu_apart, work.GEGLU_APART),
        Contender("torch.compile", work.geglu_apart, work.GEGLU_APART, compiled=True),
        Contender("stacked, compiled", _stacked_mlp, work.GEGLU, compiled=True),
        Contender("Liger", peers.liger_geglu, work.GEGLU_APART, peer="liger-kernel"),
        Contender("labkit", geglu_mlp, work.GEGLU),
    )
    return [
        Part(halves, _sized(MLPS), "gate_up"),
        Part(whole, _sized(MLPS), "mlp", directions=("forward", "forward_backward")),
        Part(whole, _sized((MLPS[1], MLPS[3])), "mlp", directions=("backward",)),
    ]


def _vendor(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """cuBLAS with its own epilogue, forward only."""
    result: Tensor = torch._addmm_activation(bias, x, weight.T, use_gelu=True)
    return result


def _stacked_gate_up(x: Tensor, w_gate_up: Tensor) -> Tensor:
    gate, up = functional.linear(x, w_gate_up.view(-1, w_gate_up.shape[-1])).chunk(2, 1)
    return work.gelu(gate) * up


def _stacked_mlp(x: Tensor, w_gate_up: Tensor, w_down: Tensor) -> Tensor:
    return functional.linear(_stacked_gate_up(x, w_gate_up), w_down)


def _first_of(call: Callable[..., tuple[Any, ...]]) -> Callable[..., Tensor]:
    """The same call, of whose results the first counts."""

    def first(*inputs: Tensor) -> Tensor:
        result: Tensor = call(*inputs)[0]
        return result

    return first
