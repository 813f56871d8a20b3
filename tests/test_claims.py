import json
import math

import pytest

from labkit import claims
from labkit.claims import Claim, Measured, claim

LIVE = Measured(2.5, "live", "NVIDIA H200")


@pytest.fixture(autouse=True)
def fresh_session(monkeypatch):
    monkeypatch.setattr(claims, "_session", {})
    monkeypatch.delenv(claims.RECORDING, raising=False)


@pytest.mark.parametrize(
    ("value", "holds", "status"),
    [
        (3, True, "held"),
        (3, lambda n: n == 3, "held"),
        (3, lambda n: n > 3, "not held"),
        (LIVE, lambda n: n > 2, "held"),
        (LIVE, False, "not held"),
        (math.nan, True, "not held"),
        (math.inf, lambda n: n > 1, "not held"),
        (Measured(math.nan, "live", "x"), True, "not held"),
        (None, None, "needs a GPU"),
        (None, True, "needs a GPU"),
        (Measured(2.5, "recorded", "x"), True, "needs a GPU"),
        (Measured(2.5, "published", "x"), True, "needs a GPU"),
    ],
)
def test_status(value, holds, status):
    made = claim("It is {value}.", value, holds)
    assert made.status == status
    assert made.mimebundle()[claims.MIME]["status"] == status


def test_number_is_formatted_in_the_sentence():
    assert (
        claim("Fused wins {value:.1f}x; yes, {value:.0f}x.", LIVE, True).sentence
        == "Fused wins 2.5x; yes, 2x."
    )
    assert claim("{value:,d} bytes", 123456, True).sentence == "123,456 bytes"


def test_missing_number_is_a_dash_whatever_its_format():
    assert claim("Fused wins {value:.1f}x.", None).sentence == "Fused wins —x."


def test_recorded_number_is_labelled_and_never_held_here():
    made = claim("{value}x", Measured(2.5, "recorded", "NVIDIA H200"), lambda n: n > 2)
    assert made.note == "recorded on NVIDIA H200, held there"
    assert "recorded on NVIDIA H200" in made.mimebundle()["text/html"]
    assert not str(made).startswith("✓")
    refuted = claim("{value}y", Measured(2.5, "recorded", "NVIDIA H200"), lambda n: n > 3)
    assert refuted.note == "recorded on NVIDIA H200, did not hold there"


@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_bundle_is_json_even_for_numbers_that_json_lacks(value):
    data = claim("It is {value}.", value, True).mimebundle()[claims.MIME]
    assert json.loads(json.dumps(data, allow_nan=False))["value"] is None


def test_html_escapes_and_does_not_rely_on_colour():
    page = claim("<b>{value}</b>", 1, False).mimebundle()["text/html"]
    assert "&lt;b&gt;1&lt;/b&gt;" in page
    assert "not held" in page and "✗" in page


@pytest.mark.parametrize("sentence", ["no number", "{other}", "{value} and {other}", "{}"])
def test_sentence_without_exactly_value_is_refused(sentence):
    with pytest.raises(ValueError, match=r"needs the field \{value\}"):
        claim(sentence, 1, True)


def test_number_without_holds_is_refused():
    with pytest.raises(ValueError, match="holds is missing"):
        claim("{value}", 1)


@pytest.mark.parametrize("value", [1, LIVE, None, Measured(1, "recorded", "x")])
def test_recording_refuses_what_does_not_hold_here(monkeypatch, value):
    monkeypatch.setenv(claims.RECORDING, "1")
    with pytest.raises(AssertionError, match="has to hold"):
        claim("It is {value}.", value, False)


def test_recording_accepts_what_holds(monkeypatch):
    monkeypatch.setenv(claims.RECORDING, "1")
    assert claim("It is {value}.", LIVE, True).status == "held"


def test_summary_counts_and_keeps_the_latest_of_a_repeated_claim():
    claim("A {value}", 1, False)
    claim("B {value}", None)
    claim("A {value}", 2, True)
    table = claims.summary()
    assert [c.sentence for c in table.claims] == ["A 2", "B —"]
    assert str(table).startswith("1 held, 0 not held, 1 need a GPU\n")
    assert table._repr_html_().count("<tr>") == 3
    assert claims.MIME not in table._repr_html_()


def test_outside_jupyter_a_claim_prints_one_line(capsys):
    claim("It is {value}.", LIVE, True)
    assert capsys.readouterr().out == "✓ held: It is 2.5. (measured on NVIDIA H200)\n"


def test_in_a_cell_a_claim_is_shown_once_and_again_when_asked_later():
    from IPython.core.interactiveshell import InteractiveShell
    from IPython.utils.capture import capture_output

    shell = InteractiveShell.instance()
    try:
        with capture_output() as first:
            shell.run_cell(
                "from labkit.claims import claim\nc = claim('It is {value}.', 1, True)\nc", store_history=True
            )
        with capture_output() as later:
            shell.run_cell("c", store_history=True)
    finally:
        InteractiveShell.clear_instance()
    assert [claims.MIME in output.data for output in first.outputs] == [True]
    assert [claims.MIME in output.data for output in later.outputs] == [True]


def test_claims_are_values():
    assert Claim("{value}", 1, "held") == Claim("{value}", 1, "held")
