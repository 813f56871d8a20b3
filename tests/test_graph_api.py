"""The stand-in for torch.cuda: streams that may race, graphs that compute at a replay only."""

import contextlib

import pytest
import torch

from labkit.graph_api import Machine, NotPermittedError


@pytest.fixture
def machine():
    with Machine() as machine:
        yield machine


def captured(machine, call):
    graph = machine.cuda.CUDAGraph()
    with machine.cuda.graph(graph):
        made = call()
    return graph, made


def test_a_capture_computes_nothing_and_a_replay_computes_in_place(machine):
    x = torch.ones(3)
    graph, y = captured(machine, lambda: x * 2)
    assert y.isnan().all() and machine.captures == 1
    address = y.data_ptr()
    graph.replay()
    assert y.tolist() == [2, 2, 2]
    x.fill_(5)
    assert y.tolist() == [2, 2, 2]
    graph.replay()
    assert y.tolist() == [10, 10, 10] and y.data_ptr() == address and machine.replays == 2


def test_what_writes_in_a_capture_writes_at_the_replay_only(machine):
    x, total = torch.ones(3), torch.zeros(3)
    graph, _ = captured(machine, lambda: total.add_(x))
    assert total.tolist() == [0, 0, 0]
    for _ in range(2):
        graph.replay()
    assert total.tolist() == [2, 2, 2] and graph.writes(total) and not graph.writes(x)


def test_views_and_whole_numbers_are_captured_too(machine):
    x = torch.arange(6)
    graph, y = captured(machine, lambda: x.view(2, 3).t().sum(0))
    assert y.tolist() == [0, 0]
    graph.replay()
    assert y.tolist() == [3, 12]


def test_a_capture_refuses_what_waits_and_fails_by_it(machine):
    x = torch.ones(3)
    for waits in (
        machine.cuda.synchronize,
        machine.default.synchronize,
        x[0].item,
        machine.cuda.Event().synchronize,
    ):
        graph = machine.cuda.CUDAGraph()
        with pytest.raises(NotPermittedError, match="not permitted when stream is capturing"):
            captured(machine, waits)
        caught = contextlib.suppress(RuntimeError)
        with pytest.raises(NotPermittedError), machine.cuda.graph(graph), caught:
            waits()
        assert machine.capturing is None
        with pytest.raises(RuntimeError, match="without a preceding successful capture"):
            graph.replay()
    machine.cuda.synchronize()


def test_an_exception_ends_a_capture(machine):
    graph = machine.cuda.CUDAGraph()
    with pytest.raises(KeyError), machine.cuda.graph(graph):
        raise KeyError
    assert machine.capturing is None and machine.current is machine.default and not machine.captures
    with machine.cuda.graph(graph):
        pass
    with pytest.raises(RuntimeError, match="already owns"):
        graph.capture_begin()
    graph.reset()
    assert captured(machine, lambda: None)[0].operations == 0


WAYS = {
    "wait_stream": lambda cuda, first, second: second.wait_stream(first),
    "wait_event": lambda cuda, first, second: second.wait_event(first.record_event()),
    "synchronize": lambda cuda, first, second: cuda.synchronize(),
    "of a stream": lambda cuda, first, second: first.synchronize(),
    "of an event": lambda cuda, first, second: first.record_event().synchronize(),
}


@pytest.mark.parametrize("way", [None, *WAYS])
@pytest.mark.parametrize("writes_first", [True, False])
def test_work_on_two_streams_is_a_conflict_unless_a_wait_lies_between(machine, way, writes_first):
    cuda = machine.cuda
    first, second, x = cuda.Stream(), cuda.Stream(), torch.zeros(3)
    cuda.synchronize()
    with cuda.stream(first):
        x.fill_(1) if writes_first else x + 1
    if way is not None:
        WAYS[way](cuda, first, second)
    with cuda.stream(second):
        x + 1 if writes_first else x.fill_(1)
    assert [(each.earlier, each.later) for each in machine.conflicts] == [(first, second)] * (way is None)


def test_two_streams_may_read_the_same_and_write_elsewhere(machine):
    cuda, x = machine.cuda, torch.zeros(3)
    for stream in (cuda.Stream(), cuda.Stream()):
        stream.wait_stream(cuda.current_stream())
        with stream:
            assert cuda.current_stream() is stream
            x + 1
    assert not machine.conflicts and machine.unwaited() == 2
    cuda.synchronize()
    assert not machine.unwaited()


def test_a_wait_does_not_cover_what_is_issued_after_it(machine):
    cuda, x = machine.cuda, torch.zeros(3)
    side = cuda.Stream()
    side.wait_stream(cuda.current_stream())
    x.fill_(2)
    with cuda.stream(side):
        x + 1
    assert len(machine.conflicts) == 1


def test_waits_are_handed_on(machine):
    cuda, x = machine.cuda, torch.zeros(3)
    first, second = cuda.Stream(), cuda.Stream()
    first.wait_stream(cuda.current_stream())
    second.wait_stream(first)
    with cuda.stream(second):
        x.fill_(1)
    assert not machine.conflicts


def test_a_replay_is_work_on_the_current_stream(machine):
    cuda, x = machine.cuda, torch.zeros(3)
    graph, _ = captured(machine, lambda: x + 1)
    side = cuda.Stream()
    with cuda.stream(side):
        graph.replay()
    assert {(each.earlier, each.later) for each in machine.conflicts} == {(machine.default, side)}


def test_capturing_the_current_stream_is_refused(machine):
    with pytest.raises(RuntimeError, match="non-default stream"):
        machine.cuda.CUDAGraph().capture_begin()
