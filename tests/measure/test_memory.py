"""The memory high-water mark: what counts, and what does not."""

import pytest
import torch
from simulated import PeakMemory

from labkit import gpu
from labkit.measure import memory

N = 1000
"""Elements of a float32 tensor: 4000 bytes."""


@pytest.fixture
def x(monkeypatch):
    monkeypatch.setattr(memory, "PeakMemory", PeakMemory)
    return torch.randn(N)


def grown(x):
    """Three tensors, no more than two at a time."""
    y = x + 1
    y = y * 2
    return y.view(8, -1)


def test_outputs_and_intermediates_count_and_inputs_do_not(x):
    assert memory.peak_bytes(lambda: x) == 0
    assert memory.peak_bytes(lambda: x + 1) == 4 * N
    assert memory.peak_bytes(lambda: grown(x)) == 8 * N, "views and what is gone do not count"
    assert memory.peak_bytes(lambda: [x + 1, x + 2, x + 3]) == 12 * N
    assert memory.peak_bytes(lambda: x.add_(1)) == 0
    leaf = x.requires_grad_()
    both = lambda: torch.autograd.grad((leaf.exp() + 1).sum(), leaf)  # noqa: E731
    assert memory.peak_bytes(both) == 8 * N + 2 * 4, "exp, which is saved, and its gradient; the sum and ones"


def test_the_first_call_is_not_the_one_that_counts(x):
    kept = []

    def call():
        if not kept:  # as a library does with its workspace
            kept.append(torch.empty(10 * N))
        return x + 1

    assert memory.peak_bytes(call) == 4 * N


def test_the_allocator_is_asked_between_its_reset_and_its_peak(monkeypatch):
    log, state = [], {"requested_bytes.all.current": 70, "requested_bytes.all.peak": 500}
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: log.append("synchronize"))
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda: state)

    def reset():
        log.append("reset")
        state["requested_bytes.all.peak"] = state["requested_bytes.all.current"]

    def call():
        log.append("call")
        state["requested_bytes.all.peak"] = max(state["requested_bytes.all.peak"], 170)

    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", reset)
    assert memory.peak_bytes(call) == 100
    assert log == ["call", "synchronize", "reset", "call", "synchronize"]


@pytest.mark.skipif(not gpu.available(), reason="there is no GPU, whose allocator this asks")
def test_a_gpu_counts_as_the_simulated_one_does():
    on_gpu = torch.randn(2**22, device="cuda")
    junk = torch.empty(2**24, device="cuda")
    del junk  # what was in use before does not count
    assert memory.peak_bytes(lambda: grown(on_gpu)) == 2 * on_gpu.nbytes
    assert memory.peak_bytes(lambda: on_gpu.add_(1)) == 0
