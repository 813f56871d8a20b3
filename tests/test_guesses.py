"""The question, the sealed guess on disk, the verdict, and the picture of both."""

import json
from dataclasses import replace
from math import inf, nan
from pathlib import Path

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Text

from labkit import guess_figures, guesses
from labkit.claims import Measured
from labkit.guesses import Guess, Question
from labkit.plots import Picture

WHEN = "2026-11-21T10:15:00+01:00"
RATIO = Question("ratio at 160", "How many times faster?", 0.1, 1000, "x")
SIDES = ("A is faster", "B is faster")
CROSSOVER = Question("crossover", "From which width on?", 32, 32768, axis="width", sides=SIDES)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LABKIT_CACHE", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize(
    ("argument", "changes"),
    [
        *(("name", {"name": name}) for name in ("", " ?! ")),
        ("question", {"text": " "}),
        *(("low", {"low": low}) for low in (0, nan)),
        *(("high", changes) for changes in ({"high": inf}, {"high": -1}, {"low": 10}, {"low": 11})),
        *(("sides", {"sides": sides}) for sides in (("left",), ("left", " "))),
    ],
)
def test_a_question_that_cannot_be_asked_names_the_argument(argument: str, changes: dict) -> None:
    with pytest.raises(ValueError, match=f"^{argument}: "):
        Question(**{"name": "n", "text": "How?", "low": 1, "high": 10} | changes)


def test_values_are_written_with_their_unit_or_axis_and_understood_as_people_type_them() -> None:
    assert (RATIO.say(12), CROSSOVER.say(1200)) == ("12×", "width 1200")
    assert Question("n", "How long?", 1, 10, "µs").say(2.5) == "2.5 µs"
    typed = {"12": 12, " 12x ": 12, "12 ×": 12, "1e2": 100, "0.5X": 0.5}
    assert {text: RATIO.parse(text) for text in typed} == typed


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        *(
            (typed, r"is not a number; write it like 12 or 0\.5\.")
            for typed in ("abc", "1,5", "nan", "12 µs", "x")
        ),
        *((typed, r"outside the axis, 0\.1× to 1000×") for typed in ("0", "-3", "1e9", "inf", "0.09")),
    ],
)
def test_what_is_no_number_of_the_axis_is_refused_in_a_sentence(typed: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        RATIO.parse(typed)


# --- on disk --------------------------------------------------------------------------------------


@pytest.mark.parametrize("question", [RATIO, CROSSOVER], ids=["with a unit", "with an axis"])
def test_a_kept_guess_is_found_again_and_can_be_forgotten(own_cache: Path, question: Question) -> None:
    assert guesses.kept(question) is None
    guess = Guess(100.0, WHEN, seen=True, revealed=True)
    guesses.keep(question, guess)
    path = own_cache / "predictions" / f"{question.slug}.json"
    assert guesses.path(question) == path and guesses.kept(question) == guess
    entry = guesses.Entry(question.name, question.text, guess, question.unit, question.axis)
    assert guesses.parse(path.read_text()) == entry
    old = {key: value for key, value in json.loads(path.read_text()).items() if key not in ("unit", "axis")}
    path.write_text(json.dumps(old))
    assert guesses.kept(question) == guess and guesses.parse(path.read_text()).unit == "", "an older version"
    assert guesses.kept(replace(question, text="How many times slower?")) is None
    assert guesses.kept(replace(question, high=99)) is None, "it lies beyond the axis"
    for _ in range(2):  # what is not there needs no forgetting
        guesses.forget(question)
        assert guesses.kept(question) is None


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", json.dumps({"question": "q", "guess": {"a": 1}})])
def test_a_damaged_file_is_named(content: str) -> None:
    guesses.keep(RATIO, Guess(12.0, WHEN))
    guesses.path(RATIO).write_text(content)
    with pytest.raises(ValueError, match=r"ratio-at-160\.json holds no guess"):
        guesses.kept(RATIO)


# --- in words -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("guess", "measured", "said", "off"),
    [
        (12, Measured(1.02, "live", "L4"), "You guessed 12×. Measured on L4: 1.02×.", "11.8 times too high"),
        (0.5, Measured(1.0, "recorded", "L4"), "You guessed 0.5×. Recorded on L4: 1×.", "2 times too low"),
        (1.1, Measured(1.02, "published", ""), "You guessed 1.1×. Published: 1.02×.", "close, 8% too high"),
        (0.9, 1.0, "You guessed 0.9×. The answer: 1×.", "close, 10% too low"),
        (3, 3, "You guessed 3×. The answer: 3×.", "right"),
        (3, None, "There is no answer here; your guess of 3× stays sealed.", None),
        (None, None, "There is no answer here.", None),
        (None, Measured(1.02, "recorded", "H200"), "No guess was sealed. Recorded on H200: 1.02×.", None),
    ],
)
def test_verdicts(guess: float | None, measured: Measured | float | None, said: str, off: str | None) -> None:
    said += f" Your guess was {off}." if off else ""
    assert guesses.verdict(RATIO, guess and Guess(guess, WHEN), measured) == said
    seen = guesses.verdict(RATIO, guess and Guess(guess, WHEN, seen=True), measured)
    assert seen == said.replace("You guessed", "Having seen the answer, you guessed")


@pytest.mark.parametrize("value", [nan, inf, 0.0, -2.0])
def test_an_answer_that_has_no_place_on_the_axis_is_told_in_words(value: float) -> None:
    said = guesses.verdict(RATIO, Guess(3, WHEN), Measured(value, "live", "NVIDIA L4"))
    assert f"NVIDIA L4: {value:g}, which has no place on a logarithmic axis" in said
    assert "your guess of 3× stays sealed" in said


# --- the picture ----------------------------------------------------------------------------------


def labels(shown: Picture, gid: str) -> dict[str, Text]:
    FigureCanvasAgg(shown.figure).draw()
    return {t.get_text(): t for t in shown.figure.findobj(Text) if t.get_gid() == gid}


def test_the_empty_axis_names_both_sides_and_stands_where_the_panel_is() -> None:
    shown, (left, top, right, bottom) = guess_figures.empty(CROSSOVER)
    assert set(labels(shown, "side")) == {"← A is faster", "B is faster →"} and not labels(shown, "label")
    for part in ("From which width on?", "width 32 to width 32768", "empty", "On the left: A is faster"):
        assert part in shown.alt
    box = shown.figure.axes[0].get_position()
    assert (left, right, 1 - top, 1 - bottom) == pytest.approx((box.x0, box.x1, box.y1, box.y0))
    assert 0 < left < right < 1 and 0 < top < bottom < 1


@pytest.mark.parametrize("guess", [0.1, 1.0, 1.02, 12, 1000.0])
def test_guess_and_truth_stand_apart_on_one_axis_with_the_error_between_them(guess: float) -> None:
    shown = guess_figures.picture(RATIO, Guess(guess, WHEN), Measured(1.02, "recorded", "NVIDIA H200"))
    one, two = [text.get_window_extent() for text in labels(shown, "label").values()]
    page = shown.figure.bbox
    assert all(page.x0 <= box.x0 and box.x1 <= page.x1 and box.y1 <= page.y1 for box in (one, two))
    assert not one.overlaps(two)
    lines = {line.get_linestyle(): line.get_xdata()[0] for line in shown.figure.axes[0].lines}
    assert lines == {"-": guess, "--": 1.02}, "a recorded number is dashed, as in every figure"
    if guess == 12:
        assert set(labels(shown, "label")) == {"your guess 12×", "recorded 1.02×"}
        assert "11.8 times too high" in shown.alt
        assert "11.8 times too high" in [t.get_text() for t in shown.figure.findobj(Text)]


@pytest.mark.parametrize("truth", [1e-6, 0.02, 5e4, 1e12])
def test_the_axis_reaches_an_answer_beyond_it(truth: float) -> None:
    shown = guess_figures.picture(RATIO, Guess(3, WHEN), truth)
    low, high = shown.figure.axes[0].get_xlim()
    assert low < min(truth, 0.2) and max(truth, 999) < high


def test_the_line_over_the_picture_follows_the_guess_and_sends_no_picture() -> None:
    asked = replace(CROSSOVER, sides=("<i>left", "right & so"))
    shown, panel = guess_figures.empty(asked, sides=False)
    bare = guess_figures.overlay(asked, None, panel, (576.0, 100.0))
    assert not labels(shown, "side") and guess_figures.GUESS not in bare and "← &lt;i&gt;left" in bare
    for guess, share in ((32, "0.00%"), (1024, "50.00%"), (32768, "100.00%")):
        drawn = guess_figures.overlay(asked, guess, panel, (576.0, 100.0))
        assert f"left:{share};top:0" in drawn and "base64" not in drawn and "<i>" not in drawn
        assert f"translateX(-{share})" in drawn, "the number leaves the picture at neither end"
