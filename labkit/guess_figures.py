"""The axis that a guess stands on: empty, with guess and answer, and the line that is moved over it."""

import html
import math
from itertools import pairwise

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter

from labkit import scales
from labkit.claims import Measured
from labkit.drawing import (
    CSS_PIXELS_PER_POINT,
    INK,
    MUTED,
    SHADES,
    SLOTS,
    SMALL_SIZE,
    TEXT_SIZE,
    Page,
    Shown,
    bounds,
    figure_of,
    points,
    shorten,
    stagger,
    text_width,
    write,
)
from labkit.guesses import Guess, Question, distance, placed, verdict
from labkit.provenance import TIMES, digits, sentence

GUESS = SLOTS[6][0]
"""The colour of a guess."""
_LOOK = {"live": ("measured", "-"), "recorded": ("recorded", "--"), "published": ("published", ":")}
_ROW = 15.0
_PANEL = 52.0
Line = tuple[float, str, str, str]
"""A value with its label, colour and stroke."""


def empty(question: Question, *, sides: bool = True) -> tuple[Shown, tuple[float, float, float, float]]:
    """The axis without a guess, and where its panel is in the picture: left, top, right, bottom, as shares.

    Without ``sides`` the names of the two sides are left out, for whoever draws over it.
    """
    ax = _axes(question, (question.low, question.high), rows=1)
    if sides:
        _name_sides(ax, question, [], None)
    left, bottom, right, top = bounds(ax)
    width, height = points(figure_of(ax))
    shares = (left / width, 1 - top / height, right / width, 1 - bottom / height)
    return Shown(figure_of(ax), _alt(question, "It is empty: your guess comes first.")), shares


def picture(question: Question, guess: Guess | None, measured: Measured | float | None) -> Shown:
    """A guess, an answer or both on one axis, with the error between them.

    An answer that the axis has no place for (zero, NaN) is left out.
    """
    truth = placed(measured)
    lines: list[Line] = []
    if truth is not None:
        word, stroke = _LOOK[measured.kind] if isinstance(measured, Measured) else ("answer", "-")
        lines.append((truth, f"{word} {question.number(truth)}", INK, stroke))
    if guess is not None:
        lines.append((guess.value, f"your guess {question.number(guess.value)}", GUESS, "-"))
    low, high = question.low, question.high
    beyond = [value / 1.5 for value, *_ in lines if value < low] + [v * 1.5 for v, *_ in lines if v > high]
    limits = (min([low, *beyond]), max([high, *beyond]))
    ax = _axes(question, limits, rows=1)
    if max((row for _, row in _spots(ax, lines)), default=0):
        ax = _axes(question, limits, rows=2)
    _draw_lines(ax, lines)
    if truth is not None and guess is not None:
        _draw_error(ax, guess.value, truth)
    border = truth if truth is not None else guess.value if guess else None
    _name_sides(ax, question, [value for value, *_ in lines], border)
    said = verdict(question, guess, measured)
    if truth is None and guess is not None:
        said = f"Your guess stands at {question.say(guess.value)}."
    return Shown(figure_of(ax), _alt(question, said))


def _axes(question: Question, limits: tuple[float, float], rows: int) -> Axes:
    """The logarithmic axis, with room for rows of labels above it."""
    unit = "" if question.unit == "x" else question.unit
    label = f"{question.axis} ({unit})" if question.axis and unit else question.axis or unit
    page = Page("", panel_height=_PANEL, left=18, right=26, above=rows * _ROW + 6, below=36 if label else 22)
    figure, (ax,) = page.draw()
    ax.set(xscale="log", xlim=limits, ylim=(0, 1))
    ax.spines["left"].set_visible(False)
    if question.axis:  # a size: powers of two
        ticks = scales.doubling_ticks([], limits, page.panel_width)
    else:
        ticks = scales.value_ticks(limits, page.panel_width / 2)
    scales.set_ticks(ax, ticks, ([], []), digits)
    sign = TIMES if question.unit == "x" else ""
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: digits(value) + sign))
    left, bottom, right, _ = bounds(ax)
    if label:
        write(figure, (left + right) / 2, bottom - 34, label, ha="center", va="bottom")
    return ax


def _x(ax: Axes, value: float) -> float:
    """Where a value stands, in points from the figure's left edge."""
    left, _, right, _ = bounds(ax)
    low, high = ax.get_xlim()
    return left + math.log(value / low) / math.log(high / low) * (right - left)


def _spots(ax: Axes, lines: list[Line]) -> list[tuple[float, int]]:
    """Centre and row of each line's label."""
    width, _ = points(figure_of(ax))
    widths = [text_width(label, TEXT_SIZE) for _, label, *_ in lines]
    return stagger([_x(ax, value) for value, *_ in lines], widths, 4, width - 4)


def _draw_lines(ax: Axes, lines: list[Line]) -> None:
    *_, top = bounds(ax)
    for (value, label, color, stroke), (centre, row) in zip(lines, _spots(ax, lines), strict=True):
        ax.axvline(value, color=color, linestyle=stroke, linewidth=2.2, zorder=4)
        write(
            figure_of(ax),
            centre,
            top + 4 + row * _ROW,
            label,
            color=color,
            ha="center",
            va="bottom",
            gid="label",
        )


def _draw_error(ax: Axes, guess: float, truth: float) -> None:
    """An arrow from the guess to the truth, and the factor above it where there is room."""
    start, end = _x(ax, guess), _x(ax, truth)
    if abs(start - end) < 14:
        return
    ax.annotate(
        "",
        xy=(truth, 0.6),
        xytext=(guess, 0.6),
        arrowprops={"arrowstyle": "->", "color": MUTED, "shrinkA": 3, "shrinkB": 3},
    )
    words = distance(guess, truth)
    if text_width(words, SMALL_SIZE) + 12 < abs(start - end):
        *_, top = bounds(ax)
        middle = (start + end) / 2
        write(
            figure_of(ax),
            middle,
            top - 0.36 * _PANEL,
            words,
            size=SMALL_SIZE,
            color=MUTED,
            ha="center",
            va="bottom",
        )


def _name_sides(ax: Axes, question: Question, values: list[float], border: float | None) -> None:
    """What holds left and right of the border; without one, which way each of them lies."""
    if question.sides is None:
        return
    left, bottom, right, _ = bounds(ax)
    if border is None:
        room = (right - left) / 2 - 10
        for side, x, align in ((0, left + 4, "left"), (1, right - 4, "right")):
            words = shorten(_pointed(question)[side], room, SMALL_SIZE)
            _write_side(ax, x, bottom, words, align)
        return
    low, high = ax.get_xlim()
    stops = sorted(_x(ax, value) for value in values)
    for side, (start, end) in enumerate(((low, border), (border, high))):
        ax.axvspan(start, end, color=SHADES[1 - side], zorder=0, linewidth=0)
        # Not across the line of a guess: in the wider part beside it.
        edges = [_x(ax, start), *(x for x in stops if _x(ax, start) < x < _x(ax, end)), _x(ax, end)]
        begin, finish = max(pairwise(edges), key=lambda part: part[1] - part[0])
        if finish - begin > 40:
            words = shorten(question.sides[side], finish - begin - 10, SMALL_SIZE)
            _write_side(ax, (begin + finish) / 2, bottom, words, "center")


def _pointed(question: Question) -> tuple[str, str]:
    """The names of the two sides, each with an arrow to its side."""
    assert question.sides is not None
    return f"← {question.sides[0]}", f"{question.sides[1]} →"


def _write_side(ax: Axes, x: float, bottom: float, words: str, align: str) -> None:
    y = bottom + 0.12 * _PANEL
    write(figure_of(ax), x, y, words, size=SMALL_SIZE, color=MUTED, ha=align, va="bottom", gid="side")


def _alt(question: Question, said: str) -> str:
    asked = question.text if question.text[-1] in "?!." else sentence(question.text)
    reach = f"from {question.say(question.low)} to {question.say(question.high)}"
    sides = ""
    if question.sides is not None:
        sides = f" On the left: {question.sides[0]}; on the right: {question.sides[1]}."
    return f"{asked} A logarithmic axis {reach}. {said}{sides}"


# --- over the picture, in a browser ----------------------------------------------------------------


def overlay(
    question: Question, guess: float | None, panel: tuple[float, ...], size: tuple[float, float]
) -> str:
    """The guess as a line over the picture of the axis, and the sides left and right of it; all in percent.

    Hidden from screen readers, which have the status line.
    """
    left, top, right, bottom = (100 * share for share in panel)
    drawn = [_sides(question, guess)] if question.sides is not None else []
    label = ""
    if guess is not None:
        share = 100 * question.place(guess)
        drawn.append(
            f'<div style="position:absolute;left:{share:.2f}%;top:0;bottom:0;width:3px;margin-left:-1.5px;'
            f'background:{GUESS}"></div>'
        )
        # Shifted by its own share of its width, so that it leaves the axis at neither end.
        label = (
            f'<div style="position:absolute;left:{share:.2f}%;bottom:100%;white-space:nowrap;'
            f'transform:translateX(-{share:.2f}%);line-height:1.5;color:{GUESS}">{html.escape(question.number(guess))}</div>'
        )
    inner = (
        f"position:absolute;left:{left:.2f}%;right:{100 - right:.2f}%;"
        f"top:{top:.2f}%;bottom:{100 - bottom:.2f}%"
    )
    outer = (
        f"position:relative;width:100%;max-width:{size[0] * CSS_PIXELS_PER_POINT:.0f}px;pointer-events:none;"
        f"aspect-ratio:{size[0]:.1f}/{size[1]:.1f};font:14px DejaVu Sans,Verdana,sans-serif"
    )
    return f'<div aria-hidden="true" style="{outer}"><div style="{inner}">{"".join(drawn)}{label}</div></div>'


def _sides(question: Question, guess: float | None) -> str:
    """Both sides with their names, shaded once there is a guess between them."""
    assert question.sides is not None
    share = 50.0 if guess is None else 100 * question.place(guess)
    names = _pointed(question) if guess is None else question.sides
    aligned = ("left", "right") if guess is None else ("center", "center")
    shades = ("transparent", "transparent") if guess is None else ("rgba(0,0,0,0.09)", "rgba(0,0,0,0.03)")
    parts = [
        f'<div style="position:absolute;top:0;bottom:0;left:{begin:.2f}%;width:{width:.2f}%;'
        f"background:{shade};color:{MUTED};text-align:{align};box-sizing:border-box;padding:0 6px;"
        f'overflow:hidden;text-overflow:ellipsis;white-space:nowrap;line-height:2.2">{html.escape(name)}</div>'
        for begin, width, shade, align, name in zip(
            (0, share), (share, 100 - share), shades, aligned, names, strict=True
        )
    ]
    return "".join(parts)
