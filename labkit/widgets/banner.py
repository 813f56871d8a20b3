"""The line above a lesson: where its saved outputs are from."""

import html
import json
import os

from IPython.display import HTML

from labkit import backend
from labkit.lessons import notebooks
from labkit.lessons.stamps import STAMP_VARIABLE, Stamp, read_stamp, recording_state


def banner(lesson: str) -> HTML:
    """One line for a lesson's first cell: where its saved outputs are from, and how figures are labelled."""
    path, being_made = notebooks.resolve(lesson), os.environ.get(STAMP_VARIABLE)
    stamp = Stamp(**json.loads(being_made)) if being_made else None
    if not being_made and recording_state(path).status == "recorded":
        stamp = read_stamp(notebooks.read_json(path))
    origin = "No recorded outputs: what you see was made where the cells were run last."
    if stamp:
        origin = f"As saved, the outputs were recorded on {stamp}; cells that you run show your machine."
    how = f" {html.escape(backend.sentence())}" if backend.reason else ""
    kinds = "Every figure says whether it is live (this machine, now), recorded, or published."
    return HTML(f"<p><small>{html.escape(origin)}{how} {kinds}</small></p>")
