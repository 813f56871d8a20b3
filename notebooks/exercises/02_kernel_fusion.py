"""Exercises of lesson 2: what is right, what people write instead, and what helps them on."""

from labkit import kernels
from labkit.exercises.engine import Exercise, Mistake, RaceSpec, case_values, layer_with_backward
from labkit.exercises.properties import POINTWISE, READ_ONCE, column_mistakes
from labkit.measure.correctness import DTYPES
from labkit.workloads.mlp import CHAIN

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

gelu = partial(functional.gelu, approximate="tanh")

# ---- the chain in one kernel -------------------------------------------------------------------------------


def chain_inputs(rows: int, width: int) -> dict[str, Any]:
    """x (rows, width), bias (width,), other (rows, width)."""
    return {"x": torch.randn(rows, width), "bias": torch.randn(width), "other": torch.randn(rows, width)}


def chain_reference(x: Tensor, bias: Tensor, other: Tensor) -> Tensor:
    """gelu(x + bias) * other."""
    return gelu(x + bias) * other


chain = Exercise(
    "the chain in one kernel",
    "chain",
    reference=chain_reference,
    cases=((1, 1), (3, 5), (37, 33), (5, 640), (2, 3000)),
    inputs=chain_inputs,
    dtypes=DTYPES,
    properties=(*POINTWISE, READ_ONCE),
    right="One launch; x and other are read once, y is written once, and nothing comes between.",
    race=RaceSpec(
        CHAIN,
        {"eager": chain_reference, "torch.compile": chain_reference, "labkit": kernels.gelu_mul},
        # a width that wide loads like, and one that they do not
        ({"batch": 8192, "width": 3072}, {"batch": 8191, "width": 3073}),
    ),
    mistakes={
        **column_mistakes(chain_reference),
        "bias-after": Mistake(
            "Take one element with x = -1, bias = 1, other = 1. What does the formula give, what do you?",
            "The bias is added before GELU, inside its argument.",
            gives=lambda x, bias, other: (gelu(x) + bias) * other,
        ),
        "product-inside": Mistake(
            "Which of the three tensors goes through GELU, and which one only scales the result?",
            "GELU takes x + bias, and nothing else. Multiply by other afterwards.",
            gives=(
                lambda x, bias, other: gelu((x + bias) * other),
                lambda x, bias, other: gelu(x + bias) * gelu(other),
            ),
        ),
        "erf": Mistake(
            "The difference is small everywhere. Is your GELU the lesson's?",
            "GELU has an exact form, by erf, and one by tanh. `gelu(z)` is the second.",
            gives=lambda x, bias, other: functional.gelu(x + bias) * other,
            when=lambda calls: any(
                call.dtype is torch.float32 for call in calls
            ),  # in 16 bits it is the same
        ),
        "one-tensor-missing": Mistake(
            "Set one input after the other to zero: which one does your result not depend on as it should?",
            "Write the formula down, and cross out each name that your kernel has loaded.",
            gives=(
                lambda x, bias, other: gelu(x) * other,
                lambda x, bias, other: gelu(x + bias) + 0 * other,
                lambda x, bias, other: (x + bias) * other,
            ),
        ),
    },
)

# ---- its backward ------------------------------------------------------------------------------------------


def upstream_inputs(rows: int, width: int) -> dict[str, Any]:
    """dy, and the inputs of the forward pass."""
    return {"dy": torch.randn(rows, width), **chain_inputs(rows, width)}


def slope(z: Tensor) -> Tensor:
    """The derivative of GELU in its tanh form."""
    c, a = math.sqrt(2 / math.pi), 0.044715
    tanh = torch.tanh(c * (z + a * z**3))
    return 0.5 * (1 + tanh) + 0.5 * z * (1 - tanh**2) * c * (1 + 3 * a * z**2)


def chain_gradients(dy: Tensor, x: Tensor, bias: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """dx and dother."""
    z = x + bias
    return dy * other * slope(z), dy * gelu(z)


def in_either(change: Callable[..., tuple[Tensor, ...]]) -> tuple[Callable[..., Any], ...]:
    """The gradients when both of them, dx or dother are made of changed arguments."""

    def gives(*given: Tensor, of: tuple[bool, bool]) -> Any:
        return tuple(chain_gradients(*(change(*given) if of[i] else given))[i] for i in range(2))

    return tuple(partial(gives, of=of) for of in ((True, True), (True, False), (False, True)))


def layer_with(backward: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., Tensor]:
    """The chain as a layer whose backward is the answer, and PyTorch's sum for the bias."""

    def gradients(*given: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        dx, dother = backward(*given)
        return dx, dx.sum(0), dother

    return layer_with_backward(chain_reference)(gradients)


backward = Exercise(
    "the backward kernel",
    "chain_backward",
    reference=chain_gradients,
    cases=((1, 1), (3, 5), (37, 33), (5, 640), (2, 3000)),
    inputs=upstream_inputs,
    dtypes=DTYPES,
    properties=(*POINTWISE, READ_ONCE),
    right="One launch, three tensors in and two out; what the forward computed is computed again, not kept.",
    race=RaceSpec(
        CHAIN,
        {"eager": chain_reference, "torch.compile": chain_reference, "labkit": kernels.gelu_mul},
        ({"batch": 8192, "width": 3072},),
        direction="backward",
        as_layer=layer_with,
        roundings=4,
    ),
    mistakes={
        "swapped": Mistake(
            "Two gradients come back. Which one belongs to x, and which to other?",
            "dx first, as x is the first of the inputs.",
            gives=lambda dy, x, bias, other: chain_gradients(dy, x, bias, other)[::-1],
        ),
        "no-bias": Mistake(
            "With a bias of zero it is right. Where was the bias in the forward pass?",
            "z is x + bias here, too: compute it again before you take gelu(z) or its slope.",
            gives=in_either(lambda dy, x, bias, other: (dy, x, 0 * bias, other)),
        ),
        "no-upstream": Mistake(
            "What comes in from the layer above, and what does each gradient have to be multiplied by?",
            "The chain rule multiplies by dy, in both gradients.",
            gives=in_either(lambda dy, *given: (1 + 0 * dy, *given)),
        ),
        "no-other": Mistake(
            "y = gelu(z) * other. If other doubles, what becomes of the change that a small step in x makes?",
            "It doubles as well: other is a factor of dx.",
            gives=(
                lambda dy, x, bias, other: (dy * slope(x + bias), dy * gelu(x + bias)),
                lambda dy, x, bias, other: (dy * slope(x + bias), dy * gelu(x + bias) * other),
            ),
        ),
        "value-for-slope": Mistake(
            "How much does gelu(z) change for a small step in z? Is that gelu(z) itself?",
            "It is the derivative: gelu_slope(z).",
            gives=lambda dy, x, bias, other: (dy * other * gelu(x + bias), dy * gelu(x + bias)),
        ),
        "slope-in-both": Mistake(
            "dother: if other grows by a little, how much does y grow?",
            "By gelu(z) times that. The slope belongs to dx alone.",
            gives=lambda dy, x, bias, other: (dy * other * slope(x + bias), dy * slope(x + bias)),
        ),
    },
)

# ---- the next floor ----------------------------------------------------------------------------------------

DEVICES = ((4.3e12, 132, 1.98e9), (2.4e11, 58, 2.04e9), (1.5e12, 108, 1.41e9))
"""bytes/s, multiprocessors, cycles/s: roughly an H200, an L4, an A100."""


def floor_model(
    combine: Callable[[float, float], float] = max,
    *,
    tensors: int = 3,
    size: int = 2,
    functions: int = 2,
    unit: int = 16,
    bytes_each: bool = False,
    one_processor: bool = False,
    one_cycle: bool = False,
) -> Callable[..., float]:
    """The floor with other counts, or the two times combined in another way."""

    def microseconds(elements: int, gelus: int, bandwidth: float, processors: int, clock: float) -> float:
        memory = tensors * size * elements / bandwidth * (gelus if bytes_each else 1)
        rate = unit * (1 if one_processor else processors) * (1 if one_cycle else clock)
        return 1e6 * combine(memory, functions * gelus * elements / rate)

    return microseconds


floor = Exercise(
    "the next floor",
    "floor_us",
    reference=floor_model(),
    cases=tuple(
        (elements, gelus, *device)
        for elements in (2**20, 2**25)
        for gelus in (1, 4, 64)
        for device in DEVICES
    ),
    inputs=case_values("elements", "gelus", "bandwidth", "processors", "clock"),
    tolerance=0.005,
    right="Memory and arithmetic work at the same time, so the slower of the two is the floor.",
    mistakes={
        "other-floor": Mistake(
            "Let gelus be 0, then very large. What should the time be in each case, and what is yours?",
            "Memory and multiprocessors work at the same time, so what takes longer decides.",
            gives=(
                *(floor_model(lambda memory, special: memory + special), floor_model(min)),
                *(floor_model(lambda memory, _: memory), floor_model(lambda _, special: special)),
            ),
        ),
        "tensors": Mistake(
            "Which tensors does the fused chain read, which does it write? How many bytes has an element?",
            "x and other come in, y goes out, two bytes an element in bf16. The bias is a row.",
            gives=tuple(floor_model(tensors=count) for count in (1, 2, 4, 7))
            + tuple(floor_model(size=count) for count in (1, 4)),
        ),
        "bytes-for-each-gelu": Mistake(
            "Which bytes cross memory for the second GELU that did not cross for the first?",
            "None: between two GELUs all stays in registers. Only the operations are as many as gelus.",
            gives=floor_model(bytes_each=True),
        ),
        "one-cycle": Mistake(
            "16 for each multiprocessor in each cycle: how many is that on the device in a second?",
            "processors * 16 * clock special functions a second, with all multiprocessors at work.",
            gives=tuple(floor_model(**{each: True}) for each in ("one_processor", "one_cycle")),
        ),
        "special": Mistake(
            "What does a multiprocessor do 128 times a cycle, what 16 times, and which of it is in a GELU?",
            "Special functions are the fewer: an exponential and a division in each GELU of every element.",
            gives=(
                *(floor_model(functions=1), floor_model(functions=4)),
                *(floor_model(unit=128), floor_model(unit=4)),
            ),
        ),
        "unit": Mistake(
            "In which unit is your result, and which one is asked for?",
            "Bytes over bytes/s are seconds. A second has 1e6 microseconds.",
            gives=tuple(
                lambda *given, factor=factor: floor_model()(*given) * factor for factor in (1e-6, 1e-3, 1e3)
            ),
        ),
    },
)
