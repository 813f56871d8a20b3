"""GPU or interpreter: decided once, before triton is imported, with the reason in a sentence."""

import os
import subprocess
import sys

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook

from labkit import backend, places
from labkit.backend import Driver, Gpu, Torch

H200 = Gpu("NVIDIA H200", "GPU-aaaa", (9, 0))
T4 = Gpu("Tesla T4", "GPU-bbbb", (7, 5))
CUDA = Torch("2.13.0+cu130", "13.0", None)


def driver(*gpus, cuda=13000, libcuda=True):
    return Driver(gpus, cuda, libcuda)


@pytest.mark.parametrize(
    ("found", "torch", "visible", "says"),
    [
        (driver(H200), CUDA, None, ""),
        (driver(H200), CUDA, "0", ""),
        (driver(H200), None, None, ""),
        (driver(H200, cuda=13010), Torch("2.15.0", "13.2", None), None, ""),
        (None, CUDA, None, "no NVIDIA driver answers here"),
        (driver(), CUDA, None, "no NVIDIA driver answers here"),
        (driver(H200), CUDA, "", "CUDA_VISIBLE_DEVICES='' hides every GPU"),
        (driver(H200), CUDA, "-1", "hides every GPU"),
        (driver(H200), CUDA, "GPU-cc", "hides every GPU"),
        (driver(T4), CUDA, None, "compute capability 8.0, and Tesla T4 has 7.5"),
        (driver(T4, H200), CUDA, None, ""),
        (driver(T4, H200), CUDA, "1", "Tesla T4 has 7.5"),
        (driver(T4, H200), CUDA, "GPU-aa", ""),
        (driver(H200), CUDA, "MIG-1234", ""),
        (driver(H200), Torch("2.13.0+cpu", None, None), None, "2.13.0+cpu is a CPU build"),
        (driver(H200, cuda=12040), CUDA, None, "supports CUDA up to 12.4 and torch 2.13.0+cu130"),
        (driver(H200, libcuda=False), CUDA, None, "libcuda.so.1 is missing"),
        (None, Torch("2.13.0+rocm7", None, "7.0"), None, "built for AMD GPUs"),
    ],
)
def test_why_kernels_are_interpreted(found, torch, visible, says):
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    why = backend.why_interpreted(found, torch, environment)
    assert says in why and bool(says) == bool(why)


def test_a_machine_with_an_amd_gpu_is_told_so(monkeypatch):
    monkeypatch.setattr(backend.os.path, "exists", lambda path: path == "/dev/kfd")
    assert "AMD" in backend.why_interpreted(None, CUDA, {})


@pytest.mark.parametrize(
    ("given", "order", "seen"),
    [
        (None, None, [H200, T4]),
        (None, "PCI_BUS_ID", [T4, H200]),
        ("1,0", None, [T4, H200]),
        ("0,7,1", "PCI_BUS_ID", [T4]),
        (" GPU-aa , 1", None, [H200, T4]),
        ("", None, []),
    ],
)
def test_the_visible_gpus_are_those_of_cuda(given, order, seen):
    environment = {"CUDA_VISIBLE_DEVICES": given, "CUDA_DEVICE_ORDER": order}
    given_only = {key: value for key, value in environment.items() if value is not None}
    assert backend.visible((T4, H200), given_only) == seen


def test_torch_is_known_without_being_imported():
    import torch

    assert backend.installed_torch() == Torch(torch.__version__, torch.version.cuda, torch.version.hip)


# ---- in a process of its own -----------------------------------------------------------------------------

TELL = (
    "; import os; from labkit import backend; print(os.environ.get('TRITON_INTERPRET'), backend.sentence())"
)


def python(code, **variables):
    """What a fresh Python prints; a variable that is None is not set."""
    ours = {backend.INTERPRET: None, backend.CHOSEN: None, "OMP_NUM_THREADS": None, **variables}
    around = {**os.environ, "PYTHONPATH": places.python_path(), **ours}
    environment = {key: value for key, value in around.items() if value is not None}
    ran = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    return ran


def faked(found, torch):
    """Code that makes labkit find this driver and this torch."""
    return (
        "import sys; sys.modules['labkit'] = type(sys)('labkit'); "
        f"sys.modules['labkit'].__path__ = [{str(places.CHECKOUT / 'labkit')!r}]; "
        "from labkit import backend; from labkit.backend import *; "
        f"backend.driver = lambda: {found!r}; backend.installed_torch = lambda: {torch!r}; backend.decide()"
    )


@pytest.mark.parametrize(
    ("found", "torch", "variables", "expected"),
    [
        (driver(H200), CUDA, {}, "None Kernels are compiled and run on the GPU."),
        (driver(T4), CUDA, {}, "1 Kernels are interpreted: Triton needs compute capability 8.0"),
        (None, CUDA, {}, "1 Kernels are interpreted: no NVIDIA driver answers here."),
        (
            driver(H200),
            CUDA,
            {"TRITON_INTERPRET": "1"},
            "1 Kernels are interpreted: TRITON_INTERPRET=1 is set.",
        ),
        (driver(H200), CUDA, {"TRITON_INTERPRET": ""}, " Kernels are compiled"),
        (None, CUDA, {"TRITON_INTERPRET": "0"}, "0 Kernels are compiled"),
        (driver(H200), CUDA, {"TRITON_INTERPRET": "1", backend.CHOSEN: "1"}, "None Kernels are compiled"),
        (None, CUDA, {"TRITON_INTERPRET": "1", backend.CHOSEN: "1"}, "1 Kernels are interpreted: no NVIDIA"),
    ],
)
def test_the_decision_is_in_the_environment_and_the_users_own_wins(found, torch, variables, expected):
    assert python(faked(found, torch) + TELL, **variables).stdout.startswith(expected)


def test_interpreted_kernels_get_one_thread_unless_somebody_chose():
    code = faked(None, CUDA) + "; print(os.environ['OMP_NUM_THREADS'])"
    assert python(code).stdout == "1\n"
    assert python(code, OMP_NUM_THREADS="3").stdout == "3\n"


def test_triton_before_labkit_is_one_sentence_that_says_what_to_do():
    said = python("import triton" + "; import sys, io; " + faked(None, CUDA)).stderr
    assert "Restart the kernel and run `import labkit` before" in said
    assert not python("import torch; " + faked(None, CUDA)).stderr, "torch may come first"
    assert not python("import triton; " + faked(driver(H200), CUDA)).stderr


def test_labkit_decides_when_it_is_imported_and_needs_no_torch_for_it():
    said = python("import labkit, sys; print('torch' in sys.modules, 'triton' in sys.modules)" + TELL).stdout
    assert said.startswith("False False\n")


KERNEL = """
import labkit, os
if os.fork():
    raise SystemExit(os.waitstatus_to_exitcode(os.wait()[1]))
import torch
torch.zeros(1, device="cuda").add_(1).item()
"""


@pytest.mark.skipif(backend.interpreting(), reason="a process that uses CUDA after a fork needs a GPU")
def test_a_process_forked_after_the_decision_can_use_cuda():
    python(KERNEL)


# ---- in a notebook -----------------------------------------------------------------------------------------

CELL = """
import labkit
import torch, triton
import triton.language as tl

@triton.jit
def double_kernel(x, y, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, 2 * tl.load(x + at, at < count), at < count)

x = torch.ones(5, device="cpu" if labkit.backend.interpreting() else "cuda")
y = torch.empty_like(x)
double_kernel[(1,)](x, y, 5, BLOCK=8)
print(y.sum().item())
"""


def test_a_notebook_runs_under_plain_papermill_and_nbconvert_with_no_variable_set(tmp_path):
    path = tmp_path / "toy.ipynb"
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbformat.write(new_notebook(cells=[new_code_cell(CELL)], metadata={"kernelspec": kernel}), path)
    papermill = "from papermill.cli import papermill; papermill(['toy.ipynb', 'made.ipynb'])"
    options = ["--execute", "--to", "notebook", "toy.ipynb", "--output", "made"]
    nbconvert = f"from nbconvert.nbconvertapp import main; main({options})"
    for command in (papermill, nbconvert):
        python(f"import os, sys; os.chdir({str(tmp_path)!r}); {command}", LABKIT_HEADLESS=None)
        (cell,) = nbformat.read(tmp_path / "made.ipynb", 4).cells
        assert cell.outputs[-1].text == "10.0\n"
        (tmp_path / "made.ipynb").unlink()
