"""What the lessons of the old course claim where there is no GPU: what is counted, and never a time."""

import pytest
from operators import INTERPRETED

from labkit.lessons import notebooks

CLAIMS = {"08": (2, 6), "09": (0, 7)}
"""How many hold and how many need a GPU."""
LESSONS = [path for path in notebooks.find() if path.parent.name == "old"]


@INTERPRETED
@pytest.mark.parametrize("path", LESSONS, ids=lambda path: path.stem)
def test_no_time_is_claimed_without_a_gpu(executed, path):
    result = executed(path)
    assert result.passed, result.failure
    found = result.claims_held, result.claims_need_gpu
    assert result.not_held == () and found == CLAIMS[path.stem[:2]]
