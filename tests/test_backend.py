"""GPU or interpreter: decided once, before triton is imported, with the reason in a sentence."""

import os
import subprocess
import sys

import nbformat
import pytest
import torch
from nbformat.v4 import new_code_cell, new_notebook

from labkit import backend, paths
from labkit.backend import GpuInfo, NvidiaDriver, TorchBuild

H200 = GpuInfo("NVIDIA H200", "GPU-aaaa", (9, 0))
A100 = GpuInfo("NVIDIA A100", "GPU-cccc", (8, 0))
T4 = GpuInfo("Tesla T4", "GPU-bbbb", (7, 5))
CUDA = TorchBuild("2.13.0+cu130", "13.0")


def driver(*gpus, cuda=13000):
    return NvidiaDriver(gpus, cuda)


@pytest.mark.parametrize(
    ("found", "torch", "visible", "says"),
    [
        (driver(H200), CUDA, None, ""),
        (driver(A100), CUDA, "0", ""),
        (driver(H200), None, None, ""),
        (driver(H200, cuda=13010), TorchBuild("2.15.0", "13.2"), None, ""),
        (None, CUDA, None, "no NVIDIA driver answers here"),
        (driver(), CUDA, None, "no NVIDIA driver answers here"),
        (driver(H200), CUDA, "", "CUDA_VISIBLE_DEVICES='' hides every GPU"),
        (driver(H200), CUDA, "GPU-cc", "hides every GPU"),
        (driver(T4), CUDA, None, "compute capability 8.0, and Tesla T4 has 7.5"),
        (driver(T4, H200), CUDA, None, ""),
        (driver(T4, H200), CUDA, "1", "Tesla T4 has 7.5"),
        (driver(T4, H200), CUDA, " GPU-aa , 1", ""),
        (driver(H200), CUDA, "7", "hides every GPU"),
        (driver(H200), CUDA, "MIG-1234", ""),
        (driver(H200), TorchBuild("2.13.0+cpu", None), None, "2.13.0+cpu is a CPU build"),
        (driver(H200, cuda=12040), CUDA, None, "supports CUDA up to 12.4 and torch 2.13.0+cu130"),
    ],
)
def test_why_kernels_are_interpreted(found, torch, visible, says):
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    why = backend.why_interpreted(found, torch, environment)
    assert says in why and bool(says) == bool(why)


def test_torch_is_known_without_being_imported():
    assert backend.installed_torch() == TorchBuild(torch.__version__, torch.version.cuda)


# ---- in a process of its own -----------------------------------------------------------------------------


def python(code, **variables):
    """What a fresh Python prints; a variable that is None is not set."""
    around = {**os.environ, "PYTHONPATH": paths.python_path(), backend.INTERPRET: None, **variables}
    environment = {key: value for key, value in around.items() if value is not None}
    ran = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    return ran


def faked(found):
    """Code that makes labkit find this driver, and a torch for CUDA."""
    return (
        "import sys; sys.modules['labkit'] = type(sys)('labkit'); "
        f"sys.modules['labkit'].__path__ = [{str(paths.CHECKOUT / 'labkit')!r}]; "
        "from labkit import backend; from labkit.backend import *; "
        f"backend.driver = lambda: {found!r}; backend.installed_torch = lambda: {CUDA!r}; backend.decide()"
    )


TELL = "; import os; print(os.environ.get('TRITON_INTERPRET'), backend.sentence())"


@pytest.mark.parametrize(
    ("found", "given", "expected"),
    [
        (driver(H200), None, "None Kernels are compiled"),
        (driver(T4), None, "1 Kernels are interpreted: Triton needs compute capability 8.0"),
        (driver(H200), "1", "1 Kernels are interpreted: TRITON_INTERPRET=1 is set"),
        (driver(H200), "", " Kernels are compiled"),
        (None, "0", "0 Kernels are compiled"),
        (None, "1", "1 Kernels are interpreted: no NVIDIA driver"),  # the variable may be the parent's choice
    ],
)
def test_the_decision_is_in_the_environment_and_the_users_own_wins(found, given, expected):
    assert python(faked(found) + TELL, TRITON_INTERPRET=given).stdout.startswith(expected)


def test_triton_before_labkit_is_one_sentence_that_says_what_to_do():
    assert "Restart the kernel" in python("import triton; " + faked(None)).stderr
    assert not python("import triton; " + faked(driver(H200))).stderr


def test_labkit_decides_when_it_is_imported_and_needs_no_torch_for_it():
    said = python(
        "import sys; from labkit import backend; print('torch' in sys.modules, 'triton' in sys.modules)"
        + TELL
    ).stdout
    assert said.startswith("False False\n") and "Kernels are" in said


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


def test_a_notebook_runs_under_plain_papermill_with_no_variable_set(tmp_path):
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    notebook = new_notebook(cells=[new_code_cell(CELL)], metadata={"kernelspec": kernel})
    nbformat.write(notebook, tmp_path / "toy.ipynb")
    papermill = "from papermill.cli import papermill; papermill(['toy.ipynb', 'made.ipynb'])"
    python(f"import os; os.chdir({str(tmp_path)!r}); {papermill}", LABKIT_HEADLESS=None)
    (cell,) = nbformat.read(tmp_path / "made.ipynb", 4).cells
    assert cell.outputs[-1].text == "10.0\n"
