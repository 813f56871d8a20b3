"""Tasks of lesson 18: what is right, what people write instead, and what helps them on."""

from labkit import work
from labkit.exercises import judge
from labkit.exercises.engine import (
    Call,
    Exercise,
    Mistake,
    RaceSpec,
    case_values,
    defined_in_cell,
    difference,
)
from labkit.exercises.properties import KERNEL, KERNEL_CASES, POINTWISE, READ_ONCE

from collections.abc import Callable, Sequence
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


def host_forgotten(host: float, device: float, traffic: float, arithmetic: float) -> Entry:
    """The wall without the device's largest part is what is left of the device."""
    chosen = right_choice(host, device, traffic, arithmetic)
    if chosen["entry"] == "host":
        return chosen
    return chosen | {"wall": device - parts_of(device, traffic, arithmetic)[chosen["entry"]]}


def unexplained_forgotten(host: float, device: float, traffic: float, arithmetic: float) -> Entry:
    """The larger of the two parts that are given."""
    if host >= device:
        return {"entry": "host", "wall": device}
    entry = "traffic" if traffic >= arithmetic else "arithmetic"
    return {"entry": entry, "wall": max(host, device - max(traffic, arithmetic))}


def by_device(choice: Callable[[dict[str, float]], str], unexplained: Callable[..., float]) -> Any:
    """The device's entry chosen so, with an unexplained part of device, traffic and arithmetic like this."""

    def gives(host: float, device: float, traffic: float, arithmetic: float) -> Entry:
        if host >= device:
            return {"entry": "host", "wall": device}
        rest = unexplained(device, traffic, arithmetic)
        parts = {"traffic": traffic, "arithmetic": arithmetic, "unexplained": rest}
        entry = choice(parts)
        return {"entry": entry, "wall": max(host, device - parts[entry])}

    return gives


def largest(parts: dict[str, float]) -> str:
    return max(parts, key=lambda name: parts[name])


def never_the_host(host: float, device: float, traffic: float, arithmetic: float) -> Entry:
    """An entry of the device, also where the host takes longer."""
    parts = parts_of(device, traffic, arithmetic)
    entry = largest(parts)
    return {"entry": entry, "wall": max(host, device - parts[entry])}


def shorter_one(host: float, device: float, traffic: float, arithmetic: float) -> Entry:
    """The host where it is the shorter one, and an entry of the device elsewhere."""
    if host < device:
        return {"entry": "host", "wall": device}
    return never_the_host(host, device, traffic, arithmetic)


def only_the_wall_is_wrong(calls: Sequence[Call]) -> bool:
    """Whether all entries are right, and some wall is not."""
    return all(
        isinstance(call.got, dict) and "wall" in call.got and call.got.get("entry") == call.want["entry"]
        for call in calls
    ) and any(difference(call.got, call.want, 1e-6) for call in calls)


choose = Exercise(
    "reading a ledger",
    "choose",
    reference=right_choice,
    cases=(
        *((100.0, 40.0, 10.0, 5.0), (30.0, 200.0, 150.0, 10.0), (30.0, 200.0, 20.0, 130.0)),
        *((30.0, 200.0, 40.0, 30.0), (90.0, 100.0, 30.0, 20.0), (150.0, 200.0, 120.0, 30.0)),
        *((80.0, 100.0, 60.0, 10.0), (120.0, 110.0, 90.0, 5.0), (10.0, 200.0, 90.0, 60.0)),
        *((0.0, 120.0, 40.0, 35.0), (0.0, 100.0, 40.0, 45.0), (31.6, 20.7, 9.5, 3.3), (4.5, 30.4, 18.7, 6.2)),
    ),
    inputs=case_values("host", "device", "traffic", "arithmetic"),
    right="A ledger names the entry, and says how much a tool for it can bring at most.",
    mistakes={
        "largest-of-all": Mistake(
            "The host is no part of the device's time: first the longer of the two, then its largest part.",
            gives=largest_of_all,
        ),
        "host-forgotten": Mistake(
            "The host still takes its time: the wall is the longer one, whatever became of the device.",
            gives=host_forgotten,
        ),
        "shorter-one": Mistake(
            "The two run at the same time, and the wall is the longer of them. Which one do you work on?",
            gives=shorter_one,
        ),
        "never-host": Mistake(
            "Where the host takes longer than the device, what would a faster kernel bring?",
            "Nothing. There the entry is the host, and without it the wall would be the device's time.",
            gives=never_the_host,
        ),
        "smallest": Mistake(
            "Of the device's parts, which one can a tool shorten the most?",
            "The largest: max(parts, key=parts.get).",
            gives=by_device(
                lambda parts: min(parts, key=lambda name: parts[name]), lambda d, t, a: d - t - a
            ),
        ),
        "unexplained": Mistake(
            "The device's time has three parts, and they add up to it. How large is the third?",
            "device - traffic - arithmetic. The host has no part in it.",
            gives=tuple(
                by_device(largest, rest)
                for rest in (lambda d, t, a: d - t, lambda d, t, a: d - a, lambda d, t, a: d - max(t, a))
            ),
        ),
        "unexplained-forgotten": Mistake(
            "The device's time has three parts. Two are given: how large is the third?",
            gives=unexplained_forgotten,
        ),
        "wall": Mistake(
            "Your entries are right. If that entry were gone, how long would the host take, and how long the "
            "device?",
            "The wall is the longer of the two: what is left of the one, and all of the other.",
            when=only_the_wall_is_wrong,
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


def states(step: Step = right_step) -> Callable[..., Tensor]:
    """The second of the two states at all steps, (B, T, H), where a step makes both."""

    def gives(gates: Tensor) -> Tensor:
        logits, candidates = gates.chunk(2, -1)
        both = (torch.zeros_like(logits[:, 0]),) * 2
        found = []
        for z, c in zip(torch.sigmoid(logits).unbind(1), candidates.unbind(1), strict=True):
            both = step(*both, z, c)
            found.append(both[1])
        return torch.stack(found, 1)

    return gives


def old_first(s: Tensor, u: Tensor, z: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    """A step whose second state takes the first as it was before."""
    return (1 - z) * s + z * c, (1 - z) * u + z * s


def rows_apart(gates: Tensor) -> Tensor:
    """The states where steps of gates are taken to begin H numbers apart."""
    H = gates.shape[2] // 2
    steps = gates.flatten().unfold(0, 2 * H, H)[: gates[..., 0].numel()]
    return states()(steps.reshape(gates.shape))


twice = Exercise(
    "two recurrences in one loop",
    "twice",
    reference=states(),
    cases=((1, 2, 1), (2, 1, 5), (2, 5, 20)),
    large=((1, 2, 128), (2, 3, 140), (1, 300, 8), (1, 1, 1100), (2, 3, 5, 100.0)),
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
        as_layer=defined_in_cell("fused"),
        clocks=("host",),
        cache="warm",
        counted=False,
    ),
    mistakes={
        "row-length": Mistake(
            "A step of `gates` has 2 * H numbers: H logits, then H candidates. In u a step has H.",
            gives=rows_apart,
        ),
        "blend": Mistake(
            "z multiplies what comes in, and 1 - z the old state.",
            gives=states(lambda s, u, z, c: right_step(s, u, 1 - z, c)),
        ),
        "each-step": judge.find("13_recurrent_kernel")["recurrence"].mistakes["each-step"],
        "old-first": Mistake(
            "The second recurrence takes s of this step, not of the one before: make s first.",
            gives=states(old_first),
        ),
    },
)
