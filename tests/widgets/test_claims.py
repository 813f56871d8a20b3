import json
import math

import pytest
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output

from labkit.measure.results import Measured
from labkit.widgets import claim, claims

LIVE = Measured(2.5, "live", "NVIDIA H200")
RECORDED = Measured(2.5, "recorded", "NVIDIA H200")


@pytest.fixture(autouse=True)
def fresh_session(monkeypatch):
    monkeypatch.setattr(claims, "_session", {})
    monkeypatch.delenv(claims.RECORDING, raising=False)


@pytest.mark.parametrize(
    ("value", "holds", "status"),
    [
        *((3, holds, "held") for holds in (True, lambda n: n == 3)),
        *((3, holds, "not held") for holds in (False, lambda n: n > 3)),
        *(
            (LIVE, lambda n: n > 2, "held"),
            (LIVE, False, "not held"),
            (math.inf, lambda n: n > 1, "not held"),
        ),
        *((value, True, "not held") for value in (math.nan, -math.inf, Measured(math.nan, "live", "x"))),
        *((value, True, "needs a GPU") for value in (None, RECORDED, Measured(2.5, "published", "x"))),
        (None, None, "needs a GPU"),
    ],
)
def test_status_and_that_a_recording_refuses_what_does_not_hold_here(monkeypatch, value, holds, status):
    made = claim("It is {value}.", value, holds)
    data = made.mimebundle()[claims.MIME]
    assert made.status == data["status"] == status
    number = getattr(value, "value", value)
    finite = number is not None and math.isfinite(number)
    assert json.loads(json.dumps(data, allow_nan=False))["value"] == (number if finite else None)
    monkeypatch.setenv(claims.RECORDING, "1")
    if status == "held":
        assert claim("It is {value}.", value, holds).status == "held"
    else:
        with pytest.raises(AssertionError, match="has to hold"):
            claim("It is {value}.", value, holds)


def test_the_number_stands_in_the_sentence_with_its_origin():
    twice = claim("Fused wins {value:.1f}x; yes, {value:.0f}x.", LIVE, True)
    assert twice.sentence == "Fused wins 2.5x; yes, 2x."
    assert claim("{value:,d} bytes", 123456, True).sentence == "123,456 bytes"
    assert claim("Fused wins {value:.1f}x.", None).sentence == "Fused wins —x."
    made = claim("{value}x", RECORDED, lambda n: n > 2)
    assert made.note == "recorded on NVIDIA H200, held there" and not str(made).startswith("✓")
    assert "recorded on NVIDIA H200" in made.mimebundle()["text/html"]
    refuted = claim("{value}y", RECORDED, lambda n: n > 3)
    assert refuted.note == "recorded on NVIDIA H200, did not hold there"
    page = claim("<b>{value}</b>", 1, False).mimebundle()["text/html"]
    assert "&lt;b&gt;1&lt;/b&gt;" in page and "not held" in page and "✗" in page, "not by colour alone"


@pytest.mark.parametrize("sentence", ["no number", "{other}", "{value} and {other}", "{}"])
def test_a_sentence_without_exactly_value_or_a_number_without_holds_is_refused(sentence):
    with pytest.raises(ValueError, match=r"needs the field \{value\}"):
        claim(sentence, 1, True)
    with pytest.raises(ValueError, match="holds is missing"):
        claim("{value}", 1)


def test_summary_counts_and_keeps_the_latest_of_a_repeated_claim():
    for sentence, value, holds in (
        ("A {value}", 1, False),
        ("B {value}", None, None),
        ("A {value}", 2, True),
    ):
        claim(sentence, value, holds)
    table = claims.summary()
    assert [c.sentence for c in table.claims] == ["A 2", "B —"]
    assert str(table).startswith("1 held, 0 not held, 1 need a GPU\n")
    assert table._repr_html_().count("<tr>") == 3 and claims.MIME not in table._repr_html_()


def test_a_claim_is_printed_or_in_a_cell_shown_once(capsys):
    claim("It is {value}.", LIVE, True)
    assert capsys.readouterr().out == "✓ held: It is 2.5. (measured on NVIDIA H200)\n"
    shell = InteractiveShell.instance()
    cell = "from labkit.widgets import claim\nclaim('It is {value}.', 1, True)"
    try:
        with capture_output() as shown:
            shell.run_cell(cell, store_history=True)
        assert [claims.MIME in output.data for output in shown.outputs] == [True]
    finally:
        InteractiveShell.clear_instance()
