"""Ten lines about a machine, and one sentence about what to do."""

import importlib
import re
import subprocess
import sys
import types

import pytest

from labkit import backend, doctor, machine
from labkit.doctor import Facts

WELL = {
    "torch": "2.13.0",
    "triton": "3.7.1",
    "numpy": "2.4.6",
    "jupyterlab": "4",
    "ipykernel": "7",
    "ipywidgets": "8",
}


def no_gpu(versions=(), **changes):
    """A machine without a GPU on which everything is well, but for the changes."""
    well = {
        "triton_wanted": "3.7.1",
        "compiler": "/usr/bin/gcc",
        "headers": True,
        "reason": backend.NO_DRIVER,
    }
    return Facts(**{**well, "versions": {**WELL, **dict(versions)}, **changes})


def gpu(versions=(), **changes):
    """A machine with a GPU on which everything is well, but for the changes."""
    well = {"device": "NVIDIA H200, capability 9.0, 140 GiB", "roofs": "copy 4.2 TB/s", "reason": ""}
    return no_gpu(versions, **{**well, **changes})


OLD = {"triton": "3.6.0"}
CASES = [
    (no_gpu(), True, "Ready without a GPU"),
    (gpu(), True, "Ready: `make run` runs the lessons on the GPU"),
    (gpu(roofs=None), True, "labkit doctor --measure"),
    (gpu(reason="Triton needs 8.0, and Tesla T4 has 7.5"), True, "because Triton needs 8.0, and Tesla T4"),
    (
        no_gpu(system="Darwin", versions={"triton": None}),
        False,
        "no package for macOS.*container.*README.md says",
    ),
    (no_gpu(system="Windows", versions={"triton": None}), False, "no package for Windows.*WSL 2.*Binder"),
    (no_gpu({"torch": None}), False, "torch is missing.*`pip install torch`"),
    (no_gpu(broken={"torch": "OSError: libc"}), False, r"torch 2\.13\.0 is installed but .*OSError: libc"),
    (no_gpu({"triton": None}), False, r"triton is missing.*pip install triton==3\.7\.1"),
    (no_gpu({"ipywidgets": None}), False, "ipywidgets is missing"),
    (gpu({"jupyterlab": None}), True, "JupyterLab is missing; only `make lab` needs it"),
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
def test_the_sentence_and_the_ten_lines(facts, ready, says):
    decided = doctor.verdict(facts)
    assert re.search(says, decided.sentence), decided.sentence
    assert decided.ready is ready
    assert decided.sentence.endswith(".") and "\n" not in decided.sentence
    found = doctor.lines(facts)
    assert len(found) == 10
    assert all(text and "None" not in text and "\n" not in text for _, text in found)


def test_lines_show_what_matters():
    found, without = dict(doctor.lines(gpu())), dict(doctor.lines(no_gpu()))
    assert (
        found["GPU"] == "NVIDIA H200, capability 9.0, 140 GiB" and found["kernels"] == "compiled for the GPU"
    )
    assert without["kernels"] == f"interpreted on the CPU: {backend.NO_DRIVER}"
    assert without["roofs"] == "those of a recorded GPU are used"
    assert "not measured yet" in dict(doctor.lines(gpu(roofs=None)))["roofs"]
    assert dict(doctor.lines(Facts()))["kernels"] == "none can run without triton"
    assert dict(doctor.lines(gpu(broken={"triton": "x"})))["triton"].startswith("3.7.1, broken: x")


@pytest.mark.parametrize(
    ("torch", "requirements", "wanted"),
    [
        ("2.13.0", ['triton==9.9; platform_system == "Linux"', "filelock"], "9.9"),
        ("2.13.0+cpu", ["filelock"], "3.7.1"),
        ("2.11.1+cpu", None, "3.6.0"),
        ("2.1.0", [], None),
        (None, None, None),
    ],
)
def test_the_triton_of_a_torch(monkeypatch, torch, requirements, wanted):
    monkeypatch.setattr(doctor.metadata, "requires", lambda name: requirements)
    assert doctor._wanted_triton(torch) == wanted


def test_collecting_finds_this_machine_and_survives_a_broken_torch_and_triton(monkeypatch):
    facts = doctor.collect()
    assert facts.versions["torch"] and facts.versions["triton"] and not facts.broken
    assert (
        facts.versions["ipykernel"] and facts.versions["ipywidgets"]
    )  # jupyterlab may be missing on a GPU box
    whole = importlib.import_module

    def broken(name, *rest):
        if name in ("torch", "triton"):
            raise OSError(f"lib{name}.so: cannot open\nmore")
        return whole(name, *rest)

    monkeypatch.setattr(importlib, "import_module", broken)
    facts = doctor.collect()
    assert facts.broken == {name: f"OSError: lib{name}.so: cannot open" for name in ("torch", "triton")}
    assert not doctor.verdict(facts).ready


def test_it_works_without_torch_triton_and_jupyter():
    code = "import sys; sys.modules.update(dict.fromkeys(%r)); import runpy; sys.argv = ['labkit', 'doctor'];"
    code += "runpy.run_module('labkit', run_name='__main__')"
    lacking = ("torch", "triton", "nbformat", "papermill", "IPython", "pandas", "jupyter_client")
    ran = subprocess.run([sys.executable, "-c", code % (lacking,)], capture_output=True, text=True)
    assert ran.returncode == 1 and "torch" in ran.stdout and not ran.stderr, ran.stderr


@pytest.mark.parametrize(("script", "driver"), [("echo 580.1", "580.1"), ("exit 9", None), ("true", None)])
def test_driver_is_asked_of_nvidia_smi(tmp_path, monkeypatch, script, driver):
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert doctor._driver() == driver


def test_roofs_are_shown_when_they_were_measured_and_never_measured_here(tmp_path, monkeypatch):
    roofs = types.SimpleNamespace(
        bandwidth=4.2e12, matmul={"bfloat16": 7.5e14}, node_us=1.23, host_us=4.56, date="2026-01-02", noise=()
    )
    monkeypatch.setattr(machine, "cache_path", lambda: tmp_path / "roofs.jsonl")
    monkeypatch.setattr(machine, "roofs", lambda: roofs)
    assert doctor._roofs() is None
    (tmp_path / "roofs.jsonl").touch()
    quiet = (
        "copy 4.20 TB/s, matmul 750 TFLOP/s bf16, launch 1.2 µs in a graph, 4.6 µs from the host (2026-01-02)"
    )
    assert doctor._roofs() == quiet
    roofs.noise = ("another process worked on the GPU", "spread above 10%")
    said = "; while they were measured: another process worked on the GPU; spread above 10%"
    assert doctor._roofs() == quiet + said
