"""What a call launches: its kernels by name, with the time that each one takes."""

import html
from collections.abc import Callable, Sequence
from typing import Any

from labkit import gpu
from labkit.display.style import digits, show
from labkit.display.table import Measured, origin, plain_table
from labkit.measure import launch_counts, profiles, session
from labkit.measure.session import drawn
from labkit.work import Work


def profile(name: str, call: Callable[..., Any], work: Work, dtype: str = "float32", **axes: int) -> Measured:
    """Show the kernels that a way launches at a size, and return how many they are.

    On a GPU torch's profiler sees them; elsewhere they are shown as recorded. Where nothing is recorded the
    operations of PyTorch are counted instead, which have no times.

    Args:
        name: of the way; with the sizes, the name of its row on a tape.
        call, work: a way, and what it computes, which makes its inputs.
        dtype, axes: of the inputs (``batch=256, width=160``).
    """
    import torch

    known, at = session.current(), ", ".join(f"{axis} {size}" for axis, size in axes.items())
    inputs = drawn(work, axes, getattr(torch, dtype), "forward")

    def seen() -> list[list[Any]]:
        made = profiles.profile(lambda: call(*inputs))
        return [[kernel, round(us, 2)] for kernel, us in made]

    row = known.number(f"Launched by {name}: {at}, {dtype}", seen, [call], work.name)
    if row.value is None and not gpu.available():
        counted = launch_counts.count(lambda: call(*inputs))
        lines = [["", one.name] for one in counted]
        where = "Counted here, as operations of PyTorch."
    else:
        lines = together(row.value)
        where = origin([row], known.live)[0]
    number = len(lines) if row.value is None else len(row.value)
    title = f"{name} launches {number} kernel{'s' * (number != 1)} ({at})"
    page = f"<p><strong>{html.escape(title)}</strong></p>{plain_table([], lines)}"
    page += f"<p><small>{html.escape(where)}</small></p>"
    show(page, "\n".join([title, *(f"{us}  {kernel}" for us, kernel in lines), where]))
    return Measured(number, "live" if known.live else "recorded", row.device or "no GPU, counted")


def together(kernels: Sequence[Sequence[Any]]) -> list[list[str]]:
    """A line for each kernel with its time; kernels of the same name are one line, with their time in all."""
    found: dict[str, list[float]] = {}
    for kernel, us in kernels:
        found.setdefault(kernel, []).append(us)
    return [
        [f"{digits(sum(us))} µs", f"{len(us)} × {shorten(kernel)}" if len(us) > 1 else shorten(kernel)]
        for kernel, us in found.items()
    ]


def shorten(kernel: str) -> str:
    """A kernel's name without its middle, where it is longer than a line."""
    return kernel if len(kernel) <= 64 else f"{kernel[:40]} … {kernel[-20:]}"
