"""The README: its commands exist, its links lead somewhere, its numbers and picture are the tape's."""

import importlib
import json
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import click
import numpy as np
import pandas as pd
import pytest
from PIL import Image

from labkit import bench_table, bootstrap, cli, codegen, lessons, places, suites
from labkit.rows import KINDS

ROOT = places.CHECKOUT
README = (ROOT / "README.md").read_text(encoding="utf-8")
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
DRAW = SimpleNamespace(**runpy.run_path(str(ROOT / "docs" / "draw.py")))
REDRAW = "README.md or docs/width_sweep.png is not what the tape says: run `python -m docs.draw`"
OTHERS = (
    "source .venv/bin/activate",
    "pip install -e '.[peers]'",
    "pip install pre-commit",
    "pre-commit install",
    "conda env create -f environment.yml",
    "conda activate labkit",
)
"""Commands of other tools, which stand in the README exactly so."""


# --- commands -------------------------------------------------------------------------------------------


def commands(text: str) -> Iterator[str]:
    """The shell commands in fenced blocks, without comments."""
    for fenced in re.findall(r"^```sh\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL):
        for line in fenced.splitlines():
            yield shlex.join(shlex.split(line, comments=True))


def check(command: str) -> None:
    """ValueError or click.ClickException unless the command exists, with all its options and names."""
    program, *arguments = shlex.split(command)
    if program == "make":
        check_make(arguments)
    elif program == "labkit":
        check_labkit(arguments)
    elif program == "jupytext":
        check_jupytext(arguments)
    elif program == "python":
        option, module = arguments
        if option != "-m" or not (ROOT / f"{module.replace('.', '/')}.py").is_file():
            raise ValueError(f"{command}: no such module")
    elif command not in OTHERS:
        raise ValueError(f"{command}: nothing here knows whether that works")


def check_make(arguments: list[str]) -> None:
    (phony,) = re.findall(r"^\.PHONY: (.*)$", MAKEFILE, flags=re.MULTILINE)
    targets = [word for word in arguments if "=" not in word]
    given = dict(word.split("=", 1) for word in arguments if "=" in word)
    choices = {
        "ENV": ["current"],
        "TORCH": list(bootstrap.TORCHES),
        "IPYKERNEL": list(bootstrap.IPYKERNELS),
    }
    unknown = set(targets) - set(phony.split())
    if unknown or len(targets) > 1:
        raise ValueError(f"make {' '.join(targets)}: no such target")
    for name, value in given.items():
        if name in choices and value not in choices[name]:
            raise ValueError(f"{name}={value}: no such choice")
        if not re.search(rf"^#   {name}=|\$\({name}\)", MAKEFILE, flags=re.MULTILINE):
            raise ValueError(f"{name}=: the Makefile has no such variable")
    if targets in (["run"], ["record"], ["doctor"], ["bench"], ["slides"], ["site"]):
        check_labkit([*targets, *shlex.split(f"{given.get('LESSONS', '')} {given.get('ARGS', '')}")])
    for path in re.findall(r"tests/\S+", given.get("PYTEST_ARGS", "")):
        if not (ROOT / path).exists():
            raise ValueError(f"{path}: no such tests")


def check_labkit(arguments: list[str]) -> None:
    name, *rest = arguments
    if name not in cli.cli.commands:
        raise ValueError(f"labkit {name}: no such command")
    parsed = cli.cli.commands[name].make_context(name, rest).params
    suites.chosen(parsed.get("wanted", ()))
    for path in [lessons.resolve(lesson) for lesson in parsed.get("names", ())]:
        lessons.check_parameters(path, dict(pair.split("=", 1) for pair in parsed.get("assignments", ())))


def check_jupytext(arguments: list[str]) -> None:
    try:
        parser = importlib.import_module("jupytext.cli")
    except ModuleNotFoundError:
        pytest.skip("jupytext is not installed in this environment")
    try:
        parser.parse_jupytext_args(arguments)
    except SystemExit as error:
        raise ValueError(f"jupytext {' '.join(arguments)}: does not parse") from error


@pytest.mark.parametrize("command", dict.fromkeys(commands(README)))
def test_every_command_exists(command: str) -> None:
    check(command)


def test_the_commands_within_the_text_exist() -> None:
    found = re.findall(r"`((?:\w+= ?)?(?:make|labkit) [^`]+)`", README)
    assert "make lab" in found
    for command in found:
        check(re.sub(r"^\w+= ?", "", command))


@pytest.mark.parametrize(
    "command",
    [
        "make rum",
        "make run LESSON=01",
        "make run LESSONS=99",
        "make run ENV=present",
        "make test TORCH=1.13",
        "make test IPYKERNEL=5",
        "make test PYTEST_ARGS=tests/test_nothing.py",
        "make run LESSONS=01 ARGS='-p max_widht=1'",
        "make run LESSONS=01 ARGS='-p max_width=wide'",
        "make record ARGS=--chekc",
        "make bench ARGS=afine",
        "labkit benhc",
        "labkit bench afine",
        "labkit doctor --measures",
        "python -m docs.paint",
        "jupytext --too py:percent",
        "curl example.org",
    ],
)
def test_commands_that_do_not_exist_are_noticed(command: str) -> None:
    with pytest.raises((ValueError, click.ClickException)):
        check(command)


def test_the_one_command_stands_within_ten_lines() -> None:
    assert any(line.startswith("make run ") for line in README.splitlines()[:10])


def test_every_make_target_but_help_and_clean_is_named() -> None:
    (phony,) = re.findall(r"^\.PHONY: (.*)$", MAKEFILE, flags=re.MULTILINE)
    named = {word for line in commands(README) if line.startswith("make") for word in line.split()}
    assert set(phony.split()) - {"help", "clean"} <= named


def test_editing_a_lesson_as_a_python_file_changes_nothing_else(tmp_path: Path) -> None:
    pytest.importorskip("jupytext", reason="jupytext is not installed in this environment")
    steps = [line for line in commands(README) if line.startswith("jupytext")]
    assert len(steps) == 2
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "build").mkdir()
    lesson = lessons.resolve("01")
    copy = Path(shutil.copy(lesson, tmp_path / "notebooks"))
    for step in steps:
        subprocess.run([sys.executable, "-m", *shlex.split(step)], cwd=tmp_path, check=True)
    assert copy.read_bytes() == lesson.read_bytes()


# --- what it says ---------------------------------------------------------------------------------------


def test_links_lead_to_files() -> None:
    links = re.findall(r"\]\(([^)]+)\)", README)
    assert "LICENSE" in links
    assert not [link for link in links if not (ROOT / link).is_file() and link != "https://mybinder.org"]


def test_the_address_for_binder_opens_a_lesson() -> None:
    (path,) = re.findall(
        r"^https://mybinder\.org/v2/gh/<owner>/<repository>/HEAD\?urlpath=lab/tree/(\S+)$", README, re.M
    )
    assert ROOT / path in lessons.find()


def test_files_that_are_named_exist() -> None:
    named = re.findall(r"`((?:labkit|notebooks|docs|tests)/[\w./]+|[\w.-]+\.(?:txt|toml))`", README)
    assert len(named) >= 5
    assert not [name for name in named if "NN" not in name and not (ROOT / name).exists()]


def test_the_table_of_lessons_is_what_there_is() -> None:
    rows = re.findall(r"^\| (\d) \| (.+?) \|", README, flags=re.MULTILINE)
    assert [int(number) for number, _ in rows] == [1, 2, 4, 5, 7, 9]
    linked = {path for _, name in rows for path in re.findall(r"\]\((.+?)\)", name)}
    assert linked == {path.relative_to(ROOT).as_posix() for path in lessons.find()}
    assert all(("](" in name) != ("(coming)" in name) for _, name in rows)


def test_versions_are_those_of_the_constraints() -> None:
    rows = re.findall(r"^\| ([\d.]+) \| ([\d.]+) \| `(.+?)`.*\| (.+?) \|$", README, flags=re.MULTILINE)
    assert {torch: file for torch, _, file, _ in rows} == {
        torch: file for torch, (file, _) in bootstrap.TORCHES.items()
    }
    for torch, triton, file, _ in rows:
        pinned = bootstrap.pins(ROOT / file)
        assert f"{pinned['torch']}.".startswith(f"{torch}.")
        assert f"{pinned['triton']}.".startswith(f"{triton}.")
    oldest, newest = (".".join(map(str, python)) for python in bootstrap.PYTHONS)
    assert f"Python {oldest} to {newest}" in README
    assert bootstrap.CPU_INDEX in README


def test_words_are_those_of_the_package() -> None:
    assert re.findall(r"^- \*\*(\w+)\*\*:", README, flags=re.MULTILINE) == list(KINDS)
    assert all(f"`{tag}`" in README for tag in (*lessons.LOADED_TAGS, "parameters"))
    assert len(codegen.TARGETS) == 6, "the README says six GPU generations"


# --- numbers and the picture ----------------------------------------------------------------------------


def between_marks() -> str:
    return README.partition(DRAW.BEGIN)[2].partition(DRAW.END)[0]


def benchmark() -> str:
    return README.partition(bench_table.BEGIN)[2].partition(bench_table.END)[0]


def test_the_top_of_the_page_is_what_the_tape_says() -> None:
    assert DRAW.renew(README, DRAW.swept()) == README, REDRAW


def test_each_number_is_that_of_the_tape() -> None:
    """Computed a second time, from the file alone."""
    if not DRAW.TAPE.exists():
        assert between_marks() == DRAW.NOTHING
        return
    rows = [json.loads(line) for line in DRAW.TAPE.read_text().splitlines()]

    def us(contender: str, dtype: str, width: int) -> float:
        (found,) = (
            row["median_us"]
            for row in rows
            if (row["suite"], row["contender"], row["dtype"]) == ("launch_overhead/width", contender, dtype)
            and row["shape"] == {"batch": 32768, "width": width}
        )
        return float(found)

    said = re.search(
        r"batch 32768;.* In fp32 .* about ([\d.]+) times faster .* width 1024 and ([\d.]+) times at 16384; "
        r".* is ([\d.]+) and ([\d.]+) times faster. In bf16 at width 1024 .* takes ([\d.]+) times as long",
        between_marks(),
    )
    assert said, "the sentence has changed: change this test with it"
    linear, linear_wide = (us("nn.Linear", "float32", width) for width in (1024, 16384))
    wanted = [
        linear / us("labkit", "float32", 1024),
        linear_wide / us("labkit", "float32", 16384),
        linear / us("x*w+b eager", "float32", 1024),
        linear_wide / us("x*w+b eager", "float32", 16384),
        us("x*w+b eager", "bfloat16", 1024) / us("nn.Linear", "bfloat16", 1024),
    ]
    assert [float(number) for number in said.groups()] == [float(f"{ratio:.2g}") for ratio in wanted], REDRAW


def test_measured_numbers_stand_only_where_they_are_made() -> None:
    measured = r"\d\s*(?:times|×|%|[µm]?s|[GT]B/s|TFLOP\S*)\b"
    elsewhere = README.replace(between_marks(), "").replace(benchmark(), "")
    assert not re.findall(measured, elsewhere)
    if DRAW.TAPE.exists():
        assert re.findall(measured, between_marks())


def pixels(image: Image.Image) -> np.ndarray:
    return np.asarray(image.convert("RGB"))


def drawn(table: pd.DataFrame, folder: Path) -> np.ndarray:
    with Image.open(DRAW.figure(table).save(folder / "drawn.png")) as image:
        return pixels(image)


def test_the_picture_is_what_the_tape_draws(tmp_path: Path) -> None:
    table = DRAW.swept()
    if table.empty:
        assert not DRAW.PICTURE.exists(), REDRAW
        return
    pinned = bootstrap.pins(ROOT / "constraints.txt")["matplotlib"]
    if version("matplotlib") != pinned:
        pytest.skip(f"only matplotlib {pinned} draws the same pixels; here is {version('matplotlib')}")
    with Image.open(DRAW.PICTURE) as image:
        kept = pixels(image)
    assert np.array_equal(kept, drawn(table, tmp_path)), REDRAW
    moved = table.assign(median_us=table["median_us"].where(table["contender"] != "labkit", 99.0))
    assert not np.array_equal(kept, drawn(moved, tmp_path)), "another tape has to give another picture"


def test_the_picture_shows_each_contender_in_both_dtypes() -> None:
    table = DRAW.swept()
    if table.empty:
        pytest.skip("lesson 1 is not recorded: there is nothing to draw")
    found = {(str(row.contender), str(row.dtype)) for row in table.itertuples()}
    assert found == {(name, dtype) for name in DRAW.CONTENDERS for dtype in ("float32", "bfloat16")}


def test_without_a_tape_the_page_says_that_nothing_is_recorded(tmp_path: Path) -> None:
    nothing = DRAW.swept(tmp_path / "none.jsonl")
    renewed = DRAW.renew(README, nothing)
    assert DRAW.NOTHING in renewed
    assert "width_sweep.png" not in renewed
    assert "when lesson 1 is recorded" in renewed
    with pytest.raises(ValueError, match="no lines"):
        DRAW.renew("# a page without marks\n", nothing)
