"""Figures that other people published, as data with their source."""

import csv

import pandas as pd

from labkit import places
from labkit.rows import PUBLISHED

FORUM = 'PyTorch forum, "Surprisingly low performance in pseudo-Linear layer"'
_PSEUDO_LINEAR = {
    "device A, eager": "pseudo_linear_device_a_eager.csv",
    "device B, eager": "pseudo_linear_device_b_eager.csv",
    "device B, graphed": "pseudo_linear_device_b_graphed.csv",
}


def pseudo_linear() -> pd.DataFrame:
    """Published speedups of an elementwise ``x*w+b`` layer over nn.Linear, by width.

    Columns series, width, speedup, kind, device, source. The thread names neither device, dtype nor batch;
    "graphed" is torch.cuda.make_graphed_callables.
    """
    return pd.concat([_series(name, file) for name, file in _PSEUDO_LINEAR.items()], ignore_index=True)


def _series(name: str, file: str) -> pd.DataFrame:
    with open(places.PUBLISHED / file, newline="") as stream:  # pandas would round the last digits
        table = pd.DataFrame(csv.DictReader(stream)).astype({"width": int, "speedup": float})
    return table.assign(series=name, kind=PUBLISHED, device=name.split(",")[0], source=FORUM)
