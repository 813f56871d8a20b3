"""The suites of the benchmark: which there are, how long they take, whether what they measure is right."""

import functools
import tomllib

import pytest
import torch

from labkit import accuracy, code_hash, lessons, peers, places, suites, sweeps
from labkit.bench_plan import LIMIT_S
from labkit.published import rms_norm_shapes

pytestmark = pytest.mark.usefixtures("cache")
SMALL = {"batch": 8, "width": 16, "hidden": 24, "groups": 4, "time": 5, "depth": 2, "out": 12}
STEPS = ("labkit, GraphedStep", "labkit, GraphedStep, no copy", "labkit, GraphedStep, compiled")
"""Ours is the graph, and what it holds is PyTorch's."""
NEEDS_GPU = ("make_graphed_callables", "bare replay", "reduce-overhead", "in a graph")


@functools.cache
def parts(name, with_peers=True):
    return suites.parts(name, peers=with_peers)


def cases(name, with_peers=True):
    """Contender, shape and options of every row, with the part that it is of."""
    return [(part, *row) for part in parts(name, with_peers) for row in part.rows()]


def test_the_suites_are_those_of_the_lessons_and_planned_within_sixteen_minutes():
    assert suites.chosen([]) == list(suites.NAMES)
    assert suites.chosen(["geglu", "affine", "geglu"]) == ["affine", "geglu"]
    with pytest.raises(ValueError, match="no suite is called 'lager'; there are: affine, "):
        suites.chosen(["lager"])
    covered = {suites.MODULES[name] for name in suites.NAMES}
    assert {path.stem.partition("_")[2] for path in lessons.find()} == covered
    every = [part for name in suites.NAMES for part in parts(name)]
    assert sum(part.seconds() for part in every) <= 16 * 60
    keys = [key for part in every for key in part.planned()]
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize("name", suites.NAMES)
def test_a_suite_is_planned_in_time_and_says_what_each_row_moves_computes_and_is_made_of(name):
    assert sum(part.seconds() for part in parts(name)) <= LIMIT_S
    codes, directions = {}, set()
    for part, one, shape, options in cases(name):
        assert part.suite.split("/")[:2] == ["bench", name]
        itemsize = getattr(torch, options["dtype"]).itemsize
        assert one.work.min_bytes(shape, itemsize, options["direction"]) > 0
        assert one.work.flops(shape, options["direction"]) > 0
        codes.setdefault((part.suite, one.name), {})[id(one)] = one
        directions |= {options["direction"]} if one.name.startswith("labkit") else set()
    assert "forward" in directions and directions & {"backward", "forward_backward"}
    for (suite, who), ones in codes.items():
        assert len({sweeps.code(one) for one in ones.values()}) == 1, f"{suite}: {who} has two codes"
        if who.startswith("labkit") and who not in STEPS:
            code = "\n".join(code_hash.sources(next(iter(ones.values())).call, set()))
            taught = "@triton.jit" in code  # a kernel that stands in the lesson
            assert taught or "labkit.kernels." in code, f"{suite}: {who} could be edited unseen"


@pytest.mark.parametrize(
    ("suite", "contenders"),
    [
        ("rms_norm", ("labkit", "F.rms_norm", "torch.compile", "Liger")),
        ("linear_recurrence", ("labkit", "fla, step by step")),
        ("rms_recurrence", ("labkit",)),
    ],
)
def test_all_published_shapes_are_measured_in_float32_both_ways(suite, contenders):
    assert len(rms_norm_shapes()) == 17
    there = [
        (one.name, options["direction"], shape)
        for part, one, shape, options in cases(suite)
        if part.suite == f"bench/{suite}" and options["dtype"] == "float32"
    ]
    wanted = [
        (who, way, s) for who in contenders for way in ("forward", "backward") for s in rms_norm_shapes()
    ]
    assert not [each for each in wanted if each not in there]


def test_peers_come_by_the_word_in_the_version_of_the_extra_and_tune_themselves_where_they_are_measured():
    for word, wanted in ((False, {None}), (True, {None, *peers.EXPECTED})):
        assert {one.peer for name in suites.NAMES for _, one, *_ in cases(name, word)} == wanted
    project = tomllib.loads((places.CHECKOUT / "pyproject.toml").read_text())["project"]
    assert dict(each.split("==") for each in project["optional-dependencies"]["peers"]) == peers.EXPECTED
    for part in (part for name in suites.NAMES for part in parts(name)):
        assert {one.name for one in part.tuners()} == set(part.tuning)
        assert bool(part.tuning) == bool(part.tuned)
    recurrence = parts("linear_recurrence")
    tuned = {(one.name, s["width"]) for part in recurrence for one in part.tuners() for s in part.tuned}
    rows = [row for part in recurrence for row in part.rows()]
    assert tuned == {(one.name, shape["width"]) for one, shape, _ in rows if one.peer == "fla-core"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU every row is checked when it is measured")
@pytest.mark.parametrize("way", ["forward", "backward"])
@pytest.mark.parametrize("name", suites.NAMES)
def test_every_contender_computes_what_its_work_says(name, way):
    """At a small size, interpreted; what torch.compile makes of a call is not compiled here."""
    seen = set()
    for part in parts(name, False):
        shape = {axis: SMALL[axis] for axis in part.shapes[0]}
        direction = next((d for d in part.directions if (d == "forward") == (way == "forward")), None)
        for one in part.contenders if direction else ():
            key = part.suite, one.name, direction
            if one.name.endswith(NEEDS_GPU) or "GraphedStep" in one.name or key in seen:
                continue
            seen.add(key)
            inputs = [t.requires_grad_(way == "backward") for t in one.work.inputs(shape)]
            comparison = accuracy.Comparison(one.call, one.work.reference, direction, one.work.batched)
            # the vendor's epilogue has no tanh approximation on a CPU
            allowed = 1e-3 if one.name == "_addmm_activation" else 1e-5
            assert comparison.complete(inputs) < allowed, f"{part.suite}: {one.name}"
    assert seen
