import builtins
import importlib
import re
import stat
import sys
import types

import pytest

from labkit import backend, doctor
from labkit.doctor import Facts

JUPYTER = (("jupyterlab", "4.6.6"), ("ipykernel", "7.4.0"), ("ipywidgets", "8.1.9"))


def no_gpu(**changes):
    """A machine without a GPU on which everything is well, but for the changes."""
    return Facts(
        **{
            "torch": "2.13.0+cpu",
            "triton": "3.7.1",
            "triton_wanted": "3.7.1",
            "numpy": "2.4.6",
            "compiler": "/usr/bin/gcc",
            "headers": True,
            "jupyter": JUPYTER,
            "cache": "/somewhere/.cache/labkit",
            "free_gib": 9.6,
            "reason": backend.NO_DRIVER,
            **changes,
        }
    )


def gpu(**changes):
    """A machine with a GPU on which everything is well, but for the changes."""
    return no_gpu(
        **{
            "torch": "2.13.0+cu130",
            "torch_cuda": "13.0",
            "device": "NVIDIA H200",
            "capability": (9, 0),
            "memory_gib": 139.8,
            "driver": "580.1",
            "roofs": "copy 4.2 TB/s",
            "reason": "",
            **changes,
        }
    )


LOST = {"device": None, "capability": None, "roofs": None}


@pytest.mark.parametrize(
    ("facts", "ready", "says"),
    [
        (no_gpu(), True, "Ready without a GPU"),
        (gpu(), True, "Ready: `make run` runs the lessons on the GPU"),
        (gpu(roofs=None), True, "labkit doctor --measure"),
        (gpu(reason="TRITON_INTERPRET=1 is set"), True, "because TRITON_INTERPRET=1 is set"),
        (no_gpu(system="Darwin", triton=None), False, "no package for macOS.*container.*README.md says how"),
        (no_gpu(system="Windows", triton=None), False, "no package for Windows.*WSL 2.*Binder"),
        (no_gpu(torch=None, torch_error="no module"), False, "torch is missing"),
        (no_gpu(torch_error="OSError: libc"), False, r"2\.13\.0\+cpu is installed but .*OSError: libc"),
        (no_gpu(triton=None, triton_error="no module"), False, r"pip install triton==3\.7\.1"),
        (no_gpu(triton_error="ImportError: x"), False, "cannot be imported"),
        (no_gpu(jupyter=(*JUPYTER[:2], ("ipywidgets", None))), False, "Missing: ipywidgets"),
        (no_gpu(triton="3.6.0"), False, r"goes with triton 3\.7\.1, but triton 3\.6\.0"),
        (gpu(triton="3.6.0"), False, r"pip install triton==3\.7\.1"),
        (gpu(triton="3.7.1+git1"), True, "Ready"),
        (no_gpu(torch="9.9", triton="9.9", triton_wanted=None), True, "Ready"),
        (
            gpu(reason="Triton needs 8.0, and Tesla T4 has 7.5"),
            True,
            "because Triton needs 8.0, and Tesla T4",
        ),
        (gpu(**LOST), False, "torch 2.13.0.cu130 cannot use it"),
        (gpu(capability=(8, 0)), True, "Ready"),
        (gpu(compiler=None), False, "C compiler"),
        (gpu(headers=False), False, "headers"),
        (no_gpu(compiler=None, headers=False), True, "Ready without a GPU"),
        (no_gpu(triton="3.6.0", triton_wanted="3.6.0"), False, r"numpy 2\.4\.6.*numpy<2\.4"),
        (no_gpu(triton="3.6.0", triton_wanted="3.6.0", numpy="2.3.5"), True, "Ready"),
        (gpu(triton="3.6.0", triton_wanted="3.6.0"), True, "Ready"),
    ],
)
def test_verdict(facts, ready, says):
    decided = doctor.verdict(facts)
    assert re.search(says, decided.sentence), decided.sentence
    assert decided.ready is ready
    assert decided.sentence.endswith(".") and "\n" not in decided.sentence


NOTHING = Facts(jupyter=(("jupyterlab", None),), cache="/x")


@pytest.mark.parametrize("facts", [NOTHING, no_gpu(), gpu(), gpu(**LOST)])
def test_there_are_ten_lines_whatever_is_missing(facts):
    found = doctor.lines(facts)
    assert len(found) == 10
    assert all(text and "None" not in text and "\n" not in text for _, text in found)


def test_lines_show_what_matters():
    found = dict(doctor.lines(gpu()))
    assert found["GPU"] == "NVIDIA H200, capability 9.0, 140 GiB"
    assert found["kernels"] == "compiled for the GPU"
    assert dict(doctor.lines(no_gpu()))["kernels"] == f"interpreted on the CPU: {backend.NO_DRIVER}"
    assert dict(doctor.lines(Facts()))["kernels"] == "none can run without triton"
    assert "not measured yet" in dict(doctor.lines(gpu(roofs=None)))["roofs"]


@pytest.mark.parametrize(
    ("torch", "requirements", "wanted"),
    [
        ("2.13.0", ['triton==3.7.1; platform_system == "Linux"', "filelock"], "3.7.1"),
        ("2.13.0", ["triton==9.9"], "9.9"),
        ("2.13.0", ["triton>=3"], None),
        ("2.13.0+cpu", ["filelock"], "3.7.1"),
        ("2.11.1+cpu", [], "3.6.0"),
        ("2.1.0", [], None),
        (None, [], None),
    ],
)
def test_the_triton_of_a_torch(torch, requirements, wanted):
    assert doctor.wanted_triton(torch, requirements) == wanted


def test_collecting_finds_this_machine():
    facts = doctor.collect()
    assert facts.torch and facts.triton and not facts.torch_error and not facts.triton_error
    versions = dict(facts.jupyter)
    assert versions["ipykernel"] and versions["ipywidgets"]  # jupyterlab may be missing on a GPU box
    assert facts.free_gib > 0


def test_collecting_survives_a_broken_torch_and_triton(monkeypatch):
    whole = importlib.import_module

    def broken(name, *rest):
        if name in ("torch", "triton"):
            raise OSError(f"lib{name}.so: cannot open\nmore")
        return whole(name, *rest)

    monkeypatch.setattr(importlib, "import_module", broken)
    facts = doctor.collect()
    assert facts.torch_error == "OSError: libtorch.so: cannot open"
    assert facts.triton_error == "OSError: libtriton.so: cannot open"
    assert not doctor.verdict(facts).ready


def test_the_module_needs_neither_torch_nor_triton_nor_jupyter(monkeypatch):
    whole = builtins.__import__

    def lacking(name, *rest, **kwargs):
        if name.split(".")[0] in ("torch", "triton", "nbformat", "papermill", "IPython", "pandas"):
            raise ModuleNotFoundError(name)
        return whole(name, *rest, **kwargs)

    monkeypatch.setattr(builtins, "__import__", lacking)
    importlib.reload(doctor)


@pytest.mark.parametrize(("script", "driver"), [("echo 580.1", "580.1"), ("exit 9", None), ("true", None)])
def test_driver_is_asked_of_nvidia_smi(tmp_path, monkeypatch, script, driver):
    command = tmp_path / "nvidia-smi"
    command.write_text(f"#!/bin/sh\n{script}\n")
    command.chmod(command.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert doctor._driver() == driver


def test_roofs_are_shown_when_they_were_measured_and_never_measured_here(tmp_path, monkeypatch):
    roofs = types.SimpleNamespace(
        bandwidth=4.2e12, matmul={"bfloat16": 7.5e14}, node_us=1.23, host_us=4.56, date="2026-01-02", noise=()
    )
    cached = tmp_path / "roofs.jsonl"
    machine = types.SimpleNamespace(cache_path=lambda: cached, roofs=lambda: roofs)
    monkeypatch.setitem(sys.modules, "labkit.machine", machine)
    monkeypatch.setattr("labkit.machine", machine, raising=False)
    assert doctor._roofs() is None
    cached.touch()
    quiet = (
        "copy 4.20 TB/s, matmul 750 TFLOP/s bf16, launch 1.2 µs in a graph, 4.6 µs from the host (2026-01-02)"
    )
    assert doctor._roofs() == quiet
    roofs.noise = ("another process worked on the GPU", "spread above 10%")
    said = "; while they were measured: another process worked on the GPU; spread above 10%"
    assert doctor._roofs() == quiet + said


def test_without_jupyterlab_the_lessons_run_and_only_lab_does_not():
    some = tuple((name, None if name == "jupyterlab" else version) for name, version in JUPYTER)
    found = doctor.verdict(gpu(jupyter=some))
    assert found.ready and "only `make lab` needs it" in found.sentence
    assert "JupyterLab" not in doctor.verdict(gpu()).sentence
    without_kernels = tuple((name, None if name == "ipykernel" else version) for name, version in JUPYTER)
    assert not doctor.verdict(gpu(jupyter=without_kernels)).ready


def test_without_a_gpu_there_is_no_roof_to_measure():
    assert dict(doctor.lines(no_gpu()))["roofs"] == "those of a recorded GPU are used"
