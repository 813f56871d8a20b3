"""Names of kernels: shortened for a plot, and the kind of work that they tell."""

import re
from typing import Literal

Kind = Literal["matrix product", "reduction", "copy", "other"]
_PATTERNS: tuple[tuple[Kind, str], ...] = (
    ("copy", r"^mem(cpy|set)\b"),
    # sums the parts of a matrix product whose inner dimension was split among blocks
    ("reduction", r"splitkreduce|reducesplitk"),
    # cuBLAS's own (nvjet, xmma, gemm, gemv), cutlass's, magma's; others have cublasGemv... as argument types
    ("matrix product", r"nvjet|cutlass|xmma|magma|(?<!cublas)gem[mv]"),
    # PyTorch's own sums
    ("reduction", r"splitk|reduce_kernel"),
)
"""The first pattern that is found in a name decides. Case and parameter lists do not matter. A product that
splits its inner dimension has splitK in its name too, so products come before the last pattern."""

_PRODUCTS = {"mm", "addmm", "_addmm_activation", "bmm", "baddbmm", "addbmm", "mv", "addmv", "linear"}
"""PyTorch's operations that are matrix products."""


def kernel_kind(name: str) -> Kind:
    """The kind of work of a kernel, copy or fill, by its full name as torch.profiler gives it."""
    text = _without_brackets(name)
    kinds = (kind for kind, pattern in _PATTERNS if re.search(pattern, text, re.IGNORECASE))
    return next(kinds, "other")


def operation_kind(name: str) -> Kind:
    """The same for an operation of PyTorch, by its name in :mod:`labkit.profiling.launch_counts`."""
    return "matrix product" if name in _PRODUCTS else "other"


_PLAIN = re.compile(r"(void|const|char|bool|int|long|unsigned|float|double|array)(\s|$)")
"""Template arguments that make a name longer and hardly tell two kernels apart."""


def shorten(name: str) -> str:
    """A kernel's name without namespaces, signature and plain types.

    Of each template argument the innermost functor is kept. In the names of PyTorch's elementwise kernels it
    tells a product from a sum.
    """
    text = re.sub(r"^(void|std::enable_if<[^>]*>::type) ", "", _without_brackets(name))
    head, _, arguments = text.partition("<")
    kept = [argument for part in _split(arguments.rpartition(">")[0]) if (argument := _argument(part))]
    short = _last_name(head)
    if short == "kernel":  # tells nothing without the namespace: gemvx::kernel
        short = "::".join(head.split("::")[-2:])
    return short + (f"<{', '.join(kept)}>" if kept else "")


def _without_brackets(name: str) -> str:
    """Drop parameter lists, lambdas and anonymous namespaces: everything in () and {}."""
    text = name.replace("(anonymous namespace)::", "")
    previous = ""
    while previous != text:
        previous, text = text, re.sub(r"\([^(){}]*\)|\{[^(){}]*\}", "", text)
    return re.sub(r"(::(operator|const)?\s*(const)?)+(?=\s*(>|,|$))", "", text).strip()


def _split(arguments: str) -> list[str]:
    """Split template arguments at their outermost commas."""
    parts, depth = [""], 0
    for character in arguments:
        depth += (character == "<") - (character == ">")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts]


def _argument(text: str) -> str:
    """A template argument in one word; empty if it is a plain type."""
    functors: list[str] = re.findall(r"\w*[Ff]unctor\w*", text)
    if functors:
        return functors[-1]
    word = _last_name(text.partition("<")[0].removesuffix("*").strip())
    return "" if _PLAIN.match(word) else word


def _last_name(text: str) -> str:
    return text.strip().rpartition("::")[2]
