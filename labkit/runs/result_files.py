"""What executing lessons gave, as files for other programs: JSON, and JUnit's XML for a CI."""

import json
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

from labkit import paths
from labkit.runs.execute import Result


def write_json(path: Path, results: Sequence[Result]) -> None:
    """Write a list with an object for each lesson: seconds, checks, claims, the failure."""
    lessons = [
        {
            "lesson": result.lesson,
            "passed": result.passed,
            "seconds": round(result.seconds, 1),
            "checks_passed": result.checks_passed,
            "claims_held": result.claims_held,
            "claims_not_held": result.not_held,
            "claims_need_gpu": result.claims_need_gpu,
            "failure": vars(result.failure) if result.failure else None,
        }
        for result in results
    ]
    paths.write_text(path, json.dumps(lessons, indent=1, ensure_ascii=False) + "\n")


def write_junit(path: Path, results: Sequence[Result], strict: bool) -> None:
    """Write a test case for each lesson; with ``strict`` a claim that does not hold is a failure."""
    suite = ElementTree.Element("testsuite", name="labkit", tests=str(len(results)))
    for result in results:
        case = ElementTree.SubElement(
            suite, "testcase", classname="lessons", name=result.lesson, time=f"{result.seconds:.1f}"
        )
        if result.failure:
            message = f"cell {result.failure.cell}: {result.failure.message}"
            ElementTree.SubElement(case, "error", message=message).text = result.failure.traceback
        for sentence in result.not_held if strict else ():
            ElementTree.SubElement(case, "failure", message=f"a claim does not hold: {sentence}")
    failures = len(suite.findall("testcase[failure]"))
    suite.set("failures", str(failures))
    suite.set("errors", str(len(suite.findall("testcase[error]"))))
    paths.write_text(path, ElementTree.tostring(suite, encoding="unicode", xml_declaration=True) + "\n")
