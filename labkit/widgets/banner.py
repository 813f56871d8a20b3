"""The line above a lesson: where its saved outputs are from."""

import html
import json
import os
from pathlib import Path

from IPython.display import HTML

from labkit import backend, gpu, paths
from labkit.lessons import notebooks
from labkit.lessons.stamps import STAMP_VARIABLE, Stamp, read_stamp, recording_state
from labkit.measure import rows


def banner(lesson: str) -> HTML:
    """One line for a lesson's first cell: where its saved outputs are from, and how figures are labelled.

    The GPUs that measured are more than one where a recording went on upon another machine.
    """
    path, being_made = notebooks.resolve(lesson), os.environ.get(STAMP_VARIABLE)
    stamp = Stamp(**json.loads(being_made)) if being_made else None
    if not being_made and recording_state(path).status == "recorded":
        stamp = read_stamp(notebooks.read_json(path))
    origin = "No recorded outputs: what you see was made where the cells were run last."
    if stamp:
        tapes = paths.RECORDED.glob(f"*/{notebooks.lesson_key(lesson)}.jsonl")
        found = [Path(os.environ[rows.TAPE])] if being_made else tapes
        measured = [row for tape in found for row in rows.read_recorded(tape) if row.device == stamp.device]
        cards = {*(row.card for row in measured if row.card), *([gpu.card()] if being_made else [])}
        several = f", on {len(cards)} GPUs of this kind one after the other" if len(cards) > 1 else ""
        origin = (
            f"As saved, the outputs were recorded on {stamp}{several}; cells that you run show your machine."
        )
    how = f" {html.escape(backend.sentence())}" if backend.reason else ""
    kinds = "Every figure says whether it is live (this machine, now), recorded, or published."
    return HTML(f"<p><small>{html.escape(origin)}{how} {kinds}</small></p>")
