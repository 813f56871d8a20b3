"""A butterfly adds up round by round, every lane gets the total, and the path into one of them stands out."""

from collections import Counter
from typing import Any

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


def drawn(values: Any = VALUES, **changes: Any) -> figures.Shown:
    return figures.butterfly(values, "A sum", **changes)


def segments(shown: figures.Shown, gid: str) -> list[np.ndarray]:
    (found,) = (lines for lines in shown.figure.findobj(LineCollection) if lines.get_gid() == gid)
    return found.get_segments()


def cells(shown: figures.Shown, *gids: str) -> list[Rectangle]:
    """Column by column, each from the top."""
    found = [patch for patch in shown.figure.findobj(Rectangle) if patch.get_gid() in gids]
    return sorted(found, key=lambda cell: (cell.get_x(), -cell.get_y()))


def test_the_sums_after_each_round() -> None:
    found = reduction(VALUES)
    assert found.distances == (4, 2, 1)
    assert found.sums.tolist() == ROUNDS


@pytest.mark.parametrize("lanes", LANES)
def test_every_lane_ends_with_the_same_total(lanes: int) -> None:
    values = np.random.default_rng(lanes).normal(size=lanes)
    found = reduction(values)
    assert len(found.distances) == lanes.bit_length() - 1
    assert found.sums[-1] == pytest.approx(values.sum())
    assert len(set(found.sums[-1])) == 1, "to the last bit: a + b is b + a"


@pytest.mark.parametrize("lane", [0, 5, 7])
def test_the_path_halves_with_each_round(lane: int) -> None:
    path = reduction(VALUES).path(lane)
    assert [len(row) for row in path] == [8, 4, 2, 1]
    assert path[-1] == [lane] and all(lane in row for row in path)


def test_columns_show_the_sums_and_headings_the_distances() -> None:
    shown = drawn()
    values = [t for t in shown.figure.findobj(Text) if t.get_gid() == "value"]
    values.sort(key=lambda text: (round(text.get_position()[0], 6), -text.get_position()[1]))
    assert [text.get_text() for text in values] == [str(sum_) for row in ROUNDS for sum_ in row]
    assert {"start", "XOR 4", "XOR 2", "XOR 1", "total"} <= set(texts(shown))
    numbers = Counter(t.get_text() for t in shown.figure.findobj(Text) if t.get_gid() == "lane")
    assert numbers == {str(lane): 2 for lane in range(8)}, "once on either side"


def test_lines_join_each_lane_to_itself_and_to_its_partner() -> None:
    shown = drawn(lane=5)
    columns = sorted({cell.get_x() for cell in cells(shown, "cell", "path cell")})
    pitch = 27
    joined = Counter()
    for (x, y), (_, into) in [*segments(shown, "exchange"), *segments(shown, "path")]:
        step = max(i for i, column in enumerate(columns) if column < x)
        joined[step, round(-y / pitch - 0.5), round(-into / pitch - 0.5)] += 1
    wanted = {
        (step, source, lane): 1
        for step, distance in enumerate((4, 2, 1))
        for lane in range(8)
        for source in (lane, lane ^ distance)
    }
    assert joined == wanted


def test_the_path_into_the_chosen_lane_is_red_and_thicker() -> None:
    for lanes in LANES:
        shown = drawn(range(lanes), lane=lanes - 1)
        assert len(segments(shown, "path")) == 2 * (lanes - 1)
        looks = {c.get_gid(): c for c in shown.figure.findobj(LineCollection)}
        assert drawing.to_hex(looks["path"].get_color()[0]).upper() == drawing.SLOTS[0][0]
        assert looks["path"].get_linewidth()[0] > looks["exchange"].get_linewidth()[0]
        assert looks["path"].get_zorder() > looks["exchange"].get_zorder()
        assert len(cells(shown, "path cell")) == 2 * lanes - 1
        assert f"the path into lane {lanes - 1}" in texts(shown)
    assert [len(segments(drawn(), gid)) for gid in ("path", "exchange")] == [14, 34]


@pytest.mark.parametrize("lanes", LANES)
@pytest.mark.parametrize("scale", [1, -0.12345, 1.2345e-7])
def test_labels_are_apart_and_numbers_fit_their_cells(lanes: int, scale: float) -> None:
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


def test_numbers_too_wide_for_the_lines_are_left_to_the_alt_text() -> None:
    shown = drawn(np.arange(1, 33) * -1.2345e-7)
    assert not boxes(shown, "value") and len(cells(shown, "cell", "path cell")) == 32 * 6
    assert "every lane: \N{MINUS SIGN}6.518e\N{MINUS SIGN}05" in shown.alt
    for lanes in LANES:
        assert len(boxes(drawn(range(100, 100 + lanes)), "value")) == lanes * lanes.bit_length()


def test_numbers_are_short() -> None:
    said = texts(drawn([0.1, -2.25]))
    assert {"0.1", "\N{MINUS SIGN}2.25", "\N{MINUS SIGN}2.15"} <= set(said)
    assert {"123456", "1.235e+07"} <= set(texts(drawn([123456, 12345678])))


def test_the_alt_text_tells_rounds_and_path() -> None:
    assert drawn(lane=2).alt == (
        "A sum. A butterfly over 8 lanes, shfl.sync.bfly: in each round a lane adds the sum of its partner, "
        "lane XOR distance. Start, lanes 0 to 7: 3, 1, 4, 1, 5, 9, 2, 6. "
        "After XOR 4, repeating every 4 lanes: 8, 10, 6, 7. After XOR 2, repeating every 2 lanes: 14, 17. "
        "After XOR 1, every lane: 31. In red the path into lane 2: all lanes, after XOR 4 lanes 0 to 3, "
        "after XOR 2 lanes 2 and 3, after XOR 1 lane 2 alone."
    )
    assert "Start, lanes 0 to 31: 1, 2, 3, …, 32. After XOR 16" in drawn(range(1, 33)).alt
    assert drawn(alt="my words").alt == "my words"


def test_a_note_stands_below() -> None:
    assert "as in lesson 7" in texts(drawn(note="as in lesson 7"))


@pytest.mark.parametrize(("lanes", "most"), [(8, 25_000), (32, 60_000)])
def test_pictures_are_small_and_repeatable(lanes: int, most: int) -> None:
    first, second = (drawn(range(lanes)) for _ in range(2))
    assert first.webp == second.webp
    assert len(first._repr_html_()) <= most


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([], "values: there are 0; the lanes have to be a power of two, 2 to 32"),
        ([1], "values: there are 1;"),
        (range(6), "values: there are 6;"),
        (range(64), "values: there are 64;"),
        ([[1, 2], [3, 4]], r"values: they are of shape \(2, 2\)"),
        ([1, float("nan")], "values: that of lane 1 is nan"),
        ([float("inf"), 1], "values: that of lane 0 is inf"),
    ],
)
def test_wrong_values_are_refused(values: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        drawn(values)


@pytest.mark.parametrize("lane", [-1, 8])
def test_a_lane_that_is_not_there_is_refused(lane: int) -> None:
    with pytest.raises(ValueError, match=f"lane: {lane} is not there; the lanes are 0 to 7"):
        drawn(lane=lane)
