"""Lesson 6: the loop that holds two recurrences, and the network's rungs, against the same reference."""

import itertools
import math
import re
from functools import partial

import launches as launches_of
import pytest
import torch
from launches import POINTWISE, ROOM

from labkit import checks, codegen, counts, device, lessons
from labkit import network_works as work

NAME = "06_microsecond_ledger"
pytestmark = pytest.mark.usefixtures("cache")
GPU = pytest.mark.skipif(not device.has_gpu(), reason="graphs and long sequences need a GPU")
INTERPRETED = pytest.mark.skipif(
    device.has_gpu(),
    reason="accesses are counted, and kernels compiled for other GPUs, where there is none",
)
bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
KERNELS = ("cell_kernel", "cell_grad_kernel")


@pytest.fixture(scope="module")
def lesson(cache):
    return lessons.load(NAME)


def given(shape):
    """Gates for a state of this shape, and a gain; every fourth is zero: r does not tell u there."""
    gain = 1 + 0.1 * torch.randn(shape[-1])
    gain[1::4] = 0
    return torch.randn(*shape[:-1], 2 * shape[-1]), gain


def drawn(*shape, dtype=fp32, grad=False):
    torch.manual_seed(0)
    return [t.to(device.name(), dtype).requires_grad_(grad) for t in given(shape)]


def gradients(call, tensors, upstream=None):
    """The output and the gradient of every tensor; upstream twice the output where nothing else is given."""
    leaves = [t.detach().requires_grad_() for t in tensors]
    y = call(*leaves)
    return [y.detach(), *torch.autograd.grad(y, leaves, 2 * y.detach() if upstream is None else upstream)]


def assert_close(got, want, dtype=fp32, roundings=1):
    assert got.dtype is dtype and got.shape == want.shape
    problem = checks.diagnose(got.detach(), want.detach(), roundings * checks.TOLERANCE[dtype])
    assert not problem, problem


def examine(lesson, *shapes, groups=work.GROUPS, layouts=("contiguous",), dtypes=(fp32,)):
    call, reference = (partial(f, groups=groups) for f in (lesson.gated_cell, work.cell))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checks, "LAYOUTS", {name: checks.LAYOUTS[name] for name in layouts})
        checks.check(call, reference, given, shapes=shapes, dtypes=dtypes, roundings=8, name="gated_cell")


# --- the cell -----------------------------------------------------------------------------------------


def test_every_layout_and_dtype_is_right(lesson):
    examine(lesson, (2, 3, 20), layouts=checks.LAYOUTS, dtypes=checks.DTYPES)


@pytest.mark.parametrize("time", [1, 2, 5, 33])
def test_any_number_of_steps_is_right(lesson, time):
    examine(lesson, (2, time, 8))


@pytest.mark.parametrize("shape", [(1, 2, 4), (3, 2, 36), (0, 3, 8), (2, 0, 8), (1, 2, 1028)], ids=str)
def test_sequences_of_any_number_and_width_are_right(lesson, shape):
    examine(lesson, shape)


@pytest.mark.parametrize(("groups", "width"), [(1, 5), (3, 33), (5, 5), (2, 64)])
def test_any_number_of_groups_is_right(lesson, groups, width):
    examine(lesson, (2, 3, width), groups=groups, dtypes=(fp32, bf16))


def test_float32_is_off_at_most_twice_as_far_as_eager(lesson):
    tensors, groups = drawn(4, 33, 100), {"groups": 4}
    exact = gradients(partial(work.cell, **groups), [t.double() for t in tensors])
    for made, eager, want in zip(
        gradients(partial(lesson.gated_cell, **groups), tensors),
        gradients(partial(work.cell, **groups), tensors),
        exact,
        strict=True,
    ):
        assert checks.relative_error(made, want) <= 2 * checks.relative_error(eager, want)


def test_half_precision_keeps_both_states_in_float32(lesson):
    """A gate of a 512th adds a 512th of the candidate, which a state in bf16 near one would not notice."""
    gates = torch.zeros(1, 64, 2, dtype=bf16, device=device.name())
    gates[..., 0] = math.log(1 / 511)
    gates[:, 0, 0], gates[..., 1] = 20.0, 2.0
    gates[:, 0, 1] = 1.0
    gain = torch.ones(1, dtype=bf16, device=device.name())
    kept = lesson.run_cell(gates, gain, 1, keep=True)[1]
    want = 2 - (1 - 1 / 512) ** 63
    assert kept[0, -1].item() == pytest.approx(want, abs=2**-7)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_gates_that_are_shut_or_open(lesson):
    """Logits near to, and beyond, what a sigmoid can tell from 0 and 1."""
    gates, gain = drawn(2, 5, 8)
    for logit in (-20.0, 20.0, -200.0, 200.0):
        gates.unflatten(-1, (4, 2, -1))[..., 0, :] = logit
        made = gradients(partial(lesson.gated_cell, groups=4), [gates, gain])
        wants = gradients(partial(work.cell, groups=4), [gates.double(), gain.double()])
        for got, want in zip(made, wants, strict=True):
            assert got.isfinite().all()
            if logit > -200:  # there float32 has a gate of 0
                assert_close(got, want)


def test_gradients_agree_to_the_last_bit_from_run_to_run(lesson):
    tensors = drawn(20, 5, 36)
    call = partial(lesson.gated_cell, groups=4)
    for one, other in zip(gradients(call, tensors), gradients(call, tensors), strict=True):
        assert torch.equal(one, other)


def test_gradients_of_some_inputs_only(lesson):
    tensors = drawn(2, 3, 8)
    wants = gradients(partial(work.cell, groups=4), [t.double() for t in tensors])[1:]
    for needed in itertools.product((True, False), repeat=2):
        leaves = [t.clone().requires_grad_(needs) for t, needs in zip(tensors, needed, strict=True)]
        y = lesson.gated_cell(*leaves, 4)
        assert y.requires_grad is any(needed)
        if any(needed):
            y.backward(2 * y.detach())
        for leaf, want, needs in zip(leaves, wants, needed, strict=True):
            assert (leaf.grad is not None) is needs
            if needs:
                assert_close(leaf.grad, want)


def test_an_expanded_upstream_gradient(lesson):
    tensors, row = drawn(2, 3, 8), torch.randn(8, device=device.name())
    made = gradients(partial(lesson.gated_cell, groups=4), tensors, row.expand(2, 3, 8))
    wants = gradients(
        partial(work.cell, groups=4), [t.double() for t in tensors], row.double().expand(2, 3, 8)
    )
    for got, want in zip(made, wants, strict=True):
        assert_close(got, want)


def test_nan_stays_in_its_sequence(lesson):
    gates, gain = drawn(3, 4, 8)
    want = lesson.gated_cell(gates, gain, 4)
    gates[1, 2, 3] = math.nan
    got = lesson.gated_cell(gates, gain, 4)
    assert torch.equal(got[[0, 2]], want[[0, 2]]) and torch.equal(got[1, :2], want[1, :2])
    assert got[1, 2:].isnan().all()


def test_autocast_computes_in_half_and_gives_gradients_in_float32(lesson):
    call, tensors = partial(lesson.gated_cell, groups=4), drawn(2, 3, 20, grad=True)
    for dtype in (bf16, fp16):
        with torch.autocast(device.name(), dtype=dtype):
            y = call(*tensors)
        rounded = [t.detach().to(dtype) for t in tensors]
        assert torch.equal(y, call(*rounded)) and y.dtype is dtype
        made = torch.autograd.grad(y, tensors, 2 * y.detach())
        for got, want in zip(made, gradients(call, rounded)[1:], strict=True):
            assert torch.equal(got, want.float())


@pytest.mark.usefixtures("fresh_compiler")
def test_torch_compile_takes_it_whole(lesson):
    tensors = drawn(2, 9, 20)

    def layer(gates, gain):
        return torch.tanh(lesson.gated_cell(0.5 * gates, gain, 4))

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for got, want in zip(gradients(compiled, tensors), gradients(layer, tensors), strict=True):
        assert_close(got, want.double())


GATES, GAIN = torch.ones(2, 3, 16), torch.ones(8)
WRONG = {
    "a gain of two dimensions": ("gain", "(any)", GATES, torch.ones(1, 8), 4),
    "no features": ("gain", "1 to 4096", GATES[..., :0], GAIN[:0], 1),
    "too many features": ("gain", "1 to 4096", torch.ones(1, 1, 8194), torch.ones(4097), 1),
    "groups that leave a rest": ("groups", "8 features", GATES, GAIN, 3),
    "no groups": ("groups", "8 features", GATES, GAIN, 0),
    "gates of two dimensions": ("gates", "(any, any, 16)", GATES[0], GAIN, 4),
    "gates of the state's width": ("gates", "(any, any, 16)", GATES[..., :8], GAIN, 4),
    "gates in half": ("gates", "torch.float32", GATES.half(), GAIN, 4),
    "gates elsewhere": ("gates", "cpu", GATES.to("meta"), GAIN, 4),
    "whole numbers": ("gain", "float16 or bfloat16", GATES.int(), GAIN.int(), 4),
    "too long a sequence": (
        "gates", "2**31", torch.empty(1, 2**21, 2**10, device="meta"),
        torch.empty(2**9, device="meta"), 4,
    ),
}  # fmt: skip


@pytest.mark.parametrize("call", WRONG)
def test_a_wrong_call_names_the_argument_and_what_it_should_be(lesson, call):
    argument, wanted, gates, gain, groups = WRONG[call]
    wanted = wanted.replace("cpu", device.name())
    gates, gain = (t if t.is_meta else t.to(device.name()) for t in (gates, gain))
    with pytest.raises(ValueError, match=rf"^{argument}: .*{re.escape(wanted)}"):
        lesson.gated_cell(gates, gain, groups)


# --- what it moves, and what is compiled --------------------------------------------------------------


@INTERPRETED
@pytest.mark.parametrize("shape", [(2, 5, 36), (1, 1, 8), (3, 2, 20)], ids=str)
def test_every_number_is_read_and_written_once(lesson, shape):
    (B, T, H), tensors = shape, drawn(*shape)
    N = B * T * H
    with torch.no_grad():
        (inference,) = counts.count(lambda: lesson.gated_cell(*tensors, 4)).launches
    assert (inference.bytes_read, inference.bytes_written) == (4 * (2 * N + B * H), 4 * N)
    leaves, made = [t.requires_grad_() for t in tensors], []
    (training,) = counts.count(lambda: made.append(lesson.gated_cell(*leaves, 4))).launches
    assert (training.bytes_read, training.bytes_written) == (4 * (2 * N + B * H), 4 * 2 * N)
    upstream = torch.ones_like(made[0])
    back, total = counts.count(lambda: torch.autograd.grad(made[0], leaves, upstream)).launches
    read = 3 * N + 2 * (N - B * H) + B * H  # of both states all but the last
    assert (back.bytes_read, back.bytes_written) == (4 * read, 4 * (2 * N + B * H))
    assert (total.bytes_read, total.bytes_written) == (4 * B * H, 4 * H)


@INTERPRETED
def test_without_sequences_or_steps_no_kernel_is_launched(lesson):
    for shape in ((0, 3, 8), (2, 0, 8)):
        found = counts.count(
            lambda shape=shape: gradients(partial(lesson.gated_cell, groups=4), drawn(*shape))
        )
        assert not {launch.name for launch in found.launches} & {*KERNELS, "sum_kernel"}


@pytest.fixture(scope="module")
def compiled(lesson):
    """Both kernels as they would be launched: (width, dtype, target) and what became of them."""
    asked = []
    with pytest.MonkeyPatch.context() as patch:
        made = launches_of.recorded(lesson, KERNELS, patch)
        patch.setattr(lesson.recurrent, "added", lambda parts, gain: torch.empty_like(gain))
        patch.setattr(lesson.recurrent, "multiprocessors", lambda: 132)
        everywhere = itertools.product(((128, bf16), (512, fp32)), POINTWISE)
        for (width, dtype), target in (*everywhere, ((128, fp32), "sm_90"), ((4096, fp32), "sm_86")):
            patch.setattr(device, "shared_bytes", lambda target=target: ROOM[target] * 1024)
            lesson.recurrent.rms_recurrence_plan.cache_clear()
            made.clear()
            gates, gain = (
                torch.empty(shape, dtype=dtype, device="meta", requires_grad=True)
                for shape in ((1024, 64, 2 * width), (width,))
            )
            y = lesson.gated_cell(gates, gain, 4)
            torch.autograd.grad(y, (gates, gain), torch.empty_like(y))
            asked += [(one, width, dtype, target) for one in made]
    lesson.recurrent.rms_recurrence_plan.cache_clear()
    requests = [
        codegen.request(one.kernel, one.arguments, target=target, **one.options)
        for one, _, _, target in asked
    ]
    return [(*of, code) for of, code in zip(asked, codegen.compile_many(requests), strict=True)]


@INTERPRETED
def test_every_kernel_compiles_for_every_family_of_targets_without_spills_and_fits(compiled):
    assert {(one.title, target) for one, _, _, target, _ in compiled} == set(
        itertools.product(KERNELS, (*POINTWISE, "sm_86"))
    )
    for one, width, dtype, target, code in compiled:
        assert code.shared_bytes <= ROOM[target] * 1024, (one.title, width, dtype, target, code.shared_bytes)
        if width <= 512:
            assert not code.spills, (one.title, width, dtype, target, code.spills)


@INTERPRETED
def test_one_warp_adds_up_a_step_by_shuffles(compiled):
    for one, width, dtype, _, code in compiled:
        if width == 128:
            assert one.num_warps == 1
            assert code.shuffles["bfly"] == (5 if one.title == "cell_kernel" else 10), (dtype, code.shuffles)


@INTERPRETED
def test_heads_are_loaded_in_wide_pieces(compiled):
    """A head's logits, and its candidates, stand side by side: four numbers a lane at least."""
    for one, width, dtype, target, code in compiled:
        if width == 128:
            widest = {fp32: 128, bf16: 64}[dtype]
            assert max({**code.loads, **code.async_copies}) == widest, (one.title, dtype, target)


# --- the network --------------------------------------------------------------------------------------

SHAPE = {"batch": 3, "time": 5, "width": 32}
RUNGS = {
    "eager": lambda lesson: lesson.network(),
    "operators": lambda lesson: lesson.network(cell=lesson.cell_of_operators),
    "GeGLU": lambda lesson: lesson.network(cell=lesson.cell_of_operators, mlp=lesson.fusion.geglu_mlp),
    "heads": lambda lesson: lesson.network(heads=lesson.grouped.grouped_linear),
    "labkit": lambda lesson: lesson.network(**lesson.PARTS),
}


def network_inputs(shape=SHAPE, dtype=fp32):
    torch.manual_seed(0)
    return [t.to(device.name(), dtype) for t in work.NETWORK.inputs(shape)]


@pytest.mark.parametrize("rung", RUNGS)
def test_every_rung_computes_the_network_and_its_gradients(lesson, rung):
    inputs = network_inputs()
    made = gradients(RUNGS[rung](lesson), inputs)
    for got, want in zip(made, gradients(work.network, [t.double() for t in inputs]), strict=True):
        assert_close(got, want, roundings=8)


def test_in_half_precision_labkit_is_off_no_further_than_eager(lesson):
    inputs = network_inputs(dtype=bf16)
    exact = gradients(work.network, [t.double() for t in inputs])
    far = [
        max(
            checks.relative_error(got, want)
            for got, want in zip(gradients(RUNGS[name](lesson), inputs), exact, strict=True)
        )
        for name in ("labkit", "eager")
    ]
    assert far[0] < 2 * far[1]


def test_labkits_parts_learn_as_the_reference_does(lesson):
    def losses(call):
        x, *weights = (t.requires_grad_() for t in network_inputs())
        torch.manual_seed(1)
        target = torch.randn(3, 5, work.OUTPUTS, device=device.name())
        optimizer, found = torch.optim.AdamW(weights, lr=1e-2), []
        for _ in range(5):
            loss = torch.nn.functional.mse_loss(call(x.detach(), *weights), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        return found

    ours, theirs = losses(lesson.network(**lesson.PARTS)), losses(work.network)
    assert ours == pytest.approx(theirs, rel=1e-4) and ours[-1] < ours[0]


@GPU
def test_in_a_graph_the_network_is_the_same(lesson):
    shape = {"batch": 64, "time": 64, "width": 128}
    x, *weights = network_inputs(shape, bf16)
    call, graphed = lesson.network(**lesson.PARTS), lesson.replayed(lesson.network(**lesson.PARTS))
    with torch.no_grad():
        for _ in range(3):
            assert torch.equal(graphed(x, *weights), call(x, *weights))
            x.normal_()


@GPU
@pytest.mark.parametrize("dtype", [fp32, bf16], ids=str)
def test_two_thousand_steps_are_right(lesson, dtype):
    gates, gain = drawn(16, 2048, 128, dtype=dtype)
    made = gradients(partial(lesson.gated_cell, groups=4), [gates, gain])
    wants = gradients(partial(work.cell, groups=4), [gates.double(), gain.double()])
    for got, want in zip(made, wants, strict=True):
        assert checks.relative_error(got, want) < {fp32: 1e-5, bf16: 2e-2}[dtype]
