"""The set-up as make runs it, in a toy clone: real environments, a real pip, packages from a folder."""

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys

import processes
import pytest

from labkit import bootstrap, paths

PROJECT = "[build-system]\nrequires = []\nbuild-backend = 'building'\nbackend-path = ['.']\n"
BUILDING = """
import pathlib, time, zipfile

def build_editable(folder, settings=None, metadata=None):
    if pathlib.Path("slow").exists():
        pathlib.Path("slow").write_text("now")
        time.sleep(2)
    needs = ["torch", "tool", "tester; extra == 'test'"]
    return wheel(folder, "gpu_labkit", "1.0", "Provides-Extra: test\\n", needs)

def wheel(folder, name, version, more="", needs=()):
    info = f"{name}-{version}.dist-info"
    about = f"Metadata-Version: 2.1\\nName: {name}\\nVersion: {version}\\n{more}"
    with zipfile.ZipFile(f"{folder}/{name}-{version}-py3-none-any.whl", "w") as made:
        made.writestr(f"{name}.py", "")
        made.writestr(f"{info}/METADATA", about + "".join(f"Requires-Dist: {need}\\n" for need in needs))
        made.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\\nTag: py3-none-any\\n")
        made.writestr(f"{info}/RECORD", "")
    return f"{name}-{version}-py3-none-any.whl"
"""
WHEELS = [("torch", "2.13.0"), ("torch", "2.13.0+cpu"), ("tool", "1.0"), ("tool", "2.0"), ("tester", "1.0")]
CPU_BUILD = "torch-2.13.0+cpu-py3-none-any.whl"
VARIABLES = ("ENV", "TORCH", "IPYKERNEL", "PYTHON", "PYTHONPATH", "JUPYTER_PATH")
SHOW = """
import json, os, sys, importlib.metadata as m
have = {d.name: d.version for d in m.distributions() if d.name in ("torch", "tool", "tester")}
print(json.dumps([have, sys.prefix, dict(os.environ)]))
"""


@pytest.fixture(scope="module")
def course(tmp_path_factory):
    """The toy clone, set up by its first command."""
    if importlib.util.find_spec("ensurepip") is None:
        pytest.skip("the Python of these tests cannot make virtual environments")
    folder = tmp_path_factory.mktemp("course")
    for name in ("labkit", "wheels"):
        (folder / name).mkdir()
    shutil.copy(bootstrap.__file__, folder / "labkit")
    constraints = "ipykernel==7.0\ntool==1.0\ntorch==2.13.0\n"
    (folder / "bin").mkdir()
    (folder / "bin" / "nvidia-smi").write_text(f"#!/bin/sh\ncat {folder}/gpus 2> {os.devnull}\n")
    (folder / "bin" / "nvidia-smi").chmod(0o755)
    (folder / "pyproject.toml").write_text(PROJECT)
    (folder / "building.py").write_text(BUILDING)
    (folder / "constraints.txt").write_text(constraints)
    made = {}
    exec(BUILDING, made)
    for name, version in WHEELS:
        made["wheel"](folder / "wheels", name, version)
    assert have(folder) == {"torch": "2.13.0+cpu", "tool": "1.0"}
    return folder


def start(folder, target="run", code=SHOW, **variables):
    env = {name: text for name, text in os.environ.items() if name not in VARIABLES}
    env |= {"PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull, "PIP_FIND_LINKS": str(folder / "wheels")}
    env |= {"PATH": f"{folder / 'bin'}:{env['PATH']}"}
    env |= {"PIP_TARGET": "elsewhere", "PIP_USER": "1", **variables}  # the first two are not to be heard
    command = [folder / "labkit" / "bootstrap.py", *target.split(), "-c", code]
    return processes.python(*command, env=env, cwd=folder)


def run(folder, *arguments, **variables):
    """The exit status and what was printed."""
    process = start(folder, *arguments, **variables)
    printed, _ = process.communicate(timeout=120)
    return process.returncode, printed


def have(folder, target="run", **variables):
    """The toy packages that a command finds in its environment."""
    status, printed = run(folder, target, **variables)
    assert status == 0, printed
    return json.loads(printed.splitlines()[-1])[0]


def change(folder):
    """Pins another version of ``tool``, and gives it."""
    file, tools = folder / "constraints.txt", ["1.0", "2.0"]
    old, new = tools if "tool==1.0" in file.read_text() else reversed(tools)
    file.write_text(file.read_text().replace(f"tool=={old}", f"tool=={new}"))
    return new


def test_the_second_command_installs_nothing_and_needs_no_network(course):
    status, printed = run(course, PIP_FIND_LINKS="")
    _, prefix, env = json.loads(printed)
    assert (status, prefix) == (0, str(course / ".venv"))
    assert env["VIRTUAL_ENV"] == prefix and env["PATH"].startswith(f"{prefix}/bin:")
    assert run(course, "run", "raise SystemExit(7)")[0] == 7


def test_a_change_is_installed_in_place_by_one_command_and_without_a_network_by_the_next(course):
    tool = change(course)
    (course / ".venv" / "theirs").touch()
    status, printed = run(course, PIP_FIND_LINKS="")
    assert status == 2 and "Traceback" not in printed and "ERROR: Cannot install" in printed
    assert "the set-up stopped at: Triton, Jupyter and the rest." in printed
    both = [start(course) for _ in range(2)]
    said = [process.communicate(timeout=120)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert sorted(text.count("Jupyter and the rest ... ") for text in said) == [0, 1]
    assert all(json.loads(text.splitlines()[-1])[0]["tool"] == tool for text in said)
    assert (course / ".venv" / "theirs").exists()


def test_the_build_of_torch(course):
    """The default one with a GPU; it also serves without, and comes where no CPU build can be had."""
    (course / "gpus").write_text("GPU 0: NVIDIA H200 (UUID: GPU-1)\n")
    assert have(course)["torch"] == "2.13.0"
    (course / "gpus").unlink()
    assert "..." not in run(course, PIP_FIND_LINKS="")[1]
    (course / "pyproject.toml").write_text(PROJECT + "# more\n")
    (course / "wheels" / CPU_BUILD).rename(course / CPU_BUILD)
    assert f"no CPU build of torch 2.13.0 could be had from {bootstrap.CPU_INDEX}" in run(course)[1]
    (course / CPU_BUILD).rename(course / "wheels" / CPU_BUILD)
    assert have(course)["torch"] == "2.13.0"


def test_after_a_killed_set_up_the_next_waits_for_the_step_that_outlives_it_and_installs_again(course):
    (course / "slow").touch()
    tool = change(course)
    killed = start(course)
    processes.wait_for((course / "slow").read_text, "the step", 60)
    (course / "slow").unlink()
    killed.kill()
    killed.wait(60)
    stopped = start(course)
    assert "waiting for another set-up" in stopped.stdout.readline()
    os.killpg(stopped.pid, signal.SIGINT)
    said, _ = stopped.communicate(timeout=60)
    assert "stopped; the next command starts" in said and stopped.returncode == 130
    assert have(course)["tool"] == tool


def test_a_moved_clone_or_another_python_starts_from_nothing(course, monkeypatch, capsys):
    spec = importlib.util.spec_from_file_location("toy_bootstrap", course / "labkit" / "bootstrap.py")
    toy = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(toy)
    setup = toy.Setup("2.13", "", "")
    monkeypatch.delenv("PYTHON", raising=False)
    assert setup.is_complete() and setup.is_updatable()
    whole = json.loads(setup.stamp.read_text())
    for key in ("root", "interpreter"):
        setup.stamp.write_text(json.dumps({**whole, key: "/elsewhere"}))
        assert not setup.is_complete() and not setup.is_updatable()
    setup.stamp.write_text('{"root": ')  # a damaged one counts as none
    assert not setup.is_complete() and setup.is_updatable()
    monkeypatch.setenv("PYTHON", "python3")  # make runs this file with it
    monkeypatch.setattr(sys, "executable", "/another/python")
    assert not setup.is_updatable()
    monkeypatch.setattr(sys, "version_info", (3, 10, 1))
    with pytest.raises(SystemExit):
        setup.ensure()
    assert "Python 3.11 to 3.14 is needed" in capsys.readouterr().err


def test_current_names_what_is_missing_and_installs_nothing(course, tmp_path):
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path)], check=True)
    command = [tmp_path / "bin" / "python", course / "labkit" / "bootstrap.py", "lab", "-c", SHOW]
    env = {"PATH": os.environ["PATH"], "ENV": "current"}
    ran = subprocess.run(command, env=env, capture_output=True, text=True)
    assert ran.returncode == 2 and len(ran.stderr.splitlines()) == 1
    said = ran.stderr.split()
    assert {"click", "jupyterlab", "pillow"} <= {*said} and "pip install -c constraints.txt" in ran.stderr


def test_current_runs_this_python_with_the_checkout_and_its_kernel_first(course, tmp_path):
    """The user has another kernel named python3, and another labkit."""
    theirs = tmp_path / "kernels" / "python3" / "kernel.json"
    theirs.parent.mkdir(parents=True)
    theirs.write_text('{"argv": ["theirs"], "display_name": "theirs", "language": "python"}')
    code = "from jupyter_client.kernelspec import get_kernel_spec as get; import sys, labkit\n"
    code += "print(get('python3').argv[0], labkit.__file__, sys.executable)"
    variables = {"ENV": "current", "JUPYTER_PATH": str(tmp_path), "JUPYTER_DATA_DIR": str(tmp_path)}
    (course / "labkit" / "__init__.py").touch()
    status, printed = run(course, "setup", code, **variables, PYTHONPATH=str(paths.CHECKOUT))
    assert status == 0, printed
    kernel, package, python = printed.split()
    assert kernel in ("python", "python3", sys.executable) and python == sys.executable
    assert package == str(course / "labkit" / "__init__.py")


WRONG = [("no-such-target", {}, "run"), ("setup", {"TORCH": "2.12"}, "2.11")]
WRONG += [("setup", {"IPYKERNEL": "6.31", "ENV": "current"}, "leave one out")]


@pytest.mark.parametrize(("target", "variables", "word"), WRONG)
def test_a_wrong_call_is_one_sentence(course, target, variables, word):
    status, printed = run(course, target, **variables)
    assert status == 2 and len(printed.splitlines()) == 1 and word in printed
