"""Measure the finished kernels beside others that do the same, at sizes drawn by a seed.

python -m benchmarks affine rms_norm --peers --sizes 6
"""

import argparse
import json
import time
from importlib import import_module
from pathlib import Path

import torch

from benchmarks import page, run
from labkit import gpu

OPERATIONS = (
    *("affine", "gelu_mul", "matmul", "geglu_mlp", "grouped_linear", "rms_norm"),
    *("linear_recurrence", "min_gru", "rms_recurrence", "gru"),
)


def options() -> argparse.Namespace:
    """What was asked for."""
    parser = argparse.ArgumentParser("python -m benchmarks", description=__doc__)
    parser.add_argument("operations", nargs="*", help=f"of {', '.join(OPERATIONS)}; all, if none is named")
    parser.add_argument("--sizes", type=int, default=4, help="how many for each suite")
    parser.add_argument("--seed", type=int, default=0, help="the same seed gives the same sizes")
    parser.add_argument("--peers", action="store_true", help="with contenders of other packages")
    parser.add_argument("--limit", type=float, default=1e9, help="seconds after which no size begins")
    parser.add_argument("--out", type=Path, default="build/benchmarks.jsonl", help="rows are appended to it")
    parser.add_argument("--record", action="store_true", help="append to benchmarks/recorded instead")
    asked = parser.parse_args()
    for name in set(asked.operations) - set(OPERATIONS):
        parser.error(f"no operation is called {name}; there are {', '.join(OPERATIONS)}")
    return asked


def main() -> None:
    """Append each row to a file as soon as it is measured; print a table at the end."""
    asked, rows, started = options(), [], time.monotonic()
    if not gpu.available():
        raise SystemExit("A benchmark needs a GPU, and there is none here: an interpreter is not timed.")
    if asked.record:
        device = torch.cuda.get_device_name().lower().replace(" ", "-")
        asked.out = page.RECORDED / f"{device}.jsonl"
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    operations = [import_module(f"benchmarks.{name}").OPERATION for name in asked.operations or OPERATIONS]
    # All operations at their first sizes, then all at their second: a limit cuts off none of them.
    plan = [
        (number, operation, suite)
        for number in range(asked.sizes)
        for operation in operations
        for suite in (*operation.ranges, "small")
    ]
    for done, (number, operation, suite) in enumerate(plan):
        if time.monotonic() - started > asked.limit:
            print(f"The limit is reached: {done} of {len(plan)} sizes were measured.")
            break
        given = suite, asked.seed, number
        print(f"{done + 1} of {len(plan)}: {operation.name} {suite} {operation.draw(*given)}", flush=True)
        for row in run.measure_size(operation, *given, peers=asked.peers):
            rows.append(row)
            with asked.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
    print(page.groups(page.cases(rows)).to_string(index=False, float_format="{:.3g}".format))
    print(f"{len(rows)} rows are in {asked.out}.")


if __name__ == "__main__":
    main()
