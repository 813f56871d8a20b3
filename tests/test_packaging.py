"""The project's files agree with each other: versions, tools, commands, licence, nothing of one machine."""

import ast
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import distribution, packages_distributions, version
from pathlib import Path

import pytest
import yaml
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from labkit import bootstrap, doctor, lessons

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


@pytest.mark.parametrize(
    ("torch", "triton", "apart"),
    [
        ("2.11.0", "3.6.0", {"torch", "triton", "numpy"}),
        ("2.13.0", "3.7.1", set()),
        ("2.15.0", "3.9.0", {"torch", "triton"}),
    ],
)
def test_the_constraints_differ_only_in_torch_and_what_belongs_to_it(torch, triton, apart):
    usual, these = versions(CONSTRAINTS[0]), versions(bootstrap.TORCHES[torch.removesuffix(".0")][0])
    assert (these["torch"], these["triton"]) == (Version(torch), Version(triton))
    assert doctor.TRITON_OF_TORCH[torch.removesuffix(".0")] == triton
    assert {name for name in usual if usual[name] != these.get(name)} == apart
    assert usual.keys() == these.keys()
    if these["triton"] < Version("3.7"):
        assert these["numpy"] < Version("2.4"), "Triton 3.6 interprets kernels with numpy < 2.4 only"


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


@pytest.mark.parametrize(("folder", "extras"), [("labkit", ["peers"]), ("tests", ["test", "peers"])])
def test_what_is_imported_is_asked_for_by_name(folder, extras):
    asked = PROJECT["dependencies"] + [
        name for extra in extras for name in PROJECT["optional-dependencies"][extra]
    ]
    asked = {canonicalize_name(Requirement(name).name) for name in asked}
    imported = set().union(*(imports(file) for file in (ROOT / folder).rglob("*.py")))
    ours = {"labkit"} | {file.stem for file in (ROOT / folder).rglob("*.py")}
    # Where these are not installed nothing says whose modules they are.
    without = {"pynvml": ["nvidia-ml-py"], "websocket": ["websocket-client"]}
    belongs = {**without, **packages_distributions()}
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


def test_reading_a_lesson_builds_no_grammar():
    """It takes a second, which every command and every kernel would wait for."""
    code = "import sys, labkit.lessons, jsonschema; assert 'lark' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


HIDDEN = ("TEACHING.md", "solutions", "__pycache__")
"""What a learner's JupyterLab does not list."""
LAB = " ".join(
    [
        "lab -m labkit.lab --ServerApp.ip=127.0.0.1 --ServerApp.root_dir=notebooks",
        *(f"--ContentsManager.hide_globs={name}" for name in HIDDEN),
    ]
)
MAKE = {  # what a target runs, after the Python of the environment
    "setup": ["setup"],
    "run LESSONS=01 ARGS=--quick": ["run -m labkit run 01 --quick"],
    "lab IPYKERNEL=6.31": [LAB],
    "test PYTEST_ARGS=-x": ["test -m pytest -n 2 --dist loadfile --no-loadscope-reorder -x"],
    "lab": [LAB],
    "doctor": ["doctor -m labkit doctor"],
    "record LESSONS=01": ["record -m labkit record 01"],
    "bench ARGS=--peers": ["bench -m labkit bench --peers"],
    "slides LESSONS=01": ["slides -m labkit slides 01"],
    "site ARGS=--execute": ["site -m labkit site --execute"],
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


def test_answers_are_not_among_the_lessons_that_a_learner_sees():
    manager = pytest.importorskip("jupyter_server.services.contents.largefilemanager").LargeFileManager
    listed = manager(root_dir=str(ROOT / "notebooks"), hide_globs=list(HIDDEN)).get("")["content"]
    assert sorted(entry["name"] for entry in listed) == sorted(path.name for path in lessons.find())


def test_with_another_ipykernel_make_runs_what_needs_a_kernel():
    if shutil.which("make") is None:
        pytest.skip("make is not installed here")
    command = ["make", "--no-print-directory", "-n", "test", "IPYKERNEL=6.31", "PYTEST_ARGS=-x"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    paths = [word for word in ran.stdout.split() if word.startswith("tests/")]
    assert paths[0] == "tests/browser" and "tests/test_timeline_panel.py" in paths
    assert all((ROOT / path).exists() for path in paths) and ran.stdout.split()[-1] == "-x"


def test_make_alone_lists_every_target():
    if shutil.which("make") is None:
        pytest.skip("make is not installed here")
    ran = subprocess.run(["make"], cwd=ROOT, capture_output=True, text=True, check=True)
    (phony,) = re.findall(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    assert re.findall(r"^  make (\w+)", ran.stdout, flags=re.MULTILINE) == phony.split()


# ---- conda and Binder ------------------------------------------------------------------------------------

CONDA = ROOT / "environment.yml"
BINDER = ROOT / "binder" / "environment.yml"


def read_conda(file: Path) -> tuple[list[str], list[str]]:
    """What conda installs, and the lines that it gives to pip."""
    dependencies = yaml.safe_load(file.read_text())["dependencies"]
    (pip,) = (each["pip"] for each in dependencies if isinstance(each, dict))
    return [each for each in dependencies if isinstance(each, str)], pip


@pytest.mark.parametrize("file", [CONDA, BINDER], ids=["conda", "binder"])
def test_a_conda_environment_has_one_supported_python_and_the_constraints(file):
    packages, pip = read_conda(file)
    assert packages[1:] == ["pip"]
    found = re.fullmatch(r"python=(\d+)\.(\d+)", packages[0])
    assert found and bootstrap.supported(tuple(map(int, found.groups()))), packages[0]
    assert packages == read_conda(CONDA)[0], "both take the same Python"
    (constraints,) = (line.removeprefix("-c ") for line in pip if line.startswith("-c"))
    assert (file.parent / constraints).resolve() == ROOT / CONSTRAINTS[0]


def test_conda_installs_the_package_itself():
    assert read_conda(CONDA)[1][1:] == ["-e ."]


def test_binder_installs_what_the_package_asks_for_and_the_cpu_build_of_torch():
    _, (_, index, *lines) = read_conda(BINDER)
    assert index == f"--extra-index-url {bootstrap.CPU_INDEX}"
    assert not [line for line in lines if line.startswith("-")]
    asked = [Requirement(line) for line in lines]
    names = [canonicalize_name(requirement.name) for requirement in asked]
    wanted = {canonicalize_name(Requirement(name).name) for name in PROJECT["dependencies"]}
    assert sorted(names) == sorted(wanted), "binder/environment.yml names what pyproject.toml does"
    pinned = {requirement.name: str(requirement.specifier) for requirement in asked if requirement.specifier}
    assert pinned == {"torch": f"=={bootstrap.pins(ROOT / CONSTRAINTS[0])['torch']}+cpu"}


def reached(requirements: list[str]) -> dict[str, Version]:
    """The installed versions of what these ask for, and of what that asks for, by canonical name."""
    found: dict[str, Version] = {}
    asked = [(Requirement(line), "") for line in requirements]
    seen = set()
    while asked:
        requirement, extra = asked.pop()
        if requirement.marker and not requirement.marker.evaluate({**default_environment(), "extra": extra}):
            continue
        name = canonicalize_name(requirement.name)
        here = distribution(name)
        found[name] = Version(Version(here.version).public)
        assert requirement.specifier.contains(here.version, prereleases=True), f"{requirement} is not met"
        for each in {"", *requirement.extras}:
            if (name, each) not in seen:
                seen.add((name, each))
                asked += [(Requirement(line), each) for line in here.requires or []]
    return found


@pytest.mark.parametrize(
    "lines",
    [["gpu-labkit[test]"], read_conda(BINDER)[1][2:]],
    ids=["environment.yml", "binder/environment.yml"],
)
def test_what_the_pip_section_asks_for_is_met_and_pinned(lines):
    """pip chose these versions by the same lines and constraints when it set this environment up."""
    if not (Path(sys.prefix) / bootstrap.STAMP).exists():
        pytest.skip("make did not set this environment up, so its versions are not those of the constraints")
    here = Version(version("torch")).public
    (chosen,) = (each for each in CONSTRAINTS if versions(each)["torch"].public == here)
    pinned = versions(chosen)
    other = chosen != CONSTRAINTS[0]
    found = reached([re.sub("^torch==.*", "torch", line) if other else line for line in lines])
    assert {"torch", "triton", "jupyterlab", "ipykernel"} <= found.keys()
    apart = ("gpu-labkit", "nvidia-", "cuda-")  # the latter come with a build of torch for CUDA
    strange = {n: got for n, got in found.items() if not n.startswith(apart) and got != pinned.get(n)}
    assert not strange, f"not what {chosen} says: {strange}"


def test_binder_installs_the_package_and_trusts_the_lessons(tmp_path):
    for program in ("pip", "jupyter"):
        stub = tmp_path / program
        stub.write_text(f'#!/bin/sh\necho {program} "$@"\n')
        stub.chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    ran = subprocess.run(
        [ROOT / "binder" / "postBuild"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    install, trust, news = ran.stdout.splitlines()
    assert install == "pip install --no-deps -e ."
    lessons = [path.relative_to(ROOT).as_posix() for path in sorted((ROOT / "notebooks").glob("*.ipynb"))]
    assert trust.split() == ["jupyter", "trust", *lessons]
    assert news == "jupyter labextension disable @jupyterlab/apputils-extension:announcements"


def test_every_folder_of_the_package_is_installed():
    told = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    there = {
        folder.relative_to(ROOT).as_posix().replace("/", ".")
        for folder in (ROOT / "labkit").rglob("*/")
        if any(folder.glob("*.py"))
    }
    assert set(told) == there | {"labkit"}


@pytest.mark.parametrize(("chromium", "apt_get"), [(0, 100), (1, 100), (1, 0)])
def test_ci_runs_the_tests_and_says_why_there_is_no_chromium(tmp_path, chromium, apt_get):
    stubs = {name: f"exit {chromium}" for name in ("chromium", "google-chrome", "chromium-browser")}
    stubs |= {"apt-get": f"echo no such package >&2; exit {apt_get}", "make": 'echo make "$@"'}
    for name, line in stubs.items():
        stub = tmp_path / name
        stub.write_text(f"#!/bin/sh\n{line}\n")
        stub.chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    ran = subprocess.run([ROOT / ".ci" / "run"], env=environment, capture_output=True, text=True, check=True)
    assert ran.stdout == "make setup FOR=test\nmake test\n"
    reason = "No Chromium, so the browser tests will be skipped: "
    assert ran.stderr.startswith(reason) if chromium else ran.stderr == ""
    if chromium and os.getuid() == 0:
        assert ("no such package" if apt_get else "it does not run") in ran.stderr


def test_ci_runs_no_tests_where_the_set_up_fails(tmp_path):
    for name, line in {"chromium": "exit 0", "make": 'echo make "$@"; exit 3'}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{line}\n")
        (tmp_path / name).chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    ran = subprocess.run([ROOT / ".ci" / "run"], env=environment, capture_output=True, text=True, check=False)
    assert (ran.stdout, ran.returncode) == ("make setup FOR=test\n", 3)


@pytest.mark.parametrize("name", [".ci/run", "binder/postBuild"])
def test_a_script_is_executable_bash(name):
    script = ROOT / name
    assert script.stat().st_mode & 0o111 == 0o111
    assert script.read_text().startswith("#!/usr/bin/env bash\n")
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("bash is not installed here")
    subprocess.run([bash, "-n", str(script)], check=True)


HOME_PATH = re.compile(r"/(?:home|Users|root)/\w|[A-Z]:\\\\?Users\\")
REGISTRY = re.compile(
    r"https?://([\w.-]*(?:pypi|pythonhosted|anaconda|artifact|nexus|mirror|whl|wheel|download\.pytorch)[\w.-]*)"
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
