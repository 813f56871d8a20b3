"""Tasks of lesson 18: what is right, what people write instead, and what helps them on."""

from labkit import work
from labkit.exercises.engine import Exercise, Mistake, RaceSpec, case_values
from labkit.exercises.properties import KERNEL, KERNEL_CASES, POINTWISE, READ_ONCE

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

# ---- reading a ledger --------------------------------------------------------------------------------------

Entry = dict[str, Any]


def parts_of(device: float, traffic: float, arithmetic: float) -> dict[str, float]:
    """The three parts of the device's time."""
    return {"traffic": traffic, "arithmetic": arithmetic, "unexplained": device - traffic - arithmetic}


def right_choice(host: float, device: float, traffic: float, arithmetic: float) -> Entry:
    """What a ledger says."""
    if host >= device:
        return {"entry": "host", "wall": device}
    parts = parts_of(device, traffic, arithmetic)
    entry = max(parts, key=lambda name: parts[name])
    return {"entry": entry, "wall": max(host, device - parts[entry])}


def largest_of_all(host: float, device: float, traffic: float, arithmetic: float) -> Entry:
    """The host beside the parts of the device."""
    entries = {"host": host} | parts_of(device, traffic, arithmetic)
    entry = max(entries, key=lambda name: entries[name])
    return {"entry": entry, "wall": device if entry == "host" else max(host, device - entries[entry])}


def without_part(host_added: bool, host: float, device: float, traffic: float, arithmetic: float) -> Entry:
    """What is left of the device without its largest part: the host is forgotten, or added."""
    chosen = right_choice(host, device, traffic, arithmetic)
    if chosen["entry"] == "host":
        return chosen
    rest = device - parts_of(device, traffic, arithmetic)[chosen["entry"]]
    return chosen | {"wall": rest + host if host_added else rest}


def device_first(host: float, device: float, traffic: float, arithmetic: float) -> Entry:
    """The host is never asked."""
    chosen = right_choice(0.0, device, traffic, arithmetic)
    return chosen | {"wall": max(host, chosen["wall"])}


def two_parts(host: float, device: float, traffic: float, arithmetic: float) -> Entry:
    """Nothing is unexplained."""
    if host >= device:
        return {"entry": "host", "wall": device}
    parts = {"traffic": traffic, "arithmetic": arithmetic}
    entry = max(parts, key=lambda name: parts[name])
    return {"entry": entry, "wall": max(host, device - parts[entry])}


choose = Exercise(
    "reading a ledger",
    "choose",
    reference=right_choice,
    cases=(
        *((100.0, 40.0, 10.0, 5.0), (30.0, 200.0, 150.0, 10.0), (30.0, 200.0, 20.0, 130.0)),
        *((30.0, 200.0, 40.0, 30.0), (90.0, 100.0, 30.0, 20.0), (150.0, 200.0, 120.0, 30.0)),
        *((80.0, 100.0, 60.0, 10.0), (120.0, 110.0, 90.0, 5.0), (10.0, 200.0, 90.0, 60.0)),
    ),
    inputs=case_values("host", "device", "traffic", "arithmetic"),
    right="A ledger names the entry, and says how much a tool for it can bring at most.",
    mistakes={
        "device-first": Mistake(
            "The host takes 100 µs and the device 40. What does the wall become if the device takes none?",
            "Ask first which of the two is longer. Where it is the host, nothing on the device counts.",
            gives=device_first,
        ),
        "largest-of-all": Mistake(
            "Host 90 µs, device 100. What is the wall, and what does it become without the host?",
            "The host is no part of the device's time: first the longer of the two, then its largest part.",
            gives=largest_of_all,
        ),
        "host-forgotten": Mistake(
            "Host 150 µs, device 200, traffic 120. What is the wall when the traffic is gone?",
            "The host still takes its time: the wall is the longer one, whatever became of the device.",
            gives=partial(without_part, False),
        ),
        "no-rest": Mistake(
            "Traffic 40 µs and arithmetic 30, of 200 on the device. How much is neither?",
            "130 µs, and that is an entry, too: `unexplained`.",
            gives=two_parts,
        ),
    },
)

# ---- two recurrences in one loop ---------------------------------------------------------------------------

Step = Callable[..., tuple[Tensor, Tensor]]


def gate_inputs(B: int, T: int, H: int, scale: float = 1.0) -> dict[str, Tensor]:
    """gates (B, T, 2 H): logits, most of them such that old states count for some steps, and candidates."""
    return {"gates": torch.cat((scale * (torch.randn(B, T, H) - 0.5), torch.randn(B, T, H)), -1)}


def right_step(s: Tensor, u: Tensor, z: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    """Both states after a step."""
    s = (1 - z) * s + z * c
    return s, (1 - z) * u + z * s


def states(step: Step = right_step, keep: int = 1, curve: Any = torch.sigmoid) -> Callable[..., Tensor]:
    """One of the two states at all steps, (B, T, H), where a step makes both."""

    def gives(gates: Tensor) -> Tensor:
        logits, candidates = gates.chunk(2, -1)
        both = (torch.zeros_like(logits[:, 0]),) * 2
        found = []
        for z, c in zip(curve(logits).unbind(1), candidates.unbind(1), strict=True):
            both = step(*both, z, c)
            found.append(both[keep])
        return torch.stack(found, 1)

    return gives


def old_first(s: Tensor, u: Tensor, z: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    """A step whose second state takes the first as it was before."""
    return (1 - z) * s + z * c, (1 - z) * u + z * s


def rows_of(width: Callable[[int], int]) -> Callable[..., Tensor]:
    """The states where steps of gates are taken to begin ``width(H)`` numbers apart."""

    def gives(gates: Tensor) -> Tensor:
        H = gates.shape[2] // 2
        steps = gates.flatten().unfold(0, 2 * H, width(H))[: gates[..., 0].numel()]
        return states()(steps.reshape(gates.shape))

    return gives


def layer_of(answer: Callable[..., Any]) -> Callable[..., Tensor]:
    """What is raced: the cell's network, which calls the answer."""
    if "fused" not in answer.__globals__:
        raise ValueError("fused: the cell has to define it, below twice")
    return answer.__globals__["fused"]  # type: ignore[no-any-return]


twice = Exercise(
    "two recurrences in one loop",
    "twice",
    reference=states(),
    cases=((1, 1, 1), (2, 1, 5), (2, 5, 20)),
    large=((1, 2, 128), (2, 3, 140), (1, 150, 8), (1, 1, 300), (2, 3, 5, 100.0)),
    vast=((2**24, 2, 70),),
    inputs=gate_inputs,
    properties=(KERNEL, *POINTWISE, READ_ONCE),
    **KERNEL_CASES,
    right="Three tensors cross memory: neither z nor s ever leaves its registers.",
    race=RaceSpec(
        work.gated_block,
        {},
        ({"batch": 8192, "time": 32, "width": 256},),
        dtype="bfloat16",
        roundings=5,
        as_layer=layer_of,
        clocks=("host",),
        cache="warm",
        counted=False,
    ),
    mistakes={
        "row-length": Mistake(
            "How many numbers of `gates` has one step of one sequence?",
            "2 * H: H logits, then H candidates. In u a step has H.",
            gives=rows_of(lambda H: H),
        ),
        "halves": Mistake(
            "Which half of a step are the logits, and which one the candidates?",
            "The logits come first. The candidates lie H numbers further on.",
            gives=(
                lambda gates: states()(torch.cat(gates.chunk(2, -1)[::-1], -1)),
                lambda gates: states()(torch.cat((gates.chunk(2, -1)[0],) * 2, -1)),
            ),
        ),
        "blend": Mistake(
            "Let z be 1. Which should be left: the old state, or the new one?",
            "The new one: z multiplies what comes in, and 1 - z the old state.",
            gives=(
                states(lambda s, u, z, c: right_step(s, u, 1 - z, c)),
                states(lambda s, u, z, c: ((1 - z) * s + z * c, z * u + (1 - z) * ((1 - z) * s + z * c))),
                states(lambda s, u, z, c: (z * s + (1 - z) * c, (1 - z) * u + z * (z * s + (1 - z) * c))),
            ),
        ),
        "old-first": Mistake(
            "Step 0 by hand, with z = 1: s is c. What is u then, and what is yours?",
            "The second recurrence takes s of this step, not of the one before: make s first.",
            gives=states(old_first),
        ),
        "no-carry": Mistake(
            "Step 0 is right. Which s and u does step 1 begin with?",
            "Both states have to be those that the step before has made.",
            gives=(
                states(lambda s, u, z, c: right_step(0 * s, 0 * u, z, c)),
                states(lambda s, u, z, c: right_step(0 * s, u, z, c)),
                states(lambda s, u, z, c: right_step(s, 0 * u, z, c)),
            ),
        ),
    },
)
