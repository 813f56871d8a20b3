"""torch.cuda, or what stands for it: what a graph keeps, refuses and reads anew."""

import pytest
import torch
from operators import GPU, INTERPRETED

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


@INTERPRETED
def test_operations_on_lists_of_tensors_are_captured_and_an_optimizer_with_them():
    """In place they return nothing. SGD asks for a rate that is a tensor, unless it is fused."""
    cuda, several = labkit.cuda(), [torch.ones(3), torch.ones(2)]
    graph, _ = labkit.captured(cuda, lambda: torch._foreach_add_(several, 1.0))
    assert several[0].tolist() == [1.0] * 3, "nothing runs in a capture"
    graph.replay()
    graph.replay()
    assert [each.tolist() for each in several] == [[3.0] * 3, [3.0] * 2]
    weight, rate = torch.nn.Parameter(torch.ones(2)), torch.tensor(0.5)
    weight.grad = torch.ones(2)
    with pytest.raises(RuntimeError, match="asked for a number"):
        labkit.captured(cuda, torch.optim.SGD([weight], lr=rate, foreach=True).step)
    step, _ = labkit.captured(cuda, torch.optim.SGD([weight], lr=rate, fused=True).step)
    rate.fill_(2.0)
    step.replay()
    assert weight.tolist() == [-1.0, -1.0], "it follows the rate"


@pytest.mark.parametrize("call", [lambda x: x[x > 0], torch.nonzero, lambda x: x.masked_select(x > 0)])
def test_what_has_a_size_that_depends_on_numbers_is_refused(call):
    x = torch.ones(3, device=labkit.gpu.device())
    call(x)
    with pytest.raises(RuntimeError):
        labkit.captured(labkit.cuda(), lambda: call(x))


@GPU
def test_on_a_gpu_it_is_torch_cuda_itself():
    assert labkit.cuda() is torch.cuda
