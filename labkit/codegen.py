"""What was compiled: PTX and SASS of a Triton kernel for a named GPU, whether or not one is here.

The compiler runs in a process of its own, so this works under the interpreter and from notebook cells.
Counts of instructions are static: each one in the program text counts once, however often it runs.
"""

import base64
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd
import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from labkit import kernel_source, places

TARGETS = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
"""A100; RTX 30 and A10; RTX 40, L4 and L40; H100 and H200; B200; RTX 50."""

_WORKER = Path(__file__).with_name("compile_worker.py")


class CompileError(RuntimeError):
    """Triton or ptxas refused the kernel; the message is theirs."""


@dataclass(frozen=True)
class Request:
    """A kernel to compile: its source, the values that specialise it, target and options."""

    kernel: str
    target: str
    options: Mapping[str, Any]
    files: Mapping[str, str] = field(repr=False)

    @cached_property
    def key(self) -> str:
        """A hash of everything that decides the result."""
        parts = [self.target, self.options, self.files, triton.__version__, _WORKER.read_text()]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class Compiled:
    """A compiled kernel and the static counts of its instructions.

    ``loads`` and ``stores`` map the bits that one thread moves to and from global memory with one instruction
    to how many such instructions there are; ``async_copies`` (cp.async: global to shared memory) are loads
    too. ``bulk_loads`` and ``bulk_stores`` are copies of whole tiles (cp.async.bulk), which have no width per
    thread. ``shuffles``, ``matrix`` and ``barriers`` map a kind of instruction to its count.
    """

    kernel: str
    target: str
    num_warps: int
    registers: int
    """Registers of a thread (32 bits each)."""
    spill_stores: int
    """Bytes a thread stores to local memory because registers ran out (static)."""
    spill_loads: int
    shared_bytes: int
    loads: dict[int, int]
    stores: dict[int, int]
    async_copies: dict[int, int]
    bulk_loads: int
    bulk_stores: int
    shuffles: dict[str, int]
    """By kind: bfly, up, down, idx; and redux, a whole warp's reduction in one instruction."""
    matrix: dict[str, int]
    """By family: mma, wgmma, tcgen05."""
    barriers: dict[str, int]
    """bar.sync (all threads of a block) and mbarrier (waits for an asynchronous copy or matrix unit)."""
    ttir: str = field(repr=False)
    ttgir: str = field(repr=False)
    ptx: str = field(repr=False)
    cubin: bytes = field(repr=False)

    @property
    def spills(self) -> int:
        """Bytes a thread moves to and from local memory because registers ran out (static)."""
        return self.spill_stores + self.spill_loads

    @property
    def widest_load(self) -> int:
        """Bits of the widest load of a thread from global memory; 0 when it has none."""
        return max(self.loads, default=0)

    @cached_property
    def sass(self) -> str:
        """The machine code, one instruction a line."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "kernel.cubin")
            path.write_bytes(self.cubin)
            tool = [triton.knobs.nvidia.cuobjdump.path, "-sass", str(path)]
            listing = subprocess.run(tool, check=True, capture_output=True, text=True).stdout
        return "\n".join(re.findall(r"^\s*/\*[0-9a-f]+\*/\s+(.*?;)", listing, re.MULTILINE))

    @property
    def local_accesses(self) -> int:
        """Loads and stores of local memory in the machine code: spills, and arrays kept on the stack."""
        return len(re.findall(r"\b(?:LDL|STL)\b", self.sass))


def compile(
    kernel: Any,
    args: Mapping[str, Any] | Sequence[Any],
    *,
    target: str = "sm_90",
    num_warps: int = 4,
    num_stages: int = 3,
    **constexprs: Any,
) -> Compiled:
    """Compile one kernel for one target; see ``request`` for the arguments and errors."""
    options = {"num_warps": num_warps, "num_stages": num_stages}
    return compile_many([request(kernel, args, target=target, **options, **constexprs)])[0]


def request(
    kernel: Any,
    args: Mapping[str, Any] | Sequence[Any],
    *,
    target: str = "sm_90",
    num_warps: int = 4,
    num_stages: int = 3,
    **constexprs: Any,
) -> Request:
    """What to compile, for ``compile_many``.

    ``args`` are example values of the parameters that are not constexpr, by name or in their order: tensors
    (meta tensors too), tensor descriptors, numbers. Triton specialises on them as it does at a launch: on the
    16-byte alignment of pointers, on integers that are 1 or divisible by 16. Or a type: ``"*bf16:16"`` is an
    aligned pointer, ``"i32"`` an integer of which nothing is known. Keywords give the constexpr parameters,
    and the compiler's own options (``maxnreg``, ``num_ctas``). ValueError names an argument that is wrong.
    """
    if target not in TARGETS:
        raise ValueError(f"target: {target!r} is none of {', '.join(TARGETS)}")
    jit = kernel_source.unwrap(kernel)
    parameters = kernel_source.parameters(jit)
    values = {**_by_name(jit, args), **{k: v for k, v in constexprs.items() if k in parameters}}
    options = {k: v for k, v in constexprs.items() if k not in parameters}
    for name, parameter in parameters.items():
        if name not in values and parameter.default is parameter.empty:
            raise ValueError(f"{name}: {jit.__name__} needs a value for this parameter")

    shipment = kernel_source.Shipment()
    examples = {
        name: ["constexpr", value] if kernel_source.is_constexpr(parameters[name]) else _example(name, value)
        for name, value in values.items()
    }
    shipment.write("entry", {"KERNEL": jit, "VALUES": examples})
    options |= {"num_warps": num_warps, "num_stages": num_stages}
    return Request(jit.__name__, target, options, shipment.files)


def _by_name(jit: Any, args: Mapping[str, Any] | Sequence[Any]) -> dict[str, Any]:
    parameters = kernel_source.parameters(jit)
    if isinstance(args, Mapping):
        unknown = [name for name in args if name not in parameters]
        if unknown:
            raise ValueError(f"{unknown[0]}: {jit.__name__} has no such parameter")
        return dict(args)
    names = [name for name, parameter in parameters.items() if not kernel_source.is_constexpr(parameter)]
    if len(args) > len(names):
        raise ValueError(f"args: {len(args)} values for the {len(names)} parameters {', '.join(names)}")
    return dict(zip(names, args, strict=False))


def _example(name: str, value: Any) -> list[Any]:
    """A parameter's value as ``compile_worker.example`` takes it."""
    if isinstance(value, torch.Tensor):
        return ["pointer", *_pointer(value)]
    if isinstance(value, TensorDescriptor):
        sizes = [list(value.shape), list(value.strides), list(value.block_shape)]
        return ["descriptor", _pointer(value.base), *sizes, value.padding]
    if isinstance(value, str):
        _check_type(name, value)
        return ["type", value]
    if value is None or isinstance(value, (bool, int, float)):
        return ["value", value]
    raise ValueError(
        f"{name}: give a tensor, a number or a type such as '*fp32:16', not a {type(value).__name__}"
    )


def _pointer(tensor: torch.Tensor) -> list[Any]:
    # only the alignment counts, and an address would make every process's request another one
    return [str(tensor.dtype).removeprefix("torch."), tensor.itemsize, tensor.data_ptr() % 16]


def _check_type(name: str, text: str) -> None:
    type_name, colon, divisor = text.partition(":")
    try:
        tl.str_to_ty(type_name, None)
    except Exception as error:  # Triton raises what its parser happens to hit
        raise ValueError(f"{name}: {text!r} is not a type of Triton's, such as '*fp32' or 'i32'") from error
    if colon and divisor != "16":
        raise ValueError(f"{name}: the only divisor Triton knows is 16, as in '{type_name}:16', not {text!r}")


def compile_many(requests: Iterable[Request]) -> list[Compiled]:
    """Compile several requests in one process; results are kept on disk for the next time.

    Raises CompileError with the compiler's message for the first kernel that it refuses, ValueError when it
    refuses the arguments.
    """
    wanted = list(requests)
    answers = {request.key: _recall(request) for request in wanted}
    missing = {request.key: request for request in wanted if answers[request.key] is None}
    for fresh, answer in zip(missing.values(), _run(list(missing.values())), strict=True):
        answers[fresh.key] = answer
        if "error" not in answer:
            _keep(fresh, answer)
    return [_compiled(request, answers[request.key] or {}) for request in wanted]


def cache_folder() -> Path:
    """Where compiled kernels are kept; it may be deleted at any time."""
    return places.cache() / "codegen"


def _recall(request: Request) -> dict[str, Any] | None:
    try:
        answer: dict[str, Any] = json.loads((cache_folder() / f"{request.key}.json").read_text())
    except (OSError, json.JSONDecodeError):
        return None  # not there, or damaged: compiled again
    return answer


def _keep(request: Request, answer: dict[str, Any]) -> None:
    with suppress(OSError):  # a cache that cannot be written costs seconds, not the result
        places.write_text(cache_folder() / f"{request.key}.json", json.dumps(answer))


def _run(requests: list[Request]) -> list[dict[str, Any]]:
    """The worker's answers, in order; one that is missing because the worker died is an error."""
    if not requests:
        return []
    with tempfile.TemporaryDirectory(prefix="labkit-codegen-") as name:
        folder = Path(name)
        jobs = []
        for index, request in enumerate(requests):
            package = folder / f"request{index}"
            package.mkdir()
            for file, text in request.files.items():
                (package / file).write_text(text)
            target = int(request.target.removeprefix("sm_"))
            jobs.append({"package": package.name, "target": target, "options": dict(request.options)})
        (folder / "requests.json").write_text(json.dumps(jobs))
        # -P: the modules beside the worker must not shadow anybody's
        command = [sys.executable, "-P", str(_WORKER), name]
        process = subprocess.run(command, env=_environment(folder), capture_output=True, text=True)
        return [_answer(folder / f"{job['package']}.json", process) for job in jobs]


def _environment(folder: Path) -> dict[str, str]:
    """This process's environment, without what would change how Triton compiles."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("TRITON_") or k.endswith("_PATH")}
    search = [str(Path(triton.__file__).parents[1]), kept.get("PYTHONPATH", "")]
    return kept | {
        "PYTHONPATH": os.pathsep.join(filter(None, search)),
        "TRITON_CACHE_DIR": str(folder / "triton"),
        "TRITON_ALWAYS_COMPILE": "1",
        "TRITON_INTERPRET": "0",  # said, should anything there import labkit
        "TRITON_DUMP_PTXAS_LOG": "1",  # registers and spills are told nowhere else
        "TRITON_DISABLE_LINE_INFO": "1",  # a third of the PTX, and of no use without the files
    }


def _answer(path: Path, process: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    if path.exists():
        answer: dict[str, Any] = json.loads(path.read_text())
        return answer
    reason = f"the compiler's process ended with status {process.returncode}\n{process.stderr[-2000:]}"
    return {"kind": "compile", "error": reason}


def _compiled(request: Request, answer: dict[str, Any]) -> Compiled:
    if "error" in answer:
        message = f"{request.kernel} for {request.target}: {answer['error']}"
        raise ValueError(message) if answer["kind"] == "argument" else CompileError(message)
    log = answer["ptxas_log"]
    return Compiled(
        kernel=request.kernel,
        target=request.target,
        num_warps=answer["num_warps"],
        registers=max(int(n) for n in re.findall(r"Used (\d+) registers", log)),
        spill_stores=sum(int(n) for n in re.findall(r"(\d+) bytes spill stores", log)),
        spill_loads=sum(int(n) for n in re.findall(r"(\d+) bytes spill loads", log)),
        shared_bytes=answer["shared_bytes"],
        **count_instructions(answer["ptx"]),
        ttir=answer["ttir"],
        ttgir=answer["ttgir"],
        ptx=answer["ptx"],
        cubin=base64.b64decode(answer["cubin"]),
    )


_INSTRUCTION = re.compile(r"\s*(?:[\w$]+:\s+)?(?:@!?%?\w+\s+)?([a-z]\w*(?:\.[\w:]+)+)(.*)", re.DOTALL)
"""Perhaps a label and a predicate, then the operation with its dotted suffixes, the operands."""


def count_instructions(ptx: str) -> dict[str, Any]:
    """The counts of ``Compiled`` from the text of a PTX program, by the names of its fields."""
    widths: dict[str, Counter[int]] = {name: Counter() for name in ("loads", "stores", "async_copies")}
    kinds: dict[str, Counter[str]] = {name: Counter() for name in ("shuffles", "matrix", "barriers")}
    bulk: Counter[str] = Counter()
    text = re.sub(r"//[^\n]*|/\*.*?\*/", "", ptx, flags=re.DOTALL)
    for statement in re.split(r"[;{}\n]", text):
        match = _INSTRUCTION.match(statement)
        if match is None:
            continue
        operation, operands = match[1].split("."), match[2]
        head = operation[0]
        if head in ("ld", "st") and "global" in operation:
            widths["loads" if head == "ld" else "stores"][_bits(operation)] += 1
        elif head == "cp" and "bulk" in operation:
            spaces = [part.split("::")[0] for part in operation if part.startswith(("shared", "global"))]
            if len(spaces) == 2:  # not a prefetch, nor a wait
                bulk["bulk_loads" if spaces[0] == "shared" else "bulk_stores"] += 1
        elif operation[:2] == ["cp", "async"] and "global" in operation:
            size = 8 * int(operands.split("]")[2].strip(", ").split(",")[0], 0)
            widths["async_copies"][size] += 1
            widths["loads"][size] += 1
        elif operation[:2] == ["shfl", "sync"]:
            kinds["shuffles"][operation[2]] += 1
        elif operation[:2] == ["redux", "sync"]:
            kinds["shuffles"]["redux"] += 1
        elif head == "mma" or operation[:2] in (["wgmma", "mma_async"], ["tcgen05", "mma"]):
            kinds["matrix"][head] += 1
        elif head in ("bar", "barrier") and "sync" in operation and "warp" not in operation:
            kinds["barriers"]["bar.sync"] += 1
        elif head == "mbarrier" and operation[1] in ("try_wait", "test_wait"):
            kinds["barriers"]["mbarrier"] += 1
    counts = {name: dict(counter) for name, counter in (widths | kinds).items()}
    return {**counts, "bulk_loads": bulk["bulk_loads"], "bulk_stores": bulk["bulk_stores"]}


def _bits(operation: list[str]) -> int:
    """Bits that a load or store moves: elements of the vector times the element's."""
    vector = next((int(part[1:]) for part in operation if re.fullmatch(r"v\d", part)), 1)
    return vector * int(operation[-1].lstrip("abcdefghijklmnopqrstuvwxyz"))


def table(*compiled: Compiled, labels: Sequence[str] = ()) -> pd.DataFrame:
    """One row for each kernel; ``labels`` name the rows where the kernels' names do not tell them apart."""
    if labels and len(labels) != len(compiled):
        raise ValueError(f"labels: {len(labels)} labels for {len(compiled)} kernels")
    widths = sorted({16, 32, 64, 128}.union(*(one.loads for one in compiled)), reverse=True)
    rows = [
        {
            "target": one.target,
            "warps": one.num_warps,
            "registers": one.registers,
            "spills (bytes)": one.spills,
            "widest load (bits)": one.widest_load,
            **{f"{width}-bit loads": one.loads.get(width, 0) for width in widths},
            "async copies": sum(one.async_copies.values()),
            "bulk copies": one.bulk_loads + one.bulk_stores,
            "shuffles": sum(one.shuffles.values()),
            "matrix instructions": ", ".join(f"{count} {kind}" for kind, count in one.matrix.items()) or "0",
            "barriers": sum(one.barriers.values()),
            "shared (KB)": one.shared_bytes / 1024,
        }
        for one in compiled
    ]
    return pd.DataFrame(rows, index=list(labels) or [one.kernel for one in compiled])


def excerpt(compiled: Compiled, pattern: str, *, context: int = 0, limit: int = 8, text: str = "ptx") -> str:
    """Lines of the PTX (or ``text``: ttir, ttgir, sass) that match a regular expression.

    With ``context`` lines around each, at most ``limit`` matches; a line of dots where something is left out.
    """
    if text not in ("ttir", "ttgir", "ptx", "sass"):
        raise ValueError(f"text: {text!r} is none of ttir, ttgir, ptx, sass")
    lines = getattr(compiled, text).expandtabs(4).splitlines()
    hits = [number for number, line in enumerate(lines) if re.search(pattern, line)]
    result: list[str] = []
    end = 0  # the line after the last one shown
    for hit in hits[:limit]:
        start = max(end, hit - context)
        if result and start > end:
            result.append("    ...")
        end = max(end, min(len(lines), hit + context + 1))
        result += lines[start:end]
    if len(hits) > limit:
        result.append(f"    ... {len(hits) - limit} more")
    return "\n".join(result)
