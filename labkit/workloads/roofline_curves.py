"""Floors of a piece of work against width, as a figure draws them."""

from collections.abc import Callable

import pandas as pd

from labkit.measure import roofline
from labkit.measure.contender import Work


def floors(**works: Work) -> Callable[[pd.DataFrame], dict[str, Callable[[float], float]]]:
    """For plots.curves: the floor in us of each work against width, for a panel of one batch and dtype.

    ``floors(linear=LINEAR)`` draws "floor of linear". The roofs are those of the device of the panel's rows.
    """

    def of(panel: pd.DataFrame) -> dict[str, Callable[[float], float]]:
        roofs = roofline.roofs_of(panel)
        if roofs is None:
            return {}
        dtype = str(panel["dtype"].iloc[0])
        # of the other axes a panel has one size only
        others = {axis: int(panel[axis].iloc[0]) for axis in ("batch", "groups", "time") if axis in panel}

        def line(work: Work) -> Callable[[float], float]:
            return lambda width: work.floor_us({**others, "width": int(width)}, dtype, roofs)

        return {f"floor of {name}": line(work) for name, work in works.items()}

    return of
