"""Solutions of lesson 2's tasks. Each cell is what you would have written in the notebook's."""

# %%
import time

import torch


# %% [benchmark]
def time_us(gpu, layer, batch, width, calls=50):
    """How long the GPU works on one call of the layer, in microseconds."""
    # Drawing is work for the GPU: once, before the clock starts.
    x = gpu.randn(batch, width)
    # The first call compiles the layer.
    layer(x)
    # Both are only queued until now. Without this wait the clock would take them in, too.
    gpu.synchronize()
    start = gpu.clock_us()
    for _ in range(calls):
        layer(x)
    # The loop ends when the calls are in the queue, not when they are done.
    gpu.synchronize()
    return (gpu.clock_us() - start) / calls


# %% [graph]
def graph_us(call, calls=100, replays=10):
    """How long the GPU works on one call, in microseconds."""
    # The first call compiles, which cannot be captured.
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # In here launches are written down, and nothing runs. Python is as slow as ever, but nobody times it.
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    # The first replay brings the graph to the GPU.
    graph.replay()
    torch.cuda.synchronize()
    start = time.perf_counter()
    # A replay is one launch for all the calls.
    for _ in range(replays):
        graph.replay()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / (calls * replays) * 1e6
