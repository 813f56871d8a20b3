"""Predictions with real widgets: what a drag, a typed number, the buttons and a new kernel do."""

import html

import pytest

from labkit import guess_figures, guesses, live, prediction
from labkit.claims import Measured
from labkit.prediction import predict

L4 = Measured(1.02, "live", "NVIDIA L4")
LONG_AGO = "2026-11-21T10:15:00"
MIMES = {"text/html", "text/plain"}


@pytest.fixture(autouse=True)
def shown(tmp_path, monkeypatch):
    """Everything that was displayed, widgets and bundles of HTML and text, to somebody who is there."""
    monkeypatch.setenv("LABKIT_CACHE", str(tmp_path))
    monkeypatch.setenv(live.HEADLESS, "0")
    monkeypatch.setattr(prediction, "_asked", {})
    monkeypatch.setattr(prediction, "get_ipython", lambda: object())
    monkeypatch.setattr(live, "get_ipython", object)
    found = []

    def display(what, **_):
        found.append(what)

    for where in (live, prediction):
        monkeypatch.setattr(where, "display", display)
    monkeypatch.setattr("IPython.core.display_functions.display", display)
    return found


@pytest.fixture
def nobody(monkeypatch):
    monkeypatch.setenv(live.HEADLESS, "1")


def ratio():
    return predict("ratio at 160", "How many times faster?", low=0.1, high=1000, unit="x")


def crossover():
    sides = ("A wins", "B wins")
    return predict("crossover", "From which width on?", low=32, high=32768, axis="width", sides=sides)


@pytest.fixture
def next_kernel(monkeypatch):
    """The same cell in a kernel that knows nothing but the disk."""

    def ask(again=ratio):
        monkeypatch.setattr(prediction, "_asked", {})
        return again()

    return ask


def status(asked):
    return html.unescape(asked.panel.status.value)


def seal(asked, value="12"):
    asked.panel.number.value = value
    asked.panel.seal.click()
    return asked


@pytest.mark.usefixtures("nobody")
def test_with_nobody_there_the_question_and_the_answer_stand_alone(shown, monkeypatch, capsys):
    guesses.keep(ratio().question, guesses.Guess(12.0, LONG_AGO))
    asked = ratio()
    page, text = shown[-1]["text/html"], shown[-1]["text/plain"]
    assert asked.panel is None and asked.sealed is None, "it knows no guess of this user"
    assert '<img alt="How many times faster? A logarithmic axis from 0.1× to 1000×.' in page
    assert prediction.BEFORE in page and prediction.BEFORE in text
    monkeypatch.setattr(prediction, "get_ipython", lambda: None)
    asked.reveal(L4)
    said = "How many times faster?\nNo guess was sealed. Measured on NVIDIA L4: 1.02×.\n"
    assert capsys.readouterr().out == said


@pytest.mark.usefixtures("nobody")
def test_a_name_stands_for_one_question():
    with pytest.raises(ValueError, match=r"^high: "):
        predict("the ratio", "Why?", low=20, high=2)
    for high in (2, 20):  # a refused call has not taken the name, and the cell was run again
        predict("the ratio", "How?", low=1, high=high)
    for name in ("the ratio", "The Ratio!"):  # they would share a file
        with pytest.raises(ValueError, match=r"^name: .* already stands for another question, 'How\?'"):
            predict(name, "Why?", low=1, high=2)


# --- guessing and sealing -------------------------------------------------------------------------


def test_at_first_there_is_no_guess_and_nothing_to_seal(shown):
    panel = crossover().panel
    assert shown[0] is panel.box and "<details>" in shown[1]["text/html"], "the twin is folded beneath it"
    assert panel.guess is None and panel.number.value == "" and guess_figures.GUESS not in panel.line.value
    assert panel.seal.disabled and panel.again.layout.display == "none"
    assert 'role="heading"' in panel.box.children[0].value and 'role="status"' in panel.status.value
    assert panel.number.description == "Your guess"


def test_a_drag_moves_line_and_number_together():
    asked = ratio()
    panel = asked.panel
    panel.slider.value = 11.7489
    assert panel.guess == 12 and panel.number.value == "12"
    assert f"left:{100 * asked.question.place(12):.2f}%" in panel.line.value
    assert not panel.seal.disabled and "12×, not sealed yet" in status(asked)
    assert guesses.kept(asked.question) is None, "a guess is kept when it is sealed, not before"
    ends = crossover().panel
    for end, value in (("max", 32768), ("min", 32)):
        ends.slider.value = 10 ** getattr(ends.slider, end)
        assert ends.guess == value


def test_a_typed_number_moves_the_slider_and_stays_exact_and_what_is_none_is_said():
    asked = ratio()
    panel = asked.panel
    panel.number.value = "1.2345x"
    assert panel.guess == 1.2345 and panel.slider.value == pytest.approx(1.2345)
    assert panel.number.value == "1.2345x", "nothing is rewritten under the typing hand"
    for typed, said in (("1e9", "outside the axis"), ("<img src=x>", "is not a number")):
        panel.number.value = typed
        assert said in status(asked) and "<img" not in panel.status.value
        assert panel.guess == 1.2345 and panel.seal.disabled, "what is read is not what would be sealed"
    panel.number.value = "6.0004"
    assert said not in status(asked) and not panel.seal.disabled
    panel.seal.click()
    assert panel.number.value == "6"


def test_a_sealed_guess_is_frozen_and_a_new_kernel_finds_it_so(next_kernel, shown):
    first, other = seal(ratio()), crossover()
    again = next_kernel()
    for asked in (first, again):
        panel = asked.panel
        assert panel.slider.disabled and panel.number.disabled and panel.seal.disabled
        assert panel.again.layout.display is None and status(asked).count("Sealed: 12×") == 1
        assert panel.number.value == "12" and panel.slider.value == pytest.approx(12)
    assert again.sealed == first.sealed is not None and "Sealed: 12×" in shown[-1]["text/plain"]
    assert other.sealed is None and next_kernel(crossover).sealed is None, "two questions share nothing"


def test_a_damaged_file_costs_the_guess_and_not_the_lesson(next_kernel):
    question = seal(ratio()).question
    guesses.path(question).write_text("{")
    again = next_kernel()
    assert again.sealed is None and "could not be read" in status(again)
    assert seal(again, "7").sealed == guesses.kept(question)


def test_a_folder_that_cannot_be_written_is_said(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("LABKIT_CACHE", str(tmp_path / "file"))
    asked = seal(ratio())
    assert asked.sealed is not None and "only until the kernel restarts" in status(asked)
    asked.reveal(L4)  # must not raise either


# --- guessing again, and the answer ---------------------------------------------------------------


def test_before_the_reveal_a_guess_can_be_reconsidered(next_kernel, shown):
    asked = seal(ratio())
    panel = asked.panel
    panel.again.click()
    assert asked.sealed is None and panel.guess == 12, "the line stays where it was"
    assert not panel.slider.disabled and not panel.seal.disabled
    assert prediction.BEFORE in shown[-1]["text/plain"] and next_kernel().sealed is None
    seal(asked, "3")
    asked.reveal(L4)
    assert "\nYou guessed 3×." in shown[-1]["text/plain"]


def test_after_the_reveal_a_new_round_starts_empty_and_says_that_the_answer_was_known(next_kernel, shown):
    asked = seal(ratio())
    asked.reveal(L4)
    found = next_kernel()
    assert found.sealed == asked.sealed, "the reveal itself unseals nothing"
    for each in (asked, found):  # the reveal is remembered on disk, too
        panel = each.panel
        panel.again.click()
        assert panel.guess is None and panel.number.value == "" and panel.seal.disabled
        assert guess_figures.GUESS not in panel.line.value
        seal(each, "1").reveal(L4)
        assert "Having seen the answer, you guessed 1×." in shown[-1]["text/plain"]


def test_the_reveal_is_static_and_complete(shown):
    seal(ratio()).reveal(L4)
    said = "You guessed 12×. Measured on NVIDIA L4: 1.02×. Your guess was 11.8 times too high."
    assert shown[-1]["text/plain"] == f"How many times faster?\n{said}"
    first, _, rest = shown[-1]["text/html"].partition("\n")
    assert first == "How many times faster?", "what JupyterLab shows of a hidden output"
    assert said in rest.partition('<img alt="')[2].partition('"')[0] and set(shown[-1]) == MIMES


@pytest.mark.parametrize("measured", [None, 0.0, float("nan"), Measured(-1.0, "live", "NVIDIA L4")])
def test_without_an_answer_the_guess_stays_sealed(shown, measured):
    asked = seal(ratio())
    asked.reveal(measured)
    assert "your guess of 12× stays sealed" in shown[-1]["text/plain"]
    assert asked.sealed is not None and not asked.sealed.revealed and "<img" not in shown[-1]["text/html"]
