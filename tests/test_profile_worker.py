"""The process that profiles text: what the code finds there, and what is answered."""

import json

import pytest

from labkit import backend, profile_worker, profiles

interpreted = pytest.mark.skipif(
    not backend.interpreting(), reason="Counting launches in place of times needs a machine without a GPU."
)


@interpreted
def test_the_setup_is_there_for_the_text_and_is_not_part_of_the_profile():
    found = profile_worker.answer("x = torch.ones(4, device=device).exp()", "F.relu(x)\nx.sin()")
    again = profiles.Profile.from_json(json.loads(json.dumps(found["profile"])))
    assert [launch.name for launch in again.counted.launches] == ["relu", "sin"]


@interpreted
def test_definitions_of_the_setup_see_each_other():
    found = profile_worker.answer("k = 2\ndef double(x): return x * k", "double(torch.ones(3))")
    names = [launch["name"] for launch in found["profile"]["counted"]["launches"]]
    assert "mul" in names


@pytest.mark.parametrize(
    ("setup", "text", "part", "error"),
    [
        ("x = 1", "y", "text", "NameError: name 'y' is not defined"),
        ("x", "y", "setup", "NameError: name 'x' is not defined"),
        ("", "raise ValueError('first\\nlast')", "text", "ValueError: first\nlast"),
        ("raise SystemExit(2)", "", "setup", "SystemExit: 2"),
    ],
)
def test_what_is_raised_is_answered(setup, text, part, error):
    assert profile_worker.answer(setup, text) == {"part": part, "error": error}
