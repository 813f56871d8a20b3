"""The hash of measured code: a line edited in a kernel's file makes lesson, bench and panel stale."""

import shutil
from pathlib import Path

import pytest
import torch

from labkit import code_hash, lessons, sweeps, works
from labkit.kernels import affine
from labkit.sweeps import Contender

AFFINE = Contender("labkit", affine, works.AFFINE)


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A copy of labkit whose files may be edited; imported modules stay those of the original."""
    copy = tmp_path / "labkit"
    shutil.copytree(code_hash.PACKAGE, copy, ignore=shutil.ignore_patterns("data", "__pycache__"))
    monkeypatch.setattr(code_hash, "PACKAGE", copy)
    return copy


def edit(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert old in text, f"{file.name} has no {old!r}"
    file.write_text(text.replace(old, new))


def measured_now() -> dict[str, str]:
    """What stands for the present code in a lesson's stamp, and in a row of the bench and of a live panel."""
    found = {"lesson": lessons.code_hash(lessons.resolve("01"))}
    return found | {"bench and panel": sweeps.code(AFFINE)}


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("kernels/affine.py", "ROW_BYTES = 2048", "ROW_BYTES = 4096"),
        ("kernels/common.py", "multiprocessors=4", "multiprocessors=5"),
        ("clocks.py", "import", "import os\nimport"),
        ("works.py", "def draw", "def drawn(): pass\ndef draw"),
    ],
    ids=["a kernel", "what kernels share", "clocks", "workloads"],
)
def test_an_edit_of_what_decides_about_a_time_makes_everything_stale(package, file, old, new):
    before = measured_now()
    edit(package / file, old, new)
    after = measured_now()
    assert all(before[what] != after[what] for what in before)


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("kernels/affine.py", '"""y = x', '"""Y = x'),
        ("kernels/affine.py", "# (BLOCK,)", "# of BLOCK elements"),
        ("kernels/affine.py", "\n\n\n", "\n\n\n\n"),
        ("curves.py", "import", "import os\nimport"),
    ],
    ids=["a docstring", "a comment", "blank lines", "how curves are drawn"],
)
def test_an_edit_of_anything_else_does_not(package, file, old, new):
    before = measured_now()
    edit(package / file, old, new)
    assert measured_now() == before


def test_only_the_kernels_that_are_used_count(package):
    before = measured_now()
    (package / "kernels" / "rms_norm.py").write_text("x = 1\n")
    assert measured_now() == before


def test_cells_reach_what_they_import():
    cell = "from labkit.kernels import affine\n"
    assert code_hash.of_cells([cell]) != code_hash.of_cells(["from labkit import affine\n"])
    assert code_hash.of_cells(["x = (", cell]) == code_hash.of_cells(["x = (", cell]), "half written"
    (kernels,) = (line for line in code_hash.of_modules({"labkit.kernels.affine.affine"}) if "affine" in line)
    assert kernels in code_hash.of_modules({"labkit.kernels.affine"})


def test_plain_text_is_the_code_alone():
    source = (
        '"""What it is."""\n\nx = "# no comment"  # a comment\n\n\ndef f():\n    """What."""\n    return x\n'
    )
    assert code_hash.plain(source) == 'x = "# no comment"\ndef f():\n    return x'


def test_what_the_work_computes_counts():
    other = Contender("labkit", affine, works.LINEAR)
    assert other.fingerprint() != AFFINE.fingerprint()
    assert Contender("labkit", torch.mul, works.AFFINE).fingerprint() != AFFINE.fingerprint()
