"""Kernels at sizes that no memory here holds: what their programs at the corners of the grid do."""

import re

import pytest
from test_judge import LESSONS, found

from labkit import notebooks
from labkit.exercises import judge

VAST = [
    (lesson, name)
    for lesson in LESSONS[5:]  # the first five do not ask for 64 bits
    for name, each in judge.find(lesson).items()
    if each.vast
]


@pytest.mark.parametrize(("lesson", "name"), VAST)
def test_addresses_in_32_bits_are_found_where_the_solution_has_64(lesson, name, tmp_path):
    solution = notebooks.solution_cells(notebooks.resolve(lesson))[name]
    narrow = re.sub(r"\.to\(tl\.int64\)", "", re.sub(r"tl\.cast\((\w+), tl\.int64\)", r"\1", solution))
    finding = found(lesson, name, narrow, tmp_path)
    assert (finding.status, finding.mistake) == ("wrong", "32-bits"), finding
    assert "elements away from any tensor" in finding.observed
