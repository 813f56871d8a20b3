"""What a sweep panel offers and knows: selections, own rows, the tape beside them. No widgets."""

from dataclasses import replace

import pytest
from simulated import HERE, doubling
from taped import recorded

from labkit.measure import rows
from labkit.widgets.sweep_plan import Selection, SweepPlan

pytestmark = pytest.mark.usefixtures("own_folders")


def planned(gpu, **options):
    both = (doubling(gpu), doubling(gpu, "eager", 3.0))
    usual = dict(suite="suite", contenders=both, x="width", values=(16, 32), others={"batch": (1, 2)})
    return SweepPlan(**(usual | dict(title="Doubling", of="labkit", over="eager") | options))


def own(name="labkit", width=16, **columns):
    """A row as this machine measured it."""
    return replace(recorded(name, width, kind="live", device=HERE.device), **columns)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        *(({name: "nobody"}, f"{name}: 'nobody' is none of the contenders") for name in ("of", "over")),
        *(({"values": given}, "values: .* has to be increasing sizes") for given in ((), (32, 16), (16, 16))),
        ({"others": {"batch": (0, 2)}}, "batch: .* has to be increasing sizes"),
    ],
)
def test_a_wrong_plan_is_named(gpu, options, message):
    with pytest.raises(ValueError, match=message):
        planned(gpu, **options)


def test_what_everything_is(gpu):
    dtypes = ("bfloat16", "float32")
    plan = planned(gpu, dtypes=dtypes, clocks=("host",))
    first = Selection("width", ("labkit", "eager"), (16, 32), {"batch": 1}, "bfloat16", "host")
    assert plan.all_selections()[0] == first and first.cache == "warm"
    assert first.shapes == [{"batch": 1, "width": 16}, {"batch": 1, "width": 32}]
    found = [(s.dtype, s.others["batch"]) for s in plan.all_selections()]
    assert found == [(t, n) for t in dtypes for n in (1, 2)]
    assert plan.usual_selection() == plan.all_selections()[1]
    some = replace(plan, contenders=(plan.contenders[0], replace(plan.contenders[1], sizes={"width": (32,)})))
    called = [(one.name, shape["width"]) for one, shape in some.calls(first)]
    assert called == [("labkit", 16), ("labkit", 32), ("eager", 32)]


def test_a_row_of_another_sweep_is_none_of_this_one(gpu):
    selection = planned(gpu).all_selections()[1]
    changes = dict(contender="stranger", dtype="float16", direction="backward", cache="warm", clock="events")
    others = [recorded(**{name: value}) for name, value in changes.items()]
    shapes = {"batch": 1, "width": 16}, {"batch": 2, "width": 64}, {"batch": 2, "width": 16, "length": 3}
    others += [recorded(shape=shape) for shape in shapes]
    fallback = recorded(clock="events", note="timed with events, a graph cannot hold it: ...")
    found = selection.matching([recorded(), *others, fallback])
    assert found == [recorded(), fallback], "it was asked for by the graph clock"
    assert replace(selection, clock="events").matching([fallback]) == []


# --- own rows and the tape ----------------------------------------------------------------------------

HERE_LIVE, H200 = ("live", "Simulated"), ("recorded", "NVIDIA H200")


def origins(table):
    return sorted(set(zip(table["kind"], table["device"], strict=True)))


def test_the_whole_table_has_one_origin_by_the_first_clock_and_a_part_takes_no_recorded_numbers_away(gpu):
    plan = planned(gpu, others={"batch": (2,)})
    taped = [recorded(name, width) for name in ("labkit", "eager") for width in (16, 32)]
    nothing = plan.results([], [])
    assert nothing.empty and {"batch", "width", "median_us"} <= set(nothing)
    stopped = [own(), own("eager"), own(width=32)]
    assert origins(plan.results(stopped, taped)) == [H200]
    gap = own("eager", width=32, median_us=None, note="out of memory")
    other = own(clock="host", cache="warm")
    table = plan.results([*stopped, gap, other], taped)
    assert origins(table) == [HERE_LIVE] and set(table["clock"]) == {"graph"}, "a gap is a point"
    assert origins(plan.results(stopped, [])) == [HERE_LIVE], "better than nothing"


def test_the_tape_of_a_suite_is_not_that_of_those_below_it(gpu, own_folders):
    both = [recorded(suite=suite) for suite in ("suite", "suite/part")]
    rows.write(own_folders / "recorded" / "h200" / "old" / "lesson.jsonl", both)
    assert [row.suite for row in planned(gpu).recorded_rows()] == ["suite"]
