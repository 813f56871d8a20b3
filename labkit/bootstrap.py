"""Sets up what a command needs, then runs it: the logic behind the Makefile.

    python3 labkit/bootstrap.py setup
    python3 labkit/bootstrap.py run -m labkit run 01

The first word says what will be done (see ``NEEDS``), the rest goes to the Python of a virtual environment in
this clone, which is made of the Python that runs this file.

This file runs before anything is installed: it uses the standard library only, of labkit no more than
``backend.py``, and still runs on Python 3.8, so that an old Python gets a sentence instead of a syntax error.

Environment variables: ``ENV=current`` uses the present environment and installs nothing; ``TORCH=2.11`` or
``TORCH=2.15`` takes the oldest or the newest supported torch, ``IPYKERNEL=6.31`` the older supported
ipykernel, each in a virtual environment of its own. make runs this file with ``PYTHON``: where that is set, a
virtual environment of another Python is made anew.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import IO, NoReturn

ROOT = Path(__file__).resolve().parent.parent
PYTHONS = ((3, 11), (3, 14))  # the oldest and the newest Python that torch and Triton both have wheels for
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
STAMP = "labkit-setup.json"

TORCHES = {  # TORCH=...: constraints file, folder of the virtual environment
    "2.13": ("constraints.txt", ".venv"),
    "2.11": ("constraints-torch211.txt", ".venv-torch211"),
    "2.15": ("constraints-torch215.txt", ".venv-torch215"),
}
IPYKERNELS = {"6.31": ("6.31.0", "-ipykernel631")}  # IPYKERNEL=...: version, what its folder ends in

# What has to be importable in the present environment (ENV=current), by what is to be done.
BASE = ("click", "rich", "packaging")
JUPYTER = ("IPython", "ipykernel", "nbformat", "nbclient", "nbconvert", "papermill")
RUN = (*BASE, *JUPYTER, "torch", "triton", "numpy", "pandas", "matplotlib", "PIL", "filelock", "psutil")
NEEDS = {
    "setup": (),
    "doctor": BASE,
    "run": RUN,
    "progress": RUN,
    "record": RUN,
    "bench": RUN,
    "slides": RUN,
    "site": ("sphinx", "myst_nb", "pydata_sphinx_theme", "sphinx_copybutton", "nbformat"),
    "test": (*RUN, "pytest", "xdist", "pytest_timeout", "nbval"),
    "lab": (*RUN, "jupyterlab", "ipywidgets"),
    "lint": ("ruff", "mypy", "importlinter"),
}
DISTRIBUTIONS = {  # where the name differs from the module's
    "PIL": "pillow",
    "IPython": "ipython",
    "xdist": "pytest-xdist",
    "importlinter": "import-linter",
    "pytest_timeout": "pytest-timeout",
    "myst_nb": "myst-nb",
    "pydata_sphinx_theme": "pydata-sphinx-theme",
    "sphinx_copybutton": "sphinx-copybutton",
}


def stop(sentence: str) -> NoReturn:
    """Ends with exit status 2 and one sentence on stderr."""
    print("labkit: " + sentence, file=sys.stderr)
    raise SystemExit(2)


def say(text: str) -> None:
    print("labkit: " + text, flush=True)


def has_gpu() -> bool:
    """Whether a CUDA build of torch could use a GPU of this machine, as ``backend.py`` says."""
    # By its path: labkit itself is imported in the environment that is yet to come.
    spec = importlib.util.spec_from_file_location("labkit_backend", Path(__file__).with_name("backend.py"))
    assert spec is not None and spec.loader is not None, "a .py file always has a loader"
    backend = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(backend)
    return bool(backend.is_nvidia_here())


def pins(file: Path) -> dict[str, str]:
    """The exact versions in a constraints file, by distribution name."""
    lines = (line.partition("#")[0].strip() for line in file.read_text().splitlines())
    return dict(line.split("==") for line in lines if line)


def supported(version: tuple[int, ...]) -> bool:
    """Whether torch and Triton have wheels for this Python, by its major and minor version."""
    return PYTHONS[0] <= version <= PYTHONS[1]


class Setup:
    """A virtual environment of this clone: what it should be, and how it gets there.

    It is complete when its stamp, which is written last, says what is wanted. While a set-up is at work the
    lock file has a word in it: one that finds it there comes after a killed one, and starts from nothing.
    """

    def __init__(self, torch: str, ipykernel: str | None, extra: str) -> None:
        constraints, folder = TORCHES[torch]
        self.extra, self.gpu = extra, has_gpu()
        self.version = pins(ROOT / constraints)["torch"]
        self.constraints = (ROOT / constraints).read_text()
        if ipykernel:
            version, ending = IPYKERNELS[ipykernel]
            self.constraints = re.sub("(?m)^ipykernel==.*", f"ipykernel=={version}", self.constraints)
            folder += ending
        self.venv = ROOT / folder
        self.python, self.stamp = self.venv / "bin" / "python", self.venv / STAMP
        texts = (self.constraints, (ROOT / "pyproject.toml").read_text(), Path(__file__).read_text())
        # Taken now: what is edited while pip works is not installed.
        self.sources = hashlib.sha256("\0".join(texts).encode()).hexdigest()

    def basis(self) -> dict[str, str]:
        """What cannot change in place: its Python, and the path of the clone, which is in its scripts."""
        return {"root": str(ROOT), "interpreter": os.path.realpath(self.python)}

    def is_sound(self) -> bool:
        """Whether it can be brought up to date in place; so can one that the user made, without a stamp."""
        if not self.python.exists():
            return False
        stamp, basis = self.stamped(), self.basis()
        if os.environ.get("PYTHON") and os.path.realpath(sys.executable) != basis["interpreter"]:
            return False
        return all(stamp.get(key, basis[key]) == basis[key] for key in basis)

    def stamped(self) -> dict[str, str]:
        """What the stamp says; empty without a readable one."""
        try:
            stamp = json.loads(self.stamp.read_text())
        except (OSError, ValueError):
            return {}
        return stamp if isinstance(stamp, dict) else {}

    def is_done(self) -> bool:
        """Whether the environment is complete and current.

        The default torch also serves without a GPU, and what the tests need serves everybody.
        """
        stamp = self.stamped()
        build, extra = stamp.pop("torch", None), stamp.pop("extra", None)
        serves = build in (("default",) if self.gpu else ("default", "cpu")) and extra in ("test", self.extra)
        return serves and self.is_sound() and stamp == {**self.basis(), "sources": self.sources}

    def ensure(self) -> None:
        """Makes the environment complete; does nothing where it is."""
        if self.is_done():
            return
        if not sys.platform.startswith("linux"):
            stop(
                "Triton has packages for Linux only: use WSL 2 on Windows, a Linux container or virtual "
                "machine on macOS, or Binder (docs/installing.md says how)."
            )
        with open(f"{self.venv}.lock", "a+") as self.lock:
            wait_for(self.lock)
            if self.is_done():  # another set-up finished while this one waited
                return
            self.lock.seek(0)
            self.in_place = self.is_sound() and not self.lock.read()
            if not self.in_place:
                check_python()
            self.lock.write("unfinished")
            self.lock.flush()
            if self.in_place:
                self.stamp.unlink(missing_ok=True)
            else:
                venv = [sys.executable, "-I", "-m", "venv", "--clear", str(self.venv)]
                self.step(f"virtual environment in {self.venv.name}", venv)
            build = self.install()
            stamp = dict(self.basis(), sources=self.sources, torch=build, extra=self.extra)
            self.stamp.write_text(json.dumps(stamp, indent=1))
            self.lock.truncate(0)

    def install(self) -> str:
        """Installs torch and all else; returns the build of torch that came: ``cpu`` or ``default``."""
        constraints = self.venv / "labkit-constraints.txt"
        constraints.write_text(self.constraints)
        pip = [str(self.python), "-I", "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
        rest = [*pip, "-c", str(constraints), "-e", f"{ROOT}[{self.extra or 'lab'}]"]
        if self.gpu:
            # A CPU build that is already here, or that pip is pointed at, sorts above the default one.
            rest.append(f"torch!={self.version}+cpu")
            self.step(f"torch {self.version}, Triton, Jupyter and the rest", rest)
            return "default"
        # Torch alone looks at PyTorch's CPU index, and gives up quickly where that cannot be reached.
        quick = ["--no-deps", "--extra-index-url", CPU_INDEX, "--retries", "1", "--timeout", "10"]
        command = [*pip, *quick, f"torch=={self.version}+cpu"]
        cpu = self.step(f"torch {self.version} (CPU build)", command, required=False)
        if not cpu:
            say(
                f"no CPU build of torch {self.version} could be had from {CPU_INDEX} or pip's own sources; "
                "the default build follows, with several GB of CUDA packages (Ctrl-C stops it)."
            )
        self.step("Triton, Jupyter and the rest", rest)
        return "cpu" if cpu else "default"

    def step(self, what: str, command: list[str], required: bool = True) -> bool:
        """Runs one command of the set-up, showing how long it takes; returns whether it succeeded.

        When a required one fails, the end of its output and a sentence are shown and the program ends.
        """
        start, live = time.monotonic(), sys.stdout.isatty()

        def line() -> str:
            return ("\r" if live else "") + f"labkit: {what} ... {time.monotonic() - start:.0f} s"

        env = dict(os.environ, PIP_USER="0")
        for name in ("PIP_TARGET", "PIP_PREFIX", "PIP_CONSTRAINT"):  # other folders, other versions
            env.pop(name, None)
        with tempfile.TemporaryFile("w+", errors="replace") as output:
            # It keeps the lock: where this program is killed, the next set-up waits until the step has ended.
            with subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=env,
                pass_fds=[self.lock.fileno()],
            ) as child:
                while child.poll() is None:
                    if live:
                        print(line(), end="", flush=True)
                    time.sleep(0.2)
            print(line() + (" (failed)" if child.returncode else ""), flush=True)
            if child.returncode == 0 or not required:
                return child.returncode == 0
            output.seek(0)
            print("".join(output.readlines()[-15:]), file=sys.stderr)
        full = shutil.disk_usage(ROOT).free < 2**28
        if self.in_place and not full:  # pip fails before it changes anything, but without room in the middle
            self.lock.truncate(0)
        stop(
            f"the set-up stopped at: {what}{', for the disk is full' if full else ''}. "
            "The next command starts it again. Where packages cannot be had, as without a network, "
            "ENV=current takes the present environment."
        )


def check_python() -> None:
    """Stops where no environment can be made of this Python."""
    oldest, newest = (".".join(map(str, version)) for version in PYTHONS)
    if not supported(sys.version_info[:2]):
        stop(
            f"Python {oldest} to {newest} is needed, and {sys.executable} is {platform.python_version()}: "
            "install one and name it, as in `make run PYTHON=python3.12`."
        )
    if not all(map(importlib.util.find_spec, ("venv", "ensurepip"))):
        stop(
            f"{sys.executable} lacks a part of its venv module: install it (on Debian and Ubuntu "
            "`apt install python3-venv`)."
        )


def wait_for(lock: IO[str]) -> None:
    """Takes the lock; it is given back when the file is closed."""
    import fcntl  # not on Windows, where a sentence has ended this program before

    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        say("waiting for another set-up of this environment.")
        fcntl.flock(lock, fcntl.LOCK_EX)
    except OSError:  # a file system without locks, as Lustre can be
        pass


def check_current(target: str) -> None:
    """Stops where the present environment cannot do a target, naming what is missing."""
    if sys.version_info < PYTHONS[0]:
        oldest = ".".join(map(str, PYTHONS[0]))
        stop(f"Python {oldest} or newer is needed, and {sys.executable} is {platform.python_version()}.")
    missing = [module for module in NEEDS[target] if importlib.util.find_spec(module) is None]
    names = " ".join(DISTRIBUTIONS.get(module, module) for module in missing)
    if names:
        stop(
            f"ENV=current installs nothing, and {sys.executable} lacks what `{target}` needs: add it with "
            f"`pip install -c constraints.txt {names}`, or leave ENV out for a virtual environment."
        )


def chosen(variable: str, choices: dict[str, tuple[str, str]]) -> str | None:
    """What an environment variable chooses, None where it is not set."""
    choice = os.environ.get(variable)
    if choice and choice not in choices:
        stop(f"{variable}={choice} is not supported; take one of: {', '.join(choices)}.")
    return choice or None


def main(arguments: list[str]) -> int:
    """Sets up what a target needs and runs Python with the remaining arguments."""
    target, command = (arguments[0], arguments[1:]) if arguments else ("", [])
    if target not in NEEDS:
        stop(f"say what to do, one of: {', '.join(NEEDS)}.")
    torch, ipykernel = chosen("TORCH", TORCHES), chosen("IPYKERNEL", IPYKERNELS)
    env = dict(os.environ)
    if os.environ.get("ENV") == "current":
        if ipykernel:
            stop("ENV=current installs nothing, and IPYKERNEL is an environment of its own: leave one out.")
        check_current(target)
        python, prefix = sys.executable, sys.prefix
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), env.get("PYTHONPATH")]))
    else:
        setup = Setup(torch or "2.13", ipykernel, "test" if target in ("test", "site", "lint") else "")
        setup.ensure()
        python, prefix = str(setup.python), str(setup.venv)
        env["VIRTUAL_ENV"] = prefix
        env["PATH"] = os.pathsep.join([str(setup.python.parent), env.get("PATH", os.defpath)])
    # Jupyter finds kernels by name, and the user may have another one called python3: this one comes first.
    env["JUPYTER_PATH"] = os.pathsep.join(filter(None, [f"{prefix}/share/jupyter", env.get("JUPYTER_PATH")]))
    if not command:
        return 0
    sys.stdout.flush()
    os.execve(python, [python, *command], env)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        print("\nlabkit: stopped; the next command starts the set-up again.", file=sys.stderr)
        sys.exit(130)
    except OSError as error:
        stop(f"{error}. The set-up needs room, in a folder that you may write to.")
