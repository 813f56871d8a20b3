"""What this machine is, in ten lines, and what to do about it, in one sentence.

Has to work where the rest of the course does not: nothing is imported at the top that a broken or missing
torch, triton or Jupyter would break.
"""

import importlib
import os
import platform
import shutil
import subprocess
import sysconfig
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

from labkit import backend, places

TRITON_OF_TORCH = {"2.11": "3.6.0", "2.13": "3.7.1", "2.15": "3.9.0"}
"""For CPU builds of torch, which do not name the triton they belong to."""
ONLY_FOR_LAB = "jupyterlab"
JUPYTER = (ONLY_FOR_LAB, "ipykernel", "ipywidgets")


@dataclass(frozen=True)
class Facts:
    """What was found on a machine; None is "not there"."""

    system: str = "Linux"
    architecture: str = "x86_64"
    python: str = "3.11"
    torch: str | None = None
    torch_error: str = ""
    torch_cuda: str | None = None
    """CUDA version that torch was built for; None for a CPU build."""
    triton: str | None = None
    triton_error: str = ""
    triton_wanted: str | None = None
    """The triton that belongs to this torch, where that is known."""
    numpy: str | None = None
    device: str | None = None
    capability: tuple[int, int] | None = None
    memory_gib: float = 0.0
    driver: str | None = None
    """Of a GPU that nvidia-smi sees, whether torch can use it or not."""
    reason: str = ""
    """Why kernels are interpreted (`labkit.backend`); empty where they run on the GPU."""
    compiler: str | None = None
    headers: bool = False
    roofs: str | None = None
    jupyter: tuple[tuple[str, str | None], ...] = ()
    cache: str = ""
    free_gib: float = 0.0


@dataclass(frozen=True)
class Verdict:
    """What to do. ``ready`` is whether the lessons run as things are."""

    ready: bool
    sentence: str


def verdict(facts: Facts) -> Verdict:
    """The first thing that is in the way, and what to do about it; else what to expect."""
    for judge in (_no_kernels, _not_installed, _mismatch):
        sentence = judge(facts)
        if sentence:
            return Verdict(False, sentence)
    found = _interpreted(facts) if facts.reason else _on_gpu(facts)
    if found.ready and (ONLY_FOR_LAB, None) in facts.jupyter:
        return replace(found, sentence=f"{found.sentence} JupyterLab is missing; only `make lab` needs it.")
    return found


def _no_kernels(facts: Facts) -> str:
    if facts.system == "Linux":
        return ""
    way = "WSL 2" if facts.system == "Windows" else "a Linux container or virtual machine"
    name = "macOS" if facts.system == "Darwin" else facts.system
    return (
        f"Triton has no package for {name}: read the lessons with their recorded figures here, and run them "
        f"in {way}, on a Linux machine, or without a GPU on Binder (README.md says how)."
    )


def _not_installed(facts: Facts) -> str:
    for name, version, error in [
        ("torch", facts.torch, facts.torch_error),
        ("triton", facts.triton, facts.triton_error),
    ]:
        if error and version:
            return f"{name} {version} is installed but cannot be imported ({error}): install it again."
        if version is None:
            wanted = facts.triton_wanted if name == "triton" else None
            package = f"{name}=={wanted}" if wanted else name
            return f"{name} is missing: `make run` sets it up, or `pip install {package}`."
    missing = [name for name, version in facts.jupyter if version is None and name != ONLY_FOR_LAB]
    if missing:
        return f"Missing: {', '.join(missing)}: `make run` sets it up, or `pip install {' '.join(missing)}`."
    return ""


def _mismatch(facts: Facts) -> str:
    wanted = facts.triton_wanted
    if wanted is not None and facts.triton is not None and _plain(facts.triton) != _plain(wanted):
        return (
            f"torch {facts.torch} goes with triton {wanted}, but triton {facts.triton} is installed: "
            f"`pip install triton=={wanted}`."
        )
    return ""


def _interpreted(facts: Facts) -> Verdict:
    if _breaks_interpreter(facts):
        return Verdict(
            False,
            f"Triton {facts.triton} cannot interpret kernels with numpy {facts.numpy}: "
            "`pip install 'numpy<2.4'`.",
        )
    why = "" if facts.reason == backend.NO_DRIVER else f", because {facts.reason}"
    return Verdict(
        True,
        f"Ready without a GPU: `make run` interprets the kernels at small sizes{why}. Figures of time come "
        "from recordings.",
    )


def _on_gpu(facts: Facts) -> Verdict:
    if facts.device is None:
        return Verdict(
            False,
            f"The driver lists a GPU and torch {facts.torch} cannot use it: `python -c 'import torch; "
            "torch.zeros(1).cuda()'` says why. TRITON_INTERPRET=1 goes on without it.",
        )
    if facts.compiler is None or not facts.headers:
        return Verdict(
            False,
            "Triton builds its launcher with a C compiler and Python's headers: install what is missing "
            "(on Debian and Ubuntu: `apt install gcc python3-dev`).",
        )
    if facts.roofs is None:
        return Verdict(
            True, "Ready: `make run` runs on the GPU; `labkit doctor --measure` measures its roofs."
        )
    return Verdict(True, "Ready: `make run` runs the lessons on the GPU.")


def _breaks_interpreter(facts: Facts) -> bool:
    if facts.triton is None or facts.numpy is None:
        return False
    return Version(facts.triton) < Version("3.7") and Version(facts.numpy) >= Version("2.4")


def lines(facts: Facts) -> list[tuple[str, str]]:
    """The ten lines: what is looked at, and what was found."""
    gpu = "none that torch can use"
    if facts.device is not None and facts.capability is not None:
        gpu = f"{facts.device}, capability {_dotted(facts.capability)}, {facts.memory_gib:.0f} GiB"
    wanted = f" (this torch goes with {facts.triton_wanted})" if facts.triton_wanted else ""
    build = f", built for CUDA {facts.torch_cuda}" if facts.torch_cuda else ", CPU build"
    headers = "Python.h found" if facts.headers else "Python.h missing"
    return [
        ("system", f"{facts.system} {facts.architecture}, Python {facts.python}"),
        ("GPU", gpu),
        ("driver", facts.driver or "none found"),
        ("torch", _version(facts.torch, facts.torch_error) + (build if facts.torch else "")),
        ("triton", _version(facts.triton, facts.triton_error) + wanted),
        ("kernels", _kernels(facts)),
        ("C compiler", f"{facts.compiler or 'missing'}; {headers} (needed on a GPU)"),
        ("roofs", facts.roofs or _no_roofs(facts)),
        ("Jupyter", ", ".join(f"{name} {version or 'missing'}" for name, version in facts.jupyter)),
        ("cache", f"{facts.cache}, {facts.free_gib:.0f} GiB free"),
    ]


def _no_roofs(facts: Facts) -> str:
    if facts.reason:
        return "those of a recorded GPU are used"
    return "not measured yet: labkit doctor --measure"


def _kernels(facts: Facts) -> str:
    if facts.triton is None or facts.triton_error:
        return "none can run without triton"
    return f"interpreted on the CPU: {facts.reason}" if facts.reason else "compiled for the GPU"


def _version(version: str | None, error: str) -> str:
    if version is None:
        return "missing"
    return f"{version}, broken: {error}" if error else version


def _plain(version: str) -> str:
    """A version without the build after its plus sign."""
    return Version(version).public


def _dotted(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"


def collect() -> Facts:
    """Look at this machine; nothing is measured, and nothing that is missing or broken is an error."""
    torch, torch_error = _installed("torch")
    triton, triton_error = _installed("triton")
    cuda, device, capability, memory_gib = _torch_gpu() if torch and not torch_error else (None,) * 3 + (0.0,)
    usable = not backend.reason and device is not None and triton is not None and not triton_error
    cache = places.cache()
    return Facts(
        system=platform.system(),
        architecture=platform.machine(),
        python=platform.python_version(),
        torch=torch,
        torch_error=torch_error,
        torch_cuda=cuda,
        triton=triton,
        triton_error=triton_error,
        triton_wanted=wanted_triton(torch, _requirements("torch")),
        numpy=_installed("numpy")[0],
        device=device,
        capability=capability,
        memory_gib=memory_gib,
        driver=_driver(),
        reason=backend.reason,
        compiler=_compiler(),
        headers=Path(sysconfig.get_paths()["include"], "Python.h").exists(),
        roofs=_roofs() if usable else None,
        jupyter=tuple((name, _metadata_version(name)) for name in JUPYTER),
        cache=str(cache),
        free_gib=shutil.disk_usage(_existing(cache)).free / 2**30,
    )


def wanted_triton(torch: str | None, requirements: list[str]) -> str | None:
    """The triton that a torch belongs to: the one it requires, else the one in the table."""
    for requirement in map(Requirement, requirements):
        if requirement.name == "triton":
            exact = [clause.version for clause in requirement.specifier if clause.operator == "=="]
            return exact[0] if exact else None
    if torch is None:
        return None
    release = Version(torch).release
    return TRITON_OF_TORCH.get(f"{release[0]}.{release[1]}")


def _metadata_version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _requirements(package: str) -> list[str]:
    try:
        return metadata.requires(package) or []
    except metadata.PackageNotFoundError:
        return []


def _installed(package: str) -> tuple[str | None, str]:
    """The version of a package, and why it cannot be imported if it cannot."""
    version = _metadata_version(package)
    try:
        importlib.import_module(package)
    except Exception as error:  # a broken binary package raises anything; the report shows it
        return version, f"{type(error).__name__}: {error}".split("\n")[0]
    return version, ""


def _torch_gpu() -> tuple[str | None, str | None, tuple[int, int] | None, float]:
    """torch's CUDA version, and name, capability and memory (GiB) of the GPU that it can use."""
    import torch

    if not torch.cuda.is_available():
        return torch.version.cuda, None, None, 0.0
    properties = torch.cuda.get_device_properties(0)
    capability = (properties.major, properties.minor)
    return torch.version.cuda, properties.name, capability, properties.total_memory / 2**30


def _driver() -> str | None:
    command = shutil.which("nvidia-smi")
    if command is None:
        return None
    query = [command, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=20)
    except subprocess.TimeoutExpired:
        return None
    found = answer.stdout.split()
    return found[0] if answer.returncode == 0 and found else None


def _compiler() -> str | None:
    """The compiler that Triton would call."""
    for name in (os.environ.get("CC"), "gcc", "clang"):
        if name and (found := shutil.which(name)):
            return found
    return None


def _roofs() -> str | None:
    """The cached roofs of this GPU in a line."""
    from labkit import machine

    if not machine.cache_path().exists():
        return None
    roofs = machine.roofs()
    assert roofs is not None, "only a machine without a GPU has no roofs"
    matmul = f"{roofs.matmul['bfloat16'] / 1e12:.0f} TFLOP/s bf16"
    launches = f"launch {roofs.node_us:.1f} µs in a graph, {roofs.host_us:.1f} µs from the host"
    disturbed = f"; while they were measured: {'; '.join(roofs.noise)}" if roofs.noise else ""
    return f"copy {roofs.bandwidth / 1e12:.2f} TB/s, matmul {matmul}, {launches} ({roofs.date}){disturbed}"


def _existing(path: Path) -> Path:
    """The nearest folder above that exists."""
    return next(parent for parent in (path, *path.parents) if parent.exists())
