"""The decks: complete in their folder, every figure with its text."""

import html
import re

from labkit.cli import slides
from labkit.lessons import notebooks


def test_a_deck_stands_in_its_folder_with_all_it_needs(tmp_path):
    (page,) = slides.write([notebooks.resolve("01")], tmp_path)
    named = re.findall(r'(?:src|href)="(?!data:|https?:|#)([^"]+)"', page.read_text())
    assert named and all((tmp_path / name).is_file() for name in named), named
    assert {path.name for path in tmp_path.iterdir()} == {"01_launch_overhead.html", "reveal"}
    licence = (tmp_path / "reveal" / "LICENSE").read_text()
    assert "reveal.js contributors" in licence and "Permission is hereby granted, free of charge" in licence
    assert "MIT" in (tmp_path / "reveal" / "dist" / "reveal.js").read_text()[:200]
    text = page.read_text()
    assert html.escape(notebooks.title(notebooks.read_json(notebooks.resolve("01"))) or "") in text
    assert not [absent for absent in ("cdnjs", "unpkg", "tasks.check(", "import torch") if absent in text]
