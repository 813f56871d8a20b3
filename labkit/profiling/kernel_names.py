"""Names of kernels: shortened for a plot, and what kind of work they say the kernel does."""

import re
from typing import Literal

Sort = Literal["matrix product", "reduction", "copy", "other"]
_SORTS: tuple[tuple[Sort, str], ...] = (
    ("copy", r"^mem(cpy|set)\b"),
    # sums the parts of a matrix product whose inner dimension was split among blocks
    ("reduction", r"splitkreduce|reducesplitk"),
    # cuBLAS's own (nvjet, xmma, gemm, gemv), cutlass's, magma's; others have cublasGemv... as argument types
    ("matrix product", r"nvjet|cutlass|xmma|magma|(?<!cublas)gem[mv]"),
    # and PyTorch's own sums
    ("reduction", r"splitk|reduce_kernel"),
)
"""The first pattern found in a name, whatever its case, without its parameters. A product that splits its
inner dimension says splitK too, so products go before what else says so."""

_PRODUCTS = {"mm", "addmm", "_addmm_activation", "bmm", "baddbmm", "addbmm", "mv", "addmv", "linear"}
"""PyTorch's operations that are matrix products."""


def sort(name: str) -> Sort:
    """What a kernel, copy or fill of a GPU does, by its name as torch.profiler gives it."""
    text = _without_brackets(name)
    found = (kind for kind, pattern in _SORTS if re.search(pattern, text, re.IGNORECASE))
    return next(found, "other")


def sort_of_operation(name: str) -> Sort:
    """The same for an operation of PyTorch, as :mod:`labkit.profiling.launch_counts` names it."""
    return "matrix product" if name in _PRODUCTS else "other"


_PLAIN = {
    "void",
    "const",
    "char",
    "bool",
    "int",
    "long",
    "unsigned",
    "float",
    "double",
    "std::array",
    "array",
}
"""Words of a template's arguments that tell kernels apart less than they lengthen the name."""


def shorten(name: str) -> str:
    """A kernel's name without namespaces, signature and plain types.

    Of each template argument the innermost functor is kept: of PyTorch's elementwise kernels that is what
    tells a product from a sum.
    """
    text = re.sub(r"^(void|std::enable_if<[^>]*>::type) ", "", _without_brackets(name))
    head, _, arguments = text.partition("<")
    kept = [argument for part in _split(arguments.rpartition(">")[0]) if (argument := _argument(part))]
    said = _last_name(head)
    if said == "kernel":  # says nothing without the namespace: gemvx::kernel
        said = "::".join(head.split("::")[-2:])
    return said + (f"<{', '.join(kept)}>" if kept else "")


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
    """A template argument in one word; empty when it says little."""
    functors: list[str] = re.findall(r"\w*[Ff]unctor\w*", text)
    if functors:
        return functors[-1]
    word = _last_name(text.partition("<")[0].removesuffix("*").strip())
    return "" if not word or word in _PLAIN or word.split()[0] in _PLAIN else word


def _last_name(text: str) -> str:
    return text.strip().rpartition("::")[2]
