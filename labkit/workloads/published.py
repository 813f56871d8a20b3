"""Figures that other people published, as data with their source."""

import csv

import pandas as pd

from labkit import paths
from labkit.measure.rows import PUBLISHED

FORUM = 'PyTorch forum, "Surprisingly low performance in pseudo-Linear layer"'
_PSEUDO_LINEAR = {
    "device A, eager": "pseudo_linear_device_a_eager.csv",
    "device B, eager": "pseudo_linear_device_b_eager.csv",
    "device B, graphed": "pseudo_linear_device_b_graphed.csv",
}


BLOG = 'Hugging Face blog, "Profiling in PyTorch", part 2'
_GEGLU_A100 = {
    "width": 768,
    "batch": 8192,
    "hidden": 3072,
    "dtype": "bfloat16",
    "kind": PUBLISHED,
    "device": "NVIDIA A100-SXM4-80GB",
    "source": BLOG,
}

PARALLEL = 'PyTorch forum, "How to speed up small parallel nn.Linear blocks"'
_GROUPED_CONV_3080TI = {
    "width": 100,
    "groups": 100,
    "kind": PUBLISHED,
    "device": "RTX 3080 Ti",
    "source": f"{PARALLEL}, mixed precision",
}

RMS_NORM_PULL = 'PufferLib pull request 466, "Optimize RMS forward/backward kernels"'
_RMS_NORM_L4 = {"forward": "rms_norm_l4_forward.csv", "backward": "rms_norm_l4_backward.csv"}
_RMS_NORM_SERIES = {"original, L4": "original_ms", "optimised, L4": "optimized_ms"}


def published(name: str) -> pd.DataFrame:
    """A published table by its name, one of `TABLES`: `pseudo_linear` and so on say what each holds.

    Every row has kind "published", a device, and the source. ValueError for a name that there is not.
    """
    if name not in TABLES:
        raise ValueError(f"name: nothing was published as {name!r}; there are {', '.join(TABLES)}")
    return TABLES[name]()


def pseudo_linear() -> pd.DataFrame:
    """Published speedups of an elementwise ``x*w+b`` layer over nn.Linear, by width.

    Columns series, width, speedup, kind, device, source. The thread names neither device, dtype nor batch;
    "graphed" is torch.cuda.make_graphed_callables.
    """
    return pd.concat([_series(name, file) for name, file in _PSEUDO_LINEAR.items()], ignore_index=True)


def _series(name: str, file: str) -> pd.DataFrame:
    table = _read(file).astype({"width": int, "speedup": float})
    return table.assign(series=name, kind=PUBLISHED, device=name.split(",")[0], source=FORUM)


def geglu_a100() -> pd.DataFrame:
    """Published kernel times of one forward pass of a GeGLU MLP without bias, as profiled: a row per kernel.

    Columns series, part, us, width, batch, hidden, dtype, kind, device, source. The post gives the GEMMs, in
    hundredths of a millisecond, for the eager run, and says that the same kernels run in the other two; the
    times of eager's own GELU and product it does not give.
    """
    parts = _read("geglu_a100.csv").astype({"us": float})
    fused = [by for by in parts["by"].unique() if by != "cuBLAS"]
    series = [
        parts[parts["by"].isin(["cuBLAS", by])].drop(columns="by").assign(series=f"{by}, A100")
        for by in fused
    ]
    table = pd.concat(series, ignore_index=True).assign(**_GEGLU_A100)
    return table[["series", "part", "us", *_GEGLU_A100]]


def geglu_a100_sums() -> pd.DataFrame:
    """The kernels of :func:`geglu_a100` added up, as points for plots.curves and the sweep panel.

    Columns series, contender (whose colour they have), direction, median_us, width, batch, dtype, kind,
    device, source. No launches and no gaps are in these times. ``hidden`` is 4 * width, the panel's default.
    """
    sums = geglu_a100().groupby([*_GEGLU_A100, "series"], sort=False, as_index=False)["us"].sum()
    contenders = sums["series"].str.removesuffix(", A100")
    table = sums.rename(columns={"us": "median_us"}).drop(columns="hidden")
    return table.assign(contender=contenders, direction="forward", source=f"{BLOG}, kernel times added up")


def grouped_conv_3080ti() -> pd.DataFrame:
    """Published times of many small Linears, as a grouped convolution and as one batched matmul: a row each.

    Columns series, ms, width, groups, kind, device, source. Width and groups are "about 100"; rows,
    direction, and what was repeated how often are not given, so the ratio says more than either time.
    """
    return _read("grouped_conv_3080ti.csv").astype({"ms": float}).assign(**_GROUPED_CONV_3080TI)


def grouped_conv_3080ti_speedup() -> pd.DataFrame:
    """The ratio of :func:`grouped_conv_3080ti`, as a point for plots.speedups and the sweep panel.

    Columns series, width, groups, speedup, kind, device, source.
    """
    conv_ms, batched_ms = grouped_conv_3080ti()["ms"]
    point = {"series": "batched matmul over Conv1d, RTX 3080 Ti", "speedup": conv_ms / batched_ms}
    return pd.DataFrame([point | _GROUPED_CONV_3080TI])


def rms_norm_l4() -> pd.DataFrame:
    """Published times of the two RMSNorm kernels of a library before and after a rewrite, by (B, T, H).

    Columns series, direction, batch, time, width, median_us, kind, device, dtype, source: the series of a
    direction one after the other, in the order of the file. The post gives milliseconds, and neither how they
    were taken nor the dtype: float32 is concluded from what the L4's L2 holds, (512, 64, 128) and not twice
    as much. It says that the original backward kernel had bugs. (512, 128, 512) has no forward times.
    """
    parts = [_rms_norm_times(direction, series) for direction in _RMS_NORM_L4 for series in _RMS_NORM_SERIES]
    return pd.concat(parts, ignore_index=True)


def _rms_norm_times(direction: str, series: str) -> pd.DataFrame:
    table = _read(_RMS_NORM_L4[direction])
    return pd.DataFrame(
        {
            "series": series,
            "direction": direction,
            "batch": table["B"].astype(int),
            "time": table["T"].astype(int),
            "width": table["H"].astype(int),
            # As written, the decimal point moved: 1.021 * 1000 is not 1021.
            "median_us": [float(f"{ms}e3") for ms in table[_RMS_NORM_SERIES[series]]],
            "kind": PUBLISHED,
            "device": "NVIDIA L4",
            "dtype": "float32",
            "source": RMS_NORM_PULL,
        }
    )


def rms_norm_shapes() -> list[dict[str, int]]:
    """The 17 shapes of the backward half of :func:`rms_norm_l4`, as points of a sweep, in its order."""
    table = rms_norm_l4()
    one = table[(table["direction"] == "backward") & (table["series"] == "original, L4")]
    return one[["batch", "time", "width"]].to_dict("records")


def _read(file: str) -> pd.DataFrame:
    """A file's columns as text: pandas would round the last digits."""
    with open(paths.PUBLISHED / file, newline="") as stream:
        return pd.DataFrame(csv.DictReader(stream))


TABLES = {
    table.__name__: table
    for table in (
        pseudo_linear,
        geglu_a100,
        geglu_a100_sums,
        grouped_conv_3080ti,
        grouped_conv_3080ti_speedup,
        rms_norm_l4,
    )
}
