"""What the tests of the finished kernels share: inputs, comparisons with float64, other GPUs, launches."""

import itertools
import math
import re
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import Any, NamedTuple

import launches
import pytest
import torch
from launches import ROOM, Launch
from torch import Tensor

import labkit
from labkit.kernels import calls
from labkit.kernels.common import DeviceLimits
from labkit.measure import codegen, correctness, launch_counts

bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
LARGE = pytest.mark.large
GPU = pytest.mark.skipif(
    not labkit.gpu.available(), reason="CUDA graphs, memory statistics, races and sizes as large need a GPU"
)
TWO_GPUS = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there is one GPU or none")
INTERPRETED = pytest.mark.skipif(
    labkit.gpu.available(),
    reason="accesses are watched, and tiles of other GPUs run, where kernels are interpreted",
)
Inputs = Callable[[tuple[int, ...]], tuple[Tensor, ...]]


class Case(NamedTuple):
    """An operator, the same in plain PyTorch, and inputs for a shape, with h0 last where there is a state."""

    call: Callable[..., Tensor]
    reference: Callable[..., Tensor]
    inputs: Inputs
    shape: tuple[int, ...] = ()
    name: str = ""

    def __repr__(self) -> str:
        return self.name or self.call.__name__

    @property
    def without_h0(self) -> "Case":
        return self._replace(inputs=lambda shape: self.inputs(shape)[:-1], name=f"{self}, no h0")


def scaled(*shape: int) -> Tensor:
    """A weight whose products with normal numbers are about normal."""
    return torch.randn(shape) * max(shape[-1], 1) ** -0.5


def drawn(of: Any, *shape: int, dtype: torch.dtype = fp32, grad: bool = False) -> list[Tensor]:
    """The inputs of a case, or what a function of a shape makes, on this machine's device."""
    torch.manual_seed(0)
    made = getattr(of, "inputs", of)(shape or getattr(of, "shape", shape))
    return [t.to(labkit.gpu.device(), dtype).requires_grad_(grad) for t in made]


def examine(
    case: Case, *shapes: Any, layouts: Any = ("contiguous",), dtypes: Any = correctness.DTYPES, **options: Any
) -> None:
    """checks.check in some layouts: into NaN between fences, gradients of a correlated upstream, twice."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(correctness, "LAYOUTS", {name: correctness.LAYOUTS[name] for name in layouts})
        options = dict(shapes=shapes or (case.shape,), dtypes=dtypes, name=repr(case)) | options
        correctness.check(case.call, case.reference, case.inputs, **options)


def gradients(call: Any, tensors: Any, upstream: Tensor | None = None) -> list[Tensor]:
    """The output and the gradient of every tensor; upstream twice the output where nothing else is given."""
    leaves = [t.detach().requires_grad_() for t in tensors]
    y = call(*leaves)
    return [y.detach(), *torch.autograd.grad(y, leaves, 2 * y.detach() if upstream is None else upstream)]


def exact(case: Case, tensors: Any, upstream: Tensor | None = None) -> list[Tensor]:
    """Those of the reference in float64."""
    return gradients(case.reference, [t.double() for t in tensors], upstream)


def assert_close(got: Tensor, want: Tensor, dtype: torch.dtype = fp32, roundings: int = 1) -> None:
    assert got.dtype is dtype and got.shape == want.shape, (got.dtype, got.shape, want.shape)
    problem = correctness.diagnose(got.detach(), want.detach(), roundings * correctness.TOLERANCE[dtype])
    assert not problem, problem


def all_close(got: Any, want: Any, dtype: torch.dtype = fp32, roundings: int = 1) -> None:
    for one, other in zip(got, want, strict=True):
        assert_close(one, other.double(), dtype, roundings)


def assert_right_in_parts(case: Case, tensors: Any, at_once: int, roundings: int) -> None:
    """Sums of all rows, and what there is for each in the first, the middle and the last so many rows."""
    (x, *others), totals = tensors, None
    y, dx, *sums = gradients(case.call, tensors)
    starts = range(0, len(x), at_once)
    for start in starts:
        part = slice(start, start + at_once)
        *wants, first, second = exact(case, (x[part], *others), 2 * y[part].double())
        totals = (first, second) if totals is None else (totals[0] + first, totals[1] + second)
        if start in (starts[0], starts[len(starts) // 2], starts[-1]):
            all_close((y[part], dx[part]), wants, x.dtype, roundings)
    all_close(sums, totals, x.dtype, roundings)


def equal(one: Any, other: Any) -> bool:
    return all(torch.equal(*pair) for pair in zip(one, other, strict=True))


def assert_each_rounded_once(got: Tensor, want: Tensor, slack: float = 1e-6) -> None:
    """Every number in float16: a sum in 16 bits is off by more. Where terms cancel float32 has ``slack``."""
    assert got.dtype is fp16
    error, allowed = (got.double() - want).abs(), 1.001 * 2.0**-11 * want.abs()
    worst = (error / (allowed + slack * want.abs().max())).max().item()
    assert worst <= 1, f"{worst:.2f} times what rounding once may cost"


def assert_rounded_once(got: Tensor, want: Tensor, times: float = 1.2) -> None:
    """By norms: little more than what rounding the float64 result to this dtype costs.

    ``times`` as much: 2 where a GPU computes tanh by one instruction, whose error is near that of float16.
    """
    least = correctness.relative_error(want.to(got.dtype), want)
    truncated = got.dtype is bf16 and not labkit.gpu.available()  # as the interpreter rounds to bfloat16
    error, most = correctness.relative_error(got, want), (2.4 if truncated else times) * least + 1e-6
    assert error < most, (error, most)


def compiled(call: Any, **options: Any) -> Any:
    return torch.compile(call, fullgraph=True, backend="aot_eager", **options)


def assert_compiles(layer: Any, tensors: list[Tensor]) -> None:
    """Into one graph, with and without gradients."""
    all_close(gradients(compiled(layer), tensors), gradients(layer, tensors))
    with torch.no_grad():
        assert_close(compiled(layer)(*tensors), layer(*tensors))


def library_calls(call: Any, *tensors: Tensor) -> list[list[str]]:
    """Names of labkit's operators in what the compiler makes of a call, a list for each graph."""
    found = []

    def record(graph: Any, _: Any) -> Any:
        parts = [m for m in graph.modules() if isinstance(m, torch.fx.GraphModule)]
        names = [str(node.target) for part in parts for node in part.graph.nodes]
        found.append([n.split(".")[1] for n in names if n.startswith("labkit.")])
        return graph.forward

    torch.compile(call, backend=record, fullgraph=True)(*tensors)
    return found


def saved_by(call: Any, tensors: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """The output, and what was saved for a backward."""
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        return call(*tensors), saved


def kernels_of(call: Any, *tensors: Tensor) -> list[Any]:
    """The launches of Triton kernels in a call, between fences, so that strays hit nothing else."""
    fences = correctness.GuardZones()
    placed = [fences.place(t.detach(), "contiguous").requires_grad_(t.requires_grad) for t in tensors]
    with fences:
        made = launch_counts.count(lambda: call(*placed))
    return [launch for launch in made if launch.programs]


def both_ways_of(call: Any, tensors: list[Tensor]) -> tuple[list[Any], list[Any]]:
    """The launches of Triton kernels, forward and backward."""
    forward = kernels_of(call, *(t.detach().requires_grad_() for t in tensors))
    upstream = torch.randn_like(call(*tensors))
    whole = kernels_of(lambda *given: gradients(call, given, upstream), *tensors)
    return forward, whole[len(forward) :]


def moved(launch: Any) -> tuple[int, int]:
    """Numbers of float32 that a launch reads and writes."""
    return launch.bytes_read // 4, launch.bytes_written // 4


def captured(call: Any, tensors: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Output and gradients of a graph, replayed for other numbers than captured, and the call's for these."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):  # compiles, and lets the libraries take their workspaces
            gradients(call, tensors)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = gradients(call, tensors)
    tensors[0].mul_(0.5)
    graph.replay()
    return made, gradients(call, tensors)


# --- other GPUs, and meta tensors, whose launches are recorded


def limits_of(target: str, multiprocessors: int = 132) -> DeviceLimits:
    return DeviceLimits(multiprocessors, ROOM[target] * 1024, int(target.removeprefix("sm_")) >= 90)


def pretend(patch: pytest.MonkeyPatch, its: DeviceLimits, *modules: Any) -> list[Any]:
    """Let the host's part believe that tensors are on this GPU; the list fills with the devices asked for."""
    asked: list[Any] = []

    def device_limits(where: torch.device) -> DeviceLimits:
        asked.append(where)
        return its

    for module in modules:
        patch.setattr(module, "device_limits", device_limits)
    return asked


def meta(*shape: int, dtype: torch.dtype = fp32, grad: bool = False) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta", requires_grad=grad)


def launch_both_ways(call: Any, *tensors: Tensor) -> None:
    """On meta tensors: what would be launched, with its arguments."""
    y = call(*(t.requires_grad_() for t in tensors))
    torch.autograd.grad(y, tensors, torch.empty_like(y))


def registers_fit(programs: int, code: Any, target: str) -> bool:
    """Whether as many programs fit a multiprocessor: one KiB of each is the system's, registers go by 8."""
    registers = math.ceil(code.registers / 8) * 8 * 32 * code.num_warps
    shared = programs * (code.shared_bytes + 1024)
    return shared <= (ROOM[target] + 1) * 1024 and programs * registers <= 65536


# --- what the compiler makes of launches on other GPUs


class Variant(NamedTuple):
    """A kernel compiled as one launch would have it."""

    launch: Launch
    target: str
    case: tuple[Any, ...]
    """What the launch was asked with."""
    code: codegen.CompiledKernel

    @property
    def title(self) -> str:
        return self.launch.title

    @property
    def dtype(self) -> torch.dtype:
        """That of the first tensor."""
        first = next(iter(self.launch.arguments.values()))
        return getattr(first, "base", first).dtype

    def __repr__(self) -> str:
        return f"{self.title} {self.target} {self.case}"


Kernels = dict[ModuleType, tuple[str, ...]]
"""By module the names of its kernels."""


def recorded(patch: pytest.MonkeyPatch, kernels: Kernels) -> list[Launch]:
    """The list that fills with the launches of these kernels while ``patch`` lasts."""
    made: list[Launch] = []
    # Launches with meta tensors are what is recorded.
    patch.setattr(calls, "is_traced", lambda _: torch.compiler.is_compiling())
    for module, names in kernels.items():
        for name in names:
            patch.setattr(module, name, launches.Recorder(getattr(module, name), made))
    return made


def variants_of(
    kernels: Kernels, cases: dict[str, list[tuple[Any, ...]]], launch: Callable[..., None]
) -> list[Variant]:
    """All that ``launch(*case)`` launches on the GPU of each target, what Triton makes the same of once."""
    asked: dict[str, tuple[Any, ...]] = {}
    for target, case in ((target, case) for target, several in cases.items() for case in several):
        with pytest.MonkeyPatch.context() as patch:
            made = recorded(patch, kernels)
            pretend(patch, limits_of(target), *(one for one in kernels if hasattr(one, "device_limits")))
            launch(*case)
        for one in made:
            request = codegen.request(one.kernel, one.arguments, target=target, **one.options)
            # of numbers that are no constants Triton looks at these three alone
            sizes = {k: n for k, n in one.arguments.items() if k not in one.kernel.fn.__annotations__}
            kinds = {k: (n == 1, n % 16 == 0, n >= 2**31) for k, n in sizes.items() if type(n) is int}
            alike = request._replace(values={**request.values, **kinds})
            asked.setdefault(repr(alike), (one, target, case, request))
    requests = [request for *_, request in asked.values()]
    with ThreadPoolExecutor(2) as pool:  # each compiles one kernel at a time
        halves = list(pool.map(codegen.compile_many, (requests[::2], requests[1::2])))
    codes = [one for pair in itertools.zip_longest(*halves) for one in pair if one is not None]
    return [Variant(one[0], one[1], one[2], code) for one, code in zip(asked.values(), codes, strict=True)]


def assert_fits(variants: list[Variant], spills: int | None = 0) -> None:
    """Into registers but for some bytes (None: not looked at), and shared memory; sums in a fixed order."""
    for v in variants:
        assert spills is None or v.code.spills <= spills, (v, v.code.spills)
        assert v.code.shared_bytes <= ROOM[v.target] * 1024, (v, v.code.shared_bytes)
        assert not re.search(r"\b(atom|red)\.", v.code.ptx), v
        assert not loaded_over(v.code.ttgir), v


def loaded_over(ttgir: str) -> list[str]:
    """Tiles in shared memory over which another is loaded while a product may still read them, on Hopper.

    Triton lets a product run on into the next turn of a loop. The tiles that it reads then need a place more
    than there are tiles ahead, and one that other instructions read, too, has none.
    """
    places: dict[str, int] = {}  # of tiles in an allocation
    allocation: dict[str, str] = {}  # by the name of a view
    ahead: Counter[str] = Counter()  # tiles that are loaded before the loop
    loops: list[tuple[int, Counter[str], set[str]]] = []  # indent, ahead of it, what its products read
    found = []
    for line in ttgir.splitlines():
        name, _, said = line.strip().partition(" = ")
        indent = len(line) - len(line.lstrip())
        if loops and line.lstrip().startswith("}") and indent <= loops[-1][0]:
            loops.pop()
        elif "= scf.for" in line:
            loops.append((indent, ahead.copy(), set()))
        elif made := re.match(r"ttg.local_alloc : .*?memdesc<(\d+)x\d+x\d+x", said):
            places[name] = int(made[1])
        elif made := re.match(r"ttg.memdesc_\w+ (%\w+)", said):
            allocation[name] = allocation.get(made[1], made[1])
        elif made := re.search(r"copy_global_to_local (?:%\w+\[.*?\]|%\S+,) (%\w+)", line):
            ahead[allocation.get(made[1], made[1])] += 1
        elif made := re.match(r"ttng.warp_group_dot (%\w+), (%\w+),.*isAsync = true", said):
            if loops:
                loops[-1][2].update(allocation.get(each, each) for each in made.groups())
        elif loops and re.match(r"ttng.warp_group_dot_wait .*pendings = [1-9]", said):
            found += [each for each in loops[-1][2] if each in places and places[each] <= loops[-1][1][each]]
    return found


def offsets(ttir: str) -> list[tuple[str, str]]:
    """(argument, type of the offset) of every address that is computed from an argument at once."""
    splats = dict(re.findall(r"(%\w+) = tt\.splat %([a-z]\w*) :", ttir))
    blocks = re.findall(r"tt\.addptr (%\w+), %\w+ : \S+>>, tensor<\S*?(i\d+)>", ttir)
    single = re.findall(r"tt\.addptr %([a-z]\w*), %\w+ : !tt\.ptr<\w+>, (i\d+)", ttir)
    return [(splats[base], bits) for base, bits in blocks if base in splats] + single


def assert_far(variants: list[Variant], *near: str) -> None:
    """Addresses are counted in 64 bits, but those of arguments that have few numbers."""
    for v in variants:
        found = offsets(v.code.ttir)
        assert found and all(bits == "i64" or name in near for name, bits in found), (v, found)


def assert_float32(variants: list[Variant]) -> None:
    """Numbers in half precision are only made wider and narrower."""
    for v in variants:
        half = re.findall(r"arith\.\w+f .*xb?f16>", v.code.ttir)
        assert not [line for line in half if not re.match(r"arith\.(extf|truncf) ", line)], v
