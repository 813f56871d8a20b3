"""What a figure must keep to: honest kinds, readable labels, alt text, small and repeatable pictures."""

import base64
import html
import io
import re
import threading
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import matplotlib.pyplot
import numpy as np
import pandas as pd
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg, RendererAgg
from matplotlib.colors import to_hex, to_rgb
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from matplotlib.text import Text
from matplotlib.transforms import Bbox
from PIL import Image

from labkit import drawing, figures, lanes, rows, tables
from labkit.provenance import TIMES

WIDTHS = [128, 256, 512, 1024, 2048, 4096, 8192, 16384]
H200, L4 = "NVIDIA H200", "NVIDIA L4"


def row(contender: str, width: int, median: float | None, **changes: Any) -> rows.Row:
    values: dict[str, Any] = {
        "suite": "affine",
        "contender": contender,
        "direction": "forward",
        "dtype": "bf16",
        "shape": {"batch": changes.pop("batch", 32768), "width": width},
        "clock": "graph",
        "cache": "cold",
        "median_us": median,
        "p20_us": median and median * 0.98,
        "p80_us": median and median * 1.02,
        "runs": 100,
        "min_bytes": 4 * 32768 * width,
        "flops": 0,
        "copy_us": median and 0.03 * width,
        "relative_error": None,
        "device": H200,
        "date": "2026-11-20T12:00:00",
    }
    return rows.Row(**{**values, **changes})


def layers(**changes: Any) -> list[rows.Row]:
    """A matmul that wins when narrow, an elementwise layer that wins when wide."""
    return [
        r
        for width in WIDTHS
        for r in (
            row("nn.Linear", width, max(9.0, width**2 / 1e4), **changes),
            row("labkit", width, 10 + 0.031 * width, **changes),
        )
    ]


def rendered(shown: figures.Shown) -> RendererAgg:
    """What a figure was drawn with; it is drawn again only after a change."""
    canvas = shown.figure.canvas
    assert isinstance(canvas, FigureCanvasAgg)
    if shown.figure.stale:
        canvas.draw()
    return canvas.get_renderer()


def boxes(shown: figures.Shown, *gids: str) -> list[Bbox]:
    found = [t for t in shown.figure.findobj(Text) if t.get_gid() in gids]
    return [text.get_window_extent(rendered(shown)) for text in found]


def texts(shown: figures.Shown) -> list[str]:
    return [t.get_text().replace("\n", " ") for t in shown.figure.findobj(Text) if t.get_visible()]


def lines(shown: figures.Shown, gid: str) -> list[Line2D]:
    return [line for line in shown.figure.findobj(Line2D) if line.get_gid() == gid]


def assert_apart(found: Sequence[Bbox], shown: figures.Shown) -> None:
    page = shown.figure.bbox
    x0, y0, x1, y1 = np.array([box.extents for box in found]).reshape(-1, 4).T
    assert (page.x0 <= x0).all() and (x1 <= page.x1).all(), "a label runs out of the figure sideways"
    assert (page.y0 <= y0).all() and (y1 <= page.y1).all(), "one runs out of it upwards or downwards"
    across = np.minimum.outer(x1, x1) - np.maximum.outer(x0, x0)
    down = np.minimum.outer(y1, y1) - np.maximum.outer(y0, y0)
    # A pixel of common border is not an overlap.
    assert not np.triu((across > 1) & (down > 1), k=1).any()


# --- the picture on the page --------------------------------------------------------------------------


def test_html_carries_the_alt_text_escaped_and_the_picture() -> None:
    shown = figures.sweep(rows.table(layers()), title='a "quick" <b>&</b> dirty look')
    page = shown._repr_html_()
    found = re.fullmatch(
        r'<img alt="([^"]*)" width="768" style="max-width:100%;height:auto" src="([^"]*)">', page
    )
    assert found
    assert html.unescape(found[1]) == shown.alt
    assert "<" not in found[1]
    assert base64.b64decode(found[2].removeprefix("data:image/webp;base64,")) == shown.webp
    assert repr(shown) == shown.alt


def test_alt_can_be_given() -> None:
    assert figures.sweep(rows.table(layers()), title="t", alt="my words").alt == "my words"


@pytest.mark.parametrize("kind", rows.KINDS)
def test_a_usual_figure_costs_at_most_25_kilobytes_in_the_notebook(kind: str) -> None:
    names = ["labkit", "nn.Linear", "x*w+b eager", "addcmul", "torch.compile"]
    table = rows.table(
        [row(n, w, (i + 1) * (5 + w / 50), kind=kind) for i, n in enumerate(names) for w in WIDTHS]
    )
    shown = figures.sweep(table, title="five contenders", regimes=[(None, 500, "launch-bound")])
    assert len(shown._repr_html_()) <= 25_000


def test_same_input_same_bytes_without_metadata() -> None:
    table = rows.table(layers())
    first, second = (figures.sweep(table, title="t", floor={"copy": "copy_us"}) for _ in range(2))
    assert first.png == second.png and first.webp == second.webp
    pictures = [Image.open(io.BytesIO(data)) for data in (first.png, first.webp)]
    assert not pictures[0].info and not {"exif", "icc_profile", "xmp"} & pictures[1].info.keys()
    pixels = [np.asarray(picture.convert("RGB")) for picture in pictures]
    assert np.array_equal(*pixels), "no pixel is lost on the page"


def test_white_stays_white_and_hues_stay_true() -> None:
    shown = figures.sweep(rows.table(layers()), title="t")
    pixels = np.asarray(Image.open(io.BytesIO(shown.png)).convert("RGB"))
    assert tuple(pixels[0, 0]) == (255, 255, 255)
    for contender in ("labkit", "nn.Linear"):
        wanted = np.rint(np.multiply(to_rgb(figures.colour(contender)), 255))
        assert (pixels == wanted).all(axis=2).sum() > 200


def test_save_writes_the_picture(tmp_path: Path) -> None:
    shown = figures.sweep(rows.table(layers()), title="t")
    assert shown.save(tmp_path / "a.png").read_bytes() == shown.png


def test_threads_draw_the_same_and_pyplot_stays_out() -> None:
    table = rows.table(layers())
    wanted = figures.sweep(table, title="t").png
    drawn: list[bytes] = []
    threads = [
        threading.Thread(target=lambda: drawn.append(figures.sweep(table, title="t").png)) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert drawn == [wanted] * 4
    assert matplotlib.pyplot.get_fignums() == []


# --- colours ------------------------------------------------------------------------------------------


def test_a_contender_keeps_its_colour() -> None:
    assert figures.colour("labkit") == "#C8321E"
    assert figures.colour("nn.Linear") == "#0048DC"
    assert figures.colour("copy") == "#5A5A5A"
    assert figures.colour("somebody's kernel") == figures.colour("somebody's kernel")
    rival = next(
        name for name in (f"a{i}" for i in range(99)) if figures.colour(name) == figures.colour("fla")
    )
    crowded = drawing.slots([rival, "fla", "labkit"])
    assert drawing.SLOTS[crowded["fla"]][0] == figures.colour("fla")
    assert crowded[rival] != crowded["fla"]


def test_no_colour_twice_among_ten_and_ours_is_never_a_strangers() -> None:
    strangers = [f"contender {i}" for i in range(9)]
    assert set(drawing.slots(strangers).values()) == set(range(1, 10))
    assert len(set(drawing.slots([*strangers, "labkit"]).values())) == 10
    many = drawing.slots([*map(str, range(23)), "labkit"])
    assert [name for name, slot in many.items() if slot == 0] == ["labkit"] and len(many) == 24


def test_every_lesson_one_contender_has_a_colour_of_its_own() -> None:
    names = [
        "labkit",
        "nn.Linear",
        "x*w+b eager",
        "addcmul",
        "torch.compile",
        "cuBLAS",
        "copy",
        "Liger",
        "fla",
    ]
    assert (
        len({figures.colour(name) for name in names})
        == len({figures.marker(name) for name in names})
        == len(names)
    )


def test_colours_are_readable_and_told_apart_with_a_colour_vision_deficiency() -> None:
    for hue, _ in drawing.SLOTS:
        assert drawing.contrast(hue) >= 3
        assert drawing.contrast(drawing.text_colour(hue)) >= 4.5
    assert min(drawing.contrast(grey) for grey in (drawing.INK, drawing.MUTED)) >= 4.5
    # Complete deficiencies, as matrices on linear RGB (Machado, Oliveira and Fernandes 2009).
    protan = [
        [0.152286, 1.052583, -0.204868],
        [0.114503, 0.786281, 0.099216],
        [-0.003882, -0.048116, 1.051998],
    ]
    deutan = [
        [0.367322, 0.860646, -0.227968],
        [0.280085, 0.672501, 0.047413],
        [-0.011820, 0.042940, 0.968881],
    ]
    for vision in (np.eye(3), np.array(protan), np.array(deutan)):
        seen = [cielab(vision @ linear(hue)) for hue, _ in drawing.SLOTS]
        assert min(np.linalg.norm(a - b) for a, b in combinations(seen, 2)) > 15


def linear(hue: str) -> np.ndarray:
    c = np.array(to_rgb(hue))
    return np.where(c <= 0.04045, c / 12.92, ((c + 0.055) / 1.055) ** 2.4)


def cielab(rgb: np.ndarray) -> np.ndarray:
    xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]) @ rgb.clip(
        0, 1
    )
    t = np.cbrt(np.maximum(xyz / [0.9505, 1, 1.089], 0.008856))
    return np.array([116 * t[1] - 16, 500 * (t[0] - t[1]), 200 * (t[1] - t[2])])


def test_label_colours_survive_the_palette() -> None:
    palette = {tuple(colour) for colour in drawing._palette().tolist()}
    for hue, _ in drawing.SLOTS:
        assert tuple(round(255 * part) for part in to_rgb(drawing.text_colour(hue))) in palette


# --- sweeps -------------------------------------------------------------------------------------------


def test_sweep_alt_tells_who_is_fastest_where_and_by_what() -> None:
    alt = figures.sweep(rows.table(layers(kind="recorded")), title="Crossover").alt
    assert "Crossover. Time per call against width, both axes logarithmic, width 128 to 16384" in alt
    assert "forward, bf16, batch 32768" in alt
    assert "Recorded on NVIDIA H200, 2026-11-20, graph clock, cold cache" in alt
    assert "nn.Linear fastest from width 128 to 256, labkit and nn.Linear tie at width 512" in alt
    assert "labkit fastest from width 1024 to 16384" in alt
    assert "at width 16384 labkit 518 µs, nn.Linear 26.8 ms" in alt


def test_a_difference_inside_the_spread_is_a_tie() -> None:
    near = rows.table([row("labkit", 256, 10.0), row("torch.compile", 256, 10.3)])
    far = rows.table([row("labkit", 256, 10.0), row("torch.compile", 256, 10.6)])
    assert "labkit and torch.compile tie" in figures.sweep(near, title="t").alt
    assert "labkit fastest" in figures.sweep(far, title="t").alt


def test_kinds_differ_in_shape_and_in_words() -> None:
    table = rows.table(
        [
            *layers(device=L4, date="2026-11-21"),
            *layers(kind="recorded"),
            row("nn.Linear", 768, 190.0, kind="published", source="A blog", device=""),
        ]
    )
    shown = figures.sweep(table, title="t")
    looks = {}
    for kind in rows.KINDS:
        curve = next(c for c in lines(shown, f"{kind} curve") if c.get_color() == figures.colour("nn.Linear"))
        looks[kind] = (curve.get_linestyle(), curve.get_markerfacecolor())
    assert looks["live"] == ("-", figures.colour("nn.Linear"))
    assert looks["recorded"] == ("--", "white")
    assert looks["published"][0] == "None"
    said = texts(shown)
    assert "live on NVIDIA L4, 2026-11-21, graph clock, cold cache" in said
    assert "recorded on NVIDIA H200, 2026-11-20, graph clock, cold cache" in said
    assert "published: A blog" in said
    assert {"labkit", "labkit (recorded)", "nn.Linear (published)"} <= set(said)


def test_two_devices_are_two_curves() -> None:
    shown = figures.sweep(rows.table([*layers(), *layers(device=L4)]), title="t")
    assert {"labkit, NVIDIA H200", "labkit, NVIDIA L4"} <= set(texts(shown))


def test_what_differs_at_one_width_becomes_curves_of_its_own() -> None:
    shown = figures.sweep(rows.table([*layers(batch=256), *layers()]), title="t")
    assert {"labkit, batch 256", "labkit, batch 32768"} <= set(texts(shown))
    assert len(lines(shown, "live curve")) == 4


@pytest.mark.parametrize("count", [2, 7, 18])
def test_labels_of_nearly_equal_ends_do_not_overlap(count: int) -> None:
    names = ["labkit", *(f"contender number {i} with a long name" for i in range(count - 1))]
    table = rows.table([row(n, w, w / 10 * (1 + i / 1000)) for i, n in enumerate(names) for w in WIDTHS])
    shown = figures.sweep(table, title="t", floor={"copy": "copy_us", "launch floor": lambda _: 1.1})
    found = boxes(shown, "label")
    assert len(found) == count + 2
    assert_apart(found, shown)


def test_a_label_stands_at_an_early_end_where_there_is_room() -> None:
    early = [r for r in layers(device=L4) if r.shape["width"] <= 256]
    shown = figures.sweep(rows.table([*early, row("copy", 16384, 300.0)]), title="t")
    panel = shown.figure.axes[0].get_window_extent()
    assert sum(box.x1 < panel.x1 for box in boxes(shown, "label")) == 2


@pytest.mark.parametrize("level", [0.7, 0.85, 1.0, 1.2, 1.4])
def test_a_label_inside_the_panel_covers_no_curve(level: float) -> None:
    table = rows.table([row("labkit", 128, 40.0), *(row("copy", w, 40.0 * level) for w in WIDTHS)])
    shown = figures.sweep(table, title="t")
    found = boxes(shown, "label")
    assert_apart(found, shown)
    heights = [shown.figure.axes[0].transData.transform((128, 40.0 * level))[1]]
    assert not any(box.y0 < y < box.y1 for y in heights for box in found if box.x0 < found[1].x0)


def test_gaps_are_marked_and_noted() -> None:
    table = rows.table(
        [
            *layers(),
            row("nn.Linear", 24576, None, note="out of memory"),
            row("labkit", 24576, None, note="out of memory"),
            row("labkit", 32768, None),
        ]
    )
    shown = figures.sweep(table, title="t")
    assert sorted(int(mark.get_xdata()[0]) for mark in lines(shown, "gap")) == [24576, 24576, 32768]
    notes = " ".join(texts(shown))
    assert "out of memory: nn.Linear and labkit at width 24576" in notes
    assert "no value: labkit at width 32768" in notes
    assert "Missing: out of memory: nn.Linear and labkit at width 24576" in shown.alt


def test_many_gaps_at_one_width_stay_below_the_curves() -> None:
    gone = [row(f"contender {i}", 512, None, note="an error") for i in range(7)]
    shown = figures.sweep(rows.table([*layers(), *gone]), title="t")
    FigureCanvasAgg(shown.figure).draw()
    highest = max(mark.get_window_extent().y1 for mark in lines(shown, "gap"))
    assert highest < min(curve.get_window_extent().y0 for curve in lines(shown, "live curve"))


def test_notes_on_gaps_name_their_panels() -> None:
    gone = [row("labkit", 24576, None, dtype=dtype, note="out of memory") for dtype in ("bf16", "fp32")]
    table = rows.table([*layers(), *layers(dtype="fp32"), *gone])
    assert (
        "out of memory: labkit at width 24576 (bf16; fp32)"
        in figures.sweep(table, title="t", facet="dtype").alt
    )


WORKED = "another process worked on the GPU"


def test_disturbed_points_are_ringed_explained_in_the_key_and_noted() -> None:
    noisy = [
        row("labkit", 24576, 800.0, noise=WORKED),
        row("nn.Linear", 24576, 60000.0, noise=WORKED),
        row("labkit", 32768, 1100.0, noise="spread above 10%"),
    ]
    shown = figures.sweep(rows.table([*layers(), *noisy]), title="t")
    rings = [(ring.get_xdata()[0], ring.get_ydata()[0]) for ring in lines(shown, "noisy")]
    assert sorted(rings) == [(24576, 800.0), (24576, 60000.0), (32768, 1100.0)]
    assert "disturbed while it was measured" in texts(shown)
    notes = " ".join(texts(shown))
    assert f"{WORKED}: labkit and nn.Linear at width 24576" in notes
    assert "spread above 10%: labkit at width 32768" in notes
    assert f"Disturbed: {WORKED}: labkit and nn.Linear at width 24576. spread above 10%" in shown.alt
    drawing.Shown(shown.figure, "").png  # noqa: B018 - the sign is in the font, or matplotlib warns


def test_a_ring_leaves_room_for_the_marker_that_says_which_kind_it_is() -> None:
    noisy = [row("labkit", width, 10.0 * width, kind="recorded", noise=WORKED) for width in (64, 128)]
    shown = figures.sweep(rows.table(noisy), title="t")
    (curve,) = lines(shown, "recorded curve")
    for ring in lines(shown, "noisy"):
        assert ring.get_markersize() > curve.get_markersize() + 3 and ring.get_markerfacecolor() == "none"
        assert ring.get_zorder() > curve.get_zorder()


def test_a_quiet_figure_says_nothing_of_noise() -> None:
    table = rows.table(layers())
    for quiet in (table, table.drop(columns="noise")):
        shown = figures.sweep(quiet, title="t")
        assert lines(shown, "noisy") == [] and "isturbed" not in shown.alt + " ".join(texts(shown))


def test_a_ratio_is_disturbed_with_either_of_its_times() -> None:
    changed = {("labkit", 256): "spread above 10%", ("nn.Linear", 512): WORKED}
    table = rows.table(layers())
    table["noise"] = [changed.get((r.contender, r.width), "") for r in table.itertuples()]
    ratio = tables.speedup(table, "labkit", "nn.Linear")
    shown = figures.speedup(ratio, title="t")
    assert sorted(ring.get_xdata()[0] for ring in lines(shown, "noisy")) == [256, 512]
    assert f"{WORKED}: labkit over nn.Linear at width 512" in shown.alt


def test_notes_on_noise_name_their_panels() -> None:
    noisy = [row("labkit", 24576, 800.0, dtype=dtype, noise=WORKED) for dtype in ("bf16", "fp32")]
    table = rows.table([*layers(), *layers(dtype="fp32"), *noisy])
    shown = figures.sweep(table, title="t", facet="dtype")
    assert f"{WORKED}: labkit at width 24576 (bf16; fp32)" in shown.alt
    assert len(lines(shown, "noisy")) == 2


@pytest.mark.parametrize(
    "table", [pd.DataFrame(), rows.table([]), rows.table([row("labkit", 64, None, note="x")])]
)
def test_nothing_measured_says_so(table: pd.DataFrame) -> None:
    shown = figures.sweep(
        table, title="t", floor={"launch floor": lambda _: 1.0}, regimes=[(None, 99, "small")]
    )
    assert "nothing measured yet" in texts(shown)
    assert "nothing measured yet" in shown.alt
    assert shown.png


def test_one_point() -> None:
    shown = figures.sweep(rows.table([row("labkit", 160, 6.7)]), title="t")
    assert "labkit fastest at width 160; at width 160 labkit 6.7 µs" in shown.alt
    low, high = shown.figure.axes[0].get_xlim()
    assert low < 160 < high
    assert_apart(boxes(shown, "label"), shown)


def test_tick_labels_do_not_overlap_over_a_huge_range() -> None:
    table = rows.table([row("labkit", 2**k, 1.1 * 2.0**k) for k in range(31)])
    shown = figures.sweep(table, title="t")
    canvas = FigureCanvasAgg(shown.figure)
    canvas.draw()
    axis = shown.figure.axes[0].xaxis
    found = [label.get_window_extent(canvas.get_renderer()) for label in axis.get_ticklabels()]
    assert len(found) >= 4
    assert_apart(found, shown)
    assert all(np.log2(tick) % 1 == 0 for tick in axis.get_ticklocs())


def test_floors_are_functions_columns_or_points() -> None:
    floor = {"launch floor": lambda _: 1.5, "copy": "copy_us", "model": [(16384, 500.0), (128, 4.0)]}
    shown = figures.sweep(rows.table(layers()), title="t", floor=floor)
    thin = {
        tuple(line.get_ydata()[[0, -1]])
        for line in shown.figure.axes[0].lines
        if line.get_color() == drawing.INK
    }
    assert thin == {(1.5, 1.5), (0.03 * 128, 0.03 * 16384), (4.0, 500.0)}
    assert set(floor) <= set(texts(shown))
    assert "Thin lines: launch floor, copy, model." in shown.alt
    with pytest.raises(ValueError, match="no column 'copi_us'"):
        figures.sweep(rows.table(layers()), title="t", floor={"copy": "copi_us"})


def test_regimes_are_shaded_and_named_without_overlap() -> None:
    regimes = [(None, 200, "launch-bound"), (200, 260, "a narrow one between"), (260, None, "memory-bound")]
    shown = figures.sweep(rows.table(layers()), title="t", regimes=regimes)
    assert {name for *_, name in regimes} <= set(texts(shown))
    canvas = FigureCanvasAgg(shown.figure)
    names = [t for t in shown.figure.texts if t.get_text() in {name for *_, name in regimes}]
    assert_apart([t.get_window_extent(canvas.get_renderer()) for t in names], shown)


def test_small_multiples_share_their_axes_and_know_their_rows() -> None:
    table = rows.table([*layers(), *layers(dtype="fp32", batch=256)])
    shown = figures.sweep(
        table,
        title="t",
        facet="dtype",
        rows="batch",
        floor=lambda part: {"rows": lambda _: float(len(part) + 1)},
    )
    panels = [ax for ax in shown.figure.axes if ax.get_visible()]
    assert len(panels) == 4
    assert len({ax.get_xlim() for ax in panels}) == len({ax.get_ylim() for ax in panels}) == 1
    said = texts(shown)
    assert {"bf16, batch 256", "bf16, batch 32768", "fp32, batch 256", "fp32, batch 32768"} <= set(said)
    assert said.count("labkit") == 2
    assert said.count("nothing measured yet") == 2
    assert "fp32, batch 256: nn.Linear fastest" in shown.alt


def test_a_third_panel_goes_below() -> None:
    table = rows.table([r for dtype in ("fp32", "tf32", "bf16") for r in layers(dtype=dtype)])
    shown = figures.sweep(table, title="t", facet="dtype")
    tops = [round(ax.get_position().y1, 3) for ax in shown.figure.axes if ax.get_visible()]
    assert tops[0] == tops[1] > tops[2]
    assert_apart(boxes(shown, "label"), shown)


def test_missing_columns_and_unknown_kinds_are_named() -> None:
    table = rows.table(layers())
    with pytest.raises(ValueError, match="no column 'depth'"):
        figures.sweep(table, "depth", title="t")
    with pytest.raises(ValueError, match="no column 'kind'"):
        figures.sweep(table.drop(columns="kind"), title="t")
    with pytest.raises(ValueError, match="'guessed' is none of live, recorded, published"):
        figures.sweep(table.assign(kind="guessed"), title="t")


def test_dollar_signs_are_text() -> None:
    shown = figures.sweep(rows.table([row("$x_1$", 64, 3.0)]), title="costs $1 or $2", note="$ \\frac")
    written = [text for text in shown.figure.texts if "$" in text.get_text()]
    assert len(written) == 3
    assert not any(text.get_parse_math() for text in written)


# --- speedups -----------------------------------------------------------------------------------------


def published() -> pd.DataFrame:
    folder = Path(figures.__file__).parent / "data" / "published"
    parts = []
    for name in ("device_a_eager", "device_b_graphed"):
        part = pd.read_csv(folder / f"pseudo_linear_{name}.csv")
        parts.append(part.assign(series=name, kind="published", source=f"thread on {name}"))
    return pd.concat(parts)


def test_speedup_tells_sources_apart_and_draws_equal_and_the_naive_line() -> None:
    shown = figures.speedup(published(), title="t", naive={"operations saved": lambda width: width})
    curves = lines(shown, "published curve")
    assert len({curve.get_color() for curve in curves}) == len({curve.get_marker() for curve in curves}) == 2
    said = texts(shown)
    assert {"equal", "operations saved", "device_a_eager", "device_b_graphed"} <= set(said)
    assert "published: thread on device_a_eager (device_a_eager)" in said
    assert "device_a_eager 0.969× at width 128 to 69.1× at 24576, above 1 from 512 on" in shown.alt


def test_speedup_mixes_contenders_with_published_series() -> None:
    ours = pd.DataFrame(
        {
            "contender": "labkit",
            "width": WIDTHS,
            "speedup": np.linspace(0.5, 0.9, 8),
            "kind": "live",
            "device": L4,
        }
    )
    shown = figures.speedup(pd.concat([published(), ours]), title="t", one_line=False)
    assert "equal" not in texts(shown)
    assert [c.get_color() for c in lines(shown, "live curve")] == [figures.colour("labkit")]
    assert "labkit 0.5× at width 128 to 0.9× at 16384, not above 1 at the end" in shown.alt
    assert_apart(boxes(shown, "label"), shown)


# --- what is yet to come, and what is counted -----------------------------------------------------------


@pytest.mark.parametrize("draw", [figures.sweep, figures.speedup, figures.traffic])
def test_the_axis_has_room_for_values_to_come(draw: Any) -> None:
    table = rows.table(layers()[:4]).assign(speedup=2.0, traffic=2.0)
    near, far = draw(table, title="t"), draw(table, title="t", values=(64, 16384))
    assert near.figure.axes[0].get_xlim()[1] < 300
    low, high = far.figure.axes[0].get_xlim()
    assert low < 64 and high > 16384
    assert 16384 in far.figure.axes[0].get_xticks()
    empty = draw(table.iloc[:0], title="t", values=(64, 128))
    assert empty.figure.axes[0].get_xlim()[1] < 300 and "nothing measured yet" in empty.alt


def counts(*rows_: tuple[str, int, float]) -> pd.DataFrame:
    found = [(name, "live", "CPU, interpreted", width, factor) for name, width, factor in rows_]
    return pd.DataFrame(found, columns=["contender", "kind", "device", "width", "traffic"])


def test_traffic_is_a_factor_over_the_fewest_possible_and_nobody_wins() -> None:
    table = counts(("labkit", 64, 1.0), ("eager", 64, 2.0), ("labkit", 128, 1.0), ("eager", 128, 2.02))
    shown = figures.traffic(table, title="Bytes moved")
    assert {"fewest possible", "bytes moved over the fewest possible"} <= set(texts(shown))
    assert "eager 2× at width 64 to 2.02× at 128" in shown.alt and "labkit 1×" in shown.alt
    assert "fastest" not in shown.alt and "µs" not in " ".join(texts(shown))
    flat = [line for line in shown.figure.findobj(Line2D) if set(np.ravel(line.get_ydata())) == {1.0}]
    assert any(len(line.get_ydata()) > 2 for line in flat), "a line at 1 across the panel"


def test_traffic_that_was_not_counted_is_a_noted_gap() -> None:
    table = counts(("labkit", 64, 1.0), ("labkit", 8192, float("nan"))).assign(note=["", "too large"])
    shown = figures.traffic(table, title="t")
    assert "too large: labkit at width 8192" in shown.alt


# --- bars ---------------------------------------------------------------------------------------------


def mixed_bars() -> pd.DataFrame:
    return rows.table(
        [
            row("nn.Linear", 1024, 102.0),
            row("labkit", 1024, 33.3),
            row("labkit", 1024, 31.3, kind="recorded"),
            row("Liger", 1024, 92.8, kind="published", source="A blog", p20_us=None, p80_us=None),
            row("a contender with a name that goes on", 1024, None, note="out of memory " * 20),
        ]
    )


def test_bars_print_values_whiskers_and_kinds() -> None:
    shown = figures.bars(mixed_bars(), title="t", floor={"copy": "copy_us", "launch floor": 1.1})
    said = texts(shown)
    assert {"102 µs", "33.3 µs", "31.3 µs", "92.8 µs", "labkit (recorded)", "Liger (published)"} <= set(said)
    assert any("out of memory" in text for text in said)
    bars = {p.get_gid(): p for p in shown.figure.findobj() if str(p.get_gid()).endswith("bar")}
    looks = {gid: (bar.get_linestyle(), bar.get_facecolor()) for gid, bar in bars.items()}
    assert len(set(looks.values())) == 3
    assert_apart([*boxes(shown, "label"), *boxes(shown, "value"), *boxes(shown, "gap")], shown)
    assert "nn.Linear 102 µs, labkit 33.3 µs, labkit (recorded) 31.3 µs" in shown.alt
    assert "Lines: launch floor 1.1 µs." in shown.alt
    assert shown.figure.axes[0].get_xlim()[0] == 0


def test_bars_in_groups_and_of_other_values() -> None:
    table = rows.table([*layers(), *layers(dtype="fp32")])
    table = table[table["width"] == 1024].assign(share=[0.25, 0.5, 0.75, 1.0])
    shown = figures.bars(table, title="t", value="share", unit=" of copy", group="dtype")
    assert {"bf16", "fp32", "0.25 of copy", "1 of copy"} <= set(texts(shown))
    assert "fp32: nn.Linear 0.75 of copy, labkit 1 of copy." in shown.alt


def test_bars_of_memory_are_in_mebibytes_without_whiskers_or_clock() -> None:
    table = mixed_bars().assign(peak_bytes=[160 * 2**20, 96 * 2**20, 0, np.nan, np.nan])
    floor = {"inputs": 32 * 2**20, "fewest possible": "min_bytes"}
    shown = figures.bars(table, title="t", value="peak_bytes", floor=floor)
    said = texts(shown)
    assert {"160 MiB", "96 MiB", "memory high-water mark of one call"} <= set(said)
    assert f"{TIMES} nothing beyond its inputs" in said
    assert not any("µs" in text or "clock" in text for text in said)
    (ax,) = shown.figure.axes
    assert ax.get_xlim()[1] < 250
    marks = [line for line in ax.get_lines() if line.get_marker() == "|"]
    assert not marks, "a high-water mark has no spread"
    assert [line.get_xdata()[0] for line in ax.get_lines()] == [32]
    assert "nn.Linear 160 MiB, labkit 96 MiB" in shown.alt and "Lines: inputs 32 MiB." in shown.alt
    assert "graph clock" in figures.bars(table, title="t").alt, "times keep theirs"


def test_bars_of_nothing() -> None:
    shown = figures.bars(rows.table([]), title="t", group="dtype", floor={"copy": "copy_us"})
    assert "nothing measured yet" in texts(shown)
    assert "nothing measured yet" in shown.alt


# --- timelines ----------------------------------------------------------------------------------------


def event(name: str, start: float, took: float) -> SimpleNamespace:
    return SimpleNamespace(name=name, start_us=start, duration_us=took)


def profile_of(host: list[Any], kernels: list[Any], **stamp: str) -> SimpleNamespace:
    given = {"kind": "live", "device": "NVIDIA H200", "date": "2026-01-02T03:04:05+00:00", **stamp}
    return SimpleNamespace(host=host, kernels=kernels, **given)


def test_timeline_shows_boxes_gaps_and_numbers() -> None:
    templated = (
        "void at::native::vectorized_elementwise_kernel<4, at::Add<float>, std::array<char*, 3ul> >(int)"
    )
    profile = profile_of(
        host=[event("aten::mul", 100, 14), event("cudaLaunchKernel", 105, 6)],
        kernels=[event("affine_forward", 110, 15), event(templated, 150, 1.5)],
    )
    shown = figures.timeline(profile, title="t")
    said = texts(shown)
    assert {"host", "device", "aten::mul", "affine_forward", "25 µs idle"} <= set(said)
    assert any("vectorized_elementwise_kernel, 1.5 µs" in text for text in said)
    assert "2 kernels, 2 host events in 51.5 µs; device busy 16.5 µs (32%)" in shown.alt
    assert "Longest gap between kernels 25 µs" in shown.alt
    assert_apart(boxes(shown, "label"), shown)


def test_timeline_axis_can_be_fixed_but_hides_nothing() -> None:
    profile = profile_of(host=[], kernels=[event("k", 0, 50)])
    assert figures.timeline(profile, title="t", span_us=80).figure.axes[0].get_xlim() == (0, 80)
    assert figures.timeline(profile, title="t", span_us=10).figure.axes[0].get_xlim()[1] > 50


def test_timeline_of_many_short_kernels_is_readable() -> None:
    kernels = [event(f"kernel_{i % 17}", 5.0 * i, 1.0) for i in range(200)]
    shown = figures.timeline(profile_of(host=[], kernels=kernels), title="t")
    assert_apart(boxes(shown, "label"), shown)
    assert "and 5 more names" in texts(shown)


def two_launches(**stamp: str) -> SimpleNamespace:
    """Kernels at 100 to 115 and 140 to 150 us after the first launch."""
    return profile_of(
        host=[event("first_launch", 10, 6), event("second_launch", 20, 6)],
        kernels=[event("early_kernel", 110, 15), event("late_kernel", 150, 10)],
        **stamp,
    )


def test_timeline_window_cuts_at_its_edges_and_says_so() -> None:
    shown = figures.timeline(two_launches(), title="t", window=(95, 145))
    (ax,) = shown.figure.axes
    assert ax.get_xlim() == (95, 145)
    said = texts(shown)
    assert {"early_kernel", "25 µs idle"} <= set(said)
    assert "1: late_kernel, 10 µs" in said, "cut to half: too narrow for its name, but as long as before"
    assert not any("launch" in text for text in said)
    summary = "95 to 145 µs of 150 µs: 2 kernels, 0 host events; device busy 20 µs (40%)"
    assert summary in said
    assert f"zoomed in: {summary}" in shown.alt
    assert "late_kernel 10 µs" in shown.alt, "a length in words is that of the whole event"


def test_timeline_window_centres_names_in_what_is_seen_of_a_box() -> None:
    shown = figures.timeline(two_launches(), title="t", window=(110, 130))
    (name,) = (t for t in shown.figure.findobj(Text) if t.get_text() == "early_kernel")
    left, _, right, _ = drawing.bounds(shown.figure.axes[0])
    seen = name.get_position()[0] * drawing.points(shown.figure)[0]
    assert seen == pytest.approx(left + (right - left) * 2.5 / 20)


def test_timeline_window_inside_a_gap_shows_the_whole_gap_in_words() -> None:
    shown = figures.timeline(two_launches(), title="t", window=(120, 130))
    assert "25 µs idle" in texts(shown)
    assert "nothing measured yet" not in texts(shown)
    assert "0 kernels" in shown.alt


def test_timeline_window_moves_nothing_up_or_down() -> None:
    profile = two_launches()
    profile.host.append(event("inner", 11, 2))  # a second row of the host
    whole, part = (figures.timeline(profile, title="t", window=w) for w in (None, (100, 150)))
    heights = [
        (ax.get_ylim(), drawing.points(ax.figure)[1] * ax.get_position().height)
        for ax in (whole.figure.axes[0], part.figure.axes[0])
    ]
    assert heights[0][0] == heights[1][0]
    assert heights[0][1] == pytest.approx(heights[1][1])


def test_timeline_window_far_in_has_ticks_that_differ() -> None:
    profile = profile_of(host=[], kernels=[event("k", 0, 20000)])
    shown = figures.timeline(profile, title="t", window=(12345.1, 12345.9))
    ax = shown.figure.axes[0]
    labels = [ax.xaxis.get_major_formatter()(at) for at in ax.get_xticks()]
    assert len(set(labels)) == len(labels)


@pytest.mark.parametrize("window", [(5, 5), (6, 5), (float("nan"), 5), (0, float("inf"))])
def test_timeline_refuses_an_empty_window(window: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match=r"^window: .* is empty"):
        figures.timeline(two_launches(), title="t", window=window)


def test_timeline_refuses_two_axes() -> None:
    with pytest.raises(ValueError, match="window, span_us"):
        figures.timeline(two_launches(), title="t", window=(0, 1), span_us=3)


def test_extent_and_longest_gap_of_a_profile() -> None:
    assert lanes.extent(two_launches()) == (150, (115, 140))
    assert lanes.extent(profile_of(host=[], kernels=[])) == (0, None)


def test_timeline_of_nothing() -> None:
    shown = figures.timeline(profile_of(host=[], kernels=[]), title="t")
    assert "nothing measured yet" in shown.alt
    assert not any("H200" in text for text in [*texts(shown), shown.alt]), "what is not there is from nowhere"


@pytest.mark.parametrize("kind", ["live", "recorded"])
@pytest.mark.parametrize("window", [None, (95, 145), (120, 130)])
def test_timeline_names_the_origin_of_a_profile_in_picture_and_alt_text(
    kind: str, window: tuple[float, float] | None
) -> None:
    shown = figures.timeline(two_launches(kind=kind), title="t", window=window)
    assert f"{kind} on NVIDIA H200, 2026-01-02" in texts(shown)
    assert shown.alt.endswith(f" {kind.capitalize()} on NVIDIA H200, 2026-01-02.")
    assert_apart(boxes(shown, "label"), shown)


def test_timeline_tells_live_from_recorded_by_shape() -> None:
    drawn = {}
    for kind in ("live", "recorded"):
        shown = figures.timeline(two_launches(kind=kind), title="t")
        events = [box for box in shown.figure.axes[0].patches if box.get_zorder() == 3]
        (key,) = (box for box in shown.figure.artists if isinstance(box, Rectangle))
        looks = [(box.get_linestyle(), to_hex(box.get_facecolor())) for box in [*events, key]]
        assert len(looks) == 5 and looks[-1] == looks[-2], "the key looks as the kernels do"
        assert len({style for style, _ in looks}) == 1
        assert all(drawing.contrast(face, drawing.INK) >= 4.5 for _, face in looks)
        drawn[kind] = looks
    assert not {style for style, _ in drawn["live"]} & {style for style, _ in drawn["recorded"]}
    assert not {face for _, face in drawn["live"]} & {face for _, face in drawn["recorded"]}


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("void at::native::(anonymous namespace)::cat_kernel<float, 4>(float*, int)", "cat_kernel"),
        ("triton_poi_fused_add_0", "triton_poi_fused_add_0"),
        ("", "unnamed"),
    ],
)
def test_kernel_names_are_shortened(name: str, short: str) -> None:
    assert lanes.short_name(name) == short


# --- placing ------------------------------------------------------------------------------------------


def test_spread_moves_no_label_that_has_room() -> None:
    assert drawing.spread([10, 50, 90], [10, 10, 10], 0, 100) == [10, 50, 90]


def test_spread_keeps_order_distance_and_bounds() -> None:
    centres = drawing.spread([99, 50, 50.1, 100], [10, 10, 10, 10], 0, 100)
    assert centres == pytest.approx([85, 45.05, 55.05, 95])


@pytest.mark.parametrize("most", [486.0, 500.0, 540.0, 560.0, 571.0])
def test_the_ticks_of_bars_end_on_the_page(most: float) -> None:
    figure = figures.bars(rows.table([row("eager", 256, most)]), title="t").figure
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    ticks = figure.axes[0].get_xticklabels()
    edge = figure.bbox.width
    assert len(ticks) >= 4 and all(t.get_window_extent(canvas.get_renderer()).x1 <= edge for t in ticks)


def test_wrap_cuts_a_long_name_after_an_underscore() -> None:
    assert drawing.wrap("make_graphed_callables", 120, 10) == ["make_graphed_", "callables"]


def test_wrap_cuts_what_has_no_spaces() -> None:
    lines_ = drawing.wrap("see https://example.org/" + "long" * 30, 100, 10)
    assert all(drawing.text_width(line, 10) <= 100 for line in lines_)
    assert "".join(lines_).endswith("longlong")


def test_a_disturbed_bar_has_a_ring_and_a_footnote_says_what() -> None:
    noisy = [row("labkit", 64, 5.0, noise=WORKED), row("nn.Linear", 64, 8.0), row("torch.compile", 64, 7.0)]
    table = rows.table(noisy, [])
    shown = figures.bars(table, title="Bars")
    assert [words for words in texts(shown) if "◯" in words] == [f"◯ {WORKED}: labkit", "5 µs ◯"]
    assert shown.alt.endswith(f"Disturbed: {WORKED}: labkit.")
    assert not any("◯" in words for words in texts(figures.bars(table, title="Bars", value="peak_bytes")))
    for quiet in (rows.table(noisy[1:], []), table.drop(columns="noise")):
        shown = figures.bars(quiet, title="Bars")
        assert not any("◯" in words for words in texts(shown)) and "Disturbed" not in shown.alt


def test_under_headings_the_footnote_says_which() -> None:
    noisy = [row("labkit", 64, 5.0, dtype=dtype, noise=WORKED) for dtype in ("bf16", "fp32")]
    shown = figures.bars(rows.table(noisy, []), title="Bars", group="dtype")
    assert f"◯ {WORKED}: labkit (bf16), labkit (fp32)" in " ".join(texts(shown))
