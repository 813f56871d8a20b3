"""Names of kernels: shortened for a plot, and the kind of work that they tell."""

import re
from collections.abc import Callable
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
