"""The project's files agree with each other: versions, tools, commands, licence, nothing of one machine."""

import ast
import importlib.util
import re
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from labkit import bootstrap

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CONSTRAINTS = [constraints for constraints, _ in bootstrap.TORCHES.values()]


def versions(constraints: str) -> dict[str, Version]:
    """The pins of a constraints file, by canonical name."""
    pins = bootstrap.pins(ROOT / constraints)
    return {canonicalize_name(name): Version(version) for name, version in pins.items()}


def direct() -> list[Requirement]:
    """What the package and its tests ask for by name."""
    names = PROJECT["dependencies"] + PROJECT["optional-dependencies"]["test"]
    return [Requirement(name) for name in names]


@pytest.mark.parametrize("constraints", CONSTRAINTS)
def test_every_direct_dependency_is_pinned_within_its_range(constraints):
    pinned = versions(constraints)
    for requirement in direct():
        name = canonicalize_name(requirement.name)
        assert name in pinned, f"{constraints} does not pin {name}"
        assert pinned[name] in requirement.specifier, f"{constraints}: {name} {pinned[name]}"


@pytest.mark.parametrize("constraints", CONSTRAINTS)
def test_constraints_are_plain_pins_in_order(constraints):
    lines = [line for line in (ROOT / constraints).read_text().splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[0-9][0-9A-Za-z.]*", line) for line in lines), lines
    assert lines == sorted(lines, key=str.lower)
    assert len({canonicalize_name(line.split("==")[0]) for line in lines}) == len(lines), "a name twice"


def test_the_two_constraints_differ_only_in_torch_triton_and_numpy():
    new, old = (versions(constraints) for constraints in CONSTRAINTS)
    assert {name for name in new if new[name] != old.get(name)} == {"torch", "triton", "numpy"}
    assert new.keys() == old.keys()


def test_torch_and_triton_belong_together():
    new, old = (versions(constraints) for constraints in CONSTRAINTS)
    assert (new["torch"], new["triton"]) == (Version("2.13.0"), Version("3.7.1"))
    assert (old["torch"], old["triton"]) == (Version("2.11.0"), Version("3.6.0"))
    assert old["numpy"] < Version("2.4"), "Triton 3.6 interprets kernels with numpy < 2.4 only"


def test_triton_is_asked_for_only_where_it_has_wheels():
    (triton,) = (requirement for requirement in direct() if requirement.name == "triton")
    wheels = {("linux", "x86_64"), ("linux", "aarch64")}
    for platform, machine in [*wheels, ("linux", "armv7l"), ("darwin", "arm64"), ("win32", "AMD64")]:
        environment = {**default_environment(), "sys_platform": platform, "platform_machine": machine}
        assert triton.marker is not None
        assert triton.marker.evaluate(environment) == ((platform, machine) in wheels), (platform, machine)


def test_the_running_environment_is_one_the_project_allows():
    oldest = bootstrap.PYTHONS[0]
    assert PROJECT["requires-python"] == ">={}.{}".format(*oldest)
    assert sys.version_info >= oldest


def test_every_module_a_command_needs_is_pinned():
    for target, modules in bootstrap.NEEDS.items():
        for module in modules:
            name = canonicalize_name(bootstrap.DISTRIBUTIONS.get(module, module))
            assert all(name in versions(constraints) for constraints in CONSTRAINTS), (target, module)


def imports(file: Path) -> set[str]:
    """The top-level modules that a file imports, wherever in it."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            found.add(node.module)
    return {name.partition(".")[0] for name in found}


@pytest.mark.parametrize(
    ("folder", "extras"), [("labkit", ["peers", "cluster"]), ("tests", ["test", "peers"])]
)
def test_what_is_imported_is_asked_for_by_name(folder, extras):
    asked = PROJECT["dependencies"] + [
        name for extra in extras for name in PROJECT["optional-dependencies"][extra]
    ]
    asked = {canonicalize_name(Requirement(name).name) for name in asked}
    imported = set().union(*(imports(file) for file in (ROOT / folder).rglob("*.py")))
    ours = {"labkit"} | {file.stem for file in (ROOT / folder).rglob("*.py")}
    belongs = packages_distributions()
    for module in imported - set(sys.stdlib_module_names) - ours:
        names = {canonicalize_name(name) for name in belongs.get(module, [module])}
        assert names & asked, f"{folder} imports {module}, which pyproject.toml does not ask for"


def test_no_module_of_the_package_hides_another():
    # bootstrap.py is run as a file: its folder is searched first, also by the standard library.
    ours = {file.stem for file in (ROOT / "labkit").glob("*.py")} - {"__init__", "__main__"}
    needed = {module for modules in bootstrap.NEEDS.values() for module in modules}
    assert not ours & (set(sys.stdlib_module_names) | needed)


def test_bootstrap_parses_on_an_old_python_and_needs_nothing_installed():
    file = ROOT / "labkit" / "bootstrap.py"
    ast.parse(file.read_text(), feature_version=(3, 8))
    assert imports(file) <= set(sys.stdlib_module_names) | {"__future__"}


def test_licence():
    text = " ".join((ROOT / "LICENSE").read_text().split())
    assert text.startswith("BSD 3-Clause License Copyright (c) 2026, the labkit contributors")
    assert "Neither the name of the copyright holder nor the names of its contributors" in text
    assert 'PROVIDED BY THE COPYRIGHT HOLDERS AND CONTRIBUTORS "AS IS"' in text
    assert PROJECT["license"] == "BSD-3-Clause"


@pytest.mark.parametrize(
    "arguments",
    [["ruff", "check", "."], ["ruff", "format", "--check", "."], ["mypy"]],
    ids=["ruff check", "ruff format", "mypy"],
)
def test_lint(arguments):
    if importlib.util.find_spec(arguments[0]) is None:
        pytest.skip(f"{arguments[0]} is not installed in this environment")
    ran = subprocess.run([sys.executable, "-m", *arguments], cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr


MAKE = {  # what a target runs, after the Python of the environment
    "setup": ["setup"],
    "run LESSONS=01 ARGS=--quick": ["run -m labkit run 01 --quick"],
    "test PYTEST_ARGS=-x": ["test -m pytest -n 2 --dist loadfile -x"],
    "lab": ["lab -m jupyterlab --ServerApp.ip=127.0.0.1 --ServerApp.root_dir=notebooks"],
    "doctor": ["doctor -m labkit doctor"],
    "record LESSONS=01": ["record -m labkit record 01"],
    "lint": ["lint -m ruff check .", "lint -m ruff format --check .", "lint -m mypy"],
}


@pytest.mark.parametrize("target", MAKE)
def test_make_runs_each_target_through_the_bootstrap(target):
    if shutil.which("make") is None:
        pytest.skip("make is not installed here")
    command = ["make", "-n", "PYTHON=some-python", *target.split()]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    lines = [" ".join(line.split()) for line in ran.stdout.splitlines() if "bootstrap" in line]
    lines = [line.replace(" --allow-root", "") for line in lines]  # only where the tests run as root
    assert lines == [f"some-python labkit/bootstrap.py {arguments}" for arguments in MAKE[target]]
    assert all(arguments.split()[0] in bootstrap.NEEDS for arguments in MAKE[target])


def test_make_alone_lists_every_target():
    if shutil.which("make") is None:
        pytest.skip("make is not installed here")
    ran = subprocess.run(["make"], cwd=ROOT, capture_output=True, text=True, check=True)
    (phony,) = re.findall(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    assert re.findall(r"^  make (\w+)", ran.stdout, flags=re.MULTILINE) == phony.split()


def test_ci_script_is_executable_bash():
    script = ROOT / ".ci" / "run"
    assert script.stat().st_mode & 0o111 == 0o111
    assert script.read_text().startswith("#!/usr/bin/env bash\n")
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("bash is not installed here")
    subprocess.run([bash, "-n", str(script)], check=True)


HOME_PATH = re.compile(r"/(?:home|Users|root)/\w|[A-Z]:\\\\?Users\\")
REGISTRY = re.compile(
    r"https?://([\w.-]*(?:pypi|pythonhosted|anaconda|artifact|nexus|mirror|whl|wheel|pytorch)[\w.-]*)"
)
INDEX_OPTION = re.compile(r"(?:index-url|find-links|INDEX_URL|FIND_LINKS)[\s=\"',]+https?://([\w.-]+)")


def foreign(text: str) -> list[str]:
    """What a text says of one machine: home folders, and package registries other than PyTorch's own."""
    hosts = REGISTRY.findall(text) + INDEX_OPTION.findall(text)
    strange = [
        host for host in hosts if host not in ("download.pytorch.org", "pytorch.org", "docs.pytorch.org")
    ]
    return [match.group() for match in HOME_PATH.finditer(text)] + strange


def test_foreign_finds_what_it_should():
    slash = "/"
    assert foreign(f"see {slash}home{slash}someone/x and {slash}root{slash}y") == [
        f"{slash}home{slash}s",
        f"{slash}root{slash}y",
    ]
    assert foreign("--index-url http" + "://packages.example.org/simple") == ["packages.example.org"]
    assert foreign("http" + "s://my.pypi.example/simple") == ["my.pypi.example"]
    assert foreign("--index-url https://download.pytorch.org/whl/cpu") == []


def test_no_file_speaks_of_one_machine():
    listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("not a git checkout: no list of the files that belong to the project")
    ran = subprocess.run(listing, cwd=ROOT, capture_output=True, text=True, check=True)
    files = [ROOT / name for name in ran.stdout.split("\0") if name]
    assert ROOT / "pyproject.toml" in files
    found = {}
    for file in filter(Path.is_file, files):
        try:
            text = file.read_text()
        except UnicodeDecodeError:
            continue  # a picture
        if strange := foreign(text):
            found[str(file.relative_to(ROOT))] = strange[:5]
    assert not found
