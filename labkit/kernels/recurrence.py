"""Recurrences along time, feature by feature: h_t = a_t * h_{t-1} + b_t, and the minimal GRU."""

# mypy: disable-error-code="assignment, var-annotated"

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from labkit.kernels.calls import check_sequences, differentiable, needs_grad, operator, promote
from labkit.kernels.common import (
    DeviceLimits,
    cdiv,
    device_limits,
    empty_contiguous,
    initial_state,
    next_power_of_2,
    padded_columns,
    spaced_rows,
)
from labkit.kernels.recurrence_scan import WARPS, scan_grad_kernel, scan_kernel

TILE = 512
"""The most segments times features of a scan's tile: four for each lane of 4 warps. The numbers below and the
plan's were found by measuring on an H200."""
GROUP_WORDS = 1024
"""What a program reads of the blocks before it in its group, at most: twice as much with few chains."""
STEPS_WORTH_IT = 64
"""A loop of fewer steps is over before blocks have looked back."""
FEW_STEPS = 2048
"""Up to so many, going through narrower chains costs less than to look back, which begins with a fill."""
LOOP_BYTES = 30 * 1024
"""Bytes in flight per multiprocessor with which a loop that holds them in registers is at memory's speed."""

# ---- kernels of the loop -----------------------------------------------------------------------------------
# a, b and h are (B, T, H); rows of a and b begin STRIDE elements apart, others H. A program goes through BH
# features of one sequence step by step. Few sequences are scanned instead (recurrence_scan.py).
# Loads run U steps ahead, into tuples of U blocks (BH,). A step begins with the loads for the step U further
# on, before its own store, because a compiler may not move a load over a store.


@triton.jit
def load_step(p, t, T, H: tl.constexpr, STRIDE: tl.constexpr, n):
    """Columns n of the sequence p at step t, (BH,); 0 outside of its T steps and H columns."""
    return tl.load(p + t * STRIDE + n, (n < H) & (t >= 0) & (t < T), other=0.0)


@triton.jit
def states_kernel(
    a, b, h0, h, T,
    H: tl.constexpr, STRIDE: tl.constexpr, BH: tl.constexpr, U: tl.constexpr, GRU: tl.constexpr,
):  # fmt: skip
    blocks: tl.constexpr = (H + BH - 1) // BH
    row, n = tl.program_id(0).to(tl.int64) // blocks, tl.program_id(0) % blocks * BH + tl.arange(0, BH)
    start, source = row * T * H, row * T * STRIDE
    state = initial_state(h0, row * H + n, n < H)  # (BH,), stays in float32
    coming_a, coming_b = (), ()
    for u in tl.static_range(U):
        coming_a += (load_step(a + source, u, T, H, STRIDE, n),)
        coming_b += (load_step(b + source, u, T, H, STRIDE, n),)
    for first in range(0, T, U):
        now_a, now_b, coming_a, coming_b = coming_a, coming_b, (), ()
        for u in tl.static_range(U):
            t = first + u
            coming_a += (
                load_step(a + source, t + U, T, H, STRIDE, n),
            )  # U steps ahead, before this step's store
            coming_b += (load_step(b + source, t + U, T, H, STRIDE, n),)
            gate, value = now_a[u].to(tl.float32), now_b[u].to(tl.float32)
            state = (1.0 - gate) * state + gate * value if GRU else gate * state + value
            tl.store(h + start + t * H + n, state, (n < H) & (t < T))


@triton.jit
def states_grad_kernel(
    dh, a, b, h0, h, da, db, dh0, T,
    H: tl.constexpr, STRIDE: tl.constexpr, BH: tl.constexpr, U: tl.constexpr, GRU: tl.constexpr,
):  # fmt: skip
    """Time in reverse: g_t = dh_t + a_{t+1} g_{t+1}, with 1 - a for a GRU, which alone reads b."""
    blocks: tl.constexpr = (H + BH - 1) // BH
    row, n = tl.program_id(0).to(tl.int64) // blocks, tl.program_id(0) % blocks * BH + tl.arange(0, BH)
    start, source = row * T * H, row * T * STRIDE
    carry = tl.zeros([BH], tl.float32)  # what comes back from step t+1
    before = initial_state(h0, row * H + n, n < H)
    coming_g, coming_a, coming_b, coming_h = (), (), (), ()
    for u in tl.static_range(U):
        coming_g += (load_step(dh + start, T - 1 - u, T, H, H, n),)
        coming_a += (load_step(a + source, T - 1 - u, T, H, STRIDE, n),)
        coming_h += (load_step(h + start, T - 2 - u, T, H, H, n),)
        if GRU:
            coming_b += (load_step(b + source, T - 1 - u, T, H, STRIDE, n),)
    for first in range(0, T, U):
        now_g, now_a, now_b, now_h = coming_g, coming_a, coming_b, coming_h
        coming_g, coming_a, coming_b, coming_h = (), (), (), ()
        for u in tl.static_range(U):
            t = T - 1 - first - u
            there = (n < H) & (t >= 0)
            coming_g += (load_step(dh + start, t - U, T, H, H, n),)
            coming_a += (load_step(a + source, t - U, T, H, STRIDE, n),)
            coming_h += (load_step(h + start, t - U - 1, T, H, H, n),)
            gate, g = now_a[u].to(tl.float32), now_g[u].to(tl.float32) + carry
            last = tl.where(t > 0, now_h[u].to(tl.float32), before)
            if GRU:
                coming_b += (load_step(b + source, t - U, T, H, STRIDE, n),)
                tl.store(da + start + t * H + n, g * (now_b[u].to(tl.float32) - last), there)
                tl.store(db + start + t * H + n, g * gate, there)
            else:
                tl.store(da + start + t * H + n, g * last, there)
                tl.store(db + start + t * H + n, g, there)
            carry = tl.where(t >= 0, (1.0 - gate if GRU else gate) * g, carry)
    if dh0 is not None:
        tl.store(dh0 + row * H + n, carry, n < H)


# ---- launches of the scan ----------------------------------------------------------------------------------


@cache
def scan_pays(B: int, T: int, H: int, itemsize: int, loop_steps: int, limits: DeviceLimits) -> bool:
    """Whether a loop that loads so many steps ahead, of all its tensors together, leaves memory idle.

    It does with few sequences, which have too few bytes in so many steps, with narrow ones, which leave most
    lanes of a warp idle, and with rows that no wide load can take.
    """
    if not STEPS_WORTH_IT <= T < 2**31 - 2**14:  # the last block's steps are counted in 32 bits
        return False
    few = B * H * itemsize * loop_steps < LOOP_BYTES * limits.multiprocessors
    return few or H * itemsize < 32 or H * itemsize % (16 if itemsize == 4 else 4) != 0


@cache
def scan_plan(
    B: int, T: int, H: int, itemsize: int, limits: DeviceLimits, back: bool, gru: bool
) -> tuple[int, int, dict[str, int]]:
    """Programs, blocks of a sequence, and sizes. A row of a tile has 128 bytes, 32 if steps are few, or 256.

    A chain is a sequence's BH features. With one for each multiprocessor and more, a program goes through
    its chain (W = 0). Two or three programs with a large tile fit a multiprocessor, four or five with a small
    one: small tiles are for as many chains as would leave a second wave of large ones nearly empty. With
    hardly a chain for each multiprocessor a program has more warps. Rows of 256 bytes are for many chains
    whose rows begin within a sector, which is then read twice. All bounds were measured on H100 and H200.

    Fewer chains are shared out block by block: tiles are large, since a block's wait is long, and groups too,
    since a chain waits for each of them in turn. Their S steps are loaded U at a time, twice, so that few
    registers hold them and more programs fit a multiprocessor.
    """
    BH, multiprocessors = min(128 // itemsize, next_power_of_2(H)), limits.multiprocessors
    S, tile, more = (16 if BH > 4 else 8), TILE, {"num_warps": WARPS}
    least = multiprocessors
    if T <= FEW_STEPS:
        least = multiprocessors * 3 // 5
        widths = (n for n in (BH, BH // 2, BH // 4) if n * itemsize >= 32)
        BH = next((n for n in widths if B * cdiv(H, n) >= least), BH)
    looks_back = (chains := B * cdiv(H, BH)) < least
    if not looks_back and chains < multiprocessors:
        S, more = 4 if back else 8, {"num_warps": 2 * WARPS, "maxnreg": 128}
    elif not looks_back:
        S, each, odd, narrow = 8, chains / multiprocessors, itemsize == 2 and H % 2, H * itemsize < 128
        if itemsize == 4:
            wider = B * cdiv(H, 2 * BH) >= multiprocessors if back else each > 3
        else:
            wider = each > (2 if back else 3) if odd else back and H % 8 and 3 < each <= 6
        if wider and not narrow:
            BH *= 2
        elif odd and not back and each < 1.5:
            BH = min(BH, 32)
        each = B * cdiv(H, BH) / multiprocessors
        if itemsize == 4 or back or odd:
            small = (0 if itemsize == 4 and back else 4 / 3) < each <= 3
        else:
            small = 3 < each <= 5
        if small or (back and gru) or T < 256 or (itemsize == 2 and (narrow or (wider and not odd))):
            tile = TILE // 2
    L = min(tile // BH, max(2, next_power_of_2(cdiv(T, S))))
    R, blocks = tile // (BH * L), cdiv(T, L * S)
    chains = cdiv(B, R) * cdiv(H, BH)
    W, U = 0, S
    if looks_back and blocks > 1:
        few = itemsize == 2 and chains <= 4  # a group's wait is longer than its bytes take
        W = min((2 if few else 1) * GROUP_WORDS // BH if BH > 4 else 16, next_power_of_2(blocks))
        U = S if BH * itemsize > 32 and H % 2 == 0 and (itemsize == 4 or not back) else min(S, 8)
    sizes = dict(H=H, R=R, L=L, S=S, BH=BH, W=W, U=U, **more)
    return (chains * blocks if W else chains), blocks, sizes


def _words(like: Tensor, programs: int, sizes: dict[str, int]) -> Tensor | None:
    """The counter of tickets, and what blocks tell each other, filled with -1; None where no block waits.

    Filled by the GPU at each call, also when a CUDA graph is replayed.
    """
    if not sizes["W"]:
        return None
    return torch.full((1 + 2 * programs * sizes["BH"],), -1, dtype=torch.int64, device=like.device)


def scan(a: Tensor, b: Tensor, h0: Tensor | None, h: Tensor, stride: int, gru: bool) -> None:
    """Write the states h (B, T, H); rows of a and b begin ``stride`` apart, the others are contiguous."""
    B, T, H = a.shape
    programs, blocks, sizes = scan_plan(B, T, H, a.itemsize, device_limits(a.device), False, gru)
    words, sizes = _words(a, programs, sizes), sizes | dict(STRIDE=stride, GRU=gru)
    scan_kernel[(programs,)](a, b, h0, h, words, B, T, blocks, **sizes)


def scan_back(
    dh: Tensor, a: Tensor, b: Tensor | None, h0: Tensor | None, h: Tensor,
    da: Tensor, db: Tensor, dh0: Tensor | None, stride: int, gru: bool,
) -> None:  # fmt: skip
    """Write the gradients da, db (B, T, H) and, if there is one, dh0 (B, H); a and b as in ``scan``."""
    B, T, H = a.shape
    programs, blocks, sizes = scan_plan(B, T, H, a.itemsize, device_limits(a.device), True, gru)
    words, sizes = _words(a, programs, sizes), sizes | dict(STRIDE=stride, GRU=gru)
    scan_grad_kernel[(programs,)](dh, a, b, h0, h, da, db, dh0, words, B, T, blocks, **sizes)


# ---- launches; sizes were found by measuring on an H200 ----------------------------------------------------


@cache
def recurrence_plan(
    B: int, T: int, H: int, itemsize: int, most: int, row_bytes: int = 512
) -> tuple[tuple[int], dict[str, int]]:
    """Grid and sizes for programs of ``row_bytes`` of a step at most; more of four steps or fewer.

    Loads run up to ``most`` steps ahead, but no further than there are steps.
    """
    steps = min(most, next_power_of_2(T))
    if steps <= 4:
        row_bytes = 512 if steps > 1 else 1024
    BH = min(row_bytes // itemsize, padded_columns(H, itemsize))
    single = itemsize == 4 or H % 8 != 0  # such numbers take more registers
    warps = max(1, BH * itemsize // (256 if single else 512))
    return (B * cdiv(H, BH),), dict(H=H, BH=BH, U=steps, num_warps=warps)


def spaced_steps(a: Tensor, b: Tensor | None) -> tuple[Tensor, Tensor | None, int]:
    """``spaced_rows`` of a and b (B, T, H); copies, too, where offsets within a sequence exceed 32 bits."""
    (x, *others), stride = spaced_rows(a) if b is None else spaced_rows(a, b)
    if a.shape[1] * stride < 2**31 - 32:
        return x, others[0] if others else None, stride
    return a.contiguous(), None if b is None else b.contiguous(), a.shape[2]


@operator(fake=lambda a, b, h0, gru: empty_contiguous(a))
def recurrence_forward(a: Tensor, b: Tensor, h0: Tensor | None, gru: bool) -> Tensor:
    (B, T, H), h = a.shape, empty_contiguous(a)
    a, b, stride = spaced_steps(a, b)
    h0 = None if h0 is None else h0.contiguous()
    if h.numel() and scan_pays(B, T, H, a.itemsize, 2 * 16, device_limits(a.device)):
        scan(a, b, h0, h, stride, gru)
    elif h.numel():
        row_bytes = 128 if H * a.itemsize % 4 else 512  # each number of an odd row takes a register
        grid, sizes = recurrence_plan(B, T, H, a.itemsize, 16, row_bytes)
        states_kernel[grid](a, b, h0, h, T, STRIDE=stride, GRU=gru, **sizes)
    return h


@operator(fake=lambda dh, a, b, h0, h, gru: [empty_contiguous(t) for t in (a, a, h0) if t is not None])
def recurrence_backward(
    dh: Tensor, a: Tensor, b: Tensor | None, h0: Tensor | None, h: Tensor, gru: bool
) -> list[Tensor]:
    """da, db, and dh0 if there is an h0; b is None unless ``gru``."""
    (B, T, H), da, db = a.shape, empty_contiguous(a), empty_contiguous(a)
    a, b, stride = spaced_steps(a, b)
    dh, h0 = dh.contiguous(), None if h0 is None else h0.contiguous()
    dh0 = None if h0 is None else torch.empty_like(h0)
    if a.numel() and scan_pays(B, T, H, a.itemsize, (3 + gru) * 8, device_limits(a.device)):
        scan_back(dh, a, b, h0, h, da, db, dh0, stride, gru)
    elif a.numel():
        row_bytes = 256 if H * a.itemsize % 16 else 512
        grid, sizes = recurrence_plan(B, T, H, a.itemsize, 8, row_bytes)
        states_grad_kernel[grid](dh, a, b, h0, h, da, db, dh0, T, STRIDE=stride, GRU=gru, **sizes)
    elif dh0 is not None:
        dh0.zero_()  # without steps no kernel is launched
    return [da, db] if dh0 is None else [da, db, dh0]


RecurrenceFunction = differentiable(
    recurrence_forward, recurrence_backward, lambda a, b, h0, gru, h: (a, b if gru else None, h0, h)
)


def linear_recurrence(a: Tensor, b: Tensor, h0: Tensor | None = None) -> Tensor:
    """h_t = a_t * h_{t-1} + b_t for t = 0 to T-1, feature by feature.

    Args:
        a, b: (B, T, H), T * H below 2**31; float32, float16 or bfloat16, any strides, the same for both. The
            halves of a ``chunk(2, -1)`` are read as they lie.
        h0: (B, H), the state before the first step; zeros where it is left out.

    Returns:
        The states h (B, T, H), contiguous, of a's dtype; the running state is float32, and each is rounded
        once. Inside torch.autocast the dtypes may differ: nothing is cast down, and the states have the
        widest, as a * h + b has in PyTorch. A state is finite where a loop's in float32 is, unless
        inputs near the end of float32's range add up beyond it over several blocks of a scan; and not finite
        where the loop's is not, though it may be NaN where that is infinite.

    Raises:
        ValueError: for another shape, dtype or device, naming the argument.

    Few long sequences, whose steps a loop would compute on a few multiprocessors, are scanned: blocks of
    steps are combined as one. That adds up in another order. A block in which a gate is beyond [-1, 1] is
    computed by a loop all the same: one such gate in each block makes a scan as slow as a loop.

    In reverse, g_t = dh_t + a_{t+1} * g_{t+1}: da_t = g_t * h_{t-1}, db_t = g_t, dh0 = a_0 * g_0. Cells of
    this form are collected in https://arxiv.org/abs/2410.01201.
    """
    check_sequences("a", a, "b", b, h0)
    a, b, h0 = promote(a, b, h0)
    call = RecurrenceFunction.apply if needs_grad(a, b, h0) else recurrence_forward
    return call(a, b, h0, False)


def min_gru(z: Tensor, candidate: Tensor, h0: Tensor | None = None) -> Tensor:
    """h_t = (1 - z_t) * h_{t-1} + z_t * candidate_t for t = 0 to T-1, feature by feature.

    Args:
        z, candidate: (B, T, H), T * H below 2**31; float32, float16 or bfloat16, any strides, the same for
            both. z is meant to lie between 0 and 1.
        h0: (B, H), the state before the first step; zeros where it is left out.

    Returns:
        The states h (B, T, H), contiguous, of z's dtype; the running state is float32, and each is rounded
        once. Inside torch.autocast the dtypes may differ: nothing is cast down, and the states have the
        widest. What linear_recurrence says of infinite states and of scans holds here, too.

    Raises:
        ValueError: for another shape, dtype or device, naming the argument.

    In reverse, g_t = dh_t + (1 - z_{t+1}) * g_{t+1}: dz_t = g_t * (candidate_t - h_{t-1}), dcandidate_t =
    g_t * z_t, dh0 = (1 - z_0) * g_0. The cell is minGRU of https://arxiv.org/abs/2410.01201.
    """
    check_sequences("z", z, "candidate", candidate, h0)
    z, candidate, h0 = promote(z, candidate, h0)
    call = RecurrenceFunction.apply if needs_grad(z, candidate, h0) else recurrence_forward
    return call(z, candidate, h0, True)
