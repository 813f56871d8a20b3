"""Timelines: boxes, gaps and the legend, and the part that is looked at."""

import pytest
from drawn import assert_apart, event, of_gid, profile_of, texts
from matplotlib.colors import to_hex

from labkit import plots

NOTHING = "nothing measured yet"


def two_launches(**stamp):
    """Kernels at 100 to 115 and 140 to 150 us after the first launch."""
    host = [event("first_launch", 10, 6), event("second_launch", 20, 6)]
    return profile_of(host, [event("early_kernel", 110, 15), event("late_kernel", 150, 10)], **stamp)


def test_timeline_shows_boxes_gaps_and_a_legend():
    host = [event("aten::mul", 100, 14), event("cudaLaunchKernel", 105, 6)]
    kernels = [event("affine_forward", 110, 15), event("cat_kernel", 150, 1.5)]
    shown = plots.timeline(profile_of(host, kernels), title="t")
    said = texts(shown)
    assert {"host", "device", "aten::mul", "affine_forward", "25 µs idle"} <= set(said)
    assert {"cat_kernel, 1.5 µs", "host: aten::mul, 14 µs, cudaLaunchKernel, 6 µs"} <= set(said)
    assert "2 kernels, 2 host events in 51.5 µs; device busy 16.5 µs (32%)" in shown.alt
    assert "Longest gap between kernels 25 µs" in shown.alt
    assert_apart(of_gid(shown, "label"), shown)
    kernels = [event(f"kernel_{i % 17}", 5.0 * i, 1.0) for i in range(200)]
    many = plots.timeline(profile_of([], kernels), title="t")
    assert {"kernel_7, 12 calls, 12 µs in all", "9 more kernels"} <= set(texts(many))
    hues = {to_hex(box.get_edgecolor()) for box in of_gid(many, "device box")}
    assert len(hues) == 9, "a colour for each kernel that the legend names, and one for all others"


def test_a_timeline_of_nothing_says_so():
    empty = plots.timeline(profile_of([], []), title="t").alt
    assert NOTHING in empty and "H200" not in empty, "what is not there is from nowhere"


def test_timeline_window_cuts_at_its_edges_and_says_so():
    profile = two_launches()
    profile.host.append(event("inner", 11, 2))  # a second row of the host
    whole, shown = (plots.timeline(profile, title="t", window=window) for window in (None, (95, 145)))
    (ax,), (other,), said = shown.figure.axes, whole.figure.axes, texts(shown)
    assert ax.get_xlim() == (95, 145) and {"early_kernel", "25 µs idle"} <= set(said)
    assert "late_kernel" not in said and "late_kernel, 10 µs" in said, "cut to half, but as long as before"
    assert "first_launch" not in said, "it lies before the window"
    summary = "95 to 145 µs of 150 µs: 2 kernels, 0 host events; device busy 20 µs (40%)"
    assert summary in said and f"zoomed in: {summary}" in shown.alt
    assert ax.get_ylim() == other.get_ylim(), "nothing moves up or down"
    inside = plots.timeline(two_launches(), title="t", window=(120, 130))
    assert "25 µs idle" in texts(inside) and NOTHING not in texts(inside) and "0 kernels" in inside.alt
    for window in ((5, 5), (6, 5), (float("nan"), 5), (0, float("inf"))):
        with pytest.raises(ValueError, match=r"^window: .* is empty"):
            plots.timeline(profile, title="t", window=window)


def test_timeline_tells_live_from_recorded_by_shape_and_in_words():
    looks = []
    for kind in ("live", "recorded"):
        shown = plots.timeline(two_launches(kind=kind), title="t")
        assert f"{kind} on NVIDIA H200, 2026-01-02" in texts(shown)
        assert shown.alt.endswith(f" {kind.capitalize()} on NVIDIA H200, 2026-01-02.")
        boxes = of_gid(shown, "box")
        looks.append({(str(box.get_linestyle()), to_hex(box.get_facecolor())) for box in boxes})
    assert len(looks[0]) == 3 and not looks[0] & looks[1]
