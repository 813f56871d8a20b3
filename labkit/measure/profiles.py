"""Profile a call on a GPU: the kernels that it ran, and how long each one took."""

import json
import os
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from labkit import gpu

WARMUPS = 3
"""So often a call runs before it is profiled: the first time it may compile, or choose among kernels."""
Profile = list[tuple[str, float]]
"""What one call ran on the device, in order: the name of each kernel, copy or fill, shortened, and its us."""
_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_PLAIN = re.compile(r"(void|const|char|bool|int|long|unsigned|float|double|array)(\s|$)")
"""Template arguments that make a name longer and hardly tell two kernels apart."""


def profile(call: Callable[[], Any]) -> Profile:
    """Run ``call`` on the GPU and record what it launches.

    After its warm-up ``call`` is profiled three times, each time while this process holds the GPU's lock. The
    profile that was disturbed least is returned.
    """
    for _ in range(WARMUPS):
        call()
    return _least_disturbed([from_trace(_trace(call)) for _ in range(3)])


def _least_disturbed(profiles: Sequence[Profile]) -> Profile:
    """The profile with the least time, among those with the most frequent list of kernels.

    What disturbs the device makes kernels take longer. If all lists differ, the longest one counts.
    """
    seen = Counter(tuple(name for name, _ in made) for made in profiles)
    usual = max(seen, key=lambda names: (seen[names], len(names)))
    alike = [made for made in profiles if tuple(name for name, _ in made) == usual]
    return min(alike, key=lambda made: sum(us for _, us in made))


def _trace(call: Callable[[], Any]) -> list[dict[str, Any]]:
    """The ``traceEvents`` of the chrome trace of one call, which runs twice."""
    with (
        gpu.locked(),
        tempfile.TemporaryDirectory() as folder,
        _without_profiler_messages(),
        _cupti_detached_afterwards(),
    ):
        path = str(Path(folder, "trace.json"))
        with torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA],
            # the first recorded step of a process misses kernels, or has them late
            schedule=torch.profiler.schedule(wait=0, warmup=1, active=1),
            on_trace_ready=lambda profiler: profiler.export_chrome_trace(path),
            acc_events=True,
        ) as profiler:
            for _ in range(2):
                gpu.synchronize()
                call()
                gpu.synchronize()
                profiler.step()
        events: list[dict[str, Any]] = json.loads(Path(path).read_text())["traceEvents"]
    return events


@contextmanager
def _cupti_detached_afterwards() -> Iterator[None]:
    """Detach CUPTI, by which the profiler sees every launch, from the process afterwards.

    By default it stays, and from then on a launch costs the host half as much again (PyTorch issue 144455).
    torch.compile forbids to detach it when it makes graphs, for the sake of CUDA before 12.6.
    """
    os.environ["TEARDOWN_CUPTI"] = "1"
    os.environ.pop("DISABLE_CUPTI_LAZY_REINIT", None)
    yield
    for _ in range(20):  # it is detached during a call to CUDA, a moment after the profiler asked for it
        gpu.synchronize()
        time.sleep(0.005)


@contextmanager
def _without_profiler_messages() -> Iterator[None]:
    """Drop what torch 2.13 writes to stderr when a profile starts and stops; pass on everything else."""
    sys.stderr.flush()
    saved = os.dup(2)
    with tempfile.TemporaryFile("w+") as written:
        os.dup2(written.fileno(), 2)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(saved, 2)
            os.close(saved)
            written.seek(0)
            sys.stderr.writelines(line for line in written if not line.startswith("USDT:"))


def from_trace(events: Iterable[dict[str, Any]]) -> Profile:
    """A profile from the ``traceEvents`` of a chrome trace that torch.profiler exported."""
    on_device = [event for event in events if event.get("ph") == "X" and event["cat"] in _ON_DEVICE]
    in_order = sorted(on_device, key=lambda event: event["ts"])
    return [(shorten(event["name"]), event["dur"]) for event in in_order]


# ---- names of kernels --------------------------------------------------------------------------------------


def shorten(name: str) -> str:
    """A kernel's name without namespaces, signature and plain types.

    Of each template argument the innermost functor is kept. In the names of PyTorch's elementwise kernels it
    tells a product from a sum.
    """
    text = re.sub(r"^(void|std::enable_if<[^>]*>::type) ", "", _without_brackets(name))
    head, _, arguments = text.partition("<")
    arguments = _replaced(r"([\w:]+)<([^<>]*)>", _functor_or_name, arguments.rpartition(">")[0])
    words = [argument.strip(" *").rpartition("::")[2] for argument in arguments.split(",")]
    kept = [word for word in words if word and not _PLAIN.match(word)]
    *namespaces, short = head.split("::")
    if short == "kernel":  # tells nothing without the namespace: gemvx::kernel
        short = f"{namespaces[-1]}::kernel"
    return short + (f"<{', '.join(kept)}>" if kept else "")


def _functor_or_name(template: re.Match[str]) -> str:
    """The last functor among the arguments of a template, or the template's own name."""
    return [template[1], *re.findall(r"\w*[Ff]unctor\w*", template[2])][-1]


def _without_brackets(name: str) -> str:
    """Drop parameter lists, lambdas and anonymous namespaces: everything in () and {}."""
    text = name.replace("(anonymous namespace)::", "")
    text = _replaced(r"\([^(){}]*\)|\{[^(){}]*\}", "", text)
    return re.sub(r"(::(operator|const)?\s*(const)?)+(?=\s*(>|,|$))", "", text).strip()


def _replaced(pattern: str, by: str | Callable[[re.Match[str]], str], text: str) -> str:
    """The text in which a pattern is replaced until it occurs no more: brackets within brackets."""
    while re.search(pattern, text):
        text = re.sub(pattern, by, text)
    return text
