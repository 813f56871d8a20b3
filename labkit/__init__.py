"""Helpers of the course: measure, check, inspect and draw GPU kernels."""

import sys

from labkit import backend

__version__ = "0.1.0"

backend.decide()

# nbformat imports jsonschema, and that a grammar of IRIs, which takes a second in every process and which no
# notebook is checked with. jsonschema does without a module that cannot be imported.
sys.modules.setdefault("rfc3987_syntax", None)  # type: ignore[arg-type]
