"""The suites of the benchmark: which there are, how long they take, whether what they measure is right."""

import tomllib

import pytest
import torch

from labkit import accuracy, code_hash, peers, places, suites, sweeps
from labkit.bench_plan import LIMIT_S
from labkit.published import rms_norm_shapes

pytestmark = pytest.mark.usefixtures("cache")
SMALL = {"batch": 8, "width": 16, "hidden": 24, "groups": 4, "time": 5, "depth": 2, "out": 12}
STEPS = ("labkit, GraphedStep", "labkit, GraphedStep, no copy", "labkit, GraphedStep, compiled")
"""Ours is the graph, and what it holds is PyTorch's."""
NEEDS_GPU = ("make_graphed_callables", "bare replay", "reduce-overhead", "in a graph")
CASES = [(name, way) for name in suites.NAMES for way in ("forward", "backward")]

every_suite = pytest.mark.parametrize("name", suites.NAMES)


def cases(name, with_peers=True):
    """Contender, shape and options of every row, with the part that it is of."""
    return [(part, *row) for part in suites.parts(name, peers=with_peers) for row in part.rows()]


def test_the_suites_are_those_of_the_lessons_in_their_order():
    there = "ledger" if (places.CHECKOUT / "labkit/suites/microsecond_ledger.py").exists() else ""
    assert " ".join(suites.NAMES) == (
        f"affine linear geglu grouped graphs rms_norm linear_recurrence rms_recurrence {there}".strip()
    )
    assert suites.chosen([]) == list(suites.NAMES)
    assert suites.chosen(["geglu", "affine", "geglu"]) == ["affine", "geglu"]
    with pytest.raises(ValueError, match="no suite is called 'lager'; there are: affine, "):
        suites.chosen(["lager"])


@every_suite
def test_a_suite_is_planned_within_its_time(name):
    assert sum(part.seconds() for part in suites.parts(name, peers=True)) <= LIMIT_S


def test_all_of_it_is_planned_within_sixteen_minutes():
    planned = (part.seconds() for name in suites.NAMES for part in suites.parts(name, peers=True))
    assert sum(planned) <= 16 * 60


def test_no_two_rows_have_one_key():
    keys = [key for name in suites.NAMES for part in suites.parts(name, peers=True) for key in part.planned()]
    assert len(set(keys)) == len(keys)


@every_suite
def test_a_contender_has_one_code_throughout_a_suite(name):
    codes = {(part.suite, one.name, sweeps.code(one)) for part, one, *_ in cases(name)}
    assert len(codes) == len({code[:2] for code in codes})


@every_suite
def test_each_row_has_bytes_and_operations(name):
    for part, one, shape, options in cases(name):
        assert part.suite.split("/")[:2] == ["bench", name]
        itemsize = getattr(torch, options["dtype"]).itemsize
        assert one.work.min_bytes(shape, itemsize, options["direction"]) > 0
        assert one.work.flops(shape, options["direction"]) > 0


@every_suite
def test_ours_is_measured_forward_and_backward(name):
    ours = {options["direction"] for _, one, _, options in cases(name) if one.name.startswith("labkit")}
    assert "forward" in ours and ours & {"backward", "forward_backward"}


@every_suite
def test_the_code_of_ours_holds_the_finished_kernels(name):
    for part, one, _, _ in cases(name):
        if one.name.startswith("labkit") and one.name not in STEPS:
            code = "\n".join(code_hash.sources(one.call, set()))
            taught = "@triton.jit" in code  # a kernel that stands in the lesson
            assert taught or "labkit.kernels." in code, f"{part.suite}: {one.name} could be edited unseen"


@pytest.mark.parametrize(
    ("suite", "contenders"),
    [
        ("rms_norm", ("labkit", "F.rms_norm", "torch.compile", "Liger")),
        ("linear_recurrence", ("labkit", "fla, step by step")),
        ("rms_recurrence", ("labkit",)),
    ],
)
def test_all_published_shapes_are_measured_in_float32_both_ways(suite, contenders):
    for way in ("forward", "backward"):
        for contender in contenders:
            shapes = [
                shape
                for part, one, shape, options in cases(suite)
                if (part.suite, one.name) == (f"bench/{suite}", contender)
                and (options["dtype"], options["direction"]) == ("float32", way)
            ]
            assert all(shape in shapes for shape in rms_norm_shapes()), (contender, way)
    assert len(rms_norm_shapes()) == 17


def test_who_tunes_itself_does_so_at_every_width_that_it_is_measured_at():
    tuned, measured = set(), set()
    for part in suites.parts("linear_recurrence", peers=True):
        tuned |= {(one.name, shape["width"]) for one in part.tuners() for shape in part.tuned}
        measured |= {(one.name, shape["width"]) for one, shape, _ in part.rows() if one.peer == "fla-core"}
    assert tuned == measured


def test_without_the_word_there_is_no_peer():
    found = {name: {one.peer for _, one, *_ in cases(name, with_peers=False)} for name in suites.NAMES}
    assert set().union(*found.values()) == {None}
    taken = set().union(*({one.peer for _, one, *_ in cases(name)} for name in suites.NAMES))
    assert taken == {None, *peers.EXPECTED}


def test_the_peers_are_expected_in_the_version_that_is_installed_with_the_extra():
    project = tomllib.loads((places.CHECKOUT / "pyproject.toml").read_text())["project"]
    asked = project["optional-dependencies"]["peers"]
    assert dict(each.split("==") for each in asked) == peers.EXPECTED


def test_who_tunes_itself_is_a_contender_of_the_part():
    for name in suites.NAMES:
        for part in suites.parts(name, peers=True):
            assert {one.name for one in part.tuners()} == set(part.tuning)
            assert bool(part.tuning) == bool(part.tuned)


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU every row is checked when it is measured")
@pytest.mark.parametrize(("name", "way"), CASES)
def test_every_contender_computes_what_its_work_says(name, way):
    """At a small size, interpreted; what torch.compile makes of a call is not compiled here."""
    seen = set()
    for part in suites.parts(name, peers=False):
        shape = {axis: SMALL[axis] for axis in part.shapes[0]}
        directions = [each for each in part.directions if (each == "forward") == (way == "forward")]
        if not directions:
            continue
        direction = directions[0]
        for one in part.contenders:
            if one.name.endswith(NEEDS_GPU) or "GraphedStep" in one.name:
                continue
            if (part.suite, one.name, direction) in seen:
                continue
            seen.add((part.suite, one.name, direction))
            inputs = [t.requires_grad_(way == "backward") for t in one.work.inputs(shape)]
            comparison = accuracy.Comparison(one.call, one.work.reference, direction, one.work.batched)
            # the vendor's epilogue has no tanh approximation on a CPU
            allowed = 1e-3 if one.name == "_addmm_activation" else 1e-5
            assert comparison.complete(inputs) < allowed, f"{part.suite}: {one.name}"
    assert seen
