"""The interpreter, patched, computes what compiled code does; and no import patches anything."""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.errors import InterpreterError

from labkit import gpu, interpreter, paths

INTERPRETED = pytest.mark.skipif(gpu.available(), reason="on a GPU Triton compiles, nothing is patched")


def launch(kernel, *tensors, grid=(1,), **options):
    """What a kernel writes to its last argument, float32 numbers that are NaN before."""
    y = torch.full((16,), torch.nan)
    kernel[grid](*tensors, y, **options)
    return y


# ---- right -------------------------------------------------------------------------------------------------


@triton.jit
def doubled(value):
    return value * 2


@triton.jit
def sums_kernel(x, width, y, BLOCK: tl.constexpr):
    total = tl.zeros([BLOCK], tl.float32)
    for first in range(0, tl.cdiv(width, BLOCK) * BLOCK, BLOCK):
        at = first + tl.arange(0, BLOCK)
        total += doubled(tl.load(x + at, at < width, other=0.0))
    tl.store(y, tl.sum(total))


@INTERPRETED
def test_a_kernel_with_helpers_is_right_and_the_language_is_put_back():
    x = torch.arange(100.0)
    before = tl.load, tl.tensor.__add__
    for _ in range(2):
        assert launch(sums_kernel, x, 100, BLOCK=16)[0] == 2 * x.sum()
        assert (tl.load, tl.tensor.__add__) == before


@triton.jit
def later_of_two(gate1, new1, gate2, new2):
    return gate2 * gate1, gate2 * new1 + new2


@triton.jit
def forgetful(gate1, new1, gate2, new2):
    return gate2, gate2 * new1 + new2  # not associative: right one element after the other, and only so


@triton.jit
def scan_kernel(gates, inputs, y, JOIN: tl.constexpr, REVERSE: tl.constexpr):
    at = tl.arange(0, 16)
    scanned = tl.associative_scan((tl.load(gates + at), tl.load(inputs + at)), 0, JOIN, REVERSE)
    tl.store(y + at, scanned[1])


@INTERPRETED
@pytest.mark.parametrize("reverse", [False, True])
def test_a_scan_joins_as_a_tree_and_so_finds_what_is_not_associative(reverse):
    gates, inputs = 0.5 + 0.5 * torch.rand(16), torch.randn(16)
    state, states = torch.zeros(()), []
    for gate, new in zip(*((each.flip(0) if reverse else each) for each in (gates, inputs)), strict=True):
        state = gate * state + new
        states.append(state)
    want = torch.stack(states[::-1] if reverse else states)
    torch.testing.assert_close(launch(scan_kernel, gates, inputs, JOIN=later_of_two, REVERSE=reverse), want)
    wrong = launch(scan_kernel, gates, inputs, JOIN=forgetful, REVERSE=reverse)
    assert not torch.isclose(wrong, want, 0.01).all()


@triton.jit
def steps_kernel(x, steps, y):
    total = 0.0
    for step in range(steps):
        total += tl.load(x + step)
    for step in tl.range(0, steps, num_stages=2):
        total += tl.load(x + step)
    tl.store(y, total)


@INTERPRETED
def test_a_loop_runs_to_a_number_that_the_kernel_was_given():
    assert launch(steps_kernel, torch.arange(7.0), 5)[0] == 20


@triton.jit
def wrapping_kernel(x, y):
    at = tl.arange(0, 2)
    value = tl.load(x + at)
    tl.store(y + at, value + 1)
    tl.store(y + 2 + at, value * 3)
    tl.store(y + 4 + at, -2 - value)


@INTERPRETED
def test_integers_wrap_around_as_on_a_gpu():
    x = torch.tensor([2**31 - 1, 5], dtype=torch.int32)
    y = torch.zeros(6, dtype=torch.int32)
    wrapping_kernel[(1,)](x, y)
    assert y.tolist() == [-(2**31), 6, 2**31 - 3, 15, 2**31 - 1, -7]


@triton.jit
def dot_kernel(x, w, y, SIDE: tl.constexpr):
    at = tl.arange(0, SIDE)
    places = at[:, None] * SIDE + at[None, :]
    tl.store(y + places, tl.dot(tl.load(x + places), tl.load(w + places), tl.load(y + places)))


@triton.jit
def bfloat16_kernel(x, w, y, z, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    a, b = tl.load(x + at), tl.load(w + at)
    tl.store(y + at, -a * b + a)
    tl.store(y + BLOCK + at, tl.where(a < b, tl.maximum(a, b), a))
    tl.store(y + 2 * BLOCK, tl.sum(b))
    tl.store(z + at, tl.load(z + at).to(tl.bfloat16).to(tl.float32))


@INTERPRETED
def test_bfloat16_is_computed_by_value_and_rounded_to_the_nearest():
    torch.manual_seed(0)
    x, w = (torch.randn(16, 16).bfloat16() for _ in range(2))
    y = torch.ones(16, 16)
    dot_kernel[(1,)](x, w, y, SIDE=16)
    torch.testing.assert_close(y, 1 + x.float() @ w.float())
    a, b, y = x[0], w[0], torch.zeros(33, dtype=torch.bfloat16)
    z = torch.tensor(
        [1 + 2.0**-8, 1 + 3 * 2.0**-8, -1 - 2.0**-7, 3e38, 3.4e38, torch.inf, torch.nan, 1e-40] * 2
    )
    rounded = z.bfloat16().float()
    bfloat16_kernel[(1,)](a, b, y, z, BLOCK=16)
    torch.testing.assert_close(y[:16], -a * b + a)
    assert torch.equal(y[16:32], torch.where(a < b, torch.maximum(a, b), a))
    torch.testing.assert_close(y[32], b.sum())
    torch.testing.assert_close(z, rounded, rtol=0, atol=0, equal_nan=True)


# ---- as strict as compiled code ----------------------------------------------------------------------------


@triton.jit
def masked_kernel(x, y, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(x + at, at < 3))


@triton.jit
def scalar_mask_kernel(x, first, y, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    mask = ((first > 0) and at < 3) or at == 5
    tl.store(y + at, max(tl.load(x + at, mask, other=-1), 1.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@INTERPRETED
def test_a_masked_lane_without_other_holds_no_number(dtype):
    x = torch.arange(16.0).to(dtype)
    y = launch(masked_kernel, x, BLOCK=16)
    assert y[:3].tolist() == [0, 1, 2] and y[3:].isnan().all()


@INTERPRETED
def test_and_or_and_max_work_on_each_element():
    y = launch(scalar_mask_kernel, torch.arange(16.0), 1, BLOCK=16)
    assert y.tolist() == [1, 1, 2, 1, 1, 5] + [1] * 10


@triton.jit
def absent_kernel(x, y):
    if x is not None and tl.load(x) > 0:
        tl.store(y, 1.0)
    else:
        tl.store(y, 2.0)


@INTERPRETED
def test_what_is_not_needed_is_not_computed():
    assert launch(absent_kernel, None)[0] == 2 and launch(absent_kernel, torch.ones(1))[0] == 1


@triton.jit
def truth_kernel(y, BLOCK: tl.constexpr):
    if tl.arange(0, BLOCK) > 3:
        tl.store(y, 1.0)


@triton.jit
def chained_kernel(y, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(y + at, 1.0, 2 < at < 5)


@pytest.mark.parametrize(
    ("kernel", "says"),
    [(truth_kernel, "a block has many values"), (chained_kernel, "two comparisons in one")],
)
@INTERPRETED
def test_what_the_compiler_refuses_is_refused(kernel, says):
    with pytest.raises(InterpreterError, match=says):
        launch(kernel, BLOCK=16)


@triton.jit
def wide_loop_kernel(y, BLOCK: tl.constexpr):
    first = tl.program_id(0)
    for number in range(first, BLOCK):
        tl.store(y + number, number.dtype.primitive_bitwidth)
    for number in tl.range(first.to(tl.int64) + 1, BLOCK, 2):
        tl.store(y + number, number.dtype.primitive_bitwidth)


@INTERPRETED
def test_a_loop_counts_in_the_wider_type_of_its_bounds():
    assert launch(wide_loop_kernel, BLOCK=4)[:4].tolist() == [32.0, 64.0, 32.0, 64.0]


@triton.autotune([triton.Config({"BLOCK": 16}), triton.Config({"BLOCK": 2})], key=[])
@triton.jit
def tuned_kernel(y, BLOCK: tl.constexpr):
    tl.store(y + tl.arange(0, BLOCK), BLOCK)


@INTERPRETED
def test_an_autotuner_takes_its_configurations_in_turn_and_times_nothing():
    written = [int((launch(tuned_kernel) == block).sum()) for block in (16.0, 2.0, 16.0)]
    assert written == [16, 2, 16]


@INTERPRETED
def test_a_second_call_changes_nothing():
    before = tl.block_type.__init__, vars(interpreter.InterpreterBuilder).copy()
    interpreter.patch()
    assert before == (tl.block_type.__init__, vars(interpreter.InterpreterBuilder))


# ---- watched -----------------------------------------------------------------------------------------------


class Notes(interpreter.Observer):
    def __init__(self):
        self.seen = []

    def launch(self, run, kernel, args, options):
        self.seen.append(kernel.__name__)
        run(*args, **options)
        self.seen.append("end")

    def grid(self, *sizes):
        self.seen.append(sizes)

    def load(self, addresses, size, unfilled):
        self.seen.append(("load", addresses, size, unfilled))

    def store(self, addresses, size):
        self.seen.append(("store", addresses, size))


@INTERPRETED
def test_an_observer_is_told_of_what_happens_in_its_order():
    x, y, notes, other = torch.arange(16.0), torch.zeros(16), Notes(), Notes()
    with interpreter.watching(notes), interpreter.watching(other):
        masked_kernel[(1, 2)](x, y, BLOCK=16)
    masked_kernel[(1, 2)](x, y, BLOCK=16)
    name, grid, (_, loaded, size, unfilled), (_, stored, _), *again, end = notes.seen
    assert (name, grid, len(again), end) == ("masked_kernel", (1, 2, 1), 2, "end")
    assert np.array_equal(loaded, x.data_ptr() + 4 * np.arange(3)) and size == 4 and unfilled
    assert np.array_equal(stored, y.data_ptr() + 4 * np.arange(16))
    assert len(other.seen) == len(notes.seen)


@triton.jit
def larger_kernel(x, y, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    value = tl.load(x + at)
    tl.store(y + at, tl.maximum(value, -1.0))
    tl.store(y + BLOCK + at, tl.minimum(value, 1.0))
    tl.store(y + 2 * BLOCK + at, tl.maximum(value, -1.0, propagate_nan=tl.PropagateNan.ALL))


def test_the_larger_of_nan_and_a_number_is_the_number_unless_nan_is_asked_for():
    """On a GPU and in the interpreter alike: what hides a NaN there hides it here."""
    x = torch.full((16,), torch.nan, device=gpu.device())
    y = torch.zeros(48, device=gpu.device())
    larger_kernel[(1,)](x, y, BLOCK=16)
    larger, smaller, asked = y.view(3, 16)
    assert (larger == -1).all() and (smaller == 1).all() and asked.isnan().all()


# ---- imports, in a process of its own ----------------------------------------------------------------------


def python(code, **variables):
    """What a fresh Python prints; a variable that is None is not set."""
    around = {**os.environ, "PYTHONPATH": paths.python_path(), "OMP_NUM_THREADS": None, **variables}
    environment = {key: value for key, value in around.items() if value is not None}
    ran = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


STATE = """
import os, sys, warnings, torch
{before}

def state():
    process = {{
        "environment": dict(os.environ),
        "modules that cannot be imported": [name for name, module in sys.modules.items() if module is None],
        "threads": torch.get_num_threads(),
        "filters": list(warnings.filters),
        "path": list(sys.path),
    }}
    triton = [module for name, module in sys.modules.items() if name.startswith("triton.")]
    owners = triton + [each for module in triton for each in vars(module).values() if isinstance(each, type)]
    return process, [(owner, dict(vars(owner))) for owner in owners]

process, owners = state()
import {imported}
for name, value in state()[0].items():
    if value != process[name]:
        old = process[name]
        print(name, set(value.items()) ^ set(old.items()) if isinstance(value, dict) else (old, value))
for owner, attributes in owners:
    for name, value in attributes.items():
        if vars(owner).get(name) is not value:
            print(owner, name)
"""


@pytest.mark.parametrize("imported", ["labkit", "labkit.kernels"])
def test_an_import_changes_nothing_but_where_kernels_run(imported):
    said = python(STATE.format(before="", imported=imported), TRITON_INTERPRET=None)
    chosen = "environment {('TRITON_INTERPRET', '1')}\n"
    assert said == ("" if gpu.available() else chosen)


def test_an_import_patches_nothing_of_triton():
    imported = "labkit, labkit.kernels, labkit.interpreter, labkit.exercises.judge"
    everything = "import triton.runtime.interpreter, triton.tools.tensor_descriptor, triton.testing, sympy"
    said = python(STATE.format(before=everything, imported=imported), TRITON_INTERPRET="1")
    assert [line for line in said.splitlines() if not line.startswith(("filters", "environment"))] == []


WITHOUT_PATCHES = f"""
import sys
sys.path[:0] = [{str(paths.CHECKOUT / "tests")!r}, {str(paths.CHECKOUT / "tests" / "kernels")!r}]
import operators, test_operators
from labkit import interpreter
for case in test_operators.TRAINED:
    operators.examine(case, dtypes=(operators.bf16,), roundings=4)
assert interpreter.patch.cache_info().currsize == 0
"""


@pytest.mark.skipif(
    triton.__version__ >= "3.9",
    reason="Triton 3.9's interpreter refuses masks that have a scalar condition, unless it is patched",
)
@pytest.mark.skipif(
    triton.__version__ < "3.7" and np.__version__ >= "2.4",
    reason="NumPy 2.4 refuses what Triton 3.6's interpreter does with arrays, unless it is patched",
)
def test_finished_kernels_are_right_in_the_interpreter_as_it_is():
    python(WITHOUT_PATCHES, TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1")
