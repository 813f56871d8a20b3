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

from labkit import bootstrap, doctor, lessons

ROOT = Path(__file__).resolve().parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]
EXTRAS = PROJECT["optional-dependencies"]
CONSTRAINTS = [constraints for constraints, _ in bootstrap.TORCHES.values()]
MAKE = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed here")


def versions(constraints):
    """The pins of a constraints file, by canonical name."""
    pins = bootstrap.pins(ROOT / constraints)
    return {canonicalize_name(name): Version(version) for name, version in pins.items()}


def names(requirements):
    return {canonicalize_name(Requirement(each).name) for each in requirements}


@pytest.mark.parametrize("constraints", CONSTRAINTS)
def test_what_is_asked_for_is_pinned_within_its_range_and_everything_once(constraints):
    pinned = versions(constraints)
    for requirement in map(Requirement, PROJECT["dependencies"] + EXTRAS["test"]):
        assert pinned[canonicalize_name(requirement.name)] in requirement.specifier, requirement
    for modules in bootstrap.NEEDS.values():
        assert {
            canonicalize_name(bootstrap.DISTRIBUTIONS.get(module, module)) for module in modules
        } <= pinned.keys()
    lines = [line for line in (ROOT / constraints).read_text().splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[0-9][0-9A-Za-z.]*", line) for line in lines), lines
    assert lines == sorted(lines, key=str.lower) and len(lines) == len(pinned)


@pytest.mark.parametrize("torch", bootstrap.TORCHES)
def test_the_constraints_differ_only_in_torch_and_what_belongs_to_it(torch):
    usual, these = versions(CONSTRAINTS[0]), versions(bootstrap.TORCHES[torch][0])
    assert (
        str(these["torch"]).startswith(f"{torch}.") and str(these["triton"]) == doctor.TRITON_OF_TORCH[torch]
    )
    apart = {name for name in usual.keys() | these.keys() if usual.get(name) != these.get(name)}
    assert apart <= {"torch", "triton", "numpy"}
    assert these["triton"] >= Version("3.7") or these["numpy"] < Version("2.4"), (
        "Triton 3.6 interprets with that only"
    )


def imports(file):
    """The top-level modules that a file imports, wherever in it."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            found.add(node.module)
    return {name.partition(".")[0] for name in found}


def test_bootstrap_parses_on_an_old_python_and_needs_nothing_installed():
    file = ROOT / "labkit" / "bootstrap.py"
    ast.parse(file.read_text(), feature_version=(3, 8))
    assert imports(file) <= set(sys.stdlib_module_names) | {"__future__"}
    # It is run as a file: its folder is searched first, also by the standard library.
    ours = {file.stem for file in (ROOT / "labkit").glob("*.py")} - {"__init__", "__main__"}
    assert not ours & (
        set(sys.stdlib_module_names) | {module for modules in bootstrap.NEEDS.values() for module in modules}
    )


def test_every_folder_of_the_package_is_installed():
    folders = {file.parent.relative_to(ROOT) for file in (ROOT / "labkit").rglob("*.py")}
    assert set(PYPROJECT["tool"]["setuptools"]["packages"]) == {
        folder.as_posix().replace("/", ".") for folder in folders
    }


@pytest.mark.parametrize("arguments", ["ruff check .", "ruff format --check .", "mypy"])
def test_lint(arguments):
    if importlib.util.find_spec(arguments.split()[0]) is None:
        pytest.skip(f"{arguments.split()[0]} is not installed in this environment")
    ran = subprocess.run([sys.executable, "-m", *arguments.split()], cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr


HIDDEN = ("TEACHING.md", "solutions", "__pycache__")
"""What a learner's JupyterLab does not list."""
LAB = ["lab -m labkit.lab --ServerApp.ip=127.0.0.1 --ServerApp.root_dir=notebooks"]
TARGETS = {  # what a target runs, after the Python of the environment
    "setup": ["setup"],
    "run LESSONS=01 ARGS=--quick": ["run -m labkit run 01 --quick"],
    "lab IPYKERNEL=6.31": [" ".join(LAB + [f"--ContentsManager.hide_globs={name}" for name in HIDDEN])],
    "test PYTEST_ARGS=-x": ["test -m pytest -n 2 --dist loadfile --no-loadscope-reorder -x"],
    "record LESSONS=01": ["record -m labkit record 01"],
    "lint": ["lint -m ruff check .", "lint -m ruff format --check .", "lint -m mypy"],
}


def make(*words):
    return subprocess.run(["make", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout


@MAKE
@pytest.mark.parametrize("target", TARGETS)
def test_make_runs_each_target_through_the_bootstrap(target):
    lines = [
        " ".join(line.split()) for line in make("-n", "PYTHON=some-python", *target.split()).splitlines()
    ]
    lines = [line.replace(" --allow-root", "") for line in lines if "bootstrap" in line]  # that only as root
    assert lines == [f"some-python labkit/bootstrap.py {arguments}" for arguments in TARGETS[target]]
    assert all(arguments.split()[0] in bootstrap.NEEDS for arguments in TARGETS[target])


@MAKE
def test_make_alone_lists_every_target_and_the_tests_of_another_ipykernel_are_there():
    (phony,) = re.findall(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert re.findall(r"^  make (\w+)", make(), re.MULTILINE) == phony.split()
    paths = [word for word in make("-n", "test", "IPYKERNEL=6.31").split() if word.startswith("tests/")]
    assert "tests/browser" in paths and len(paths) > 2 and all((ROOT / path).exists() for path in paths)


def test_conda_and_binder_take_a_supported_python_and_what_the_package_asks_for():
    read = {}
    for file in (ROOT / "environment.yml", ROOT / "binder" / "environment.yml"):
        python, pip, given = yaml.safe_load(file.read_text())["dependencies"]
        constraints, *read[file.parent.name] = given["pip"]
        assert (file.parent / constraints.removeprefix("-c ")).resolve() == ROOT / CONSTRAINTS[0]
        assert pip == "pip" and bootstrap.supported(
            tuple(map(int, python.removeprefix("python=").split(".")))
        )
    assert read[ROOT.name] == ["-e ."]
    index, *asked = read["binder"]
    assert index == f"--extra-index-url {bootstrap.CPU_INDEX}" and names(asked) == names(
        PROJECT["dependencies"]
    )
    assert f"torch=={versions(CONSTRAINTS[0])['torch']}+cpu" in asked


@pytest.fixture
def script(tmp_path):
    """Runs a script of the project with these commands in the place of the real ones."""

    def run(path, **stubs):
        file = ROOT / path
        assert file.stat().st_mode & 0o111 == 0o111 and file.read_text().startswith("#!/usr/bin/env bash\n")
        for name, does in stubs.items():
            stub = tmp_path / name.replace("_", "-")
            stub.write_text(f"#!/bin/sh\n{does}\n")
            stub.chmod(0o755)
        environment = {**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
        return subprocess.run([file], cwd=ROOT, env=environment, capture_output=True, text=True)

    return run


def test_binder_installs_the_package_and_trusts_the_lessons(script):
    ran = script("binder/postBuild", pip='echo pip "$@"', jupyter='echo jupyter "$@"')
    install, trust, _ = ran.stdout.splitlines()
    assert ran.returncode == 0 and install == "pip install --no-deps -e ."
    assert trust.split() == [
        "jupyter",
        "trust",
        *(path.relative_to(ROOT).as_posix() for path in lessons.find()),
    ]


@pytest.mark.parametrize(("chromium", "apt_get", "make"), [(0, 100, 0), (1, 100, 0), (1, 0, 0), (0, 0, 3)])
def test_ci_runs_the_tests_and_says_why_there_is_no_chromium(script, chromium, apt_get, make):
    browsers = dict.fromkeys(("chromium", "google_chrome", "chromium_browser"), f"exit {chromium}")
    ran = script(
        ".ci/run",
        apt_get=f"echo no such package >&2; exit {apt_get}",
        make=f'echo make "$@"; exit {make}',
        **browsers,
    )
    assert ran.returncode == make and ran.stdout == "make setup FOR=test\n" + "make test\n" * (not make)
    assert ran.stderr.startswith("No Chromium") if chromium else ran.stderr == ""


HOME_PATH = re.compile(r"/(?:home|Users|root)/\w|[A-Z]:\\\\?Users\\")
HOSTS = re.compile(
    r"https?://([\w.-]*(?:pypi|pythonhosted|anaconda|artifact|nexus|mirror|whl|wheel)[\w.-]*)"
    r"|(?:index-url|find-links|INDEX_URL|FIND_LINKS)[\s=\"',]+https?://(?!download\.pytorch\.org)([\w.-]+)"
)


def test_no_file_speaks_of_one_machine():
    listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("not a git checkout: no list of the files that belong to the project")
    slash = "/"
    for odd in (
        f"{slash}home{slash}someone",
        "http" + "s://my.pypi.example/x",
        "index-url http" + "://a.example/x",
    ):
        assert HOME_PATH.search(odd) or HOSTS.search(odd)
    ran = subprocess.run(listing, cwd=ROOT, capture_output=True, text=True, check=True)
    files = [ROOT / name for name in ran.stdout.split("\0") if name]
    texts = {file: file.read_bytes().decode(errors="ignore") for file in files if file.is_file()}
    found = {
        file.name: [*HOME_PATH.findall(text), *HOSTS.findall(text)]
        for file, text in texts.items()
        if file.suffix != ".png"
    }
    assert (ROOT / "pyproject.toml") in files and not {
        name: strange for name, strange in found.items() if strange
    }
