"""The interpreter replaces triton.language's functions once per launch, and puts them back."""

import inspect

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter as tritons

from labkit import device, interpreter

pytestmark = pytest.mark.skipif(device.has_gpu(), reason="on a GPU Triton compiles, nothing is replaced")


@triton.jit
def doubled(value):
    return value * 2


@triton.jit
def sums_kernel(x, y, width, BLOCK: tl.constexpr):
    total = tl.zeros([BLOCK], tl.float32)
    for first in range(0, tl.cdiv(width, BLOCK) * BLOCK, BLOCK):
        at = first + tl.arange(0, BLOCK)
        total += doubled(tl.load(x + at, at < width, other=0.0))
    tl.store(y, tl.sum(total))


def sums(x):
    y = torch.full((1,), torch.nan)
    sums_kernel[(1,)](x, y, x.numel(), BLOCK=16)
    return y.item()


def test_a_kernel_with_helpers_is_right_and_the_language_is_put_back():
    interpreter.quicken()
    x = torch.arange(100.0)
    before = tl.load, tl.tensor.__add__
    for _ in range(2):
        assert sums(x) == 2 * x.sum()
        assert (tl.load, tl.tensor.__add__) == before


def test_it_is_searched_at_most_once_per_launch(monkeypatch):
    """Not at all where a helper that somebody called outside a kernel has left it replaced."""
    interpreter.quicken()
    searched = []
    search = tritons._patch_builtin
    monkeypatch.setattr(
        tritons, "_patch_builtin", lambda where, *rest: (searched.append(where), search(where, *rest))
    )
    sums(torch.ones(100))
    assert searched.count(tl) == tl.core.is_builtin(tl.load)


def test_its_modules_are_listed_at_the_first_search_only(monkeypatch):
    interpreter.quicken()
    listed = []

    def list_members(module):
        listed.append(module)
        return inspect.getmembers(module)

    monkeypatch.setattr(interpreter, "getmembers", list_members)
    monkeypatch.setattr(tritons, "_patch_builtin", tritons._patch_builtin)  # put back afterwards
    interpreter._list_functions_once()
    for _ in range(2):
        assert sums(torch.ones(100)) == 200
    assert len(listed) == len(set(listed))
    assert tl in listed or not tl.core.is_builtin(tl.load), "replaced already: a helper was called before"


def test_quickening_twice_is_quickening_once():
    interpreter.quicken()
    before = tritons._patch_lang
    interpreter.quicken()
    assert tritons._patch_lang is before


def test_a_kernel_that_fails_leaves_the_language_as_it_was():
    interpreter.quicken()
    before = tl.load
    with pytest.raises(tritons.InterpreterError):
        sums_kernel[(1,)](torch.ones(4), None, 4, BLOCK=16)
    assert tl.load is before
    assert sums(torch.ones(4)) == 8


@triton.jit
def steps_kernel(x, y, steps):
    total = 0.0
    for step in range(steps):
        total += tl.load(x + step)
    for step in tl.range(0, steps, num_stages=2):
        total += tl.load(x + step)
    tl.store(y, total)


def test_a_loop_runs_to_a_number_that_the_kernel_was_given():
    """Triton 3.6 with numpy 2.4 needs labkit for it: an array of one element is no number any more."""
    interpreter.quicken()
    y = torch.full((1,), torch.nan)
    steps_kernel[(1,)](torch.arange(7.0), y, 5)
    assert y.item() == 20


def test_an_index_is_read_from_an_array_of_one_element():
    interpreter.quicken()
    scope = tritons._LangPatchScope()
    tritons._patch_lang_tensor(tl.tensor, scope)
    try:
        handle = tritons.TensorHandle(np.array([3], np.int32), tl.int32)
        assert list(range(tl.tensor(handle, tl.int32))) == [0, 1, 2]
    finally:
        scope.restore()


@triton.jit
def wrapping_kernel(x, y):
    at = tl.arange(0, 2)
    value = tl.load(x + at)
    tl.store(y + at, value + 1)
    tl.store(y + 2 + at, value * 3)
    tl.store(y + 4 + at, -2 - value)


def test_integers_wrap_around_as_on_a_gpu():
    interpreter.quicken()
    x = torch.tensor([2**31 - 1, 5], dtype=torch.int32)
    y = torch.zeros(6, dtype=torch.int32)
    wrapping_kernel[(1,)](x, y)
    assert y.tolist() == [-(2**31), 6, 2**31 - 3, 15, 2**31 - 1, -7]


@pytest.mark.parametrize("shape", [[4], [2, 8], [1, 1, 4], [4, tl.constexpr(2)], tl.tuple([2, 4])], ids=str)
def test_a_block_known_already_is_what_it_was_at_first(shape):
    interpreter.quicken()
    for scalar in (tl.float32, tl.bfloat16, tl.int1, tl.pointer_type(tl.float16)):
        first, second = tl.block_type(scalar, shape), tl.block_type(scalar, shape)
        assert first == second == tl.block_type(tl.int8, shape).with_element_ty(scalar)
        assert second.name == f"<{second.shape}, {scalar}>" and second.element_ty == scalar
        made = [tl.tensor(handle, second) for handle in "ab"]
        assert [each.handle for each in made] == ["a", "b"]
        for each in made:
            assert each.type is second and each.dtype == scalar and each.numel == second.numel
            sizes = [int(size.value if isinstance(size, tl.constexpr) else size) for size in shape]
            assert [size.value for size in each.shape] == sizes == list(second.shape)


def test_pointers_that_differ_in_more_than_their_names_are_told_apart():
    interpreter.quicken()
    kinds = [
        tl.pointer_type(of, space, const)
        for of in (tl.float32, tl.pointer_type(tl.float32), tl.pointer_type(tl.float32, 2))
        for space in (1, 2)
        for const in (False, True)
    ]
    for kind in kinds:
        block = tl.block_type(kind, [4])
        assert block.element_ty == kind and sum(block == tl.block_type(other, [4]) for other in kinds) == 1


def test_numpys_types_are_triton_s():
    interpreter.quicken()
    for name, expected in {"fp32": "float32", "bf16": "uint16", "int1": "bool", "fp8e5": "uint8"}.items():
        scalar = tl.dtype(name)
        pointer = tl.pointer_type(scalar)
        for _ in range(2):
            assert tritons._get_np_dtype(scalar) == expected
            assert tritons._get_np_dtype(tl.block_type(scalar, [4])) == expected
            assert (
                tritons._get_np_dtype(pointer)
                == tritons._get_np_dtype(tl.block_type(pointer, [4]))
                == "uint64"
            )


def test_what_triton_refuses_is_refused():
    interpreter.quicken()
    for _ in range(2):
        with pytest.raises(ValueError, match="power of 2"):
            tl.block_type(tl.float32, [3])
        with pytest.raises(TypeError, match="0d block_type"):
            tl.block_type(tl.float32, [])
        with pytest.raises(AssertionError):
            tl.block_type(tl.float32, (4,))
        tl.block_type(tl.float32, [4])
        with pytest.raises(TypeError, match="must have type"):
            tl.block_type(tl.float32, [tl.tensor(None, tl.int32)])


def operand(of, shape, seed):
    """A tensor of these elements: a block, or of one element where there is no shape."""
    drawn = np.random.default_rng(seed).integers(1, 9, shape or 1)
    if of == "pointer":
        scalar = tl.pointer_type(tl.float32)
        data = drawn.astype(np.uint64) * 64
    else:
        scalar = tl.dtype(of)
        data = drawn.astype(tritons._get_np_dtype(scalar))
        data = data << 7 if of == "bf16" else data
    return tl.tensor(
        tritons.TensorHandle(data, scalar), tl.block_type(scalar, list(shape)) if shape else scalar
    )


TENSORS = [
    (of, shape)
    for of in ("fp16", "bf16", "fp32", "fp64", "int1", "int32", "uint32", "int64", "pointer")
    for shape in ((), (4,), (2, 1), (2, 4))
]
NUMBERS = [0, 1, -3, 2**31, -(2**31), 2**40, True, 0.0, -0.0, 2.5, 1e-40, 1e300, float("nan"), float("inf")]
OPERATIONS = {
    "add": lambda semantic, x, y: semantic.add(x, y, True),
    "sub": lambda semantic, x, y: semantic.sub(x, y, True),
    "mul": lambda semantic, x, y: semantic.mul(x, y, True),
    "truediv": lambda semantic, x, y: semantic.truediv(x, y),
    "floordiv": lambda semantic, x, y: semantic.floordiv(x, y),
    "mod": lambda semantic, x, y: semantic.mod(x, y),
    "less": lambda semantic, x, y: semantic.less_than(x, y),
    "equal": lambda semantic, x, y: semantic.equal(x, y),
    "maximum": lambda semantic, x, y: semantic.maximum(x, y, tl.PropagateNan.NONE),
    "where": lambda semantic, x, y: semantic.where(operand("int1", (2, 4), 3), x, y),
    "and": lambda semantic, x, y: semantic.and_(x, y),
}


def outcome(operation, x, y):
    """The type and the elements of a result, or what is said against it."""
    try:
        with np.errstate(all="ignore"):
            result = OPERATIONS[operation](tritons.interpreter_semantic, x, y)
    except Exception as error:
        return type(error), str(error)
    shape = [int(size) for size in result.type.shape] if result.type.is_block() else [1]
    return result.type, np.broadcast_to(result.handle.data, shape).tobytes()


@pytest.mark.parametrize("operation", OPERATIONS)
def test_operands_become_what_triton_makes_of_them(operation, monkeypatch):
    """All pairs of tensors, and of tensors and numbers, both ways round; refusals too."""
    interpreter.quicken()
    tensors = [operand(*of, seed) for seed, of in enumerate(TENSORS)]
    pairs = [(x, y) for x in tensors for y in tensors]
    pairs += [pair for x in tensors for y in NUMBERS for pair in ((x, y), (y, x))]
    found = [outcome(operation, x, y) for x, y in pairs]
    quick = tritons.TritonSemantic.binary_op_type_checking_impl
    monkeypatch.setattr(tritons.TritonSemantic, "binary_op_type_checking_impl", quick.__wrapped__)
    for (x, y), was in zip(pairs, found, strict=True):
        assert was == outcome(operation, x, y), (operation, str(x), str(y))


@triton.jit
def numbers_kernel(x, y, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    value = tl.load(x + at)
    for step in range(6000):
        value = tl.maximum(value, step * 0.5)
    tl.store(y + at, value)


def test_more_numbers_than_are_remembered_are_right():
    interpreter.quicken()
    x, y = torch.rand(4), torch.zeros(4)
    numbers_kernel[(1,)](x, y, BLOCK=4)
    assert interpreter.MOST_CONSTANTS < 6000 and y.tolist() == [2999.5] * 4


@triton.jit
def unequal_kernel(y):
    tl.store(y + tl.arange(0, 4), tl.zeros([4], tl.float32) + tl.zeros([8], tl.float32))


def test_blocks_of_unequal_shapes_are_refused():
    interpreter.quicken()
    with pytest.raises(tritons.InterpreterError, match="incompatible dimensions"):
        unequal_kernel[(1,)](torch.zeros(4))
