"""The hash of measured code: a line edited in a kernel's file makes lesson, bench and panel stale."""

import functools
import linecache
import shutil

import pytest
import torch

from labkit.kernels import affine
from labkit.lessons import code_hash, notebooks
from labkit.measure import sweeps
from labkit.measure.contender import Contender
from labkit.workloads import elementwise

AFFINE = Contender("labkit", affine, elementwise.AFFINE)


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A copy of labkit whose files may be edited; imported modules stay those of the original."""
    copy = tmp_path / "labkit"
    shutil.copytree(code_hash.PACKAGE, copy, ignore=shutil.ignore_patterns("data", "__pycache__"))
    monkeypatch.setattr(code_hash, "PACKAGE", copy)
    return copy


def measured_now():
    """What stands for the present code in a lesson's stamp, and in a row of the bench and of a live panel."""
    return [notebooks.code_hash(notebooks.resolve("01")), sweeps.source_label(AFFINE)]


@pytest.mark.parametrize(
    ("file", "old", "new", "stale"),
    [
        ("kernels/affine.py", "ROW_BYTES = 2048", "ROW_BYTES = 4096", True),
        ("kernels/common.py", "multiprocessors=4", "multiprocessors=5", True),
        ("measure/clocks.py", "import", "import os\nimport", True),
        ("workloads/elementwise.py", "def affine", "def affined(): pass\ndef affine", True),
        ("kernels/affine.py", '"""Pointwise', '"""pointwise', False),
        ("kernels/affine.py", "# (BLOCK,)", "# of BLOCK elements", False),
        ("kernels/affine.py", "\n\n\n", "\n\n\n\n", False),
        ("plots/curves.py", "import", "import os\nimport", False),
        ("kernels/rms_norm.py", "import", "import os\nimport", False),
    ],
    ids=["kernel", "shared", "clocks", "work", "docstring", "comment", "blank", "curves", "another kernel"],
)
def test_an_edit_of_what_decides_about_a_time_makes_everything_stale_and_no_other(
    package, file, old, new, stale
):
    before = measured_now()
    text = (package / file).read_text()
    assert old in text, f"{file} has no {old!r}"
    (package / file).write_text(text.replace(old, new))
    assert [was != now for was, now in zip(before, measured_now(), strict=True)] == [stale] * 2


def test_cells_reach_the_kernels_that_they_name_and_contenders_what_their_work_computes():
    assert Contender("labkit", affine, elementwise.LINEAR).code_hash() != AFFINE.code_hash()
    assert Contender("labkit", torch.mul, elementwise.AFFINE).code_hash() != AFFINE.code_hash()


def test_what_a_contender_uses_of_its_own_module_and_was_given_counts():
    def contender(body, size=1):
        namespace = {"__name__": "cells", "SIZE": size, "partial": functools.partial}
        linecache.cache["<cells>"] = (0, None, [f"{line}\n" for line in body.splitlines()], "<cells>")
        exec(compile(body, "<cells>", "exec"), namespace)
        return code_hash.of_functions([namespace["call"]])

    helper = "def helper(x): return x * {}\ndef call(x): return helper(x) + SIZE"
    closure = "def make(n):\n    def call(x): return x * n\n    return call\ncall = make({})"
    given = "def helper(x, n): return x * n\ncall = partial(helper, n={})"
    method = (
        "class C:\n    size = 3\n    @staticmethod\n    def f(x): return x * {}\ndef call(x): return C.f(x)"
    )
    inside = "def helper(x): return x * {}\ndef call(x): return [helper(one) for one in x]"
    for body in (helper, closure, given, method, inside):
        assert contender(body.format(2)) == contender(body.format(2)) != contender(body.format(3))
    assert contender(helper) != contender(helper, size=2)
    attribute = "def helper(x): return x * {}\ndef call(x): return x.helper"
    assert contender(attribute.format(2)) == contender(attribute.format(3))


def test_a_sign_of_a_comment_within_text_is_code():
    source = (
        '"""What it is."""\n\nx = "# no comment"  # a comment\n\n\ndef f():\n    """What."""\n    return x\n'
    )
    assert code_hash.without_comments(source) == 'x = "# no comment"\ndef f():\n    return x'
