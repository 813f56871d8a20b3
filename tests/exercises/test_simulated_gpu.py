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


def test_a_graphed_training_step_does_what_the_step_itself_does():
    """Without a GPU on the stand-in, the warm-up's trace removed, with a rate that changes."""
    device = labkit.gpu.device()
    torch.manual_seed(0)
    batches, ends = torch.randn(6, 8, 4, device=device), []
    for wrap in (lambda step, keep: step, lambda step, keep: labkit.graphed_step(step, keep)):
        torch.manual_seed(1)
        model, rate = torch.nn.Linear(4, 1).to(device), torch.zeros((), device=device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=rate, fused=True, capturable=True)

        def train(x, model=model, optimizer=optimizer):
            optimizer.zero_grad()
            loss = (model(x) - 1).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        step = wrap(train, (model, optimizer))
        losses = [step(x).item() for x in batches if rate.add_(0.01) is not None]
        ends.append(torch.tensor([*losses, *model.weight.flatten().tolist()]))
    torch.testing.assert_close(*ends, rtol=1e-4, atol=1e-5)


@INTERPRETED
def test_the_stand_in_of_a_graphed_step_refuses_what_the_real_one_refuses():
    step = labkit.graphed_step(torch.neg)
    assert step(torch.ones(3)).tolist() == [-1.0] * 3
    with pytest.raises(ValueError, match=r"^input 0: is torch.float64"):
        step(torch.ones(3).double())


@GPU
def test_on_a_gpu_it_is_torch_cuda_itself():
    assert labkit.cuda() is torch.cuda
