"""Lesson 9: the network's rungs, its taught kernels, solved, and its ledger from a tape."""

import json
import math

import pandas as pd
import pytest
import torch
from products import assert_close, bf16, fp32
from recurring import gradients
from taped import recorded
from taught import GPU, INTERPRETED, assert_no_backward, counted, drawn, examine

from labkit import gpu, paths
from labkit.lessons import notebooks
from labkit.measure import correctness
from labkit.measure.rows import Row
from labkit.profiling import launch_counts
from labkit.workloads import network as work
from labkit.workloads import recurrent

pytestmark = pytest.mark.usefixtures("cache")
NAME = "old/09_microsecond_ledger"
SHAPE = {"batch": 3, "time": 5, "width": 64}


def rungs(lesson):
    return lesson.CALLS | {"three kernels": lesson.three, "two kernels": lesson.two}


def network_inputs(shape):
    return [t.cpu() for t in work.NETWORK.inputs(dict(zip(("batch", "time", "width"), shape, strict=True)))]


RUNGS = ("eager", "compiled", "better kernels", "kernels alone", "three kernels")


@pytest.mark.parametrize("rung", RUNGS)
def test_every_rung_computes_the_network_and_its_gradients(lesson, rung):
    inputs = drawn(network_inputs, 3, 5, 64)
    made = gradients(rungs(lesson)[rung], inputs)
    for got, want in zip(made, gradients(work.network, [t.double() for t in inputs]), strict=True):
        assert_close(got, want, roundings=8)


def test_in_half_precision_no_rung_is_off_much_further_than_eager(lesson):
    inputs = drawn(network_inputs, 3, 21, 64, dtype=bf16)
    want = work.network(*[t.double() for t in inputs])
    far = {name: correctness.relative_error(call(*inputs), want) for name, call in rungs(lesson).items()}
    assert max(far.values()) < 2 * far["eager"], far


# ---- the taught kernels ----------------------------------------------------------------------------------


def cell_inputs(shape):
    B, T, H = shape
    return torch.rand(B, T, H), torch.randn(B, T, H), 1 + 0.1 * torch.randn(H)


def cell_reference(z, candidate, gain):
    return recurrent.rms_recurrence(1 - z, recurrent.min_gru(z, candidate), gain)


@pytest.mark.parametrize("dtype", [fp32, bf16])
def test_both_recurrences_are_right_on_any_size(lesson, dtype):
    shapes = (2, 7, 20), (1, 1, 1), (3, 2, 128), (2, 5, 130), (0, 3, 8)
    examine(lesson.both, cell_reference, cell_inputs, *shapes, dtypes=(dtype,), layouts=("strided",))
    assert_no_backward("both", lesson.both, drawn(cell_inputs, 2, 3, 8))


def before_inputs(shape):
    return network_inputs(shape)[:7]


def before(x, w_in, b_in, gain_in, w_gates, b_gates, gain):
    gates = work.heads(recurrent.rms_norm(work.heads(x, w_in, b_in), gain_in), w_gates, b_gates)
    return work.cell(gates, gain, len(w_gates))


@pytest.mark.parametrize("dtype", [fp32, bf16])
def test_a_sequence_is_right_whatever_its_length_and_refuses_other_groups(lesson, dtype):
    shapes = (2, 19, 64), (1, 1, 128), (2, 16, 64), (1, 33, 64)
    how = dict(dtypes=(dtype,), gradients=False, roundings=4)  # the norm's input, the gates, the states
    correctness.check(lesson.sequences, before, before_inputs, shapes=shapes, **how)
    assert_no_backward("sequences", lesson.sequences, drawn(before_inputs, 1, 2, 64))
    for width in (32, 80):  # groups of 8 and of 20
        with pytest.raises(ValueError, match=r"^b_in: 4 groups of"):
            lesson.sequences(*drawn(before_inputs, 1, 2, width))


@INTERPRETED
def test_of_the_gates_only_the_scratch_place_is_written_and_read(lesson):
    """Which L2 keeps: each program writes and reads the same 16 steps over and over."""
    B, T, H = 2, 33, 64
    inputs = drawn(before_inputs, B, T, H, dtype=bf16)
    (made,) = counted(lesson.sequences, *inputs)
    assert made.programs == B and made.bytes_written == 2 * B * (48 * 2 * H + T * H)
    weights = sum(t.numel() for t in inputs[1:])
    assert made.bytes_read == 2 * B * (48 * 2 * H + T * H + weights)


def parts(numel):
    return torch.arange(numel, dtype=fp32, device=gpu.device())


@pytest.mark.parametrize(("reads", "writes"), [(4, 4), (4, 8), (8, 4), (4, 1)])
def test_a_skeleton_reads_and_writes_all_and_depends_on_all_that_it_reads(lesson, reads, writes):
    x, y = parts(1024 * reads), torch.full((1024 * writes,), math.nan, device=gpu.device())
    lesson.move(x, y, 1024)
    want = x.view(2, reads, 512).sum(1)[:, None].expand(2, writes, 512)
    torch.testing.assert_close(y.view(2, writes, 512), want)
    if not gpu.available():
        (made,) = launch_counts.count(lambda: lesson.move(x, y, 1024)).launches
        assert (made.bytes_read, made.bytes_written) == (x.nbytes, y.nbytes)
    with pytest.raises(ValueError, match=r"^unit: 1000"):
        lesson.move(x, y, 1000)


@INTERPRETED
def test_three_kernels_write_nothing_twice(lesson):
    B, T, H = 2, 33, 64
    inputs = drawn(network_inputs, B, T, H, dtype=bf16)
    found = launch_counts.count(lambda: lesson.three(*inputs)).launches
    assert [launch.name for launch in found] == ["gates_kernel", "cell_kernel", "outputs_kernel"]
    assert [one.bytes_written for one in found] == [2 * B * T * n for n in (2 * H, H, work.OUTPUTS)]


@GPU
@pytest.mark.parametrize("rung", ["kernels alone", "three kernels"])
def test_in_a_graph_the_network_is_the_same(lesson, rung):
    x, *weights = drawn(network_inputs, 64, 64, 128, dtype=bf16)
    call = rungs(lesson)[rung]
    graphed = lesson.kernels.GraphedStep(lambda x: call(x, *weights))
    with torch.no_grad():
        for _ in range(3):
            assert torch.equal(graphed(x), call(x, *weights))
            x.normal_()


# ---- the ledger ------------------------------------------------------------------------------------------

LAUNCHED = {"eager": 40, "compiled": 12, "better kernels": 10, "kernels alone": 8}
RAN = LAUNCHED | {"in a graph": 9, "three kernels": 4}
WALL = {"eager": 900.0, "compiled": 300.0, "better kernels": 330.0, "kernels alone": 200.0}
WALL |= {"in a graph": 110.0, "three kernels": 80.0}
DEVICE = {"eager": 400.0, "compiled": 200.0, "better kernels": 150.0, "kernels alone": 100.0}
DEVICE |= {"in a graph": 106.0, "three kernels": 76.0}
KERNEL, BONE, BUSY = 10.0, 5.0, 10.0
"""Microseconds of each kernel, and of each one that only moves its bytes."""
STAMP = {"kind": "recorded", "device": "NVIDIA H200", "date": "2026-01-02"}


def profile(name, kernels, launches, us):
    ran = {"what": [["k", "k"]], "when": [[0, i * us, us] for i in range(kernels)]}
    host = {"what": [["cudaLaunchKernel"]], "when": [[0, i * 1.0, 1.0] for i in range(launches)]}
    suite, how = f"profile/microsecond_ledger/{name}", dict(direction="", dtype="", shape={}, cache="")
    return Row(suite, "", clock="profiler", runs=1, trace={"kernels": ran, "host": host}, **how, **STAMP)


def tape():
    """What a recording leaves, with numbers that are made up."""

    def row(suite, name, us, clock, cache="warm", shape=None):
        shape = shape or {"batch": 1024, "time": 64, "width": 128}
        how = dict(shape=shape, dtype="bfloat16", clock=clock, cache=cache)
        return recorded(name, us=us, suite=f"microsecond_ledger/{suite}", **how)

    for name in RAN:
        yield row("wall", name, WALL[name], "host")
        yield row("device", name, DEVICE[name], "graph")
        yield row("passes", f"{name}, issued", 0.9 * WALL[name] if name in LAUNCHED else 20.0, "", "", {})
        yield row("passes", f"{name}, done", WALL[name], "", "", {})
        yield profile(name, RAN[name], LAUNCHED.get(name, 2), KERNEL)
    for name in ("kernels alone", "in a graph", "three kernels"):
        yield profile(f"bones {name}", RAN[name], RAN[name], BONE)
    for name, us in {"traffic": 40.0, "arithmetic": 8.0, "unexplained": 32.0, "between": 20.0}.items():
        yield row("by_hand", name, us, "", "", {})
    yield row("by_hand", "launches", 100.0, "", "", {})
    for steps, us in ((64, 30.0), (256, 78.0)):
        yield row("chain", "three kernels", us, "graph", "warm", {"batch": 1, "time": steps, "width": 128})


@pytest.fixture
def from_a_tape(tmp_path, monkeypatch, cache):
    """The names of the lesson after its cells up to the last rung ran with that tape and no GPU."""
    folder = tmp_path / "nvidia-h200"
    (folder / "old").mkdir(parents=True)
    roofs = next(paths.RECORDED.glob("*/roofs.jsonl")).read_text(encoding="utf-8")
    device = json.loads(roofs.splitlines()[0])["device"]
    (folder / "roofs.jsonl").write_text(roofs.replace(device, STAMP["device"]), encoding="utf-8")
    (folder / f"{NAME}.jsonl").write_text("".join(json.dumps(vars(row)) + "\n" for row in tape()))
    monkeypatch.setattr(paths, "RECORDED", tmp_path)
    monkeypatch.setattr(gpu, "available", lambda: False)
    names = {"__name__": NAME}
    for _, cell in notebooks.code_cells(notebooks.read(notebooks.resolve(NAME))):
        if not {"colab", "exercise"} & set(cell.metadata.get("tags", [])):
            exec(compile(cell.source, NAME, "exec"), names)
        if "step_us" in names:
            return names
    raise AssertionError("no cell measures the chain")


@INTERPRETED
def test_from_a_tape_each_line_is_made_of_its_instruments(from_a_tape):
    ledger, by_kernel = from_a_tape["ledger"], from_a_tape["by_kernel"]
    table = by_kernel("in a graph")
    assert list(table.ran) == [KERNEL] * 9 and list(table.bytes) == [BONE] * 9
    assert list(table.index[:2]) == ["copy", "input heads"] and table.products["copy"] == 0
    both = table.products.sum(), by_kernel("three kernels").products.sum()
    assert both[0] == pytest.approx(both[1]) == from_a_tape["product_us"](*from_a_tape["multiplications"])
    for name in RAN:
        line = ledger.loc[name]
        assert line.sum() == pytest.approx(WALL[name]) and line.launches == WALL[name] - DEVICE[name]
        assert line["between"] == pytest.approx(DEVICE[name] - KERNEL * RAN[name])
    beyond = (table.products - BONE).clip(lower=0).sum()
    assert beyond > 0
    assert tuple(ledger.loc["in a graph"][["traffic", "arithmetic"]]) == pytest.approx((9 * BONE, beyond))
    floor = max(from_a_tape["by_bytes"], both[0])
    assert ledger.loc["eager"][["traffic", "arithmetic"]].sum() == pytest.approx(floor)
    assert ledger.loc["kernels alone, by hand"].sum() == 200.0
    assert len(from_a_tape["drawn"]) == len(RAN)


@INTERPRETED
def test_from_a_tape_the_wall_is_predicted_and_the_bound_is_a_sum_of_floors(from_a_tape):
    found = from_a_tape["found"]
    host = {n: 0.9 * us for n, us in WALL.items() if n in LAUNCHED} | {
        "in a graph": 20.0,
        "three kernels": 20.0,
    }
    for name in RAN:
        slower = max(host[name], DEVICE[name])
        assert slower <= found.predicted[name] < 1.05 * slower
    assert from_a_tape["step_us"].value == pytest.approx(0.25)
    least = from_a_tape["least"]
    assert least["longest"]["cell"] == 16.0 and least["longest"]["copy"] == BONE
    assert from_a_tape["bound"].value == pytest.approx(least["longest"].sum())
    assert isinstance(least, pd.DataFrame) and len(least) == 4


# ---- the lesson as a whole -------------------------------------------------------------------------------


def test_it_runs_to_its_end_in_silence_and_checks_its_kernels(checks_passed):
    assert set(checks_passed) == {"two"}
