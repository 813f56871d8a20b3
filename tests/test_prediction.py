"""Predictions with real widgets: what a drag, a typed number, the buttons and a new kernel do."""

import html
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from labkit import guess_figures, guesses, live, places, prediction
from labkit.claims import Measured
from labkit.prediction import GuessPanel, Prediction, predict

L4 = Measured(1.02, "live", "NVIDIA L4")


@pytest.fixture(autouse=True)
def shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Everything that was displayed: widgets, and bundles of HTML and text."""
    monkeypatch.setenv("LABKIT_CACHE", str(tmp_path))
    monkeypatch.setattr(prediction, "_asked", {})
    monkeypatch.setattr(prediction, "get_ipython", lambda: object())
    found: list[Any] = []

    def display(what: Any, **_: Any) -> None:
        found.append(what)

    monkeypatch.setattr(live, "get_ipython", object)
    monkeypatch.setattr(live, "display", display)
    monkeypatch.setattr("IPython.core.display_functions.display", display)
    monkeypatch.setattr(prediction, "display", display)
    return found


@pytest.fixture
def somebody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(live.HEADLESS, "0")


@pytest.fixture
def nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(live.HEADLESS, "1")


def ratio() -> Prediction:
    return predict("ratio at 160", "How many times faster?", low=0.1, high=1000, unit="x")


def crossover() -> Prediction:
    return predict(
        "crossover", "From which width on?", low=32, high=32768, axis="width", sides=("A wins", "B wins")
    )


def next_kernel(monkeypatch: pytest.MonkeyPatch, ask: Callable[[], Prediction] = ratio) -> Prediction:
    """The same cell in a kernel that knows nothing but the disk."""
    monkeypatch.setattr(prediction, "_asked", {})
    return ask()


def panel_of(asked: Prediction) -> GuessPanel:
    assert asked.panel is not None
    return asked.panel


def status(asked: Prediction) -> str:
    return html.unescape(panel_of(asked).status.value)


# --- nobody there ---------------------------------------------------------------------------------


@pytest.mark.usefixtures("nobody")
def test_headless_shows_the_question_and_the_empty_axis(shown: list[Any]) -> None:
    asked = ratio()
    (bundle,) = shown
    assert asked.panel is None
    assert "How many times faster?" in bundle["text/html"]
    assert '<img alt="How many times faster? A logarithmic axis from 0.1× to 1000×.' in bundle["text/html"]
    assert prediction.BEFORE in bundle["text/html"]
    assert prediction.BEFORE in bundle["text/plain"]


@pytest.mark.usefixtures("nobody")
def test_headless_knows_no_guess_of_this_user(shown: list[Any]) -> None:
    question = ratio().question
    guesses.keep(question, guesses.Guess(12.0, "2026-11-21T10:15:00"))
    asked = ratio()
    asked.reveal(L4)
    assert asked.sealed is None
    assert "No guess was sealed. Measured on NVIDIA L4: 1.02×." in shown[-1]["text/plain"]
    assert "<img alt=" in shown[-1]["text/html"]


@pytest.mark.usefixtures("nobody")
def test_outside_of_a_notebook_the_reveal_is_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(prediction, "get_ipython", lambda: None)
    ratio().reveal(L4)
    assert capsys.readouterr().out == (
        "How many times faster?\nNo guess was sealed. Measured on NVIDIA L4: 1.02×.\n"
    )


# --- wrong calls ----------------------------------------------------------------------------------


@pytest.mark.usefixtures("nobody")
def test_wrong_arguments_are_named() -> None:
    with pytest.raises(ValueError, match=r"^name: "):
        predict("", "How?", low=1, high=2)
    with pytest.raises(ValueError, match=r"^question: "):
        predict("n", "", low=1, high=2)
    with pytest.raises(ValueError, match=r"^high: "):
        predict("n", "How?", low=2, high=1)
    predict("n", "How?", low=1, high=2)  # a refused call has not taken the name


@pytest.mark.usefixtures("nobody")
def test_a_name_stands_for_one_question() -> None:
    predict("the ratio", "How?", low=1, high=2)
    predict("the ratio", "How?", low=1, high=20)  # the cell was run again
    for name in ("the ratio", "The Ratio!"):  # they would share a file
        with pytest.raises(ValueError, match=r"^name: .* already stands for another question, 'How\?'"):
            predict(name, "Why?", low=1, high=2)


# --- guessing -------------------------------------------------------------------------------------


@pytest.mark.usefixtures("somebody")
def test_at_first_there_is_no_guess_and_nothing_to_seal(shown: list[Any]) -> None:
    panel = panel_of(ratio())
    assert shown[0] is panel.box
    assert "<details>" in shown[1]["text/html"], "the static twin is folded beneath the widget"
    assert panel.guess is None and panel.number.value == ""
    assert guess_figures.GUESS not in panel.line.value
    assert panel.seal.disabled and panel.again.layout.display == "none"


@pytest.mark.usefixtures("somebody")
def test_a_drag_moves_line_and_number_together() -> None:
    asked = ratio()
    panel = panel_of(asked)
    pictures = [w.value for w in panel.box.children[1].children if w is not panel.line]
    panel.slider.value = 11.7489
    assert panel.guess == 12 and panel.number.value == "12"
    assert f"left:{100 * asked.question.place(12):.2f}%" in panel.line.value
    assert not panel.seal.disabled
    assert "12×, not sealed yet" in status(asked)
    assert pictures == [w.value for w in panel.box.children[1].children if w is not panel.line]
    assert guesses.kept(asked.question) is None, "a guess is kept when it is sealed, not before"


@pytest.mark.usefixtures("somebody")
@pytest.mark.parametrize("end", ["min", "max"])
def test_the_slider_reaches_both_ends_of_its_axis(end: str) -> None:
    panel = panel_of(crossover())
    panel.slider.value = 1000
    panel.slider.value = 10 ** getattr(panel.slider, end)
    assert panel.guess == {"min": 32, "max": 32768}[end]


@pytest.mark.usefixtures("somebody")
def test_a_typed_number_moves_the_slider_and_stays_exact() -> None:
    panel = panel_of(ratio())
    panel.number.value = "1.2345x"
    assert panel.guess == 1.2345
    assert panel.slider.value == pytest.approx(1.2345)
    assert panel.number.value == "1.2345x", "nothing is rewritten under the typing hand"
    panel.seal.click()
    assert panel.number.value == "1.23"


@pytest.mark.usefixtures("somebody")
@pytest.mark.parametrize(("typed", "said"), [("many", "“many” is not a number"), ("1e9", "outside the axis")])
def test_what_cannot_be_a_guess_is_said_and_the_last_guess_stays(typed: str, said: str) -> None:
    asked = ratio()
    panel_of(asked).number.value = "5"
    panel_of(asked).number.value = typed
    assert said in status(asked)
    assert panel_of(asked).guess == 5
    assert panel_of(asked).seal.disabled, "what is read is not what would be sealed"
    panel_of(asked).number.value = "6"
    assert said not in status(asked) and not panel_of(asked).seal.disabled


@pytest.mark.usefixtures("somebody")
def test_what_the_learner_types_is_escaped() -> None:
    panel = panel_of(ratio())
    panel.number.value = "<img src=x>"
    assert "<img" not in panel.status.value


# --- sealing --------------------------------------------------------------------------------------


def seal(asked: Prediction, value: str = "12") -> Prediction:
    panel_of(asked).number.value = value
    panel_of(asked).seal.click()
    return asked


@pytest.mark.usefixtures("somebody")
def test_a_sealed_guess_is_frozen_and_on_the_static_page(shown: list[Any]) -> None:
    asked = seal(ratio())
    panel = panel_of(asked)
    assert panel.slider.disabled and panel.number.disabled and panel.seal.disabled
    assert panel.again.layout.display is None
    assert status(asked).count("Sealed: 12×") == 1
    assert "Sealed: 12×" in shown[-1]["text/plain"]
    assert "Your guess stands at 12×." in shown[-1]["text/html"]


@pytest.mark.usefixtures("somebody")
def test_sealing_nothing_does_nothing() -> None:
    asked = ratio()
    panel_of(asked).seal.click()
    assert asked.sealed is None and guesses.kept(asked.question) is None


@pytest.mark.usefixtures("somebody")
def test_a_new_kernel_finds_the_guess_sealed(monkeypatch: pytest.MonkeyPatch, shown: list[Any]) -> None:
    first = seal(ratio())
    again = next_kernel(monkeypatch)
    assert again.sealed == first.sealed
    panel = panel_of(again)
    assert panel.slider.disabled and panel.number.value == "12"
    assert panel.slider.value == pytest.approx(12)
    assert "Sealed: 12×" in status(again)
    assert "Sealed: 12×" in shown[-1]["text/plain"]
    again.reveal(L4)
    assert "You guessed 12×." in shown[-1]["text/plain"]


@pytest.mark.usefixtures("somebody")
def test_two_questions_share_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = ratio(), crossover()
    seal(first)
    assert second.sealed is None and panel_of(second).guess is None
    assert next_kernel(monkeypatch, crossover).sealed is None


@pytest.mark.usefixtures("somebody")
def test_a_damaged_file_costs_the_guess_and_not_the_lesson(monkeypatch: pytest.MonkeyPatch) -> None:
    question = seal(ratio()).question
    guesses.path(question).write_text("{")
    again = next_kernel(monkeypatch)
    assert again.sealed is None
    assert "could not be read" in status(again)
    seal(again, "7")
    assert guesses.kept(question) == again.sealed


@pytest.mark.usefixtures("somebody")
def test_a_folder_that_cannot_be_written_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, text: str) -> None:
        raise PermissionError(f"no writing to {path.name}")

    monkeypatch.setattr(places, "write_text", refuse)
    asked = seal(ratio())
    assert asked.sealed is not None
    assert "only until the kernel restarts" in status(asked) and "no writing" in status(asked)
    asked.reveal(L4)  # must not raise either


# --- guessing again -------------------------------------------------------------------------------


@pytest.mark.usefixtures("somebody")
def test_before_the_reveal_a_guess_can_be_reconsidered(
    monkeypatch: pytest.MonkeyPatch, shown: list[Any]
) -> None:
    asked = seal(ratio())
    panel = panel_of(asked)
    panel.again.click()
    assert asked.sealed is None and panel.guess == 12, "the line stays where it was"
    assert not panel.slider.disabled and not panel.seal.disabled
    assert prediction.BEFORE in shown[-1]["text/plain"]
    assert next_kernel(monkeypatch).sealed is None
    seal(asked, "3")
    asked.reveal(L4)
    assert "\nYou guessed 3×." in shown[-1]["text/plain"]


@pytest.mark.usefixtures("somebody")
def test_after_the_reveal_a_new_round_starts_empty_and_says_that_the_answer_was_known(
    monkeypatch: pytest.MonkeyPatch, shown: list[Any]
) -> None:
    asked = seal(ratio())
    asked.reveal(L4)
    assert next_kernel(monkeypatch).sealed == asked.sealed, "the reveal itself unseals nothing"
    panel = panel_of(asked)
    panel.again.click()
    assert panel.guess is None and panel.number.value == "" and panel.seal.disabled
    assert guess_figures.GUESS not in panel.line.value
    seal(asked, "1")
    asked.reveal(L4)
    assert "Having seen the answer, you guessed 1×." in shown[-1]["text/plain"]


@pytest.mark.usefixtures("somebody")
def test_the_reveal_of_a_found_guess_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    seal(ratio()).reveal(L4)
    again = next_kernel(monkeypatch)
    panel_of(again).again.click()
    assert panel_of(again).guess is None
    assert seal(again, "1").sealed is not None
    assert again.sealed is not None and again.sealed.seen


# --- revealing ------------------------------------------------------------------------------------


@pytest.mark.usefixtures("somebody")
def test_the_reveal_is_static_and_complete(shown: list[Any]) -> None:
    seal(ratio()).reveal(L4)
    bundle = shown[-1]
    said = "You guessed 12×. Measured on NVIDIA L4: 1.02×. Your guess was 11.8 times too high."
    assert bundle["text/plain"] == f"How many times faster?\n{said}"
    first, _, rest = bundle["text/html"].partition("\n")
    assert first == "How many times faster?", "what JupyterLab shows of a hidden output"
    assert said in rest
    assert said in bundle["text/html"].partition('<img alt="')[2].partition('"')[0]
    assert set(bundle) == {"text/html", "text/plain"}


@pytest.mark.usefixtures("somebody")
@pytest.mark.parametrize("measured", [None, 0.0, float("nan"), Measured(-1.0, "live", "NVIDIA L4")])
def test_without_an_answer_the_guess_stays_sealed(
    shown: list[Any], measured: Measured | float | None
) -> None:
    asked = seal(ratio())
    asked.reveal(measured)
    assert "your guess of 12× stays sealed" in shown[-1]["text/plain"]
    assert "<img" not in shown[-1]["text/html"]
    assert asked.sealed is not None and not asked.sealed.revealed
    panel_of(asked).again.click()
    assert panel_of(asked).guess == 12


@pytest.mark.usefixtures("somebody")
def test_a_moved_but_unsealed_guess_does_not_count(shown: list[Any]) -> None:
    asked = ratio()
    panel_of(asked).slider.value = 5
    asked.reveal(Measured(1.02, "recorded", "NVIDIA H200"))
    assert "No guess was sealed. Recorded on NVIDIA H200: 1.02×." in shown[-1]["text/plain"]


# --- reachable ------------------------------------------------------------------------------------


@pytest.mark.usefixtures("somebody")
def test_controls_are_named_and_follow_each_other() -> None:
    panel = panel_of(crossover())
    heading, _, slider, row = panel.box.children
    assert 'role="heading"' in heading.value and "From which width on?" in heading.value
    assert slider is panel.slider
    assert row.children == (panel.number, panel.seal, panel.again, panel.status)
    assert panel.number.description == "Your guess"
    assert 'role="status"' in panel.status.value
