"""Compiles shipped kernels in a process of its own: no interpreter, no GPU, no torch, no labkit.

Run as a script with one folder: ``requests.json`` lists packages in it (see ``kernel_source``); each gets
an answer ``<package>.json``, written as soon as it is there, so that a crash of the compiler has a culprit.
"""

import base64
import contextlib
import functools
import importlib
import io
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime import cache
from triton.runtime.jit import create_function_from_signature
from triton.tools.tensor_descriptor import TensorDescriptor


class DType:
    """A tensor's element type, with what Triton asks of a torch dtype.

    One object for each type, kept for good (``dtype``): Triton remembers types by the object's identity.
    """

    def __init__(self, name: str, itemsize: int) -> None:
        self.name = name
        self.itemsize = itemsize
        self.is_floating_point = "float" in name

    def __str__(self) -> str:
        return f"torch.{self.name}"


dtype = functools.cache(DType)


class Pointer:
    """A tensor as Triton's specialisation sees it: an element type and an address."""

    def __init__(self, dtype_name: str, itemsize: int, address: int) -> None:
        self.dtype = dtype(dtype_name, itemsize)
        self.address = address

    def data_ptr(self) -> int:
        return self.address


def example(kind: str, *content: Any) -> Any:
    """The value with which a parameter is specialised."""
    if kind == "pointer":
        return Pointer(*content)
    if kind == "descriptor":
        base, *rest = content
        return TensorDescriptor(Pointer(*base), *rest)
    if kind == "type":
        return 3  # any value: what Triton derives from it is replaced by the type that was named
    return content[0]


def compile_request(package: str, target: int, options: dict[str, Any]) -> dict[str, Any]:
    """The texts and the binary of one kernel, or ``error`` with its ``kind``: argument or compile."""
    try:
        entry = importlib.import_module(f"{package}.entry")
        source, compile_options = specialise(entry, GPUTarget("cuda", target, 32), options)
    except Exception as error:
        return {"kind": "argument", "error": f"{type(error).__name__}: {error}"}
    log = io.StringIO()
    try:
        with contextlib.redirect_stdout(log):
            compiled = triton.compile(source, target=GPUTarget("cuda", target, 32), options=compile_options)
    except Exception as error:
        return {"kind": "compile", "error": reasons(error)}
    return {
        "ttir": compiled.asm["ttir"],
        "ttgir": compiled.asm["ttgir"],
        "ptx": compiled.asm["ptx"],
        "cubin": base64.b64encode(compiled.asm["cubin"]).decode(),
        "ptxas_log": log.getvalue(),
        "num_warps": compiled.metadata.num_warps,
        "shared_bytes": compiled.metadata.shared,
    }


def reasons(error: BaseException) -> str:
    """An error and what caused it: of a helper's mistake Triton's own message shows the call only."""
    told = f"{type(error).__name__}: {error}"
    return f"{told}\n{reasons(error.__cause__)}" if error.__cause__ else told


def specialise(entry: Any, target: GPUTarget, options: dict[str, Any]) -> tuple[ASTSource, dict[str, Any]]:
    """What a launch would compile for these values, by the code that decides it at a launch."""
    kernel, backend = entry.KERNEL, make_backend(target)
    values = {name: example(*value) for name, value in entry.VALUES.items()}
    binder = create_function_from_signature(kernel.signature, kernel.params, backend)
    bound, specialization, options = binder(**values, **options, debug=bool(kernel.debug))
    for index, name in enumerate(bound):
        kind, *content = entry.VALUES.get(name, ["default"])
        if kind == "type":
            type_name, _, divisor = content[0].partition(":")
            specialization[index] = (type_name, "D" if divisor else "")
    parsed, signature, constexprs, attributes = kernel._pack_args(
        backend, options, bound, specialization, options
    )
    return ASTSource(kernel, signature, constexprs, attributes), dict(parsed.__dict__)


def main(folder: Path) -> None:
    """Answer every request of the folder."""
    # Two habits of Triton's that take five times as long as a compilation: to import torch, so as to know a
    # tensor when it sees one (here they are Pointers), and to hash all of itself, to name what it keeps.
    torch: Any = ModuleType("torch")
    torch.Tensor = Pointer
    sys.modules["torch"] = torch
    cache.triton_key = lambda: triton.__version__
    sys.path.insert(0, str(folder))
    for request in json.loads((folder / "requests.json").read_text()):
        answer = compile_request(**request)
        (folder / f"{request['package']}.json").write_text(json.dumps(answer))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
