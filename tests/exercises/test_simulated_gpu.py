"""torch.cuda, or what stands for it: what a graph keeps, refuses and reads anew."""

import pytest
import torch
from taught import GPU, INTERPRETED

import labkit


def replayed(cuda, call):
    graph = cuda.CUDAGraph()
    with cuda.graph(graph):
        made = call()
    graph.replay()
    return graph, made


def test_a_graph_reads_and_writes_where_it_was_captured():
    cuda, device = labkit.cuda(), labkit.gpu.device()
    x, y = torch.ones(3, device=device), 2.0
    x * y
    graph, made = replayed(cuda, lambda: x * y)
    old, x, y = x, torch.zeros(3, device=device), 5.0
    graph.replay()
    assert made.tolist() == [2.0] * 3, "neither another tensor nor another number reaches it"
    old.fill_(7)
    graph.replay()
    assert made.tolist() == [14.0] * 3


@INTERPRETED
def test_the_stand_in_computes_nothing_in_a_capture_and_leaves_no_trace_when_it_fails():
    cuda, x = labkit.cuda(), torch.ones(3)
    graph = cuda.CUDAGraph()
    with cuda.graph(graph):
        y = x + 1
    assert y.isnan().all()
    refused, problem = cuda.CUDAGraph(), "not permitted when stream is capturing"
    with pytest.raises(RuntimeError, match=problem), cuda.graph(refused):
        x.sum().item()
    assert (x + 1).tolist() == [2.0] * 3 and cuda.current_stream() is cuda.default_stream()
    _, again = replayed(cuda, lambda: x * 3)
    assert again.tolist() == [3.0] * 3


@GPU
def test_on_a_gpu_it_is_torch_cuda_itself():
    assert labkit.cuda() is torch.cuda
