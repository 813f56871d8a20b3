"""Checks pages that belong together: every link leads somewhere, every picture has a text."""

from collections.abc import Iterable
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

LOADED = {"script": "src", "link": "href", "img": "src"}
"""What a page cannot do without, by tag: has to be in the folder, not in the network."""


class _Page(HTMLParser):
    """What a page refers to, and what in it can be referred to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.without_text = 0
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note an element's id, and what it refers to."""
        given = {name: value or "" for name, value in attrs}
        self.ids |= {given[name] for name in ("id", "name") if given.get(name)}
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        if tag in LOADED and LOADED[tag] in given:
            self.loads.append(given[LOADED[tag]])
        if tag == "img" and not given.get("alt", "").strip():
            self.without_text += 1


def check(paths: Iterable[Path]) -> None:
    """ValueError naming every broken link, missing alt text and thing to fetch; addresses are not visited."""
    pages = {path.resolve(): _Page(path.read_text(encoding="utf-8")) for path in paths}
    problems = [f"{path.name}: {problem}" for path in pages for problem in _problems(path, pages)]
    if problems:
        raise ValueError("; ".join(problems))


def _problems(path: Path, pages: dict[Path, _Page]) -> list[str]:
    page = pages[path]
    found = [f"{link} leads nowhere" for link in page.links if not _leads(path, link, pages)]
    for thing in page.loads:
        scheme = urlsplit(thing).scheme
        if scheme != "data" and (scheme or not (path.parent / unquote(thing)).is_file()):
            found.append(f"{thing} is not in the folder")
    if page.without_text:
        found.append(f"pictures without alt text: {page.without_text}")
    return found


def _leads(path: Path, link: str, pages: dict[Path, _Page]) -> bool:
    parts = urlsplit(link)
    if parts.scheme:
        return parts.scheme in ("http", "https", "mailto", "data")
    target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
    if parts.fragment and target in pages:
        return unquote(parts.fragment) in pages[target].ids
    return target.is_file()
