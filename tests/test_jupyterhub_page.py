"""docs/JUPYTERHUB.md and what it names: the script for a learner's server, the settings, the commands."""

import json
import os
import re
import shlex
import shutil
import stat
import subprocess
import tarfile
from pathlib import Path

import pytest
import yaml

from labkit import bootstrap, lessons, places
from labkit.measure import lock

DOCS = places.CHECKOUT / "docs"
PAGE = (DOCS / "JUPYTERHUB.md").read_text(encoding="utf-8")
HUB = DOCS / "jupyterhub"
COMMANDS = "\n".join(re.findall(r"^```sh\n(.*?)^```$", PAGE, flags=re.MULTILINE | re.DOTALL))

INTERPRETED = ("TRITON_INTERPRET", "OMP_NUM_THREADS")

# --- what starts for a learner ------------------------------------------------------------------------


class Machine:
    """A machine with a course of two lessons, where what `start` calls only says how it was called."""

    def __init__(self, folder: Path) -> None:
        self.course, self.home = folder / "srv" / "labkit-1", folder / "home"
        self.bin = self.course / ".venv" / "bin"
        for made in (self.course / "docs/jupyterhub", self.course / "notebooks", self.bin, self.home):
            made.mkdir(parents=True)
        self.home.chmod(0o755)
        self.start = Path(shutil.copy(HUB / "start", self.course / "docs/jupyterhub"))
        for name in ("01_first.ipynb", "02_second.ipynb"):
            (self.course / "notebooks" / name).write_text(f"{name} as handed out")
            (self.course / "notebooks" / name).chmod(0o444)
        self.stub("jupyter", 'echo trusted "${@:2}"')
        self.stub("nvidia-smi", "exit 9")
        self.stub(
            "jupyterhub-singleuser",
            'printf "%s\\n" "$@" > "$HOME/arguments"; umask > "$HOME/umask"; env > "$HOME/environment"',
        )

    def stub(self, name: str, does: str) -> None:
        (self.bin / name).write_text(f"#!/usr/bin/env bash\n{does}\n")
        (self.bin / name).chmod(0o755)

    def log_in(self, *arguments: str, start: Path | None = None, **environment: str) -> str:
        """Start a server; what was said."""
        usual = {"HOME": str(self.home), "PATH": os.environ["PATH"], "JUPYTER_RUNTIME_DIR": str(self.home)}
        if not environment.pop("usual", "1"):
            del usual["JUPYTER_RUNTIME_DIR"]
        command = [str(start or self.start), *arguments]
        ran = subprocess.run(command, env={**usual, **environment}, capture_output=True, text=True)
        assert ran.returncode == 0, ran.stderr
        return ran.stdout + ran.stderr

    def of_server(self, name: str) -> str:
        return (self.home / name).read_text()

    def environment(self) -> dict[str, str]:
        return dict(line.split("=", 1) for line in self.of_server("environment").splitlines() if "=" in line)


@pytest.fixture
def machine(tmp_path):
    if shutil.which("bash") is None:
        pytest.skip("bash is not installed here")
    return Machine(tmp_path)


def test_a_first_start_hands_out_every_lesson_trusted_and_writable(machine):
    said = machine.log_in()
    for name in ("01_first.ipynb", "02_second.ipynb"):
        mine = machine.home / "labkit" / name
        assert mine.read_text() == f"{name} as handed out"
        assert stat.S_IMODE(mine.stat().st_mode) == 0o600
        assert str(mine) in said.partition("trusted")[2]


def test_what_a_learner_has_is_never_replaced_and_what_is_new_comes(machine):
    machine.log_in()
    (machine.home / "labkit/01_first.ipynb").write_text("hours of work")
    (machine.home / "labkit/02_second.ipynb").unlink()
    (machine.course / "notebooks/03_third.ipynb").write_text("new")
    said = machine.log_in()
    assert (machine.home / "labkit/01_first.ipynb").read_text() == "hours of work"
    assert (machine.home / "labkit/02_second.ipynb").exists()
    assert (machine.home / "labkit/03_third.ipynb").read_text() == "new"
    assert "01_first" not in said
    assert "trusted" not in machine.log_in(), "nothing is new"


def test_roofs_are_handed_out_where_labkit_looks_for_them(machine):
    roofs = machine.course / "build" / "roofs"
    machine.log_in()
    assert not (machine.home / "labkit/results/roofs").exists() or not list(
        (machine.home / "labkit/results/roofs").iterdir()
    )
    roofs.mkdir(parents=True)
    (roofs / "a-gpu.jsonl").write_text("{}")
    machine.log_in()
    assert (machine.home / "labkit/results/roofs/a-gpu.jsonl").read_text() == "{}"


def test_where_nothing_can_be_written_the_server_starts_all_the_same(machine):
    (machine.home / "labkit").write_text("in the way of the folder")
    said = machine.log_in()
    assert "not all lessons were handed out" in said
    assert machine.of_server("arguments")


def test_the_home_is_closed_and_what_is_made_there_is_private(machine):
    machine.log_in()
    assert stat.S_IMODE(machine.home.stat().st_mode) == 0o700
    assert int(machine.of_server("umask"), 8) == 0o077


def test_the_server_is_told_what_the_page_says(machine):
    machine.log_in("--one=1", "two words", usual="")
    arguments = machine.of_server("arguments").splitlines()
    assert arguments[-2:] == ["--one=1", "two words"], "the hub's own arguments come through"
    assert "--KernelManager.transport=ipc" in arguments
    assert "--MappingKernelManager.cull_connected=True" in arguments
    assert "--MappingKernelManager.cull_idle_timeout=1800" in arguments
    found = machine.environment()
    assert found[lock.FOLDER] == "/run/labkit-turns"
    assert found["LABKIT_CACHE"] == f"{machine.home}/labkit/results"
    assert found["PATH"].split(":")[0] == str(machine.bin)
    run = Path(found["JUPYTER_RUNTIME_DIR"])
    assert stat.S_IMODE(run.stat().st_mode) == 0o700 and len(str(run)) < 40, "there sockets have room"
    run.rmdir()


def test_a_hub_may_set_other_values(machine, tmp_path):
    there = str(tmp_path / "elsewhere")
    machine.log_in(LABKIT_TURNS=there, LABKIT_CACHE=there, LABKIT_IDLE_S="900", JUPYTER_RUNTIME_DIR=there)
    arguments = machine.of_server("arguments").splitlines()
    assert "--MappingKernelManager.cull_idle_timeout=900" in arguments
    assert "--MappingKernelManager.cull_interval=91" in arguments
    found = machine.environment()
    assert {found[name] for name in (lock.FOLDER, "LABKIT_CACHE", "JUPYTER_RUNTIME_DIR")} == {there}


@pytest.mark.parametrize(("gpus", "given", "seen"), [(0, None, None), (1, None, None), (2, None, "own")])
def test_of_two_gpus_each_learner_sees_one(machine, gpus, given, seen):
    lines = "".join(
        f"GPU {i}: A card (UUID: GPU-{i})\n  MIG 1g.10gb Device 0: (UUID: MIG-{i})\n" for i in range(gpus)
    )
    machine.stub("nvidia-smi", f"printf '%s' {shlex.quote(lines)}")
    machine.stub("id", "echo 1007")
    machine.log_in()
    wanted = None if seen is None else str(1007 % gpus)
    assert machine.environment().get("CUDA_VISIBLE_DEVICES") == wanted
    machine.log_in(CUDA_VISIBLE_DEVICES="MIG-7")
    assert machine.environment()["CUDA_VISIBLE_DEVICES"] == "MIG-7"


def test_a_gpu_that_never_answers_holds_nobody(machine):
    machine.stub("nvidia-smi", "trap '' TERM; sleep 30")
    machine.stub("seq", "echo 1 2")
    assert "the driver does not answer" in machine.log_in(), "it is heard of in the hub's log"
    assert machine.environment()["TRITON_INTERPRET"] == "1"


def test_a_server_belongs_to_the_version_that_the_link_named_when_it_started(machine, tmp_path):
    link = tmp_path / "srv" / "labkit"
    link.symlink_to("labkit-1")
    machine.log_in(start=link / "docs/jupyterhub/start")
    assert machine.environment()["PATH"].split(":")[0] == str(machine.bin)


# --- the settings -------------------------------------------------------------------------------------


def settings(name: str):
    """A configuration file's settings, as a hub loads them."""
    loader = pytest.importorskip("traitlets.config.loader")
    return loader.PyFileConfigLoader(str(HUB / name)).load_config()


def traits() -> dict[str, set[str]]:
    """What can be set, by class."""
    pytest.importorskip("jupyterhub", reason="jupyterhub is not installed in this environment")
    from jupyterhub.app import JupyterHub
    from jupyterhub.auth import PAMAuthenticator
    from jupyterhub.proxy import ConfigurableHTTPProxy
    from jupyterhub.spawner import Spawner

    classes = (JupyterHub, PAMAuthenticator, ConfigurableHTTPProxy, Spawner)
    return {each.__name__: set(each.class_traits(config=True)) for each in classes}


@pytest.mark.parametrize("name", ["course.py", "jupyterhub_config.py"])
def test_every_setting_is_one_of_the_hubs(name):
    known = traits()
    for section, values in settings(name).items():
        assert set(values) <= known[section], section


def test_the_example_listens_on_this_machine_only_and_knows_its_users():
    found = settings("jupyterhub_config.py")
    assert found.JupyterHub.bind_url.startswith("http://127.0.0.1:")
    assert "hub_ip" not in found.JupyterHub, "127.0.0.1 where nothing is said"
    assert found.JupyterHub.authenticator_class == "pam" and found.PAMAuthenticator.allowed_groups
    assert "allow_all" not in str(found)


def test_both_hubs_of_one_machine_start_the_same():
    found = settings("jupyterhub_config.py").Spawner
    assert found == settings("course.py").Spawner
    assert found.cmd == [str(HUB / "start")] and os.access(found.cmd[0], os.X_OK)


def test_the_culler_may_do_no_more_than_it_needs():
    found = settings("jupyterhub_config.py").JupyterHub
    (role,) = found.load_roles
    assert role["scopes"] == ["list:users", "read:users:activity", "read:servers", "delete:servers"]
    assert role["services"] == [found.services[0]["name"]]
    assert "admin" not in found.services[0]


def test_values_for_kubernetes():
    values = yaml.safe_load((HUB / "values.yaml").read_text())
    assert values["proxy"]["service"]["type"] == "ClusterIP", "the chart's own is open to the world"
    assert values["hub"]["config"]["JupyterHub"]["authenticator_class"] not in ("dummy", "tmp")
    assert values["hub"]["config"]["GitHubOAuthenticator"]["allowed_organizations"]
    single = values["singleuser"]
    assert single["cmd"] == ["/srv/labkit/docs/jupyterhub/start"]
    (volume,) = single["storage"]["extraVolumes"]
    (mount,) = single["storage"]["extraVolumeMounts"]
    (opener,) = single["initContainers"]
    assert volume["name"] == mount["name"] == opener["volumeMounts"][0]["name"]
    assert volume["hostPath"]["path"] == mount["mountPath"] == opener["command"][-1] == folder_of_turns()
    assert opener["command"] == ["chmod", "1777", folder_of_turns()]
    assert opener["volumeMounts"][0]["mountPath"] == mount["mountPath"]
    assert opener["image"] == "{name}:{tag}".format(**single["image"])
    text = PAGE + (HUB / "values.yaml").read_text()
    assert set(re.findall(r"/labkit:(\d+)", COMMANDS)) == {single["image"]["tag"]} and "labkit:2" in text


def test_the_image_has_the_course_where_its_start_is():
    lines = (HUB / "Dockerfile").read_text().splitlines()
    (base,) = (line for line in lines if line.startswith("FROM"))
    found = re.fullmatch(r"FROM python:(\d+)\.(\d+)-\w+", base)
    assert found and bootstrap.supported(tuple(map(int, found.groups())))
    assert "COPY . /srv/labkit" in lines and 'CMD ["/srv/labkit/docs/jupyterhub/start"]' in lines
    home = yaml.safe_load((HUB / "values.yaml").read_text())["singleuser"]["storage"]["homeMountPath"]
    assert f"WORKDIR {home}" == lines[-2] and f"--home-dir {home} " in "\n".join(lines)
    assert f"tar -cz -C {home} labkit" in COMMANDS
    assert "ARG JUPYTERHUB_VERSION" in lines and "--build-arg JUPYTERHUB_VERSION=" in COMMANDS


def folder_of_turns() -> str:
    """Where the service that makes folders makes the one for turns."""
    lines = (HUB / "labkit-turns.conf").read_text().splitlines()
    ((kind, path, mode, *_),) = (line.split() for line in lines if not line.startswith("#"))
    assert (kind, mode) == ("d", "1777")
    return path


def test_systemd_makes_the_folder_that_start_names(tmp_path):
    assert f"${{{lock.FOLDER}:-{folder_of_turns()}}}" in (HUB / "start").read_text()
    if shutil.which("systemd-tmpfiles") is None:
        pytest.skip("systemd-tmpfiles is not installed here: its file is read, and not tried")
    if os.geteuid() != 0:
        pytest.skip("only root makes a folder that belongs to root")
    command = ["systemd-tmpfiles", f"--root={tmp_path}", "--create", str(HUB / "labkit-turns.conf")]
    for made in ("etc", "run"):
        (tmp_path / made).mkdir()
    for name in ("passwd", "group"):
        (tmp_path / "etc" / name).write_text(
            "root:x:0:0:root:/:/bin/sh\n" if name == "passwd" else "root:x:0:\n"
        )
    subprocess.run(command, check=True, capture_output=True)
    made = tmp_path / folder_of_turns().lstrip("/")
    assert stat.S_IMODE(made.stat().st_mode) == 0o1777 and made.stat().st_uid == 0


# --- the page -----------------------------------------------------------------------------------------


def test_what_the_page_names_is_there():
    links = re.findall(r"\]\(([^)]+)\)", PAGE)
    here = [link for link in links if "://" not in link]
    beside = {DOCS / link for link in here if not link.startswith("../")}
    assert {path for path in HUB.iterdir() if path.is_file()} == beside - {HUB}
    assert all((DOCS / link).exists() for link in here)
    assert all((places.CHECKOUT / path).exists() for path in re.findall(r"/srv/labkit/(docs/[\w./-]+)", PAGE))
    assert "](docs/JUPYTERHUB.md)" in (places.CHECKOUT / "README.md").read_text()


def test_variables_and_parameters_of_the_page_exist():
    code = "".join(path.read_text() for path in (*(places.CHECKOUT / "labkit").glob("*.py"), HUB / "start"))
    named = set(re.findall(r"LABKIT_[A-Z_]+", PAGE))
    assert named >= {"LABKIT_CACHE", "LABKIT_IDLE_S"}
    assert all(name in code for name in named)
    found = lessons.parameters(lessons.resolve("01"))
    assert {"max_width", "large_batch"} <= found.keys() and "`max_width` and `large_batch`" in PAGE
    gib = 4 * int(found["max_width"].default) * int(found["large_batch"].default) / 2**30
    assert f"widest point is {gib:.0f} GiB" in " ".join(PAGE.split())


def test_the_page_says_the_numbers_of_the_settings():
    start, hub = (HUB / "start").read_text(), settings("jupyterhub_config.py").JupyterHub
    assert "LABKIT_IDLE_S:-1800" in start and "idle for half an hour" in PAGE
    assert "--timeout=3600" in hub.services[0]["command"] and "used for an hour" in PAGE
    assert yaml.safe_load((HUB / "values.yaml").read_text())["cull"]["timeout"] == 3600
    assert "services.cull.timeout 3600" in PAGE


@pytest.mark.parametrize("line", [line for line in COMMANDS.splitlines() if " make " in line])
def test_make_commands_of_the_page_exist(line):
    words = shlex.split(line)
    target, *rest = words[words.index("-C") + 2 :]
    phony = re.findall(r"^\.PHONY: (.*)$", (places.CHECKOUT / "Makefile").read_text(), flags=re.MULTILINE)
    assert target in phony[0].split()
    assert rest in ([], ["ARGS=--measure"])


def test_the_teachers_command_collects_what_learners_have_and_follows_no_link(tmp_path):
    (line,) = (line for line in COMMANDS.splitlines() if "tar --create" in line)
    for name in ("ada", "ben"):
        results = tmp_path / "home" / name / "labkit" / "results" / "predictions"
        results.mkdir(parents=True)
        (results / "a-guess.json").write_text(json.dumps({"value": 3.0}))
        (tmp_path / "home" / name / "private.txt").write_text("not of the course")
    secret = tmp_path / "secret"
    secret.write_text("of the teacher")
    (tmp_path / "home/ada/labkit/results/link").symlink_to(secret)
    script = shlex.split(line)[-1].replace("/home", str(tmp_path / "home"))
    script = script.replace("/var/lib", str(tmp_path))
    subprocess.run(["sh", "-c", script], check=True)
    made = tmp_path / "labkit-results.tar.gz"
    assert stat.S_IMODE(made.stat().st_mode) == 0o600
    with tarfile.open(made) as archive:
        found = {member.name: member for member in archive.getmembers()}
        assert {
            "ada/labkit/results/predictions/a-guess.json",
            "ben/labkit/results/predictions/a-guess.json",
        } <= set(found)
        assert found["ada/labkit/results/link"].issym()
    assert not [name for name in found if "private" in name]
