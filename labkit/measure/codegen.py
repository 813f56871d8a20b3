"""Compile Triton kernels offline for a named GPU: PTX, registers, and counts of instructions.

No GPU is needed. The compiler runs in a process of its own, in which Triton does not interpret kernels. That
process imports the module in which a kernel is defined. A kernel from notebook cells, or from an answer to an
exercise, is first written to a file that can be imported.

Counts of instructions are static: each instruction in the program text counts once, however often it runs.
"""

import ast
import contextlib
import hashlib
import importlib.util
import inspect
import io
import os
import re
import sys
import tempfile
import textwrap
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from operator import attrgetter
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import ConstexprFunction, JITFunction, create_function_from_signature
from triton.tools.tensor_descriptor import TensorDescriptor

from labkit import child_process, notebooks, paths

TARGETS = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
"""A100; RTX 30 and A10; RTX 40, L4 and L40; H100 and H200; B200; RTX 50."""

TIME_LIMIT_S = 600.0
"""Seconds that one call of :func:`compile_many` may take."""

POINTER_TYPES = {"*fp32": torch.float32, "*fp16": torch.float16, "*bf16": torch.bfloat16}
"""Types of pointers as Triton writes them, which may stand for a tensor; ``:16`` after them says aligned."""


class CompileError(RuntimeError):
    """Triton or ptxas rejected the kernel. The message is the compiler's."""


class SourceLocation(NamedTuple):
    """The module, file and name under which another process can import a function."""

    module: str
    file: str
    name: str

    def imported(self) -> Any:
        """The function, imported."""
        return attrgetter(self.name)(load_module(self.module, self.file))


@dataclass(frozen=True)
class Pointer:
    """What Triton asks of a tensor when it specialises a kernel: its dtype, and its address modulo 16."""

    dtype: torch.dtype
    address: int

    def data_ptr(self) -> int:
        """The address, under the name that a tensor has for it."""
        return self.address


class CompileRequest(NamedTuple):
    """A kernel to compile: its name, target, options, location, and the values that specialise it."""

    kernel: str
    target: str
    options: Mapping[str, Any]
    source: SourceLocation
    values: Mapping[str, Any]


@dataclass(frozen=True)
class CompiledKernel:
    """A compiled kernel and the static counts of its instructions.

    ``loads`` and ``stores`` map the number of bits that one thread moves with one instruction, from or to
    global memory, to the number of such instructions. ``async_copies`` (cp.async, from global to shared
    memory) are counted among the loads too. ``bulk_loads`` and ``bulk_stores`` are copies of whole tiles
    (cp.async.bulk), which have no width per thread. ``shuffles``, ``matrix`` and ``barriers`` map a kind of
    instruction to its count.
    """

    kernel: str
    target: str
    num_warps: int
    registers: int
    """Registers of a thread (32 bits each)."""
    spills: int
    """Bytes that a thread stores to local memory and loads from there because registers ran out."""
    shared_bytes: int
    loads: dict[int, int]
    stores: dict[int, int]
    async_copies: dict[int, int]
    bulk_loads: int
    bulk_stores: int
    shuffles: dict[str, int]
    """By kind: bfly, up, down, idx; and redux, which reduces a whole warp with one instruction."""
    matrix: dict[str, int]
    """By family: mma, wgmma, tcgen05."""
    barriers: dict[str, int]
    """bar.sync (all threads of a block) and mbarrier (waits for an asynchronous copy or matrix unit)."""
    ttir: str = field(repr=False)
    ttgir: str = field(repr=False)
    ptx: str = field(repr=False)

    @property
    def widest_load(self) -> int:
        """Bits of the widest load of a thread from global memory; 0 if there is none."""
        return max(self.loads, default=0)


def compile(kernel: Any, args: Mapping[str, Any] | Sequence[Any], **options: Any) -> CompiledKernel:
    """Compile one kernel for one target: arguments of :func:`request`, errors of :func:`compile_many`."""
    return compile_many([request(kernel, args, **options)])[0]


def request(
    kernel: Any,
    args: Mapping[str, Any] | Sequence[Any],
    *,
    target: str = "sm_90",
    num_warps: int = 4,
    num_stages: int = 3,
    **constexprs: Any,
) -> CompileRequest:
    """Describe a kernel to compile, for :func:`compile_many`.

    ``args`` are example values of the parameters that are not constexpr, by name or in their order: tensors
    (meta tensors too), tensor descriptors, numbers. Triton specialises on them as it does at a launch: on the
    16-byte alignment of pointers, and on integers that are 1 or divisible by 16. Instead of a tensor the type
    of a pointer may be given: ``"*bf16:16"`` is an aligned one. Keywords give the constexpr parameters, and
    options of the compiler (``maxnreg``, ``num_ctas``).

    Raises ValueError, which names the argument that is wrong.
    """
    if target not in TARGETS:
        raise ValueError(f"target: {target!r} is none of {', '.join(TARGETS)}")
    jit = unwrap(kernel)
    parameters = inspect.signature(jit.fn).parameters
    constant = {name for name, one in parameters.items() if "constexpr" in str(one.annotation)}
    if not isinstance(args, Mapping):
        names = [name for name in parameters if name not in constant]
        if len(args) > len(names):
            raise ValueError(f"args: {len(args)} values for the {len(names)} parameters {', '.join(names)}")
        args = dict(zip(names, args, strict=False))
    values = {**args, **{name: value for name, value in constexprs.items() if name in parameters}}
    for name in [*values, *parameters]:
        if name not in parameters:
            raise ValueError(f"{name}: {jit.__name__} has no such parameter")
        if name not in values and parameters[name].default is inspect.Parameter.empty:
            raise ValueError(f"{name}: {jit.__name__} needs a value for this parameter")
    options = {name: value for name, value in constexprs.items() if name not in parameters}
    options |= {"num_warps": num_warps, "num_stages": num_stages}
    examples = {name: _example(name, value, name in constant) for name, value in values.items()}
    return CompileRequest(jit.__name__, target, options, source_of(jit.fn), examples)


def _example(name: str, value: Any, constant: bool) -> Any:
    """The value of a parameter in the form that is sent to the compiler's process."""
    if isinstance(value, torch.Tensor):
        return Pointer(value.dtype, value.data_ptr() % 16)
    if isinstance(value, TensorDescriptor):
        return replace(value, base=_example(name, value.base, constant))
    if isinstance(value, str) and not constant and value.removesuffix(":16") in POINTER_TYPES:
        return Pointer(POINTER_TYPES[value.removesuffix(":16")], 0 if value.endswith(":16") else 4)
    if _is_jit(value) or isinstance(value, ConstexprFunction):
        return source_of(value.fn)
    if _literal(value) and (constant or not isinstance(value, str)):
        return value
    raise ValueError(f"{name}: give a tensor, a number or a type such as '*fp32:16', not {value!r}")


# ---- finding a kernel's source -----------------------------------------------------------------------------


def unwrap(kernel: Any) -> Any:
    """The ``@triton.jit`` function inside ``autotune`` and ``heuristics``; ValueError if there is none."""
    inner = kernel
    while not _is_jit(inner):
        if not hasattr(inner, "fn"):
            raise ValueError(f"kernel: {kernel!r} is not a function decorated with @triton.jit")
        inner = inner.fn
    return inner


def _is_jit(value: Any) -> bool:
    # The interpreter's class is compared by name: its module is imported only where kernels are interpreted.
    return isinstance(value, JITFunction) or type(value).__name__ == "InterpretedFunction"


def source_of(function: FunctionType) -> SourceLocation:
    """Where another process can import a function from.

    A function that no importable module holds is written to a file of its own, with the constants and
    functions that it uses. Raises ValueError if its source cannot be read.
    """
    spec = getattr(sys.modules.get(function.__module__), "__spec__", None)
    # The module of an answer to an exercise has the spec of its lesson, under another name.
    if spec and spec.origin and spec.name == function.__module__ and "<locals>" not in function.__qualname__:
        return SourceLocation(spec.name, spec.origin, function.__qualname__)
    try:
        text = textwrap.dedent(inspect.getsource(function))
    except OSError as error:
        raise ValueError(
            f"kernel: the source of {function.__name__} cannot be read; define it in a cell or in a file"
        ) from error
    scope = {**function.__globals__, **inspect.getclosurevars(function).nonlocals}
    names = dict.fromkeys(re.findall(r"[^\W\d]\w*", text))  # words of comments too, which do no harm
    values = {name: _literal(scope[name]) for name in names if name in scope and name != function.__name__}
    text = _jit_alone(text)
    lines = [f"{name} = {value}" for name, value in values.items() if value]
    text = "\n".join(["from labkit.measure import codegen", *lines, text])
    module = f"labkit_cells_{hashlib.sha256(text.encode()).hexdigest()[:12]}"
    file = paths.cache() / "lessons" / f"{module}.py"
    paths.write_text(file, text)
    return SourceLocation(module, str(file), function.__name__)


def _jit_alone(text: str) -> str:
    """A function's source under @triton.jit alone: what tunes its launch may use names of any kind."""
    lines = text.splitlines()
    function = ast.parse(text).body[0]
    assert isinstance(function, ast.FunctionDef), "only functions have the decorator"
    kept = [f"@{ast.unparse(each)}" for each in function.decorator_list]
    kept = [each for each in kept if re.search(r"\b(jit|constexpr_function)\b", each)]
    return "\n".join([*(kept or ["@codegen.triton.jit"]), *lines[function.lineno - 1 :]])


def _literal(value: Any) -> str:
    """Python source of a value that a kernel may use; "" for any other value, which Triton will reject."""
    if isinstance(value, ModuleType) and value.__spec__ is not None:
        return f"codegen.load_module({value.__name__!r}, {value.__spec__.origin!r})"
    if _is_jit(value) or isinstance(value, ConstexprFunction):  # a kernel calls no other functions
        return f"codegen.{source_of(value.fn)}.imported()"
    if value is tl.constexpr:
        return "codegen.tl.constexpr"
    if isinstance(value, tl.constexpr):
        inner = _literal(value.value)
        return inner and f"codegen.tl.constexpr({inner})"
    if type(value) is tl.dtype:
        return f"codegen.tl.dtype({value.name!r})"
    if isinstance(value, tuple):
        items = [_literal(one) for one in value]
        return f"({', '.join(items)},)" if items and all(items) else ""
    if isinstance(value, float):
        return f"float('{value}')"  # also inf and nan
    return repr(value) if value is None or isinstance(value, (bool, int, str)) else ""


def load_module(name: str, file: str) -> ModuleType:
    """Import a module by its name, or from its file if the import system does not find that file."""
    with contextlib.suppress(ImportError, ValueError):
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.origin == file:
            return importlib.import_module(name)
    return notebooks.import_file(name, Path(file))


# ---- the compiler's process --------------------------------------------------------------------------------


_SETTINGS = {
    "TRITON_INTERPRET": "0",
    "TRITON_ALWAYS_COMPILE": "1",
    "TRITON_DUMP_PTXAS_LOG": "1",  # only this log has the registers and spills
    "TRITON_DISABLE_LINE_INFO": "1",  # a third of the PTX, and of no use without the files
    "CUDA_VISIBLE_DEVICES": "",
}


@cache
def compile_server() -> child_process.PreloadedProcess:
    """The process that compiles for this one; the first call starts it."""
    # Without variables that change how Triton compiles, and without a GPU, which is not needed.
    kept = {k: v for k, v in os.environ.items() if not k.startswith("TRITON_") or k.endswith("_PATH")}
    return child_process.PreloadedProcess(_prepare, environment=kept | _SETTINGS)


@triton.jit
def empty_kernel(x_ptr):  # type: ignore[no-untyped-def]
    pass


def _prepare() -> None:
    """Do in advance what takes longer than to compile a kernel: imports, and the first compilation."""
    importlib.import_module("labkit.kernels")
    _compile_all([request(empty_kernel, ["*fp32"])])


def compile_many(requests: Iterable[CompileRequest], seconds: float = TIME_LIMIT_S) -> list[CompiledKernel]:
    """Compile several requests in one process; equal ones are compiled once.

    Raises TimeoutError if it takes longer than ``seconds``, CompileError with the compiler's message for the
    first kernel that it rejects, and ValueError if it rejects the arguments.
    """
    wanted = list(requests)
    if not wanted:
        return []
    asked = {repr(request): request for request in wanted}
    try:
        made = compile_server().run(_compile_all, list(asked.values()), seconds=seconds)
    except child_process.ChildError as error:
        notes = getattr(error, "__notes__", ())
        raise CompileError("\n".join([f"the compiler's process: {error}", *notes])) from error
    for one in made:
        if isinstance(one, Exception):
            raise one
    results = dict(zip(asked, made, strict=True))
    return [results[repr(request)] for request in wanted]


def _compile_all(requests: list[CompileRequest]) -> list[CompiledKernel | Exception]:
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TRITON_CACHE_DIR"] = folder
        return [_compile(request) for request in requests]


def _compile(request: CompileRequest) -> CompiledKernel | Exception:
    """The compiled kernel, or the error with which the compiler rejects it."""
    title = f"{request.kernel} for {request.target}"
    print(title, flush=True)  # if the compiler crashes, the error shows this
    target = GPUTarget("cuda", int(request.target.removeprefix("sm_")), 32)
    try:
        source, options = _specialised(request, target)
    except Exception as error:
        return ValueError(f"{title}: {type(error).__name__}: {error}")
    log = io.StringIO()
    try:
        with contextlib.redirect_stdout(log):
            made = triton.compile(source, target=target, options=options)
    except Exception as error:
        return CompileError(f"{title}: {_with_causes(error)}")
    ptxas_log = log.getvalue()
    return CompiledKernel(
        kernel=request.kernel,
        target=request.target,
        num_warps=made.metadata.num_warps,
        registers=max(int(n) for n in re.findall(r"Used (\d+) registers", ptxas_log)),
        spills=sum(int(n) for n in re.findall(r"(\d+) bytes spill (?:stores|loads)", ptxas_log)),
        shared_bytes=made.metadata.shared,
        **count_instructions(made.asm["ptx"]),
        **{name: made.asm[name] for name in ("ttir", "ttgir", "ptx")},
    )


def _with_causes(error: BaseException) -> str:
    """An error and its causes. For a mistake in a helper Triton's own message shows only the call."""
    message = f"{type(error).__name__}: {error}"
    return f"{message}\n{_with_causes(error.__cause__)}" if error.__cause__ else message


def _specialised(request: CompileRequest, target: GPUTarget) -> tuple[ASTSource, dict[str, Any]]:
    """What a launch with these values would compile, decided by Triton's own code for a launch."""
    kernel, backend = unwrap(request.source.imported()), make_backend(target)
    given = request.values.items()
    values = {name: one.imported() if isinstance(one, SourceLocation) else one for name, one in given}
    binder = create_function_from_signature(kernel.signature, kernel.params, backend)
    bound, specialization, options = binder(**values, **request.options, debug=bool(kernel.debug))
    parsed, *described = kernel._pack_args(backend, options, bound, specialization, options)
    return ASTSource(kernel, *described), dict(parsed.__dict__)


def count_instructions(ptx: str) -> dict[str, Any]:
    """Count the instructions of a PTX program. Keys are fields of :class:`CompiledKernel`."""
    text = re.sub(r"//[^\n]*", "", ptx)
    moved: dict[str, Counter[int]] = {"ld": Counter(), "st": Counter()}
    for operation, suffix in re.findall(r"\b(ld|st)\.([\w.:]*global[\w.:]*)", text):
        vector, element = re.search(r"\.v(\d)", suffix), re.findall(r"\d+", suffix)[-1]
        moved[operation][int(vector[1] if vector else 1) * int(element)] += 1
    # cp.async.cg.shared.global [target], [source], 16;
    sizes = re.findall(r"\bcp\.async\.c[ag]\.\S*global\S* \[[^]]*\], \[[^]]*\], (\w+)", text)
    copies = Counter(8 * int(size, 0) for size in sizes)
    # From the second to the first of two spaces; a prefetch and a wait name fewer.
    bulk = re.findall(r"\bcp\.async\.bulk\.\S*?(shared|global)\S*?\.(?:shared|global)\b", text)
    shuffles = re.findall(r"\bshfl\.sync\.(\w+)", text) + re.findall(r"\b(redux)\.sync", text)
    matrix = re.findall(r"(?<![\w.])(mma|wgmma(?=\.mma_async)|tcgen05(?=\.mma))\.", text)
    barriers = {
        "bar.sync": len(re.findall(r"(?<![\w.])(?:bar|barrier)\.(?!warp)[\w.]*sync", text)),
        "mbarrier": len(re.findall(r"\bmbarrier\.(?:try|test)_wait", text)),
    }
    return {
        "loads": dict(moved["ld"] + copies),
        "stores": dict(moved["st"]),
        "async_copies": dict(copies),
        "bulk_loads": bulk.count("shared"),
        "bulk_stores": bulk.count("global"),
        "shuffles": dict(Counter(shuffles)),
        "matrix": dict(Counter(matrix)),
        "barriers": {kind: count for kind, count in barriers.items() if count},
    }
