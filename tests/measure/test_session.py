"""Points and their inputs, what is wrong with a way, the copy beside it."""

import pytest
import torch

from labkit import work
from labkit.measure import clocks, copies, session


def test_a_number_among_the_inputs_is_handed_on_as_it_is():
    given = session.drawn(work.gelus, {"batch": 2, "width": 3, "gelus": 2}, torch.bfloat16, "forward")
    assert (given[0].shape, given[0].dtype, given[1]) == ((2, 3), torch.bfloat16, 2)
    assert clocks.timed_call(work.gelus.reference, given, "forward").inputs[1] == 2
    right = session.Way("right", work.gelus.reference, work.gelus)
    wrong = session.Way("wrong", lambda x, gelus: work.gelus.reference(x, gelus - 1), work.gelus)
    assert session.what_is_wrong(right, given, "forward", 1.6e-2) == ""
    assert session.what_is_wrong(wrong, given, "forward", 1.6e-2).startswith("wrong result")


def test_a_gradient_is_wrong_though_the_result_is_right():
    given = session.drawn(work.affine, {"batch": 70, "width": 3}, torch.float32, "backward")
    wrong = session.Way("wrong", lambda x, w, b: x * w + 2 * b - b.detach(), work.affine)
    assert session.what_is_wrong(wrong, given, "forward", 1e-4) == ""
    assert session.what_is_wrong(wrong, given, "backward", 1e-4).startswith("wrong result")


@pytest.mark.parametrize("direction", ["forward", "backward", "forward_backward"])
def test_where_rows_need_each_other_all_of_them_are_compared(direction):
    given = session.drawn(work.gru_by_time, {"batch": 2, "time": 70, "width": 3}, torch.float32, direction)
    right = session.Way("right", work.gru_by_time.reference, work.gru_by_time)
    last = torch.cat([torch.ones(69, 1, 1), torch.full((1, 1, 1), 1.1)])

    def at_the_last_step(x, *weights):
        return last.to(x.device) * work.gru_by_time.reference(x, *weights)

    wrong = session.Way("wrong", at_the_last_step, work.gru_by_time)
    assert session.what_is_wrong(right, given, direction, 1e-4) == ""
    assert session.what_is_wrong(wrong, given, direction, 1e-4).startswith("wrong result")


def test_tf32_is_off_while_a_point_is_measured_and_as_it_was_afterwards(gpu):
    seen, matmul = [], torch.backends.cuda.matmul

    def call(x, w, b):
        seen.append(matmul.allow_tf32)
        gpu.launch(1.0, 5.0)
        return x * w + b

    before, matmul.allow_tf32 = matmul.allow_tf32, True
    try:
        (point,) = session.points("title", {"one": call}, work.affine, {"batch": 2, "width": 8})
        (row,) = session.Session().measure(point)
        assert row.median_us and not any(seen) and matmul.allow_tf32
    finally:
        matmul.allow_tf32 = before


def test_a_row_stands_beside_the_faster_copy(gpu):
    def call(x, w, b):
        gpu.launch(1.0, 5.0)
        return x * w + b

    (point,) = session.points("title", {"one": call}, work.affine, {"batch": 2, "width": 8})
    (row,) = session.Session().measure(point)
    assert row.copy_us == pytest.approx(work.affine.min_bytes(point.axes, 4, "forward") / 10, rel=0.1)


@pytest.mark.parametrize(
    ("asked", "moved"), [(1, 2**10), (2**10 + 1, 2**11), (2**23 - 2**11,) * 2, (2**23 + 1, 2**23 + 2**21)]
)
def test_both_copies_copy_the_size_rounded_up(asked, moved):
    assert copies.copied_bytes(asked) == moved
    assert list(copies.COPIES) == ["Tensor.copy_", "Triton copy"]
    for name, job in copies.calls(asked).items():
        source, target = job.inputs
        assert source.nbytes + target.nbytes == moved and source.data_ptr() != target.data_ptr()
        if moved < 2**20:
            target.zero_()
            job.call(source, target)
            assert torch.equal(source, target), name


def test_points_are_the_combinations_of_sizes_and_options_and_a_way_needs_a_work():
    ways = {"own": (work.linear.reference, work.linear), "given": work.affine.reference}
    how = {"clock": ["host", "graph"], "width": [8, 16], "batch": 4}
    found = session.points("t", ways, work.affine, how)
    assert [(point.axes, point.clock) for point in found] == [
        ({"width": width, "batch": 4}, clock) for width in (8, 16) for clock in ("host", "graph")
    ]
    assert [(way.name, way.work) for way in found[0].ways] == [("own", work.linear), ("given", work.affine)]
    with pytest.raises(ValueError, match="ways: 'given' has no work"):
        session.points("t", ways, None, how)
