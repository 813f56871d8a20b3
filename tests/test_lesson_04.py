"""Lesson 4: the stack in one kernel and in many, norm and GELU with gradients, steps in graphs."""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # decided when triton is imported, below

import time
from types import SimpleNamespace

import launches as launches_of
import pytest
from torch import nn
from torch.nn import functional

from labkit import checks, codegen, counts, device, lessons, memory
from labkit.stack_works import EPS, block, stack

NAME = "04_cuda_graphs"
GPU = pytest.mark.skipif(not device.has_gpu(), reason="CUDA graphs exist on a GPU only")
INTERPRETED = pytest.mark.skipif(
    device.has_gpu(), reason="launches are counted, and kernels compiled for other GPUs, where there is none"
)
bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
ROOM = {"sm_80": 163, "sm_86": 99, "sm_89": 99, "sm_90": 227, "sm_100": 227, "sm_120": 99}
"""KiB of shared memory that one block may use."""


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
    monkeypatch.setattr(lesson, "rows_for", lambda _: rows)
    tensors = drawn(70, 32, dtype=bf16)
    close(lesson.blocks(99)(*tensors), stack(*(t.double() for t in tensors)), bf16)


def test_programs_take_more_rows_where_there_are_more_than_places(lesson, monkeypatch):
    monkeypatch.setattr(lesson.machine, "identity", lambda: SimpleNamespace(multiprocessors=100))
    lesson.rows_for.cache_clear()
    assert [lesson.rows_for(rows) for rows in (1, 1600, 1601, 3200, 3201, 10**6)] == [16, 16, 32, 32, 64, 64]
    lesson.rows_for.cache_clear()


@pytest.mark.parametrize("wrong", ["x", "weight", "bias", "gain"])
def test_a_wrong_stack_names_the_argument(lesson, wrong):
    tensors = dict(zip(("x", "weight", "bias", "gain"), drawn(4, 16), strict=True))
    tensors[wrong] = tensors[wrong][..., None] if wrong == "x" else tensors[wrong][:, :-1]
    with pytest.raises(ValueError, match=f"^{wrong}:"):
        lesson.blocks(99)(**tensors)


@INTERPRETED
def test_one_launch_or_one_a_block(lesson):
    tensors = drawn(20, 16, depth=5)
    for at_once, launches in ((99, 1), (1, 5), (2, 3)):
        assert len(counts.count(lambda n=at_once: lesson.blocks(n)(*tensors)).launches) == launches


# --- norm and GELU ------------------------------------------------------------------------------------


def plain(z, gain):
    return functional.gelu(functional.rms_norm(z, gain.shape, gain, EPS), approximate="tanh")


def inputs(shape):
    return torch.randn(shape), 1 + 0.1 * torch.randn(shape[-1:])


def test_norm_gelu_is_right_and_so_are_its_gradients(lesson):
    assert checks.check(
        lesson.norm_gelu, plain, inputs, shapes=((33, 64), (2, 3, 20), (1, 7), (0, 8), (70, 256))
    )


def test_the_gradients_agree_to_the_last_bit_from_run_to_run(lesson):
    z, gain = (t.to(device.name()).requires_grad_() for t in inputs((300, 64)))
    y = lesson.norm_gelu(z, gain)
    first, second = (torch.autograd.grad(y, (z, gain), y.detach(), retain_graph=True) for _ in range(2))
    assert all(torch.equal(*pair) for pair in zip(first, second, strict=True))


@pytest.mark.parametrize(
    ("z", "gain", "word"),
    [
        (torch.ones(2, 3), torch.ones(4), "z"),
        (torch.ones(2, 3), torch.ones(1, 3), "gain"),
        (torch.ones(2, 3, dtype=bf16), torch.ones(3), "z"),
        (torch.ones(2, 3, dtype=torch.int32), torch.ones(3), "z"),
    ],
)
def test_a_wrong_call_names_the_argument(lesson, z, gain, word):
    with pytest.raises(ValueError, match=f"^{word}:"):
        lesson.norm_gelu(z.to(device.name()), gain.to(device.name()))


# --- what the compiler makes of it --------------------------------------------------------------------


KERNELS = ("stack_kernel", "norm_gelu_kernel", "norm_gelu_grad_kernel")
WIDTHS = ((bf16, 64), (bf16, 100), (bf16, 128), (bf16, 256), (fp32, 64), (fp32, 128))


@INTERPRETED
@pytest.mark.parametrize("target", ROOM)
def test_every_kernel_compiles_for_every_target_and_fits(lesson, monkeypatch, target):
    monkeypatch.setattr(device, "shared_bytes", lambda: ROOM[target] * 1024)
    made = launches_of.recorded(lesson, KERNELS, monkeypatch)
    for dtype, width in WIDTHS:
        tensors = [t.to("meta", dtype) for t in drawn(256, width, depth=8)]
        if ROOM[target] < 128 and (dtype, width) == (bf16, 256):
            with pytest.raises(ValueError, match=r"^x: rows of 256"):
                lesson.blocks(99)(*tensors)
        else:
            lesson.blocks(99)(*tensors)
    z = torch.empty(256, 256, dtype=bf16, device="meta")
    lesson.norm_gelu_backward(lesson.norm_gelu_forward(z, z[0]), z, z[0])
    requests = [codegen.request(m.kernel, m.arguments, target=target, **m.options) for m in made]
    for launch, compiled in zip(made, codegen.compile_many(requests), strict=True):
        assert compiled.shared_bytes <= ROOM[target] * 1024, (launch.title, launch.W, compiled.shared_bytes)
        assert compiled.spills == 0, (launch.title, launch.W)


# --- steps in graphs ----------------------------------------------------------------------------------


class Noisy(nn.Module):
    def forward(self, x):
        return functional.dropout(x, 0.5)


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
def test_results_of_several_shapes_are_kept_apart_though_the_pool_is_one(lesson):
    step = lesson.GraphedStep(lambda x: torch.sin(x) * 2)
    inputs = [torch.randn(rows, 1000, device="cuda") for rows in (64, 32, 48)]
    for x in inputs:
        step(x)
    results = [step(x) for x in inputs]
    assert all(torch.equal(y, torch.sin(x) * 2) for x, y in zip(inputs, results, strict=True))


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
def test_a_graphed_step_refuses_another_kind_of_input(lesson, other):
    step, x = lesson.GraphedStep(lambda x: x + 1), torch.randn(4, 4, device="cuda")
    step(x)
    with pytest.raises(ValueError, match=r"^input 0: is "):
        step(other(x))
    with pytest.raises(ValueError, match=r"^inputs: 2"):
        step(x, x)
    assert torch.equal(step(x), x + 1)


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


def training(graphed, lesson, steps=10, dropout=0.0):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Dropout(dropout), nn.Linear(32, 16)).cuda()
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
    losses = [act(torch.randn(8, 16, device="cuda")).item() for _ in range(steps)]
    return losses, [p.detach().clone() for p in model.parameters()]


@GPU
def test_a_training_step_in_a_graph_trains_as_the_eager_one_does(lesson):
    (eager, weights), (graphed, also) = training(False, lesson), training(True, lesson)
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
        return memory.kept_bytes(
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

    assert least_us(lambda: step(static)) - least_us(graph.replay) < 3.0
