"""Lesson 8: its taught recurrences, the step that is taken apart, and its execution."""

import re
from functools import partial

import pytest
import torch
from launches import ROOM
from taught import INTERPRETED, assert_no_backward, counted, drawn, examine

from labkit.exercises import judge
from labkit.measure import correctness
from labkit.profiling import codegen

pytestmark = pytest.mark.usefixtures("cache")
NAME = "old/08_gated_recurrent_unit"
SHAPES = ((18, 3, 20), (2, 4, 16), (1, 1, 1), (0, 2, 8), (2, 0, 8))
"""Two programs, a block without padding, one number, no sequence, no step."""


def sequences(shape, parts=3):
    B, T, H = shape
    weight = torch.randn(parts * H, H) * max(1, H) ** -0.5
    return torch.randn(B, T, parts * H), weight, torch.randn(parts * H)


def episodes(shape):
    return *sequences(shape), torch.rand(shape[:2]) < 0.4


def plain(inputs, weight, bias):
    h, states = inputs.new_zeros(len(inputs), weight.shape[1]), []
    for now in inputs.unbind(1):
        h = torch.tanh(now + torch.nn.functional.linear(h, weight, bias))
        states.append(h)
    return torch.stack(states, 1) if states else inputs


def reference(gates, weight, bias):
    """The states by torch's own layer, whose input is multiplied by one."""
    B, T, H = *gates.shape[:2], weight.shape[1]
    if not B * T:
        return gates.new_zeros(B, T, H)
    layer = torch.nn.GRU(3 * H, H, batch_first=True).to(gates)
    own = dict(
        weight_ih_l0=torch.eye(3 * H), weight_hh_l0=weight, bias_ih_l0=torch.zeros(3 * H), bias_hh_l0=bias
    )
    layer.load_state_dict(own)
    return layer(gates)[0].detach()


RIGHT = ({}, {"AHEAD": True}, {"STAY": True}, {"AHEAD": True, "STAY": True, "FAST": True})
MISSING = ("LOADS", "STORES", "CURVES", "TRAVELS", "PRODUCTS")


@pytest.mark.parametrize("switches", RIGHT, ids=" ".join)
def test_the_step_with_each_cure_is_right_in_every_dtype_and_layout(lesson, switches):
    dtypes = correctness.DTYPES[1:] if switches.get("FAST") else correctness.DTYPES
    call = partial(lesson.steps, **switches)
    correctness.check(call, reference, sequences, shapes=SHAPES, dtypes=dtypes, gradients=False, roundings=4)


def test_the_plain_network_and_the_solved_step_are_right(lesson):
    correctness.check(
        lesson.rnn, plain, partial(sequences, parts=1), shapes=SHAPES, gradients=False, roundings=4
    )
    examine(lesson.gru, reference, sequences, *SHAPES[:3], layouts=("contiguous", "strided"))


def test_the_reference_of_the_exercises_is_torchs_own_layer():
    given = [each.double() for each in sequences((3, 4, 5))]
    torch.testing.assert_close(judge.find(NAME)["gru"].reference(*given), reference(*given))
    begins = torch.zeros(3, 4, dtype=torch.bool)
    begins[1, 2] = True
    found = judge.find(NAME)["reset"].reference(*given, begins)
    gates, *layer = given
    torch.testing.assert_close(found[1, 2:], reference(gates[1:2, 2:], *layer)[0])
    torch.testing.assert_close(found[0], reference(*given)[0])


def test_a_solved_step_with_resets_forgets_whatever_was_before(lesson):
    gates, weight, bias, begins = drawn(episodes, 18, 5, 20)
    begins = begins.bool()
    begins[:, 3] = True
    spoilt = gates.clone()
    spoilt[:, :3] = torch.nan
    with torch.no_grad():
        clean, lost = (lesson.episodes(each, weight, bias, begins) for each in (gates, spoilt))
    assert torch.equal(clean[:, 3:], lost[:, 3:]) and not clean.isnan().any()


@pytest.mark.parametrize(("name", "parts"), [("rnn", 1), ("gru", 3), ("steps", 3)])
def test_a_taught_kernel_that_has_no_backward_says_so(lesson, name, parts):
    assert_no_backward(name, getattr(lesson, name), drawn(partial(sequences, parts=parts), 2, 2, 4))


@INTERPRETED
def test_a_step_reads_its_gates_once_and_stores_h_once_and_with_parts_out_neither(lesson):
    B, T, H = 18, 4, 16
    tensors = drawn(sequences, B, T, H)
    weights = 2 * 4 * (3 * H * H + 3 * H)  # each of two programs
    for switches, read, written in (
        ({}, 3 * B * T * H, B * T * H + B * H),  # the last state twice
        ({"AHEAD": True, "STAY": True}, 3 * B * T * H, B * T * H + B * H),
        ({"LOADS": False}, 3 * B * H, B * T * H + B * H),
        ({"STORES": False}, 3 * B * T * H, B * H),
    ):
        (made,) = counted(partial(lesson.steps, **switches), *tensors)
        assert (made.bytes_read, made.bytes_written) == (weights + 4 * read, 4 * written), switches


@pytest.mark.parametrize("missing", MISSING)
def test_a_step_with_a_part_out_still_depends_on_its_input(lesson, missing):
    """Else the compiler might leave out more than that part."""
    tensors = drawn(sequences, 2, 3, 4)
    with torch.no_grad():
        one = lesson.steps(*tensors, **{missing: False})[:, -1]
        tensors[0][:, 0] += 0.1
        other = lesson.steps(*tensors, **{missing: False})[:, -1]
    assert one.isfinite().all() and not torch.equal(one, other)


# --- compiled for GPUs that are not here ----------------------------------------------------------------


def asked(lesson, target="sm_90", H=128, dtype="bf16", **switches):
    sizes = dict(B=512, T=64, H=H, BM=16, BH=H, num_warps=8, num_stages=1)
    given = {**lesson.CURES, **lesson.PARTS, **switches}
    return codegen.request(lesson.parts_kernel, [f"*{dtype}:16"] * 4, target=target, **sizes, **given)


def loop_of(made):
    """Instructions from the loop's label to the jump back to it, as the lesson counts them."""
    loop = re.search(r"^(\$\w+):.*?bra\S*\s+\1;", made.ptx, re.M | re.S)[0]
    return {kind: loop.count(kind) for kind in ("mma.sync", "ex2", "ld.global", "st.global", "bar.sync")}


def test_each_switch_leaves_out_its_part_and_no_other(lesson):
    """The loop of a version has the instructions of a part just where its switch says so."""
    OF = {"LOADS": "ld.global", "STORES": "st.global", "CURVES": "ex2", "PRODUCTS": "mma.sync"}
    versions = [{}, *({part: False} for part in MISSING)]
    made = codegen.compile_many(asked(lesson, **each) for each in versions)
    assert all(one.shared_bytes <= ROOM["sm_90"] * 1024 and not one.spills for one in made)
    whole, *without = map(loop_of, made)
    for part, found in zip(MISSING, without, strict=True):
        for other, kind in OF.items():
            assert found[kind] == (0 if other == part else whole[kind]), (part, kind)
    assert without[MISSING.index("LOADS")]["bar.sync"] < whole["bar.sync"] / 2, "most of the barriers"


# --- the lesson as a whole ----------------------------------------------------------------------------


def test_it_runs_to_its_end_in_silence_and_checks_its_kernels(checks_passed):
    assert set(checks_passed) == {"rnn", "AHEAD", "STAY"}
