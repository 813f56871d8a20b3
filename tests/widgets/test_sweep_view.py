"""What a sweep panel shows of a table: figures, sentences, numbers."""

import re
from dataclasses import replace

import pandas as pd
import pytest
from simulated import doubling, install
from taped import recorded

from labkit.measure import rows
from labkit.plots.curves import SPEEDUP, TIME
from labkit.widgets.sweep_plan import SweepPlan
from labkit.widgets.sweep_view import sentences, speedups, static_page, sweep_figure

EMPTY = rows.as_results([], ["batch", "width"])
NOTHING = "nothing measured yet"


@pytest.fixture
def planned(monkeypatch):
    """A function that makes a plan; its options change the usual one."""
    gpu = install(monkeypatch.setattr)

    def make(of="labkit", **options):
        both = (doubling(gpu, of), doubling(gpu, "eager"))
        usual = dict(suite="suite", contenders=both, x="width", values=(16, 32, 64), others={"batch": (2,)})
        usual |= dict(title="Doubling", of=of, over="eager")
        usual |= {"reference_lines": lambda table: {"the floor": lambda width: width / 10}}
        return SweepPlan(**(usual | options))

    return make


def table(**columns):
    """labkit is twice as fast as eager at 16 and 32."""
    pairs = [("labkit", 16, 10.0), ("eager", 16, 20.0), ("labkit", 32, 20.0), ("eager", 32, 40.0)]
    return rows.as_results(
        [recorded(name, width, us, **columns) for name, width, us in pairs], ["batch", "width"]
    )


def two_dtypes():
    return pd.concat([table(), table(dtype="float16")], ignore_index=True)


def texts(shown):
    found = shown.figure.findobj(match=lambda artist: hasattr(artist, "get_text") and artist.get_visible())
    return " | ".join(text.get_text().replace("\n", " ") for text in found)


def test_time_and_speedup_have_their_reference_lines(planned):
    plan = planned()
    for view, line in ((TIME, "the floor"), (SPEEDUP, "equal")):
        assert line in texts(sweep_figure(plan, table(), view))
    assert "Doubling: times faster than eager" in sweep_figure(plan, table(), SPEEDUP).alt
    far = replace(plan.all_selections()[0], values=(16, 1024))
    (reached, *_) = sweep_figure(plan, table(), TIME, far).figure.axes
    (near, *_) = sweep_figure(plan, table()).figure.axes
    assert reached.get_xlim()[1] > 1024 and near.get_xlim()[1] < 64


def test_speedups_are_over_the_one_named_by_each_dtype_for_itself(planned):
    found = speedups(planned(), two_dtypes())
    assert set(found["contender"]) == {"labkit"} and found["speedup"].tolist() == [2.0] * 4
    assert found["dtype"].tolist() == ["float32"] * 2 + ["float16"] * 2
    alone = table()
    alone = alone[alone["contender"] == "labkit"]
    for given, view in ((alone, SPEEDUP), (EMPTY, TIME), (EMPTY, SPEEDUP)):
        assert NOTHING in sweep_figure(planned(), given, view).alt


def test_a_sentence_for_each_origin_and_dtype_that_has_both_to_compare(planned):
    plan, live = planned(), table(kind="live", device="Simulated")
    said = sentences(plan, pd.concat([live, table(), table(dtype="float16")], ignore_index=True))
    assert len(said) == 3 and said[2].startswith("float16, batch 2:")
    assert said[0].startswith("float32, batch 2: labkit is never slower than eager, and 2x at width")
    assert "live on Simulated" in said[0] and "recorded on NVIDIA H200" in said[1]
    half = table(dtype="float16")
    alone = half[half["contender"] == "labkit"]
    assert [each.split(",")[0] for each in sentences(plan, pd.concat([table(), alone]))] == ["float32"]
    assert "was measured for both" in sentences(plan, alone)[0]
    assert "Nothing was measured here yet" in sentences(plan, EMPTY)[0]


def test_the_numbers_of_two_devices_stand_apart(planned):
    mine = table(device="Simulated").assign(median_us=1.0)
    shown, _ = static_page(planned(), pd.concat([mine, table()], ignore_index=True))
    rows_ = re.findall(r"<tr>(.*?)</tr>", shown.partition("<tbody>")[2], re.S)
    said = [re.findall(r"<t[hd][^>]*>(.*?)</t", row) for row in rows_]
    assert ["Simulated", "16", "1.0", "1.0"] in said and ["NVIDIA H200", "16", "10.0", "20.0"] in said, said
    assert len(said) == 4


def test_the_page_has_figure_sentences_and_numbers_and_escapes_names(planned):
    plan = planned("a<b")
    shown, text = static_page(plan, table().replace({"contender": {"labkit": "a<b"}}))
    assert "<img alt=" in shown and "<li>" in shown and "<table" in shown
    assert "a<b" not in shown and "a&lt;b" in shown and "a<b is never slower than eager" in text
