"""The set-up as make runs it, in a toy clone: real environments, a real pip, packages from a folder."""

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
import zipfile

import pytest

from labkit import backend, bootstrap, places

PROJECT = """
    [build-system]
    requires = []
    build-backend = "building"
    backend-path = ["."]
"""
BUILDING = """
    import pathlib, time, zipfile

    def build_editable(folder, settings=None, metadata=None):
        if pathlib.Path("slow").exists():
            pathlib.Path("slow").write_text("now")
            time.sleep(3)
        needs = ["torch", "tool", "tester; extra == 'test'"]
        return wheel(folder, "gpu_labkit", "1.0", "Provides-Extra: test\\n", needs)

    def wheel(folder, name, version, more="", needs=()):
        file, info = f"{name}-{version}-py3-none-any.whl", f"{name}-{version}.dist-info"
        needs = "".join(f"Requires-Dist: {need}\\n" for need in needs)
        with zipfile.ZipFile(f"{folder}/{file}", "w") as made:
            made.writestr(f"{name}.py", "")
            about = f"Metadata-Version: 2.1\\nName: {name}\\nVersion: {version}\\n{more}{needs}"
            made.writestr(f"{info}/METADATA", about)
            made.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\\nTag: py3-none-any\\n")
            made.writestr(f"{info}/RECORD", "")
        return file
"""
BACKEND = "import pathlib\ndef is_nvidia_here(): return pathlib.Path(__file__).with_name('gpu').exists()\n"
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
    (folder / "labkit").mkdir()
    shutil.copy(bootstrap.__file__, folder / "labkit")
    (folder / "labkit" / "backend.py").write_text(BACKEND)
    (folder / "pyproject.toml").write_text(textwrap.dedent(PROJECT))
    (folder / "building.py").write_text(textwrap.dedent(BUILDING))
    (folder / "constraints.txt").write_text("ipykernel==7.0\ntool==1.0\ntorch==2.13.0\n")
    (folder / "wheels").mkdir()
    made = {"zipfile": zipfile}
    exec(textwrap.dedent(BUILDING), made)
    for name, version in WHEELS:
        made["wheel"](folder / "wheels", name, version)
    assert have(folder) == {"torch": "2.13.0+cpu", "tool": "1.0"}
    return folder


def start(folder, target="run", code=SHOW, **variables):
    env = {name: text for name, text in os.environ.items() if name not in VARIABLES}
    env |= {"PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull, "PIP_FIND_LINKS": str(folder / "wheels")}
    env |= {"PIP_TARGET": "elsewhere", "PIP_USER": "1", **variables}  # the first two are not to be heard
    command = [sys.executable, str(folder / "labkit" / "bootstrap.py"), *target.split(), "-c", code]
    pipe = subprocess.PIPE
    # Also where the tests run without a terminal Ctrl-C is heard.
    return subprocess.Popen(
        command, env=env, cwd=folder, stdout=pipe, stderr=pipe, text=True, start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip


def run(folder, *arguments, **variables):
    """The exit status and what was printed: on stdout, on stderr."""
    process = start(folder, *arguments, **variables)
    out, err = process.communicate(timeout=120)
    return process.returncode, out, err


def have(folder, target="run", **variables):
    """The toy packages that a command finds in its environment."""
    status, out, err = run(folder, target, **variables)
    assert status == 0, out + err
    return json.loads(out.splitlines()[-1])[0]


def change(folder):
    """Pins another version of ``tool``, and gives it."""
    file, tools = folder / "constraints.txt", ["1.0", "2.0"]
    old, new = tools if "tool==1.0" in file.read_text() else reversed(tools)
    file.write_text(file.read_text().replace(f"tool=={old}", f"tool=={new}"))
    return new


def module(folder):
    """The clone's own bootstrap, to ask it what it would do."""
    spec = importlib.util.spec_from_file_location("toy_bootstrap", folder / "labkit" / "bootstrap.py")
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def test_the_second_command_installs_nothing_and_needs_no_network(course):
    status, out, err = run(course, PIP_FIND_LINKS="")
    (line,) = out.splitlines()
    _, prefix, env = json.loads(line)
    assert (status, err, prefix) == (0, "", str(course / ".venv"))
    assert env["VIRTUAL_ENV"] == prefix and env["PATH"].startswith(f"{prefix}/bin:")
    assert run(course, "run", "raise SystemExit(7)")[0] == 7


def test_changed_constraints_are_installed_in_place(course):
    (course / ".venv" / "theirs").touch()
    tool = change(course)
    status, out, _ = run(course)
    assert status == 0 and "Triton, Jupyter and the rest ... " in out and "virtual environment" not in out
    assert json.loads(out.splitlines()[-1])[0]["tool"] == tool
    assert (course / ".venv" / "theirs").exists()


def test_without_a_network_a_change_fails_in_a_sentence_and_is_made_by_the_next_command(course):
    tool = change(course)
    (course / ".venv" / "theirs").touch()
    status, _, err = run(course, PIP_FIND_LINKS="")
    assert status == 2 and "Traceback" not in err and "ERROR: Cannot install" in err
    assert "the set-up stopped at: Triton, Jupyter and the rest. The next command starts it again" in err
    assert "ENV=current takes the present environment" in err.splitlines()[-1]
    assert have(course)["tool"] == tool and (course / ".venv" / "theirs").exists()


def test_the_build_of_torch(course):
    """The default one with a GPU; it also serves without, and comes where no CPU build can be had."""
    (course / "labkit" / "gpu").touch()
    assert have(course)["torch"] == "2.13.0"
    (course / "labkit" / "gpu").unlink()
    assert len(run(course, PIP_FIND_LINKS="")[1].splitlines()) == 1
    change(course)
    (course / "wheels" / CPU_BUILD).rename(course / CPU_BUILD)
    assert f"no CPU build of torch 2.13.0 could be had from {bootstrap.CPU_INDEX}" in run(course)[1]
    (course / CPU_BUILD).rename(course / "wheels" / CPU_BUILD)
    assert have(course)["torch"] == "2.13.0"


def test_tests_and_lint_add_what_they_need_and_that_serves_everybody(course):
    assert "tester" not in have(course)
    assert "tester" in have(course, "lint")
    assert "... " not in run(course, "run")[1] + run(course, "test")[1]


def test_after_a_killed_set_up_the_next_starts_from_nothing(course):
    """And waits for the step that outlives it."""
    (course / "slow").touch()
    change(course)
    killed, end = start(course), time.monotonic() + 60
    while not (course / "slow").read_text():
        assert time.monotonic() < end and killed.poll() is None
        time.sleep(0.05)
    (course / "slow").unlink()
    killed.kill()
    killed.communicate(timeout=60)
    (course / ".venv" / "half").touch()
    stopped = start(course)
    assert "waiting for another set-up" in stopped.stdout.readline()
    os.killpg(stopped.pid, signal.SIGINT)
    assert (
        stopped.communicate(timeout=60)[1] == "\nlabkit: stopped; the next command starts the set-up again.\n"
    )
    assert stopped.returncode == 130
    status, out, err = run(course)
    assert status == 0 and "virtual environment in .venv ... " in out, err
    assert not (course / ".venv" / "half").exists()


def test_pyproject_was_changed_and_of_two_commands_at_once_one_sets_up(course):
    (course / "pyproject.toml").write_text((course / "pyproject.toml").read_text() + "# more\n")
    both = [start(course) for _ in range(2)]
    printed = [process.communicate(timeout=120)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert sorted(text.count("Jupyter and the rest ... ") for text in printed) == [0, 1]


def test_a_full_disk_is_told(course):
    if subprocess.run(["unshare", "--mount", "--map-root-user", "true"], capture_output=True).returncode:
        pytest.skip("this machine lets nobody here mount a disk of its own")
    script = f"""
        mount -t tmpfs -o size=5m tmpfs "$1" && mkdir "$1/labkit" && cd {course} &&
        cp labkit/*.py "$1/labkit" && cp building.py pyproject.toml constraints.txt "$1" &&
        {sys.executable} "$1/labkit/bootstrap.py" setup
    """
    (course / "small").mkdir()
    command = ["unshare", "--mount", "--map-root-user", "sh", "-c", script, "sh", str(course / "small")]
    full = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert full.returncode == 2 and "Traceback" not in full.stderr
    assert "stopped at: virtual environment in .venv, for the disk is full." in full.stderr


def test_a_moved_clone_or_another_python_starts_from_nothing(course, monkeypatch):
    setup = module(course).Setup("2.13", None, "")
    monkeypatch.delenv("PYTHON", raising=False)
    assert setup.is_done() and setup.is_sound()
    for key in ("root", "interpreter"):
        before = setup.stamp.read_text()
        setup.stamp.write_text(json.dumps({**json.loads(before), key: "/elsewhere"}))
        assert not setup.is_done() and not setup.is_sound()
        setup.stamp.write_text(before)
    monkeypatch.setenv("PYTHON", "python3")  # make runs this file with it
    assert setup.is_done()
    monkeypatch.setattr(sys, "executable", "/another/python")
    assert not setup.is_done() and not setup.is_sound()
    monkeypatch.delenv("PYTHON")
    setup.stamp.write_text('{"root": ')  # a damaged one is nobody's word
    assert not setup.is_done() and setup.is_sound()
    setup.python.unlink()
    assert not setup.is_sound()


def test_what_no_environment_can_be_made_of_is_told_in_a_sentence(course, monkeypatch, capsys):
    found = module(course)
    setup = found.Setup("2.13", None, "")
    for owner, name, value, said in [
        (sys, "version_info", (3, 10, 1), "Python 3.11 to 3.14 is needed, and"),
        (importlib.util, "find_spec", lambda name: None, "`apt install python3-venv`"),
        (sys, "platform", "darwin", "use WSL 2 on Windows, a Linux container or virtual machine on macOS"),
    ]:
        with monkeypatch.context() as patch, pytest.raises(SystemExit):
            patch.setattr(owner, name, value)
            setup.ensure()
        (line,) = capsys.readouterr().err.splitlines()
        assert said in line


def test_the_gpu_is_the_backends_word():
    assert bootstrap.has_gpu() == backend.is_nvidia_here()


@pytest.mark.parametrize("torch", bootstrap.TORCHES)
def test_another_ipykernel_is_an_environment_that_differs_in_that(torch):
    usual, other = (bootstrap.Setup(torch, series, "") for series in (None, "6.31"))
    differ = set(usual.constraints.splitlines()) ^ set(other.constraints.splitlines())
    assert {line.split("==")[0] for line in differ} == {"ipykernel"} and "ipykernel==6.31.0" in differ
    assert other.venv.name == usual.venv.name + "-ipykernel631" and other.sources != usual.sources


def test_current_names_what_is_missing_and_installs_nothing(course):
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(course / "bare")], check=True)
    env = {name: text for name, text in os.environ.items() if name not in VARIABLES} | {"ENV": "current"}
    command = [course / "bare" / "bin" / "python", course / "labkit" / "bootstrap.py", "lab", "-c", SHOW]
    ran = subprocess.run(command, env=env, capture_output=True, text=True)
    (line,) = ran.stderr.splitlines()
    assert ran.returncode == 2 and "pip install -c constraints.txt click" in line and " jupyterlab " in line
    assert " pillow " in line and "PIL" not in line


def test_current_runs_this_python_with_the_checkout_and_its_kernel_first(course, tmp_path):
    """The user has another kernel named python3, and another labkit."""
    pytest.importorskip("ipykernel", reason="ipykernel is not installed")
    theirs = tmp_path / "kernels" / "python3"
    theirs.mkdir(parents=True)
    (theirs / "kernel.json").write_text(
        '{"argv": ["theirs"], "display_name": "theirs", "language": "python"}'
    )
    code = "from jupyter_client.kernelspec import get_kernel_spec as get; import sys, labkit\n"
    code += "print(get('python3').argv[0], labkit.__file__, sys.executable)"
    variables = {"ENV": "current", "JUPYTER_PATH": str(tmp_path), "JUPYTER_DATA_DIR": str(tmp_path)}
    (course / "labkit" / "__init__.py").touch()
    status, out, err = run(course, "setup", code, **variables, PYTHONPATH=str(places.CHECKOUT))
    assert status == 0, err
    kernel, package, python = out.split()
    assert kernel in ("python", "python3", sys.executable) and python == sys.executable
    assert package == str(course / "labkit" / "__init__.py")


@pytest.mark.parametrize(
    ("target", "variables", "word"),
    [
        ("", {}, "run"),
        ("no-such-target", {}, "run"),
        ("setup", {"TORCH": "2.12"}, "2.11"),
        ("setup", {"IPYKERNEL": "5"}, "6.31"),
        ("setup", {"IPYKERNEL": "6.31", "ENV": "current"}, "leave one out"),
    ],
)
def test_a_wrong_call_is_one_sentence(course, target, variables, word):
    status, _, err = run(course, target, **variables)
    assert status == 2 and len(err.splitlines()) == 1 and word in err
