"""Seven lines about a machine, and one sentence about what to do."""

import importlib
import re
import subprocess
import sys

import pytest

from labkit import backend
from labkit.run import doctor
from labkit.run.doctor import Facts

WELL = dict(torch="2.13.0", triton="3.7.1", numpy="2.4.6", jupyterlab="4", ipykernel="7", ipywidgets="8")


def no_gpu(versions=(), **changes):
    """A machine without a GPU on which everything is well, but for the changes."""
    well = dict(triton_wanted="3.7.1", compiler="/usr/bin/gcc", headers=True, reason=backend.NO_DRIVER)
    return Facts(**{**well, "versions": {**WELL, **dict(versions)}, **changes})


def gpu(versions=(), **changes):
    """A machine with a GPU on which everything is well, but for the changes."""
    well = dict(device="NVIDIA H200, capability 9.0, 140 GiB", reason="")
    return no_gpu(versions, **{**well, **changes})


OLD = {"triton": "3.6.0"}
T4 = "Triton needs compute capability 8.0, and Tesla T4 has 7.5"
CASES = [
    (no_gpu(), True, "Ready without a GPU"),
    (gpu(), True, "Ready: .*GPU"),
    (gpu(reason=T4), True, "without a GPU.*Tesla T4"),
    (no_gpu(system="Darwin", versions={"triton": None}), False, "macOS.*container"),
    (no_gpu(system="Windows", versions={"triton": None}), False, "Windows.*WSL 2"),
    (no_gpu({"torch": None}), False, "torch is missing.*`pip install torch`"),
    (no_gpu(broken={"torch": "OSError: libc"}), False, r"torch 2\.13\.0 is installed but .*OSError: libc"),
    (no_gpu({"triton": None}), False, r"triton is missing.*pip install triton==3\.7\.1"),
    (no_gpu({"ipywidgets": None}), False, "ipywidgets is missing"),
    (gpu({"jupyterlab": None}), True, "Ready"),
    (gpu(OLD), False, r"goes with triton 3\.7\.1, but triton 3\.6\.0.*pip install triton==3\.7\.1"),
    (gpu({"triton": "3.7.1+git1"}), True, "Ready"),
    (no_gpu({"torch": "9.9", "triton": "9.9"}, triton_wanted=None), True, "Ready"),
    (gpu(device=None), False, "torch 2.13.0 cannot use it"),
    (gpu(compiler=None), False, "C compiler"),
    (gpu(headers=False), False, "headers"),
    (no_gpu(compiler=None, headers=False), True, "Ready without a GPU"),
    (no_gpu(OLD, triton_wanted="3.6.0"), False, r"numpy 2\.4\.6.*numpy<2\.4"),
    (no_gpu({**OLD, "numpy": "2.3.5"}, triton_wanted="3.6.0"), True, "Ready"),
    (gpu(OLD, triton_wanted="3.6.0"), True, "Ready"),
    (Facts(), False, "torch is missing"),
]


@pytest.mark.parametrize(("facts", "ready", "says"), CASES)
def test_the_sentence_and_the_seven_lines(facts, ready, says):
    (decided, sentence), found = doctor.advise(facts), dict(doctor.lines(facts))
    assert re.search(says, sentence), sentence
    assert decided is ready and sentence.endswith(".") and "\n" not in sentence
    assert len(found) == 7 and all(found.values()) and not re.search(r"None|\n", " ".join(found.values()))
    assert found["GPU"] == (facts.device or "none that torch can use")
    kernels = "compiled" if not facts.reason else f"interpreted on the CPU: {facts.reason}"
    assert found["kernels"].startswith(kernels)


def test_the_triton_of_a_torch(monkeypatch):
    named = ['triton==9.9; platform_system == "Linux"', "filelock"]
    for requirements, wanted in ((named, "9.9"), (["filelock"], None), (None, None)):
        monkeypatch.setattr(doctor.metadata, "requires", lambda name: requirements)  # noqa: B023 - called at once
        assert doctor.collect().triton_wanted == wanted


def test_collecting_finds_this_machine_and_survives_a_broken_torch_and_triton(monkeypatch):
    facts = doctor.collect()  # jupyterlab may be missing on a GPU box
    assert all(map(facts.versions.get, ("torch", "triton", "ipykernel", "ipywidgets"))) and not facts.broken
    whole = importlib.import_module

    def broken(name, *rest):
        if name in ("torch", "triton"):
            raise OSError(f"lib{name}.so: cannot open\nmore")
        return whole(name, *rest)

    monkeypatch.setattr(importlib, "import_module", broken)
    facts = doctor.collect()
    assert facts.broken == {name: f"OSError: lib{name}.so: cannot open" for name in ("torch", "triton")}
    assert not doctor.advise(facts)[0]


def test_it_works_without_torch_triton_and_jupyter():
    lacking = ("torch", "triton", "nbformat", "papermill", "IPython", "pandas", "jupyter_client")
    code = (
        f"import runpy, sys; sys.modules.update(dict.fromkeys({lacking})); sys.argv = ['labkit', 'doctor'];"
    )
    code += "runpy.run_module('labkit', run_name='__main__')"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ran.returncode == 1 and "torch" in ran.stdout and not ran.stderr, ran.stderr
