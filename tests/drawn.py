"""Tables and profiles that figures are drawn from in tests, and what stands in a figure."""

from types import SimpleNamespace

import numpy as np
from matplotlib.text import Text

from labkit import plots
from labkit.measure import rows

WIDTHS = [128, 256, 512, 1024, 2048, 4096, 8192, 16384]
H200 = "NVIDIA H200"


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


def drawn(*more, table=None, **options):
    """Curves of both layers and what comes besides."""
    return plots.curves(rows.as_results([*(table or layers()), *more]), **{"title": "t", **options})


def texts(shown):
    """All that is written in a figure, each without its line breaks."""
    return [text.get_text().replace("\n", " ") for text in shown.figure.findobj(Text) if text.get_visible()]


def of_gid(shown, *ends):
    """The artists whose group ids end so."""
    return [found for found in shown.figure.findobj() if str(found.get_gid()).endswith(ends)]


def legend(shown):
    """The legend of the curves; the other one says where they come from."""
    return shown.figure.legends[1]


def lines(shown, gid):
    return [line for ax in shown.figure.axes for line in ax.lines if line.get_gid() == gid]


def assert_apart(found, shown):
    """No two of them overlap by more than a pixel, and none leaves the page."""
    assert shown.png, "which lays the figure out"
    x0, y0, x1, y1 = np.array([Text.get_window_extent(text).extents for text in found]).reshape(-1, 4).T
    page = shown.figure.bbox
    assert (page.x0 <= x0).all() and (x1 <= page.x1).all(), "one runs out of the figure sideways"
    assert (page.y0 <= y0).all() and (y1 <= page.y1).all(), "one runs out of it upwards or downwards"
    across = np.minimum.outer(x1, x1) - np.maximum.outer(x0, x0)
    down = np.minimum.outer(y1, y1) - np.maximum.outer(y0, y0)
    assert not np.triu((across > 1) & (down > 1), k=1).any(), "two overlap"


def event(name, start, took):
    return SimpleNamespace(name=name, start_us=start, duration_us=took)


def profile_of(host, kernels, **stamp):
    given = {"kind": "live", "device": "NVIDIA H200", "date": "2026-01-02T03:04:05+00:00", **stamp}
    return SimpleNamespace(host=host, kernels=kernels, **given)
