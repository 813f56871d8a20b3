"""Whether JupyterLab, as `make lab` starts it, is closed to the network or asks for a token."""

import os
import signal
import subprocess
import sys

import pytest

from labkit import places

pytest.importorskip("jupyterlab", reason="JupyterLab is not installed in this environment")
LOCAL = "--ServerApp.ip=127.0.0.1"  # test_packaging checks that make gives it
NO_TOKEN = "--NotebookApp.token=''"  # an old spelling


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


@pytest.mark.parametrize("address", ["0.0.0.0", "*"])
def test_beyond_localhost_without_a_token_it_does_not_start(tmp_path, address):
    """One half is in the user's settings, the other is an argument."""
    code, printed = start(tmp_path, NO_TOKEN, config=f"c.ServerApp.ip = {address!r}\n")
    assert code == 2 and "http://" not in printed
    assert "anybody on the network could run code here, for there is no token. Leave the empty" in printed


@pytest.mark.parametrize(
    "arguments", [[LOCAL, "--ip=0.0.0.0"], [LOCAL, NO_TOKEN], ["--ip=localhost", NO_TOKEN]]
)
def test_with_a_token_or_on_this_machine_it_starts(tmp_path, arguments):
    code, printed = start(tmp_path, *arguments)
    assert code == -signal.SIGKILL, printed
    assert ("/lab?token=" in printed) == (NO_TOKEN not in arguments)
