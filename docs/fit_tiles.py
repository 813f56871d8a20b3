"""Measures products of bfloat16 in many tiles, and fits to them the model by which matmul chooses one.

    python -m docs.fit_tiles measure 120     at so many random sizes, on a GPU, to docs/tiles_h200.csv
    python -m docs.fit_tiles fit 100         for so many seconds: the constants for labkit/kernels/linear.py

The rows there now were measured on an NVIDIA H200 on 2026-11-25, torch 2.11, triton 3.6, graph clock, cold.
A row is a size, a tile with its split of K, and its time in microseconds; cuBLAS has a tile of zeros.
"""

import math
import random
import sys
import time

import pandas as pd
import torch

from labkit import gpu, paths
from labkit.kernels import linear, matmul
from labkit.kernels.common import DeviceLimits, device_limits
from labkit.kernels.linear import Tile
from labkit.measure import clocks
from labkit.measure.cold_cache import TimedCall

TABLE = paths.CHECKOUT / "docs" / "tiles_h200.csv"
H200 = DeviceLimits(multiprocessors=132, shared_bytes=227 * 1024, has_tma=True)
SIZE = ["M", "N", "K"]
FITTED = ("LATENCY", "STORED", "SECOND_KERNEL", "FETCHED")
"""Names of constants of labkit.kernels.linear; FLOPS, LINES and the shares of the tiles come with them."""
CONSTANTS = len(FITTED) + 3


def drawn(rng: random.Random) -> tuple[int, int, int]:
    """M 1 to 16384, N and K 64 to 8192 in eights, log-uniform."""
    M = round(math.exp(rng.uniform(0, math.log(16384))))
    N, K = (8 * round(math.exp(rng.uniform(math.log(64), math.log(8192))) / 8) for _ in range(2))
    return M, N, K


def measure(sizes: int) -> None:
    """Every tile at random sizes: alone, and in the two best splits of the model as it is."""
    limits, rows, rng = device_limits(torch.device("cuda", 0)), [], random.Random(0)
    for M, N, K in (drawn(rng) for _ in range(sizes)):
        inputs = tuple(gpu.randn(size, K, scale=K**-0.5).bfloat16() for size in (M, N))
        calls = {Tile(0, 0, 0, 0, 0, 0): TimedCall(torch.nn.functional.linear, inputs)}
        for tile, share in linear.TILES_200_KIB.items():
            alone, *split = linear.ways_to_share(tile, M, N, K, limits)

            def model(way: Tile, share: float = share, M: int = M, N: int = N, K: int = K) -> float:
                return linear.tile_time(way, share, M, N, K, 2, limits.multiprocessors)

            for way in (alone, *sorted(split, key=model)[:2]):
                calls[way] = TimedCall(lambda x, w, way=way: matmul(x, w, tile=way), inputs)
        found = clocks.measure({str(n): call for n, call in enumerate(calls.values())}, budget_s=0.01)
        for way, timing in zip(calls, found.values(), strict=True):
            if isinstance(timing, clocks.Timing):
                rows.append((M, N, K, *way, round(timing.median_us, 2)))
        pd.DataFrame(rows, columns=[*SIZE, *Tile._fields, "us"]).to_csv(TABLE, index=False)


def read() -> list[tuple[tuple[int, int, int], dict[Tile, float]]]:
    """The sizes, and at each the time of every way that was measured."""
    table = pd.read_csv(TABLE)
    table = table[table["BM"] > 0]
    return [
        (tuple(size), {Tile(*map(int, row[3:-1])): row[-1] for row in rows.itertuples(index=False)})
        for size, rows in table.groupby(SIZE)
    ]


def fit(seconds: float) -> None:
    """Print the constants with which the model loses least beside the best tile of each size."""
    data, rng = read(), random.Random(0)
    tiles = sorted({tile._replace(split=1, shared=0) for _, found in data for tile in found})

    def loss(values: list[float]) -> tuple[float, float]:
        """What is minimised, and by how much the chosen tiles are slower than the best, on average."""
        for name, value in zip(FITTED, values, strict=False):
            setattr(linear, name, value)
        linear.FLOPS[2], linear.LINES = values[CONSTANTS - 3], (1.0, *values[CONSTANTS - 2 : CONSTANTS])
        shares = dict(zip(tiles, values[CONSTANTS:], strict=True))
        lost = wrong = 0.0
        for (M, N, K), found in data:
            model = {
                way: linear.tile_time(
                    way, shares[way._replace(split=1, shared=0)], M, N, K, 2, H200.multiprocessors
                )
                for way in found
            }
            best, chosen = min(found.values()), found[min(model, key=lambda way: model[way])]
            lost += math.log(chosen / best) + 2 * math.log(chosen / best) ** 2
            near = [math.log(model[way] / us) ** 2 for way, us in found.items() if us < 1.4 * best]
            wrong += sum(near) / len(near)
        return (2 * lost + wrong) / len(data), lost / len(data)

    values = [getattr(linear, name) for name in FITTED] + [linear.FLOPS[2], *linear.LINES[1:]]
    values += [linear.TILES_200_KIB.get(tile, 1.0) for tile in tiles]
    best, until = loss(values), time.time() + seconds
    while time.time() < until:
        tried, width = list(values), rng.choice((0.03, 0.1, 0.3))
        for n in rng.sample(range(len(values)), rng.choice((1, 1, 2, 3, 5))):
            tried[n] = min(tried[n] * math.exp(rng.gauss(0, width)), 1.15 if n >= CONSTANTS - 2 else math.inf)
        found = loss(tried)
        if found[0] < best[0]:
            values, best = tried, found
    print(f"{len(data)} sizes: the chosen tiles lose {best[1]:.3f} beside the best ones")
    print(dict(zip((*FITTED, "FLOPS", "LINES 32 bytes", "LINES 16 bytes"), values, strict=False)))
    for tile, share in zip(tiles, values[CONSTANTS:], strict=True):
        print(f"{tuple(tile[:6])}: {share:.2f}")


if __name__ == "__main__":
    way, count = sys.argv[1:]
    measure(int(count)) if way == "measure" else fit(float(count))
