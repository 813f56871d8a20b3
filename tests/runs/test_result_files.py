"""What executing lessons gave, as JSON and as JUnit's XML."""

import json
from xml.etree import ElementTree

import pytest
import stage

from labkit.cli import main
from labkit.runs import result_files
from labkit.runs.execute import Failure, Result


def result(name, not_held=(), failure=None, tmp="x"):
    return Result(name, 1.25, 3, 2, 1, tuple(not_held), failure, tmp, tmp)


FINE = result("01_fine")
WEAK = result("02_weak", ["labkit is 2 times < as fast", 'a "second" one'])
BROKEN = result("03_broken", failure=Failure(4, "1/0", "ZeroDivisionError: division by zero", "a\ntraceback"))


def test_json_has_an_object_for_each_lesson(tmp_path):
    result_files.write_json(tmp_path / "a" / "found.json", [FINE, WEAK, BROKEN])
    fine, weak, broken = json.loads((tmp_path / "a" / "found.json").read_text())
    assert fine == {
        "lesson": "01_fine", "passed": True, "seconds": 1.2, "checks_passed": 3, "claims_held": 2,
        "claims_not_held": [], "claims_need_gpu": 1, "failure": None,
    }  # fmt: skip
    assert weak["claims_not_held"] == list(WEAK.not_held) and weak["passed"]
    assert not broken["passed"] and broken["failure"]["cell"] == 4


@pytest.mark.parametrize("strict", [False, True])
def test_junit_counts_what_failed_and_strict_what_does_not_hold(tmp_path, strict):
    result_files.write_junit(tmp_path / "found.xml", [FINE, WEAK, BROKEN], strict)
    suite = ElementTree.parse(tmp_path / "found.xml").getroot()
    assert (suite.get("tests"), suite.get("errors"), suite.get("failures")) == ("3", "1", str(int(strict)))
    fine, weak, broken = suite
    assert not len(fine) and len(weak) == (2 if strict else 0)
    assert not strict or weak[0].get("message").endswith("does not hold: labkit is 2 times < as fast")
    assert broken[0].get("message") == "cell 4: ZeroDivisionError: division by zero"


@pytest.mark.parametrize(
    ("found", "options", "status"),
    [([FINE, WEAK], [], 0), ([FINE, WEAK], ["--strict"], 1), ([FINE], ["--strict"], 0), ([BROKEN], [], 1)],
)
def test_strict_fails_where_a_claim_does_not_hold(tmp_path, monkeypatch, found, options, status):
    monkeypatch.setattr(main, "_execute", lambda *_: found)
    ran = stage.labkit("run", "01", "--json", str(tmp_path / "found.json"), *options)
    assert ran.exit_code == status, ran.output
    assert len(json.loads((tmp_path / "found.json").read_text())) == len(found)
    assert ("02_weak, does not hold: labkit is 2" in ran.output) == ("--strict" in options and WEAK in found)
