"""Guesses: the file, the verdict, the axis; and what a typed number and the buttons do."""

import html
import json
from dataclasses import replace
from itertools import pairwise
from math import inf, nan

import pytest

from labkit.measure.results import MISSING, Measured
from labkit.widgets import guess, guesses, static
from labkit.widgets.guesses import Question, SealedGuess

WHEN = "2026-11-21T10:15:00+01:00"
RATIO = Question("ratio at 160", "How many times faster?", 0.1, 1000, "x")
STAYS = "your guess of 3× stays sealed."
L4 = Measured(1.02, "live", "NVIDIA L4")


@pytest.fixture(autouse=True)
def shown(tmp_path, monkeypatch):
    """Everything that was displayed, widgets and bundles of HTML and text, to somebody who is there."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LABKIT_HEADLESS", "0")
    monkeypatch.setattr(static, "get_ipython", object)
    found = []
    for where in (f"{static.__name__}.display", "IPython.core.display_functions.display"):
        monkeypatch.setattr(where, lambda what, **_: found.append(what))
    return found


@pytest.fixture
def nobody(monkeypatch):
    monkeypatch.setenv("LABKIT_HEADLESS", "1")


# --- the question, the file, the verdict ----------------------------------------------------------


@pytest.mark.parametrize(
    ("argument", "changes"),
    [
        *(("name", {"name": name}) for name in ("", " ?! ")),
        ("question", {"text": " "}),
        *(("low, high", {"low": low}) for low in (0, nan, 10, 11)),
        ("low, high", {"high": inf}),
    ],
)
def test_a_question_that_cannot_be_asked_names_the_argument(argument, changes):
    with pytest.raises(ValueError, match=f"^{argument}: "):
        Question(**{"name": "n", "text": "How?", "low": 1, "high": 10} | changes)


def test_a_kept_guess_is_found_again_and_can_be_forgotten(tmp_path):
    assert guesses.saved_guess(RATIO) is None
    kept = SealedGuess(100.0, WHEN, seen=True, revealed=True)
    guesses.save_guess(RATIO, kept)
    path = tmp_path / ".labkit" / "guesses" / "ratio-at-160.json"
    assert guesses.saved_guess(RATIO) == kept
    assert guesses.parse_guess_file(path.read_text()) == guesses.GuessFile(RATIO.name, RATIO.text, kept, "x")
    assert guesses.saved_guess(replace(RATIO, text="How many times slower?")) is None
    assert guesses.saved_guess(replace(RATIO, high=99)) is None, "it lies beyond the axis"
    for _ in range(2):  # what is not there needs no forgetting
        guesses.save_guess(RATIO, None)
        assert guesses.saved_guess(RATIO) is None


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", json.dumps({"question": "q", "guess": {"a": 1}})])
def test_a_damaged_file_is_named(content):
    guesses.save_guess(RATIO, SealedGuess(12.0, WHEN))
    RATIO.path.write_text(content)
    with pytest.raises(ValueError, match=r"ratio-at-160\.json holds no guess"):
        guesses.saved_guess(RATIO)


@pytest.mark.parametrize(
    ("mine", "measured", "said", "off"),
    [
        (12, Measured(1.02, "live", "L4"), "You guessed 12×. Measured on L4: 1.02×.", "11.8 times too high"),
        (0.5, Measured(1.0, "recorded", "L4"), "You guessed 0.5×. Recorded on L4: 1×.", "2 times too low"),
        (
            1.1,
            Measured(1.02, "published", "A"),
            "You guessed 1.1×. Published for A: 1.02×.",
            "close, 8% too high",
        ),
        (0.9, 1.0, "You guessed 0.9×. The answer: 1×.", "close, 10% too low"),
        (3, 3, "You guessed 3×. The answer: 3×.", "right"),
        *(
            (3, none, f"There is no answer here; {STAYS}", None)
            for none in (None, MISSING, *(Measured(value, "live", "L4") for value in (nan, inf, 0.0, -2.0)))
        ),
        (None, None, "There is no answer here.", None),
        (None, Measured(1.02, "recorded", "H200"), "No guess was sealed. Recorded on H200: 1.02×.", None),
    ],
)
def test_verdicts(mine, measured, said, off):
    said += f" Your guess was {off}." if off else ""
    assert guesses.verdict(RATIO, mine and SealedGuess(mine, WHEN), measured) == said
    seen = guesses.verdict(RATIO, mine and SealedGuess(mine, WHEN, seen=True), measured)
    assert seen == said.replace("You guessed", "Having seen the answer, you guessed")


# --- the axis -------------------------------------------------------------------------------------


@pytest.mark.parametrize("mine", [0.1, 1.02, 12, 1000.0])
def test_guess_and_truth_stand_on_one_axis_told_apart_by_words_and_stroke(mine):
    shown = guesses.guess_picture(RATIO, mine, Measured(1.02, "recorded", "NVIDIA H200"), "So it is.")
    lines = {line.get_linestyle(): line.get_xdata()[0] for line in shown.figure.axes[0].lines}
    assert lines == {"-": mine, "--": 1.02}, "a recorded number is dashed, as in every figure"
    assert shown.png
    names = shown.figure.axes[0].get_legend().get_texts()
    assert [name.get_text() for name in names] == [f"your guess {RATIO.with_unit(mine)}", "recorded 1.02×"]
    first, second = (name.get_window_extent() for name in names)
    assert not first.overlaps(second) and all(box.x0 >= 0 and box.x1 <= 960 for box in (first, second))
    assert shown.alt == "How many times faster? A logarithmic axis from 0.1× to 1000×. So it is."


@pytest.mark.parametrize("truth", [1e-6, 0.02, 5e4, 1e12])
def test_the_axis_reaches_an_answer_beyond_it(truth):
    low, high = guesses.guess_picture(RATIO, 3, truth, "").figure.axes[0].get_xlim()
    assert low < min(truth, 0.2) and max(truth, 999) < high


@pytest.mark.parametrize(
    ("low", "high", "least"), [(0.1, 1000, 5), (1, 20, 5), (0.2, 5, 5), (0.5, 4, 3), (1, 200, 7)]
)
def test_every_axis_has_numbers_that_stand_apart(low, high, least):
    shown = guesses.guess_picture(Question("n", "How many?", low, high, "launches"), None, None, "")
    assert shown.png
    (axes,) = shown.figure.axes
    ticks = [tick for tick in axes.get_xticklabels() if low <= tick.get_position()[0] <= high]
    boxes = [tick.get_window_extent() for tick in ticks]
    assert len(boxes) >= least and all(a.x1 < b.x0 for a, b in pairwise(boxes))
    assert all(box.x0 >= 0 and box.x1 <= shown.figure.bbox.x1 for box in boxes)


# --- asked, sealed, revealed ----------------------------------------------------------------------


def ratio():
    return guess("ratio at 160", "How many times faster?", low=0.1, high=1000, unit="x")


def status(asked):
    return html.unescape(asked.status.value)


def seal(asked, value=12):
    asked.number.value = str(value)
    asked.seal.click()
    return asked


@pytest.mark.usefixtures("nobody")
def test_with_nobody_there_the_question_and_the_answer_stand_alone(shown, monkeypatch, capsys):
    guesses.save_guess(RATIO, SealedGuess(12.0, WHEN))
    asked = ratio()
    (bundle,) = shown
    assert asked.widget is None and asked.sealed is None, "it knows no guess of this user"
    assert '<img alt="How many times faster? A logarithmic axis from 0.1× to 1000×.' in bundle["text/html"]
    assert guesses.PROMPT in bundle["text/html"] and guesses.PROMPT in bundle["text/plain"]
    monkeypatch.setattr(static, "get_ipython", lambda: None)
    asked.reveal(L4)
    said = "How many times faster?\nNo guess was sealed. Measured on NVIDIA L4: 1.02×.\n"
    assert capsys.readouterr().out == said


def test_at_first_there_is_no_guess_and_nothing_to_seal(shown):
    asked = ratio()
    assert shown[0] is asked.widget and "<details>" in shown[1]["text/html"], (
        "the static copy is folded beneath it"
    )
    assert asked.guess is None and asked.seal.disabled and asked.again.disabled
    assert 'role="heading"' in asked.widget.children[0].value and 'role="status"' in asked.status.value
    assert asked.number.description == "Your guess" and asked.number.value == ""
    assert "Type a number from 0.1 to 1000×." in status(asked)


def test_a_typed_number_moves_the_line(monkeypatch):
    asked, drawn, axis = ratio(), [], guesses.guess_picture
    monkeypatch.setattr(guesses, "guess_picture", lambda *given: drawn.append(given[1]) or axis(*given))
    asked.number.value = "1.2345"
    assert asked.guess == 1.2345 and drawn == [1.2345]
    assert not asked.seal.disabled and "1.23×, not sealed yet" in status(asked)
    assert guesses.saved_guess(asked.question) is None, "a guess is kept when it is sealed, not before"
    for refused in ("10000", "0", "nan", "many", ""):
        asked.number.value = refused
        asked.seal.click()
        assert asked.guess is None and asked.seal.disabled and "Type a number from" in status(asked)
    assert asked.sealed is None


def test_a_sealed_guess_is_frozen_and_a_new_kernel_finds_it_so(shown):
    first = seal(ratio())
    again = ratio()
    for asked in (first, again):
        assert asked.number.disabled and asked.seal.disabled
        assert not asked.again.disabled and status(asked).count("Sealed: 12×") == 1
        assert asked.number.value == "12"
    assert again.sealed == first.sealed is not None and "Sealed: 12×" in shown[-1]["text/plain"]
    assert guess("another", "Why?", low=1, high=9).sealed is None


def test_a_damaged_file_costs_the_guess_and_not_the_lesson():
    seal(ratio()).question.path.write_text("{")
    again = ratio()
    assert again.sealed is None and "could not be read" in status(again)
    assert seal(again, 7).sealed == guesses.saved_guess(again.question)


def test_a_folder_that_cannot_be_written_is_said(tmp_path):
    (tmp_path / ".labkit").touch()
    asked = seal(ratio())
    assert asked.sealed is not None and "only until the kernel restarts" in status(asked)
    asked.reveal(L4)  # must not raise either


def test_before_the_reveal_a_guess_can_be_reconsidered(shown):
    asked = seal(ratio())
    asked.again.click()
    assert asked.sealed is None and asked.guess == 12, "the line stays where it was"
    assert not asked.number.disabled and not asked.seal.disabled
    assert guesses.PROMPT in shown[-1]["text/plain"] and ratio().sealed is None
    seal(asked, 3).reveal(L4)
    assert any("\nYou guessed 3×." in each["text/plain"] for each in shown if isinstance(each, dict))


def test_after_the_reveal_a_new_round_starts_empty_and_says_that_the_answer_was_known(shown):
    asked = seal(ratio())
    asked.reveal(L4)
    found = ratio()
    assert found.sealed == asked.sealed, "the reveal itself unseals nothing"
    for each in (asked, found):  # the reveal is remembered on disk, too
        each.again.click()
        assert each.guess is None and each.seal.disabled
        shown.clear()
        seal(each, 1).reveal(L4)
        said = "Having seen the answer, you guessed 1×."
        assert any(said in bundle["text/plain"] for bundle in shown)


def test_the_reveal_is_static_and_complete(shown):
    asked = seal(ratio())
    shown.clear()
    asked.reveal(L4)
    said = "You guessed 12×. Measured on NVIDIA L4: 1.02×. Your guess was 11.8 times too high."
    assert shown[0]["text/plain"] == f"How many times faster?\n{said}"
    first, _, rest = shown[0]["text/html"].partition("\n")
    assert first == "How many times faster?", "what JupyterLab shows of a hidden output"
    assert said in rest.partition('<img alt="')[2].partition('"')[0]


@pytest.mark.parametrize("measured", [None, 0.0, nan, MISSING, Measured(-1.0, "live", "NVIDIA L4")])
def test_without_an_answer_the_guess_stays_sealed(shown, measured):
    asked = seal(ratio())
    asked.reveal(measured)
    assert "your guess of 12× stays sealed" in shown[-1]["text/plain"]
    assert asked.sealed is not None and not asked.sealed.revealed and "<img" not in shown[-1]["text/html"]
