"""The example hub of docs/jupyterhub runs: a learner gets the lessons, and a kernel of their own."""

import importlib.util
import json
import os
import re
import shutil
import stat
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from pathlib import Path

import processes
import psutil
import pytest
import yaml
from jupyter_client import BlockingKernelClient

from labkit import paths
from labkit.lessons import notebooks

HUB = paths.CHECKOUT / "docs" / "jupyterhub"
MODULES = ("jupyterhub", "jupyterhub_idle_culler", "configurable_http_proxy")
TEACHER = "a-token-of-the-teacher"
CONFIG = f"""
load_subconfig({str(HUB / "jupyterhub_config.py")!r})
c.JupyterHub.bind_url = c.JupyterHub.bind_url.replace(":8000", ":PORT")
c.JupyterHub.hub_port, c.ConfigurableHTTPProxy.api_url = INNER, "http://127.0.0.1:API"
c.JupyterHub.authenticator_class, c.Authenticator.allowed_users = "dummy", {{"ada"}}
c.JupyterHub.spawner_class = "simple"
c.SimpleLocalProcessSpawner.home_dir_template = "FOLDER/{{username}}"
c.Spawner.args = {["--allow-root"] if os.geteuid() == 0 else []}
c.Spawner.environment = {{"JUPYTER_RUNTIME_DIR": "FOLDER/run", "LABKIT_TURNS": "FOLDER"}}
c.JupyterHub.services.append({{"name": "teacher", "api_token": "{TEACHER}"}})
scopes = ["admin:users", "admin:servers", "access:servers"]
c.JupyterHub.load_roles.append({{"name": "teacher", "services": ["teacher"], "scopes": scopes}})
"""
"""What the example leaves to a machine; users are learners by name in place of users of the system."""


@pytest.fixture
def hub():
    """Asks a hub that runs: gives status and JSON of an answer. It has a folder and a process."""
    # Short, and not pytest's: the path of a socket has 107 letters at most.
    folder = Path(tempfile.mkdtemp(prefix="labkit-hub-"))
    port, inner, api = map(str, processes.free_ports(3))
    config = CONFIG.replace("PORT", port).replace("INNER", inner).replace("API", api)
    (folder / "config.py").write_text(config.replace("FOLDER", str(folder)))

    def ask(path, method="GET", body=None, token=TEACHER):
        data = None if body is None else json.dumps(body).encode()
        head = {"Authorization": f"token {token}"}
        request = urllib.request.Request(f"http://127.0.0.1:{port}/{path}", data, head, method=method)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return answer.status, json.loads(answer.read() or "null")
        except urllib.error.HTTPError as error:
            return error.code, {}

    def up():
        assert ask.process.poll() is None, (folder / "log").read_text()
        return processes.reachable(int(port)) and ask("hub/api/")[0] == 200

    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    command = [sys.executable, "-m", "jupyterhub", "--config", "config.py"]
    log, own = (folder / "log").open("w"), {**os.environ, "PATH": path}
    with log:
        ask.process = subprocess.Popen(command, cwd=folder, env=own, stdout=log, stderr=log)
    ask.folder = folder
    try:
        processes.wait_for(up, "the hub", 90)
        yield ask
    finally:
        print((folder / "log").read_text()[-5000:])  # shown where the test fails
        processes.end(ask.process, patience_s=20)
        shutil.rmtree(folder)


@pytest.mark.skipif(
    not all(map(importlib.util.find_spec, MODULES)),
    reason="jupyterhub, its idle culler or its proxy is not installed in this environment",
)
def test_a_learner_gets_the_lessons_and_a_kernel_that_nobody_else_reaches(hub):
    first, *others = notebooks.find()
    home = hub.folder / "ada"
    (home / "labkit").mkdir(parents=True)
    (home / "labkit" / first.name).write_text("hours of work")
    hub("hub/api/users/ada/server", "POST", {})
    processes.wait_for(
        lambda: hub("hub/api/users/ada")[1]["servers"].get("", {}).get("ready"), "the server", 90
    )
    assert hub("user/ada/api/contents", token="another")[0] == 403
    notebook = {"path": "labkit/a.ipynb", "name": "a", "type": "notebook", "kernel": {"name": "python3"}}
    _, session = hub("user/ada/api/sessions", "POST", notebook)
    client = BlockingKernelClient()
    client.load_connection_file(hub.folder / "run" / f"kernel-{session['kernel']['id']}.json")
    assert client.transport == "ipc", "through a port a kernel would show what it prints to every user"
    client.start_channels()
    # else what the kernel publishes before the channel is subscribed is lost
    client.wait_for_ready(timeout=120)
    code = "import os, labkit; open('made', 'w'); assert os.getcwd().endswith('ada/labkit')"
    assert client.execute_interactive(code, timeout=120)["content"]["status"] == "ok"
    client.stop_channels()
    assert (home / "labkit" / first.name).read_text() == "hours of work", "it is never replaced"
    assert all((home / "labkit" / each.name).read_bytes() == each.read_bytes() for each in others)
    made = (home, home / "labkit" / "made", home / "labkit" / others[0].name)
    assert [stat.S_IMODE(path.stat().st_mode) for path in made] == [0o700, 0o600, 0o600]
    family = processes.tree(hub.process)
    open_to = [
        one.laddr.ip for p in family for one in p.net_connections("inet") if one.status == psutil.CONN_LISTEN
    ]
    assert set(open_to) == {"127.0.0.1"}
    commands = " ".join(word for process in family for word in process.cmdline())
    for setting in ("cull_connected=True", "cull_idle_timeout=1800", "--timeout=3600"):
        assert setting in commands
    assert not re.search(r"not recognized|Unrecognized|Bad config", (hub.folder / "log").read_text())


def test_the_settings_let_in_whom_they_name_and_take_turns_in_one_folder():
    config, values = (
        (HUB / "jupyterhub_config.py").read_text(),
        yaml.safe_load((HUB / "values.yaml").read_text()),
    )
    assert '"http://127.0.0.1:8000"' in config and '"pam"' in config and "allow_all" not in config
    assert values["proxy"]["service"]["type"] == "ClusterIP", "the chart's own is open to the world"
    assert values["singleuser"]["cmd"] == ["/srv/labkit/docs/jupyterhub/start"]
    kind, turns, mode, *_ = (HUB / "labkit-turns.conf").read_text().splitlines()[-1].split()
    assert (kind, mode) == ("d", "1777") and f"LABKIT_TURNS:-{turns}}}" in (HUB / "start").read_text()
    assert values["singleuser"]["storage"]["extraVolumes"][0]["hostPath"]["path"] == turns
