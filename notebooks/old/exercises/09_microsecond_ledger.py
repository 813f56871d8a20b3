"""Exercises of lesson 9: what is right, what people write instead, and what helps them on."""

from labkit import kernels
from labkit.exercises import judge
from labkit.exercises.engine import Call, Exercise, Mistake, RaceSpec
from labkit.exercises.properties import KERNEL_CASES, POINTWISE
from labkit.exercises.simulated_gpu import count
from labkit.exercises.simulated_layers import KernelSequence
from labkit.gpu import randn
from labkit.workloads import recurrent
from labkit.workloads.recurrent import EPS

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from triton import next_power_of_2

# ---- the wall ----------------------------------------------------------------------------------------------

Times = list[float]


def simulate_queue(step: Callable[[float, float, float, float], float]) -> Callable[[Times, Times], float]:
    """``step(end, done, launch, kernel)`` is when a kernel ends whose launch is over at ``end``."""

    def gives(launches: Times, kernels: Times) -> float:
        end = done = 0.0
        for launch, kernel in zip(launches, kernels, strict=True):
            end += launch
            done = step(end, done, launch, kernel)
        return done

    return gives


def sum_of_longer(launches: Times, kernels: Times) -> float:
    """The sum of the longer one of each launch and kernel."""
    return sum(map(max, launches, kernels))


wall = Exercise(
    "when the step is over",
    "wall_us",
    reference=simulate_queue(lambda end, done, launch, kernel: max(end, done) + kernel),
    cases=(
        ((5.0,), (3.0,)),
        ((5.0, 5.0, 5.0), (8.0, 1.0, 2.0)),
        ((12.0, 0.0, 0.0, 0.0), (3.0, 4.0, 2.0, 6.0)),
        ((5.0, 5.0, 30.0, 5.0, 5.0), (20.0, 3.0, 25.0, 25.0, 2.0)),
    ),
    inputs=lambda launches, kernels: {"launches": list(launches), "kernels": list(kernels)},
    tolerance=1e-5,
    right="Short kernels wait for the host, long ones for each other: find out who waits before you tune.",
    mistakes={
        "in-turn": Mistake(
            "What does the host do in your function while the GPU runs the first kernel?",
            "It should go on launching. Keep two times: the sum of launches, and when the GPU is done.",
            gives=lambda launches, kernels: sum(launches) + sum(kernels),
        ),
        "from-sums": Mistake(
            "Take launches of 5, 30 and 5, and kernels of 3, 20 and 20. What does each kernel wait for?",
            "The second for its launch, the third for the second kernel. Decide anew for each, in a loop.",
            gives=(
                *(lambda host, gpu: max(sum(host), sum(gpu)), lambda host, gpu: sum(host) + gpu[-1]),
                *(lambda host, gpu: host[0] + sum(gpu), lambda host, gpu: max(sum(host), sum(gpu)) + gpu[-1]),
                lambda host, gpu: max(sum(host) + gpu[-1], host[0] + sum(gpu)),
                lambda host, gpu: host[0] + max(sum(host), sum(gpu)),
            ),
        ),
        "own-launch": Mistake(
            "Which launch runs beside which kernel in your function?",
            "Not its own: beside it run later launches, all of them. Add up the launches by themselves.",
            gives=(
                sum_of_longer,
                lambda launches, kernels: sum_of_longer(launches, kernels) + kernels[-1],
                lambda launches, kernels: launches[0] + sum_of_longer(launches, kernels),
                # one launch ahead
                lambda launches, kernels: launches[0] + sum_of_longer(launches[1:], kernels) + kernels[-1],
            ),
        ),
        "not-added-up": Mistake(
            "Three launches take 5 each. When is the third one over?",
            "At 15, since the host makes one after another: keep a sum of the launches as you go.",
            gives=simulate_queue(lambda end, done, own, kernel: max(own, done) + kernel),
        ),
        "kernel-in-max": Mistake(
            "When does a kernel begin in your function: where the GPU waits for a launch, where it is busy?",
            "It begins at the later of two moments. Find out that one first, then add the kernel's time.",
            gives=(
                simulate_queue(lambda end, done, own, kernel: max(end, done + kernel)),
                simulate_queue(lambda end, done, own, kernel: max(done, end + kernel)),
            ),
        ),
        "lists": Mistake(
            "launches and kernels are lists. Which number of each belongs to a round of your loop?",
            "zip(launches, kernels) gives a launch and its kernel in every round.",
            raises=r"(un|to )pack|'list'",
        ),
    },
)

# ---- the cell ----------------------------------------------------------------------------------------------


def cell_inputs(batch: int, time: int, width: int, scale: float) -> dict[str, Any]:
    """z in (0, 1) and candidate (batch, time, width), gain (width,); the candidates are of size ``scale``."""
    z, candidate = torch.randn(2, batch, time, width)
    gain = 1 + 0.5 * torch.randn(width)
    return {"z": z.sigmoid(), "candidate": scale * candidate, "gain": gain, "candidates of size": scale}


def sum_of_squares(u: Tensor) -> Tensor:
    """Over the features: (B, H) to (B, 1)."""
    return u.square().sum(-1, keepdim=True)


def in_parts(features: int) -> Callable[..., Tensor]:
    """What u (B, H) is divided by where each program sums so many features."""

    def size(q: Tensor, H: int, u: Tensor) -> Tensor:
        sums = [sum_of_squares(part).expand_as(part) for part in u.split(features, -1)]
        return (torch.cat(sums, -1) / H + EPS).sqrt()

    return size


def cell_with(
    s: Callable[..., Tensor] = lambda z, c, s: (1 - z) * s + z * c,
    u: Callable[..., Tensor] = lambda z, c, old, s, r: (1 - z) * r + s,
    size: Callable[..., Tensor] = lambda q, H, u: (q / H + EPS).sqrt(),
    ends: Callable[..., tuple[Tensor, Tensor]] = lambda gain, unit, u: (gain * unit, gain * unit),
    dtype: torch.dtype = torch.float32,
) -> Callable[..., Tensor]:
    """Both recurrences; ``old`` is s of the step before, ``ends`` makes what is stored and what is carried.

    ``size`` is made of u's sum of squares q (B, 1), H, and u (B, H). A wrong one is computed in float32, so
    that values overflow where a kernel's do.
    """

    def gives(*given: Tensor) -> Tensor:
        (z, candidate, gain), stored = (each.to(dtype) for each in given[:3]), []
        state = carried = torch.zeros_like(z[:, 0])
        for now, value in zip(z.unbind(1), candidate.unbind(1), strict=True):
            old, state = state, s(now, value, state)
            mixed = u(now, value, old, state, carried)
            unit = mixed / size(sum_of_squares(mixed), mixed.shape[1], mixed)
            result, carried = ends(gain, unit, mixed)
            stored.append(result)
        return torch.stack(stored, 1)

    return gives


def cells(part: str, *others: Any) -> tuple[Callable[..., Tensor], ...]:
    """The cell with each of these in the place of a part."""
    return tuple(cell_with(**{part: each}) for each in others)


def swapped(z: Tensor, c: Tensor, s: Tensor) -> Tensor:
    """s where the gate is the share of the old one."""
    return z * s + (1 - z) * c


def two_recurrences(of: Any) -> Callable[..., Tensor]:
    """The cell from a module's min_gru and rms_recurrence, one after the other."""
    return lambda z, candidate, gain: of.rms_recurrence(1 - z, of.min_gru(z, candidate), gain)


CELL = replace(
    recurrent.RMS_RECURRENCE,
    inputs=lambda shape: (*recurrent.MIN_GRU.inputs(shape), 1 + 0.1 * randn(shape["width"])),
    reference=two_recurrences(recurrent),
)
SIZES = ({"batch": 1024, "time": 64, "width": 128}, {"batch": 64, "time": 64, "width": 512})
"""The network's own size, and few long rows."""

cell = Exercise(
    "two recurrences in one loop",
    "both",
    reference=cell_with(dtype=torch.float64),
    cases=((1, 1, 1, 1.0), (2, 3, 7, 1e-3), (2, 2, 130, 1.0)),
    large=(
        *((1, 2, 5, 0.0), (3, 2, 16, 1.0), (2, 4, 20, 1.0)),
        *((1, 70, 4, 1.0), (1, 2, 1100, 1.0)),
    ),
    inputs=cell_inputs,
    call=lambda answer, z, candidate, gain, scale: answer(z, candidate, gain),
    properties=POINTWISE,
    **KERNEL_CASES,
    right="It moves three numbers for each of the result; a kernel for each recurrence would move six.",
    mistakes={
        "other-shares": Mistake(
            "Let a gate be 1, then 0. What should s become each time, and what do your lines make of it?",
            "The gate is the new value's share: 1 - gate is what is kept, of the old s and the old r alike.",
            gives=(
                *cells("s", swapped, lambda z, c, s: s + z * c, lambda z, c, s: (1 - z) * s + c),
                *cells("u", lambda z, c, old, s, r: z * r + s, lambda z, c, old, s, r: r + s),
                cell_with(swapped, lambda z, c, old, s, r: z * r + s),
            ),
        ),
        "other-s": Mistake(
            "What does your u get from the candidates of this step and earlier ones, beside what r has kept?",
            "The second recurrence takes the first one's state: set s first, then add all of it in u.",
            gives=cells(
                *("u", lambda z, c, old, s, r: (1 - z) * r + old, lambda z, c, old, s, r: (1 - z) * r + c),
                lambda z, c, old, s, r: (1 - z) * r + z * c,
            ),
        ),
        "other-mean": Mistake(
            "tl.sum adds up all lanes of the block. What makes a mean of the sum?",
            "Divide it by H. Of its BH terms the other lanes only add zeros.",
            gives=cells(
                "size",
                lambda q, H, u: (q + EPS).sqrt(),
                lambda q, H, u: (q / next_power_of_2(H) + EPS).sqrt(),
            ),
        ),
        "features-shared-out": Mistake(
            "A mean needs all features of a sequence. How many of them does one of your programs have?",
            "Give each a whole sequence: BH = triton.next_power_of_2(H) has them all, a mask hides the rest.",
            gives=cells("size", *map(in_parts, (16, 32, 64, 128))),
        ),
        "no-root": Mistake(
            "Make u twice as large in your line. How much larger does r become?",
            "It should stay as it was: divide by tl.sqrt(...) of the mean, or multiply by tl.rsqrt(...).",
            gives=cells(
                "size",
                lambda q, H, u: q / H + EPS,
                lambda q, H, u: (q / H + EPS).rsqrt(),
                lambda q, H, u: 1.0,
            ),
        ),
        "other-eps": Mistake(
            "What does your line make of candidates that are all zero, or of size 0.001?",
            "eps decides there. Divide the sum of the squares by H, add eps, and only then take the root.",
            gives=cells(
                *("size", lambda q, H, u: (q / H).sqrt(), lambda q, H, u: (q / H).sqrt() + EPS),
                lambda q, H, u: ((q + EPS) / H).sqrt(),
            ),
        ),
        "not-r": Mistake(
            "Which value does a step store, and which does it leave to the next? Are norm and gain in each?",
            "r_t is both of them, and w belongs to it: set r to the normed u times w, and store r.",
            gives=cells(
                *("ends", lambda gain, unit, u: (unit, unit), lambda gain, unit, u: (gain * unit, unit)),
                *(lambda gain, unit, u: (unit, gain * unit), lambda gain, unit, u: (gain * unit, u)),
            ),
        ),
        "not-in-tl": Mistake(
            "Of which operations is your formula made, and which of them does `tl` have for a block?",
            "Neither a power nor a mean. A square is a product; tl.sum and tl.sqrt are there.",
            raises=r"or pow|of type triton|(triton.*'|'tensor' \w+) has no attr|not tensor|to_tensor|on ref",
        ),
    },
    race=RaceSpec(CELL, {"labkit, one by one": two_recurrences(kernels)}, SIZES, roundings=4),
)

# ---- one line of the ledger --------------------------------------------------------------------------------

GRAPH_CLOCK = judge.find("02_clocks")["graph"].mistakes


def clocked(kernels: int, kernel_us: float, launch_us: float, *known: Any) -> dict[str, Any]:
    """A call that takes the host longer than the device, and what the profiler and the roofs say of it."""
    return {"call": KernelSequence(kernels, kernel_us, launch_us)} | dict(
        zip(("busy_us", "bytes_us", "products_us"), (known[0], *map(list, known[1:])), strict=True)
    )


def run_entries(entries: Any, call: KernelSequence, *known: Any) -> Any:
    """The entries where torch.cuda and the clocks are the simulated GPU's, as numbers."""
    with call.gpu.replaces_cuda(entries):
        return entries(call, *known)


def beyond_bytes(moved: Times, done: Times) -> float:
    """What each kernel's products take longer than its bytes, added up."""
    return sum(map(max, moved, done)) - sum(moved)


def entries_with(arithmetic: Any = beyond_bytes, wall: float = 1.0, device: float = 1.0, **adds: str) -> Any:
    """The entries, with other arithmetic, clocks that count in other units, or entries that add another."""

    def gives(call: KernelSequence, busy: float, moved: Times, done: Times) -> dict[str, float]:
        wall_us, device_us = call.host_us * wall, call.device_us * device
        found = {"traffic": sum(moved), "arithmetic": arithmetic(moved, done)}
        found |= {"unexplained": busy - sum(found.values()), "between": device_us - busy}
        found |= {"launches": wall_us - device_us}
        return found | {entry: found[entry] + found[other] for entry, other in adds.items()}

    return gives


def log(call: Call) -> Any:
    """What happened on the simulated GPU, in order."""
    return call.passed["call"].gpu.log


def happened(call: Call, event: str) -> int:
    """How often something happened between two readings of a clock that belong together."""
    stamps = [i for i, entry in enumerate(log(call)) if entry.event in ("clock", "event")]
    return sum(count(log(call)[a:b], event) for a, b in zip(stamps[::2], stamps[1::2], strict=False))


def with_units(*units: tuple[float, float]) -> dict[str, Any]:
    """The entries where wall and device count in these units."""
    return {"gives": tuple(entries_with(wall=w, device=d) for w, d in units)}


SEEN_HERE: dict[str, dict[str, Any]] = {
    "captures-inside": {"when": lambda calls: all(happened(c, "captured") for c in calls)},
    "first-replay": {"when": lambda calls: all(happened(c, "upload") for c in calls)},
    "wrong-divisor": with_units((100, 100), (1, 100), (100, 1)),
    "unit": with_units((1, 1e-3), (1, 1e-6), (1e-3, 1), (1e-6, 1), (1e-3, 1e-3), (1e-6, 1e-6)),
}

entries = Exercise(
    "one line of the ledger",
    "entries",
    reference=entries_with(),
    cases=(
        (4, 5.0, 12.0, 10.0, (1.0, 2.0, 3.0, 1.0), (2.0, 0.0, 1.0, 0.0)),
        (2, 30.0, 90.0, 40.0, (12.0, 8.0), (20.0, 4.0)),
    ),
    inputs=clocked,
    call=run_entries,
    tolerance=0.05,
    right="Two clocks, a profile, a skeleton and a roof: five instruments, one line.",
    mistakes={
        **{name: GRAPH_CLOCK[name] for name in ("compiles-inside", "waits-inside")},
        "no-graph": Mistake(
            "Which of your readings knows how long the device takes, without Python?",
            "A hundred calls inside `with torch.cuda.graph(graph):`, then a replay between two readings.",
            when=lambda calls: not any(happened(c, "replay") for c in calls),
        ),
        "stopped-early": Mistake(
            "Look at a reading of the clock: where is the device by then?",
            "Calls and replays are queued. torch.cuda.synchronize() before each reading waits for them.",
            when=lambda calls: all(any(e.event == "clock" and e.pending for e in log(c)) for c in calls),
        ),
        "arithmetic": Mistake(
            "While a kernel multiplies, memory brings its next bytes. What is left for an entry of its own?",
            "What the products take beyond the bytes: for each kernel by itself, and never below 0.",
            gives=(
                entries_with(lambda moved, done: sum(done)),
                entries_with(lambda moved, done: sum(map(max, moved, done))),
                entries_with(lambda moved, done: max(0.0, sum(done) - sum(moved))),
                entries_with(lambda moved, done: sum(done) - sum(moved)),
            ),
        ),
        "counted-twice": Mistake(
            "Add up your five entries. Which time should they make, and which one the first three of them?",
            "The wall's. Traffic, arithmetic and unexplained make busy_us; with `between` the device's.",
            gives=(
                *(entries_with(launches="between"), entries_with(between="launches")),
                *(entries_with(unexplained="arithmetic"), entries_with(unexplained="traffic")),
            ),
        ),
        **{name: Mistake(*GRAPH_CLOCK[name].hints, **seen) for name, seen in SEEN_HERE.items()},
        "few-calls": Mistake(
            "How many calls share the wait at the end, and how many the launch of a replay?",
            "A hundred calls between two readings, and a hundred in the graph, so that neither counts.",
            when=lambda calls: all(c.passed["call"].calls < 60 for c in calls),
        ),
    },
)
