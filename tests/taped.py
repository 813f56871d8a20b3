"""Rows as a recorded device leaves them on a tape."""

from dataclasses import replace

from labkit.measure import rows


def recorded(contender="labkit", width=16, us=10.0, **columns):
    row = rows.Row(
        suite="suite",
        contender=contender,
        direction="forward",
        dtype="float32",
        shape={"batch": 2, "width": width},
        clock="graph",
        cache="cold",
        median_us=us,
        p20_us=us * 0.9,
        p80_us=us * 1.1,
        runs=40,
        min_bytes=256,
        flops=32,
        copy_us=8.0,
        relative_error=0.0,
        kind="recorded",
        device="NVIDIA H200",
        date="2026-01-02",
    )
    return replace(row, **columns)
