"""The README and the pages of docs: links lead somewhere, commands exist."""

import inspect
import re
import shlex
import tomllib

import pytest
import yaml

import labkit
from labkit import kernels, notebooks, paths
from labkit.run import main

ROOT = paths.CHECKOUT
README = (ROOT / "README.md").read_text(encoding="utf-8")
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]
TARGETS = set(re.findall(r"^\.PHONY: (.*)$", MAKEFILE, re.MULTILINE)[0].split())
CHOICES = {"ENV": ["current"], "TORCH": ["2.11", "2.13", "2.15"], "IPYKERNEL": ["6.31"]}


def commands(text):
    """What a page gives to make, labkit or `python -m`, in blocks of shell commands and within its text."""
    blocks = re.findall(r"^```(?:sh|bash|console)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    lines += re.findall(r"`((?:make|labkit|python -m) [^`]+)`", text)
    words = r"(?:^|\s)(make(?: .*)?|(?:labkit|python -m) .*)$"
    return [
        found[1]
        for line in lines
        if "$" not in line and (found := re.search(words, line.partition("  #")[0]))
    ]


def check(command):
    """ValueError or click.ClickException unless the command exists, with all its options and names."""
    program, *arguments = shlex.split(command, comments=True)
    if program == "python":
        module = ROOT / arguments[1].replace(".", "/")
        if not module.with_suffix(".py").is_file() and not (module / "__main__.py").is_file():
            raise ValueError(f"{command}: no such module")
    elif program == "labkit":
        check_labkit(arguments)
    else:
        while arguments[:1] == ["-C"]:
            arguments = arguments[2:]
        given = dict(word.split("=", 1) for word in arguments if "=" in word)
        targets = [word for word in arguments if "=" not in word]
        if set(targets) - TARGETS or len(targets) > 1:
            raise ValueError(f"{command}: no such target")
        for name, value in given.items():
            if not re.search(
                rf"^#   {name}=|\$\({name}\)", MAKEFILE, re.MULTILINE
            ) or value not in CHOICES.get(name, [value]):
                raise ValueError(f"{command}: no such {name}")
        if targets and targets[0] in main.cli.commands:
            check_labkit([*targets, *shlex.split(f"{given.get('LESSONS', '')} {given.get('ARGS', '')}")])
        if missing := [
            path for path in re.findall(r"tests/\S+", command) if not (ROOT / path.strip("'\"")).exists()
        ]:
            raise ValueError(f"{missing}: no such tests")


def check_labkit(arguments):
    name, *rest = arguments
    if name not in main.cli.commands:
        raise ValueError(f"labkit {name}: no such command")
    parsed = main.cli.commands[name].make_context(name, rest, resilient_parsing="--help" in rest).params
    for given in parsed.get("names") or ():
        notebooks.resolve(given)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_and_file_that_a_page_names_exists(page):
    text = page.read_text(encoding="utf-8")
    if page.name != "CHANGELOG.md":  # which names commands that are gone
        for command in dict.fromkeys(commands(text)):
            check(command)
    links = {link.partition("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", text)}
    named = re.findall(r"`((?:labkit|notebooks|docs|tests|binder)/[\w./-]+\.\w+)`", text)
    here = [page.parent / link for link in links if link and not re.match(r"[a-z]+:", link)]
    missing = [
        path for path in [*here, *(ROOT / name for name in named if "NN" not in name)] if not path.exists()
    ]
    assert not missing


def test_the_readme_fits_and_begins_with_a_command_and_links_every_lesson():
    assert len(README.splitlines()) <= 110
    assert [line for line in README.splitlines()[:12] if line.startswith("make ")]
    links = {ROOT / link for link in re.findall(r"\]\(([^)\s]+)\)", README)}
    assert set(notebooks.find()) <= links and ROOT / "LICENSE" in links
    for opened in re.findall(r"urlpath=lab/tree/(notebooks/\S+\.ipynb)", README):
        assert ROOT / opened in notebooks.find()


def test_the_cheat_sheet_has_each_operation_of_triton_that_a_lesson_uses_and_no_other():
    cells = [
        cell.source for path in notebooks.find() for _, cell in notebooks.code_cells(notebooks.read(path))
    ]
    cells += [path.read_text(encoding="utf-8") for path in paths.NOTEBOOKS.glob("**/solutions/*.py")]
    sheet = (ROOT / "docs" / "cheat_sheet.md").read_text(encoding="utf-8")
    used, shown = (set(re.findall(r"\btl\.\w+", text)) for text in ("\n".join(cells), sheet))
    assert used == shown, used ^ shown


def test_no_page_names_an_address_of_the_repository_and_the_citation_has_the_packages_version():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == project["version"] == labkit.__version__
    for page in PAGES:
        assert not re.search(r"github\.com/[\w.-]+/labkit|OWNER", page.read_text(encoding="utf-8")), page


def test_the_reference_has_every_public_kernel():
    page = (ROOT / "docs" / "kernels.md").read_text(encoding="utf-8")
    named = re.findall(r"^\.\. auto(?:function|class):: (\w+)$", page, re.MULTILINE)
    assert sorted(named) == sorted(kernels.__all__)
    for name in named:
        assert inspect.getdoc(getattr(kernels, name)), name
