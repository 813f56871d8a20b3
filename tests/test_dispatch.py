"""A mode sees operations, leaves the compiler out until somebody uses it, and then has it step aside."""

import subprocess
import sys
from collections import Counter

import torch

from labkit import dispatch


class Seen(dispatch.Mode):
    def __init__(self):
        super().__init__()
        self.names = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names[func._schema.name] += 1
        return func(*args, **(kwargs or {}))


def test_operations_are_seen_with_their_arguments():
    with Seen() as seen:
        made = torch.ones(3).new_zeros(2) + 1
    assert made.tolist() == [1, 1]
    assert seen.names["aten::new_zeros"] == seen.names["aten::add"] == 1


def test_an_operation_does_not_import_the_compiler():
    text = """
        import sys, torch
        from labkit import dispatch
        class Plain(dispatch.Mode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                return func(*args, **(kwargs or {}))
        with Plain():
            torch.ones(3).new_empty(2).fill_(1)
        sys.exit("torch._dynamo" in sys.modules)
    """
    lines = "\n".join(line[8:] for line in text.splitlines())
    assert subprocess.run([sys.executable, "-c", lines]).returncode == 0


def test_a_compiled_function_runs_in_it():
    doubled = torch.compile(lambda x: x * 2, backend="eager")
    with Seen() as seen:
        assert doubled(torch.ones(2)).tolist() == [2, 2]
    assert "torch._dynamo" in sys.modules and seen.names["aten::mul"] == 1
