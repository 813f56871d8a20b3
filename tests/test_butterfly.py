"""A butterfly adds up round by round, every lane gets the total, and the path into one of them stands out."""

from collections import Counter

import numpy as np
import pytest
from matplotlib.collections import LineCollection
from matplotlib.patches import Rectangle
from matplotlib.text import Text
from test_figures import assert_apart, boxes, rendered, texts

from labkit import drawing, figures
from labkit.butterfly import LANES, reduction

VALUES = [3, 1, 4, 1, 5, 9, 2, 6]
ROUNDS = [VALUES, [8, 10, 6, 7] * 2, [14, 17] * 4, [31] * 8]
PITCH = 27


def drawn(values=VALUES, **changes):
    return figures.butterfly(values, "A sum", **changes)


def segments(shown, gid):
    (found,) = (lines for lines in shown.figure.findobj(LineCollection) if lines.get_gid() == gid)
    return found.get_segments()


def cells(shown, *gids):
    """Column by column, each from the top."""
    found = [patch for patch in shown.figure.findobj(Rectangle) if patch.get_gid() in gids]
    return sorted(found, key=lambda cell: (cell.get_x(), -cell.get_y()))


@pytest.mark.parametrize("lanes", LANES)
def test_every_lane_ends_with_the_same_total_and_the_path_into_it_halves(lanes):
    values = np.random.default_rng(lanes).normal(size=lanes)
    found = reduction(values)
    assert found.sums[-1] == pytest.approx(values.sum())
    assert len(set(found.sums[-1])) == 1, "to the last bit: a + b is b + a"
    for lane in (0, lanes // 2, lanes - 1):
        path = found.path(lane)
        assert [len(row) for row in path] == [lanes >> n for n in range(lanes.bit_length())]
        assert path[-1] == [lane] and all(lane in row for row in path)
    shown = drawn(range(lanes), lane=lanes - 1)
    assert len(segments(shown, "path")) == 2 * (lanes - 1) and len(cells(shown, "path cell")) == 2 * lanes - 1
    looks = {c.get_gid(): c for c in shown.figure.findobj(LineCollection)}
    assert drawing.to_hex(looks["path"].get_color()[0]).upper() == drawing.SLOTS[0][0]
    assert looks["path"].get_linewidth()[0] > looks["exchange"].get_linewidth()[0]
    assert looks["path"].get_zorder() > looks["exchange"].get_zorder()
    assert f"the path into lane {lanes - 1}" in texts(shown)


def test_columns_show_the_sums_and_lines_join_each_lane_to_itself_and_its_partner():
    found, shown = reduction(VALUES), drawn(lane=5, note="as in lesson 7")
    assert found.distances == (4, 2, 1) and found.sums.tolist() == ROUNDS
    values = [t for t in shown.figure.findobj(Text) if t.get_gid() == "value"]
    values.sort(key=lambda text: (round(text.get_position()[0], 6), -text.get_position()[1]))
    assert [text.get_text() for text in values] == [str(sum_) for row in ROUNDS for sum_ in row]
    assert {"start", "XOR 4", "XOR 2", "XOR 1", "total", "as in lesson 7"} <= set(texts(shown))
    numbers = Counter(t.get_text() for t in shown.figure.findobj(Text) if t.get_gid() == "lane")
    assert numbers == {str(lane): 2 for lane in range(8)}, "once on either side"
    columns = sorted({cell.get_x() for cell in cells(shown, "cell", "path cell")})
    joined = Counter()
    for (x, y), (_, into) in [*segments(shown, "exchange"), *segments(shown, "path")]:
        step = max(i for i, column in enumerate(columns) if column < x)
        joined[step, round(-y / PITCH - 0.5), round(-into / PITCH - 0.5)] += 1
    steps = enumerate(found.distances)
    pairs = [(step, at, lane) for step, by in steps for lane in range(8) for at in (lane, lane ^ by)]
    assert joined == Counter(pairs)


@pytest.mark.parametrize("lanes", LANES)
@pytest.mark.parametrize("scale", [1, -0.12345])
def test_labels_are_apart_and_numbers_fit_their_cells(lanes, scale):
    shown = drawn(np.arange(1, lanes + 1) * scale)
    values, others = boxes(shown, "value"), boxes(shown, "lane", "heading")
    assert_apart([*values, *others], shown)
    frames = [cell.get_window_extent(rendered(shown)) for cell in cells(shown, "cell", "path cell")]
    assert_apart([*frames, *others], shown)
    left, bottom, right, top = np.array([frame.extents for frame in frames]).T
    for value in values:
        across, down = (value.x0 + value.x1) / 2, (value.y0 + value.y1) / 2
        (at,) = ((left <= across) & (across <= right) & (bottom <= down) & (down <= top)).nonzero()[0]
        assert left[at] < value.x0 and value.x1 < right[at]


def test_the_alt_text_tells_rounds_and_path():
    assert drawn(lane=2).alt == (
        "A sum. A butterfly over 8 lanes, shfl.sync.bfly: in each round a lane adds the sum of its partner, "
        "lane XOR distance. Start, lanes 0 to 7: 3, 1, 4, 1, 5, 9, 2, 6. "
        "After XOR 4, repeating every 4 lanes: 8, 10, 6, 7. After XOR 2, repeating every 2 lanes: 14, 17. "
        "After XOR 1, every lane: 31. In red the path into lane 2: all lanes, after XOR 4 lanes 0 to 3, "
        "after XOR 2 lanes 2 and 3, after XOR 1 lane 2 alone."
    )
    shown = drawn(range(1, 33))
    assert (
        "Start, lanes 0 to 31: 1, 2, 3, …, 32. After XOR 16" in shown.alt and drawn(alt="mine").alt == "mine"
    )
    assert len(shown._repr_html_()) <= 60_000


@pytest.mark.parametrize(
    ("given", "message"),
    [
        *(
            ({"values": range(n)}, f"values: there are {n}; .* a power of two, 2 to 32")
            for n in (0, 1, 6, 64)
        ),
        ({"values": [[1, 2], [3, 4]]}, r"values: they are of shape \(2, 2\)"),
        ({"values": [1, float("nan")]}, "values: that of lane 1 is nan"),
        *(({"lane": lane}, f"lane: {lane} is not there; the lanes are 0 to 7") for lane in (-1, 8)),
    ],
)
def test_wrong_values_and_lanes_are_refused(given, message):
    with pytest.raises(ValueError, match=message):
        drawn(**given)
