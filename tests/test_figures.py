"""What a figure must keep to: honest kinds, readable labels, alt text, small and repeatable pictures."""

import base64
import html
import io
import re
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import matplotlib.pyplot
import numpy as np
import pandas as pd
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex, to_rgb
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from matplotlib.text import Text
from PIL import Image

from labkit import drawing, figures, published, rows, tables
from labkit.provenance import TIMES

WIDTHS = [128, 256, 512, 1024, 2048, 4096, 8192, 16384]
H200, L4 = "NVIDIA H200", "NVIDIA L4"
WORKED = "another process worked on the GPU"
NOTHING = "nothing measured yet"


def row(contender, width, median, **changes):
    shape = {"batch": changes.pop("batch", 32768), "width": width}
    values = dict(suite="affine", contender=contender, direction="forward", dtype="bf16", shape=shape)
    values |= dict(clock="graph", cache="cold", median_us=median, runs=100, relative_error=None)
    values |= dict(p20_us=median and median * 0.98, p80_us=median and median * 1.02, flops=0)
    values |= dict(min_bytes=4 * 32768 * width, copy_us=median and 0.03 * width)
    return rows.Row(**(values | dict(device=H200, date="2026-11-20T12:00:00") | changes))


def layers(**changes):
    """A matmul that wins when narrow, an elementwise layer that wins when wide."""
    times = {"nn.Linear": lambda width: max(9.0, width**2 / 1e4), "labkit": lambda width: 10 + 0.031 * width}
    return [row(name, width, us(width), **changes) for width in WIDTHS for name, us in times.items()]


def rendered(shown):
    """What a figure was drawn with; it is drawn again only after a change."""
    canvas = shown.figure.canvas
    assert isinstance(canvas, FigureCanvasAgg)
    if shown.figure.stale:
        canvas.draw()
    return canvas.get_renderer()


def boxes(shown, *gids):
    found = [t for t in shown.figure.findobj(Text) if t.get_gid() in gids]
    return [text.get_window_extent(rendered(shown)) for text in found]


def texts(shown):
    return [t.get_text().replace("\n", " ") for t in shown.figure.findobj(Text) if t.get_visible()]


def lines(shown, gid):
    return [line for line in shown.figure.findobj(Line2D) if line.get_gid() == gid]


def assert_apart(found, shown):
    page = shown.figure.bbox
    x0, y0, x1, y1 = np.array([box.extents for box in found]).reshape(-1, 4).T
    assert (page.x0 <= x0).all() and (x1 <= page.x1).all(), "a label runs out of the figure sideways"
    assert (page.y0 <= y0).all() and (y1 <= page.y1).all(), "one runs out of it upwards or downwards"
    across = np.minimum.outer(x1, x1) - np.maximum.outer(x0, x0)
    down = np.minimum.outer(y1, y1) - np.maximum.outer(y0, y0)
    # A pixel of common border is not an overlap.
    assert not np.triu((across > 1) & (down > 1), k=1).any()


def drawn(*more, **options):
    """A sweep over both layers and what comes besides."""
    return figures.sweep(rows.table([*layers(), *more]), **{"title": "t", **options})


# --- the picture on the page, and colours -------------------------------------------------------------


def test_the_page_carries_alt_text_escaped_and_a_small_picture_and_threads_draw_the_same(tmp_path):
    title = 'a "quick" <b>&</b> dirty look'
    shown = drawn(title=title)
    page = shown._repr_html_()
    picture = re.fullmatch(r'<img alt="([^"<]*)" width="768" style="[^"]*" src="([^"]*)">', page)
    assert picture and html.unescape(picture[1]) == shown.alt == repr(shown)
    assert base64.b64decode(picture[2].removeprefix("data:image/webp;base64,")) == shown.webp
    pictures = [Image.open(io.BytesIO(data)) for data in (shown.png, shown.webp)]
    assert not pictures[0].info and not {"exif", "icc_profile", "xmp"} & pictures[1].info.keys()
    pixels = [np.asarray(picture.convert("RGB")) for picture in pictures]
    assert np.array_equal(*pixels), "no pixel is lost on the page"
    wanted = np.rint(np.multiply(to_rgb(figures.colour("labkit")), 255))
    assert (pixels[0] == wanted).all(axis=2).sum() > 200, "hues stay true"
    assert shown.save(tmp_path / "a.png").read_bytes() == shown.png
    with ThreadPoolExecutor(2) as pool:
        assert [*pool.map(lambda _: drawn(title=title).png, "ab")] == [shown.png] * 2
    assert matplotlib.pyplot.get_fignums() == [] and len(page) <= 25_000


def test_a_contender_keeps_its_colour_and_no_stranger_gets_ours():
    assert (figures.colour("labkit"), figures.colour("nn.Linear")) == ("#C8321E", "#0048DC")
    names = ["labkit", "nn.Linear", "x*w+b eager", "addcmul", "torch.compile", "cuBLAS", "Liger", "fla"]
    for look in (figures.colour, figures.marker):
        assert len({look(name) for name in names}) == len(names)
    rival = next(n for n in map("a{}".format, range(99)) if figures.colour(n) == figures.colour("fla"))
    crowded = drawing.slots([rival, "fla", "labkit"])
    assert drawing.SLOTS[crowded["fla"]][0] == figures.colour("fla") and crowded[rival] != crowded["fla"]
    many = drawing.slots([*map(str, range(23)), "labkit"])
    assert [name for name, slot in many.items() if slot == 0] == ["labkit"] and len(many) == 24


def test_colours_are_readable():
    for colour, least in [*((hue, 3) for hue, _ in drawing.SLOTS), (drawing.INK, 4.5), (drawing.MUTED, 4.5)]:
        assert drawing.contrast(colour) >= least and drawing.contrast(drawing.text_colour(colour)) >= 4.5


# --- sweeps -------------------------------------------------------------------------------------------


def test_sweep_alt_tells_who_is_fastest_where_and_by_what():
    alt = figures.sweep(rows.table(layers(kind="recorded")), title="Crossover").alt
    for said in (
        "Crossover. Time per call against width, both axes logarithmic, width 128 to 16384",
        "forward, bf16, batch 32768",
        "Recorded on NVIDIA H200, 2026-11-20, graph clock, cold cache",
        "nn.Linear fastest from width 128 to 256, labkit and nn.Linear tie at width 512",
        "labkit fastest from width 1024 to 16384",
        "at width 16384 labkit 518 µs, nn.Linear 26.8 ms",
    ):
        assert said in alt


def test_a_difference_inside_the_spread_is_a_tie():
    for other, said in ((10.3, "labkit and torch.compile tie"), (10.6, "labkit fastest")):
        table = rows.table([row("labkit", 256, 10.0), row("torch.compile", 256, other)])
        assert said in figures.sweep(table, title="t").alt


def test_kinds_differ_in_shape_and_in_words():
    posted = row("nn.Linear", 768, 190.0, kind="published", source="A blog", device="")
    shown, hue = drawn(*layers(kind="recorded"), posted), figures.colour("nn.Linear")
    looks = {}
    for kind in rows.KINDS:
        curve = next(c for c in lines(shown, f"{kind} curve") if c.get_color() == hue)
        looks[kind] = (curve.get_linestyle(), curve.get_markerfacecolor())
    assert looks["live"] == ("-", hue) and looks["recorded"] == ("--", "white")
    assert looks["published"][0] == "None"
    stamps = {f"{kind} on {H200}, 2026-11-20, graph clock, cold cache" for kind in ("live", "recorded")}
    curves = {"published: A blog", "labkit", "labkit (recorded)", "nn.Linear (published)"}
    key = {line.get_linestyle() for line in shown.figure.findobj(Line2D) if line.get_color() == drawing.MUTED}
    assert {"-", "--"} <= key and stamps | curves <= set(texts(shown))


@pytest.mark.parametrize("count", [2, 7, 18])
def test_labels_of_nearly_equal_ends_do_not_overlap(count):
    names = ["labkit", *(f"contender number {i} with a long name" for i in range(count - 1))]
    table = rows.table([row(n, w, w / 10 * (1 + i / 1000)) for i, n in enumerate(names) for w in WIDTHS])
    shown = figures.sweep(table, title="t", floor={"copy": "copy_us", "launch floor": lambda _: 1.1})
    found = boxes(shown, "label")
    assert len(found) == count + 2
    assert_apart(found, shown)


def test_gaps_and_disturbed_points_are_marked_and_noted_with_their_panels():
    both = [
        row(name, 24576, None, dtype=dtype, note="out of memory")
        for name in ("nn.Linear", "labkit")
        for dtype in ("bf16", "fp32")
    ]
    noisy = [row("labkit", 40960, 800.0, noise=WORKED), row("nn.Linear", 40960, 60000.0, noise=WORKED)]
    shown = drawn(*both[::2], row("labkit", 32768, None), *noisy)
    assert sorted(int(mark.get_xdata()[0]) for mark in lines(shown, "gap")) == [24576, 24576, 32768]
    rings, curve = lines(shown, "noisy"), lines(shown, "live curve")[0]
    at = [(ring.get_xdata()[0], ring.get_ydata()[0]) for ring in rings]
    assert sorted(at) == [(40960, 800.0), (40960, 60000.0)]
    for ring in rings:  # there is room for the marker that says which kind it is
        assert ring.get_markersize() > curve.get_markersize() + 3 and ring.get_markerfacecolor() == "none"
    notes, gaps = " ".join(texts(shown)), "out of memory: nn.Linear and labkit at width 24576"
    for note in (gaps, "no value: labkit at width 32768", f"{WORKED}: labkit and nn.Linear at width 40960"):
        assert note in notes and note in shown.alt
    assert "disturbed while it was measured" in notes and "Disturbed: " in shown.alt
    drawing.Shown(shown.figure, "").png  # noqa: B018 - the sign is in the font, or matplotlib warns
    both += [row("labkit", 32768, 9.0, dtype=dtype, noise=WORKED) for dtype in ("bf16", "fp32")]
    alt = drawn(*layers(dtype="fp32"), *both, facet="dtype").alt
    assert f"{gaps} (bf16; fp32)" in alt and f"{WORKED}: labkit at width 32768 (bf16; fp32)" in alt


def test_a_ratio_is_disturbed_with_either_of_its_times_and_a_quiet_figure_says_nothing_of_it():
    changed, table = {("labkit", 256): "spread above 10%", ("nn.Linear", 512): WORKED}, rows.table(layers())
    quiet = figures.sweep(table, title="t")
    assert lines(quiet, "noisy") == [] and "isturbed" not in quiet.alt + " ".join(texts(quiet))
    table["noise"] = [changed.get((r.contender, r.width), "") for r in table.itertuples()]
    shown = figures.speedup(tables.speedup(table, "labkit", "nn.Linear"), title="t")
    assert sorted(ring.get_xdata()[0] for ring in lines(shown, "noisy")) == [256, 512]


@pytest.mark.parametrize(
    "table", [pd.DataFrame(), rows.table([]), rows.table([row("labkit", 64, None, note="x")])]
)
def test_nothing_measured_says_so(table):
    model = {"floor": {"launch floor": lambda _: 1.0}, "regimes": [(None, 99, "small")]}
    shown = figures.sweep(table, title="t", **model)
    assert NOTHING in texts(shown) and NOTHING in shown.alt and shown.png


@pytest.mark.parametrize("sizes", [[160], [2**k for k in range(31)]], ids=["one point", "a huge range"])
def test_ticks_and_labels_are_apart_from_one_point_to_a_huge_range(sizes):
    shown = figures.sweep(rows.table([row("labkit", size, 6.7 * size / 160) for size in sizes]), title="t")
    (ax,), renderer = shown.figure.axes, rendered(shown)
    low, high = ax.get_xlim()
    assert low < min(sizes) <= max(sizes) < high and ax.get_xscale() == ax.get_yscale() == "log"
    assert_apart([label.get_window_extent(renderer) for label in ax.xaxis.get_ticklabels()], shown)
    assert_apart(boxes(shown, "label"), shown)
    if len(sizes) > 1:
        assert len(ax.get_xticks()) >= 4 and all(np.log2(tick) % 1 == 0 for tick in ax.get_xticks())


def test_floors_are_functions_columns_or_points_and_regimes_are_named_without_overlap():
    floor = {"launch floor": lambda _: 1.5, "copy": "copy_us", "model": [(16384, 500.0), (128, 4.0)]}
    regimes = [(None, 200, "launch-bound"), (200, 260, "a narrow one between"), (260, None, "memory-bound")]
    names, shown = {name for *_, name in regimes}, drawn(floor=floor, regimes=regimes)
    thin = [line for line in shown.figure.axes[0].lines if line.get_color() == drawing.INK]
    ends = {tuple(line.get_ydata()[[0, -1]]) for line in thin}
    assert ends == {(1.5, 1.5), (0.03 * 128, 0.03 * 16384), (4.0, 500.0)}
    assert {*floor, *names} <= set(texts(shown)) and "Thin lines: launch floor, copy, model." in shown.alt
    written = [t for t in shown.figure.texts if t.get_text() in names]
    assert_apart([t.get_window_extent(rendered(shown)) for t in written], shown)


def test_small_multiples_share_their_axes_and_know_their_rows():
    shown = drawn(*layers(dtype="fp32", batch=256), facet="dtype", rows="batch")
    panels = [ax for ax in shown.figure.axes if ax.get_visible()]
    assert len(panels) == 4
    assert len({ax.get_xlim() for ax in panels}) == len({ax.get_ylim() for ax in panels}) == 1
    said = texts(shown)
    assert {f"{dtype}, batch {batch}" for dtype in ("bf16", "fp32") for batch in (256, 32768)} <= set(said)
    assert said.count("labkit") == said.count(NOTHING) == 2
    assert "fp32, batch 256: nn.Linear fastest" in shown.alt
    assert_apart(boxes(shown, "label"), shown)


def test_missing_columns_and_unknown_kinds_are_named_and_dollar_signs_are_text():
    table = rows.table(layers())
    with pytest.raises(ValueError, match="no column 'depth'"):
        figures.sweep(table, "depth", title="t")
    with pytest.raises(ValueError, match="'guessed' is none of live, recorded, published"):
        figures.sweep(table.assign(kind="guessed"), title="t")
    shown = figures.sweep(rows.table([row("$x_1$", 64, 3.0)]), title="costs $1 or $2", note="$ \\frac")
    written = [text for text in shown.figure.texts if "$" in text.get_text()]
    assert len(written) == 3 and not any(text.get_parse_math() for text in written)


# --- speedups, traffic, and what is yet to come ---------------------------------------------------------


def test_speedup_tells_sources_apart_and_draws_equal_and_the_naive_line():
    posted = published.pseudo_linear()
    ours = pd.DataFrame({"contender": "labkit", "width": WIDTHS, "speedup": np.linspace(0.5, 0.9, 8)})
    table = pd.concat([posted, ours.assign(kind="live", device=L4)])
    shown = figures.speedup(table, title="t", naive={"operations saved": lambda width: width})
    curves, series = lines(shown, "published curve"), posted["series"].unique()
    assert len({c.get_color() for c in curves}) == len({c.get_marker() for c in curves}) == len(series) > 1
    assert {"equal", "operations saved"} <= set(texts(shown))
    assert "labkit 0.5× at width 128 to 0.9× at 16384, not above 1 at the end" in shown.alt
    assert "0.969× at width 128 to 69.1× at 24576, above 1 from 512 on" in shown.alt
    assert_apart(boxes(shown, "label"), shown)


@pytest.mark.parametrize("draw", [figures.sweep, figures.speedup, figures.traffic])
def test_the_axis_has_room_for_values_to_come(draw):
    table = rows.table(layers()[:4]).assign(speedup=2.0, traffic=2.0)
    near, far = draw(table, title="t"), draw(table, title="t", values=(64, 16384))
    (low, high), ticks = far.figure.axes[0].get_xlim(), far.figure.axes[0].get_xticks()
    assert near.figure.axes[0].get_xlim()[1] < 300 and low < 64 and high > 16384 and 16384 in ticks
    empty = draw(table.iloc[:0], title="t", values=(64, 128))
    assert empty.figure.axes[0].get_xlim()[1] < 300 and NOTHING in empty.alt


def test_traffic_is_a_factor_over_the_fewest_possible_and_nobody_wins():
    counted = [("labkit", 64, 1.0, ""), ("eager", 64, 2.0, ""), ("labkit", 128, 1.0, "")]
    counted += [("eager", 128, 2.02, ""), ("labkit", 8192, np.nan, "too large")]
    table = pd.DataFrame(counted, columns=["contender", "width", "traffic", "note"])
    shown = figures.traffic(table.assign(kind="live", device="CPU, interpreted"), title="Bytes moved")
    assert {"fewest possible", "bytes moved over the fewest possible"} <= set(texts(shown))
    assert "eager 2× at width 64 to 2.02× at 128" in shown.alt and "labkit 1×" in shown.alt
    assert "fastest" not in shown.alt and "µs" not in " ".join(texts(shown))
    assert "too large: labkit at width 8192" in shown.alt


# --- bars ---------------------------------------------------------------------------------------------


def mixed_bars():
    posted_ = {"kind": "published", "source": "A blog", "p20_us": None, "p80_us": None}
    ours = [row("labkit", 1024, 33.3), row("labkit", 1024, 31.3, kind="recorded")]
    others = [row("nn.Linear", 1024, 102.0), *ours, row("Liger", 1024, 92.8, **posted_)]
    return rows.table([*others, row("a name that goes on and on", 1024, None, note="out of memory " * 20)])


def test_bars_print_values_whiskers_and_kinds():
    shown = figures.bars(mixed_bars(), title="t", floor={"copy": "copy_us", "launch floor": 1.1})
    said = texts(shown)
    assert {"102 µs", "33.3 µs", "31.3 µs", "92.8 µs", "labkit (recorded)", "Liger (published)"} <= set(said)
    assert any("out of memory" in text for text in said)
    bars = {p.get_gid(): p for p in shown.figure.findobj() if str(p.get_gid()).endswith("bar")}
    assert len({(bar.get_linestyle(), bar.get_facecolor()) for bar in bars.values()}) == 3
    assert_apart(boxes(shown, "label", "value", "gap"), shown)
    assert "nn.Linear 102 µs, labkit 33.3 µs, labkit (recorded) 31.3 µs" in shown.alt
    assert "Lines: launch floor 1.1 µs." in shown.alt and "graph clock" in shown.alt
    assert shown.figure.axes[0].get_xlim()[0] == 0


def test_bars_in_groups_of_other_values_and_of_nothing():
    table = rows.table([*layers(), *layers(dtype="fp32")])
    table = table[table["width"] == 1024].assign(share=[0.25, 0.5, 0.75, 1.0])
    shown = figures.bars(table, title="t", value="share", unit=" of copy", group="dtype")
    assert {"bf16", "fp32", "0.25 of copy", "1 of copy"} <= set(texts(shown))
    assert "fp32: nn.Linear 0.75 of copy, labkit 1 of copy." in shown.alt
    assert NOTHING in figures.bars(rows.table([]), title="t", floor={"copy": "copy_us"}).alt


def test_bars_of_memory_are_in_mebibytes_without_whiskers_or_clock():
    table = mixed_bars().assign(peak_bytes=[160 * 2**20, 96 * 2**20, 0, np.nan, np.nan])
    shown = figures.bars(table, title="t", value="peak_bytes", floor={"inputs": 32 * 2**20})
    (ax,), said = shown.figure.axes, texts(shown)
    assert {"160 MiB", "96 MiB", f"{TIMES} nothing beyond its inputs"} <= set(said)
    assert not any("µs" in text or "clock" in text for text in said) and ax.get_xlim()[1] < 250
    assert [line.get_xdata()[0] for line in ax.get_lines()] == [32], "such a mark has no spread"
    assert "nn.Linear 160 MiB, labkit 96 MiB" in shown.alt and "Lines: inputs 32 MiB." in shown.alt


def test_a_disturbed_bar_has_a_ring_and_a_footnote_says_what_and_which():
    noisy = [row("labkit", 64, 5.0, noise=WORKED), row("nn.Linear", 64, 8.0)]
    table = rows.table(noisy, [])
    shown = figures.bars(table, title="Bars")
    assert [words for words in texts(shown) if "◯" in words] == [f"◯ {WORKED}: labkit", "5 µs ◯"]
    assert shown.alt.endswith(f"Disturbed: {WORKED}: labkit.")
    memory = figures.bars(table, title="Bars", value="peak_bytes")
    assert "◯" not in "".join(texts(memory)) and "Disturbed" not in memory.alt


# --- timelines ----------------------------------------------------------------------------------------


def event(name, start, took):
    return SimpleNamespace(name=name, start_us=start, duration_us=took)


def profile_of(host, kernels, **stamp):
    given = {"kind": "live", "device": "NVIDIA H200", "date": "2026-01-02T03:04:05+00:00", **stamp}
    return SimpleNamespace(host=host, kernels=kernels, **given)


def two_launches(**stamp):
    """Kernels at 100 to 115 and 140 to 150 us after the first launch."""
    host = [event("first_launch", 10, 6), event("second_launch", 20, 6)]
    return profile_of(host, [event("early_kernel", 110, 15), event("late_kernel", 150, 10)], **stamp)


def test_timeline_shows_boxes_gaps_and_numbers():
    templated = "void at::native::(anonymous namespace)::cat_kernel<4, std::array<char*, 3ul> >(int)"
    host = [event("aten::mul", 100, 14), event("cudaLaunchKernel", 105, 6)]
    kernels = [event("affine_forward", 110, 15), event(templated, 150, 1.5)]
    shown = figures.timeline(profile_of(host, kernels), title="t")
    said = texts(shown)
    assert {"host", "device", "aten::mul", "affine_forward", "25 µs idle"} <= set(said)
    assert any("cat_kernel, 1.5 µs" in text and "::" not in text for text in said)
    assert "2 kernels, 2 host events in 51.5 µs; device busy 16.5 µs (32%)" in shown.alt
    assert "Longest gap between kernels 25 µs" in shown.alt
    assert_apart(boxes(shown, "label"), shown)
    kernels = [event(f"kernel_{i % 17}", 5.0 * i, 1.0) for i in range(200)]
    many = figures.timeline(profile_of([], kernels), title="t")
    assert_apart(boxes(many, "label"), many)
    assert "and 5 more names" in texts(many)


def test_timeline_axis_can_be_fixed_but_hides_nothing():
    profile = profile_of([], [event("k", 0, 50)])
    assert figures.timeline(profile, title="t", span_us=80).figure.axes[0].get_xlim() == (0, 80)
    assert figures.timeline(profile, title="t", span_us=10).figure.axes[0].get_xlim()[1] > 50
    empty = figures.timeline(profile_of([], []), title="t").alt
    assert NOTHING in empty and "H200" not in empty, "what is not there is from nowhere"


def test_timeline_window_cuts_at_its_edges_and_says_so():
    profile = two_launches()
    profile.host.append(event("inner", 11, 2))  # a second row of the host
    whole, shown = (figures.timeline(profile, title="t", window=window) for window in (None, (95, 145)))
    (ax,), (other,), said = shown.figure.axes, whole.figure.axes, texts(shown)
    assert ax.get_xlim() == (95, 145) and {"early_kernel", "25 µs idle"} <= set(said)
    assert "1: late_kernel, 10 µs" in said, "cut to half: too narrow for its name, but as long as before"
    assert not any("launch" in text for text in said)
    summary = "95 to 145 µs of 150 µs: 2 kernels, 0 host events; device busy 20 µs (40%)"
    assert summary in said and f"zoomed in: {summary}" in shown.alt
    assert ax.get_ylim() == other.get_ylim(), "nothing moves up or down"
    inside = figures.timeline(two_launches(), title="t", window=(120, 130))
    assert "25 µs idle" in texts(inside) and NOTHING not in texts(inside) and "0 kernels" in inside.alt
    for window in ((5, 5), (6, 5), (float("nan"), 5), (0, float("inf"))):
        with pytest.raises(ValueError, match=r"^window: .* is empty"):
            figures.timeline(profile, title="t", window=window)


def test_timeline_tells_live_from_recorded_by_shape_and_in_words():
    found = []
    for kind in ("live", "recorded"):
        shown = figures.timeline(two_launches(kind=kind), title="t")
        assert f"{kind} on NVIDIA H200, 2026-01-02" in texts(shown)
        assert shown.alt.endswith(f" {kind.capitalize()} on NVIDIA H200, 2026-01-02.")
        events = [box for box in shown.figure.axes[0].patches if box.get_zorder() == 3]
        (key,) = (box for box in shown.figure.artists if isinstance(box, Rectangle))
        *looks, of_key = ((box.get_linestyle(), to_hex(box.get_facecolor())) for box in [*events, key])
        assert len(looks) == 4 and of_key == looks[-1], "the key looks as the kernels do"
        found.append(set(looks))
    assert not found[0] & found[1]
