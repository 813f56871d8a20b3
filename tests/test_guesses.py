"""The question, the sealed guess on disk, the verdict, and the picture of both."""

import json
import math
from itertools import pairwise
from pathlib import Path

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Text

from labkit import guess_figures, guesses
from labkit.claims import Measured
from labkit.drawing import Shown, contrast
from labkit.guesses import Guess, Question

WHEN = "2026-11-21T10:15:00+01:00"
RATIO = Question("ratio at 160", "How many times faster?", 0.1, 1000, "x")
CROSSOVER = Question(
    "crossover", "From which width on?", 32, 32768, axis="width", sides=("A is faster", "B is faster")
)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LABKIT_CACHE", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize(
    ("changes", "argument"),
    [
        ({"name": ""}, "name"),
        ({"name": " ?! "}, "name"),
        ({"text": " "}, "question"),
        ({"low": 0}, "low"),
        ({"low": math.nan}, "low"),
        ({"high": math.inf}, "high"),
        ({"high": -1}, "high"),
        ({"low": 5, "high": 5}, "high"),
        ({"low": 6, "high": 5}, "high"),
        ({"sides": ("left",)}, "sides"),
        ({"sides": ("left", " ")}, "sides"),
    ],
)
def test_a_question_that_cannot_be_asked_names_the_argument(changes: dict, argument: str) -> None:
    with pytest.raises(ValueError, match=f"^{argument}: "):
        Question(**{"name": "n", "text": "How?", "low": 1, "high": 10} | changes)


def test_values_are_written_with_their_unit_or_axis() -> None:
    assert RATIO.say(12) == "12×"
    assert CROSSOVER.say(1200) == "width 1200"
    assert Question("n", "How long?", 1, 10, "µs").say(2.5) == "2.5 µs"


@pytest.mark.parametrize(
    ("typed", "value"), [("12", 12), (" 12x ", 12), ("12 ×", 12), ("1e2", 100), ("0.5X", 0.5)]
)
def test_numbers_are_understood_as_people_type_them(typed: str, value: float) -> None:
    assert RATIO.parse(typed) == value


@pytest.mark.parametrize("typed", ["abc", "1,5", "nan", "12 µs", "x"])
def test_what_is_no_number_is_refused_in_a_sentence(typed: str) -> None:
    with pytest.raises(ValueError, match=r"is not a number; write it like 12 or 0\.5\."):
        RATIO.parse(typed)


@pytest.mark.parametrize("typed", ["0", "-3", "1e9", "inf"])
def test_a_number_beyond_the_axis_is_refused_with_the_range(typed: str) -> None:
    with pytest.raises(ValueError, match=r"outside the axis, 0\.1× to 1000×"):
        RATIO.parse(typed)


# --- on disk --------------------------------------------------------------------------------------


def test_a_kept_guess_is_found_again_and_can_be_forgotten(own_cache: Path) -> None:
    assert guesses.kept(RATIO) is None
    guess = Guess(12.0, WHEN, seen=True, revealed=True)
    guesses.keep(RATIO, guess)
    assert guesses.path(RATIO) == own_cache / "predictions" / "ratio-at-160.json"
    assert guesses.kept(RATIO) == guess
    guesses.forget(RATIO)
    assert guesses.kept(RATIO) is None
    guesses.forget(RATIO)  # what is not there needs no forgetting


def test_the_file_says_the_unit_and_one_of_an_older_version_is_read_without() -> None:
    for question in (RATIO, CROSSOVER):
        guess = Guess(100.0, WHEN)
        guesses.keep(question, guess)
        written = guesses.path(question).read_text()
        entry = guesses.Entry(question.name, question.text, guess, question.unit, question.axis)
        assert guesses.parse(written) == entry
        old = {key: value for key, value in json.loads(written).items() if key not in ("unit", "axis")}
        guesses.path(question).write_text(json.dumps(old))
        assert guesses.kept(question) == guess
        assert guesses.parse(json.dumps(old)).unit == ""


def test_a_guess_at_another_question_or_beyond_its_axis_is_not_taken() -> None:
    guesses.keep(RATIO, Guess(12.0, WHEN))
    assert guesses.kept(Question("Ratio at 160", "How many times slower?", 0.1, 1000)) is None
    assert guesses.kept(Question("ratio at 160", RATIO.text, 0.1, 10)) is None


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", json.dumps({"question": "q", "guess": {"a": 1}})])
def test_a_damaged_file_is_named(content: str) -> None:
    guesses.keep(RATIO, Guess(12.0, WHEN))
    guesses.path(RATIO).write_text(content)
    with pytest.raises(ValueError, match=r"ratio-at-160\.json holds no guess"):
        guesses.kept(RATIO)


# --- in words -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("guess", "measured", "said"),
    [
        (
            12,
            Measured(1.02, "live", "NVIDIA L4"),
            "You guessed 12×. Measured on NVIDIA L4: 1.02×. Your guess was 11.8 times too high.",
        ),
        (
            0.5,
            Measured(1.0, "recorded", "NVIDIA H200"),
            "You guessed 0.5×. Recorded on NVIDIA H200: 1×. Your guess was 2 times too low.",
        ),
        (
            1.1,
            Measured(1.02, "published", ""),
            "You guessed 1.1×. Published: 1.02×. Your guess was close, 8% too high.",
        ),
        (0.9, 1.0, "You guessed 0.9×. The answer: 1×. Your guess was close, 10% too low."),
        (3, 3, "You guessed 3×. The answer: 3×. Your guess was right."),
        (3, None, "There is no answer here; your guess of 3× stays sealed."),
        (None, None, "There is no answer here."),
        (None, Measured(1.02, "recorded", "H200"), "No guess was sealed. Recorded on H200: 1.02×."),
    ],
)
def test_verdicts(guess: float | None, measured: Measured | float | None, said: str) -> None:
    assert guesses.verdict(RATIO, guess and Guess(guess, WHEN), measured) == said


def test_a_guess_made_after_the_answer_is_called_so() -> None:
    said = guesses.verdict(RATIO, Guess(1.0, WHEN, seen=True), 1.0)
    assert said.startswith("Having seen the answer, you guessed 1×.")


@pytest.mark.parametrize("value", [math.nan, math.inf, 0.0, -2.0])
def test_an_answer_that_has_no_place_on_the_axis_is_told_in_words(value: float) -> None:
    said = guesses.verdict(RATIO, Guess(3, WHEN), Measured(value, "live", "NVIDIA L4"))
    assert f"NVIDIA L4: {value:g}, which has no place on a logarithmic axis" in said
    assert "your guess of 3× stays sealed" in said


# --- the picture ----------------------------------------------------------------------------------


def labels(shown: Shown, gid: str) -> dict[str, Text]:
    FigureCanvasAgg(shown.figure).draw()
    return {t.get_text(): t for t in shown.figure.findobj(Text) if t.get_gid() == gid}


def test_the_empty_axis_names_both_sides_and_its_alt_text_the_question() -> None:
    shown, (left, top, right, bottom) = guess_figures.empty(CROSSOVER)
    assert set(labels(shown, "side")) == {"← A is faster", "B is faster →"}
    assert not labels(shown, "label")
    for part in ("From which width on?", "width 32 to width 32768", "empty", "On the left: A is faster"):
        assert part in shown.alt
    assert 0 < left < right < 1
    assert 0 < top < bottom < 1


def test_the_shares_of_the_panel_are_where_the_axis_is() -> None:
    shown, (left, top, right, bottom) = guess_figures.empty(RATIO)
    box = shown.figure.axes[0].get_position()
    assert (left, right) == pytest.approx((box.x0, box.x1))
    assert (1 - top, 1 - bottom) == pytest.approx((box.y1, box.y0))


def test_guess_and_truth_stand_on_one_axis_with_the_error_between_them() -> None:
    shown = guess_figures.picture(RATIO, Guess(12, WHEN), Measured(1.02, "recorded", "NVIDIA H200"))
    assert set(labels(shown, "label")) == {"your guess 12×", "recorded 1.02×"}
    said = [t.get_text() for t in shown.figure.findobj(Text)]
    assert "11.8 times too high" in said
    assert "11.8 times too high" in shown.alt
    places = {line.get_linestyle(): line.get_xdata()[0] for line in shown.figure.axes[0].lines}
    assert places == {"-": 12, "--": 1.02}, "a recorded number is dashed, as in every figure"


@pytest.mark.parametrize("guess", [0.1, 1.0, 1.02, 1.3, 1000.0])
def test_labels_stay_apart_and_inside(guess: float) -> None:
    shown = guess_figures.picture(RATIO, Guess(guess, WHEN), 1.02)
    found = [text.get_window_extent() for text in labels(shown, "label").values()]
    page = shown.figure.bbox
    assert len(found) == 2
    assert all(page.x0 <= box.x0 and box.x1 <= page.x1 and box.y1 <= page.y1 for box in found)
    assert not found[0].overlaps(found[1])


@pytest.mark.parametrize("truth", [1e-6, 0.02, 5e4, 1e12])
def test_the_axis_reaches_an_answer_beyond_it(truth: float) -> None:
    shown = guess_figures.picture(RATIO, Guess(3, WHEN), truth)
    low, high = shown.figure.axes[0].get_xlim()
    assert low < min(truth, 0.2) and max(truth, 999) < high


def test_sides_are_named_left_and_right_of_the_answer_and_not_across_the_guess() -> None:
    shown = guess_figures.picture(CROSSOVER, Guess(800, WHEN), 1000)
    left, right = (labels(shown, "side")[side].get_window_extent() for side in ("A is faster", "B is faster"))
    ax = shown.figure.axes[0]
    guess, truth = (ax.transData.transform((value, 0))[0] for value in (800, 1000))
    assert left.x1 < truth < right.x0
    assert not left.x0 < guess < left.x1


def test_a_sealed_guess_alone_is_no_verdict() -> None:
    shown = guess_figures.picture(RATIO, Guess(3, WHEN), None)
    assert "Your guess stands at 3×." in shown.alt
    assert set(labels(shown, "label")) == {"your guess 3×"}


def test_the_picture_is_small_and_its_colour_readable() -> None:
    assert len(guess_figures.empty(CROSSOVER)[0]._repr_html_()) < 8000
    assert contrast(guess_figures.GUESS) >= 4.5


def test_the_line_over_the_picture_follows_the_guess() -> None:
    shown, panel = guess_figures.empty(CROSSOVER, sides=False)
    assert not labels(shown, "side")
    size = (576.0, 100.0)
    bare = guess_figures.overlay(CROSSOVER, None, panel, size)
    assert guess_figures.GUESS not in bare and "← A is faster" in bare
    drawn = [guess_figures.overlay(CROSSOVER, guess, panel, size) for guess in (32, 1024, 32768)]
    for page, share in zip(drawn, ("0.00%", "50.00%", "100.00%"), strict=True):
        assert f"left:{share};top:0" in page
        assert f"translateX(-{share})" in page, "the number leaves the picture at neither end"
    assert all(a != b for a, b in pairwise(drawn))
    assert "base64" not in drawn[0], "a drag sends no picture"


def test_texts_of_the_lesson_are_escaped() -> None:
    asked = Question("n", 'Is <b> & "c"?', 1, 10, sides=("<i>left", "right & so"))
    _, panel = guess_figures.empty(asked)
    for guess in (None, 3.0):
        page = guess_figures.overlay(asked, guess, panel, (576.0, 100.0))
        assert "&lt;i&gt;left" in page and "<i>" not in page
