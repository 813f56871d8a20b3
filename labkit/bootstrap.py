"""Sets up what a command needs, then runs it: the logic behind the Makefile.

    python3 labkit/bootstrap.py setup
    python3 labkit/bootstrap.py run -m labkit run 01

The first word says what will be done (see ``NEEDS``), the rest goes to the Python of a virtual environment in
this clone, which is made of the Python that runs this file.

This file runs before anything is installed: it uses the standard library only, and still runs on Python 3.8,
so that an old Python gets a sentence instead of a syntax error.

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
from pathlib import Path
from typing import IO, Any, NoReturn

ROOT = Path(__file__).resolve().parent.parent
PYTHONS = ((3, 11), (3, 14))  # the oldest and the newest Python that torch and Triton both have wheels for
CPU_INDEX = "https://download.pytorch.org/whl/cpu"

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
    **dict.fromkeys(("run", "progress", "record", "bench", "slides"), RUN),
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
OTHER_FOLDERS = ("PIP_TARGET", "PIP_PREFIX", "PIP_CONSTRAINT")
"""Variables that would make pip install to other folders, or other versions."""


def stop(sentence: str) -> NoReturn:
    """Ends with exit status 2 and one sentence on stderr."""
    print("labkit: " + sentence, file=sys.stderr)
    raise SystemExit(2)


def has_gpu() -> bool:
    """Whether NVIDIA's driver lists a GPU."""
    tool = shutil.which("nvidia-smi")
    return bool(tool and subprocess.run([tool, "-L"], stdout=subprocess.PIPE).stdout.startswith(b"GPU"))


def pins(constraints: str) -> dict[str, str]:
    """The exact versions in the text of a constraints file, by distribution name."""
    lines = (line.partition("#")[0].strip() for line in constraints.splitlines())
    return dict(line.split("==") for line in lines if line)


class Setup:
    """A virtual environment of this clone.

    It is complete when its stamp, which is written last, says what is wanted.
    """

    def __init__(self, torch: str, ipykernel: str, extra: str) -> None:
        file, folder = TORCHES[torch]
        self.extra = extra
        self.constraints = (ROOT / file).read_text()
        self.torch_version = pins(self.constraints)["torch"]
        if ipykernel:
            version, ending = IPYKERNELS[ipykernel]
            self.constraints = re.sub("(?m)^ipykernel==.*", f"ipykernel=={version}", self.constraints)
            folder += ending
        self.venv = ROOT / folder
        self.python, self.stamp = self.venv / "bin" / "python", self.venv / "labkit-setup.json"
        texts = (self.constraints, (ROOT / "pyproject.toml").read_text(), Path(__file__).read_text())
        # Taken now: what is edited while pip works is not installed.
        self.sources = hashlib.sha256("\0".join(texts).encode()).hexdigest()

    def origin(self) -> dict[str, str]:
        """What cannot change in place: its Python, and the path of the clone, which is in its scripts."""
        return {"root": str(ROOT), "interpreter": os.path.realpath(self.python)}

    def stamped(self) -> dict[str, Any]:
        """What the stamp says; empty without a readable one."""
        try:
            return dict(json.loads(self.stamp.read_text()))
        except (OSError, ValueError):
            return {}

    def is_updatable(self) -> bool:
        """Whether pip can bring it up to date in place. So it can one that the user made, without a stamp."""
        if not (self.venv / "bin" / "pip").exists():
            return False
        stamp, origin = self.stamped(), self.origin()
        if os.environ.get("PYTHON") and os.path.realpath(sys.executable) != origin["interpreter"]:
            return False
        return all(stamp.get(key, value) == value for key, value in origin.items())

    def is_complete(self) -> bool:
        """Whether the environment is complete and current.

        The default torch also serves without a GPU, and what the tests need serves everybody.
        """
        stamp = self.stamped()
        if stamp.get("sources") != self.sources or stamp["extra"] not in ("test", self.extra):
            return False
        return self.is_updatable() and (stamp["torch"] == "default" or not has_gpu())

    def ensure(self) -> None:
        """Makes the environment complete; does nothing where it is."""
        if self.is_complete():
            return
        if not sys.platform.startswith("linux"):
            stop(
                "Triton has packages for Linux only: use WSL 2 on Windows, a Linux container or virtual "
                "machine on macOS, or Binder (docs/installing.md says how)."
            )
        with open(f"{self.venv}.lock", "w") as self.lock:
            wait_for(self.lock)
            if self.is_complete():  # another set-up finished while this one waited
                return
            if not self.is_updatable():
                check_python()
                venv = [sys.executable, "-I", "-m", "venv", "--clear", str(self.venv)]
                self.step(f"virtual environment in {self.venv.name}", venv)
            self.stamp.unlink(missing_ok=True)
            build = self.install()
            stamp = dict(self.origin(), sources=self.sources, torch=build, extra=self.extra)
            self.stamp.write_text(json.dumps(stamp, indent=1))

    def install(self) -> str:
        """Installs torch and all else; returns the build of torch that came: ``cpu`` or ``default``."""
        constraints = self.venv / "labkit-constraints.txt"
        constraints.write_text(self.constraints)
        pip = [str(self.python), "-I", "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
        rest = [*pip, "-c", str(constraints), "-e", f"{ROOT}[{self.extra or 'lab'}]"]
        torch = self.torch_version
        if has_gpu():
            # A CPU build that is already here, or that pip is pointed at, sorts above the default one.
            self.step(f"torch {torch}, Triton, Jupyter and the rest", [*rest, f"torch!={torch}+cpu"])
            return "default"
        # Torch alone looks at PyTorch's CPU index, and gives up quickly where that cannot be reached.
        quick = ["--no-deps", "--extra-index-url", CPU_INDEX, "--retries", "1", "--timeout", "10"]
        cpu = self.step(f"torch {torch} (CPU build)", [*pip, *quick, f"torch=={torch}+cpu"], required=False)
        if not cpu:
            print(
                f"labkit: no CPU build of torch {torch} could be had from {CPU_INDEX} or pip's own sources; "
                "the default build follows, with several GB of CUDA packages (Ctrl-C stops it).",
                flush=True,
            )
        self.step("Triton, Jupyter and the rest", rest)
        return "cpu" if cpu else "default"

    def step(self, what: str, command: list[str], required: bool = True) -> bool:
        """Runs one command of the set-up; returns whether it succeeded. Ends where a required one fails."""
        print(f"labkit: {what} ... (this may take some minutes)", flush=True)
        env = {name: text for name, text in os.environ.items() if name not in OTHER_FOLDERS}
        env["PIP_USER"] = "0"
        # It keeps the lock: where this program is killed, the next set-up waits until the step has ended.
        lock = self.lock.fileno()
        ran = subprocess.run(command, stdin=subprocess.DEVNULL, env=env, pass_fds=[lock])
        if ran.returncode and required:
            stop(
                f"the set-up stopped at: {what}. The next command starts it again. Where packages cannot be "
                "had, as without a network, ENV=current takes the present environment."
            )
        return ran.returncode == 0


def check_python() -> None:
    """Stops where torch and Triton have no wheels for this Python."""
    if not PYTHONS[0] <= sys.version_info[:2] <= PYTHONS[1]:
        oldest, newest = (".".join(map(str, version)) for version in PYTHONS)
        stop(
            f"Python {oldest} to {newest} is needed, and {sys.executable} is {platform.python_version()}: "
            "install one and name it, as in `make run PYTHON=python3.12`."
        )


def wait_for(lock: IO[str]) -> None:
    """Takes the lock; it is given back when the file is closed."""
    import fcntl  # not on Windows, where a sentence has ended this program before

    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        print("labkit: waiting for another set-up of this environment.", flush=True)
        fcntl.flock(lock, fcntl.LOCK_EX)
    except OSError:  # a file system without locks, as Lustre can be
        pass


def check_current(target: str) -> None:
    """Stops where the present environment cannot do a target, naming what is missing."""
    check_python()
    missing = [module for module in NEEDS[target] if importlib.util.find_spec(module) is None]
    names = " ".join(DISTRIBUTIONS.get(module, module) for module in missing)
    if names:
        stop(
            f"ENV=current installs nothing, and {sys.executable} lacks what `{target}` needs: add it with "
            f"`pip install -c constraints.txt {names}`, or leave ENV out for a virtual environment."
        )


def chosen(variable: str, choices: dict[str, tuple[str, str]]) -> str:
    """What an environment variable chooses; empty where it is not set."""
    choice = os.environ.get(variable, "")
    if choice and choice not in choices:
        stop(f"{variable}={choice} is not supported; take one of: {', '.join(choices)}.")
    return choice


def main(arguments: list[str]) -> None:
    """Sets up what a target needs, and becomes the Python that runs the remaining arguments."""
    target, *command = arguments or [""]
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
    if command:
        sys.stdout.flush()
        os.execve(python, [python, *command], env)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except KeyboardInterrupt:
        print("\nlabkit: stopped; the next command starts the set-up again.", file=sys.stderr)
        sys.exit(130)
    except OSError as error:
        stop(f"{error}. The set-up needs room, in a folder that you may write to.")
