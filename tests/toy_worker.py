"""Takes the place of `labkit.worker`: lessons without kernels, suites of one row, a device by name.

A lesson's cells are executed here. The device is called after the variant of the job, or after the GPU that
this process may see. Files in the working folder say what goes wrong.
"""

import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import labkit
from labkit import jobs, lessons, worker
from labkit.jobs import Job, Outcome

JOB = Job.read(Path(sys.argv[1]))
STAMP = {
    "device": f"Toy {JOB.variant or os.environ.get('CUDA_VISIBLE_DEVICES')}",
    "driver": "1",
    "torch": "2",
    "triton": "3",
}
SLUG = "-".join(re.findall(r"[a-z0-9]+", STAMP["device"].lower()))


def run(job, began):
    cells = [cell["source"] for _, cell in lessons.code_cells(lessons.look(Path(job.subject)))]
    os.chdir(Path(job.subject).parent)
    for number, source in enumerate(cells, start=1):
        jobs.say_progress(job, number, len(cells), source.partition("\n")[0])
        exec(source, {})
    return Outcome(job, True, device=STAMP["device"], seconds=1.0)


def execute(path, output, progress=None, *, limit_s, environment):
    """In the place of `runner.execute`: the lesson shows its device and measures one row."""
    import nbformat
    from taped import recorded

    from labkit import places, rows, runner

    notebook = lessons.read(path)
    for number, (_, cell) in enumerate(lessons.code_cells(notebook), start=1):
        cell.outputs = [nbformat.v4.new_output("stream", text=STAMP["device"])]
        cell.execution_count = number
    places.write_text(output, nbformat.writes(notebook))
    rows.append(Path(environment["LABKIT_TAPE"]), recorded(kind="live", **STAMP))
    return runner.Result(path.stem, 1.0, 0, 0, 0, 0, None, output, output.with_suffix(".html"))


def record(job, began):
    from taped import recorded

    from labkit import places, rows, runner

    measured = places.cache() / "roofs" / f"{SLUG}-1-2-3.jsonl"
    machine = SimpleNamespace(
        identity=lambda: SimpleNamespace(**STAMP, slug=SLUG),
        roofs=lambda: rows.write(measured, [recorded(suite="roofs/toy", **STAMP)]),
        cache_path=lambda: measured,
    )
    # in the place of the real ones, which load torch
    sys.modules["labkit.machine"] = labkit.machine = machine
    sys.modules["labkit.device"] = labkit.device = SimpleNamespace(has_gpu=lambda: True)
    runner.execute = execute
    return worker._record(job, began)


def bench(job, began):
    from taped import recorded

    from labkit import rows

    if Path(f"kill {job.subject}").exists():
        Path(f"kill {job.subject}").unlink()
        os.kill(os.getpid(), 9)
    row = recorded(suite=f"bench/{job.subject}", kind="live", **STAMP)
    rows.write(job.home / "rows.jsonl", [row])
    rows.write(job.home / "recorded" / SLUG / "roofs.jsonl", [row])
    return Outcome(job, True, device=STAMP["device"], seconds=1.0)


worker.WORK.update({"run": run, "record": record, "bench": bench})
worker.main()
