"""Rows as a recorded device leaves them on a tape."""

from labkit.measure import rows


def recorded(contender="labkit", width=16, us=10.0, **columns):
    what = dict(suite="suite", contender=contender, direction="forward", dtype="float32", clock="graph")
    what |= dict(cache="cold", shape={"batch": 2, "width": width}, min_bytes=256, flops=32, kind="recorded")
    found = dict(median_us=us, p20_us=us * 0.9, p80_us=us * 1.1, runs=40, copy_us=8.0, relative_error=0.0)
    return rows.Row(**(what | found | dict(device="NVIDIA H200", date="2026-01-02") | columns))
