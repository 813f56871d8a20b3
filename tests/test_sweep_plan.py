"""What a sweep panel offers and knows: selections, rows kept on disk, the tape beside them. No widgets."""

import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from simulated import HERE, doubling, install
from taped import recorded

from labkit import device, machine, places, rows, sweeps
from labkit.sweep_plan import Kept, Known, Plan, Selection, place, slug, tape


@pytest.fixture(autouse=True)
def folders(tmp_path, monkeypatch):
    monkeypatch.setenv("LABKIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(places, "RECORDED", tmp_path / "recorded")
    return tmp_path


@pytest.fixture
def gpu(monkeypatch):
    return install(monkeypatch.setattr)


def planned(gpu, **options):
    both = (doubling(gpu), doubling(gpu, "eager", 3.0))
    usual = {
        "suite": "suite",
        "contenders": both,
        "x": "width",
        "values": (16, 32),
        "others": {"batch": (1, 2)},
        "title": "Doubling",
        "of": "labkit",
        "over": "eager",
    }
    return Plan(**(usual | options))


def own(plan, name="labkit", width=16, us=10.0, age_s=0.0, **columns):
    """A row as this machine measured it."""
    contender = next(c for c in plan.contenders if c.name == name)
    here = {"device": HERE.device, "driver": HERE.driver, "torch": HERE.torch, "triton": HERE.triton}
    date = (datetime.now(UTC) - timedelta(seconds=age_s)).isoformat(timespec="seconds")
    source = sweeps.code(contender)
    return replace(recorded(name, width, us, kind="live", date=date, source=source, **here), **columns)


# --- what can be chosen -------------------------------------------------------------------------------


def test_some_points_of_a_selection_are_a_sweep_for_each_set_of_contenders(gpu):
    selection = planned(gpu, values=(16, 32, 64)).first()
    points = [("eager", 64), ("labkit", 16), ("eager", 16), ("labkit", 64), ("eager", 32)]
    parts = selection.only([recorded(name, width) for name, width in points], "width")
    assert {part.contenders: part.values for part in parts} == {
        ("labkit", "eager"): (16, 64),
        ("eager",): (32,),
    }
    assert all(
        replace(part, contenders=("labkit", "eager"), values=(16, 32, 64)) == selection for part in parts
    )
    assert selection.only([], "width") == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"of": "nobody"}, "of: 'nobody' is none of the contenders labkit, eager"),
        ({"over": "nobody"}, "over: 'nobody' is none of the contenders labkit, eager"),
        ({"values": ()}, r"values: \(\) has to be increasing sizes"),
        ({"values": (32, 16)}, r"values: \(32, 16\) has to be increasing sizes"),
        ({"values": (16, 16)}, r"values: \(16, 16\) has to be increasing sizes"),
        ({"others": {"batch": (0, 2)}}, r"batch: \(0, 2\) has to be increasing sizes"),
        ({"clocks": ()}, r"clocks: \(\) has to be one or more of graph, events, host"),
        ({"clocks": ("sundial",)}, "clocks: .* has to be one or more of graph, events, host"),
    ],
)
def test_a_wrong_plan_is_named(gpu, options, message):
    with pytest.raises(ValueError, match=message):
        planned(gpu, **options)


def test_first_comes_the_largest_of_the_other_sizes_and_the_first_of_the_rest(gpu):
    plan = planned(gpu, dtypes=("bfloat16", "float32"), directions=("backward", "forward"), clocks=("host",))
    assert plan.first() == Selection(
        ("labkit", "eager"), (16, 32), {"batch": 2}, "bfloat16", "backward", "host"
    )


def test_everything_is_each_dtype_direction_and_size_by_the_first_clock(gpu):
    tf32 = doubling(gpu, "tf32", dtypes=("float32",))
    plan = planned(gpu, dtypes=("float32", "float16"), directions=("forward", "backward"))
    plan = replace(plan, contenders=(*plan.contenders, tf32))
    found = plan.everything()
    assert [(s.dtype, s.direction, s.others["batch"]) for s in found] == [
        (dtype, direction, batch)
        for dtype in ("float32", "float16")
        for direction in ("forward", "backward")
        for batch in (1, 2)
    ]
    assert {s.clock for s in found} == {"graph"} and {s.values for s in found} == {(16, 32)}
    assert [("tf32" in s.contenders) for s in found] == [True] * 4 + [False] * 4


def test_a_contender_takes_part_in_its_own_dtypes_only(gpu):
    tf32 = doubling(gpu, "tf32", dtypes=("float32",))
    plan = planned(gpu, contenders=(doubling(gpu), doubling(gpu, "eager"), tf32))
    names = ("tf32", "eager")
    chosen = replace(plan.first(), contenders=names)
    assert [c.name for c in plan.chosen(chosen)] == ["eager", "tf32"], "in the order of the plan"
    assert [c.name for c in plan.chosen(replace(chosen, dtype="bfloat16"))] == ["eager"]


def test_points_are_the_shapes_of_the_sweep(gpu):
    assert planned(gpu).first().points("width") == [{"batch": 2, "width": 16}, {"batch": 2, "width": 32}]


@pytest.mark.parametrize(
    "other",
    [
        {"contender": "stranger"},
        {"dtype": "float16"},
        {"direction": "backward"},
        {"clock": "events"},
        {"clock": "events", "note": "out of memory", "median_us": None},
        {"cache": "warm"},
        {"shape": {"batch": 1, "width": 16}},
        {"shape": {"batch": 2, "width": 64}},
        {"shape": {"batch": 2, "width": 16, "length": 3}},
    ],
)
def test_a_row_of_another_sweep_is_none_of_this_one(gpu, other):
    selection = planned(gpu).first()
    assert selection.includes(recorded(), "width")
    assert not selection.includes(recorded(**other), "width")


def test_what_a_graph_could_not_hold_belongs_to_the_graph_sweep(gpu):
    fallback = recorded(clock="events", note="timed with events, a graph cannot hold it: ...")
    selection = planned(gpu).first()
    assert selection.includes(fallback, "width")
    assert not replace(selection, clock="events").includes(fallback, "width")
    assert place(fallback) == place(recorded()) != place(recorded(clock="events"))


def test_a_selection_names_itself_and_a_suite_its_file(gpu):
    assert str(planned(gpu).first()) == "float32, batch 2"
    assert slug("launch_overhead/width 2") == "launch-overhead-width-2"


# --- kept on disk -------------------------------------------------------------------------------------


def test_rows_are_on_the_disk_at_once_and_found_again(gpu):
    plan = planned(gpu)
    row = own(plan)
    kept = Kept(plan)
    kept.add(row)
    assert rows.read(kept.path) == [row]
    assert Kept(plan).rows() == [row]


@pytest.mark.parametrize("change", ["device", "driver", "torch", "triton", "source", "suite"])
def test_rows_of_another_machine_version_code_or_suite_are_not_shown(gpu, change):
    plan = planned(gpu)
    kept = Kept(plan)
    kept.add(own(plan, **{change: "other"}))
    kept.add(own(plan, width=32))
    assert [row.shape["width"] for row in kept.rows()] == [32]


def test_rows_of_edited_code_are_not_shown(gpu):
    plan = planned(gpu)
    kept = Kept(plan)
    kept.add(own(plan))
    edited = planned(gpu, contenders=(doubling(gpu, us=2.0), plan.contenders[1]))
    assert Kept(edited).rows() == []
    assert Kept(planned(gpu)).rows() != []


def test_a_contender_that_is_gone_has_no_rows(gpu):
    plan = planned(gpu)
    third = doubling(gpu, "third")
    Kept(plan).add(own(replace(plan, contenders=(*plan.contenders, third)), "third"))
    assert Kept(plan).rows() == []


def test_the_latest_row_of_a_measurement_counts(gpu):
    plan = planned(gpu)
    kept = Kept(plan)
    for us in (10.0, 12.0):
        kept.add(own(plan, us=us))
    assert [row.median_us for row in kept.rows()] == [12.0]


@pytest.mark.parametrize(("age_s", "kind"), [(0, "live"), (3500, "live"), (3700, "recorded")])
def test_after_an_hour_a_row_is_a_recorded_one(gpu, age_s, kind):
    plan = planned(gpu)
    Kept(plan).add(own(plan, age_s=age_s))
    assert [row.kind for row in Kept(plan).rows()] == [kind]


def test_without_a_gpu_rows_of_one_are_not_this_machines(gpu, monkeypatch):
    plan = planned(gpu)
    Kept(plan).add(own(plan))
    monkeypatch.setattr(device, "has_gpu", lambda: False)
    monkeypatch.setattr(machine, "identity", lambda: pytest.fail("the device is not asked for"))
    assert Kept(plan).rows() == []


def test_rows_of_another_version_stay_in_the_file_and_are_not_shown(gpu):
    plan = planned(gpu)
    kept = Kept(plan)
    kept.add(own(plan))
    newer = json.dumps({**json.loads(own(plan, width=32).to_json()), "a_later_field": "x"}) + "\n"
    kept.path.write_text(newer + kept.path.read_text() + newer)
    before = kept.path.read_text()
    assert [row.shape["width"] for row in kept.rows()] == [16]
    assert kept.path.read_text() == before, "another kernel may be adding to it"


# --- own rows and the tape ----------------------------------------------------------------------------


def origins(table):
    return sorted(set(zip(table["kind"], table["device"], strict=True)))


def test_with_nothing_measured_the_tape_is_shown_even_when_it_is_switched_off(gpu):
    plan = planned(gpu)
    found = Known(plan, [], [recorded()])
    for switched in (True, False):
        assert origins(found.table(plan.first(), tape=switched)) == [("recorded", "NVIDIA H200")]


def test_beside_own_rows_the_tape_can_be_switched_off(gpu):
    plan = planned(gpu)
    found = Known(plan, [own(plan)], [recorded()])
    assert origins(found.table(plan.first())) == [("live", "Simulated"), ("recorded", "NVIDIA H200")]
    assert origins(found.table(plan.first(), tape=False)) == [("live", "Simulated")]


def test_own_rows_take_the_place_of_the_tape_of_the_same_device(gpu):
    plan = planned(gpu)
    taped = [recorded(width=width, device="Simulated") for width in (16, 32)]
    table = Known(plan, [own(plan)], taped).table(plan.first())
    assert table[["kind", "width"]].to_numpy().tolist() == [["live", 16]]


def test_where_the_tape_has_no_such_clock_it_shows_the_first_one(gpu):
    plan = planned(gpu)
    events = replace(plan.first(), clock="events")
    table = Known(plan, [], [recorded()]).table(events)
    assert table["clock"].tolist() == ["graph"]
    both = Known(plan, [], [recorded(), recorded(clock="events")]).table(events)
    assert both["clock"].tolist() == ["events"]
    measured = Known(plan, [own(plan, clock="events")], [recorded()]).table(events)
    assert origins(measured) == [("live", "Simulated")], "clocks are not mixed"


def test_an_empty_table_has_its_columns(gpu):
    table = Known(planned(gpu), [], []).table(planned(gpu).first())
    assert table.empty and {"batch", "width", "median_us"} <= set(table)


def test_the_whole_table_has_one_origin_for_each_selection(gpu):
    plan = planned(gpu)
    mine = [own(plan), own(plan, "eager", kind="recorded"), own(plan, width=32, kind="recorded")]
    taped = [recorded(width=16), recorded(shape={"batch": 1, "width": 16})]
    table = Known(plan, mine, taped).measured()
    assert origins(table[table["batch"] == 2]) == [("live", "Simulated")]
    assert origins(table[table["batch"] == 1]) == [("recorded", "NVIDIA H200")]
    older = Known(plan, mine[1:], taped).measured()
    assert origins(older[older["batch"] == 2]) == [("recorded", "Simulated")]


def test_a_sweep_that_was_stopped_early_takes_no_recorded_numbers_away(gpu):
    plan = planned(gpu, others={"batch": (2,)})
    taped = [recorded(name, width) for name in ("labkit", "eager") for width in (16, 32)]
    stopped = [own(plan), own(plan, "eager"), own(plan, width=32)]
    assert origins(Known(plan, stopped, taped).measured()) == [("recorded", "NVIDIA H200")]
    gap = own(plan, "eager", width=32, median_us=None, note="out of memory")
    assert origins(Known(plan, [*stopped, gap], taped).measured()) == [("live", "Simulated")], "a gap is one"
    assert origins(Known(plan, stopped, []).measured()) == [("live", "Simulated")], "better than nothing"


def test_the_whole_table_is_by_the_first_clock(gpu):
    plan = planned(gpu)
    mine = [own(plan, clock="events"), own(plan, clock="host", cache="warm"), own(plan, width=32)]
    assert Known(plan, mine, []).measured()["clock"].tolist() == ["graph"]


def test_the_tape_of_a_suite_is_not_that_of_those_below_it(gpu, folders):
    path = folders / "recorded" / "h200" / "lesson.jsonl"
    for suite in ("suite", "suite/part"):
        rows.append(path, recorded(suite=suite))
    assert [row.suite for row in tape(planned(gpu))] == ["suite"]
