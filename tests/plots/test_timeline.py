"""Timelines: boxes, gaps and the legend, and the part that is looked at."""

from drawn import assert_apart, event, of_gid, profile_of, texts
from matplotlib.colors import to_hex

from labkit import plots, widgets

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


def test_overlapping_events_stand_in_rows_and_a_panel_shows_the_same_figure(capsys):
    profile = two_launches()
    profile.host.append(event("inner", 11, 2))
    boxes = of_gid(plots.timeline(profile, title="t"), "host box")
    assert len({box.get_y() for box in boxes}) == 2
    widgets.timeline(profile, title="t")
    assert "Timeline of host and device: 2 kernels, 3 host events in 150 µs" in capsys.readouterr().out


def test_timeline_tells_live_from_recorded_by_shape_and_in_words():
    looks = []
    for kind in ("live", "recorded"):
        shown = plots.timeline(two_launches(kind=kind), title="t")
        assert f"{kind} on NVIDIA H200, 2026-01-02" in texts(shown)
        assert shown.alt.endswith(f" {kind.capitalize()} on NVIDIA H200, 2026-01-02.")
        boxes = of_gid(shown, "box")
        looks.append({(str(box.get_linestyle()), to_hex(box.get_facecolor())) for box in boxes})
    assert len(looks[0]) == 3 and not looks[0] & looks[1]
