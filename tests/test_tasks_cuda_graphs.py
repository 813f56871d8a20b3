"""Lesson 5's exercises: every plausible wrong answer is refused for its own reason, the solutions pass."""

import re

import pytest
import torch
from judging import (
    INTERPRETED,
    Answers,
    RefusalTests,
    assert_refused,
    cases,
    code_lines,
)

from labkit import exercises
from labkit.graph_api import Machine
from labkit.tasks import (
    Wrong,
    graph_capture,
    graph_capture_hints,
    graph_museum,
    graph_museum_hints,
    graph_replay,
    graph_replay_hints,
    graph_safe_hints,
)

pytestmark = pytest.mark.usefixtures("cache")
ANSWERS = Answers("05_cuda_graphs")
TASKS = ANSWERS.tasks
SCAFFOLDS = {name: ANSWERS.scaffold(name) for name in TASKS}
"""The cells as the lesson gives them."""
solved, changed = ANSWERS.solved, ANSWERS.changed


# --- the capture

STATIC = "    static = x.clone()\n"
BEFORE = "    side.wait_stream(cuda.current_stream())\n"
ON_SIDE = "    with cuda.stream(side):\n        call(static)\n"
AFTER = "    cuda.current_stream().wait_stream(side)\n"
WARM_UP = BEFORE + ON_SIDE + AFTER
GRAPH = "    graph = cuda.CUDAGraph()\n"
CAPTURE = "    with cuda.graph(graph):\n        y = call(static)  # computes nothing yet\n"
COPY, REPLAY = "        static.copy_(new)\n", "        graph.replay()\n"
RETURN = "        return y.clone()  # the next replay writes into y\n"
ANEW = ("graph = cuda.CUDAGraph()", "with cuda.graph(graph):", "    y = call(new)")


def capture(*pairs):
    return changed("capture", *pairs)


def lines(indent, texts):
    return "".join(f"{'    ' * indent}{text}\n" for text in texts)


def body(*texts):
    """The solution with other lines in graphed, from the warm-up to the capture."""
    return capture((STATIC, ""), (WARM_UP, lines(1, texts)), (GRAPH + CAPTURE, ""))


def warmed(*texts):
    """The solution with another warm-up."""
    return capture((WARM_UP, lines(1, texts)))


def on_side(*texts):
    """The solution with other lines on the side stream."""
    return capture((ON_SIDE, "    with cuda.stream(side):\n" + lines(2, texts)))


def in_graph(*texts):
    """The solution with other lines in the capture."""
    return capture((CAPTURE, "    with cuda.graph(graph):\n" + lines(2, texts)))


def replay(*texts):
    """The solution with another body of replay."""
    return capture((COPY + REPLAY + RETURN, lines(2, texts)))


def returned(*texts):
    """The solution with other lines in place of replay's last one."""
    return capture((RETURN, lines(2, texts)))


FIRST_Y = capture(
    (CAPTURE, CAPTURE.replace("y = call", "call")),
    (ON_SIDE, ON_SIDE.replace("call", "y = call")),
)
"""The solution with a warm-up's result for y."""

WRONG_CAPTURES = {
    "no warm-up": (warmed(), "no-warm-up"),
    "warm-up too late": (capture((ON_SIDE, ""), (CAPTURE, CAPTURE + ON_SIDE)), "no-warm-up"),
    "no warm-up, and it is caught": (
        warmed().replace(
            "        y = call(static)",
            "        try:\n            y = call(static)\n        except RuntimeError:\n            y = x",
        ),
        "no-warm-up",
    ),
    "waits in the capture": (in_graph("y = call(static)", "cuda.synchronize()"), "not-in-capture"),
    "waits for the side": (in_graph("y = call(static)", "side.synchronize()"), "not-in-capture"),
    "reads in the capture": (in_graph("y = call(static)", "print(y.sum().item())"), "not-in-capture"),
    "replays in the capture": (in_graph("y = call(static)", "graph.replay()"), "not-in-capture"),
    "captures in the capture": (
        in_graph("y = call(static)", "cuda.CUDAGraph().capture_begin()"),
        "not-in-capture",
    ),
    "on the current stream": (warmed("call(static)"), "current-stream"),
    "on the current stream, by name": (
        capture(("with cuda.stream(side)", "with cuda.stream(cuda.current_stream())")),
        "current-stream",
    ),
    "on no stream": (capture(("with cuda.stream(side)", "with cuda.stream(None)")), "current-stream"),
    "several on the current stream": (
        warmed("for _ in range(3):", "    call(static)", "cuda.synchronize()"),
        "current-stream",
    ),
    "no wait before": (capture((BEFORE, "")), "no-wait-before"),
    "no waits": (capture((BEFORE, ""), (AFTER, "")), "no-wait-before"),
    "waits the wrong way round": (capture((WARM_UP, AFTER + ON_SIDE + BEFORE)), "no-wait-before"),
    "waits, then copies": (capture((STATIC, ""), (BEFORE, BEFORE + STATIC)), "no-wait-before"),
    "all on the side": (
        capture(
            (STATIC, ""), (BEFORE + ON_SIDE, ON_SIDE.replace("call", "static = x.clone()\n        call"))
        ),
        "no-wait-before",
    ),
    "no wait after": (capture((AFTER, "")), "no-wait-after"),
    "waits too early": (capture((WARM_UP, BEFORE + AFTER + ON_SIDE)), "no-wait-after"),
    "replays on the side": (
        replay(
            "static.copy_(new)",
            "side.wait_stream(cuda.current_stream())",
            "with cuda.stream(side):",
            "    graph.replay()",
            "    return y.clone()",
        ),
        "no-wait-after",
    ),
    "replays on the side, without any wait": (
        replay("static.copy_(new)", "with cuda.stream(side):", "    graph.replay()", "    return y.clone()"),
        "no-wait-before",
    ),
    "nothing in the graph": (
        capture((CAPTURE, "    with cuda.graph(graph):\n        pass\n    y = call(static)\n")),
        "empty-graph",
    ),
    "replaced": (
        replay("nonlocal static", "static = new", "graph.replay()", "return y.clone()"),
        "stale-input",
    ),
    "x replaced": (
        capture((STATIC, ""), ("call(static)", "call(x)"), (COPY, lines(2, ["nonlocal x", "x = new"]))),
        "stale-input",
    ),
    "not copied": (capture((COPY, "")), "stale-input"),
    "a copy of its own": (capture((COPY, "        static = new.clone()\n")), "stale-input"),
    "copied into a copy": (capture((COPY, "        static.clone().copy_(new)\n")), "stale-input"),
    "its memory replaced": (capture((COPY, "        static.data = new\n")), "stale-input"),
    "set to another memory": (capture((COPY, "        static.set_(new)\n")), "stale-input"),
    "x captured": (in_graph("y = call(x)"), "stale-input"),
    "only the capture repaired": (
        replay("nonlocal x", "x = new", "graph.replay()", "return y"),
        "stale-input",
    ),
    "x written over": (capture((STATIC, "    static = x\n")), "writes-x"),
    "x detached and written over": (capture((STATIC, "    static = x.detach()\n")), "writes-x"),
    "x contiguous and written over": (capture((STATIC, "    static = x.contiguous()\n")), "writes-x"),
    "x filled": (capture((WARM_UP, WARM_UP + "    x.zero_()\n")), "writes-x"),
    "new written over": (capture((COPY, COPY + "        new.zero_()\n")), "writes-new"),
    "copied the other way": (capture((COPY, "        new.copy_(static)\n")), "writes-new"),
    "copied late": (capture((COPY + REPLAY, REPLAY + COPY)), "copied-late"),
    "copied last": (
        replay("graph.replay()", "result = y.clone()", "static.copy_(new)", "return result"),
        "copied-late",
    ),
    "the clone captured": (in_graph("static = x.clone()", "y = call(static)"), "copy-captured"),
    "the copy captured": (in_graph("static.copy_(x)", "y = call(static)"), "copy-captured"),
    "a sum captured": (in_graph("static = x + 0", "y = call(static)"), "copy-captured"),
    "not replayed": (capture((REPLAY, "")), "not-replayed"),
    "replay not called": (capture((REPLAY, "        graph.replay\n")), "not-replayed"),
    "replayed when captured": (
        capture((REPLAY, ""), (CAPTURE, f"{CAPTURE}    graph.replay()\n")),
        "not-replayed",
    ),
    "replayed twice": (capture((REPLAY, REPLAY + REPLAY)), "replayed-twice"),
    "replayed before and after the copy": (capture((COPY, REPLAY + COPY)), "replayed-twice"),
    "captured anew": (
        capture((GRAPH + CAPTURE, ""), (COPY + REPLAY, COPY + lines(2, ANEW) + REPLAY)),
        "captured-anew",
    ),
    "captured again": (replay(*ANEW, "graph.replay()", "return y.clone()"), "captured-anew"),
    "captured again, and handed out": (replay(*ANEW, "graph.replay()", "return y"), "captured-anew"),
    "called in replay": (replay("return call(new)"), "calls-again"),
    "called beside the replay": (returned("return call(static)"), "calls-again"),
    "call itself": (capture(("    return replay", "    return call")), "calls-again"),
    "no graph": (capture((GRAPH + CAPTURE, ""), (REPLAY, "        y = call(static)\n")), "calls-again"),
    "the result first": (
        replay("result = y.clone()", "static.copy_(new)", "graph.replay()", "return result"),
        "early-result",
    ),
    "the result between": (
        replay("static.copy_(new)", "result = y.clone()", "graph.replay()", "return result"),
        "early-result",
    ),
    "a warm-up's result": (FIRST_Y, "warm-up-result"),
    "a warm-up's result itself": (FIRST_Y.replace("return y.clone()", "return y"), "warm-up-result"),
    "a copy of a warm-up's result": (
        on_side("first = call(static).clone()").replace("return y.clone()", "return first.clone()"),
        "warm-up-result",
    ),
    "the graph's output": (returned("return y"), "own-output"),
    "a view of the graph's output": (returned("return y.detach()"), "own-output"),
    "another view": (returned("return y.view(y.shape)"), "own-output"),
    "one copy for all": (
        capture((CAPTURE, CAPTURE + "    result = torch.empty_like(y)\n"), ("y.clone()", "result.copy_(y)")),
        "one-result",
    ),
    "a clone in the graph": (
        in_graph("y = call(static).clone()").replace("return y.clone()", "return y"),
        "one-result",
    ),
    "nothing returned": (capture(("    return replay", "")), "nothing-returned"),
    "replay called": (capture(("    return replay", "    return replay(x)")), "nothing-returned"),
    "replay returns nothing": (returned(), "not-a-tensor"),
    "replay returns two": (returned("return new, y.clone()"), "not-a-tensor"),
    "twice the result": (returned("return 2 * y"), "wrong-values"),
    "a row": (returned("return y[0].clone()"), "wrong-values"),
    "copied in part": (capture(("static.copy_(new)", "static[:1].copy_(new[:1])")), "wrong-values"),
    "converted": (returned("return y.double()"), "wrong-values"),
}
CAPTURE_ERRORS = {
    "torch.cuda": (capture(("side = cuda.Stream", "side = torch.cuda.Stream")), "another-cuda"),
    "torch.cuda's stream": (capture(("wait_stream(cuda.", "wait_stream(torch.cuda.")), "another-cuda"),
    "make_graphed_callables": (
        capture((STATIC, "    return cuda.make_graphed_callables(call, (x,))\n")),
        "unknown-attribute",
    ),
    "waits for": (capture((BEFORE, "    side.wait_for(cuda.current_stream())\n")), "unknown-attribute"),
    "launched": (capture((REPLAY, "        graph.launch()\n")), "unknown-attribute"),
    "not captured": (capture((CAPTURE, "    y = static\n")), "nothing-captured"),
    "captured twice": (capture((CAPTURE, CAPTURE + CAPTURE)), "captured-twice"),
    "captured on the current stream": (
        capture(("cuda.graph(graph)", "cuda.graph(graph, stream=cuda.current_stream())")),
        "default-stream",
    ),
    "with graph": (capture(("with cuda.graph(graph)", "with graph")), "not-a-context"),
    "inference": (
        capture((STATIC, "    with torch.inference_mode():\n        static = x.clone()\n")),
        "inference",
    ),
    "replay without new": (capture(("replay(new)", "replay()"), ("copy_(new)", "copy_(x)")), "arguments"),
    "no graph given": (capture(("cuda.graph(graph)", "cuda.graph()")), "arguments"),
    "misspelt": (capture(("static.copy_", "statik.copy_")), "unknown-name"),
    "without nonlocal": (capture((COPY, COPY + "        static = new\n")), "unset"),
    "anything": (capture((COPY, "        1 / 0\n")), "other-error"),
}
OTHER_CAPTURES = {
    "three warm-ups": on_side("for _ in range(3):", "    call(static)"),
    "on the current stream too": capture((AFTER, AFTER + "    call(static)\n")),
    "an empty tensor, filled": capture((STATIC, "    static = torch.empty_like(x).copy_(x)\n")),
    "an empty tensor, filled later": capture(
        (STATIC, "    static = torch.empty_like(x)\n    static.copy_(x)\n")
    ),
    "zeros": capture((STATIC, "    static = torch.zeros_like(x)\n")),
    "warm-up on x": on_side("call(x)"),
    "warm-up before the copy": on_side("call(x)").replace(STATIC, "").replace(GRAPH, STATIC + GRAPH),
    "captured on the side": capture(("cuda.graph(graph)", "cuda.graph(graph, stream=side)")),
    "with a pool": capture(("cuda.graph(graph)", "cuda.graph(graph, pool=cuda.graph_pool_handle())")),
    "a new tensor": returned("result = torch.empty_like(y)", "result.copy_(y)", "return result"),
    "a clone by arithmetic": returned("return y + 0"),
    "no_grad around": capture(
        (ON_SIDE, "    with torch.no_grad(), cuda.stream(side):\n        call(static)\n"),
        ("with cuda.graph(graph):", "with torch.no_grad(), cuda.graph(graph):"),
        (COPY, "        with torch.no_grad():\n            static.copy_(new)\n"),
    ),
    "no_grad above": "@torch.no_grad()\n" + capture(),
    "inference_mode around the calls": capture(
        (ON_SIDE, "    with torch.inference_mode(), cuda.stream(side):\n        call(static)\n"),
        ("with cuda.graph(graph):", "with torch.inference_mode(), cuda.graph(graph):"),
    ),
    "synchronized": capture((BEFORE, "    cuda.synchronize()\n"), (AFTER, "    cuda.synchronize()\n")),
    "the side synchronized": capture((AFTER, "    side.synchronize()\n")),
    "the current stream synchronized": capture((BEFORE, "    cuda.current_stream().synchronize()\n")),
    "by events": capture(
        (BEFORE, "    side.wait_event(cuda.current_stream().record_event())\n"),
        (AFTER, "    done = cuda.Event()\n    done.record(side)\n    done.wait()\n"),
    ),
    "an event that the host waits for": capture((AFTER, "    side.record_event().synchronize()\n")),
    "the stream as a context": capture(("with cuda.stream(side)", "with side")),
    "begun and ended": body(
        "static = x.clone()",
        "side = cuda.Stream()",
        "side.wait_stream(cuda.current_stream())",
        "graph = cuda.CUDAGraph()",
        "with cuda.stream(side):",
        "    call(static)",
        "    graph.capture_begin()",
        "    y = call(static)",
        "    graph.capture_end()",
        "cuda.current_stream().wait_stream(side)",
    ),
    "all on the side": capture(
        (STATIC, ""), (ON_SIDE, ON_SIDE.replace("call", "static = x.clone()\n        call"))
    ),
    "waits for the default stream": capture((BEFORE, "    side.wait_stream(cuda.default_stream())\n")),
    "captured at the first replay": capture(
        (GRAPH + CAPTURE, "    graph = y = None\n"),
        (
            COPY,
            lines(2, ["nonlocal graph, y", "static.copy_(new)", "if graph is None:"])
            + lines(3, (text.replace("new", "static") for text in ANEW)),
        ),
    ),
    "replayed on the side, with waits": replay(
        "side.wait_stream(cuda.current_stream())",
        "with cuda.stream(side):",
        "    static.copy_(new)",
        "    graph.replay()",
        "    result = y.clone()",
        "cuda.current_stream().wait_stream(side)",
        "return result",
    ),
    "more in the graph": in_graph("y = call(static).clone()", "y.add_(1).sub_(1)"),
}

# --- the replay

BUSY, SUM = "busy = sum(length for _, length in kernels)", "return busy + gap_us * len(kernels[1:])"


def predicted(expression):
    return changed("replay", (SUM, f"return {expression}"))


SPAN = "kernels[-1][0] + kernels[-1][1] - kernels[0][0]"
WAITS = "(b[0] - a[0] - a[1] for a, b in zip(kernels, kernels[1:]))"
WRONG_REPLAYS = {
    "the scaffold": (SCAFFOLDS["replay"], "eager-span"),
    "the scaffold, by numbers": (predicted(SPAN), "eager-span"),
    "n gaps": (predicted("busy + gap_us * len(kernels)"), "n-gaps"),
    "n - 2 gaps": (predicted("busy + gap_us * max(0, len(kernels) - 2)"), "gap-too-few"),
    "one gap": (predicted("busy + gap_us"), "one-gap"),
    "no gaps": (predicted("busy"), "no-gaps"),
    "gaps beside gaps": (predicted(f"{SPAN} + gap_us * (len(kernels) - 1)"), "eager-gaps"),
    "n gaps beside gaps": (predicted(f"{SPAN} + gap_us * len(kernels)"), "eager-gaps"),
    "the larger gap": (predicted(f"busy + sum(max(gap_us, wait) for wait in {WAITS})"), "larger-gap"),
    "the smaller gap": (predicted(f"busy + sum(min(gap_us, wait) for wait in {WAITS})"), "smaller-gap"),
    "starts": (changed("replay", ("length for _, length", "start for start, _")), "starts"),
    "starts alone": (predicted("sum(start for start, _ in kernels)"), "starts"),
    "ends": (changed("replay", ("length for _, length", "a + b for a, b")), "ends"),
    "ends alone": (predicted("sum(map(sum, kernels))"), "ends"),
    "the longest": (predicted("max(length for _, length in kernels)"), "longest"),
    "the longest, and gaps": (
        predicted("max(length for _, length in kernels) + gap_us * (len(kernels) - 1)"),
        "longest",
    ),
    "the last end": (predicted("sum(kernels[-1])"), "from-zero"),
    "what it saves": (predicted(f"{SPAN} - busy - gap_us * (len(kernels) - 1)"), "saved"),
    "how many times": (predicted(f"({SPAN}) / (busy + gap_us * (len(kernels) - 1))"), "saved"),
    "constant": (predicted("10"), "constant"),
    "two numbers": (predicted("busy, gap_us"), "several-numbers"),
    "nothing": (predicted("None"), "unfinished"),
    "a text": (predicted("str(busy)"), "not-a-number"),
    "yes or no": (predicted("busy > gap_us"), "not-a-number"),
    "infinite": (predicted("float('inf')"), "not-a-number"),
    "-1 gaps": (predicted("busy + gap_us * (len(kernels) - 1)"), "empty"),
    "a first kernel": (
        predicted("kernels[0][1] + sum(gap_us + length for _, length in kernels[1:])"),
        "empty",
    ),
    "none for none": (
        predicted("busy + gap_us * len(kernels[1:]) if kernels else (0, 0)"),
        "several-numbers",
    ),
    "nothing for none": (predicted("busy + gap_us * len(kernels[1:]) if kernels else None"), "empty"),
    "half": (predicted("busy / 2 + gap_us * len(kernels[1:])"), "wrong-values"),
}
REPLAY_ERRORS = {
    "pairs added": (changed("replay", (BUSY, "busy = sum(kernels)")), "pairs"),
    "pairs for lengths": (changed("replay", ("length for _, length", "length for length")), "pairs"),
    "one name": (changed("replay", ("for _, length in kernels", "for _, length in kernels[0]")), "unpacking"),
    "three names": (changed("replay", ("for _, length in", "for _, length, _ in")), "unpacking"),
    "one too far": (
        predicted("sum(kernels[i + 1][0] - kernels[i][0] for i in range(len(kernels)))"),
        "index",
    ),
    "one argument": (changed("replay", ("(kernels, gap_us)", "(kernels)")), "arguments"),
    "misspelt": (predicted("busi"), "unknown-name"),
    "too late": (changed("replay", (BUSY, "busy = busy + sum(length for _, length in kernels)")), "unset"),
    "anything": (predicted("busy / 0"), "other-error"),
}
OTHER_REPLAYS = {
    "a number of NumPy's": changed(
        "replay", (SUM, "import numpy\n\n    return numpy.float32(busy + gap_us * len(kernels[1:]))")
    ),
    "never below zero": predicted("busy + gap_us * max(0, len(kernels) - 1)"),
    "from the first on": predicted(
        "sum(gap_us + length for _, length in kernels) - gap_us if kernels else 0"
    ),
    "in a loop": changed(
        "replay",
        (SUM, "for before in range(1, len(kernels)):\n        busy += gap_us\n    return busy"),
    ),
}

# --- the kernel

LOADED = "tl.load(x + at, inside)"
FACTOR = "tl.load(factor)"
GIVEN = "(x, y, factor, x.numel()"
EMPTY = "torch.empty_like(x)"
LAUNCH = "scale_kernel[(triton.cdiv(x.numel(), 1024),)]"


def safe(*pairs):
    return changed("safe", *pairs)


def handed_over(what):
    """The scaffold's kernel, which multiplies by a number, with another number."""
    return safe((FACTOR, "factor"), (GIVEN, f"(x, y, {what}, x.numel()"))


ADDRESS = "ctypes.c_float.from_address(factor.data_ptr()).value"
WRONG_SAFES = {
    "the scaffold": (SCAFFOLDS["safe"], "host-read"),
    "float": (handed_over("float(factor)"), "host-read"),
    "numpy": (handed_over("float(factor.numpy())"), "host-read"),
    "an array": (handed_over("__import__('numpy').asarray(factor).item()"), "host-read"),
    "item of a copy": (handed_over("factor.cpu().item()"), "host-read"),
    "a list": (handed_over("factor.reshape(1).tolist()[0]"), "host-read"),
    "a copy on the host": (safe((GIVEN, "(x, y, torch.tensor(factor.item()), x.numel()")), "host-read"),
    "to the CPU": (safe((GIVEN, "(x, y, factor.to('cpu'), x.numel()")), "host-read"),
    "cpu()": (safe((GIVEN, "(x, y, factor.cpu(), x.numel()")), "host-read"),
    "a condition": (
        safe(("    y = torch", "    if factor == 0:\n        return x\n    y = torch")),
        "host-read",
    ),
    "a look": (safe(("    y = torch", "    str(factor)\n    y = torch")), "host-read"),
    "read behind the back": ("import ctypes\n\n" + handed_over(ADDRESS), "stale"),
    "offsets": (safe((FACTOR, "tl.load(factor + at, inside)")), "block-of-factors"),
    "offsets, no mask": (safe((FACTOR, "tl.load(factor + at)")), "block-of-factors"),
    "one a program": (safe((FACTOR, "tl.load(factor + tl.program_id(0))")), "block-of-factors"),
    "offsets in the block": (safe((FACTOR, "tl.load(factor + tl.arange(0, BLOCK))")), "block-of-factors"),
    "the address": (safe((FACTOR, "factor.to(tl.int64)")), "address"),
    "float of the address": (safe((FACTOR, "float(factor)")), "address"),
    "multiplied before": (
        safe((f" * {FACTOR}", ""), (GIVEN, "(x * factor, y, factor, x.numel()")),
        "multiplied-before",
    ),
    "multiplied after": (safe((f" * {FACTOR}", ""), ("return y", "return y * factor")), "multiplied-before"),
    "cloned": (safe((GIVEN, "(x, y, factor.clone(), x.numel()")), "factor-copied"),
    "converted": (safe((GIVEN, "(x, y, factor.double(), x.numel()")), "factor-copied"),
    "converted where it's needed": (safe((GIVEN, "(x, y, factor.float(), x.numel()")), "factor-copied"),
    "zeroed": (safe((EMPTY, "torch.zeros_like(x)")), "several-launches"),
    "as many factors": (
        safe((FACTOR, "tl.load(factor + at, inside)"), (GIVEN, "(x, y, factor.repeat(x.numel()), x.numel()")),
        "several-launches",
    ),
    "PyTorch": (
        "def scaled(x, factor):\n    return x * factor\n\n\ntasks.check('safe', scaled)",
        "no-kernel",
    ),
    "no factor": (safe((f" * {FACTOR}", "")), "no-factor"),
    "added": (safe((f" * {FACTOR}", f" + {FACTOR}")), "added"),
    "as x": (safe((FACTOR, f"{FACTOR}.to(x.dtype.element_ty)")), "low-precision"),
    "in float16": (safe((FACTOR, f"{FACTOR}.to(tl.float16).to(tl.float32)")), "low-precision"),
    "into x": (safe((EMPTY, "x")), "writes-input"),
    "nothing returned": (safe(("    return y", "")), "not-a-tensor"),
    "float32 out": (safe((EMPTY, "x.new_empty(x.shape, dtype=torch.float32)")), "shape-or-dtype"),
    "flat": (safe((EMPTY, "x.new_empty(x.numel())")), "shape-or-dtype"),
    "one output for all calls": (
        "kept = {}\n" + safe((EMPTY, f"kept.setdefault((x.shape, x.dtype), {EMPTY})")),
        "reused-output",
    ),
    "store unmasked": (safe((f"{FACTOR}, inside)", f"{FACTOR})")), "unmasked-store"),
    "load unmasked": (safe((LOADED, "tl.load(x + at)")), "reads-outside"),
    "the first block": (safe(("tl.program_id(0) * BLOCK", "0 * tl.program_id(0)")), "stored-twice"),
    "small grid": (safe((LAUNCH, "scale_kernel[(max(1, x.numel() // 1024),)]")), "not-all-written"),
    "strides ignored": (safe(("    x = x.contiguous()\n", "")), "strides"),
    "not compiled": (safe(("    inside =", "    N + len(type(N).__mro__)\n    inside =")), "not-compiled"),
    "squared": (safe((FACTOR, f"{FACTOR} * {FACTOR}")), "wrong-values"),
    "a whole number": (safe((FACTOR, f"{FACTOR}.to(tl.int32)")), "wrong-values"),
    "the first element only": (safe((FACTOR, "tl.load(factor + at, at == 0, other=1.0)")), "wrong-values"),
}
SAFE_ERRORS = {
    "a number loaded": (safe((GIVEN, "(x, y, factor.item(), x.numel()")), "load-of-a-number"),
    "not loaded": (safe((FACTOR, "factor")), "pointer-arithmetic"),
    "item in the kernel": (safe((FACTOR, "factor.item()")), "pointer-arithmetic"),
    "a mask": (safe((FACTOR, "tl.load(factor, inside)")), "mask-for-one"),
    "loaded by Python": (safe((GIVEN, "(x, y, tl.load(factor), x.numel()")), "outside-a-kernel"),
    "the first": (safe((GIVEN, "(x, y, factor[0], x.numel()")), "no-dimension"),
    "torch": (safe((FACTOR, "torch.sum(factor)")), "unknown-function"),
    "invented": (safe((FACTOR, "tl.read(factor)")), "unknown-function"),
    "no grid": (safe((LAUNCH, "scale_kernel")), "no-grid"),
    "no factor handed over": (safe((GIVEN, "(x, y, x.numel()")), "arguments"),
    "brackets": (safe((FACTOR, "factor[0]")), "subscript"),
    "misspelt": (safe((FACTOR, "tl.load(faktor)")), "unknown-name"),
    "too late": (safe(("    inside = at", "    inside = inside & at")), "unset"),
    "anything": (safe((FACTOR, "(1 / 0)")), "other-error"),
}
OTHER_SAFES = {
    "loaded before": safe(("    inside =", "    f = tl.load(factor)\n    inside ="), (f"* {FACTOR}", "* f")),
    "in float32": safe((LOADED, f"{LOADED}.to(tl.float32)"), (FACTOR, f"{FACTOR}.to(tl.float32)")),
    "other blocks": safe(("1024", "256")),
    "a block of one": safe((FACTOR, "tl.load(factor + tl.arange(0, 1))")),
    "the same address for all": safe((FACTOR, "tl.load(factor + 0 * at, inside)")),
    "flattened": safe((GIVEN, "(x, y, factor.view(-1), x.numel()")),
    "a grid by a function": safe((LAUNCH, "scale_kernel[lambda by: (triton.cdiv(x.numel(), by['BLOCK']),)]")),
    "by names": safe(("(x, y, factor, x.numel(), BLOCK", "(x, y, factor=factor, N=x.numel(), BLOCK")),
}

# --- the museum

RIGHT = 'diagnosis = {1: "c", 2: "e", 3: "b", 4: "a", 5: "d"}'


def diagnosed(letters):
    """A diagnosis of five letters; a dot stands for none."""
    given = ", ".join(f'{at}: "{letter.strip(".")}"' for at, letter in enumerate(letters, 1))
    return changed("museum", (RIGHT, f"diagnosis = {{{given}}}"))


def diagnosis(expression):
    return changed("museum", (RIGHT, f"diagnosis = {expression}"))


WRONG_MUSEUMS = {
    "none yet": (diagnosed("....."), "unfinished"),
    "a list": (diagnosis('["c", "e", "b", "a", "d"]'), "not-a-dict"),
    "a text": (diagnosis('"cebad"'), "not-a-dict"),
    "a sixth": (diagnosis('{1: "c", 2: "e", 3: "b", 4: "a", 5: "d", 6: "f"}'), "unknown-number"),
    "from zero": (diagnosis('dict(enumerate("cebad"))'), "unknown-number"),
    "numbers as texts": (diagnosis('dict(zip("12345", "cebad"))'), "unknown-number"),
    "four": (diagnosis('{1: "c", 2: "e", 3: "b", 4: "a"}'), "missing-number"),
    "an empty dict": (diagnosis("{}"), "missing-number"),
    "None": (diagnosis('{1: None, 2: "e", 3: "b", 4: "a", 5: "d"}'), "not-a-letter"),
    "a number": (diagnosis('{1: 3, 2: "e", 3: "b", 4: "a", 5: "d"}'), "not-a-letter"),
    "a list of letters": (diagnosis('{1: ["c"], 2: "e", 3: "b", 4: "a", 5: "d"}'), "not-a-letter"),
    "h": (diagnosed("hebad"), "no-such-letter"),
    "two letters": (diagnosis('{1: "c or e", 2: "e", 3: "b", 4: "a", 5: "d"}'), "no-such-letter"),
    "a time in 1": (diagnosed("aebad"), "not-a-time"),
    "a time in 2": (diagnosed("cfbad"), "not-a-time"),
    "a value in 3": (diagnosed("cecad"), "not-a-value"),
    "a value in 5": (diagnosed("cebae"), "not-a-value"),
    "only 2": (diagnosed(".e..."), "exhibit-1"),
    "e in 1": (diagnosed("eebad"), "exhibit-1-e"),
    "1 and 2 swapped": (diagnosed("ecbad"), "exhibit-1-e"),
    "only 1": (diagnosed("c...."), "exhibit-2"),
    "c in 2": (diagnosed("ccbad"), "exhibit-2-c"),
    "d in 3": (diagnosed("cedad"), "exhibit-3"),
    "a in 3": (diagnosed("ceabd"), "exhibit-3-a"),
    "f in 3": (diagnosed("cefad"), "exhibit-3-f"),
    "f in 4": (diagnosed("cebfd"), "exhibit-4"),
    "d in 4": (diagnosed("cebdd"), "exhibit-4-d"),
    "b in 4": (diagnosed("cebbd"), "exhibit-4-b"),
    "f in 5": (diagnosed("cebaf"), "exhibit-5"),
    "a in 5": (diagnosed("cebaa"), "exhibit-5-a"),
    "g in 5": (diagnosed("cebag"), "exhibit-5-g"),
}
MUSEUM_ERRORS = {
    "no quotes": (diagnosis('{1: c, 2: "e", 3: "b", 4: "a", 5: "d"}'), "no-quotes"),
    "misspelt": (changed("museum", ('museum", diagnosis', 'museum", diagnoses')), "unknown-name"),
    "not set": (
        changed("museum", (RIGHT, "def f():\n    x = x\n\n\nf()")),
        "unset",
    ),
    "anything": (diagnosis("1 / 0"), "other-error"),
}
OTHER_MUSEUMS = {
    "capitals and spaces": diagnosis('{1: "C", 2: " e ", 3: "B ", 4: "a", 5: "\\td"}'),
    "in another order": diagnosis('{5: "d", 4: "a", 3: "b", 2: "e", 1: "c"}'),
}

WRONG_TABLES = {
    "capture": WRONG_CAPTURES,
    "replay": WRONG_REPLAYS,
    "safe": WRONG_SAFES,
    "museum": WRONG_MUSEUMS,
}
ERROR_TABLES = {
    "capture": CAPTURE_ERRORS,
    "replay": REPLAY_ERRORS,
    "safe": SAFE_ERRORS,
    "museum": MUSEUM_ERRORS,
}
HINTS = {
    "capture": graph_capture_hints.HINTS,
    "replay": graph_replay_hints.HINTS,
    "safe": graph_safe_hints.HINTS,
    "museum": graph_museum_hints.HINTS,
}
OTHER_RIGHT_ANSWERS = {
    f"{name}: {what}": (name, source)
    for name, table in (
        ("capture", OTHER_CAPTURES),
        ("replay", OTHER_REPLAYS),
        ("safe", OTHER_SAFES),
        ("museum", OTHER_MUSEUMS),
    )
    for what, source in table.items()
}


@INTERPRETED
@pytest.mark.parametrize(("name", "source", "reason"), cases(WRONG_TABLES))
def test_a_wrong_answer_is_refused_for_its_reason(judged, name, source, reason):
    assert_refused(judged(name, source), reason, HINTS[name])


ELSEWHERE = {"capture": {"on-a-gpu"}}
"""Reasons that have a test of their own."""


@pytest.mark.parametrize("reason", graph_capture_hints.HINTS)
def test_a_capture_gets_three_hints(reason):
    assert len(graph_capture_hints.HINTS[reason]) == 3
    assert "?" in graph_capture_hints.HINTS[reason][0]


@INTERPRETED
def test_the_judges_print_nothing_above_the_verdict(judged, recwarn, capfd):
    for name in TASKS:
        judged(name, solved(name))
    judged("safe", WRONG_SAFES["the address"][0])
    assert not [warning for warning in recwarn if "encountered" in str(warning.message)]
    assert capfd.readouterr() == ("", "")


# --- what a verdict says


@INTERPRETED
def test_the_evidence_of_a_capture_says_where_it_was_checked(judged):
    evidence = judged("capture", solved("capture"))["evidence"]
    assert "12 replays of 3 graphs" in evidence and "A graph holds 3 operations" in evidence
    assert "call ran 1 time to warm up" in evidence
    assert evidence.endswith("Checked with a stand-in for torch.cuda on the CPU: no GPU was used.")


def test_the_evidence_of_a_replay_says_what_a_graph_takes_away(judged):
    evidence = judged("replay", solved("replay"))["evidence"]
    assert "12 short kernels go from 138 to 49 microseconds, 2.8 times as fast" in evidence
    assert "only 29% of the eager time was work" in evidence and "from 574 to 568" in evidence


@INTERPRETED
def test_the_evidence_of_a_kernel_says_what_a_number_in_memory_costs(judged):
    evidence = judged("safe", solved("safe"))["evidence"]
    assert "factor is loaded 5 times, 20 bytes beside 20,000 of x" in evidence


def test_a_diagnosis_is_told_how_many_are_right_and_where_to_look_first(judged):
    for letters, right, first in (
        ("eebad", 4, "1 is not e"),
        ("cecba", 2, "3 is not c"),
        ("c....", 1, "2 has no"),
    ):
        observed = judged("museum", diagnosed(letters))["observed"]
        assert observed.startswith(f"{right} of 5 are right") and first in observed


@pytest.mark.parametrize("number", graph_museum.EXHIBITS)
@pytest.mark.parametrize("letter", graph_museum.CAUSES)
def test_every_wrong_letter_of_every_exhibit_has_hints(number, letter):
    given = graph_museum.EXHIBITS | {number: letter}
    if letter == graph_museum.EXHIBITS[number]:
        assert graph_museum.check(given).passed == 5
        return
    with pytest.raises(Wrong) as refused:
        graph_museum.check(given)
    assert refused.value.hints in graph_museum_hints.HINTS.values()


def test_a_wrong_prediction_is_told_with_its_case(judged):
    observed = judged("replay", WRONG_REPLAYS["n gaps"][0])["observed"]
    assert observed == "For 1 kernel with gap_us = 1.5, the function says 7.5 microseconds; it should be 6."


def test_the_cases_of_a_replay_tell_all_mistakes_apart():
    told = {}
    for reason, other in graph_replay._mistakes():
        said = tuple(round(other(graph_replay._Case(*case)), 6) for case in graph_replay.CASES)
        right = tuple(round(graph_replay._Case(*case).right, 6) for case in graph_replay.CASES)
        assert said != right and told.setdefault(said, reason) == reason


@INTERPRETED
def test_a_stale_launch_is_told_with_both_factors(judged):
    observed = judged("safe", WRONG_SAFES["read behind the back"][0])["observed"]
    assert re.search(r"launched again after factor became [\d.]+ in place of [\d.]+: y is wrong in", observed)


# --- the same answer with the real torch.cuda


def answer(source):
    given = {"torch": torch, "tasks": type("", (), {"check": staticmethod(lambda *_: None)})}
    exec(source, given)
    return given["graphed"]


ON_A_DEVICE = [capture(), *(OTHER_CAPTURES[name] for name in ("captured on the side", "zeros", "by events"))]
OFF_ON_A_DEVICE = [WRONG_CAPTURES[name][0] for name in ("replaced", "x written over", "the graph's output")]


def with_cuda():
    """torch.cuda and a device; the stand-in's where there is no GPU."""
    return (torch.cuda, "cuda") if torch.cuda.is_available() else (Machine(), "cpu")


def values(source):
    cuda, where = with_cuda()
    if where == "cuda":
        return graph_capture.refuse_values(answer(source), cuda, where)
    with cuda:
        return graph_capture.refuse_values(answer(source), cuda.cuda, where)


@pytest.mark.parametrize("source", ON_A_DEVICE)
def test_values_are_right_with_any_cuda(source):
    assert values(source) == graph_capture.TURNS


@pytest.mark.parametrize("source", OFF_ON_A_DEVICE)
def test_wrong_values_are_refused_with_any_cuda(source):
    with pytest.raises(Wrong) as refused:
        values(source)
    assert refused.value.reason == "on-a-gpu" and refused.value.hints == HINTS["capture"]["on-a-gpu"]


@INTERPRETED
def test_where_there_is_a_gpu_the_evidence_names_it(judged, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(graph_capture, "refuse_values", lambda *_: 4)
    finding = judged("capture", solved("capture"))
    assert finding["evidence"].endswith("on the CPU, and on a GPU.") and finding["passed"] == 16


# --- the lesson


@pytest.mark.parametrize("name", TASKS)
def test_the_solution_keeps_what_the_scaffold_gives(name):
    given, ours = SCAFFOLDS[name], solved(name)
    assert code_lines(given)[-1] == code_lines(ours)[-1]
    assert re.findall(r'(?s)""".*?"""', given) == re.findall(r'(?s)""".*?"""', ours)
    assert re.findall(r"(?m)^def .*|^@.*", given) == re.findall(r"(?m)^def .*|^@.*", ours)


def test_solutions_run_as_plain_python():
    module = exercises.of(ANSWERS.lesson)
    assert all(callable(module.answer(name)) for name in ("capture", "replay", "safe"))
    assert module.answer("museum") == graph_museum.EXHIBITS


class TestExercises(RefusalTests):
    answers, others, least_passed = ANSWERS, OTHER_RIGHT_ANSWERS, 5
    wrong, errors, hints = WRONG_TABLES, ERROR_TABLES, HINTS
    elsewhere = ELSEWHERE
