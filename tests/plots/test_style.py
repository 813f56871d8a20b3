"""Pictures and colours: small, repeatable, with alt text; contenders of one figure told apart."""

import base64
import html
import re
from concurrent.futures import ThreadPoolExecutor
from itertools import combinations

import matplotlib.pyplot
import numpy as np
import pytest
from drawn import drawn, layers, row
from matplotlib.colors import to_rgb

from labkit.plots import style

DEUTERANOPIA = np.array([[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]])
"""Machado, Oliveira, Fernandes 2009, severity 1, on linear RGB."""


def linear(hue):
    return np.power(to_rgb(hue), 2.2)


def contrast(hue):
    return 1.05 / (linear(hue) @ (0.2126, 0.7152, 0.0722) + 0.05)


def test_the_page_has_escaped_alt_text_and_a_small_picture_and_threads_draw_the_same(tmp_path):
    shown = drawn(title='a "quick" <b>&</b> look')
    page = shown._repr_html_()
    found = re.fullmatch(r'<img alt="([^"<]*)" width="768" style="[^"]*" src="([^"]*)">', page)
    assert found and html.unescape(found[1]) == shown.alt == repr(shown)
    assert base64.b64decode(found[2].removeprefix("data:image/webp;base64,")) == shown.webp
    assert len(shown.webp) < 30_000 and shown.save(tmp_path / "a.png").read_bytes() == shown.png
    with ThreadPoolExecutor(2) as pool:
        assert [*pool.map(lambda _: drawn().png, "ab")] == [drawn().png] * 2
    assert matplotlib.pyplot.get_fignums() == [] and matplotlib.rcParams["axes.grid"] is False


def test_colours_are_fixed_distinct_and_readable():
    names = ["eager", "torch.compile", "labkit", "the solution", "F.linear", "another", "nn.Linear", "copy"]
    found = style.contender_styles(names)
    assert found["labkit"] == style.OURS and found["the solution"] == style.LEARNERS
    assert len({look.colour for look in found.values()}) == len({look.marker for look in found.values()}) == 8
    assert found["eager"] == style.contender_styles(["eager"])["eager"]
    every = (style.OURS, style.LEARNERS, *style.PALETTE)
    for first, second in combinations([look.colour for look in every], 2):
        seen = [np.clip(DEUTERANOPIA @ linear(hue), 0, 1) ** (1 / 2.2) for hue in (first, second)]
        assert np.abs(seen[0] - seen[1]).max() > 0.1, (first, second)
    for look in every:
        assert contrast(look.colour) >= 3


def test_many_strangers_never_look_as_labkit_or_the_learner():
    found = style.contender_styles([*map(str, range(23)), "labkit"])
    assert [name for name, look in found.items() if look.emphasised] == ["labkit"] and len(found) == 24


def test_words_wrap_above_and_below_the_axes_and_dollars_are_dollars():
    shown = drawn(row("labkit", 24576, None, note="$ \\frac"), title="a long title " * 9)
    shown.png  # noqa: B018 - lays the figure out
    (ax,), texts = shown.figure.axes, shown.figure.texts
    assert any("\n" in text.get_text() for text in texts)
    assert not any(text.get_parse_math() for text in texts)
    outside = [
        text.get_window_extent() for text in (*texts, *shown.figure.legends[0].get_texts()) if text.get_text()
    ]
    inside = ax.get_tightbbox()
    assert all(box.y0 >= inside.y1 - 1 or box.y1 <= inside.y0 + 1 for box in outside)
    assert all(box.x0 >= 0 and box.x1 <= shown.figure.bbox.x1 for box in outside)


@pytest.mark.parametrize("kind", ["live", "recorded"])
def test_the_origin_stands_in_the_key(kind):
    legend, _ = drawn(table=layers(kind=kind)).figure.legends
    assert legend.get_texts()[0].get_text() == f"{kind} on NVIDIA H200, 2026-11-20, graph clock, cold cache"
