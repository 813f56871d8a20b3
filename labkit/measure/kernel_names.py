"""Names of kernels, shortened to be shown."""

import re
from collections.abc import Callable

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
