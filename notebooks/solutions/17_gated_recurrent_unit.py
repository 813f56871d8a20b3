"""Solutions of lesson 17's tasks. Each cell is what you would have written in the notebook's."""

# %%
import torch
import torch.nn.functional as F
import triton
import triton.language as tl


# %% [gru]
@triton.jit
def tanh(x):
    return 2 * tl.sigmoid(2 * x) - 1


@triton.jit
def gru_kernel(gates, weight, bias, h, B, T, H: tl.constexpr, BM: tl.constexpr, BH: tl.constexpr):
    """One program: all T steps of BM sequences."""
    row = (tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM))[:, None]  # (BM, 1)
    n = tl.arange(0, BH)[None, :]  # (1, BH)
    old = tl.arange(0, BH)[:, None]  # (BH, 1)
    inside, square = (row < B) & (n < H), (n < H) & (old < H)
    turned = weight + n * H + old
    w_r = tl.load(turned, mask=square, other=0.0)  # (old, new)
    w_z = tl.load(turned + H * H, mask=square, other=0.0)
    w_n = tl.load(turned + 2 * H * H, mask=square, other=0.0)
    b_r = tl.load(bias + n, mask=n < H, other=0.0).to(tl.float32)  # (1, BH)
    b_z = tl.load(bias + H + n, mask=n < H, other=0.0).to(tl.float32)
    b_n = tl.load(bias + 2 * H + n, mask=n < H, other=0.0).to(tl.float32)
    state = tl.zeros([BM, BH], tl.float32)
    for t in range(T):
        at = (row * T + t) * 3 * H + n
        i_r = tl.load(gates + at, mask=inside, other=0.0).to(tl.float32)
        i_z = tl.load(gates + at + H, mask=inside, other=0.0).to(tl.float32)
        i_n = tl.load(gates + at + 2 * H, mask=inside, other=0.0).to(tl.float32)
        operand = state.to(w_r.dtype)  # rounded for the products only: the state itself stays float32
        r = tl.sigmoid(i_r + b_r + tl.dot(operand, w_r, input_precision="tf32x3"))
        z = tl.sigmoid(i_z + b_z + tl.dot(operand, w_z, input_precision="tf32x3"))
        candidate = tanh(i_n + r * (b_n + tl.dot(operand, w_n, input_precision="tf32x3")))
        state = (1 - z) * candidate + z * state
        tl.store(h + (row * T + t) * H + n, state, mask=inside)


def gru(gates, weight, bias):
    """The states h (B, T, H), from gates (B, T, 3H), weight (3H, H) and bias (3H,)."""
    gates, weight, bias = gates.contiguous(), weight.contiguous(), bias.contiguous()
    (B, T, _), H = gates.shape, weight.shape[1]
    h = torch.empty(B, T, H, device=gates.device, dtype=gates.dtype)
    BH = max(16, triton.next_power_of_2(H))
    gru_kernel[(triton.cdiv(B, 16),)](gates, weight, bias, h, B, T, H=H, BM=16, BH=BH, num_warps=8)
    return h


def gru_layer(x, weight_ih, weight_hh, bias_ih, bias_hh):
    """The whole layer: the products with x of all steps at once, and then the kernel."""
    return gru(F.linear(x, weight_ih, bias_ih), weight_hh, bias_hh)
