"""Exercises of lesson 2: what is right, what people write instead, and what helps them on."""

from labkit import kernels
from labkit.exercises.engine import Exercise, Mistake, RaceSpec, case_values, layer_with_backward
from labkit.exercises.properties import POINTWISE, READ_ONCE, column_mistakes
from labkit.measure.correctness import DTYPES
from labkit.workloads.mlp import CHAIN

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from operator import add
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


RIVALS = {"eager": chain_reference, "torch.compile": chain_reference, "labkit": kernels.gelu_mul}
# a width that wide loads like, and one that they do not
RACE = RaceSpec(CHAIN, RIVALS, ({"batch": 8192, "width": 3072}, {"batch": 8191, "width": 3073}))
CASES: dict[str, Any] = {"cases": ((1, 1), (3, 5), (37, 33)), "large": ((5, 640), (2, 3000))}
TRIED = CASES | {"dtypes": DTYPES, "properties": (*POINTWISE, READ_ONCE)}
"""How the chain and its backward are tried."""

chain = Exercise(
    "the chain in one kernel",
    "chain",
    reference=chain_reference,
    inputs=chain_inputs,
    **TRIED,
    right="One launch; x and other are read once, y is written once, and nothing comes between.",
    race=RACE,
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
            when=lambda calls: calls[0].dtype is torch.float32,  # in 16 bits it is the same
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


def slope(z: Tensor) -> Tensor:
    """The derivative of GELU in its tanh form."""
    leaf = z.detach().requires_grad_()
    return torch.autograd.grad(gelu(leaf).sum(), leaf)[0]


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
    inputs=lambda rows, width: {"dy": torch.randn(rows, width), **chain_inputs(rows, width)},
    **TRIED,
    right="One launch, three tensors in and two out; what the forward computed is computed again, not kept.",
    race=replace(RACE, sizes=RACE.sizes[:1], direction="backward", as_layer=layer_with, roundings=4),
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


COUNTS = {"tensors": 3, "size": 2, "gelus": 0, "functions": 2, "unit": 16, "processors": 1, "clock": 1}
"""Tensors, bytes of an element, and the power of gelus in the bytes; special functions of a GELU, those of a
multiprocessor in a cycle, and the powers of processors and clock in their rate."""


def floor_model(combine: Any = max, second: float = 1e6, **changes: int) -> Callable[..., float]:
    """The floor with other counts, the two times combined in another way, a second of other length."""
    n = COUNTS | changes

    def microseconds(elements: int, gelus: int, bandwidth: float, processors: int, clock: float) -> float:
        memory = n["tensors"] * n["size"] * elements * gelus ** n["gelus"] / bandwidth
        rate = n["unit"] * processors ** n["processors"] * clock ** n["clock"]
        return float(second * combine(memory, n["functions"] * gelus * elements / rate))

    return microseconds


def floors(**others: Any) -> tuple[Callable[..., float], ...]:
    """The floor with each of these other values, one at a time."""
    return tuple(floor_model(**{name: each}) for name, values in others.items() for each in values)


floor = Exercise(
    "the next floor",
    "floor_us",
    reference=floor_model(),
    cases=tuple((*two, *device) for *two, device in product((2**20, 2**25), (1, 4, 64), DEVICES)),
    inputs=case_values("elements", "gelus", "bandwidth", "processors", "clock"),
    tolerance=0.005,
    right="Memory and arithmetic work at the same time, so the slower of the two is the floor.",
    mistakes={
        "other-floor": Mistake(
            "Let gelus be 0, then very large. What should the time be in each case, and what is yours?",
            "Memory and multiprocessors work at the same time, so what takes longer decides.",
            gives=floors(combine=(add, min, lambda memory, _: memory, lambda _, special: special)),
        ),
        "tensors": Mistake(
            "Which tensors does the fused chain read, which does it write? How many bytes has an element?",
            "x and other come in, y goes out, two bytes an element in bf16. The bias is a row.",
            gives=floors(tensors=(1, 2, 4, 7), size=(1, 4)),
        ),
        "bytes-for-each-gelu": Mistake(
            "Which bytes cross memory for the second GELU that did not cross for the first?",
            "None: between two GELUs all stays in registers. Only the operations are as many as gelus.",
            gives=floor_model(gelus=1),
        ),
        "one-cycle": Mistake(
            "16 for each multiprocessor in each cycle: how many is that on the device in a second?",
            "processors * 16 * clock special functions a second, with all multiprocessors at work.",
            gives=floors(processors=(0,), clock=(0,)),
        ),
        "special": Mistake(
            "What does a multiprocessor do 128 times a cycle, what 16 times, and which of it is in a GELU?",
            "Special functions are the fewer: an exponential and a division in each GELU of every element.",
            gives=floors(functions=(1, 4), unit=(4, 128)),
        ),
        "unit": Mistake(
            "In which unit is your result, and which one is asked for?",
            "Bytes over bytes/s are seconds. A second has 1e6 microseconds.",
            gives=floors(second=(1.0, 1e3, 1e9)),
        ),
    },
)
