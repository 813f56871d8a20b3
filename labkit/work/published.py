"""Other people's figures: the files of `labkit/data/published`, with their source in every row."""

import pandas as pd

from labkit import paths


def published(name: str, only: str = "") -> pd.DataFrame:
    """A published table by its name.

    With ``only``, the rows of those series whose name contains it. Every row has kind "published", a device,
    and the source.

    - ``pseudo_linear``: speedups of an elementwise ``x*w+b`` layer over nn.Linear, by width. The thread
      names neither device, dtype nor batch; "graphed" is torch.cuda.make_graphed_callables.
    - ``grouped_conv_3080ti``: times in ms of many small Linears, as a grouped convolution and as one batched
      matmul. Width and groups are "about 100"; rows, direction, and what was repeated how often are not
      given, so the ratio says more than either time.
    - ``rms_norm_l4``: times in ms of the two RMSNorm kernels of a library before (``old_ms``) and after
      (``new_ms``) a rewrite, by (B, T, H), in float32. The pull request's test file takes them by the wall
      clock, over 100 calls that are synchronised one by one and allocate their results. The new backward
      leaves a part of the weight's gradient for each row, and nobody adds these up in the times.
      (512, 128, 512) has no forward times.

    Raises ValueError for a name or a series that there is not.
    """
    files = {file.stem: file for file in sorted(paths.PUBLISHED.glob("*.csv"))}
    if name not in files:
        raise ValueError(f"name: nothing was published as {name!r}; there are {', '.join(files)}")
    # The default engine rounds the last digit of some figures.
    table = pd.read_csv(files[name], engine="python").assign(kind="published")
    chosen = table[table["series"].str.contains(only, regex=False)]
    if chosen.empty:
        raise ValueError(
            f"only: {name!r} has no series with {only!r}; it has {', '.join(table['series'].unique())}"
        )
    return chosen
