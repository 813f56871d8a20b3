"""The widgets of the lessons: sweep over an axis, predict, look at a timeline.

Where nobody can press a button (papermill, CI) each of them does its work by itself and leaves plain HTML.
"""

from collections.abc import Callable, Mapping, Sequence

import pandas as pd

from labkit.clocks import Clock
from labkit.plots.curves import Models, Regime
from labkit.prediction import predict
from labkit.sweep_panel import SweepPanel
from labkit.sweep_plan import Plan
from labkit.sweeps import Contender
from labkit.timeline_panel import timeline

__all__ = ["predict", "sweep", "timeline"]


def sweep(
    suite: str,
    contenders: Sequence[Contender],
    values: Sequence[int],
    *,
    title: str,
    of: str,
    over: str,
    x: str = "width",
    others: Mapping[str, Sequence[int]] | None = None,
    dtypes: Sequence[str] = ("float32",),
    directions: Sequence[str] = ("forward",),
    clocks: Sequence[Clock] = ("graph", "events", "host"),
    published: pd.DataFrame | None = None,
    floor: Callable[[pd.DataFrame], Models] = lambda _: {},
    regimes: Callable[[pd.DataFrame], Sequence[Regime]] = lambda _: (),
    expected: Models | None = None,
    budget_s: float = 0.15,
) -> SweepPanel:
    """A panel that sweeps the axis ``x`` over ``values``; ``await panel.show()`` shows it.

    ``others`` are the other axes of the shape, each with the sizes to choose from, the usual one last.
    ``of`` and ``over`` name the contenders that the sentence compares; speedups are over ``over``.
    ``published`` has a column ``speedup`` or ``median_us``, and stands where its dtype, direction and other
    axes, as far as it has them, are those chosen; ``floor`` and ``regimes`` are those of
    :func:`labkit.plots.curves`, ``expected`` the ``naive`` of :func:`labkit.plots.speedups`.
    ``panel.table()`` has every dtype, direction and size: this machine's rows, where there are any, or the
    recorded ones.

    Executed without a reader, ``show`` measures all of that by the first clock, and leaves a figure, a
    sentence and a table. Without a GPU, Run counts launches and bytes, and times are those of a tape.

    Raises ValueError for sizes that do not increase, an unknown clock, or names that are no contenders.
    """
    plan = Plan(
        suite=suite,
        contenders=tuple(contenders),
        x=x,
        values=tuple(values),
        others={axis: tuple(sizes) for axis, sizes in (others or {}).items()},
        title=title,
        of=of,
        over=over,
        dtypes=tuple(dtypes),
        directions=tuple(directions),
        clocks=tuple(clocks),
        published=pd.DataFrame() if published is None else published,
        floor=floor,
        regimes=regimes,
        expected=expected or {},
    )
    return SweepPanel(plan, budget_s)
