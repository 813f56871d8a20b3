"""A hub as docs/jupyterhub configures it, on loopback, with learners who log in and run cells through it.

What the example leaves to the machine is put in its place: free ports, a password for everybody, users by
number in place of users of the system, whom a test should not create. The rest is the example's own.
"""

from __future__ import annotations

import http.cookiejar
import json
import os
import shutil
import socket
import subprocess
import sys
import sysconfig
import urllib.error
import urllib.parse
import urllib.request
import uuid
from contextlib import closing
from pathlib import Path
from typing import Any

import processes
import psutil
import websocket
from processes import wait_for

from labkit import places
from labkit.measure import lock

PASSWORD, TEACHER = "a password for all", "a-token-of-the-teacher"
START_S, CELL_S = 90.0, 180.0
"""How long a server may take to come up, and a cell to run, on a busy machine."""
NUMBERS = {"ada": 61001, "ben": 61002, "cleo": 61003}
"""Who takes part, and as which user of the system."""
CULLED, IDLE_S = "cleo", 15
"""Whose kernels end when they are idle for so long, not for half an hour; all else is the example's."""
PYTHON = f"python{sysconfig.get_python_version()}"
CONFIG = """
import os
from jupyterhub.spawner import LocalProcessSpawner

load_subconfig({example!r})
EXAMPLE_URL = c.JupyterHub.bind_url


class ByNumber(LocalProcessSpawner):
    numbers, homes, separate = {numbers!r}, {homes!r}, {separate!r}

    def make_preexec_fn(self, name):
        number, home = self.numbers[name], os.path.join(self.homes, name)

        def become():
            if self.separate:
                os.setgroups([])
                os.setgid(number)
                os.setuid(number)
            os.chdir(home)

        return become

    def user_env(self, env):
        mine = {{"LABKIT_IDLE_S": "{idle}"}} if self.user.name == {culled!r} else {{}}
        return {{**env, **mine, "USER": self.user.name, "HOME": os.path.join(self.homes, self.user.name)}}

    def get_args(self):
        return super().get_args() + {root!r}


assert c.JupyterHub.spawner_class == "jupyterhub.spawner.LocalProcessSpawner"
c.JupyterHub.spawner_class = ByNumber
c.JupyterHub.authenticator_class = "shared-password"
c.SharedPasswordAuthenticator.user_password = {password!r}
c.Authenticator.allowed_users = set(ByNumber.numbers)
c.JupyterHub.bind_url = EXAMPLE_URL.replace(":8000", ":{port}")
c.JupyterHub.hub_port = {hub_port}
c.ConfigurableHTTPProxy.api_url = "http://127.0.0.1:{api_port}"
c.Spawner.environment = {environment!r}
# What the example lets its culler do, and nothing else.
c.JupyterHub.services.append({{"name": "teacher", "api_token": {teacher!r}}})
c.JupyterHub.load_roles[0]["services"].append("teacher")
"""


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    try:
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()


# --- the shared course --------------------------------------------------------------------------------

BEING_WRITTEN = shutil.ignore_patterns("*.pyc.*")
"""What another process compiles at the moment has such a name, and may be gone before it is copied."""


class Course:
    """The course as it is installed for all: a copy of this checkout, with an environment like `make`'s.

    ``why_one`` says why its users cannot be different users of the system, and is empty where they are.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.libraries = folder / "python" / "lib"
        for name in ("labkit", "notebooks", "docs"):
            shutil.copytree(places.CHECKOUT / name, folder / name, ignore=BEING_WRITTEN)
        self.bin = folder / ".venv" / "bin"
        self.why_one = "" if os.geteuid() == 0 else "only root starts processes of other users"
        base = Path(sys.base_prefix) / "bin" / PYTHON
        if not self.why_one and not self._all_may_run(base):
            base = self._copy_of_python()
        self._make_environment(base)
        if not self.why_one and not self._all_may_run(self.bin / "python", "import jupyterhub, labkit, zmq"):
            self.why_one = f"other users may not read the packages in {sysconfig.get_path('purelib')}"

    def environment(self) -> dict[str, str]:
        """What any process needs that runs the environment's Python."""
        return {"LD_LIBRARY_PATH": str(self.libraries)} if self.libraries.exists() else {}

    def _all_may_run(self, python: Path, code: str = "import ssl, ctypes") -> bool:
        """Whether a user who owns nothing here may."""
        command = [str(python), "-I", "-c", code]
        environment = {**os.environ, **self.environment(), "HOME": "/"}
        nobody = {"user": 65534, "group": 65534, "extra_groups": []}
        try:
            ran = subprocess.run(command, cwd="/", env=environment, capture_output=True, **nobody)
        except PermissionError:
            return False
        return ran.returncode == 0

    def _copy_of_python(self) -> Path:
        """Python itself, where all may run it: it may be installed in the home of root. Compiled, as learners
        may not write what they compile, and each process would do it again.
        """
        there = self.folder / "python"
        base, library = Path(sys.base_prefix), Path(sysconfig.get_path("stdlib"))
        (there / "bin").mkdir(parents=True)
        shutil.copy(base / "bin" / PYTHON, there / "bin")
        ignore = shutil.ignore_patterns("site-packages", "test", "config-*", "idlelib")
        shutil.copytree(library, there / "lib" / library.name, ignore=ignore)
        for shared in base.glob("lib/libpython*.so*"):
            shutil.copy(shared, there / "lib")
        return there / "bin" / PYTHON

    def _make_environment(self, base: Path) -> None:
        """A virtual environment that shows what is installed in the one of these tests."""
        subprocess.run(
            [str(base), "-I", "-m", "venv", "--without-pip", str(self.folder / ".venv")],
            env={**os.environ, **self.environment()},
            check=True,
        )
        (packages,) = (self.folder / ".venv" / "lib").glob("python*/site-packages")
        installed = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
        lines = [str(self.folder), *(f"import site; site.addsitedir({path!r})" for path in installed)]
        # Spares each server the seconds that jsonschema's grammar of IRIs takes: see labkit/__init__.py.
        lines.append("import labkit")
        (packages / "course.pth").write_text("\n".join(lines) + "\n")
        for name in ("share/jupyter", "etc/jupyter"):
            if (Path(sys.prefix) / name).exists():
                links = self.folder / ".venv" / name
                shutil.copytree(Path(sys.prefix) / name, links, copy_function=os.symlink)
        for name, module in {
            "jupyter": "jupyter_core.command",
            "jupyter-trust": "nbformat.sign",
            "jupyterhub-singleuser": "jupyterhub.singleuser",
        }.items():
            function = "TrustNotebookApp.launch_instance" if name == "jupyter-trust" else "main"
            first, _, rest = function.partition(".")
            call = f"{first}.{rest}()" if rest else f"{first}()"
            script = self.bin / name
            script.write_text(f"#!{self.bin / 'python'}\nfrom {module} import {first}\n{call}\n")
            script.chmod(0o755)


# --- the hub ------------------------------------------------------------------------------------------


class Hub:
    """The example configuration, running; ``separate`` says whether its users are users of the system."""

    def __init__(self, folder: Path) -> None:
        folder.chmod(0o755)
        self.course = Course(folder / "srv")
        self.runtimes: set[str] = set()
        self.separate, self.homes = not self.course.why_one, folder / "home"
        self.log = folder / "hub.log"
        # As some distributions make them: open to all.
        for name, number in NUMBERS.items():
            (self.homes / name).mkdir(parents=True, mode=0o755)
            if self.separate:
                os.chown(self.homes / name, number, number)
        self.turns = self._turns(folder)
        self.port, hub_port, api_port = free_ports(3)
        state = folder / "state"
        state.mkdir(mode=0o700)
        config = state / "config.py"
        config.write_text(
            CONFIG.format(
                example=str(self.course.folder / "docs" / "jupyterhub" / "jupyterhub_config.py"),
                numbers=NUMBERS,
                homes=str(self.homes),
                separate=self.separate,
                culled=CULLED,
                idle=IDLE_S,
                # Where all have the user of the tests, and that is root.
                root=["--allow-root"] if os.geteuid() == 0 and not self.separate else [],
                password=PASSWORD,
                teacher=TEACHER,
                port=self.port,
                hub_port=hub_port,
                api_port=api_port,
                environment=self._environment(),
            )
        )
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "jupyterhub", "--config", str(config)],
                cwd=state,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def _turns(self, folder: Path) -> Path:
        """The folder that systemd-tmpfiles would make, with the mode that the example gives it."""
        lines = (self.course.folder / "docs/jupyterhub/labkit-turns.conf").read_text().splitlines()
        (line,) = (line.split() for line in lines if not line.startswith("#"))
        made = folder / "turns"
        made.mkdir()
        made.chmod(int(line[2], 8))
        return made

    def _environment(self) -> dict[str, str]:
        from labkit import device

        given = {lock.FOLDER: str(self.turns), **self.course.environment()}
        if device.has_gpu():
            return {**given, "LABKIT_HEADLESS": "1"}  # nobody presses the buttons that would measure
        return {**given, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def wait(self) -> None:
        """Until it answers."""

        def answers() -> bool:
            if self.process.poll() is not None:
                raise RuntimeError(f"the hub ended:\n{self.tail()}")
            try:
                urllib.request.urlopen(f"{self.url}/hub/api/", timeout=20).close()
            except OSError:
                return False
            return True

        wait_for(answers, "the hub answers", START_S)

    def tail(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-60:])

    def processes(self) -> list[psutil.Process]:
        """The hub, its proxy, the servers and their kernels."""
        return processes.tree(self.process)

    def stop(self) -> None:
        """End it with all that it started."""
        processes.end(self.process, patience_s=20)
        for folder in self.runtimes:  # outside the folder of the tests, for shortness
            shutil.rmtree(folder, ignore_errors=True)

    def teacher(self, path: str, method: str = "GET", body: Any = None) -> tuple[int, Any]:
        """What the hub's API answers who may do what the example's culler may."""
        return ask(f"{self.url}/hub/api/{path}", TEACHER, method, body)


def ask(url: str, token: str, method: str = "GET", body: Any = None) -> tuple[int, Any]:
    """Status and JSON, or text, of an answer; redirections are not followed."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, method=method)
    if token:
        request.add_header("Authorization", f"token {token}")
    try:
        with urllib.request.build_opener(_Stay).open(request, timeout=60) as answer:
            status, text = answer.status, answer.read().decode(errors="replace")
    except urllib.error.HTTPError as error:
        status, text = error.code, error.read().decode(errors="replace")
    try:
        return status, json.loads(text)
    except ValueError:
        return status, text


class _Stay(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


# --- a learner ----------------------------------------------------------------------------------------


class Learner:
    """Somebody who logs in at the hub, with a server of their own."""

    def __init__(self, hub: Hub, name: str) -> None:
        self.hub, self.name = hub, name
        self.home = hub.homes / name
        self.token = ""

    def log_in(self, password: str = PASSWORD) -> bool:
        """By the page that asks for name and password; whether it let them in."""
        cookies = http.cookiejar.CookieJar()
        opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(cookies), _Stay)

        def post(path: str, data: bytes, kind: str) -> tuple[int, bytes]:
            hidden = next(cookie.value for cookie in cookies if cookie.name == "_xsrf")
            request = urllib.request.Request(f"{self.hub.url}{path}", data)
            request.add_header("X-XSRFToken", str(hidden))
            request.add_header("Content-Type", kind)
            try:
                with opener.open(request, timeout=60) as answer:
                    return answer.status, answer.read()
            except urllib.error.HTTPError as error:
                return error.code, error.read()

        opener.open(f"{self.hub.url}/hub/login", timeout=60).close()
        form = urllib.parse.urlencode({"username": self.name, "password": password})
        status, _ = post("/hub/login", form.encode(), "application/x-www-form-urlencoded")
        if status != 302:
            return False
        opener.open(f"{self.hub.url}/hub/token", timeout=60).close()
        status, made = post(f"/hub/api/users/{self.name}/tokens", b"{}", "application/json")
        if status != 201:
            raise RuntimeError(f"no token for {self.name}: {status} {made!r}")
        self.token = json.loads(made)["token"]
        return True

    def start(self) -> None:
        """Their server, as the button on the hub's page does."""
        status, said = ask(f"{self.hub.url}/hub/api/users/{self.name}/server", self.token, "POST")
        if status not in (201, 202):
            raise RuntimeError(f"no server for {self.name}: {status} {said}\n{self.hub.tail()}")

        def ready() -> bool:
            _, user = ask(f"{self.hub.url}/hub/api/users/{self.name}", self.token)
            return bool(user["servers"].get("", {}).get("ready"))

        try:
            wait_for(ready, f"the server of {self.name}", START_S)
        except TimeoutError as error:
            raise TimeoutError(f"{error}\n{self.hub.tail()}") from None
        for process in self.hub.processes():
            if "jupyterhub-singleuser" in " ".join(process.cmdline()):
                self.hub.runtimes.add(process.environ()["JUPYTER_RUNTIME_DIR"])

    def at(self, whose: str, path: str, method: str = "GET", body: Any = None) -> tuple[int, Any]:
        """What somebody's server answers this learner."""
        return ask(f"{self.hub.url}/user/{whose}/{path}", self.token, method, body)

    def open(self, notebook: str) -> Kernel:
        """A kernel for a notebook of theirs, as JupyterLab starts one."""
        kernel = {"name": "python3"}
        session = {"path": notebook, "name": Path(notebook).name, "type": "notebook", "kernel": kernel}
        status, made = self.at(self.name, "api/sessions", "POST", session)
        if status != 201:
            raise RuntimeError(f"no kernel for {self.name}: {status} {made}\n{self.hub.tail()}")
        return Kernel(self, made["kernel"]["id"])


class CellError(Exception):
    """A cell ended with an error."""


class Kernel:
    """A kernel behind the hub; ``run(cell)`` gives what the cell printed."""

    def __init__(self, learner: Learner, kernel: str) -> None:
        self.id, self.learner = kernel, learner
        self._channels = channels(learner, learner.name, kernel)

    def run(self, cell: str) -> str:
        asked, printed, left = uuid.uuid4().hex, [], {"idle", "reply"}
        header = {
            "msg_id": asked,
            "msg_type": "execute_request",
            "username": "",
            "session": "",
            "version": "5.3",
        }
        content = {"code": cell, "silent": False, "store_history": True, "allow_stdin": False}
        request = {"header": header, "parent_header": {}, "metadata": {}, "content": content}
        self._channels.send(json.dumps({**request, "channel": "shell"}))
        while left:
            message = json.loads(self._channels.recv())
            if message["parent_header"].get("msg_id") != asked:
                continue
            kind, content = message["msg_type"], message["content"]
            if kind == "stream" and content["name"] == "stdout":
                printed.append(content["text"])
            elif kind == "error":
                raise CellError(f"{self.learner.name}: {content['ename']}: {content['evalue']}\nin\n{cell}")
            elif kind == "status" and content["execution_state"] == "idle":
                left.discard("idle")
            elif kind == "execute_reply":
                left.discard("reply")
        return "".join(printed)

    def close(self) -> None:
        self._channels.close()


def channels(learner: Learner, whose: str, kernel: str) -> websocket.WebSocket:
    """The connection to a kernel, for a learner's token; WebSocketBadStatusException where it is refused."""
    address = f"ws://127.0.0.1:{learner.hub.port}/user/{whose}/api/kernels/{kernel}/channels"
    return websocket.create_connection(
        address, timeout=CELL_S, header=[f"Authorization: token {learner.token}"], suppress_origin=True
    )


def listening(hub: Hub) -> set[tuple[str, int]]:
    """Where the hub and all that it started take connections."""
    found = set()
    for process in hub.processes():
        for connection in process.net_connections(kind="inet"):
            if connection.status == psutil.CONN_LISTEN:
                found.add((connection.laddr.ip, connection.laddr.port))
    return found


def reachable(address: str, port: int) -> bool:
    try:
        with closing(socket.create_connection((address, port), timeout=2)):
            return True
    except OSError:
        return False
