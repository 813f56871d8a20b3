"""Contenders from packages that need not be there."""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # decided when triton is imported, below

import re
import sys
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType

import pytest
from simulated import install

from labkit import device, peers, sweeps
from labkit.mlp_works import GEGLU_APART as GEGLU
from labkit.mlp_works import geglu_apart as geglu
from labkit.mlp_works import gelu
from labkit.sweeps import Contender

SHAPE = {"batch": 6, "width": 8, "hidden": 20}
LIGER = Contender("Liger", peers.liger_geglu, GEGLU, peer="liger-kernel")


def installed():
    try:
        return bool(version("liger-kernel"))
    except PackageNotFoundError:
        return False


class Without:
    """The finders of this Python, but for one package."""

    def __init__(self, package):
        self.package = package

    def find_spec(self, name, path=None, target=None):
        if name == self.package:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


@pytest.fixture
def missing(monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "liger_kernel"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Without("liger_kernel"), *sys.meta_path])


@pytest.fixture
def faked(monkeypatch):
    """A package that computes gelu(gate) * up in plain PyTorch."""

    class Product:
        @staticmethod
        def apply(gate, up):
            return gelu(gate) * up

    module = ModuleType("liger_kernel.ops.geglu")
    module.LigerGELUMulFunction = Product
    monkeypatch.setitem(sys.modules, "liger_kernel", ModuleType("liger_kernel"))
    monkeypatch.setitem(sys.modules, "liger_kernel.ops", ModuleType("liger_kernel.ops"))
    monkeypatch.setitem(sys.modules, "liger_kernel.ops.geglu", module)


def test_what_is_not_installed_is_named_with_the_remedy(missing):
    said = re.escape("liger-kernel is not installed: pip install -e '.[peers]'")
    with pytest.raises(peers.MissingError, match=said):
        peers.liger_geglu(*GEGLU.inputs(SHAPE))


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    """A simulated GPU, and nothing measured before."""
    monkeypatch.setenv("LABKIT_CACHE", str(tmp_path))
    monkeypatch.delenv(sweeps.TAPE, raising=False)
    return install(monkeypatch.setattr)


def test_what_is_not_installed_is_a_gap_with_the_reason(missing, gpu):
    def eager(*tensors):
        gpu.launch(4.0, 50.0)
        return geglu(*tensors)

    contenders = [Contender("eager", eager, GEGLU), LIGER]
    table = sweeps.run("suite", contenders, [SHAPE]).set_index("contender")
    assert table["median_us"].notna().tolist() == [True, False]
    assert table["note"]["Liger"] == "MissingError: liger-kernel is not installed: pip install -e '.[peers]'"
    assert table["peer"]["Liger"] == "liger-kernel"


def test_a_package_without_metadata_has_no_version(gpu, faked):
    def call(*tensors):
        gpu.launch(4.0, 50.0)
        return geglu(*tensors)

    contender = Contender("it", call, GEGLU, peer="no-such-package-of-ours")
    table = sweeps.run("suite", [contender], [SHAPE])
    assert table["median_us"].notna().all() and table["peer_version"].isna().all()


def test_an_installed_package_that_lacks_something_says_what(monkeypatch):
    def no_module(name):
        raise ModuleNotFoundError("No module named 'transformers'", name="transformers")

    monkeypatch.setattr(peers, "import_module", no_module)
    with pytest.raises(ModuleNotFoundError, match="transformers"):
        peers.liger_geglu(*GEGLU.inputs(SHAPE))


def test_the_mlp_around_the_product_is_geglu(faked):
    inputs = [t.double() for t in GEGLU.inputs(SHAPE)]
    torch.testing.assert_close(peers.liger_geglu(*inputs), geglu(*inputs))


@pytest.mark.skipif(
    not (device.has_gpu() and installed()), reason="Liger's kernels need a GPU, and liger-kernel installed"
)
def test_liger_computes_geglu_and_its_gradients():
    comparison = sweeps.accuracy.Comparison(peers.liger_geglu, geglu, "forward_backward")
    inputs = [t.bfloat16().requires_grad_() for t in GEGLU.inputs({"batch": 64, "width": 128})]
    assert comparison.complete(inputs) < 1e-2
