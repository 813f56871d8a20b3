"""What wrong answers to lesson 9's exercise "cell" give: the cell with one thing wrong in it."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from labkit.recurrent_works import EPS

Formula = Callable[["Now"], Tensor]


@dataclass
class Now:
    """One step's values, each (B, H), and before it is over those of the step before."""

    z: Tensor
    c: Tensor
    gain: Tensor
    s: Tensor
    r: Tensor
    before: Tensor
    """s of the step before."""
    u: Tensor
    size: Tensor
    """What u is divided by."""
    block: int
    """Lanes of the kernel's block."""


def _root(now: Now, values: Tensor) -> Tensor:
    """The root of the mean square."""
    return (values.square().mean(-1, keepdim=True) + EPS).sqrt()


@dataclass(frozen=True)
class Cell:
    """The formulas of a step, in their order; ``kept`` is what the next step has for r."""

    s: Formula = lambda now: (1 - now.z) * now.s + now.z * now.c
    u: Formula = lambda now: (1 - now.z) * now.r + now.s
    size: Formula = lambda now: _root(now, now.u)
    r: Formula = lambda now: now.gain * now.u / now.size
    kept: Formula = lambda now: now.r
    stored: Formula = lambda now: now.r

    def run(self, z: Tensor, candidate: Tensor, gain: Tensor) -> Tensor:
        """The result (B, T, H)."""
        zero, results = torch.zeros_like(z[:, 0]), []
        width = z.shape[-1]
        now = Now(zero, zero, gain, zero, zero, zero, zero, zero, 1 << (width - 1).bit_length())
        for now.z, now.c in zip(z.unbind(1), candidate.unbind(1), strict=True):
            now.before, now.s = now.s, self.s(now)
            now.u = self.u(now)
            now.size = self.size(now)
            now.r = self.r(now)
            results.append(self.stored(now))
            now.r = self.kept(now)
        return torch.stack(results, 1)


RIGHT = Cell()


def mistakes(z: Tensor, candidate: Tensor, gain: Tensor) -> Iterator[tuple[str, Tensor]]:
    """What would have come out, had this or that mistake been made; in the same order for every call."""
    right = RIGHT.run(z, candidate, gain)
    yield "zeros", torch.zeros_like(right)
    yield "stored-early", torch.cat([torch.zeros_like(right[:, :1]), right[:, :-1]], 1)
    for reason, cell in _cells():
        yield reason, cell.run(z, candidate, gain)


def _cells() -> Iterator[tuple[str, Cell]]:
    for other_u in (RIGHT.u, lambda now: now.z * now.r + now.s):
        yield "swapped-s", replace(RIGHT, s=lambda now: now.z * now.s + (1 - now.z) * now.c, u=other_u)
    yield "swapped-u", replace(RIGHT, u=lambda now: now.z * now.r + now.s)
    yield "ungated-candidate", replace(RIGHT, s=lambda now: (1 - now.z) * now.s + now.c)
    yield "undecayed-s", replace(RIGHT, s=lambda now: now.s + now.z * now.c)
    yield "no-s", replace(RIGHT, s=lambda now: now.z * now.c)
    yield "undecayed-r", replace(RIGHT, u=lambda now: now.r + now.s)
    yield "no-r", replace(RIGHT, u=lambda now: now.s)
    yield "gated-s", replace(RIGHT, u=lambda now: (1 - now.z) * now.r + now.z * now.s)
    yield "around-sum", replace(RIGHT, u=lambda now: (1 - now.z) * (now.r + now.s))
    yield "candidate-for-s", replace(RIGHT, u=lambda now: (1 - now.z) * now.r + now.c)
    yield "old-s", replace(RIGHT, u=lambda now: (1 - now.z) * now.r + now.before)
    yield from _norms()
    yield from _results()


def _norms() -> Iterator[tuple[str, Cell]]:
    yield "other-norm", replace(RIGHT, size=lambda now: _root(now, now.s))
    yield "other-norm", replace(RIGHT, size=lambda now: _root(now, now.r))
    yield "s-over-norm", replace(RIGHT, r=lambda now: now.gain * now.s / now.size)
    yield "over-block", replace(RIGHT, size=lambda now: (_squares(now) / now.block + EPS).sqrt())
    yield "sum-for-mean", replace(RIGHT, size=lambda now: (_squares(now) + EPS).sqrt())
    yield "no-root", replace(RIGHT, size=lambda now: _squares(now) / now.u.shape[-1] + EPS)
    yield "times-root", replace(RIGHT, r=lambda now: now.gain * now.u * now.size)
    yield "no-square", replace(RIGHT, size=lambda now: (now.u.mean(-1, keepdim=True) + EPS).sqrt())
    yield "no-square", replace(RIGHT, size=lambda now: now.u.mean(-1, keepdim=True) + EPS)
    yield "no-norm", replace(RIGHT, r=lambda now: now.gain * now.u)
    yield "no-norm", replace(RIGHT, r=lambda now: now.u)
    yield "no-eps", replace(RIGHT, size=lambda now: now.u.square().mean(-1, keepdim=True).sqrt())
    yield (
        "eps-elsewhere",
        replace(RIGHT, size=lambda now: now.u.square().mean(-1, keepdim=True).sqrt() + EPS),
    )
    yield (
        "eps-elsewhere",
        replace(RIGHT, size=lambda now: ((_squares(now) + EPS) / now.u.shape[-1]).sqrt()),
    )


def _squares(now: Now) -> Tensor:
    return now.u.square().sum(-1, keepdim=True)


def _results() -> Iterator[tuple[str, Cell]]:
    def unit(now: Now) -> Tensor:
        return now.u / now.size

    yield "no-gain", replace(RIGHT, r=unit)
    yield "gain-once", replace(RIGHT, r=unit, stored=lambda now: now.gain * now.r)
    yield "gain-once", replace(RIGHT, stored=unit)
    yield "stores-u", replace(RIGHT, stored=lambda now: now.u)
    yield "stores-s", replace(RIGHT, stored=lambda now: now.s)
    yield "carries-u", replace(RIGHT, kept=lambda now: now.u)
    yield "no-r", replace(RIGHT, kept=lambda now: torch.zeros_like(now.r))
