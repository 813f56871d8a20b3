"""Which source travels with a kernel: what it refers to, from wherever that comes, and nothing else."""

import importlib.util
import math
import re
import sys
import types

import pytest
import triton
import triton.language as tl

from labkit import codegen, kernel_source

x = object()  # a name that kernels below use for something of their own
WIDTH = tl.constexpr(64)


@triton.jit
def double(x):
    return x + x


@triton.jit(noinline=True)
def quadruple(x):
    return double(double(x))


@triton.constexpr_function
def half(n):
    return math.ceil(n / 2)


@triton.jit(do_not_specialize=["n"])
def kernel(x_ptr, n, FACTOR: tl.constexpr = WIDTH):
    offsets = tl.arange(0, half(WIDTH))
    x = tl.load(x_ptr + offsets, mask=offsets < n)
    tl.store(x_ptr + offsets, x * quadruple(n) * FACTOR)


def load(path, text):
    """A module from a file that is nowhere on the import path."""
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def shipped(function):
    shipment = kernel_source.Shipment()
    shipment.add(function)
    return "\n".join(shipment.files.values())


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("LABKIT_CACHE", str(tmp_path))


def test_helpers_travel_once_each_with_their_decorators():
    text = shipped(kernel)
    for name in ("kernel", "quadruple", "double", "half"):
        assert text.count(f"def {name}(") == 1
    assert ".jit(noinline=True)\ndef quadruple" in text
    assert ".jit(do_not_specialize=['n'])\ndef kernel" in text
    assert ".constexpr_function\ndef half" in text
    assert "constexpr(64)" in text and "import math" in text


def test_names_that_are_the_kernels_own_are_not_looked_up():
    assert "object" not in shipped(kernel)


def test_what_travelled_compiles():
    compiled = codegen.compile(kernel, ["*fp32:16", 16])
    assert "tt.divisibility" not in compiled.ttir.split("%n: i32")[1].splitlines()[0].split(")")[0]
    assert "quadruple" in compiled.ptx  # not inlined
    assert compiled.loads == {32: 1}


def test_a_kernel_made_in_a_function_brings_what_it_closes_over():
    def make(operation, scale):
        @triton.jit
        def closure(x_ptr):
            tl.store(x_ptr, operation(tl.load(x_ptr)) * scale)

        return closure

    compiled = codegen.compile(make(double, tl.constexpr(0.25)), ["*fp32"])
    assert "0f3E800000" in compiled.ptx


def test_modules_from_files_that_are_not_importable(tmp_path):
    first = load(
        tmp_path / "first.py",
        "import triton\nimport triton.language as tl\nLIMIT = tl.constexpr(0.25)\n"
        "@triton.jit\ndef helper(x):\n    return tl.minimum(x, LIMIT)\n",
    )
    second = load(
        tmp_path / "second.py",
        "import triton\nimport triton.language as tl\nLIMIT = tl.constexpr(0.5)\n"
        "@triton.jit\ndef helper(x):\n    return tl.maximum(x, LIMIT)\n",
    )
    outer = types.ModuleType("outer")
    outer.inner = second
    main = load(
        tmp_path / "main.py",
        "import triton\nimport triton.language as tl\nfirst = outer = None\n"
        "@triton.jit\ndef kernel(x_ptr):\n"
        "    x = first.helper(tl.load(x_ptr)) + outer.inner.helper(tl.load(x_ptr))\n"
        "    tl.store(x_ptr, x * outer.inner.LIMIT)\n",
    )
    main.first, main.outer = first, outer
    compiled = codegen.compile(main.kernel, ["*fp32"])
    assert "0f3E800000" in compiled.ptx and "0f3F000000" in compiled.ptx
    assert "min" in compiled.ptx and "max" in compiled.ptx
    assert "first" not in sys.modules


ANNOTATED = (
    "import triton\nimport triton.language as tl\nimport triton.language as language\n"
    "class Mode: ...\nMISSING = 0\ndel MISSING\n"
    "@triton.jit\ndef twice(x, WIDE: tl.constexpr, *, N: language.constexpr = 1):\n    return x + x\n"
    "@triton.jit\ndef kernel(x_ptr):\n    tl.store(x_ptr, twice(tl.load(x_ptr), True))\n"
)


def test_a_module_that_only_an_annotation_of_a_helper_names_travels(tmp_path):
    """Triton evaluates the annotations of a helper, to see which of its parameters are constants."""
    main = load(tmp_path / "annotated.py", ANNOTATED)
    shipment = kernel_source.Shipment()
    shipment.add(main.twice)
    (text,) = (text for name, text in shipment.files.items() if "twice" in name)
    assert re.search(r"^tl = _m\d+$", text, re.MULTILINE)
    assert re.search(r"^language = _m\d+$", text, re.MULTILINE)
    assert codegen.compile(main.kernel, ["*fp32"]).loads == {32: 1}


def test_what_an_annotation_names_besides_modules_stays_behind(tmp_path):
    text = ANNOTATED.replace("WIDE: tl.constexpr", "WIDE: Mode").replace("x, WIDE", "x: MISSING, WIDE")
    main = load(tmp_path / "classes.py", "from __future__ import annotations\n" + text)
    shipped_text = shipped(main.twice)
    assert "def twice(x: MISSING, WIDE: Mode" in shipped_text
    assert not re.search(r"^(Mode|MISSING) =", shipped_text, re.MULTILINE)


def test_functions_of_tritons_own_are_imported_not_copied(tmp_path):
    main = load(
        tmp_path / "main.py",
        "import triton\nimport triton.language as tl\nfrom triton.language import sum as total, float32\n"
        "from triton.language.extra import libdevice\n"
        "@triton.jit\ndef kernel(x_ptr):\n"
        "    x = libdevice.tanh(tl.load(x_ptr + tl.arange(0, 32)).to(float32))\n"
        "    tl.store(x_ptr, total(tl.sigmoid(x)))\n",
    )
    text = shipped(main.kernel)
    assert "import triton.language.standard" in text and "def sum" not in text
    assert codegen.compile(main.kernel, ["*bf16"], num_warps=1).shuffles == {"bfly": 5}


def test_values_become_python_text():
    shipment = kernel_source.Shipment()
    values = {
        "numbers": (1, True, None, 2.5, float("-inf")),
        "types": [tl.float16, tl.pointer_type(tl.float32), tl.constexpr("a 'quote'")],
        "nested": {"key": (3,)},
        "functions": double,
    }
    shipment.write("entry", values)
    text = shipment.files["entry.py"]
    shared = "\n".join(
        line for line in text.splitlines() if "from . import" not in line and "functions" not in line
    )
    result: dict = {}
    exec(compile(shared, "entry", "exec"), result)
    assert result["numbers"] == values["numbers"]
    assert result["types"][:2] == values["types"][:2] and result["types"][2].value == "a 'quote'"
    assert result["nested"] == values["nested"]
    assert "double" in text and any("def double" in file for file in shipment.files.values())


def test_what_cannot_travel_is_named():
    with pytest.raises(ValueError, match=r"^LIMITS: .* type set"):
        kernel_source.Shipment().write("entry", {"LIMITS": {1, 2}})


def test_a_function_without_source_is_refused():
    namespace: dict = {}
    exec("def nowhere(x):\n    return x", namespace)
    with pytest.raises(ValueError, match="source of nowhere cannot be read"):
        kernel_source.Shipment().add(namespace["nowhere"])
    with pytest.raises(ValueError, match="not a function decorated"):
        kernel_source.unwrap(namespace["nowhere"])
