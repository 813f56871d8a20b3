"""Curves: findings in words, honest kinds, gaps and noise marked, a legend in order."""

import numpy as np
import pandas as pd
import pytest
from drawn import WIDTHS, assert_apart, drawn, layers, legend, lines, row, texts

from labkit import plots
from labkit.measure import rows
from labkit.plots import style

BLUE, RED = style.contender_styles(["nn.Linear"])["nn.Linear"].colour, style.OURS.colour
NOTHING = "nothing measured yet"
WORKED = "another process worked on the GPU"


def test_alt_tells_axes_conditions_origin_and_where_each_curve_goes():
    alt = plots.curves(rows.as_results(layers(kind="recorded")), title="Crossover").alt
    for said in (
        "Crossover. Time per call against width, both axes logarithmic, width 128 to 16384",
        "forward, bf16, batch 32768",
        "Recorded on NVIDIA H200, 2026-11-20, graph clock, cold cache",
        "nn.Linear 9 µs at width 128 to 26.8 ms at 16384; labkit 14 µs at width 128 to 518 µs at 16384",
    ):
        assert said in alt


def test_kinds_differ_in_shape_and_in_words_and_the_axis_says_what_is_better():
    posted = row("nn.Linear", 768, 190.0, kind="published", source="A blog", device="")
    shown = drawn(*layers(kind="recorded"), posted)
    looks = {}
    for kind in rows.KINDS:
        curve = next(c for c in lines(shown, f"{kind} curve") if c.get_color() == BLUE)
        looks[kind] = (curve.get_linestyle(), curve.get_markerfacecolor())
    assert looks["live"] == ("-", BLUE) and looks["recorded"] == ("--", "white")
    assert looks["published"][0] == "None"
    assert {"labkit", "labkit (recorded)", "nn.Linear (published)", "published: A blog"} <= set(texts(shown))
    assert "time per call (lower is better)" in texts(shown)
    ours = [line for line in lines(shown, "live curve") if line.get_color() == RED]
    assert ours[0].get_linewidth() > 2 and "speedup (higher is better)" in texts(ratio())


def ratio(**options):
    return plots.speedups(rows.as_results(layers()).speedups("labkit", "nn.Linear"), title="t", **options)


@pytest.mark.parametrize("count", [2, 7, 13])
def test_the_legend_has_every_name_in_the_order_of_the_ends_and_room_for_them(count):
    names = ["labkit", *(f"contender number {i} with a long name" for i in range(count - 1))]
    table = rows.as_results([row(n, w, w / 10 * (1 + i / 1000)) for i, n in enumerate(names) for w in WIDTHS])
    shown = plots.curves(
        table, title="t", reference_lines={"copy": lambda x: x / 40, "launch floor": lambda _: 1.1}
    )
    found = legend(shown).get_texts()
    assert [text.get_text().replace("\n", " ") for text in found] == [*names[::-1], "copy", "launch floor"]
    assert_apart(found, shown)


def test_panels_share_their_axes_and_their_legend():
    shown = drawn(*layers(dtype="fp32", batch=256), facet="dtype", rows="batch")
    assert len(shown.figure.axes) == 4
    assert len({(ax.get_xlim(), ax.get_ylim()) for ax in shown.figure.axes}) == 1
    assert [text.get_text() for text in legend(shown).get_texts()] == ["nn.Linear", "labkit"]
    said = texts(shown)
    assert {f"{dtype}, batch {batch}" for dtype in ("bf16", "fp32") for batch in (256, 32768)} <= set(said)
    assert said.count(NOTHING) == 2 and "fp32, batch 256: nn.Linear 9 µs" in shown.alt
    assert len(drawn(*layers(dtype="fp32"), *layers(dtype="fp16"), facet="dtype").figure.axes) == 4


def test_series_of_one_contender_differ():
    table = rows.as_results([*layers(batch=64), *layers(batch=128)])
    shown = plots.curves(table, title="t")
    hues = [line.get_color() for line in lines(shown, "live curve")]
    assert len(hues) == len(set(hues)) == 4 and RED in hues


def test_gaps_and_disturbed_points_are_marked_and_noted_with_their_panels():
    gone = [row(name, 24576, None, note="out of memory") for name in ("nn.Linear", "labkit")]
    shown = drawn(*gone, row("labkit", 40960, 800.0, noise=WORKED))
    assert [mark.get_xdata().tolist() for mark in lines(shown, "gap")] == [[24576]]
    (rings,) = lines(shown, "noisy")
    assert rings.get_xydata().tolist() == [[40960, 800]] and rings.get_markerfacecolor() == "none"
    said = " ".join(texts(shown))
    missing = "out of memory: nn.Linear, labkit at width 24576"
    for note in (missing, f"{WORKED}: labkit at width 40960"):
        assert note in said and note in shown.alt
    assert "disturbed while it was measured" in said and "Disturbed: " in shown.alt
    both = [row("labkit", 32768, None, dtype=dtype, note="x") for dtype in ("bf16", "fp32")]
    shown = drawn(*layers(dtype="fp32"), *both, facet="dtype")
    assert "x: labkit at width 32768 (bf16); labkit at width 32768 (fp32)" in shown.alt


@pytest.mark.parametrize(
    "table", [pd.DataFrame(), rows.as_results([]), rows.as_results([row("labkit", 64, None, note="x")])]
)
@pytest.mark.parametrize("draw", [plots.curves, plots.speedups])
def test_nothing_measured_says_so(draw, table):
    if len(table):
        table = table.assign(speedup=np.nan)
    shown = draw(table, title="t", values=(64, 128))
    assert NOTHING in texts(shown) and NOTHING in shown.alt and shown.png
    assert shown.figure.axes[0].get_xlim()[1] > 128


@pytest.mark.parametrize("sizes", [[160], [96, 98, 100, 102, 104], WIDTHS, [2**k for k in range(17)]])
def test_ticks_are_apart_from_one_point_to_a_huge_range(sizes):
    shown = plots.curves(rows.as_results([row("labkit", size, 6.7 * size) for size in sizes]), title="t")
    (ax,) = shown.figure.axes
    assert shown.png and ax.get_xscale() == ax.get_yscale() == "log"
    low, high = ax.get_xlim()
    assert low < min(sizes) <= max(sizes) < high
    inside = [
        label
        for label, at in zip(ax.get_xticklabels(), ax.get_xticks(), strict=True)
        if low <= at <= high and label.get_text()
    ]
    assert_apart(inside, shown)
    assert len(inside) >= min(len(sizes), 5)


def test_reference_lines_are_functions_or_points():
    floor = {"launch floor": lambda _: 1.5, "model": [(16384, 500.0), (128, 4.0)]}
    shown = drawn(reference_lines=floor)
    thin = [line for line in shown.figure.axes[0].lines if line.get_color() == style.INK]
    ends = {tuple(line.get_ydata()[[0, -1]]) for line in thin if len(line.get_ydata())}
    assert ends == {(1.5, 1.5), (4.0, 500.0)}
    assert set(floor) <= set(texts(shown))
    assert "Thin lines: launch floor, model." in shown.alt


def test_speedups_have_their_line_at_one():
    assert {"equal", "saved"} <= set(texts(ratio(reference_lines={"saved": lambda width: width})))
    assert "above 1 from 512 on" in ratio().alt


def test_missing_columns_and_unknown_kinds_are_named():
    table = rows.as_results(layers())
    with pytest.raises(ValueError, match="no column 'depth'"):
        plots.curves(table, "depth", title="t")
    with pytest.raises(ValueError, match="'guessed' is none of live, recorded, published"):
        plots.curves(table.assign(kind="guessed"), title="t")
