"""Sets up what a command needs, then runs it: the logic behind the Makefile.

    python3 labkit/bootstrap.py setup
    python3 labkit/bootstrap.py run -m labkit run 01

The first word says what will be done (see ``NEEDS``), the rest goes to the Python of the environment.

This file runs before anything is installed: it uses the standard library only, imports of labkit no more
than ``backend.py``, and still runs on Python 3.8, so that an old Python gets a sentence instead of a syntax
error.

Environment variables: ``ENV=current`` uses the present environment and installs nothing; ``TORCH=2.11`` or
``TORCH=2.15`` takes the oldest or the newest supported torch; ``IPYKERNEL=6.31`` the older supported
ipykernel, on top of it; ``PYTHON`` names the interpreter that the virtual environment is made of.
"""

from __future__ import annotations

import errno
import hashlib
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import NoReturn

try:
    import fcntl
except ImportError:  # Windows: two set-ups at the same time are then the user's to avoid
    fcntl = None  # type: ignore[assignment]

ROOT = Path(__file__).resolve().parent.parent
PYTHONS = ((3, 11), (3, 14))  # the oldest and the newest Python that torch and Triton both have wheels for
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
STAMP = "labkit-setup.json"
UNFINISHED = "unfinished"  # the stamp's text from the creation of an environment until it is complete

TORCHES = {  # TORCH=...: constraints file, folder of the virtual environment
    "2.13": ("constraints.txt", ".venv"),
    "2.11": ("constraints-torch211.txt", ".venv-torch211"),
    "2.15": ("constraints-torch215.txt", ".venv-torch215"),
}
IPYKERNELS = {"6.31": "6.31.0"}  # IPYKERNEL=...: the version that is installed

# What has to be importable in the present environment (ENV=current), by what is to be done.
BASE = ("click", "rich", "packaging")
JUPYTER = ("IPython", "ipykernel", "nbformat", "nbclient", "nbconvert", "papermill")
RUN = (*BASE, *JUPYTER, "torch", "triton", "numpy", "pandas", "matplotlib", "PIL")
NEEDS = {
    "setup": (),
    "doctor": BASE,
    "run": RUN,
    "record": RUN,
    "bench": RUN,
    "slides": RUN,
    "site": RUN,
    "test": (*RUN, "pytest", "xdist", "pytest_timeout", "nbval", "psutil"),
    "lab": (*RUN, "jupyterlab", "ipywidgets"),
    "lint": ("ruff", "mypy"),
}
DISTRIBUTIONS = {  # where the name differs from the module's
    "PIL": "pillow",
    "IPython": "ipython",
    "xdist": "pytest-xdist",
    "pytest_timeout": "pytest-timeout",
}


NOT_WRITTEN = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM)


def stop(sentence: str) -> NoReturn:
    """Ends with exit status 2 and one sentence on stderr."""
    print("labkit: " + sentence, file=sys.stderr)
    raise SystemExit(2)


def say(text: str) -> None:
    print("labkit: " + text, flush=True)


# ---- the machine ----------------------------------------------------------------------------------------


def load_backend() -> ModuleType:
    """``labkit/backend.py``, without labkit: that is imported in the environment that is yet to come."""
    spec = importlib.util.spec_from_file_location("labkit_backend", Path(__file__).with_name("backend.py"))
    assert spec is not None and spec.loader is not None, "a .py file always has a loader"
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def has_gpu() -> bool:
    """Whether a CUDA build of torch could use a GPU of this machine."""
    return bool(load_backend().is_nvidia_here())


def pins(file: Path) -> dict[str, str]:
    """The exact versions in a constraints file, by distribution name."""
    lines = (line.partition("#")[0].strip() for line in file.read_text().splitlines())
    return dict(line.split("==") for line in lines if line)


def python_version(python: str, modules: str = "sys") -> tuple[int, ...] | None:
    """Major and minor version of an interpreter; None where it does not run or lacks one of the modules."""
    code = f"import {modules}; import sys; print(*sys.version_info[:2])"
    try:
        ran = subprocess.run([python, "-I", "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    except OSError:
        return None
    return tuple(int(part) for part in ran.stdout.split()) if ran.returncode == 0 else None


def supported(version: tuple[int, ...] | None) -> bool:
    """Whether torch and Triton have wheels for this Python."""
    return version is not None and PYTHONS[0] <= version <= PYTHONS[1]


def makes_environments(python: str) -> bool:
    """Whether an interpreter is a supported one with all of the venv module (Debian splits off a part)."""
    return supported(python_version(python, "venv, ensurepip"))


def base_python() -> str:
    """The interpreter to make an environment of: $PYTHON, else this one, else the newest on the PATH."""
    oldest, newest = (".".join(map(str, version)) for version in PYTHONS)
    span = f"Python {oldest} to {newest} with the venv module"
    chosen = os.environ.get("PYTHON")
    if chosen:
        if not makes_environments(chosen):
            stop(f"PYTHON={chosen} is not {span}.")
        return chosen
    minors = range(PYTHONS[1][1], PYTHONS[0][1] - 1, -1)
    for python in [sys.executable, *(f"python3.{minor}" for minor in minors)]:
        if makes_environments(python):
            return python
    stop(
        f"{span} is needed; this is {platform.python_version()}, and no other was found. Install one "
        "(on Debian and Ubuntu with python3-venv), or name it: PYTHON=/path/to/python3.12"
    )


# ---- the virtual environment -----------------------------------------------------------------------------


class Setup:
    """The virtual environment of a checkout: what it should be, what it is, and how it gets there."""

    def __init__(
        self, root: Path = ROOT, torch: str = "2.13", suffix: str = "", for_tests: bool = False
    ) -> None:
        self.root, self.torch, self.for_tests = root, torch, for_tests
        constraints, folder = TORCHES[torch]
        self.constraints = root / constraints
        self.venv = root / (folder + suffix)
        self.bin = self.venv / ("Scripts" if os.name == "nt" else "bin")
        self.python = self.bin / ("python.exe" if os.name == "nt" else "python")
        self.stamp = self.venv / STAMP
        self.log = self.venv / "labkit-setup.log"

    def sources(self) -> str:
        """A hash of the files that say what is installed and how."""
        digest = hashlib.sha256()
        for file in (self.root / "pyproject.toml", self.constraints, Path(__file__)):
            digest.update(file.read_bytes() + b"\0")
        return digest.hexdigest()

    def installed(self) -> dict[str, str]:
        """What the stamp says; empty without a readable one."""
        try:
            stamp = json.loads(self.stamp.read_text())
        except (OSError, ValueError):
            return {}
        return stamp if isinstance(stamp, dict) else {}

    def wanted(self, version: tuple[int, ...] | None) -> dict[str, str]:
        """The stamp of a finished set-up, apart from the build of torch."""
        return {
            "root": str(self.root),  # a checkout that was moved left its scripts behind
            "python": ".".join(map(str, version or ())),
            "sources": self.sources(),
        }

    def is_done(self, gpu: bool) -> bool:
        """Whether the environment is complete and current.

        The default torch also serves without a GPU, and one for tests everybody.
        """
        stamp = self.installed()
        build, extra = stamp.pop("torch", None), stamp.pop("extra", "")
        serves = build in (("default",) if gpu else ("default", "cpu")) and extra in ("test", self.extra)
        return serves and stamp == self.wanted(self.version())

    @property
    def extra(self) -> str:
        """What is installed beside the course: ``test`` for those who test it, nothing for learners."""
        return "test" if self.for_tests else ""

    def version(self) -> tuple[int, ...] | None:
        return python_version(str(self.python)) if self.python.exists() else None

    def is_broken(self) -> bool:
        """Whether to start from nothing: no working Python, another one asked for, half made, or moved."""
        version = self.version()
        if not supported(version):
            return True
        if self.stamp.exists() and self.stamp.read_text() == UNFINISHED:
            return True
        chosen = os.environ.get("PYTHON")
        if chosen and python_version(chosen) != version:
            return True
        stamp, wanted = self.installed(), self.wanted(version)
        return any(key in stamp and stamp[key] != wanted[key] for key in ("root", "python"))

    def ensure(self, gpu: bool) -> None:
        """Makes the environment complete; does nothing where it is."""
        if self.is_done(gpu):
            return
        with locked(self.root / (self.venv.name + ".lock")):
            if self.is_done(gpu):  # another set-up finished while this one waited
                return
            start = time.monotonic()
            if self.is_broken():
                self.create()
            else:
                self.stamp.unlink(missing_ok=True)
            wanted = self.wanted(self.version())  # not later: what is edited meanwhile is not installed
            stamp = dict(wanted, torch=self.install(gpu), extra=self.extra)
            replace(self.stamp, json.dumps(stamp, indent=1))
            say(f"set up in {time.monotonic() - start:.0f} s: {self.venv}")

    def create(self) -> None:
        """An empty environment, marked unfinished before anything else is in it."""
        make = self.maker()
        if self.venv.exists():
            for child in self.venv.iterdir():
                shutil.rmtree(child) if child.is_dir() and not child.is_symlink() else child.unlink()
        self.venv.mkdir(exist_ok=True)
        self.stamp.write_text(UNFINISHED)
        step(f"virtual environment in {self.venv.name}", [*make, str(self.venv)], self.log)

    def maker(self) -> list[str]:
        """The command that makes an empty environment."""
        return [base_python(), "-m", "venv"]

    def pip(self) -> list[str]:
        """The command that installs into the environment, quietly."""
        return [str(self.python), "-I", "-m", "pip", "--disable-pip-version-check", "install", "-q"]

    def install(self, gpu: bool) -> str:
        """Installs torch and all else; returns the build of torch that came: ``cpu`` or ``default``."""
        version = pins(self.constraints)["torch"]
        if (sys.platform, platform.machine()) == ("darwin", "x86_64"):
            stop(f"torch {version} has no build for Macs with an Intel processor; use a Linux machine.")
        pip = self.pip()
        package = [
            "-c",
            str(self.constraints),
            "-e",
            f"{self.root}[test]" if self.for_tests else str(self.root),
        ]
        if gpu or not sys.platform.startswith("linux"):
            # A CPU build that is already here, or that pip is pointed at, sorts above the default one.
            package.append(f"torch!={version}+cpu")
            step(f"torch {version}, Triton, Jupyter and the rest", [*pip, *package], self.log)
            return "default"
        # Torch alone looks at PyTorch's CPU index, and gives up quickly where that cannot be reached.
        quick = ["--no-deps", "--extra-index-url", CPU_INDEX, "--retries", "1", "--timeout", "10"]
        command = [*pip, *quick, f"torch=={version}+cpu"]
        cpu = step(f"torch {version} (CPU build)", command, self.log, required=False)
        if not cpu:
            say(
                f"no CPU build of torch {version} could be had from {CPU_INDEX} or pip's own sources; "
                "the default build follows, with several GB of CUDA packages (Ctrl-C stops it)."
            )
        step("Triton, Jupyter and the rest", [*pip, *package], self.log)
        return "cpu" if cpu else "default"


class OtherKernel(Setup):
    """An environment that differs from the one beneath it in ipykernel only; that one has to be complete."""

    def __init__(self, beneath: Setup, series: str) -> None:
        super().__init__(beneath.root, beneath.torch, f"-ipykernel{series}")
        self.beneath, self.series = beneath, series

    def maker(self) -> list[str]:
        # With a pip of its own would come an older setuptools; the one beneath does.
        return [str(self.beneath.python), "-m", "venv", "--without-pip"]

    def install(self, gpu: bool) -> str:
        """Shows what is installed beneath, and installs the ipykernel, which comes before it on the path."""
        ours, theirs = site_packages(self.python), site_packages(self.beneath.python)
        # Not the bare path: the course itself is installed beneath through a .pth file of its own.
        (ours / "beneath.pth").write_text(f"import site; site.addsitedir({str(theirs)!r})\n")
        version = IPYKERNELS[self.series]
        step(f"ipykernel {version}", [*self.pip(), f"ipykernel=={version}"], self.log)
        for folder in ("share/jupyter", "etc/jupyter"):  # JupyterLab's pages, the widgets' scripts, templates
            show(self.beneath.venv / folder, self.venv / folder)
        return self.beneath.installed()["torch"]


def show(folder: Path, there: Path) -> None:
    """Links in another folder to what is in this one and was not there."""
    there.mkdir(parents=True, exist_ok=True)
    for each in folder.iterdir():
        link = there / each.name
        if link.is_symlink() or not link.exists():
            link.unlink(missing_ok=True)
            link.symlink_to(each)


def site_packages(python: Path) -> Path:
    """Where an interpreter's packages are."""
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    return Path(subprocess.check_output([str(python), "-I", "-c", code]).decode().strip())


@contextmanager
def locked(file: Path) -> Iterator[None]:
    """One set-up at a time: a second waits for the first."""
    with file.open("w") as handle:
        if fcntl is not None:
            with suppress(OSError):  # a file system without locks, as Lustre can be
                fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def replace(file: Path, text: str) -> None:
    """Writes a file in one piece: nobody sees half of it."""
    draft = file.with_name(f"{file.name}.{os.getpid()}")
    try:
        draft.write_text(text)
        os.replace(str(draft), str(file))
    except OSError:
        draft.unlink(missing_ok=True)
        raise


def step(what: str, command: list[str], log: Path, required: bool = True) -> bool:
    """Runs one command of the set-up, showing what it is and how long it took; returns whether it succeeded.

    Its output goes to the log. When a required step fails, the end of that output and a sentence are shown
    and the program ends.
    """
    start = time.monotonic()
    live = sys.stdout.isatty()

    def line() -> str:
        return ("\r" if live else "") + f"labkit: {what} ... {time.monotonic() - start:.0f} s"

    # Settings that would put packages elsewhere, or hide that they are missing.
    without = ("PYTHONPATH", "PYTHONHOME", "PIP_TARGET", "PIP_PREFIX", "PIP_CONSTRAINT")
    environment = {key: value for key, value in os.environ.items() if key not in without}
    environment["PIP_USER"] = "0"
    with log.open("w+", errors="replace") as output:
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=environment
        )
        try:
            while child.poll() is None:
                if live:
                    print(line(), end="", flush=True)
                time.sleep(0.2)
        finally:
            child.terminate()  # where this program was interrupted; else it has ended already
        status = child.wait()
        print(line() + (" (failed)" if status else ""), flush=True)
        if status and required:
            output.seek(0)
            print("".join(output.readlines()[-15:]), file=sys.stderr)
            stop(
                f"the set-up stopped at: {what}. The next command starts it again. "
                "Where packages cannot be had, ENV=current takes the present environment."
            )
    return status == 0


# ---- the present environment -----------------------------------------------------------------------------


def missing(target: str) -> list[str]:
    """The modules that a target needs and this Python cannot find."""
    return [module for module in NEEDS[target] if importlib.util.find_spec(module) is None]


def check_current(target: str, constraints: Path) -> None:
    """Stops where the present environment cannot do a target, naming what is missing in which version."""
    if sys.version_info < PYTHONS[0]:
        oldest = ".".join(map(str, PYTHONS[0]))
        stop(f"Python {oldest} or newer is needed; this is {platform.python_version()}.")
    names = missing(target)
    if not names:
        return
    versions = pins(constraints)
    print(f"labkit: missing for `{target}` in {sys.executable}:", file=sys.stderr)
    for module in names:
        distribution = DISTRIBUTIONS.get(module, module)
        print(f"  {module:16} {distribution}=={versions[distribution]}", file=sys.stderr)
    stop("ENV=current installs nothing; add these, or leave ENV out for a virtual environment.")


# ---- running ---------------------------------------------------------------------------------------------


def environment(root: Path, python: str) -> dict[str, str]:
    """The environment variables for a command: this checkout, and this Python's kernels."""
    env = dict(os.environ)
    # Jupyter finds kernels by name, and the user may have another one called python3: ours comes first.
    jupyter = root / "build" / "jupyter"
    kernel = jupyter / "kernels" / "python3"
    kernel.mkdir(parents=True, exist_ok=True)
    argv = [python, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    spec = json.dumps({"argv": argv, "display_name": "Python 3 (labkit)", "language": "python"}, indent=1)
    file = kernel / "kernel.json"
    if not file.exists() or file.read_text() != spec:
        replace(file, spec)
    env["JUPYTER_PATH"] = os.pathsep.join(filter(None, [str(jupyter), env.get("JUPYTER_PATH")]))
    return env


def main(arguments: list[str]) -> int:
    """Sets up what a target needs and runs Python with the remaining arguments."""
    target, command = (arguments[0], arguments[1:]) if arguments else ("", [])
    if target not in NEEDS:
        stop(f"say what to do, one of: {', '.join(NEEDS)}.")
    torch = os.environ.get("TORCH", "2.13")
    if torch not in TORCHES:
        stop(f"TORCH={torch} is not supported; take one of: {', '.join(TORCHES)}.")
    ipykernel = os.environ.get("IPYKERNEL")
    if ipykernel and ipykernel not in IPYKERNELS:
        stop(f"IPYKERNEL={ipykernel} is not supported; take one of: {', '.join(IPYKERNELS)}.")
    setup = Setup(ROOT, torch, for_tests=target in ("test", "lint"))
    gpu = has_gpu()
    if os.environ.get("ENV") == "current":
        if ipykernel:
            stop("ENV=current installs nothing, and IPYKERNEL is an environment of its own: leave one out.")
        check_current(target, setup.constraints)
        python = sys.executable
        env = environment(ROOT, python)
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), env.get("PYTHONPATH")]))
    else:
        setup.ensure(gpu)
        if ipykernel:
            setup = OtherKernel(setup, ipykernel)
            setup.ensure(gpu)
        python = str(setup.python)
        env = environment(ROOT, python)
        env["VIRTUAL_ENV"] = str(setup.venv)
        env["PATH"] = os.pathsep.join([str(setup.bin), env.get("PATH", os.defpath)])
    if not command:
        return 0
    sys.stdout.flush()
    if os.name == "nt":  # there, exec returns to the prompt before the command has ended
        return subprocess.call([python, *command], env=env)
    os.execve(python, [python, *command], env)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        print("\nlabkit: stopped; the next command starts the set-up again.", file=sys.stderr)
        sys.exit(130)
    except OSError as error:
        if error.errno not in NOT_WRITTEN:
            raise
        stop(f"{error}. Make room, or take a copy of this clone in a folder that you may write to.")
