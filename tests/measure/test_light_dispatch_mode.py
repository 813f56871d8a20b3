"""A mode sees operations, imports no compiler, and disables one that somebody uses."""

import sys
from collections import Counter

import torch

from labkit.measure.launch_counts import LightDispatchMode


class Seen(LightDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names[func._schema.name] += 1
        return func(*args, **(kwargs or {}))


def test_a_compiled_function_runs_in_it():
    doubled = torch.compile(lambda x: x * 2, backend="eager")
    with Seen() as seen:
        assert doubled(torch.ones(2)).tolist() == [2, 2]
    assert "torch._dynamo" in sys.modules and seen.names["aten::mul"] == 1
