"""Lesson 4: the stack in one kernel and in many, norm and GELU with gradients, steps in graphs."""

import re
import time
from types import SimpleNamespace

import launches as launches_of
import pytest
import torch
import triton
from launches import FAMILIES, ROOM
from torch import nn
from torch.nn import functional

from labkit import checks, codegen, counts, device, graph_api, lessons, memory
from labkit.stack_works import EPS, block, stack

NAME = "04_cuda_graphs"
GPU = pytest.mark.skipif(not device.has_gpu(), reason="CUDA graphs exist on a GPU only")
INTERPRETED = pytest.mark.skipif(
    device.has_gpu(), reason="launches are counted, and kernels compiled for other GPUs, where there is none"
)
bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32


@pytest.fixture(scope="module")
def lesson(cache):
    return lessons.load(NAME)


def drawn(rows, width, depth=3, dtype=fp32):
    torch.manual_seed(0)
    tensors = (
        torch.randn(rows, width),
        torch.randn(depth, width, width) * width**-0.5,
        0.3 * torch.randn(depth, width),
        1 + 0.1 * torch.randn(depth, width),
    )
    return [t.to(device.name(), dtype) for t in tensors]


def close(got, want, dtype):
    problem = checks.diagnose(got.detach(), want.detach(), checks.TOLERANCE[dtype])
    assert not problem, problem


# --- the stack ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [fp32, bf16, fp16], ids=str)
@pytest.mark.parametrize(("rows", "width"), [(33, 64), (16, 128), (5, 20), (1, 1), (40, 96), (0, 8)])
@pytest.mark.parametrize("at_once", [1, 2, 99])
def test_the_stack_is_right(lesson, dtype, rows, width, at_once):
    tensors = drawn(rows, width, dtype=dtype)
    close(lesson.blocks(at_once)(*tensors), stack(*(t.double() for t in tensors)), dtype)


def test_the_stack_takes_any_strides(lesson):
    x, *weights = drawn(64, 33)
    want = stack(*(t.double() for t in (x, *weights)))
    turned = [t.mT.contiguous().mT for t in (x, weights[0])]
    close(lesson.blocks(99)(turned[0], turned[1], *weights[1:]), want, fp32)


@pytest.mark.parametrize("rows", [16, 32, 64])
def test_any_number_of_rows_a_program_is_right(lesson, monkeypatch, rows):
    monkeypatch.setattr(lesson, "rows_for", lambda *_: rows)
    tensors = drawn(70, 32, dtype=bf16)
    close(lesson.blocks(99)(*tensors), stack(*(t.double() for t in tensors)), bf16)


def test_programs_take_more_rows_where_there_are_more_than_places(lesson, monkeypatch):
    monkeypatch.setattr(lesson.machine, "identity", lambda: SimpleNamespace(multiprocessors=100))
    lesson.rows_for.cache_clear()
    sizes = (1, 1600, 1601, 3200, 3201, 10**6)
    assert [lesson.rows_for(rows, 128, 2) for rows in sizes] == [16, 16, 32, 32, 64, 64]
    assert [lesson.rows_for(rows, 256, 2) for rows in sizes] == [16, 16, 32, 32, 32, 32]
    lesson.rows_for.cache_clear()


@pytest.mark.parametrize("wrong", ["x", "weight", "bias", "gain"])
def test_a_wrong_stack_names_the_argument(lesson, wrong):
    tensors = dict(zip(("x", "weight", "bias", "gain"), drawn(4, 16), strict=True))
    tensors[wrong] = tensors[wrong][..., None] if wrong == "x" else tensors[wrong][:, :-1]
    with pytest.raises(ValueError, match=f"^{wrong}:"):
        lesson.blocks(99)(**tensors)


@INTERPRETED
@pytest.mark.parametrize(("rows", "width"), [(16, 16), (5, 20), (33, 33)])
def test_every_row_is_read_and_written_once_and_none_beyond_the_last(lesson, rows, width):
    """A load without the mask of its rows gives the right result: no row is used for another."""
    fences = checks.Fences()
    tensors = [fences.place(tensor, "contiguous") for tensor in drawn(rows, width, depth=2)]
    (launch,) = counts.count(lambda: lesson.blocks(99)(*tensors)).launches
    programs = -(-rows // lesson.rows_for(rows, max(16, triton.next_power_of_2(width)), 4))
    assert launch.bytes_written == 4 * rows * width
    assert launch.bytes_read == 4 * (rows * width + programs * 2 * width * (width + 2))


@INTERPRETED
def test_one_launch_or_one_a_block(lesson):
    tensors = drawn(20, 16, depth=5)
    for at_once, launches in ((99, 1), (1, 5), (2, 3)):
        assert len(counts.count(lambda n=at_once: lesson.blocks(n)(*tensors)).launches) == launches
    nothing = drawn(0, 16)
    made = [launch.name for launch in counts.count(lambda: lesson.blocks(99)(*nothing)).launches]
    assert "stack_kernel" not in made, "a GPU refuses an empty grid"


# --- norm and GELU ------------------------------------------------------------------------------------


def plain(z, bias, gain):
    return functional.gelu(functional.rms_norm(z + bias, gain.shape, gain, EPS), approximate="tanh")


def inputs(shape):
    return torch.randn(shape), 0.3 * torch.randn(shape[-1:]), 1 + 0.1 * torch.randn(shape[-1:])


def test_norm_gelu_is_right_and_so_are_its_gradients(lesson):
    assert checks.check(
        lesson.norm_gelu, plain, inputs, shapes=((33, 64), (2, 3, 20), (1, 7), (0, 8), (70, 256))
    )


def test_the_gradients_of_bias_and_gain_sum_over_however_many_programs(lesson, monkeypatch):
    """More rows than the programs take at once, and more programs than the second kernel takes."""
    kernel, programs = lesson.norm_gelu_grad_kernel, []

    class Seen:
        def __getitem__(self, grid):
            programs.extend(grid)
            return kernel[grid]

    monkeypatch.setattr(lesson, "norm_gelu_grad_kernel", Seen())
    monkeypatch.setattr(lesson, "multiprocessors", lambda: 132)
    z, bias, gain = (t.to(device.name()).requires_grad_() for t in inputs((600, 1000)))
    exact = [t.detach().double().requires_grad_() for t in (z, bias, gain)]
    y, want = lesson.norm_gelu(z, bias, gain), plain(*exact)
    got = torch.autograd.grad(y, (bias, gain), 2 * y.detach())
    for one, other in zip(got, torch.autograd.grad(want, exact[1:], 2 * want.detach()), strict=True):
        close(one, other, fp32)
    assert 128 < programs[0] < 600


def test_the_gradients_agree_to_the_last_bit_from_run_to_run(lesson):
    tensors = [t.to(device.name()).requires_grad_() for t in inputs((300, 64))]
    y = lesson.norm_gelu(*tensors)
    first, second = (torch.autograd.grad(y, tensors, y.detach(), retain_graph=True) for _ in range(2))
    assert all(torch.equal(*pair) for pair in zip(first, second, strict=True))


@pytest.mark.parametrize(
    ("z", "bias", "gain", "word"),
    [
        (torch.ones(2, 3), torch.ones(4), torch.ones(4), "z"),
        (torch.ones(2, 3), torch.ones(3), torch.ones(1, 3), "gain"),
        (torch.ones(2, 3), torch.ones(1), torch.ones(3), "bias"),
        (torch.ones(2, 3), torch.ones(3, dtype=bf16), torch.ones(3), "bias"),
        (torch.ones(2, 3, dtype=bf16), torch.ones(3), torch.ones(3), "z"),
        (torch.ones(2, 3, dtype=torch.int32), torch.ones(3), torch.ones(3), "z"),
    ],
)
def test_a_wrong_call_names_the_argument(lesson, z, bias, gain, word):
    with pytest.raises(ValueError, match=f"^{word}:"):
        lesson.norm_gelu(*(t.to(device.name()) for t in (z, bias, gain)))


# --- what the compiler makes of it --------------------------------------------------------------------


KERNELS = ("stack_kernel", "norm_gelu_kernel", "norm_gelu_grad_kernel", "sum_kernel")
FEW, MANY = 256, 10**5
"""Rows for which a program takes the fewest and the most."""
WIDTHS = ((bf16, 64), (bf16, 100), (bf16, 128), (bf16, 256), (fp32, 64), (fp32, 128))
SIZES = {
    "sm_80": [(bf16, 64, FEW), (bf16, 256, MANY), (fp32, 128, MANY)],
    "sm_86": [(bf16, 100, MANY), (bf16, 128, MANY), (fp32, 128, MANY)],
    "sm_90": [*((*width, MANY) for width in WIDTHS), (bf16, 64, FEW), (bf16, 256, FEW), (fp32, 128, FEW)],
    "sm_100": [(bf16, 64, FEW), (bf16, 100, MANY), (bf16, 256, MANY), (fp32, 128, MANY)],
    "sm_120": [(bf16, 128, MANY), (fp32, 128, MANY)],
}
"""By target; all of them on the one that is measured, elsewhere the largest of each kind of tile."""


def rows_of(rows, width, dtype):
    """The arguments of a stack, of 8 layers; they have no values."""
    x, *weights = (t.to("meta", dtype) for t in drawn(1, width, depth=8))
    return x.expand(rows, -1), *weights


@pytest.fixture(scope="module")
def compiled(lesson):
    """By target: each launch, and the kernel that was compiled for it."""
    launched = {}
    lesson.rows_for.cache_clear()
    for target, sizes in SIZES.items():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(lesson, "multiprocessors", lambda: 132)
            patch.setattr(device, "shared_bytes", lambda target=target: ROOM[target] * 1024)
            launched[target] = launches_of.recorded(lesson, KERNELS, patch)
            for dtype, width, rows in sizes:
                lesson.blocks(99)(*rows_of(rows, width, dtype))
            z = torch.empty(256, 256, dtype=bf16, device="meta")
            lesson.norm_gelu_backward(lesson.norm_gelu_forward(z, z[0], z[0]), z, z[0], z[0])
    lesson.rows_for.cache_clear()
    kernels = iter(
        codegen.compile_many(
            codegen.request(made.kernel, made.arguments, target=target, **made.options)
            for target, launches in launched.items()
            for made in launches
        )
    )
    return {target: [(made, next(kernels)) for made in launches] for target, launches in launched.items()}


@INTERPRETED
@pytest.mark.parametrize("target", [target for target in ROOM if ROOM[target] < 128])
def test_a_width_too_large_for_the_shared_memory_is_refused(lesson, monkeypatch, target):
    monkeypatch.setattr(device, "shared_bytes", lambda: ROOM[target] * 1024)
    with pytest.raises(ValueError, match=r"^weight: not one"):
        lesson.blocks(99)(*rows_of(MANY, 256, bf16))


@INTERPRETED
@pytest.mark.parametrize("target", FAMILIES)
def test_every_kernel_compiles_for_every_family_of_targets_and_fits(compiled, target):
    assert {launch.title for launch, _ in compiled[target]} == set(KERNELS)
    for launch, code in compiled[target]:
        assert code.shared_bytes <= ROOM[target] * 1024, (launch.title, launch.W, code.shared_bytes)
        assert code.spills == 0, (launch.title, launch.W)
        beyond_32_bits = re.search(r"arith\.muli .*: (tensor<\w+x)?i64", code.ttir)
        assert beyond_32_bits or launch.title == "sum_kernel", launch.title


@INTERPRETED
def test_tiles_of_every_number_of_rows_are_compiled(compiled):
    assert {launch.BM for launch, _ in compiled["sm_90"] if launch.title == "stack_kernel"} == {16, 32, 64}


# --- steps in graphs ----------------------------------------------------------------------------------


class Noisy(nn.Module):
    def forward(self, x):
        return functional.dropout(x, 0.5)


class Pretend:
    """torch, with a stand-in for torch.cuda that keeps to its rules and notes which work did not wait."""

    def __init__(self):
        self.machine = graph_api.Machine()
        self.cuda = self

    def __getattr__(self, name):
        return getattr(self.machine.cuda if hasattr(self.machine.cuda, name) else torch, name)

    def current_device(self):
        return 0

    def device(self, *_):
        return torch.device("cpu")

    def set_stream(self, stream):
        self.machine.current = stream


@pytest.fixture
def pretend(lesson, monkeypatch):
    if device.has_gpu():
        pytest.skip("on a GPU the tests below use it")
    stand_in = Pretend()
    monkeypatch.setattr(lesson, "torch", stand_in)
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


def test_steps_are_captured_without_a_trace_and_without_a_race(lesson, pretend):
    model = Counting()
    step = lesson.GraphedStep(model, keep=(model,))
    for number, rows in enumerate((3, 3, 5, 3, 5), start=1):
        x = torch.randn(rows, 4)
        y = step(x)
        assert model.seen.item() == number and model.weight.tolist() == [2.0**number] * 4
        torch.testing.assert_close(y, (x * 2.0**number).sum(1))
    assert (pretend.captures, pretend.replays, pretend.conflicts) == (2, 5, [])
    assert pretend.unwaited() == 0


def test_gradients_are_put_back(lesson, pretend):
    model = Counting()
    kept = model.weight.grad = torch.full((4,), 7.0)
    with lesson.unchanged([model]):
        model.weight.grad.add_(1)
    assert model.weight.grad is kept and kept.tolist() == [7.0] * 4
    model.weight.grad = None
    with lesson.unchanged([model]):
        model.weight.grad = kept
    assert model.weight.grad is None


def test_state_is_put_back_where_it_lay_also_after_an_error(lesson, pretend):
    model = Counting()
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.5), foreach=False)
    with pytest.raises(ZeroDivisionError), lesson.unchanged([model, optimizer]):
        model.weight.grad = torch.ones(4)
        optimizer.step()
        raise ZeroDivisionError
    state = optimizer.state[model.weight]
    assert model.weight.tolist() == [1.0] * 4 and all(not t.any() for t in state.values())
    model.weight.grad = torch.ones(4)
    optimizer.step()
    before = {name: (t.data_ptr(), t.clone()) for name, t in state.items()}
    with lesson.unchanged([model, optimizer]):
        optimizer.step()
        optimizer.param_groups[0]["lr"].mul_(2)
    for name, (at, value) in before.items():
        assert state[name].data_ptr() == at and torch.equal(state[name], value), name
    assert optimizer.param_groups[0]["lr"].item() == 0.5


def test_random_numbers_go_on_as_if_nothing_had_been(lesson, pretend):
    before = torch.random.get_rng_state()
    with lesson.unchanged([]):
        torch.rand(10)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_a_scaler_is_put_back_even_if_it_was_made_in_between(lesson, pretend):
    scaler = torch.amp.GradScaler("cpu", init_scale=128.0)
    with lesson.unchanged([scaler]):
        scaler.scale(torch.ones(1))
        scaler._scale.fill_(2.0)
    assert scaler.get_scale() == 128.0


def test_an_optimizer_whose_state_does_not_begin_at_zero_is_refused_until_it_has_some(lesson, pretend):
    model = Counting()
    optimizer = torch.optim.NAdam(model.parameters())
    with pytest.raises(ValueError, match=r"^keep: NAdam"), lesson.unchanged([optimizer]):
        pass


def test_a_capture_that_fails_can_be_tried_again(lesson, pretend):
    asks = [True]

    def call(x):
        y = x + 1
        if asks[0]:
            y.sum().item()
        return y

    step, x = lesson.GraphedStep(call), torch.ones(3)
    with pytest.raises(RuntimeError, match="not permitted"):
        step(x)
    assert pretend.current is pretend.default and not step.graphs
    asks[0] = False
    assert step(x).tolist() == [2.0] * 3


def test_the_graph_used_last_stays(lesson, pretend):
    step = lesson.GraphedStep(lambda x: x * 2, most=2)
    for rows in (1, 2, 1, 3, 1):
        assert step(torch.ones(rows)).tolist() == [2.0] * rows
    assert pretend.captures == 3, "1 was used after 2, so 2 went"


@pytest.mark.parametrize(
    ("other", "problem"),
    [
        (lambda x: [x.double()], "input 0: is torch.float64"),
        (lambda x: [x, x], "inputs: 2"),
        (lambda x: [x.to("meta")], "input 0: is on meta"),
    ],
)
def test_a_graphed_step_refuses_another_kind_of_input(lesson, pretend, other, problem):
    step, x = lesson.GraphedStep(lambda x: x + 1), torch.ones(4)
    step(x)
    with pytest.raises(ValueError, match=f"^{problem}"):
        step(*other(x))
    assert torch.equal(step(x), x + 1)


def test_an_input_that_wants_a_gradient_is_refused(lesson, pretend):
    step, x = lesson.GraphedStep(lambda x: x + 1), torch.ones(4, requires_grad=True)
    assert step(x).tolist() == [2.0] * 4
    with torch.enable_grad(), pytest.raises(ValueError, match=r"^input 0: requires a gradient"):
        step(x)


@GPU
def test_a_graphed_step_gives_what_the_call_gives_for_new_inputs_and_shapes(lesson):
    _, *weights = drawn(64, 32)
    step = lesson.GraphedStep(lambda x: stack(x, *weights))
    for rows in (64, 32, 64, 48):
        new = torch.randn(rows, 32, device="cuda")
        close(step(new), stack(new.double(), *(t.double() for t in weights)), fp32)


@GPU
@pytest.mark.parametrize("most", [1, 2])
def test_a_graphed_step_keeps_few_graphs(lesson, most):
    step = lesson.GraphedStep(lambda x: x * 2, most=most)
    for rows in (1, 2, 3, 1, 2, 3):
        new = torch.randn(rows, 4, device="cuda")
        assert torch.equal(step(new), new * 2) and len(step.graphs) <= most


@GPU
def test_autocast_of_another_dtype_is_another_graph(lesson):
    layer, x = nn.Linear(8, 8).cuda(), torch.randn(4, 8, device="cuda")
    step = lesson.GraphedStep(layer)
    for dtype in (bf16, fp16):
        with torch.no_grad(), torch.autocast("cuda", dtype):
            assert step(x).dtype is dtype
    with torch.no_grad():
        assert step(x).dtype is fp32


@GPU
@pytest.mark.parametrize(
    "other", [lambda x: x.double(), lambda x: x.cpu(), lambda x: x.bfloat16()], ids=["double", "cpu", "bf16"]
)
def test_a_graphed_step_on_a_gpu_refuses_another_kind_of_input(lesson, other):
    step, x = lesson.GraphedStep(lambda x: x + 1), torch.randn(4, 4, device="cuda")
    step(x)
    with pytest.raises(ValueError, match=r"^input 0: is "):
        step(other(x))
    assert torch.equal(step(x), x + 1)


@GPU
def test_a_failed_capture_on_a_gpu_can_be_tried_again(lesson):
    asks = [True]

    def call(x):
        return x + (x.sum().item() if asks[0] else 1)

    step, x = lesson.GraphedStep(call), torch.ones(4, device="cuda")
    for _ in range(2):
        with pytest.raises(RuntimeError):
            step(x)
    asks[0] = False
    assert torch.equal(step(x), x + 1)
    assert torch.equal(lesson.GraphedStep(lambda x: x * 3)(x), x * 3)


@GPU
def test_a_graphed_step_does_without_the_workspaces_that_libraries_give_back(lesson):
    """torch.compile gives them back before it captures or tunes; few numbers from long sums use one."""
    torch.manual_seed(0)
    a, b = (torch.randn(shape, device="cuda", dtype=bf16) for shape in ((64, 2**15), (2**15, 64)))
    step, want = lesson.GraphedStep(torch.mm), torch.mm(a, b)
    step(a, b).zero_()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    elsewhere = torch.full((2**28,), 7, device="cuda", dtype=torch.int8)
    torch.testing.assert_close(step(a, b), want)
    assert bool((elsewhere == 7).all())


@GPU
def test_the_last_graph_of_a_pool_may_go_while_its_result_is_kept(lesson):
    step = lesson.GraphedStep(lambda x: x * 2, most=1)
    kept = [step(torch.ones(rows, device="cuda")) for rows in (3, 4, 5)]
    assert kept[-1].tolist() == [2.0] * 5


@GPU
def test_a_capture_takes_no_random_numbers(lesson):
    step = lesson.GraphedStep(Noisy())
    torch.manual_seed(3)
    want = [functional.dropout(torch.ones(1000, device="cuda"), 0.5) for _ in range(3)]
    torch.manual_seed(3)
    got = [step(torch.ones(1000, device="cuda")).clone() for _ in range(3)]
    assert all(torch.equal(*pair) for pair in zip(got, want, strict=True))


@GPU
def test_dropout_differs_between_replays_and_follows_the_seed(lesson):
    step, x = lesson.GraphedStep(Noisy()), torch.ones(1000, device="cuda")
    step(x)
    results = []
    for _ in range(2):
        torch.manual_seed(7)
        results.append([step(x).clone() for _ in range(3)])
    assert not torch.equal(results[0][0], results[0][1])
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


def training(graphed, lesson, rows=(8,) * 10, width=16, dropout=0.0):
    torch.manual_seed(0)
    layers = nn.Linear(width, 2 * width), nn.GELU(), nn.Dropout(dropout), nn.Linear(2 * width, width)
    model = nn.Sequential(*layers).cuda()
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

    act = lesson.GraphedStep(step, keep=(model, optimizer, scaler)) if graphed else step
    torch.manual_seed(1)
    losses = [act(torch.randn(each, width, device="cuda")).item() for each in rows]
    return losses, [p.detach().clone() for p in model.parameters()]


@GPU
@pytest.mark.parametrize("rows", [(8,) * 10, (8, 8, 5, 8, 5, 8), (4096, 4096, 1000, 4096)], ids=str)
def test_a_training_step_in_a_graph_trains_as_the_eager_one_does(lesson, rows):
    width = 1024 if rows[0] > 1000 else 16  # where the GPU takes longer than the host, too
    (eager, weights), (graphed, also) = (training(way, lesson, rows, width) for way in (False, True))
    assert graphed == pytest.approx(eager, rel=1e-3)
    for one, other in zip(weights, also, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)


@GPU
def test_weights_changed_after_the_capture_count_under_autocast(lesson):
    layer = nn.Linear(8, 8).cuda()
    step, x = lesson.GraphedStep(layer), torch.randn(4, 8, device="cuda")
    with torch.no_grad(), torch.autocast("cuda", bf16):
        before = step(x).clone()
        layer.weight.mul_(-1), layer.bias.mul_(-1)
        assert torch.equal(step(x), -before)


@GPU
def test_a_shared_pool_keeps_less_than_a_pool_each(lesson):
    weights = [t.clone() for t in drawn(1, 512, depth=4)[1:]]
    shapes = [torch.randn(rows, 512, device="cuda") for rows in (4096, 3072, 2048)]

    def kept(steps):
        return memory.pool_bytes(
            lambda: [step for step, x in zip(steps, shapes, strict=True) if step(x) is not None]
        )

    def made():
        return lesson.GraphedStep(lambda x: stack(x, *weights))

    with torch.no_grad():
        assert kept([made()] * 3) < kept([made() for _ in shapes])


@GPU
def test_the_host_pays_little_more_than_for_a_bare_replay(lesson):
    weights = drawn(64, 32)[1:]
    x = torch.randn(64, 32, device="cuda")
    step = lesson.GraphedStep(lambda x: block(x, *(t[0] for t in weights)))
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
