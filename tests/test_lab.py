"""Whether JupyterLab, as `make lab` starts it, is closed to the network or asks for a token."""

import os
import signal
import subprocess
import sys

import pytest

pytest.importorskip("jupyterlab", reason="JupyterLab is not installed in this environment")

from labkit import lab, places


def start(folder, *arguments, config=""):
    """JupyterLab in a folder, with nothing of this user's settings, until it serves or ends; gives both."""
    (folder / "config").mkdir()
    (folder / "config" / "jupyter_server_config.py").write_text(config)
    own = {"JUPYTER_CONFIG_DIR": "config", "JUPYTER_RUNTIME_DIR": "run", "JUPYTER_DATA_DIR": "data"}
    command = [sys.executable, "-m", "labkit.lab", "--no-browser", "--allow-root", "--ServerApp.port=0"]
    process = subprocess.Popen(
        [*command, *arguments],
        env=os.environ | {name: str(folder / place) for name, place in own.items()}
        | {"PYTHONPATH": str(places.CHECKOUT)},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=folder, start_new_session=True,
    )  # fmt: skip
    printed = []
    for line in process.stdout:
        printed.append(line)
        if "Use Control-C to stop this server" in line:
            os.killpg(process.pid, signal.SIGKILL)
            break
    return process.wait(30), "".join(printed)


def test_beyond_localhost_without_a_token_it_does_not_start(tmp_path):
    """One half is in the user's settings, the other is an argument in an old spelling."""
    code, printed = start(tmp_path, "--NotebookApp.token=''", config="c.ServerApp.ip = '0.0.0.0'\n")
    assert code == 2 and "http://" not in printed
    assert "anybody on the network could run code here, for there is no token. Leave the empty" in printed


def test_beyond_localhost_with_a_token_it_starts(tmp_path):
    code, printed = start(tmp_path, "--ServerApp.ip=127.0.0.1", "--ip=0.0.0.0")
    assert code == -signal.SIGKILL and "/lab?token=" in printed, printed


@pytest.mark.parametrize(
    ("host", "here"),
    [
        ("127.0.0.1", True), ("127.8.8.8", True), ("localhost", True), ("::1", True),
        ("", False), ("0.0.0.0", False), ("::", False), ("192.0.2.1", False), ("no such name", False),
    ],
)  # fmt: skip
def test_only_here(host, here):
    assert lab.only_here(host) is here


def test_make_lab_starts_it_on_localhost():
    makefile = (places.CHECKOUT / "Makefile").read_text()
    assert "LAB = --ServerApp.ip=127.0.0.1 " in makefile and "lab -m labkit.lab $(LAB) $(ARGS)" in makefile
    assert "token" not in makefile.partition("LAB = ")[2].partition("\n")[0]
