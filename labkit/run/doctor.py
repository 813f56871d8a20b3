"""What this machine is, in nine lines, and what to do about it, in one sentence.

Has to work where the rest of the course does not: nothing is imported at the top that a broken or missing
torch, triton or Jupyter would break.
"""

import importlib
import os
import platform
import re
import shutil
import subprocess
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from packaging.version import Version

from labkit import backend, paths

TRITON_OF_TORCH = {"2.11": "3.6.0", "2.13": "3.7.1", "2.15": "3.9.0"}
"""For CPU builds of torch, which do not name the triton they belong to."""
RUN = "make run" if paths.IN_CLONE else "labkit run"
ABOUT_ITS_GPU = {
    "Colab": "For an L4 or an A100: Runtime > Change runtime type.",
    "Kaggle": "For a GPU: Settings > Accelerator.",
    "WSL": "If this machine has an NVIDIA GPU: install its driver in Windows, not in WSL.",
}
JUPYTER = ("jupyterlab", "ipykernel", "ipywidgets")


@dataclass(frozen=True)
class Facts:
    """What was found on a machine; None is "not there"."""

    system: str = "Linux"
    place: str = ""
    """Colab, Kaggle, Binder or WSL; empty for any other machine."""
    versions: dict[str, str | None] = field(default_factory=dict)
    """Of torch, triton, numpy and Jupyter's packages."""
    broken: dict[str, str] = field(default_factory=dict)
    """Why a package that is there cannot be imported."""
    triton_wanted: str | None = None
    """The triton that belongs to this torch, where that is known."""
    device: str | None = None
    """Name, capability and memory of the GPU that torch can use."""
    reason: str = ""
    """Why kernels are interpreted (`labkit.backend`); empty where they run on the GPU."""
    compiler: str | None = None
    """The C compiler that Triton would call."""
    headers: bool = False
    """Whether Python.h is there."""


class Advice(NamedTuple):
    """What to do. ``ready`` is whether the lessons run as things are."""

    ready: bool
    sentence: str


def advise(facts: Facts) -> Advice:
    """The first thing that is in the way, and what to do about it; else what to expect."""
    if obstacle := _obstacle(facts):
        return Advice(False, obstacle)
    hosted = facts.place in ("Colab", "Kaggle")
    run = "the lesson" if hosted else f"`{RUN}`"
    if facts.reason:
        why = "" if facts.reason == backend.NO_DRIVER else f", because {facts.reason}"
        sentence = (
            f"Ready without a GPU: {run} interprets the kernels at small sizes{why}. "
            "Figures of time come from recordings."
        )
        if facts.reason == backend.NO_DRIVER and facts.place in ABOUT_ITS_GPU:
            sentence += f" {ABOUT_ITS_GPU[facts.place]}"
    else:
        sentence = f"Ready: {run} runs on the GPU."
    if hosted:
        return Advice(True, sentence)
    if facts.versions.get("jupyterlab") is None:
        sentence += " JupyterLab is missing; only `labkit lab` needs it."
    return Advice(True, sentence)


def _obstacle(facts: Facts) -> str:
    """What keeps the lessons from running, and what to do; empty where nothing does."""
    if facts.system != "Linux":
        name = "macOS" if facts.system == "Darwin" else facts.system
        way = "WSL 2" if facts.system == "Windows" else "a Linux container or virtual machine"
        return (
            f"Triton has no package for {name}: read the lessons with their recorded figures here, and run "
            f"them in {way}, on a Linux machine, or without a GPU on Binder (docs/installing.md says how)."
        )
    versions, wanted = facts.versions, facts.triton_wanted
    for name in ("torch", "triton", *JUPYTER[1:]):
        if versions.get(name) is None:
            package = f"triton=={wanted}" if name == "triton" and wanted else name
            return f"{name} is missing: `pip install {package}`, or in a clone `make setup`."
        if name in facts.broken:
            error = facts.broken[name]
            return f"{name} {versions[name]} is installed but cannot be imported ({error}): install it again."
    triton = Version(versions["triton"] or "0")
    if wanted is not None and triton.public != Version(wanted).public:
        return (
            f"torch {versions['torch']} goes with triton {wanted}, but triton {triton} is installed: "
            f"`pip install triton=={wanted}`."
        )
    numpy = Version(versions.get("numpy") or "0")
    if facts.reason and triton < Version("3.7") and numpy >= Version("2.4"):
        return f"Triton {triton} cannot interpret kernels with numpy {numpy}: `pip install 'numpy<2.4'`."
    if not facts.reason and facts.device is None:
        return (
            f"The driver lists a GPU and torch {versions['torch']} cannot use it: `python -c 'import torch; "
            "torch.zeros(1).cuda()'` says why. TRITON_INTERPRET=1 goes on without it."
        )
    if not facts.reason and not (facts.compiler and facts.headers):
        return (
            "Triton builds its launcher with a C compiler and Python's headers: install what is missing "
            "(on Debian and Ubuntu: `apt install gcc python3-dev`)."
        )
    return ""


def lines(facts: Facts) -> list[tuple[str, str]]:
    """The nine lines: what is looked at, and what was found."""

    def told(name: str) -> str:
        broken = f", broken: {facts.broken[name]}" if name in facts.broken else ""
        return f"{facts.versions.get(name) or 'missing'}{broken}"

    place = f" ({facts.place})" if facts.place else ""
    built = backend.installed_torch()
    build = f"built for CUDA {built.cuda}" if built and built.cuda else "CPU build"
    wanted = f" (this torch goes with {facts.triton_wanted})" if facts.triton_wanted else ""
    kernels = f"interpreted on the CPU: {facts.reason}" if facts.reason else "compiled for the GPU"
    if facts.versions.get("triton") is None or "triton" in facts.broken:
        kernels = "none can run without triton"
    headers = f"Python.h {'found' if facts.headers else 'missing'} (needed on a GPU)"
    return [
        ("system", f"{facts.system}{place} {platform.machine()}, Python {platform.python_version()}"),
        ("GPU", facts.device or "none that torch can use"),
        ("driver", _driver() or "none found"),
        ("torch", f"{told('torch')}, {build}" if built else told("torch")),
        ("triton", told("triton") + wanted),
        ("kernels", kernels),
        ("C compiler", f"{facts.compiler or 'missing'}; {headers}"),
        ("Jupyter", ", ".join(f"{name} {told(name)}" for name in JUPYTER)),
        ("cache", str(paths.cache())),
    ]


def collect() -> Facts:
    """Look at this machine; nothing is measured, and nothing that is missing or broken is an error."""
    versions = {name: _version(name) for name in ("numpy", *JUPYTER)}
    broken = {}
    for name in ("torch", "triton"):
        try:
            versions[name] = str(importlib.import_module(name).__version__)
        except Exception as error:  # a broken binary package raises anything; the report shows it
            versions[name] = _version(name)
            if versions[name]:
                broken[name] = f"{type(error).__name__}: {error}".split("\n")[0]
    device = _device() if versions["torch"] and "torch" not in broken else None
    compilers = (shutil.which(name) for name in (os.environ.get("CC"), "gcc", "clang") if name)
    return Facts(
        system=platform.system(),
        place=_place(os.environ, platform.release()),
        versions=versions,
        broken=broken,
        triton_wanted=_wanted_triton(versions["torch"]),
        device=device,
        reason=backend.reason,
        compiler=next(filter(None, compilers), None),
        headers=Path(sysconfig.get_paths()["include"], "Python.h").exists(),
    )


def _place(environment: Mapping[str, str], kernel: str) -> str:
    """Whose machine this is, by its variables, or the name of its Linux kernel."""
    marks = {"COLAB_RELEASE_TAG": "Colab", "KAGGLE_KERNEL_RUN_TYPE": "Kaggle", "BINDER_LAUNCH_HOST": "Binder"}
    found = [place for name, place in marks.items() if name in environment]
    found += ["WSL"] if "microsoft" in kernel.lower() else []
    return found[0] if found else ""


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _wanted_triton(torch: str | None) -> str | None:
    """The triton that a torch belongs to: the one it requires, else the one in the table."""
    required = metadata.requires("torch") if _version("torch") else None
    if named := re.search(r"^triton==([\w.]+)", "\n".join(required or []), re.MULTILINE):
        return named[1]
    return TRITON_OF_TORCH.get(".".join((torch or "").split(".")[:2]))


def _device() -> str | None:
    import torch

    if not torch.cuda.is_available():
        return None
    card = torch.cuda.get_device_properties(0)
    return f"{card.name}, capability {card.major}.{card.minor}, {card.total_memory / 2**30:.0f} GiB"


def _driver() -> str | None:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return next(iter(answer.stdout.split()), None)
