"""Profiles and tables that figures are drawn from in tests."""

from types import SimpleNamespace

from labkit import rows

WIDTHS = [128, 256, 512, 1024, 2048, 4096, 8192, 16384]
H200 = "NVIDIA H200"


def row(contender, width, median, **changes):
    shape = {"batch": changes.pop("batch", 32768), "width": width}
    values = dict(suite="affine", contender=contender, direction="forward", dtype="bf16", shape=shape)
    values |= dict(clock="graph", cache="cold", median_us=median, runs=100, relative_error=None)
    values |= dict(p20_us=median and median * 0.98, p80_us=median and median * 1.02, flops=0)
    values |= dict(min_bytes=4 * 32768 * width, copy_us=median and 0.03 * width)
    return rows.Row(**(values | dict(device=H200, date="2026-11-20T12:00:00") | changes))


def layers(**changes):
    """A matmul that wins when narrow, an elementwise layer that wins when wide."""
    times = {"nn.Linear": lambda width: max(9.0, width**2 / 1e4), "labkit": lambda width: 10 + 0.031 * width}
    return [row(name, width, us(width), **changes) for width in WIDTHS for name, us in times.items()]


def event(name, start, took):
    return SimpleNamespace(name=name, start_us=start, duration_us=took)


def profile_of(host, kernels, **stamp):
    given = {"kind": "live", "device": "NVIDIA H200", "date": "2026-01-02T03:04:05+00:00", **stamp}
    return SimpleNamespace(host=host, kernels=kernels, **given)
