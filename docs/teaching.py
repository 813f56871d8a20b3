"""Renews docs/teaching.md from the lessons' recorded outputs: ``python -m docs.teaching``.

Under the heading of a lesson, ``**Claim:**`` stands before a claim's sentence, and ``**Recorded:**`` before
the answer to the question of the ``**Ask:**`` above it.
"""

import re
from collections.abc import Iterator
from pathlib import Path

from labkit import paths
from labkit.lessons import notebooks
from labkit.widgets import claims

PAGE = paths.CHECKOUT / "docs" / "teaching.md"
NOT_YET = "not yet"
EARLIER = " (an earlier recording)"
"""Behind a claim of a lesson whose present code is not recorded."""
NUMBER = r"\d+(?:[.,]\d+)*(?:e[+-]?\d+)?"


def sections(text: str) -> Iterator[tuple[Path | None, str]]:
    """The page parted before each heading of a lesson: the lesson's file, and the text."""
    for part in re.split(r"^(?=## )", text, flags=re.MULTILINE):
        linked = re.match(r"## Lesson \d: \[.+\]\((.+)\)", part)
        yield ((PAGE.parent / linked[1]).resolve() if linked else None), part


def outputs(path: Path) -> Iterator[dict]:
    """What the cells of a lesson have put out, by kind."""
    for _, cell in notebooks.code_cells(notebooks.read_json(path)):
        for output in cell["outputs"]:
            data = output.get("data", {})
            yield {kind: "".join(value) if isinstance(value, list) else value for kind, value in data.items()}


def recorded_claims(path: Path) -> list[str]:
    """A lesson's claims as they were recorded, without verdict and origin."""
    texts = (data["text/plain"] for data in outputs(path) if claims.MIME in data)
    return [re.sub(r"^\W*held: | \(measured on [^)]*\)$", "", text) for text in texts]


def recorded_answers(path: Path) -> dict[str, str]:
    """The recorded answers to a lesson's questions."""
    pattern = r"(.+)\n.*(?:Measured on [^:]*|The answer): (.+)\.(?:\n|$)"
    found = (re.match(pattern, data.get("text/plain", "")) for data in outputs(path))
    return {answer[1]: answer[2] for answer in found if answer}


def renewed_claim(said: str, known: list[str]) -> str:
    """The recorded claim that differs in numbers only, most alike from the left; ValueError for none."""
    alike = [claim for claim in known if re.sub(NUMBER, "#", claim) == re.sub(NUMBER, "#", said)]
    if not alike:
        raise ValueError(f"no recorded claim is like {said!r}")
    return max(alike, key=lambda claim: _same_beginning(claim, said))


def _same_beginning(one: str, other: str) -> int:
    pairs = zip(one, other, strict=False)
    return next((at for at, (here, there) in enumerate(pairs) if here != there), min(len(one), len(other)))


def renew(text: str) -> str:
    """The page with the numbers of the recording; a lesson without one keeps its claims, marked EARLIER.

    ValueError for a claim that no lesson makes.
    """
    return "".join(part if path is None else _renewed(path, part) for path, part in sections(text))


def _renewed(path: Path, part: str) -> str:
    known, answers = recorded_claims(path), recorded_answers(path)

    def renewed(claim: re.Match[str]) -> str:
        said = claim[0].removesuffix(EARLIER)
        return renewed_claim(said, known) if known else said + EARLIER

    part = re.sub(r"(?<=\*\*Claim:\*\* ).+", renewed, part)
    return re.sub(
        r"(\*\*Ask:\*\* (.+)\n +- \*\*Recorded:\*\* ).+",
        lambda asked: asked[1] + answers.get(asked[2], NOT_YET),
        part,
    )


def main() -> None:
    """Renew the page."""
    text = PAGE.read_text(encoding="utf-8")
    paths.write_text(PAGE, renew(text))


if __name__ == "__main__":
    main()
