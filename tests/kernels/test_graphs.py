"""Steps as replays of graphs: without a trace or a race, in order whatever stream they come from."""

import time
from contextlib import contextmanager, nullcontext
from itertools import count
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional

from labkit import device, graph_api, memory
from labkit.kernels import GraphedStep, graphs
from labkit.stack_works import block, stack

GPU = pytest.mark.skipif(not device.has_gpu(), reason="CUDA graphs exist on a GPU only")
TWO_GPUS = pytest.mark.skipif(
    not device.has_gpu() or torch.cuda.device_count() < 2, reason="there is no second GPU here"
)
bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32


# --- on a pretend device, whose streams may race ------------------------------------------------------


class Pretend:
    """torch, with a stand-in for torch.cuda that keeps to its rules and notes which work did not wait."""

    def __init__(self):
        self.machine = graph_api.Machine()
        self.cuda, self.pools = self, count()
        self._C = SimpleNamespace(
            _cuda_getCurrentRawStream=lambda gpu: self.machine.streams.index(self.machine.current)
        )

    def __getattr__(self, name):
        return getattr(self.machine.cuda if hasattr(self.machine.cuda, name) else torch, name)

    def is_available(self):
        return False

    def current_device(self):
        return 0

    def device(self, gpu):
        return nullcontext()

    def graph_pool_handle(self):
        return next(self.pools)

    def set_stream(self, stream):
        self.machine.current = stream

    @contextmanager
    def graph(self, graph, pool, stream):
        try:
            with self.machine.cuda.graph(graph, pool, stream):
                yield
        except BaseException:
            self.machine.current = stream  # as PyTorch leaves it
            raise


@pytest.fixture
def pretend(monkeypatch):
    if device.has_gpu():
        pytest.skip("on a GPU the tests below use it")
    stand_in = Pretend()
    monkeypatch.setattr(graphs, "torch", stand_in)
    monkeypatch.setattr(graphs, "GPU", "cpu")
    with torch.no_grad(), stand_in.machine:
        yield stand_in.machine


class Counting(nn.Module):
    """Each step changes a parameter and a buffer."""

    def __init__(self):
        super().__init__()
        self.weight, self.seen = nn.Parameter(torch.ones(4)), nn.Buffer(torch.zeros(()))

    def forward(self, x):
        self.seen.add_(1)
        self.weight.mul_(2)
        return (x * self.weight).sum(1)


def test_steps_are_captured_without_a_trace_and_without_a_race(pretend):
    model = Counting()
    step = GraphedStep(model, keep=(model,))
    for number, rows in enumerate((3, 3, 5, 3, 5), start=1):
        x = torch.randn(rows, 4)
        y = step(x)
        assert model.seen.item() == number and model.weight.tolist() == [2.0**number] * 4
        torch.testing.assert_close(y, (x * 2.0**number).sum(1))
    assert (pretend.captures, pretend.replays, pretend.conflicts) == (2, 5, [])
    assert pretend.unwaited() == 0


def test_calls_from_several_streams_are_in_order(pretend):
    """Copies of inputs, replays, warm-ups of new shapes, and what is read of the results."""
    step = GraphedStep(lambda x: (x * 2, x + 1))
    batches = [torch.randn(rows, 4) for rows in (3, 3, 5, 3, 5, 3)]
    streams = [pretend.default, *(pretend.cuda.Stream() for _ in range(2))]
    for stream in streams[1:]:
        stream.wait_stream(pretend.default)
    for number, batch in enumerate(batches):
        with pretend.on(streams[number % 3]):
            double, more = (y.clone() for y in step(batch))
            with pretend.unseen():
                assert torch.equal(double, batch * 2) and torch.equal(more, batch + 1)
    assert pretend.conflicts == []


def test_calls_from_one_stream_record_and_wait_for_nothing(pretend, monkeypatch):
    step, x = GraphedStep(lambda x: x * 2), torch.ones(3)
    step(x)
    monkeypatch.setattr(graph_api.Stream, "record_event", None)
    monkeypatch.setattr(graph_api.Stream, "wait_event", None)
    assert step(x).tolist() == [2.0] * 3


def test_the_workspaces_are_freed_between_warm_up_and_capture(pretend, monkeypatch):
    seen, calls = [], []
    monkeypatch.setattr(graphs, "own_workspaces", lambda: seen.append((len(calls), pretend.capturing)))
    step = GraphedStep(lambda x: calls.append(1) or x * 2)
    for rows in (3, 3, 4):
        step(torch.ones(rows))
    assert seen == [(3, None), (7, None)], "after three calls, before the fourth"


def test_a_step_without_inputs_is_a_graph_too(pretend):
    number = torch.zeros(2)
    step = GraphedStep(lambda: number.add_(1), keep=())
    assert [step().tolist() for _ in range(2)] == [[4.0] * 2, [5.0] * 2], "three of the warm-up"


def test_gradients_are_put_back(pretend):
    model = Counting()
    kept = model.weight.grad = torch.full((4,), 7.0)
    with graphs.unchanged([model]):
        model.weight.grad.add_(1)
    assert model.weight.grad is kept and kept.tolist() == [7.0] * 4
    model.weight.grad = None
    with graphs.unchanged([model]):
        model.weight.grad = kept
    assert model.weight.grad is None


def test_state_is_put_back_where_it_lay_also_after_an_error(pretend):
    model = Counting()
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.5), foreach=False)
    with pytest.raises(ZeroDivisionError), graphs.unchanged([model, optimizer]):
        model.weight.grad = torch.ones(4)
        optimizer.step()
        raise ZeroDivisionError
    state = optimizer.state[model.weight]
    assert model.weight.tolist() == [1.0] * 4 and all(not t.any() for t in state.values())
    model.weight.grad = torch.ones(4)
    optimizer.step()
    before = {name: (t.data_ptr(), t.clone()) for name, t in state.items()}
    with graphs.unchanged([model, optimizer]):
        optimizer.step()
        optimizer.param_groups[0]["lr"].mul_(2)
    for name, (at, value) in before.items():
        assert state[name].data_ptr() == at and torch.equal(state[name], value), name
    assert optimizer.param_groups[0]["lr"].item() == 0.5


def test_a_warm_up_that_fails_leaves_no_trace_and_no_race(pretend):
    model, calls = Counting(), []

    def call(x):
        y = model(x)
        calls.append(1)
        return 1 / 0 if len(calls) == 2 else y

    step, x = GraphedStep(call, keep=(model,)), torch.ones(3, 4)
    with pytest.raises(ZeroDivisionError):
        step(x)
    assert model.seen.item() == 0 and model.weight.tolist() == [1.0] * 4
    assert step(x).tolist() == [8.0] * 3 and pretend.conflicts == []


def test_random_numbers_go_on_as_if_nothing_had_been(pretend):
    before = torch.random.get_rng_state()
    with graphs.unchanged([]):
        torch.rand(10)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_a_scaler_is_put_back_even_if_it_was_made_in_between(pretend):
    scaler = torch.amp.GradScaler("cpu", init_scale=128.0)
    with graphs.unchanged([scaler]):
        scaler.scale(torch.ones(1))
        scaler._scale.fill_(2.0)
    assert scaler.get_scale() == 128.0


def test_a_capture_that_fails_can_be_tried_again(pretend):
    asks = [True]

    def call(x):
        y = x + 1
        if asks[0]:
            y.sum().item()
        return y

    step, x = GraphedStep(call), torch.ones(3)
    with pytest.raises(RuntimeError, match="not permitted"):
        step(x)
    assert pretend.current is pretend.default and not step.graphs
    sides = len(pretend.streams)
    asks[0] = False
    assert step(x).tolist() == [2.0] * 3 and len(pretend.streams) == sides + 1, "on another stream"


def test_the_graph_used_last_stays_and_a_pool_ends_with_its_last_graph(pretend):
    step = GraphedStep(lambda x: x * 2, most=2)
    for rows in (1, 2, 1, 3, 1):
        assert step(torch.ones(rows)).tolist() == [2.0] * rows
    assert pretend.captures == 3, "1 was used after 2, so 2 went"
    assert set(step.pools.values()) == {0}
    step = GraphedStep(lambda x: x * 2, most=1)
    pools = [step(torch.ones(rows)) is not None and set(step.pools.values()) for rows in (1, 2, 2)]
    assert pools == [{1}, {2}, {2}]


# --- what is refused ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("other", "problem"),
    [
        (lambda x: [x.double()], "input 0: is torch.float64"),
        (lambda x: [x, x], "inputs: 2"),
        (lambda x: [], "inputs: 0"),
        (lambda x: [x.to("meta")], "input 0: is on meta, should be on a GPU"),
        (lambda x: [0.5], "input 0: is of type float"),
    ],
)
def test_another_kind_of_input_is_refused(pretend, other, problem):
    step, x = GraphedStep(lambda x: x + 1), torch.ones(4)
    step(x)
    with pytest.raises(ValueError, match=f"^{problem}"):
        step(*other(x))
    assert torch.equal(step(x), x + 1)


def test_a_number_beside_a_tensor_is_refused_and_not_frozen(pretend):
    with pytest.raises(ValueError, match=r"^input 1: is of type float, should be a tensor"):
        GraphedStep(lambda x, rate: x * rate)(torch.ones(4), 0.5)


def test_an_input_that_wants_a_gradient_is_refused(pretend):
    step, x = GraphedStep(lambda x: x + 1), torch.ones(4, requires_grad=True)
    assert step(x).tolist() == [2.0] * 4
    with torch.enable_grad(), pytest.raises(ValueError, match=r"^input 0: requires a gradient"):
        step(x)


def test_an_optimizer_whose_state_does_not_begin_at_zero_is_refused_until_it_has_some(pretend):
    optimizer = torch.optim.NAdam(Counting().parameters())
    with pytest.raises(ValueError, match=r"^keep: NAdam"), graphs.unchanged([optimizer]):
        pass


@pytest.mark.parametrize("returned", [None, {"loss": torch.ones(1)}, [torch.ones(1), None]])
def test_a_call_that_returns_no_tensors_is_refused_before_the_capture(pretend, returned):
    with pytest.raises(ValueError, match=r"^call: returns"):
        GraphedStep(lambda x: returned)(torch.ones(1))
    assert pretend.captures == 0


def test_no_graphs_at_all_are_refused():
    with pytest.raises(ValueError, match=r"^most: is 0"):
        GraphedStep(lambda x: x, most=0)


# --- on a GPU -----------------------------------------------------------------------------------------


def drawn(rows, width, depth=3):
    torch.manual_seed(0)
    weight = torch.randn(depth, width, width, device="cuda") * width**-0.5
    bias, gain = 0.1 * torch.randn(2, depth, width, device="cuda")
    return torch.randn(rows, width, device="cuda"), weight, 3 * bias, 1 + gain


class Noisy(nn.Module):
    def forward(self, x):
        return functional.dropout(x, 0.5)


@GPU
def test_it_gives_what_the_call_gives_for_new_inputs_and_shapes():
    _, *weights = drawn(64, 32)
    step = GraphedStep(lambda x: stack(x, *weights))
    for rows in (64, 32, 64, 48):
        new = torch.randn(rows, 32, device="cuda")
        torch.testing.assert_close(step(new), stack(new, *weights), rtol=1e-5, atol=1e-5)


@GPU
@pytest.mark.parametrize("most", [1, 2])
def test_it_keeps_few_graphs(most):
    step = GraphedStep(lambda x: x * 2, most=most)
    for rows in (1, 2, 3, 1, 2, 3):
        new = torch.randn(rows, 4, device="cuda")
        assert torch.equal(step(new), new * 2) and len(step.graphs) <= most


@GPU
def test_calls_from_two_streams_wait_for_each_other():
    """Each replay reads its input late: a copy that does not wait would write over it."""

    def call(x):
        torch.cuda._sleep(2_000_000)  # cycles of the GPU, about 1 ms
        return x * 2

    step = GraphedStep(call)
    batches = [torch.randn(1000, device="cuda") for _ in range(8)]
    step(batches[0])
    streams, got = [torch.cuda.Stream() for _ in range(2)], []
    torch.cuda.synchronize()
    for number, batch in enumerate(batches):
        with torch.cuda.stream(streams[number % 2]):
            got.append(step(batch).clone())
    torch.cuda.synchronize()
    assert all(torch.equal(y, batch * 2) for y, batch in zip(got, batches, strict=True))


@GPU
def test_autocast_of_another_dtype_is_another_graph():
    layer, x = nn.Linear(8, 8).cuda(), torch.randn(4, 8, device="cuda")
    step = GraphedStep(layer)
    for dtype in (bf16, fp16):
        with torch.no_grad(), torch.autocast("cuda", dtype):
            assert step(x).dtype is dtype
    with torch.no_grad():
        assert step(x).dtype is fp32


@GPU
@pytest.mark.parametrize(
    "other", [lambda x: x.double(), lambda x: x.cpu(), lambda x: x.bfloat16()], ids=["double", "cpu", "bf16"]
)
def test_on_a_gpu_it_refuses_another_kind_of_input(other):
    step, x = GraphedStep(lambda x: x + 1), torch.randn(4, 4, device="cuda")
    step(x)
    with pytest.raises(ValueError, match=r"^input 0: is "):
        step(other(x))
    assert torch.equal(step(x), x + 1)


@TWO_GPUS
@pytest.mark.parametrize("most", [1, 4])
def test_inputs_on_a_gpu_that_is_not_the_current_one(most):
    step = GraphedStep(lambda x: (x @ x).relu() + torch.ones(8, device=x.device), most=most)
    for number in (1, 0, 1, 0, 1):
        x = torch.randn(8, 8, device=f"cuda:{number}")
        y = step(x)
        assert y.device == x.device and torch.cuda.current_device() == 0
        torch.testing.assert_close(y, (x @ x).relu() + 1)
    with pytest.raises(ValueError, match=r"^input 1: is on cuda:1, should be on cuda:0"):
        GraphedStep(torch.add)(torch.ones(1, device="cuda:0"), torch.ones(1, device="cuda:1"))


@TWO_GPUS
def test_random_numbers_of_the_inputs_own_gpu_are_put_back():
    step, x = GraphedStep(Noisy()), torch.ones(1000, device="cuda:1")
    torch.cuda.manual_seed_all(3)
    want = [functional.dropout(x, 0.5) for _ in range(3)]
    torch.cuda.manual_seed_all(3)
    got = [step(x).clone() for _ in range(3)]
    assert all(torch.equal(*pair) for pair in zip(got, want, strict=True))


@GPU
def test_a_failed_capture_on_a_gpu_can_be_tried_again():
    asks = [True]

    def call(x):
        return x + (x.sum().item() if asks[0] else 1)

    step, x = GraphedStep(call), torch.ones(4, device="cuda")
    for _ in range(2):
        with pytest.raises(RuntimeError):
            step(x)
        assert torch.cuda.current_stream() == torch.cuda.default_stream()
    asks[0] = False
    assert torch.equal(step(x), x + 1)
    assert torch.equal(GraphedStep(lambda x: x * 3)(x), x * 3)


@GPU
def test_it_does_without_the_workspaces_that_libraries_give_back():
    """torch.compile gives them back before it captures or tunes; few numbers from long sums use one."""
    torch.manual_seed(0)
    a, b = (torch.randn(shape, device="cuda", dtype=bf16) for shape in ((64, 2**15), (2**15, 64)))
    step, want = GraphedStep(torch.mm), torch.mm(a, b)
    step(a, b).zero_()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    elsewhere = torch.full((2**28,), 7, device="cuda", dtype=torch.int8)
    torch.testing.assert_close(step(a, b), want)
    assert bool((elsewhere == 7).all())


@GPU
def test_the_last_graph_of_a_pool_may_go_while_its_result_is_kept():
    step = GraphedStep(lambda x: x * 2, most=1)
    kept = [step(torch.ones(rows, device="cuda")) for rows in (3, 4, 5)]
    assert kept[-1].tolist() == [2.0] * 5


@GPU
def test_a_capture_takes_no_random_numbers():
    step = GraphedStep(Noisy())
    torch.manual_seed(3)
    want = [functional.dropout(torch.ones(1000, device="cuda"), 0.5) for _ in range(3)]
    torch.manual_seed(3)
    got = [step(torch.ones(1000, device="cuda")).clone() for _ in range(3)]
    assert all(torch.equal(*pair) for pair in zip(got, want, strict=True))


@GPU
def test_dropout_differs_between_replays_and_follows_the_seed():
    step, x = GraphedStep(Noisy()), torch.ones(1000, device="cuda")
    step(x)
    results = []
    for _ in range(2):
        torch.manual_seed(7)
        results.append([step(x).clone() for _ in range(3)])
    assert not torch.equal(results[0][0], results[0][1])
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


def training(graphed, rows=(8,) * 10, width=16):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True, capturable=True)
    scaler = torch.amp.GradScaler("cuda")

    @torch.enable_grad()
    def step(x):
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", bf16, cache_enabled=False):
            loss = functional.mse_loss(model(x), x)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.detach()

    act = GraphedStep(step, keep=(model, optimizer, scaler)) if graphed else step
    torch.manual_seed(1)
    losses = [act(torch.randn(each, width, device="cuda")).item() for each in rows]
    return losses, [p.detach().clone() for p in model.parameters()]


@GPU
@pytest.mark.parametrize("rows", [(8,) * 10, (8, 8, 5, 8, 5, 8), (4096, 4096, 1000, 4096)], ids=str)
def test_a_training_step_in_a_graph_trains_as_the_eager_one_does(rows):
    width = 1024 if rows[0] > 1000 else 16  # where the GPU takes longer than the host, too
    (eager, weights), (graphed, also) = (training(way, rows, width) for way in (False, True))
    assert graphed == pytest.approx(eager, rel=1e-3)
    for one, other in zip(weights, also, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)


@GPU
def test_weights_changed_after_the_capture_count_under_autocast():
    layer = nn.Linear(8, 8).cuda()
    step, x = GraphedStep(layer), torch.randn(4, 8, device="cuda")
    with torch.no_grad(), torch.autocast("cuda", bf16):
        before = step(x).clone()
        layer.weight.mul_(-1), layer.bias.mul_(-1)
        assert torch.equal(step(x), -before)


@GPU
def test_a_shared_pool_keeps_less_than_a_pool_each_if_the_largest_comes_first():
    weights = [t.clone() for t in drawn(1, 512, depth=4)[1:]]

    def kept(steps, rows):
        inputs = [torch.randn(each, 512, device="cuda") for each in rows]
        return memory.pool_bytes(
            lambda: [step for step, x in zip(steps, inputs, strict=True) if step(x) is not None]
        )

    def made():
        return GraphedStep(lambda x: stack(x, *weights))

    rows = (8192, 7168, 6144)  # tensors above 10 MB, each in a segment of memory of its own
    with torch.no_grad():
        shared = kept([made()] * 3, rows)
        assert shared < kept([made() for _ in rows], rows)
        assert shared < kept([made()] * 3, rows[::-1])


@GPU
def test_the_host_pays_little_more_than_for_a_bare_replay():
    x, *weights = drawn(64, 32)
    step = GraphedStep(lambda x: block(x, *(t[0] for t in weights)))
    step(x)
    ((graph, (static,), _),) = step.graphs.values()

    def least_us(call):
        best = float("inf")
        for _ in range(20):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(50):
                call()
            best = min(best, (time.perf_counter() - start) / 50 * 1e6)
        return best

    bare = least_us(graph.replay)  # other tests slow this host down: a replay more would be a fault
    assert least_us(lambda: step(static)) < 2 * bare + 1.0
