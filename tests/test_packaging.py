"""The project's files agree with each other: versions, tools, commands, licence, nothing of one machine."""

import ast
import importlib.util
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

from labkit import bootstrap
from labkit.cli import doctor

ROOT = Path(__file__).resolve().parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]
EXTRAS = PROJECT["optional-dependencies"]
CONSTRAINTS = [constraints for constraints, _ in bootstrap.TORCHES.values()]
MAKE = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed here")


def versions(constraints):
    """The pins of a constraints file, by canonical name."""
    pins = bootstrap.pins((ROOT / constraints).read_text())
    return {canonicalize_name(name): Version(version) for name, version in pins.items()}


def names(requirements):
    return {canonicalize_name(Requirement(each).name) for each in requirements}


@pytest.mark.parametrize("constraints", CONSTRAINTS)
def test_what_is_asked_for_is_pinned_within_its_range_and_everything_once(constraints):
    pinned = versions(constraints)
    asked = PROJECT["dependencies"] + EXTRAS["lab"] + EXTRAS["test"]
    for requirement in map(Requirement, [each for each in asked if each != "gpu-labkit[lab]"]):
        assert pinned[canonicalize_name(requirement.name)] in requirement.specifier, requirement
    needed = {bootstrap.DISTRIBUTIONS.get(name, name) for names in bootstrap.NEEDS.values() for name in names}
    assert set(map(canonicalize_name, needed)) <= pinned.keys()
    lines = [line for line in (ROOT / constraints).read_text().splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[0-9][0-9A-Za-z.]*", line) for line in lines), lines
    assert lines == sorted(lines, key=str.lower) and len(lines) == len(pinned)


@pytest.mark.parametrize("torch", bootstrap.TORCHES)
def test_the_constraints_differ_only_in_torch_and_what_belongs_to_it(torch):
    usual, these = versions(CONSTRAINTS[0]), versions(bootstrap.TORCHES[torch][0])
    assert str(these["torch"]).startswith(f"{torch}.")
    assert str(these["triton"]) == doctor.TRITON_OF_TORCH[torch]
    apart = {name for name in usual.keys() | these.keys() if usual.get(name) != these.get(name)}
    assert apart <= {"torch", "triton", "numpy"}
    old = these["triton"] < Version("3.7")
    assert not old or these["numpy"] < Version("2.4"), "Triton 3.6 interprets with that only"


def test_bootstrap_parses_on_an_old_python_and_needs_nothing_installed():
    text = (ROOT / "labkit" / "bootstrap.py").read_text()
    ast.parse(text, feature_version=(3, 8))
    imported = set(re.findall(r"^\s*(?:import|from) (\w+)", text, re.MULTILINE))
    assert "subprocess" in imported and imported <= {*sys.stdlib_module_names, "__future__"}
    # It is run as a file: its folder is searched first, also by the standard library.
    ours = {file.stem for file in (ROOT / "labkit").glob("*.py")} - {"__init__", "__main__"}
    assert not ours & set(sys.stdlib_module_names).union(*bootstrap.NEEDS.values())


def test_every_folder_and_data_file_of_the_package_is_installed():
    package, options = ROOT / "labkit", PYPROJECT["tool"]["setuptools"]
    folders = {file.parent.relative_to(ROOT) for file in package.rglob("*.py")}
    listed = {name.replace(".", "/") for name in options["packages"]}
    assert listed == {folder.as_posix() for folder in folders} | {"labkit/notebooks"}
    given = {file for pattern in options["package-data"]["labkit"] for file in package.glob(pattern)}
    others = {file for file in package.rglob("*.*") if file.suffix not in (".py", ".pyc") and file.is_file()}
    assert others and others <= given
    lessons = ROOT / options["package-dir"]["labkit.notebooks"]
    given = {
        file for pattern in options["package-data"]["labkit.notebooks"] for file in lessons.glob(pattern)
    }
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


TARGETS = {  # what a target runs, after the Python of the environment
    "setup": ["setup"],
    "run LESSONS=01 ARGS=--quick": ["run -m labkit run 01 --quick"],
    "lab IPYKERNEL=6.31 ARGS=folder": ["lab -m labkit lab folder"],
    "test PYTEST_ARGS=-x": ["test -m pytest -n 2 --dist loadfile --no-loadscope-reorder -x"],
    "record LESSONS=01": ["record -m labkit record 01"],
    "lint": ["lint -m ruff check .", "lint -m ruff format --check .", "lint -m mypy", f"lint -c '{ROOMS}'"],
}


def make(*words):
    return subprocess.run(["make", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout


@MAKE
@pytest.mark.parametrize("target", TARGETS)
def test_make_runs_each_target_through_the_bootstrap(target):
    said = make("-n", "PYTHON=some-python", *target.split())
    lines = [" ".join(line.split()) for line in said.splitlines() if "bootstrap" in line]
    assert lines == [f"some-python labkit/bootstrap.py {arguments}" for arguments in TARGETS[target]]
    assert all(arguments.split()[0] in bootstrap.NEEDS for arguments in TARGETS[target])


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
        assert (file.parent / constraints.removeprefix("-c ")).resolve() == ROOT / CONSTRAINTS[0]
        oldest, newest = bootstrap.PYTHONS
        assert oldest <= tuple(map(int, python.removeprefix("python=").split("."))) <= newest
        read.append(asked)
    assert read[0] == ["-e .[lab]"] and read[1].pop(0) == f"--extra-index-url {bootstrap.CPU_INDEX}"
    asked = PROJECT["dependencies"] + PROJECT["optional-dependencies"]["lab"]
    assert names(read[1]) == names(asked)
    assert f"torch=={versions(CONSTRAINTS[0])['torch']}+cpu" in read[1]


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
