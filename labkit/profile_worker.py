"""Profiles code in a process of its own: ``python -m labkit.profile_worker FOLDER``.

``job.json`` in the folder has the code, ``setup`` and ``text``; the profile, or what the code raised, goes to
``answer.json``. See :func:`labkit.profiles.profile_text`.
"""

import json
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional

from labkit import device, profiles


def answer(setup: str, text: str) -> dict[str, Any]:
    """``profile``, or ``error``, the last line of the traceback, with the ``part`` that raised."""
    namespace = {"torch": torch, "F": torch.nn.functional, "device": device.name()}
    part = "setup"
    try:
        exec(compile(setup, "<setup>", "exec"), namespace)
        part = "text"
        code = compile(text, "<text>", "exec")
        return {"profile": profiles.profile(lambda: exec(code, namespace)).to_json()}
    except BaseException as error:  # SystemExit too: whatever it is, the code raised it
        return {"part": part, "error": traceback.format_exception_only(error)[-1].strip()}


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    job = json.loads((folder / "job.json").read_text(encoding="utf-8"))
    found = answer(job["setup"], job["text"])
    (folder / "answer.json").write_text(json.dumps(found), encoding="utf-8")
