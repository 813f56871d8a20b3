"""replayed: a call as the replay of a CUDA graph."""

import functools

import pytest
import torch

from labkit import device
from labkit.kernels.graphs import replayed

pytestmark = pytest.mark.skipif(not device.has_gpu(), reason="a CUDA graph needs a GPU")


def test_a_replay_follows_its_inputs_and_is_captured_anew_for_others():
    replay = replayed(torch.add)
    a, b = torch.randn(2, 64, device="cuda")
    first = replay(a, b)
    a.fill_(3)
    assert replay(a, b) is first and torch.equal(first, a + b)
    assert replay(a[:8], b[:8]).shape == (8,)


def test_a_replay_does_without_the_workspaces_that_libraries_give_back():
    """torch.compile gives them back before it captures or tunes; few numbers from long sums use one."""
    a, b = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in ((64, 2**15), (2**15, 64)))
    y, want = torch.empty(64, 64, device="cuda", dtype=torch.bfloat16), torch.mm(a, b)
    other = torch.cuda.CUDAGraph()
    with torch.cuda.graph(other):  # whose workspace captures on this stream would use from now on
        torch.mm(a, b)
    replay = functools.partial(replayed(lambda a, b: torch.mm(a, b, out=y)), a, b)
    replay()
    torch.cuda.synchronize()
    del other
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    elsewhere = torch.full((2**28,), 7, device="cuda", dtype=torch.int8)
    y.zero_()
    replay()
    torch.cuda.synchronize()
    torch.testing.assert_close(y, want)
    assert bool((elsewhere == 7).all())
