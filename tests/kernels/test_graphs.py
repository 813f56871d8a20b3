"""Steps as replays of graphs: without a trace or a race, in order whatever stream they come from."""

import operators as op
import pytest
import torch
from graph_stand_in import TorchStandIn
from operators import bf16, fp16, fp32
from torch import nn
from torch.nn import functional

from labkit import gpu
from labkit.exercises import simulated_gpu
from labkit.kernels import GraphedStep, graphs

# --- on a pretend device, whose streams may race ------------------------------------------------------


@pytest.fixture
def pretend(monkeypatch):
    if gpu.available():
        pytest.skip("on a GPU the tests below use it")
    device = TorchStandIn()
    monkeypatch.setattr(graphs, "torch", device)
    monkeypatch.setattr(graphs, "DEVICE_TYPE", "cpu")
    with torch.no_grad(), device.machine:
        yield device.machine


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
        with pretend.cuda.stream(streams[number % 3]):
            double, more = (y.clone() for y in step(batch))
            with pretend.unobserved():
                assert torch.equal(double, batch * 2) and torch.equal(more, batch + 1)
    assert pretend.conflicts == []


def test_the_workspaces_are_freed_between_warm_up_and_capture(pretend, monkeypatch):
    seen, calls = [], []
    monkeypatch.setattr(
        graphs, "release_cublas_workspaces", lambda: seen.append((len(calls), pretend.capturing))
    )
    step = GraphedStep(lambda x: calls.append(1) or x * 2)
    for rows in (3, 3, 4):
        step(torch.ones(rows))
    assert seen == [(3, None), (7, None)], "after three calls, before the fourth"


def test_calls_from_one_stream_record_and_wait_for_nothing(pretend, monkeypatch):
    number = torch.zeros(2)
    step = GraphedStep(lambda: number.add_(1), keep=())  # without inputs it is a graph, too
    assert step().tolist() == [4.0] * 2, "three of the warm-up"
    monkeypatch.setattr(simulated_gpu.Stream, "record_event", None)
    monkeypatch.setattr(simulated_gpu.Stream, "wait_event", None)
    monkeypatch.setattr(simulated_gpu.Stream, "wait_stream", None)
    assert step().tolist() == [5.0] * 2


def test_state_is_put_back_where_it_lay_also_after_an_error(pretend):
    model = Counting()
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.5), foreach=False)
    with pytest.raises(ZeroDivisionError), graphs.preserve_state([model, optimizer]):
        model.weight.grad = torch.ones(4)
        optimizer.step()
        raise ZeroDivisionError
    state = optimizer.state[model.weight]
    assert model.weight.tolist() == [1.0] * 4 and all(not t.any() for t in state.values())
    assert model.weight.grad is None
    model.weight.grad = kept = torch.ones(4)
    optimizer.step()
    before = {name: (t.data_ptr(), t.clone()) for name, t in state.items()}
    scaler, numbers = torch.amp.GradScaler("cpu", init_scale=128.0), torch.random.get_rng_state()
    with graphs.preserve_state([model, optimizer, scaler]):
        optimizer.step()
        optimizer.param_groups[0]["lr"].mul_(2)
        model.weight.grad.add_(1)
        scaler.scale(torch.rand(1))
        scaler._scale.fill_(2.0)
    for name, (at, value) in before.items():
        assert state[name].data_ptr() == at and torch.equal(state[name], value), name
    assert optimizer.param_groups[0]["lr"].item() == 0.5 and scaler.get_scale() == 128.0
    assert model.weight.grad is kept and kept.tolist() == [1.0] * 4
    assert torch.equal(torch.random.get_rng_state(), numbers)
    with (
        pytest.raises(ValueError, match=r"^keep: NAdam"),
        graphs.preserve_state([torch.optim.NAdam(model.parameters())]),
    ):
        pass


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
    step = GraphedStep(lambda x: x * 2, max_graphs=2)
    for rows in (1, 2, 1, 3, 1):
        assert step(torch.ones(rows)).tolist() == [2.0] * rows
    assert pretend.captures == 3, "1 was used after 2, so 2 went"
    assert set(step.pools.values()) == {0}
    step = GraphedStep(lambda x: x * 2, max_graphs=1)
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
        (lambda x: [x.clone().requires_grad_()], "input 0: requires a gradient"),
        (lambda x: [0.5], "input 0: is of type float"),  # not frozen, either
    ],
)
def test_another_kind_of_input_is_refused(pretend, other, problem):
    step, x = GraphedStep(lambda x: x + 1), torch.ones(4)
    step(x)
    with torch.enable_grad(), pytest.raises(ValueError, match=f"^{problem}"):
        step(*other(x))
    assert torch.equal(step(x.requires_grad_()), x + 1), "without a gradient it may"


@pytest.mark.parametrize("returned", [None, {"loss": torch.ones(1)}, [torch.ones(1), None]])
def test_a_call_that_returns_no_tensors_is_refused_before_the_capture(pretend, returned):
    with pytest.raises(ValueError, match=r"^call: returns"):
        GraphedStep(lambda x: returned)(torch.ones(1))
    assert pretend.captures == 0
    with pytest.raises(ValueError, match=r"^max_graphs: is 0"):
        GraphedStep(lambda x: x, max_graphs=0)


# --- on a GPU -----------------------------------------------------------------------------------------


class Noisy(nn.Module):
    def forward(self, x):
        return functional.dropout(x, 0.5)


def network(x):
    """Three layers without weights."""
    for _ in range(3):
        x = x + torch.relu(x.roll(1, 1)).square()
    return x


@op.GPU
def test_it_gives_what_the_call_gives_for_new_inputs_and_shapes():
    step = GraphedStep(network)
    for rows in (64, 32, 64, 48):
        new = torch.randn(rows, 32, device="cuda")
        torch.testing.assert_close(step(new), network(new), rtol=1e-5, atol=1e-5)


@op.GPU
def test_a_replay_does_without_the_workspaces_that_libraries_give_back():
    """torch.compile gives them back before it captures or tunes; few numbers from long sums use one."""
    a, b = (torch.randn(shape, device="cuda", dtype=bf16) for shape in ((64, 2**15), (2**15, 64)))
    want, other = torch.mm(a, b), torch.cuda.CUDAGraph()
    with torch.cuda.graph(other):  # whose workspace captures on this stream would use from now on
        torch.mm(a, b)
    replay = GraphedStep(torch.mm)
    y = replay(a, b)
    torch.cuda.synchronize()
    del other
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    elsewhere = torch.full((2**28,), 7, device="cuda", dtype=torch.int8)
    y.zero_()
    torch.testing.assert_close(replay(a, b), want)
    assert bool((elsewhere == 7).all())


@op.GPU
def test_autocast_of_another_dtype_is_another_graph_in_which_changed_weights_count():
    layer, x = nn.Linear(8, 8).cuda(), torch.randn(4, 8, device="cuda")
    step = GraphedStep(layer)
    with torch.no_grad():
        for dtype in (bf16, fp16):
            with torch.autocast("cuda", dtype):
                before = step(x).clone()
                layer.weight.mul_(-1), layer.bias.mul_(-1)
                assert before.dtype is dtype and torch.equal(step(x), -before)
        assert step(x).dtype is fp32


@op.GPU
@pytest.mark.parametrize("where", ["cuda:0", pytest.param("cuda:1", marks=op.TWO_GPUS)])
def test_a_capture_takes_no_random_numbers_and_replays_differ_and_follow_the_seed(where):
    step, x, results = GraphedStep(Noisy()), torch.ones(1000, device=where), []
    for call in (Noisy(), step, step):  # the second captures
        torch.cuda.manual_seed_all(3)
        results.append([call(x).clone() for _ in range(3)])
    assert op.equal(results[0], results[1]) and op.equal(results[1], results[2])
    assert not torch.equal(results[0][0], results[0][1])


@op.GPU
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


@op.TWO_GPUS
@pytest.mark.parametrize("max_graphs", [1, 4])
def test_inputs_on_a_gpu_that_is_not_the_current_one(max_graphs):
    step = GraphedStep(lambda x: (x @ x).relu() + torch.ones(8, device=x.device), max_graphs=max_graphs)
    for number in (1, 0, 1, 0, 1):
        x = torch.randn(8, 8, device=f"cuda:{number}")
        y = step(x)
        assert y.device == x.device and torch.cuda.current_device() == 0
        torch.testing.assert_close(y, (x @ x).relu() + 1)
    with pytest.raises(ValueError, match=r"^input 1: is on cuda:1, should be on cuda:0"):
        GraphedStep(torch.add)(torch.ones(1, device="cuda:0"), torch.ones(1, device="cuda:1"))


@op.GPU
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


@op.GPU
@pytest.mark.parametrize("rows", [(8,) * 10, (8, 8, 5, 8, 5, 8), (4096, 4096, 1000, 4096)], ids=str)
def test_a_training_step_in_a_graph_trains_as_the_eager_one_does(rows):
    width = 1024 if rows[0] > 1000 else 16  # where the GPU takes longer than the host, too
    (eager, weights), (graphed, also) = (training(way, rows, width) for way in (False, True))
    assert graphed == pytest.approx(eager, rel=1e-3)
    for one, other in zip(weights, also, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)
