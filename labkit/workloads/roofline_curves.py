"""Floors of a piece of work against width, as a figure draws them, and the highest floor at each width."""

from collections.abc import Callable

import numpy as np
import pandas as pd
import torch

from labkit.measure import roofline
from labkit.measure.contender import Shape, Work


def floors(**works: Work) -> Callable[[pd.DataFrame], dict[str, Callable[[float], float]]]:
    """For plots.curves: the floor in us of each work against width, for a panel of one batch and dtype.

    ``floors(linear=LINEAR)`` draws "floor of linear". The roofs are those of the device of the panel's rows.
    """

    def of(panel: pd.DataFrame) -> dict[str, Callable[[float], float]]:
        roofs = roofline.roofs_of(panel)
        if roofs is None:
            return {}
        dtype = str(panel["dtype"].iloc[0])

        def line(work: Work) -> Callable[[float], float]:
            return lambda width: work.floor_us(_shape(panel, width), dtype, roofs)

        return {f"floor of {name}": line(work) for name, work in works.items()}

    return of


def bound_spans(work: Work) -> Callable[[pd.DataFrame], list[tuple[float, float, str]]]:
    """For plots.curves: over which widths launch, memory or arithmetic is the highest floor of ``work``."""

    def of(panel: pd.DataFrame) -> list[tuple[float, float, str]]:
        roofs = roofline.roofs_of(panel)
        if roofs is None:
            return []
        dtype = str(panel["dtype"].iloc[0])
        itemsize = getattr(torch, dtype).itemsize

        def moved(width: float) -> float:
            return work.min_bytes(_shape(panel, width), itemsize, "forward") / roofs.bandwidth * 1e6

        def computed(width: float) -> float:
            return work.flops(_shape(panel, width), "forward") / roofs.matmul[dtype] * 1e6

        widths = np.geomspace(panel["width"].min(), panel["width"].max(), 201).tolist()
        bounds = {"launch": lambda _: roofs.node_us, "memory": moved, "arithmetic": computed}
        return roofline.highest_floors(widths, bounds)

    return of


def _shape(panel: pd.DataFrame, width: float) -> Shape:
    """The shape at a width; of the other axes a panel has one size only."""
    others = {axis: int(panel[axis].iloc[0]) for axis in ("batch", "groups", "time") if axis in panel}
    return {**others, "width": int(width)}
