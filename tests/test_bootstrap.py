"""Setting up: done once, done again when something changed or stopped midway, and said in one sentence."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from labkit import bootstrap

FILE = Path(bootstrap.__file__)
load_backend = bootstrap.load_backend
HERE = ".".join(map(str, sys.version_info[:2]))


@pytest.fixture(autouse=True)
def plain(monkeypatch):
    """None of the variables that steer the set-up, whatever the tests themselves were started with."""
    for name in (
        "ENV",
        "TORCH",
        "IPYKERNEL",
        "PYTHON",
        "CUDA_VISIBLE_DEVICES",
        "TRITON_INTERPRET",
        "OMP_NUM_THREADS",
        "JUPYTER_PATH",
    ):
        monkeypatch.delenv(name, raising=False)


class FakeSetup(bootstrap.Setup):
    """A set-up whose steps are noted instead of taken: an environment is this Python under another name."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.steps: list[str] = []
        self.builds = "cpu"
        self.fails = False

    def create(self) -> None:
        self.steps.append("create")
        self.bin.mkdir(parents=True, exist_ok=True)
        self.stamp.write_text(bootstrap.UNFINISHED)
        if not self.python.exists():
            self.python.symlink_to(sys.executable)

    def install(self, gpu: bool) -> str:
        self.steps.append("install")
        if self.fails:
            raise SystemExit(2)
        return "default" if gpu else self.builds


@pytest.fixture
def setup(tmp_path):
    (tmp_path / "pyproject.toml").write_text("[project]\n")
    (tmp_path / "constraints.txt").write_text("torch==2.13.0\n")
    return FakeSetup(tmp_path)


def steps(setup: FakeSetup, gpu: bool = False) -> list[str]:
    """What one call of ``ensure`` does."""
    setup.steps.clear()
    setup.ensure(gpu)
    return list(setup.steps)


def test_a_second_setup_does_nothing(setup):
    assert steps(setup) == ["create", "install"]
    assert steps(setup) == []


def test_only_those_who_test_get_the_extra_and_it_serves_everybody(setup):
    assert steps(setup) == ["create", "install"]
    setup.for_tests = True
    assert steps(setup) == ["install"] and steps(setup) == []
    setup.for_tests = False
    assert steps(setup) == []


@pytest.mark.parametrize(("target", "asked"), [("run", "{root}"), ("lint", "{root}[test]")])
def test_a_command_asks_for_what_it_needs(monkeypatch, target, asked):
    seen = []
    monkeypatch.setattr(
        bootstrap, "step", lambda what, command, log, required=True: bool(seen.append(command)) or True
    )
    monkeypatch.setattr(bootstrap.Setup, "ensure", bootstrap.Setup.install)
    monkeypatch.setattr(bootstrap, "has_gpu", lambda: True)
    bootstrap.main([target])
    assert seen[-1][seen[-1].index("-e") + 1] == asked.format(root=bootstrap.ROOT)


@pytest.mark.parametrize("file", ["pyproject.toml", "constraints.txt"])
def test_a_changed_file_installs_again_in_place(setup, file):
    steps(setup)
    (setup.root / file).write_text("# changed\n")
    assert steps(setup) == ["install"]
    assert steps(setup) == []


def test_a_failed_setup_starts_from_nothing_the_next_time(setup):
    setup.fails = True
    with pytest.raises(SystemExit):
        setup.ensure(gpu=False)
    assert setup.installed() == {}
    setup.fails = False
    assert steps(setup) == ["create", "install"]
    assert steps(setup) == []


def test_a_failed_change_leaves_no_stamp(setup):
    steps(setup)
    (setup.root / "constraints.txt").write_text("torch==2.13.0  # newer\n")
    setup.fails = True
    with pytest.raises(SystemExit):
        setup.ensure(gpu=False)
    assert not setup.stamp.exists()
    setup.fails = False
    assert steps(setup) == ["install"]


def test_what_is_edited_during_a_set_up_is_set_up_afterwards(setup, monkeypatch):
    install = setup.install

    def edited(gpu):
        (setup.root / "constraints.txt").write_text("torch==2.13.0  # newer\n")
        return install(gpu)

    with monkeypatch.context() as patch:
        patch.setattr(setup, "install", edited)
        steps(setup)
    assert steps(setup) == ["install"]
    assert steps(setup) == []


def test_an_environment_of_the_users_own_is_kept(setup):
    setup.create()
    setup.stamp.unlink()
    (setup.venv / "theirs").touch()
    assert steps(setup) == ["install"]
    assert (setup.venv / "theirs").exists()


@pytest.mark.parametrize(
    ("had", "gpu", "expected"),
    [
        ("cpu", False, []),
        ("cpu", True, ["install"]),
        ("default", True, []),
        ("default", False, []),  # a CUDA build also runs without a GPU: no download on a login node
    ],
)
def test_the_build_of_torch_decides_with_the_gpu(setup, had, gpu, expected):
    setup.builds = had
    steps(setup)
    assert setup.installed()["torch"] == had
    assert steps(setup, gpu) == expected


@pytest.mark.parametrize("key", ["root", "python"])
def test_a_moved_checkout_or_another_python_starts_from_nothing(setup, key):
    steps(setup)
    stamp = dict(setup.installed())
    stamp[key] = "elsewhere"
    setup.stamp.write_text(json.dumps(stamp))
    assert steps(setup) == ["create", "install"]


@pytest.mark.parametrize("text", ["", "{", "[]", '"x"', "null"])
def test_a_broken_stamp_is_not_trusted(setup, text):
    steps(setup)
    setup.stamp.write_text(text)
    assert steps(setup) == ["install"]


def test_a_python_that_is_gone_starts_from_nothing(setup):
    steps(setup)
    setup.python.unlink()
    assert steps(setup) == ["create", "install"]


def test_create_empties_what_was_there_and_marks_it_unfinished(tmp_path, monkeypatch):
    taken = []
    monkeypatch.setattr(bootstrap, "step", lambda what, command, log: taken.append(command))
    monkeypatch.setattr(bootstrap, "base_python", lambda: "some-python")
    real = bootstrap.Setup(tmp_path)
    (real.venv / "lib").mkdir(parents=True)
    (real.venv / "lib" / "half").touch()
    real.create()
    assert [child.name for child in real.venv.iterdir()] == [bootstrap.STAMP]
    assert real.stamp.read_text() == bootstrap.UNFINISHED
    assert taken == [["some-python", "-m", "venv", str(real.venv)]]
    assert real.is_broken()


# ---- another ipykernel, on top ---------------------------------------------------------------------------


def install_package(site: Path, name: str, version: str) -> None:
    """A distribution with one module that knows its version, as pip would leave it."""
    (site / f"{name}.py").write_text(f"version = {version!r}\n")
    info = site / f"{name}-{version}.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


@pytest.fixture
def beneath(setup, monkeypatch):
    """A real environment, complete, with the newer ipykernel and one that is installed as editable."""
    real_step = bootstrap.step

    def step(what: str, command: list[str], log: Path, required: bool = True) -> bool:
        if "pip" not in command:
            return real_step(what, command, log, required)
        site = bootstrap.site_packages(Path(command[0]))
        install_package(site, "ipykernel", command[-1].removeprefix("ipykernel=="))
        return True

    monkeypatch.setattr(bootstrap, "step", step)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(setup.venv)], check=True)
    site = bootstrap.site_packages(setup.python)
    install_package(site, "ipykernel", "7.4.0")
    install_package(site, "comm", "0.2.3")
    (setup.root / "checkout").mkdir()
    (setup.root / "checkout" / "editable.py").touch()
    (site / "editable.pth").write_text(f"{setup.root / 'checkout'}\n")
    for folder in ("share/jupyter/lab", "share/jupyter/kernels", "etc/jupyter/jupyter_server_config.d"):
        (setup.venv / folder).mkdir(parents=True)
    (setup.venv / "share" / "jupyter" / "lab" / "page.html").touch()
    setup.stamp.write_text(json.dumps(dict(setup.wanted(setup.version()), torch="cpu")))
    return setup


def test_the_other_ipykernel_comes_first_and_the_rest_from_beneath(beneath):
    other = bootstrap.OtherKernel(beneath, "6.31")
    other.ensure(gpu=False)
    assert other.venv != beneath.venv and other.is_done(gpu=False) and beneath.is_done(gpu=False)
    code = (
        "import importlib.metadata as m, sys, ipykernel, comm, editable;"
        "print(m.version('ipykernel'), ipykernel.version, comm.version, sys.prefix)"
    )
    told = subprocess.check_output([str(other.python), "-I", "-c", code], text=True).split()
    assert told == ["6.31.0", "6.31.0", "0.2.3", str(other.venv)]
    below = subprocess.check_output([str(beneath.python), "-I", "-c", code], text=True).split()
    assert below[:2] == ["7.4.0", "7.4.0"]
    assert (other.venv / "share" / "jupyter" / "lab" / "page.html").exists()
    assert (other.venv / "etc" / "jupyter" / "jupyter_server_config.d").is_dir()


def test_the_kernels_of_the_other_environment_are_its_own_python(beneath, tmp_path):
    other = bootstrap.OtherKernel(beneath, "6.31")
    other.ensure(gpu=False)
    bootstrap.environment(tmp_path, str(other.python))
    spec = json.loads((tmp_path / "build" / "jupyter" / "kernels" / "python3" / "kernel.json").read_text())
    assert spec["argv"][0] == str(other.python)


def test_the_other_environment_is_made_once_and_again_when_a_file_changed(beneath, monkeypatch):
    other = bootstrap.OtherKernel(beneath, "6.31")
    other.ensure(gpu=False)
    with monkeypatch.context() as patched:
        patched.setattr(bootstrap, "step", lambda *call, **more: pytest.fail("a set-up step"))
        other.ensure(gpu=False)
    (other.root / "constraints.txt").write_text("# changed\n")
    assert not other.is_done(gpu=False) and not other.is_broken()
    other.install(gpu=False)
    assert (other.venv / "share" / "jupyter" / "lab" / "page.html").exists()


class Steps:
    """Stands in for ``bootstrap.step``: notes pip's arguments; the CPU build comes or does not."""

    def __init__(self, cpu_build: bool) -> None:
        self.cpu_build = cpu_build
        self.installs: list[list[str]] = []

    def __call__(self, what: str, command: list[str], log: Path, required: bool = True) -> bool:
        self.installs.append(command[command.index("install") + 1 :])
        return required or self.cpu_build


@pytest.fixture
def on_linux(monkeypatch):
    monkeypatch.setattr(bootstrap.sys, "platform", "linux")


@pytest.mark.usefixtures("on_linux")
def test_without_a_gpu_only_torch_looks_at_the_cpu_index(monkeypatch):
    fake = Steps(cpu_build=True)
    monkeypatch.setattr(bootstrap, "step", fake)
    assert bootstrap.Setup().install(gpu=False) == "cpu"
    torch, rest = fake.installs
    assert torch[-1] == "torch==2.13.0+cpu" and "--no-deps" in torch and bootstrap.CPU_INDEX in torch
    assert torch[torch.index("--retries") + 1] == "1"
    assert bootstrap.CPU_INDEX not in rest


@pytest.mark.usefixtures("on_linux")
def test_without_a_cpu_build_the_default_one_is_announced(monkeypatch, capsys):
    fake = Steps(cpu_build=False)
    monkeypatch.setattr(bootstrap, "step", fake)
    assert bootstrap.Setup().install(gpu=False) == "default"
    assert len(fake.installs) == 2
    assert "several GB of CUDA packages" in capsys.readouterr().out


@pytest.mark.usefixtures("on_linux")
def test_with_a_gpu_a_cpu_build_is_refused(monkeypatch):
    fake = Steps(cpu_build=True)
    monkeypatch.setattr(bootstrap, "step", fake)
    assert bootstrap.Setup(torch="2.11").install(gpu=True) == "default"
    (only,) = fake.installs
    assert "torch!=2.11.0+cpu" in only and bootstrap.CPU_INDEX not in only


def test_a_failing_step_ends_with_its_output_and_a_sentence(tmp_path, capsys):
    command = [sys.executable, "-c", "print('the reason'); raise SystemExit(3)"]
    with pytest.raises(SystemExit) as ended:
        bootstrap.step("a step", command, tmp_path / "log")
    assert ended.value.code == 2
    out, err = capsys.readouterr()
    assert "a step ... 0 s (failed)" in out
    assert "the reason" in err and "the set-up stopped at: a step" in err
    assert bootstrap.step("a step", command, tmp_path / "log", required=False) is False


def test_a_step_does_not_see_what_would_lead_pip_astray(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "somewhere")
    monkeypatch.setenv("PIP_TARGET", "elsewhere")
    code = "import os; print(sorted(set(os.environ) & {'PYTHONPATH', 'PIP_TARGET'}), os.environ['PIP_USER'])"
    bootstrap.step("a step", [sys.executable, "-c", code], tmp_path / "log")
    assert (tmp_path / "log").read_text() == "[] 0\n"


@pytest.mark.skipif(bootstrap.fcntl is None, reason="this system has no file locks of this kind")
def test_two_setups_do_not_run_at_once(tmp_path):
    code = (
        f"import sys, time; sys.path.insert(0, {str(FILE.parent.parent)!r})\n"
        "from pathlib import Path; from labkit import bootstrap\n"
        "with bootstrap.locked(Path(sys.argv[1])):\n"
        "    print('in', flush=True); time.sleep(0.4); print('out', flush=True)\n"
    )
    log = tmp_path / "log"
    with log.open("w") as output:
        command = [sys.executable, "-c", code, str(tmp_path / "lock")]
        both = [subprocess.Popen(command, stdout=output) for _ in range(2)]
        assert [child.wait(timeout=60) for child in both] == [0, 0]
    assert log.read_text().split() == ["in", "out", "in", "out"]


@pytest.mark.skipif(bootstrap.fcntl is None, reason="this system has no file locks of this kind")
def test_a_file_system_without_locks_stops_no_set_up(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(bootstrap.fcntl, "flock", refuse)
    with bootstrap.locked(tmp_path / "lock"):
        pass


@pytest.mark.parametrize(
    ("version", "expected"),
    [((3, 10), False), ((3, 11), True), ((3, 14), True), ((3, 15), False), (None, False)],
)
def test_supported_pythons(version, expected):
    assert bootstrap.supported(version) is expected


def test_another_python_on_the_path_is_found(monkeypatch):
    known = {"python3.13": (3, 13), "python3.11": (3, 11), sys.executable: (3, 9)}
    monkeypatch.setattr(bootstrap, "python_version", lambda python, modules="sys": known.get(python))
    assert bootstrap.base_python() == "python3.13"
    monkeypatch.setenv("PYTHON", "python3.11")
    assert bootstrap.base_python() == "python3.11"


@pytest.mark.parametrize("chosen", [None, "some-python"])
def test_no_suitable_python_is_one_sentence(monkeypatch, capsys, chosen):
    monkeypatch.setattr(bootstrap, "python_version", lambda python, modules="sys": None)
    if chosen:
        monkeypatch.setenv("PYTHON", chosen)
    with pytest.raises(SystemExit):
        bootstrap.base_python()
    (line,) = capsys.readouterr().err.splitlines()
    assert "Python 3.11 to 3.14" in line and (chosen or "python3-venv") in line


def test_python_version_of_what_does_not_run_or_lacks_a_module():
    assert bootstrap.python_version(sys.executable) == sys.version_info[:2]
    assert bootstrap.python_version(sys.executable, "no_such_module") is None
    assert bootstrap.python_version("no-such-python") is None


def test_current_names_what_is_missing_and_installs_nothing(monkeypatch, capsys):
    monkeypatch.setitem(bootstrap.NEEDS, "run", ("json", "no_such_module", "PIL"))
    monkeypatch.setitem(bootstrap.DISTRIBUTIONS, "no_such_module", "papermill")
    monkeypatch.setattr(bootstrap.os, "execve", lambda *call: pytest.fail("it ran all the same"))
    monkeypatch.setattr(bootstrap.subprocess, "Popen", lambda *call, **more: pytest.fail("a set-up step"))
    monkeypatch.setenv("ENV", "current")
    with pytest.raises(SystemExit) as ended:
        bootstrap.main(["run", "-m", "labkit", "run"])
    assert ended.value.code == 2
    err = capsys.readouterr().err
    pinned = bootstrap.pins(bootstrap.ROOT / "constraints.txt")["papermill"]
    assert f"no_such_module   papermill=={pinned}" in err
    assert "json" not in err and "pillow" not in err


def run(command: list[str], **variables: str) -> subprocess.CompletedProcess[str]:
    """The bootstrap as a program, from another folder, with some environment variables more."""
    env = {**os.environ, **variables}
    return subprocess.run(
        [sys.executable, str(FILE), *command],
        cwd=FILE.parent,
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
    )


SHOW = "import json, os, sys; print(json.dumps([sys.executable, dict(os.environ)]))"


def test_current_runs_this_python_with_the_checkout_first(tmp_path):
    ran = run(["setup", "-c", SHOW], ENV="current", PYTHONPATH=str(tmp_path), CUDA_VISIBLE_DEVICES="")
    python, env = json.loads(ran.stdout)
    assert python == sys.executable
    assert env["PYTHONPATH"].split(os.pathsep) == [str(bootstrap.ROOT), str(tmp_path)]


@pytest.mark.parametrize("reason", ["", "no NVIDIA driver answers here"])
def test_the_build_of_torch_is_chosen_by_the_backend(monkeypatch, reason):
    fake = type(sys)("backend")
    fake.is_nvidia_here = lambda: not reason
    monkeypatch.setattr(bootstrap, "load_backend", lambda: fake)
    assert bootstrap.has_gpu() is (not reason)
    assert callable(load_backend().is_nvidia_here)


def test_the_exit_status_is_the_commands():
    assert run(["setup", "-c", "raise SystemExit(7)"], ENV="current").returncode == 7


@pytest.mark.parametrize(
    ("arguments", "variables", "word"),
    [
        ([], {}, "run"),
        (["no-such-target"], {}, "run"),
        (["setup"], {"TORCH": "2.12"}, "2.11"),
        (["setup"], {"IPYKERNEL": "5"}, "6.31"),
        (["setup"], {"IPYKERNEL": "6.31", "ENV": "current"}, "leave one out"),
    ],
)
def test_a_wrong_call_is_one_sentence(arguments, variables, word):
    ran = run(arguments, **variables)
    assert ran.returncode == 2
    assert len(ran.stderr.splitlines()) == 1 and word in ran.stderr


def test_the_kernel_named_python3_is_this_python(tmp_path, monkeypatch):
    kernelspec = pytest.importorskip("jupyter_client.kernelspec", reason="jupyter_client is not installed")
    theirs = tmp_path / "theirs" / "kernels" / "python3"
    theirs.mkdir(parents=True)
    wrong = {"argv": ["another-python"], "display_name": "theirs", "language": "python"}
    (theirs / "kernel.json").write_text(json.dumps(wrong))
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "theirs"))
    env = bootstrap.environment(tmp_path, sys.executable)
    monkeypatch.setenv("JUPYTER_PATH", env["JUPYTER_PATH"])
    assert kernelspec.KernelSpecManager().get_kernel_spec("python3").argv[0] == sys.executable
