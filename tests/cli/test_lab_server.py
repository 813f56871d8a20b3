"""Whether JupyterLab, as `make lab` starts it, is closed to the network or asks for a token."""

import os
import signal
import subprocess
import sys

import pytest

from labkit import paths

pytest.importorskip("jupyterlab", reason="JupyterLab is not installed in this environment")
LOCAL = "--ServerApp.ip=127.0.0.1"  # test_packaging checks that make gives it
PORT = "--ServerApp.port=0"
NO_TOKEN = "--NotebookApp.token=''"  # an old spelling


@pytest.mark.parametrize(
    ("config", "arguments", "starts"),
    [
        ("0.0.0.0", [NO_TOKEN], False),
        ("*", [NO_TOKEN], False),
        ("", [LOCAL, "--ip=0.0.0.0"], True),
        ("", [LOCAL, NO_TOKEN], True),
    ],
)
def test_beyond_localhost_it_starts_with_a_token_only(tmp_path, config, arguments, starts):
    """One half may be in the user's settings, the other an argument."""
    (tmp_path / "config").mkdir()
    settings = f"c.ServerApp.ip = {config!r}\n" if config else ""
    (tmp_path / "config" / "jupyter_server_config.py").write_text(settings)
    own = {"JUPYTER_CONFIG_DIR": "config", "JUPYTER_RUNTIME_DIR": "run", "JUPYTER_DATA_DIR": "data"}
    command = [sys.executable, "-m", "labkit.cli.lab_server", "--no-browser", "--allow-root", PORT]
    process = subprocess.Popen(
        [*command, *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=tmp_path,
        env=os.environ | {name: str(tmp_path / place) for name, place in own.items()}
        | {"PYTHONPATH": str(paths.CHECKOUT)}, start_new_session=True,
    )  # fmt: skip
    printed = ""
    for line in process.stdout:
        printed += line
        if "Use Control-C to stop this server" in line:
            os.killpg(process.pid, signal.SIGKILL)
            break
    assert process.wait(30) == (-signal.SIGKILL if starts else 2), printed
    assert ("/lab?token=" in printed) == (starts and NO_TOKEN not in arguments)
    assert starts or ("http://" not in printed and "there is no token" in printed)
