"""Predictions with real widgets: what a drag, a typed number, the buttons and a new kernel do."""

import html

import pytest

from labkit import guess_figures, guesses, live, places, prediction
from labkit.claims import Measured
from labkit.prediction import predict

L4 = Measured(1.02, "live", "NVIDIA L4")
LONG_AGO = "2026-11-21T10:15:00"


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


def panel_of(asked):
    assert asked.panel is not None
    return asked.panel


def status(asked):
    return html.unescape(panel_of(asked).status.value)


def seal(asked, value="12"):
    panel_of(asked).number.value = value
    panel_of(asked).seal.click()
    return asked


@pytest.mark.usefixtures("nobody")
def test_with_nobody_there_the_question_and_the_answer_stand_alone(shown, monkeypatch, capsys):
    guesses.keep(ratio().question, guesses.Guess(12.0, LONG_AGO))
    asked = ratio()
    page, text = shown[-1]["text/html"], shown[-1]["text/plain"]
    assert asked.panel is None and asked.sealed is None, "it knows no guess of this user"
    assert '<img alt="How many times faster? A logarithmic axis from 0.1× to 1000×.' in page
    assert prediction.BEFORE in page and prediction.BEFORE in text
    asked.reveal(L4)
    said = "How many times faster?\nNo guess was sealed. Measured on NVIDIA L4: 1.02×."
    assert shown[-1]["text/plain"] == said and "<img alt=" in shown[-1]["text/html"]
    monkeypatch.setattr(prediction, "get_ipython", lambda: None)
    asked.reveal(L4)
    assert capsys.readouterr().out == f"{said}\n"


@pytest.mark.usefixtures("nobody")
def test_wrong_arguments_are_named_and_a_name_stands_for_one_question():
    for changes, named in (({"name": ""}, "name"), ({"question": ""}, "question"), ({"low": 20}, "high")):
        with pytest.raises(ValueError, match=rf"^{named}: "):
            predict(**{"name": "the ratio", "question": "Why?", "low": 1, "high": 2} | changes)
    predict("the ratio", "How?", low=1, high=2)  # a refused call has not taken the name
    predict("the ratio", "How?", low=1, high=20)  # the cell was run again
    for name in ("the ratio", "The Ratio!"):  # they would share a file
        with pytest.raises(ValueError, match=r"^name: .* already stands for another question, 'How\?'"):
            predict(name, "Why?", low=1, high=2)


# --- guessing and sealing -------------------------------------------------------------------------


def test_at_first_there_is_no_guess_and_nothing_to_seal(shown):
    asked = crossover()
    panel = panel_of(asked)
    assert shown[0] is panel.box and "<details>" in shown[1]["text/html"], "the twin is folded beneath it"
    assert panel.guess is None and panel.number.value == "" and guess_figures.GUESS not in panel.line.value
    assert panel.seal.disabled and panel.again.layout.display == "none"
    panel.seal.click()
    assert asked.sealed is None and guesses.kept(asked.question) is None
    heading, _, slider, row = panel.box.children
    assert 'role="heading"' in heading.value and "From which width on?" in heading.value
    assert slider is panel.slider and row.children == (panel.number, panel.seal, panel.again, panel.status)
    assert panel.number.description == "Your guess" and 'role="status"' in panel.status.value


def test_a_drag_moves_line_and_number_together(shown):
    asked = ratio()
    panel = panel_of(asked)
    pictures = [w.value for w in panel.box.children[1].children if w is not panel.line]
    panel.slider.value = 11.7489
    assert panel.guess == 12 and panel.number.value == "12"
    assert f"left:{100 * asked.question.place(12):.2f}%" in panel.line.value
    assert not panel.seal.disabled and "12×, not sealed yet" in status(asked)
    assert pictures == [w.value for w in panel.box.children[1].children if w is not panel.line]
    assert guesses.kept(asked.question) is None, "a guess is kept when it is sealed, not before"
    asked.reveal(Measured(1.02, "recorded", "NVIDIA H200"))
    assert "No guess was sealed. Recorded on NVIDIA H200: 1.02×." in shown[-1]["text/plain"]
    ends = panel_of(crossover())
    for end, value in (("max", 32768), ("min", 32)):
        ends.slider.value = 10 ** getattr(ends.slider, end)
        assert ends.guess == value


def test_a_typed_number_moves_the_slider_and_stays_exact():
    panel = panel_of(ratio())
    panel.number.value = "1.2345x"
    assert panel.guess == 1.2345 and panel.slider.value == pytest.approx(1.2345)
    assert panel.number.value == "1.2345x", "nothing is rewritten under the typing hand"
    panel.seal.click()
    assert panel.number.value == "1.23"


@pytest.mark.parametrize(
    ("typed", "said"),
    [("many", "“many” is not a number"), ("1e9", "outside the axis"), ("<img src=x>", "is not a number")],
)
def test_what_cannot_be_a_guess_is_said_and_the_last_guess_stays(typed, said):
    asked = ratio()
    panel = panel_of(asked)
    panel.number.value = "5"
    panel.number.value = typed
    assert said in status(asked) and "<img" not in panel.status.value and panel.guess == 5
    assert panel.seal.disabled, "what is read is not what would be sealed"
    panel.number.value = "6"
    assert said not in status(asked) and not panel.seal.disabled


def test_a_sealed_guess_is_frozen_and_a_new_kernel_finds_it_so(next_kernel, shown):
    first, other = seal(ratio()), crossover()
    assert "Sealed: 12×" in shown[1]["text/plain"] or "Sealed: 12×" in shown[2]["text/plain"]
    again = next_kernel()
    for asked in (first, again):
        panel = panel_of(asked)
        assert panel.slider.disabled and panel.number.disabled and panel.seal.disabled
        assert panel.again.layout.display is None and status(asked).count("Sealed: 12×") == 1
        assert panel.number.value == "12" and panel.slider.value == pytest.approx(12)
    assert again.sealed == first.sealed is not None and "Sealed: 12×" in shown[-1]["text/plain"]
    assert "Your guess stands at 12×." in shown[-1]["text/html"]
    again.reveal(L4)
    assert "You guessed 12×." in shown[-1]["text/plain"]
    assert other.sealed is None and panel_of(other).guess is None, "two questions share nothing"
    assert next_kernel(crossover).sealed is None


def test_a_damaged_file_costs_the_guess_and_not_the_lesson(next_kernel):
    question = seal(ratio()).question
    guesses.path(question).write_text("{")
    again = next_kernel()
    assert again.sealed is None and "could not be read" in status(again)
    seal(again, "7")
    assert guesses.kept(question) == again.sealed


def test_a_folder_that_cannot_be_written_is_said(monkeypatch):
    def refuse(path, text):
        raise PermissionError(f"no writing to {path.name}")

    monkeypatch.setattr(places, "write_text", refuse)
    asked = seal(ratio())
    assert asked.sealed is not None
    assert "only until the kernel restarts" in status(asked) and "no writing" in status(asked)
    asked.reveal(L4)  # must not raise either


# --- guessing again, and the answer ---------------------------------------------------------------


def test_before_the_reveal_a_guess_can_be_reconsidered(next_kernel, shown):
    asked = seal(ratio())
    panel = panel_of(asked)
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
        panel = panel_of(each)
        panel.again.click()
        assert panel.guess is None and panel.number.value == "" and panel.seal.disabled
        assert guess_figures.GUESS not in panel.line.value
        seal(each, "1").reveal(L4)
        assert "Having seen the answer, you guessed 1×." in shown[-1]["text/plain"]


def test_the_reveal_is_static_and_complete(shown):
    seal(ratio()).reveal(L4)
    bundle = shown[-1]
    said = "You guessed 12×. Measured on NVIDIA L4: 1.02×. Your guess was 11.8 times too high."
    assert bundle["text/plain"] == f"How many times faster?\n{said}"
    first, _, rest = bundle["text/html"].partition("\n")
    assert first == "How many times faster?", "what JupyterLab shows of a hidden output"
    assert said in rest and said in rest.partition('<img alt="')[2].partition('"')[0]
    assert set(bundle) == {"text/html", "text/plain"}


@pytest.mark.parametrize("measured", [None, 0.0, float("nan"), Measured(-1.0, "live", "NVIDIA L4")])
def test_without_an_answer_the_guess_stays_sealed(shown, measured):
    asked = seal(ratio())
    asked.reveal(measured)
    assert "your guess of 12× stays sealed" in shown[-1]["text/plain"]
    assert "<img" not in shown[-1]["text/html"]
    assert asked.sealed is not None and not asked.sealed.revealed
    panel_of(asked).again.click()
    assert panel_of(asked).guess == 12
