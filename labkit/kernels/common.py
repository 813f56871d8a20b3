"""What all kernels share: limits of the GPU, strides of rows, products, activations."""

import functools
import math
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

# ---- limits of the GPU -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DeviceLimits:
    """The properties of a GPU that tile sizes depend on."""

    multiprocessors: int
    shared_bytes: int
    """Shared memory that one thread block may use; 0 where kernels are interpreted."""
    has_tma: bool
    """Whether hardware copies whole tiles (TMA, compute capability 9.0 and up; the interpreter has it, too).
    On older GPUs Triton compiles loads of a tensor descriptor to loads of single elements."""


@functools.cache
def device_limits(device: torch.device) -> DeviceLimits:
    """The limits of a tensor's device; of a small GPU of 4 multiprocessors where kernels are interpreted."""
    if device.type != "cuda":
        return DeviceLimits(multiprocessors=4, shared_bytes=0, has_tma=True)
    found: Any = torch.cuda.get_device_properties(device)  # its type lacks the fields
    return DeviceLimits(found.multi_processor_count, found.shared_memory_per_block_optin, found.major >= 9)


def empty_contiguous(like: Tensor) -> Tensor:
    """An uninitialised contiguous tensor of the same shape, dtype and device."""
    return torch.empty_like(like, memory_format=torch.contiguous_format)


def descriptor(t: Tensor | None, wanted: bool, *block: int) -> Any:
    """A tensor descriptor of t, or of t[0] where the block has an axis less, if one is wanted; else t."""
    if t is None or not wanted:
        return t
    return TensorDescriptor.from_tensor(t if t.dim() == len(block) else t[0], block)


def cdiv(count: int, size: int) -> int:
    """count / size, rounded up. From Python, triton.cdiv takes 2 us."""
    return -(count // -size)


def next_power_of_2(count: int) -> int:
    """The smallest power of two that is at least ``count``, 0 for 0. From Python, triton's takes 2 us."""
    return 1 << (count - 1).bit_length() if count else 0


def padded_columns(width: int, itemsize: int) -> int:
    """Columns of a tile that holds whole rows: a power of two, at least 4 bytes for each lane of a warp."""
    return max(128 // itemsize, next_power_of_2(width))


def row_stride(*tensors: Tensor) -> int | None:
    """How many elements apart the rows (last axis) of all these tensors begin; None where not all are as far.

    The halves of a ``chunk(2, -1)`` have twice their width. Of a single row, and of none, the width is given.
    """
    width, stride = tensors[0].shape[-1], None
    for t in tensors:
        sizes, strides = t.shape, t.stride()
        if width > 1 and strides[-1] != 1:
            return None
        apart = spanned = None  # of the last axis with several rows; what the next one's has to be
        for size, step in zip(sizes[-2::-1], strides[-2::-1], strict=True):
            if size == 1:
                continue
            if spanned is not None and step != spanned:
                return None
            apart, spanned = step if apart is None else apart, step * size
        apart = width if apart is None else apart
        if apart < width or (stride is not None and apart != stride):  # 0 where rows are one row, expanded
            return None
        stride = apart
    return stride


def spaced_rows(*tensors: Tensor) -> tuple[list[Tensor], int]:
    """The tensors, and how many elements apart their rows begin; copies unless that is the same for all."""
    stride = row_stride(*tensors)
    if stride is not None:
        return list(tensors), stride
    return [t.contiguous() for t in tensors], tensors[0].shape[-1]


def aligned(t: Tensor) -> bool:
    """Whether t is contiguous, and its rows, of one element and more, begin at multiples of 16 bytes.

    Of a single row, too, whose stride PyTorch leaves as it was: a tensor descriptor refuses others.
    """
    row = t.shape[-1] * t.itemsize
    strides = (t.stride(0) | t.stride(-2)) * t.itemsize
    return row > 0 and t.is_contiguous() and (row | strides | t.data_ptr()) % 16 == 0


def aligned_rows(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """x (M, K) and weight (..., K), or copies of them whose rows begin at multiples of 16 bytes.

    Where K is no multiple of 16 bytes, both are copied, and their rows end with zeros. The loads that tensor
    descriptors then make of them are several times as fast as those of single elements.
    """
    K = x.shape[-1]
    if K * x.itemsize % 16 == 0 and K:
        copy = torch.contiguous_format
        return tuple(t if aligned(t) else t.clone(memory_format=copy) for t in (x, weight))  # type: ignore
    x, weight, KP = x.contiguous(), weight.contiguous(), 16 * max(1, cdiv(K, 16))
    M, rows = x.shape[0], x.shape[0] + math.prod(weight.shape[:-1])
    padded = x.new_empty(rows, KP)
    COLS = min(1024, next_power_of_2(KP))
    ROWS = 4096 // COLS
    grid = cdiv(rows, ROWS), cdiv(KP, COLS)
    pad_kernel[grid](x, weight, padded, M, rows, K, KP, ROWS=ROWS, COLS=COLS)
    return padded[:M], padded[M:].view(*weight.shape[:-1], KP)


@triton.constexpr_function
def interpreted():
    """Whether the interpreter runs the kernel; a constant when it is compiled."""
    return triton.knobs.runtime.interpret


@triton.jit(do_not_specialize=["M", "rows", "K"])
def pad_kernel(x, weight, padded, M, rows, K, KP, ROWS: tl.constexpr, COLS: tl.constexpr):
    """padded (rows, KP): the M rows of x (M, K), then those of weight, each with zeros behind it."""
    row = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    col = tl.program_id(1) * COLS + tl.arange(0, COLS)[None, :]
    source = tl.where(row < M, x + row * K, weight + (row - M) * K)  # (ROWS, 1)
    tile = tl.load(source + col, (row < rows) & (col < K), other=0.0)
    tl.store(padded + row * KP + col, tile, (row < rows) & (col < KP))


@triton.jit
def offset64(index, stride):
    """index * stride in 64 bits, for tensors of 2**31 elements or more."""
    return tl.full([], 1, tl.int64) * index * stride


@triton.jit
def count_tiles(size, TILE: tl.constexpr):
    """Tiles of ``size`` rows, one at least. tl.cdiv adds TILE - 1, and the sum may exceed 32 bits where size
    does not."""
    return (size - 1) // TILE + 1


@triton.jit
def initial_state(h0, at, inside):
    """The state before the first step, of the shape of ``inside``, in float32; zeros without h0."""
    state = tl.zeros(inside.shape, tl.float32)
    if h0 is not None:
        state += tl.load(h0 + at, inside, other=0.0).to(tl.float32)
    return state


def allows_tf32() -> bool:
    """Whether PyTorch's setting allows TF32 in products, by ``torch.set_float32_matmul_precision`` or by
    ``torch.backends``: where the latter was used, ``torch.get_float32_matmul_precision`` raises an error."""
    return bool(torch.backends.cuda.matmul.fp32_precision == "tf32")


def float32_precision() -> str:
    """How ``dot`` multiplies float32: three products of TF32, or one where PyTorch's setting allows that."""
    return "tf32" if allows_tf32() else "tf32x3"


TF32X3: tl.constexpr = tl.constexpr("tf32x3")  # a bare str as a default is refused by Triton 3.6


@triton.jit
def dot(a, b, total=None, precision: tl.constexpr = TF32X3):
    """a @ b + total, summed in float32; float32 inputs as three products of TF32, with float32's error."""
    if interpreted():  # the interpreter's own products of bfloat16 are wrong
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, total, input_precision=precision)


@triton.jit
def opaque(tile):
    """The tile, float32, as the compiler cannot see through it: it has to wait for a product that still runs,
    and does not fold the tile's layout into the next one."""
    if interpreted():
        return tile
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=f,f", [tile], tl.float32, False, 1)


# ---- activations in float32 --------------------------------------------------------------------------------

LOG2_E: tl.constexpr = tl.constexpr(math.log2(math.e))
GELU_SCALE: tl.constexpr = tl.constexpr(2 * math.sqrt(2 / math.pi))
GELU_CUBE: tl.constexpr = tl.constexpr(0.044715)


@triton.jit
def sigmoid(z, FAST: tl.constexpr = False):
    """1 / (1 + e^-z): a root and its square instead of a division, or with FAST one tanh of half of z."""
    if FAST and not interpreted():
        gate = 0.5 + 0.5 * tanh(0.5 * z, FAST)
    else:
        root = tl.rsqrt(1.0 + tl.exp2(z * -LOG2_E))
        gate = root * root
    return gate


# tanh(x) is 2 sigmoid(2 x) - 1, which cancels where x is small: it is off by 3e-7 of 1, not of itself.
# - Up to ln(3) / 2 it is x + x z p(z) with z = x**2, and the p of degree 3 whose largest error is the least
#   (Remez): 4e-8 of tanh, coefficients rounded to float32. x z p(z) is less than x / 10, and its roundings
#   less than 1e-8 of x. The last rounding is 6e-8 at most.
# - From there on tanh is 1/2 or more, so that 3e-7 of 1 are 6e-7 of itself at most.
TANH_BOUND: tl.constexpr = tl.constexpr(math.log(3) / 2)
TANH_0: tl.constexpr = tl.constexpr(-0.3333295)
TANH_1: tl.constexpr = tl.constexpr(0.13320811)
TANH_2: tl.constexpr = tl.constexpr(-0.052677576)
TANH_3: tl.constexpr = tl.constexpr(0.016448904)


@triton.jit
def tanh(x, FAST: tl.constexpr):
    """tanh, off by a few 1e-7 of itself, or with ``FAST``, for 16-bit results, by 2**-11 of itself."""
    if FAST and not interpreted():
        y = tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)
    else:
        z = x * x
        small = x + x * (z * (TANH_0 + z * (TANH_1 + z * (TANH_2 + z * TANH_3))))
        y = tl.where(tl.abs(x) < TANH_BOUND, small, 2.0 * sigmoid(2.0 * x) - 1.0)
    return y


@triton.jit
def gelu_gate(z, FAST: tl.constexpr):
    """(1 + tanh(u)) / 2, by which z is multiplied in GELU's tanh form; it is sigmoid(2u).

    With FAST it is off by 2**-12 at most, and z times it by 2**-12 of z: a 16-bit result is rounded by as
    much in float16, and by eight times as much in bfloat16.
    """
    if FAST and not interpreted():
        u = z * (0.5 * GELU_SCALE + 0.5 * GELU_SCALE * GELU_CUBE * z * z)
        gate = 0.5 + 0.5 * tanh(u, FAST)
    else:
        gate = sigmoid(z * GELU_SCALE * (1.0 + z * z * GELU_CUBE))
    return gate


@triton.jit
def gelu(z, FAST: tl.constexpr):
    """GELU's tanh form of z in float32; with FAST, for 16-bit results, by one special function."""
    return z * gelu_gate(z, FAST)


@triton.jit
def gelu_and_derivative(z, FAST: tl.constexpr):
    """``gelu`` of z, and its derivative at z."""
    s = gelu_gate(z, FAST)
    value = z * s
    return value, s + value * (1.0 - s) * (GELU_SCALE + 3.0 * GELU_SCALE * GELU_CUBE * z * z)
