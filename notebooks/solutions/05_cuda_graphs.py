"""Solutions of lesson 5's exercises. Each cell is what you would have written in the notebook's."""

# %%
import torch
import triton
import triton.language as tl
from torch import Tensor


# %% [capture]
def graphed(cuda, call, x):
    """A function that gives call's result for new values of x, by replaying a graph; `cuda` is torch.cuda.

    x stays the caller's, and so does each result: no later call may change them.
    """
    # A graph remembers addresses: it reads this tensor at every replay, and x stays the caller's.
    static = x.clone()
    # The first call compiles, which no capture allows. On a side stream, because parts of a backward pass
    # keep to the stream that they first ran on; streams wait for each other only where they are told to.
    side = cuda.Stream()
    side.wait_stream(cuda.current_stream())
    with cuda.stream(side):
        call(static)
    cuda.current_stream().wait_stream(side)
    graph = cuda.CUDAGraph()
    with cuda.graph(graph):
        y = call(static)  # computes nothing yet

    def replay(new):
        static.copy_(new)
        graph.replay()
        return y.clone()  # the next replay writes into y

    return replay


# %% [replay]
def replay_us(kernels, gap_us):
    """What a graph of these kernels takes, one after the other, `gap_us` between two.

    kernels: (start, length) of each on the device, in microseconds, as a timeline of eager calls has them;
    without a kernel it takes 0.
    """
    # When an eager kernel started says when Python got round to it. In a graph nobody waits for Python.
    busy = sum(length for _, length in kernels)
    # n kernels have n - 1 gaps between them, and none at all has no gap either.
    return busy + gap_us * len(kernels[1:])


# %% [safe]
@triton.jit
def scale_kernel(x, y, factor, N, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < N
    # factor is an address: each program loads the number that lies there when it runs, in a replay too.
    tl.store(y + at, tl.load(x + at, inside) * tl.load(factor), inside)


def scaled(x: Tensor, factor: Tensor) -> Tensor:
    """x times factor, a tensor of one number on x's device, which changes between replays.

    factor has the shape () or (1,), and is float32 or of x's dtype.
    """
    x = x.contiguous()
    y = torch.empty_like(x)
    # factor.item() would make Python wait for the number, and a graph would keep it as a constant.
    scale_kernel[(triton.cdiv(x.numel(), 1024),)](x, y, factor, x.numel(), BLOCK=1024)
    return y


# %% [museum]
# 1, the second batch got the first one's answer: a new tensor took the input's name (c).
# 2, a result changed in its list: the next replay wrote into it (e).
# 3, compiled a hundred times slower than eager: the time holds the compiling (b).
# 4, a large product in some microseconds: that is the launch, the clock did not wait for the GPU (a).
# 5, more bytes a second than memory has: they came from the cache (d).
diagnosis = {1: "c", 2: "e", 3: "b", 4: "a", 5: "d"}
