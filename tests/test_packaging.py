"""The project's files agree with each other: versions, tools, commands, licence, nothing of one machine."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]
EXTRAS = PROJECT["optional-dependencies"]
CONSTRAINTS = {"2.13": "constraints.txt"} | {f"2.{n}": f"constraints-torch2{n}.txt" for n in (11, 15)}
DEFAULT = CONSTRAINTS["2.13"]
PYTHONS = (3, 11), (3, 14)
"""The oldest and the newest Python that torch and Triton both have wheels for."""
MAKE = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed here")


def versions(constraints):
    """The pins of a constraints file, by canonical name."""
    lines = (line.partition("#")[0].strip() for line in (ROOT / constraints).read_text().splitlines())
    return {canonicalize_name(name): Version(pin) for name, pin in (x.split("==") for x in lines if x)}


def names(requirements):
    return {canonicalize_name(Requirement(each).name) for each in requirements}


@pytest.mark.parametrize("constraints", CONSTRAINTS.values())
def test_what_is_asked_for_is_pinned_within_its_range_and_everything_once(constraints):
    pinned = versions(constraints)
    asked = PROJECT["dependencies"] + EXTRAS["course"] + EXTRAS["test"]
    for requirement in map(Requirement, [each for each in asked if each != "gpu-labkit[course]"]):
        assert pinned[canonicalize_name(requirement.name)] in requirement.specifier, requirement
    lines = [line for line in (ROOT / constraints).read_text().splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[0-9][0-9A-Za-z.]*", line) for line in lines), lines
    assert lines == sorted(lines, key=str.lower) and len(lines) == len(pinned)


TRITON_OF_TORCH = {"2.11": "3.6.0", "2.13": "3.7.1", "2.15": "3.9.0"}


@pytest.mark.parametrize("torch", CONSTRAINTS)
def test_the_constraints_differ_only_in_torch_and_what_belongs_to_it(torch):
    usual, these = versions(DEFAULT), versions(CONSTRAINTS[torch])
    assert str(these["torch"]).startswith(f"{torch}.")
    assert str(these["triton"]) == TRITON_OF_TORCH[torch]
    apart = {name for name in usual.keys() | these.keys() if usual.get(name) != these.get(name)}
    assert apart <= {"torch", "triton", "numpy"}
    old = these["triton"] < Version("3.7")
    assert not old or these["numpy"] < Version("2.4"), "Triton 3.6 interprets with that only"


def test_every_folder_and_data_file_of_the_package_is_installed():
    package, options = ROOT / "labkit", PYPROJECT["tool"]["setuptools"]
    folders = {file.parent.relative_to(ROOT) for file in package.rglob("*.py")}
    listed = {name.replace(".", "/") for name in options["packages"]}
    assert listed == {folder.as_posix() for folder in folders} | {"labkit/course"}
    given = {file for pattern in options["package-data"]["labkit"] for file in package.glob(pattern)}
    others = {file for file in package.rglob("*.*") if file.suffix not in (".py", ".pyc") and file.is_file()}
    assert others and others <= given
    lessons = ROOT / options["package-dir"]["labkit.course"]
    patterns = options["package-data"]["labkit.course"]
    given = {file for pattern in patterns for file in lessons.glob(pattern)}
    assert given == {file for file in lessons.rglob("*.*") if file.suffix in (".ipynb", ".py", ".svg")}


ROOMS = "import importlinter.cli as rooms; rooms.lint_imports_command()"


@pytest.mark.parametrize(
    ("tool", "arguments"),
    [
        ("ruff", ["-m", "ruff", "check", "."]),
        ("ruff", ["-m", "ruff", "format", "--check", "."]),
        ("mypy", ["-m", "mypy"]),
        ("importlinter", ["-c", ROOMS]),
    ],
)
def test_lint(tool, arguments):
    if importlib.util.find_spec(tool) is None:
        pytest.skip(f"{tool} is not installed in this environment")
    ran = subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr


TARGETS = {  # what a target runs, with the Python of its virtual environment
    "run LESSONS=01 ARGS=--quick": [".venv/bin/python -m labkit run 01 --quick"],
    "lab ARGS=folder": [".venv/bin/python -m labkit lab folder"],
    "test PYTEST_ARGS=-x": [".venv/bin/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -x"],
    "record LESSONS=01 TORCH=2.11": [".venv-torch211/bin/python -m labkit record 01"],
    "render LESSONS=01": [".venv/bin/python -m labkit render 01"],
    "reset LESSONS=01": [".venv/bin/python -m labkit reset 01"],
    "bench ARGS=--peers": [".venv/bin/python -m benchmarks --peers"],
    "doctor TORCH=2.15 IPYKERNEL=6.31": [".venv-torch215-ipykernel631/bin/python -m labkit doctor"],
    "lint": [
        ".venv/bin/python -m ruff check .",
        ".venv/bin/python -m ruff format --check .",
        ".venv/bin/python -m mypy",
        f".venv/bin/python -c '{ROOMS}'",
    ],
    "run ENV=current PYTHON=some-python": ["some-python -m labkit run"],
}


def make(*words, folder=ROOT, status=0):
    ran = subprocess.run(["make", *words], cwd=folder, capture_output=True, text=True)
    assert ran.returncode == status, ran.stdout + ran.stderr
    return ran.stdout


@MAKE
@pytest.mark.parametrize("target", TARGETS)
def test_make_runs_each_target_with_the_python_that_it_should(target):
    said = make("-n", *target.split()).replace("\\\n", " ").replace(f"{ROOT}/", "").replace('"', "")
    lines = [" ".join(line.split()) for line in said.splitlines()]
    ran = [
        line
        for line in lines
        if re.search(r"python -(m (labkit|benchmarks|pytest|ruff|mypy)|c 'import importl)", line)
    ]
    assert len(ran) == len(TARGETS[target])
    assert all(map(str.endswith, ran, TARGETS[target]))


@MAKE
def test_make_sets_up_once_and_again_when_the_versions_change(tmp_path):
    """In a toy clone, with a Python of the test's that notes what it is asked for."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    python = tmp_path / "python"
    python.write_text(
        '#!/bin/sh\necho "$@" >> $LOG\ncase "$*" in\n'
        '"-m venv"*) mkdir -p .venv/bin && cp "$0" .venv/bin/python;;\n'
        f'-c*version_info*) exec {sys.executable} "$@";;\n*cpu*) exit $NO_CPU;;\nesac\n'
    )
    python.chmod(0o755)
    nvidia = tmp_path / "bin" / "nvidia-smi"
    nvidia.parent.mkdir()
    nvidia.write_text("#!/bin/sh\nexit 1\n")
    nvidia.chmod(0o755)

    def asked(*words, no_cpu="0"):
        log = tmp_path / "log"
        log.unlink(missing_ok=True)
        environment = os.environ | {"LOG": str(log), "NO_CPU": no_cpu}
        environment["PATH"] = f"{nvidia.parent}:{os.environ['PATH']}"
        how = dict(cwd=tmp_path, env=environment, capture_output=True, text=True)
        ran = subprocess.run(["make", f"PYTHON={python}", *words], **how)
        assert ran.returncode == 0, ran.stdout + ran.stderr
        lines = log.read_text().splitlines() if log.exists() else []
        return [line for line in lines if not line.startswith("-c ")], ran.stdout

    torch = versions(DEFAULT)["torch"]
    venv, cpu, rest = asked("setup")[0]
    assert venv == "-m venv --clear .venv" and f" torch=={torch}+cpu " in cpu and "--no-deps" in cpu
    assert rest == "-m pip install -q --disable-pip-version-check -c .venv/constraints.txt -e .[course]"
    assert asked("setup") == ([], ""), "it is done"
    assert asked("run")[0] == ["-m labkit run"]
    assert asked("setup", "FOR=test")[0][-1].endswith(".[test]")
    assert asked("setup") == ([], ""), "what the tests need serves everybody"
    os.utime(tmp_path / "constraints.txt", (2**32, 2**32))
    lines, said = asked("setup", no_cpu="1")
    assert lines[-1].endswith("-e .[test]") and "the default one has several GB" in said
    os.utime(tmp_path / "constraints.txt")
    (tmp_path / ".venv" / "installed-test").unlink()
    (tmp_path / ".venv" / "installed-course").unlink()
    nvidia.write_text("#!/bin/sh\necho GPU 0: NVIDIA H200\n")
    (gpu,) = [line for line in asked("setup")[0] if "install" in line]
    assert gpu.endswith(f"-e .[course] torch!={torch}+cpu"), "with a GPU the default build, in one step"


@MAKE
def test_make_refuses_an_old_python_and_names_what_the_present_environment_lacks(tmp_path):
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    old = tmp_path / "old"
    old.write_text("#!/bin/sh\nexit 1\n")
    old.chmod(0o755)
    said = make("setup", f"PYTHON={old}", folder=tmp_path, status=2)
    assert f"labkit: {old} is not Python 3.11 to 3.14. Name one that is" in said
    said = make("run", "ENV=current", f"PYTHON={old}", folder=tmp_path, status=2)
    assert "ENV=current installs nothing" in said and "pip install -c constraints.txt -e '.[course]'" in said


@MAKE
def test_make_alone_lists_every_target_and_the_tests_of_another_ipykernel_are_there():
    (phony,) = re.findall(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert re.findall(r"^  make (\w+)", make(), re.MULTILINE) == phony.split()
    paths = re.findall(r"\btests/[\w/.]+", make("-n", "test", "IPYKERNEL=6.31"))
    assert "tests/browser" in paths and all((ROOT / path).exists() for path in paths)


def test_conda_and_binder_take_a_supported_python_and_what_the_package_asks_for():
    read = []
    for file in (ROOT / "environment.yml", ROOT / "binder" / "environment.yml"):
        python, _, given = yaml.safe_load(file.read_text())["dependencies"]
        constraints, *asked = given["pip"]
        assert (file.parent / constraints.removeprefix("-c ")).resolve() == ROOT / DEFAULT
        oldest, newest = PYTHONS
        assert oldest <= tuple(map(int, python.removeprefix("python=").split("."))) <= newest
        read.append(asked)
    assert read[0] == ["-e .[course]"]
    assert read[1].pop(0) == "--extra-index-url https://download.pytorch.org/whl/cpu"
    asked = PROJECT["dependencies"] + PROJECT["optional-dependencies"]["course"]
    assert names(read[1]) == names(asked)
    assert f"torch=={versions(DEFAULT)['torch']}+cpu" in read[1]


@pytest.mark.parametrize(("chromium", "make"), [(0, 0), (1, 0), (0, 3)])
def test_ci_runs_the_tests_and_says_why_there_is_no_chromium(tmp_path, chromium, make):
    """With commands of the test's in the place of the real ones."""
    stubs = dict.fromkeys(("chromium", "google-chrome", "chromium-browser"), f"exit {chromium}")
    for name, does in {**stubs, "apt-get": "exit 100", "make": f'echo make "$@"; exit {make}'}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{does}\n")
        (tmp_path / name).chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    ran = subprocess.run([ROOT / ".ci" / "run"], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert ran.returncode == make and ran.stdout == "make setup FOR=test\n" + "make test\n" * (not make)
    assert ran.stderr.startswith("No Chromium") if chromium else ran.stderr == ""


STRANGE = re.compile(
    r"/(?:home|Users|root)/\w|[A-Z]:\\\\?Users\\"
    r"|https?://[\w.-]*(?:pypi|pythonhosted|anaconda|artifact|nexus|mirror|whl|wheel)[\w.-]*"
    r"|(?:index-url|find-links|INDEX_URL|FIND_LINKS)[\s=\"',]+https?://(?!download\.pytorch\.org)[\w.-]+"
)


def test_no_file_speaks_of_one_machine():
    listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("not a git checkout: no list of the files that belong to the project")
    slashes = "http" + "s://"
    for odd in ("/" + "home/someone", f"{slashes}my.pypi.example/x", f"index-url {slashes}a.example/x"):
        assert STRANGE.search(odd)
    ran = subprocess.run(listing, cwd=ROOT, capture_output=True, text=True, check=True)
    files = [ROOT / name for name in ran.stdout.split("\0") if name and not name.endswith(".png")]
    texts = {file: file.read_bytes().decode(errors="ignore") for file in files if file.is_file()}
    found = {file.name: match for file, text in texts.items() if (match := STRANGE.search(text))}
    assert ROOT / "pyproject.toml" in texts and not found


def test_the_base_install_is_enough_for_the_kernels():
    """In a process where nothing can be imported but what the base asks for, and what that asks for."""
    base = names(PROJECT["dependencies"])
    assert base == {"torch", "triton", "numpy"}
    code = f"""
import importlib.abc, sys
class Refuse(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {sorted(map(module_name, names(EXTRAS["course"])))}:
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Refuse())
import torch
from labkit.kernels import affine
print(affine(torch.ones(2, 3), torch.ones(3), torch.ones(3)).sum().item())
"""
    around = os.environ | {"TRITON_INTERPRET": "1"}  # tensors on the CPU, also where there is a GPU
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=around, capture_output=True, text=True)
    assert ran.stdout == "12.0\n", ran.stderr


def module_name(package):
    return {"nvidia-ml-py": "pynvml", "pillow": "PIL", "pyzmq": "zmq", "ipython": "IPython"}.get(
        package, package.replace("-", "_")
    )


def test_the_dev_container_sets_up_what_the_lessons_need():
    container = json.loads((ROOT / ".devcontainer" / "devcontainer.json").read_text())
    assert container["postCreateCommand"] == "make setup" and container["forwardPorts"] == [8888]
    version = tuple(map(int, container["image"].rpartition(":")[2].split(".")))
    assert PYTHONS[0] <= version <= PYTHONS[1]
