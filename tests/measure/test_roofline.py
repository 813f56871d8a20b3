"""The copy that stands beside a kernel."""

import pytest
import torch

from labkit.measure import roofline


@pytest.mark.parametrize(
    ("asked", "moved"), [(1, 2**10), (2**10 + 1, 2**11), (2**23 - 2**11,) * 2, (2**23 + 1, 2**23 + 2**21)]
)
def test_both_copies_copy_the_size_rounded_up(asked, moved):
    assert roofline.copied_bytes(asked) == moved
    assert list(roofline.COPIES) == ["Tensor.copy_", "Triton copy"]
    for name, job in roofline.copy_calls(asked).items():
        source, target = job.inputs
        assert source.nbytes + target.nbytes == moved and source.data_ptr() != target.data_ptr()
        if moved < 2**20:
            target.zero_()
            job.call(source, target)
            assert torch.equal(source, target), name
