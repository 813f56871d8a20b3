"""What a sweep panel shows of a table: figures with what was published beside them, sentences, numbers."""

from dataclasses import replace

import pandas as pd
import pytest
from matplotlib.lines import Line2D
from simulated import doubling, install
from taped import recorded

from labkit import published, rows
from labkit.drawing import colour
from labkit.sweep_plan import SPEEDUP, TIME, TRAFFIC, Look, Plan
from labkit.sweep_views import page, picture, readout, sentences, speedups


@pytest.fixture
def plan(monkeypatch):
    gpu = install(monkeypatch.setattr)
    return planned(gpu)


def planned(gpu, **options):
    usual = {
        "suite": "suite",
        "contenders": (doubling(gpu), doubling(gpu, "eager")),
        "x": "width",
        "values": (16, 32, 64),
        "others": {"batch": (2,)},
        "title": "Doubling",
        "of": "labkit",
        "over": "eager",
        "floor": lambda table: {"the floor": lambda width: width / 10},
        "regimes": lambda table: [(None, 32, "small")],
        "expected": {"as one expects": lambda width: 2.0},
    }
    return Plan(**(usual | options))


def table(**columns):
    """labkit is twice as fast as eager at 16 and 32."""
    pairs = [("labkit", 16, 10.0), ("eager", 16, 20.0), ("labkit", 32, 20.0), ("eager", 32, 40.0)]
    return rows.table([recorded(name, width, us, **columns) for name, width, us in pairs], ["batch", "width"])


def posted(column, value, **columns):
    return pd.DataFrame(
        {
            "series": ["somebody"],
            "width": [32],
            column: [value],
            "kind": ["published"],
            "device": ["device A"],
            "source": ["a forum"],
            **columns,
        }
    )


def texts(shown):
    return " | ".join(text.get_text().replace("\n", " ") for text in shown.figure.findobj(match=_text))


def _text(artist):
    return hasattr(artist, "get_text") and artist.get_visible()


def test_time_and_speedup_have_floors_and_expectations_that_can_be_switched_off(plan):
    for view, line in ((TIME, "the floor"), (SPEEDUP, "as one expects")):
        assert line in texts(picture(plan, table(), Look(view)))
        assert line not in texts(picture(plan, table(), Look(view, floor=False)))
    assert "small" in texts(picture(plan, table(), Look(TIME)))
    assert "small" not in texts(picture(plan, table(), Look(TIME, floor=False)))
    assert "Doubling: times faster than eager" in picture(plan, table(), Look(SPEEDUP)).alt


@pytest.mark.parametrize(
    ("column", "value", "view", "other"),
    [("speedup", 7.5, SPEEDUP, TIME), ("median_us", 75.0, TIME, SPEEDUP)],
)
def test_published_points_stand_in_the_view_that_they_are_of(monkeypatch, column, value, view, other):
    gpu = install(monkeypatch.setattr)
    plan = planned(gpu, published=posted(column, value))
    assert "published: a forum" in texts(picture(plan, table(), Look(view)))
    assert "published" not in texts(picture(plan, table(), Look(view, published=False)))
    assert "published" not in texts(picture(plan, table(), Look(other)))


def test_published_points_stand_alone_while_nothing_is_measured(monkeypatch):
    plan = planned(install(monkeypatch.setattr), published=posted("speedup", 7.5))
    empty = rows.table([], ["batch", "width"])
    assert "published: a forum" in texts(picture(plan, empty, Look(SPEEDUP)))


def test_published_points_stand_in_every_panel_but_those_of_another_dtype(monkeypatch):
    gpu = install(monkeypatch.setattr)
    both = pd.concat([table(), table(dtype="float16")], ignore_index=True)
    anywhere = picture(planned(gpu, published=posted("median_us", 75.0)), both, Look())
    assert anywhere.alt.count("somebody") == 2 and "nan" not in texts(anywhere)
    one = picture(planned(gpu, published=posted("median_us", 75.0, dtype="float16")), both, Look())
    assert one.alt.count("somebody") == 1
    none = picture(planned(gpu, published=posted("median_us", 75.0, dtype="bfloat16")), both, Look())
    assert "somebody" not in none.alt
    unsaid = pd.concat([posted("median_us", 75.0), posted("median_us", 80.0, dtype="bfloat16")])
    assert picture(planned(gpu, published=unsaid), both, Look()).alt.count("somebody") == 2


def test_published_points_of_another_choice_do_not_stand_in_for_what_is_not_measured(monkeypatch):
    """And what a post does not say (here the dtype) is not said of it."""
    gpu = install(monkeypatch.setattr)
    empty = rows.table([], ["batch", "width"])
    plan = planned(gpu, published=posted("median_us", 75.0, batch=2))
    asked = plan.first()
    shown = picture(plan, empty, Look(), asked)
    assert "published: a forum" in texts(shown) and "float32" not in texts(shown)
    (ax, *_) = shown.figure.axes
    assert ax.get_xlim()[0] < 16, "the axis is that of the choice"
    assert "nothing measured yet" in picture(plan, empty, Look(), replace(asked, others={"batch": 4})).alt
    plan = planned(gpu, published=posted("median_us", 75.0, dtype="bfloat16"))
    assert "nothing measured yet" in picture(plan, empty, Look(), asked).alt
    assert "somebody" in page(plan, empty, Look(), replace(asked, dtype="bfloat16"))[1]
    assert "somebody" not in page(plan, empty, Look(), asked)[1]


def test_the_posts_geglu_times_stand_beside_bfloat16_forward_at_batch_8192_alone(monkeypatch):
    gpu = install(monkeypatch.setattr)
    sums = published.geglu_a100_sums()
    plan = planned(gpu, published=sums, others={"batch": (4096, 8192)}, values=(512, 768, 1024))
    asked = replace(plan.first(), dtype="bfloat16")

    def measured(batch, dtype, direction="forward"):
        kept = recorded("labkit", 512, 100.0, dtype=dtype, direction=direction)
        kept = replace(kept, shape={"batch": batch, "width": 512})
        return rows.table([kept], ["batch", "width"])

    shown = picture(plan, measured(8192, "bfloat16"), Look(), asked)
    assert "torch.compile, A100 639 µs at width 768; Liger, A100 643 µs at width 768" in shown.alt
    assert "kernel times added up, NVIDIA A100-SXM4-80GB" in shown.alt
    assert "bfloat16, batch 8192" in texts(shown) and "hidden" not in texts(shown)
    curves = [line for line in shown.figure.findobj(Line2D) if line.get_gid() == "published curve"]
    assert [line.get_color() for line in curves] == [colour("torch.compile"), colour("Liger")]
    assert all(line.get_linestyle() == "None" for line in curves)
    for other in ((4096, "bfloat16"), (8192, "float32"), (8192, "bfloat16", "backward")):
        assert "A100" not in picture(plan, measured(*other), Look(), asked).alt


def test_a_published_table_without_a_time_somewhere_makes_no_gap(monkeypatch):
    times = pd.concat([posted("median_us", 75.0), posted("speedup", 3.0)], ignore_index=True)
    plan = planned(install(monkeypatch.setattr), published=times)
    assert "no value" not in picture(plan, table(), Look()).alt


def test_the_axis_reaches_over_what_is_yet_to_come(plan):
    (ax, *_) = picture(plan, table(), Look(), replace(plan.first(), values=(16, 1024))).figure.axes
    assert ax.get_xlim()[1] > 1024
    (ax, *_) = picture(plan, table(), Look()).figure.axes
    assert ax.get_xlim()[1] < 64


def test_dtypes_and_sizes_become_panels(plan):
    both = pd.concat([table(), table(dtype="float16")], ignore_index=True)
    assert len([ax for ax in picture(plan, both, Look()).figure.axes if ax.get_visible()]) == 2


def test_nothing_at_all_can_be_drawn_in_every_view(plan):
    for view in (TIME, SPEEDUP):
        assert "nothing measured yet" in picture(plan, rows.table([], ["batch", "width"]), Look(view)).alt
    assert "nothing measured yet" in picture(plan, pd.DataFrame(), Look(TRAFFIC)).alt


def test_speedups_are_over_the_one_named_by_each_dtype_for_itself(plan):
    both = pd.concat([table(), table(dtype="float16")], ignore_index=True)
    found = pd.concat(speedups(plan, both))
    assert set(found["contender"]) == {"labkit"} and found["speedup"].tolist() == [2.0] * 4
    assert found["dtype"].tolist() == ["float32"] * 2 + ["float16"] * 2


def test_without_the_one_to_compare_with_there_are_no_speedups(plan):
    alone = table()
    alone = alone[alone["contender"] == "labkit"]
    assert "nothing measured yet" in picture(plan, alone, Look(SPEEDUP)).alt


def test_a_sentence_for_each_origin_and_dtype(plan):
    live = table(kind="live", device="Simulated")
    said = sentences(plan, pd.concat([live, table(), table(dtype="float16")], ignore_index=True))
    assert len(said) == 3
    assert said[0].startswith("float32, batch 2: labkit is never slower than eager, and 2x at width")
    assert "live on Simulated" in said[0] and "recorded on NVIDIA H200" in said[1]
    assert said[2].startswith("float16, batch 2:")
    assert sentences(plan, rows.table([], ["batch", "width"])) == [
        "Nothing was measured here yet, and nothing is recorded for this choice."
    ]


def test_the_numbers_of_two_devices_stand_apart(plan):
    mine = table(device="Simulated")
    numbers = readout(plan, pd.concat([mine.assign(median_us=1.0), table()], ignore_index=True))
    assert list(numbers.columns) == ["labkit", "eager"] and len(numbers) == 4
    assert numbers.loc[("Simulated", 16), "labkit"] == 1.0
    assert numbers.loc[("NVIDIA H200", 32), "eager"] == 40.0
    assert readout(plan, table()).index.name == "width"


def test_a_panel_without_the_one_to_compare_with_has_no_sentence_beside_those_that_have(plan):
    half = table(dtype="float16")
    alone = half[half["contender"] == "labkit"]
    assert [said.split(",")[0] for said in sentences(plan, pd.concat([table(), alone]))] == ["float32"]
    assert "was measured for both" in sentences(plan, alone)[0]


def test_the_page_has_figure_sentences_and_numbers_and_escapes_names(monkeypatch):
    gpu = install(monkeypatch.setattr)
    plan = planned(gpu, contenders=(doubling(gpu, "a<b"), doubling(gpu, "eager")), of="a<b")
    renamed = table().replace({"contender": {"labkit": "a<b"}})
    shown, text = page(plan, renamed, Look())
    assert "<img alt=" in shown and "<li>" in shown and "<table" in shown
    assert "a<b" not in shown and "a&lt;b" in shown
    assert "a<b is never slower than eager" in text
    counted = pd.DataFrame([{"contender": "eager", "kind": "live", "width": 16, "traffic": 2.0}])
    shown, text = page(plan, counted, Look(TRAFFIC))
    assert "Counted, not timed." in text and "<table" not in shown
