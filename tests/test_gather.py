"""What workers made, put into the tree: toy recordings, and nobody who measures."""

from dataclasses import replace

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output
from taped import recorded

from labkit import gather, lessons, places, record, rows
from labkit.jobs import Job, Outcome


@pytest.fixture
def lesson(tmp_path, monkeypatch):
    """A lesson that is not recorded."""
    monkeypatch.setattr(places, "RECORDED", tmp_path / "recorded")
    path = tmp_path / "01_a.ipynb"
    nbformat.write(new_notebook(cells=[new_markdown_cell("# A"), new_code_cell("print(1)")]), path)
    return path


def job(lesson, device):
    return Job("record", str(lesson), {}, variant=device, build=str(lesson.parent / "build"))


def recording(lesson, device):
    """What a worker on this device leaves of the lesson as it is now."""
    done = job(lesson, device)
    notebook = lessons.read(lesson)
    notebook.cells[1].outputs = [new_output("stream", text=device)]
    notebook.cells[1].execution_count = 1
    stamp = {"hash": lessons.code_hash(lesson), "device": device, "driver": "1", "torch": "2", "triton": "3"}
    notebook.metadata.labkit = {"recorded": {**stamp, "date": "2026-01-02"}}
    places.write_text(done.home / lesson.name, nbformat.writes(notebook))
    places.write_text(done.home / "recorded" / device / "a.jsonl", device)
    return Outcome(done, True, device=device, detail={"lesson": "01_a"})


def edit(lesson, number, source):
    notebook = lessons.read(lesson)
    notebook.cells[number].source = source
    nbformat.write(notebook, lesson)


def shown(lesson):
    return lessons.read(lesson).cells[1].outputs[0].text


def tapes():
    return {tape.parent.name: tape.read_text() for tape in places.RECORDED.rglob("a.jsonl")}


def test_prose_that_was_edited_meanwhile_stays(lesson):
    ended = [recording(lesson, "h100")]
    edit(lesson, 0, "# A, reworded")
    assert gather.recordings(ended) == ([lesson], [])
    assert lessons.read(lesson).cells[0].source == "# A, reworded" and shown(lesson) == "h100"
    assert record.state(lesson).status == "recorded" and lessons.read(lesson).cells[1].execution_count == 1


def test_code_that_was_edited_meanwhile_is_named_once_and_left_alone(lesson):
    ended = [recording(lesson, "h100"), recording(lesson, "a100")]
    edit(lesson, 1, "print(2)")
    assert gather.recordings(ended) == ([], [lesson])
    assert record.state(lesson).status == "no outputs" and not tapes()


def test_the_notebook_shows_the_device_that_was_named_first(lesson):
    assert gather.recordings([recording(lesson, "h100"), recording(lesson, "a100")]) == ([lesson], [])
    assert shown(lesson) == "h100" and tapes() == {"h100": "h100", "a100": "a100"}


def test_the_roofs_of_all_machines_of_a_kind_are_kept(lesson):
    ended = [recording(lesson, "h100") for _ in range(2)]
    jobs = [replace(outcome.job, variant=f"h100 {number}") for number, outcome in enumerate(ended)]
    for hour, job in enumerate(jobs, 10):
        date = f"2026-01-02T{hour}:00:00+00:00"
        rows.write(job.home / "recorded" / "h100" / "roofs.jsonl", [recorded(suite="roofs/copy", date=date)])
    gather.roofs(jobs)
    gather.roofs(jobs)
    kept = rows.read(places.RECORDED / "h100" / "roofs.jsonl")
    assert [row.date[11:13] for row in kept] == ["10", "11"], "each once"


def test_also_where_that_device_had_been_recorded_before(lesson):
    gather.recordings([recording(lesson, "h100")])
    already = Outcome(job(lesson, "h100"), True, device="h100")
    assert gather.recordings([already, recording(lesson, "a100")]) == ([], [])
    assert shown(lesson) == "h100" and tapes() == {"h100": "h100", "a100": "a100"}
