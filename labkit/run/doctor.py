"""What this machine is, in seven lines, and what to do about it, in one sentence.

Has to work where the rest of the course does not: nothing is imported at the top that a broken or missing
torch, triton or Jupyter would break.
"""

import importlib
import os
import platform
import re
import shutil
import sysconfig
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

from packaging.version import Version

from labkit import backend, paths

RUN = "make run" if paths.IN_CLONE else "labkit run"
JUPYTER = ("jupyterlab", "ipykernel", "ipywidgets")


@dataclass(frozen=True)
class Facts:
    """What was found on a machine; None is "not there"."""

    system: str = "Linux"
    versions: dict[str, str | None] = field(default_factory=dict)
    """Of torch, triton, numpy and Jupyter's packages."""
    broken: dict[str, str] = field(default_factory=dict)
    """Why a package that is there cannot be imported."""
    triton_wanted: str | None = None
    """The triton that this torch requires; a CPU build of torch requires none."""
    device: str | None = None
    """Name, capability and memory of the GPU that torch can use."""
    reason: str = ""
    """Why kernels are interpreted (`labkit.backend`); empty where they run on the GPU."""
    compiler: str | None = None
    """The C compiler that Triton would call."""
    headers: bool = False
    """Whether Python.h is there."""


def advise(facts: Facts) -> tuple[bool, str]:
    """Whether the lessons run as things are; and what is in the way and what to do, or what to expect."""
    if obstacle := _obstacle(facts):
        return False, obstacle
    if not facts.reason:
        return True, f"Ready: `{RUN}` runs on the GPU."
    why = "" if facts.reason == backend.NO_DRIVER else f", because {facts.reason}"
    return True, (
        f"Ready without a GPU: `{RUN}` interprets the kernels at small sizes{why}. "
        "Figures of time come from recordings."
    )


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
    """The seven lines: what is looked at, and what was found."""
    told = {name: facts.versions.get(name) or "missing" for name in ("torch", "triton", *JUPYTER)}
    told |= {name: f"{told[name]}, broken: {error}" for name, error in facts.broken.items()}
    headers = f"Python.h {'found' if facts.headers else 'missing'} (needed on a GPU)"
    return [
        ("system", f"{facts.system} {platform.machine()}, Python {platform.python_version()}"),
        ("GPU", facts.device or "none that torch can use"),
        ("torch", told["torch"]),
        ("triton", told["triton"]),
        ("kernels", f"interpreted on the CPU: {facts.reason}" if facts.reason else "compiled for the GPU"),
        ("C compiler", f"{facts.compiler or 'missing'}; {headers}"),
        ("Jupyter", ", ".join(f"{name} {told[name]}" for name in JUPYTER)),
    ]


def collect() -> Facts:
    """Look at this machine; nothing is measured, and nothing that is missing or broken is an error."""
    versions = {name: _version(name) for name in ("torch", "triton", "numpy", *JUPYTER)}
    broken = {}
    for name in ("torch", "triton"):
        try:
            versions[name] = str(importlib.import_module(name).__version__)
        except Exception as error:  # a broken binary package raises anything; the report shows it
            if versions[name]:
                broken[name] = f"{type(error).__name__}: {error}".split("\n")[0]
    required = "\n".join(metadata.requires("torch") or []) if _version("torch") else ""
    wanted = re.search(r"^triton==([\w.]+)", required, re.MULTILINE)
    compilers = (shutil.which(name) for name in (os.environ.get("CC"), "gcc", "clang") if name)
    return Facts(
        system=platform.system(),
        versions=versions,
        broken=broken,
        triton_wanted=wanted[1] if wanted else None,
        device=_device() if versions["torch"] and "torch" not in broken else None,
        reason=backend.reason,
        compiler=next(filter(None, compilers), None),
        headers=Path(sysconfig.get_paths()["include"], "Python.h").exists(),
    )


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _device() -> str | None:
    import torch

    if not torch.cuda.is_available():
        return None
    card = torch.cuda.get_device_properties(0)
    return f"{card.name}, capability {card.major}.{card.minor}, {card.total_memory / 2**30:.0f} GiB"
