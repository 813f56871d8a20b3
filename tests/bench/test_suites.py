"""The suites of the benchmark: how long they take, whether they are right, sizes that are drawn."""

import functools
import tomllib

import numpy as np
import pytest
import torch

from labkit import paths
from labkit.bench import suite_part, suites
from labkit.lessons import code_hash
from labkit.measure import accuracy, sweeps
from labkit.workloads import recurrent as recurring
from labkit.workloads.published import rms_norm_shapes

pytestmark = pytest.mark.usefixtures("cache")
LIMIT_S, RANDOM_LIMIT_S = 8 * 60.0, 5 * 60.0
ROW_S, COMPILE_S, TUNE_S = 0.5, 3.0, 10.0
"""Seconds for a row on an H200, more for one that torch.compile makes, and for a peer to tune itself once.
TorchRL tunes itself for each row."""
SMALL = {"batch": 8, "width": 16, "hidden": 24, "groups": 4, "time": 5, "depth": 2, "out": 12}
NEEDS_GPU = ("make_graphed_callables", "reduce-overhead", "in a graph", "GraphedStep")
STEPS = ("labkit, GraphedStep", "labkit, GraphedStep, compiled")
"""Ours is the graph, and what it holds is PyTorch's."""
DRAWN = [name for name in suites.SUITES if name not in suites.WITHOUT_RANGES]


@functools.cache
def parts(name, with_peers=True):
    return suites.parts(name, peers=with_peers)


@functools.cache
def drawn(name, seed=0, count=40, **options):
    return suites.random_parts(name, peers=True, count=count, seed=seed, **options)


def seconds(found):
    """About how long parts of a suite take on an H200."""
    rows = [
        ROW_S + COMPILE_S * one.compiled + TUNE_S * (one.peer == "torchrl")
        for part in found
        for one in part.planned().values()
    ]
    return sum(rows) + sum(TUNE_S * len(tuners) * len(at) for tuners, at in (p.tuning() for p in found))


@pytest.mark.parametrize("name", suites.SUITES)
def test_a_suite_is_planned_in_time_and_says_what_each_row_moves_computes_and_is_made_of(name):
    assert seconds(parts(name)) <= LIMIT_S
    keys = [key for part in parts(name) for key in part.planned()]
    assert len(set(keys)) == len(keys)
    codes = {}
    for part in parts(name):
        assert part.suite.split("/")[:2] == ["bench", name]
        for (*_, direction, dtype, shape, _, _), one in part.planned().items():
            itemsize = getattr(torch, dtype).itemsize
            assert one.work.min_bytes(dict(shape), itemsize, direction) > 0
            assert one.work.flops(dict(shape), direction) > 0
            codes.setdefault((part.suite, one.name), {})[id(one)] = one
    assert any(who.startswith("labkit") for _, who in codes)
    for (suite, who), ones in codes.items():
        assert len({sweeps.source_label(one) for one in ones.values()}) == 1, f"{suite}: {who} has two codes"
        if who.startswith("labkit") and who not in STEPS:
            sources = code_hash.sources_of([next(iter(ones.values())).call])
            taught = "@triton.jit" in "\n".join(sources)  # a kernel that stands in the lesson
            assert taught or code_hash.kernel_files(sources), f"{suite}: {who} could be edited unseen"


def test_all_published_shapes_are_measured_in_float32_both_ways():
    assert len(rms_norm_shapes()) == 17
    for suite in ("rms_norm", "linear_recurrence", "rms_recurrence"):
        keys = {key[1:5] for part in parts(suite) for key in part.planned() if key[0] == f"bench/{suite}"}
        for shape in rms_norm_shapes():
            for way in ("forward", "backward"):
                assert ("labkit", way, "float32", tuple(sorted(shape.items()))) in keys


def test_peers_come_by_the_word_as_the_extra_has_them_and_tune_at_every_width():
    project = tomllib.loads((paths.CHECKOUT / "pyproject.toml").read_text())["project"]
    pinned = dict(each.split("==") for each in project["optional-dependencies"]["peers"])
    for word, wanted in ((False, {None}), (True, {None, *pinned})):
        found = {one.peer for name in suites.SUITES for part in parts(name, word) for one in part.contenders}
        assert found == wanted
    for part in (*parts("linear_recurrence"), *drawn("linear_recurrence")):
        tuners, shapes = part.tuning()
        wanted = {one.name for one in part.planned().values() if one.peer == "fla-core"}
        assert {one.name for one in tuners} == wanted
        assert not tuners or {s["width"] for s in shapes} == {s["width"] for s in part.shapes}


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU every row is checked when it is measured")
@pytest.mark.parametrize("way", ["forward", "backward"])
@pytest.mark.parametrize("name", suites.SUITES)
def test_every_contender_computes_what_its_work_says(name, way):
    """At a small size, interpreted; what torch.compile makes of a call is not compiled here."""
    seen = set()
    random = suites.random_parts(name, peers=False, count=10, seed=0) if name in DRAWN else []
    for part in (*parts(name, False), *random):
        shape = {axis: SMALL[axis] for axis in part.shapes[0]}
        direction = next((d for d in part.directions if (d == "forward") == (way == "forward")), None)
        for one in part.contenders if direction else ():
            key = one.name, direction, *shape, one.work.reference
            if any(word in one.name for word in NEEDS_GPU) or key in seen:
                continue
            seen.add(key)
            inputs = [t.requires_grad_(way == "backward") for t in one.work.inputs(shape)]
            comparison = accuracy.Comparison(one.call, one.work.reference, direction, one.work.batched)
            # the vendor's epilogue has no tanh approximation on a CPU
            allowed = 1e-3 if one.name == "_addmm_activation" else 1e-5
            code = one.code_hash()
            assert comparison.complete(inputs) < allowed, f"{part.suite}: {one.name}"
            assert one.code_hash() == code, f"{part.suite}: {one.name} looks edited once it was called"
    assert seen or (name == "matmul" and way == "backward")


def test_what_is_made_for_inputs_is_made_anew_for_others_and_is_no_edit_of_the_call():
    made: list[torch.Tensor] = []

    def make(call, x):
        made.append(x)
        return call

    call = suites._built_for_inputs(make, lambda x, weight: x * weight)
    code, one, two = code_hash.of_functions([call]), torch.ones(2), torch.full((2,), 2.0)
    for x in (one, one, two):
        assert torch.equal(call(x, two), x * two)
    assert len(made) == 2 and code_hash.of_functions([call]) == code


@pytest.mark.parametrize(
    ("scan", "steps"),
    [
        (suites._scan, recurring.linear_recurrence),
        (suites._gru_scan, recurring.min_gru),
        (suites._log_scan, recurring.log_recurrence),
    ],
)
@pytest.mark.parametrize("time", [1, 2, 7, 64])
def test_a_reference_in_blocks_is_that_step_by_step(scan, steps, time):
    a, b, upstream = (torch.rand(2, time, 3).double() for _ in range(3))
    given = (-a if steps is recurring.log_recurrence else a).requires_grad_(), b.requires_grad_()
    states = [each(*given) for each in (scan, steps)]
    gradients = [torch.autograd.grad(each, given, upstream) for each in states]
    for got, want in zip((states[0], *gradients[0]), (states[1], *gradients[1]), strict=True):
        assert torch.allclose(got, want, rtol=1e-10)


def test_the_gradient_of_a_reference_in_blocks_keeps_few_tensors():
    """Many of a million steps in float64 would not fit beside the contenders."""
    kept = []
    a, b = (torch.rand(1, 2**12, 4, dtype=torch.float64).requires_grad_() for _ in range(2))
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.nbytes) or t, lambda t: t):
        suites._scan(a, b)
    assert sum(kept) <= 8 * a.nbytes


# Sizes that are drawn


@pytest.mark.parametrize("small", [False, True])
@pytest.mark.parametrize("name", DRAWN)
def test_sizes_are_in_their_ranges_aligned_large_enough_and_different(name, small):
    ranges = {part.suite: part for part in suites._named("random", name, True) if part.ranges}
    for part in drawn(name, small=small):
        suite = part.suite.removesuffix("/small")
        assert part.suite.endswith("/small") == small and len(part.dtypes) == 1
        assert len({tuple(shape.items()) for shape in part.shapes}) == len(part.shapes)
        for shape in part.shapes:
            for axis, (low, high, step) in ranges[suite].ranges.items():
                assert low <= shape[axis] <= high and shape[axis] % step == low % step == high % step == 0
            itemsize = getattr(torch, part.dtypes[0]).itemsize
            moved = part.contenders[0].work.min_bytes(shape, itemsize, "forward")
            assert moved <= suite_part.MOST_BYTES and (moved < suite_part.LEAST_BYTES) == small


@pytest.mark.parametrize("name", DRAWN)
def test_forty_sizes_take_five_minutes_the_slow_contenders_ten_of_them(name):
    assert seconds(drawn(name)) <= RANDOM_LIMIT_S
    for suite in {part.suite for part in drawn(name)}:
        rows = [
            (key, one) for part in drawn(name) if part.suite == suite for key, one in part.planned().items()
        ]
        for way in {key[2] for key, _ in rows}:
            found = [(one, key[4]) for key, one in rows if key[2] == way]
            assert sum(one.name == "labkit" for one, _ in found) == 40, (suite, way)
            assert sum(one.name == "torch.compile" for one, _ in found) in (0, 10)


def test_the_same_seed_draws_the_same_and_another_one_others():
    first, again = (suites.random_parts("matmul", peers=False, count=12, seed=1) for _ in range(2))
    shapes = [part.shapes for part in first]
    assert shapes == [part.shapes for part in again] != [p.shapes for p in drawn("matmul", seed=2, count=12)]
    assert len({shape["batch"] for part in first for shape in part.shapes}) > 20
    widths = [shape["width"] for part in drawn("matmul", count=400) for shape in part.shapes]
    assert np.median(widths) < np.mean(widths), "log-uniform: as many small ones as large ones"
    with pytest.raises(ValueError, match="hold fewer than 5 such sizes"):
        ours = parts("affine")[0].contenders
        tiny = suite_part.SuitePart(ours, ranges={"batch": (1, 2, 1), "width": (1, 2, 1)})
        tiny.drawn(9, np.random.default_rng(0), small=True)
