"""The axis that a guess stands on: empty, with guess and answer, and the line that is moved over it."""

import html
import math
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from labkit.claims import Measured
from labkit.guesses import Guess, Question, distance, placed, verdict
from labkit.plots import Picture
from labkit.plots.style import INK, MUTED, SHADES, SMALL, WIDTH, drawing
from labkit.plots.words import TIMES, cut, digits, sentence

GUESS = "#5C0088"
"""The colour of a guess."""
_LOOK = {"live": ("measured", "-"), "recorded": ("recorded", "--"), "published": ("published", ":")}
_PANEL = (0.05, 0.93)
"""Left and right edge of the axis, as shares of the picture."""
_CHARACTERS = 100
"""So many fit beside each other along the axis."""


@drawing()
def empty(question: Question, *, sides: bool = True) -> tuple[Picture, tuple[float, float, float, float]]:
    """The axis without a guess, and where its panel is in the picture: left, top, right, bottom, as shares.

    Without ``sides`` the names of the two sides are left out, for whoever draws over it.
    """
    figure, ax = _axes(question, (question.low, question.high))
    if sides:
        _name_sides(ax, question, None)
    box = ax.get_position()
    shares = (box.x0, 1 - box.y1, box.x1, 1 - box.y0)
    return Picture(figure, _alt(question, "It is empty: your guess comes first.")), shares


@drawing()
def picture(question: Question, guess: Guess | None, measured: Measured | float | None) -> Picture:
    """A guess, an answer or both on one axis, with the error between them.

    An answer that the axis has no place for (zero, NaN) is left out.
    """
    truth = placed(measured)
    lines: list[tuple[float, str, str, str]] = []
    if truth is not None:
        word, stroke = _LOOK[measured.kind] if isinstance(measured, Measured) else ("answer", "-")
        lines.append((truth, f"{word} {question.number(truth)}", INK, stroke))
    if guess is not None:
        lines.append((guess.value, f"your guess {question.number(guess.value)}", GUESS, "-"))
    low, high = question.low, question.high
    beyond = [value / 1.5 for value, *_ in lines if value < low] + [v * 1.5 for v, *_ in lines if v > high]
    figure, ax = _axes(question, (min([low, *beyond]), max([high, *beyond])))
    for row, (value, label, color, stroke) in enumerate(lines):
        ax.axvline(value, color=color, linestyle=stroke, linewidth=2.2, zorder=4)
        align = "left" if _share(ax, value) < 0.15 else "right" if _share(ax, value) > 0.85 else "center"
        _write(ax, (_share(ax, value), 1), (0, 4 + 15 * row), label, color=color, ha=align, gid="label")
    if truth is not None and guess is not None and abs(_share(ax, truth) - _share(ax, guess.value)) > 0.03:
        arrow = {"arrowstyle": "->", "color": MUTED, "shrinkA": 3, "shrinkB": 3}
        ax.annotate("", (truth, 0.6), (guess.value, 0.6), arrowprops=arrow)
        words, between = distance(guess.value, truth), (_share(ax, truth) + _share(ax, guess.value)) / 2
        if len(words) + 2 < _CHARACTERS * abs(_share(ax, truth) - _share(ax, guess.value)):
            _write(ax, (between, 0.64), (0, 0), words, size=SMALL, color=MUTED, ha="center")
    _name_sides(ax, question, truth if truth is not None else guess.value if guess else None)
    said = verdict(question, guess, measured)
    if truth is None and guess is not None:
        said = f"Your guess stands at {question.say(guess.value)}."
    return Picture(figure, _alt(question, said))


def _axes(question: Question, limits: tuple[float, float]) -> tuple[Figure, Axes]:
    """The logarithmic axis, with room for two rows of labels above it."""
    unit = "" if question.unit == "x" else question.unit
    label = f"{question.axis} ({unit})" if question.axis and unit else question.axis or unit
    height = 1.55 if label else 1.4
    figure = Figure(figsize=(WIDTH, height))
    FigureCanvasAgg(figure)
    bottom = (0.5 if label else 0.35) / height
    ax = figure.add_axes((_PANEL[0], bottom, _PANEL[1] - _PANEL[0], 0.58 / height))
    ax.set(xscale="log", xlim=limits, ylim=(0, 1), yticks=[], xlabel=label)
    ax.spines["left"].set_visible(False)
    fine = (1, 2, 5) if limits[1] / limits[0] < 200 else (1,)
    base, subs = (2, (1,)) if question.axis else (10, fine)  # a size: powers of two
    ax.xaxis.set_major_locator(LogLocator(base, subs, numticks=14))
    ax.xaxis.set_minor_locator(NullLocator())
    sign = TIMES if question.unit == "x" else ""
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: digits(value) + sign))
    return figure, ax


def _share(ax: Axes, value: float) -> float:
    """Where a value stands along the axis, 0 to 1."""
    low, high = ax.get_xlim()
    return math.log(value / low) / math.log(high / low)


def _write(ax: Axes, at: tuple[float, float], offset: tuple[float, float], text: str, **how: Any) -> None:
    """Text at shares of the panel, moved by points."""
    ax.annotate(text, at, offset, xycoords="axes fraction", textcoords="offset points", va="bottom", **how)


def _name_sides(ax: Axes, question: Question, border: float | None) -> None:
    """What holds left and right of the border; without one, which way each of them lies."""
    if question.sides is None:
        return
    share = 0.5 if border is None else _share(ax, border)
    names = _pointed(question) if border is None else question.sides
    for i, (name, start, end) in enumerate(zip(names, (0, share), (share, 1), strict=True)):
        if border is not None:
            ax.axvspan(start, end, transform=ax.transAxes, color=SHADES[1 - i], zorder=0, linewidth=0)
        room = int(_CHARACTERS * (end - start)) - 2
        if room > 6:
            _write(
                ax,
                (0.995 * i, 0.1),
                (0, 0),
                cut(name, room),
                **{"size": SMALL, "color": MUTED, "ha": ("left", "right")[i], "gid": "side"},
            )


def _pointed(question: Question) -> tuple[str, str]:
    """The names of the two sides, each with an arrow to its side."""
    assert question.sides is not None
    return f"← {question.sides[0]}", f"{question.sides[1]} →"


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
        f"position:relative;width:100%;max-width:{size[0]:.0f}px;pointer-events:none;"
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
