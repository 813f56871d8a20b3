"""`labkit tally`: what a class guessed, from folders and archives that may hold anything."""

import gzip
import io
import json
import os
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from labkit import cli, guesses, tally
from labkit.guesses import Guess, Question

RATIO = Question("ratio at 160", "How many times faster?", 0.1, 1000, "x")
WIDTH = Question("a crossover", "From which width on?", 8, 16384, axis="width")


@pytest.fixture(autouse=True)
def class_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    return tmp_path


def text(
    asked: Question = RATIO, *, value: Any = 3.0, minute: int = 0, seen: Any = False, **other: Any
) -> str:
    """A file as `guesses.keep` writes it, or with something else in it."""
    guess = {"value": value, "sealed": f"2026-11-21T10:{minute:02}:00+01:00", "seen": seen, "revealed": False}
    content = {"name": asked.name, "question": asked.text, "guess": guess}
    return json.dumps(content | {"unit": asked.unit, "axis": asked.axis} | other)


def seal(learner: Path, asked: Question = RATIO, **other: Any) -> Path:
    """A sealed guess in a learner's folder."""
    return put(learner, text(asked, **other), asked.slug)


def put(learner: Path, content: str, slug: str = RATIO.slug) -> Path:
    path = learner / "predictions" / f"{slug}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)
    return path


def member(name: str, content: str | bytes = b"", **changes: Any) -> tuple[tarfile.TarInfo, bytes]:
    data = content.encode() if isinstance(content, str) else content
    info = tarfile.TarInfo(name)
    info.size = len(data)
    for key, value in changes.items():
        setattr(info, key, value)
    return info, data


def archive(path: Path, *members: tuple[tarfile.TarInfo, bytes], mode: Any = "w:gz") -> Path:
    with tarfile.open(path, mode) as made:
        for info, data in members:
            made.addfile(info, io.BytesIO(data))
    return path


def run(*sources: Path | str) -> Result:
    result = CliRunner().invoke(cli.cli, ["tally", *map(str, sources)])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def row(result: Result, question: Question = RATIO) -> list[str]:
    """The cells of a question's line."""
    (line,) = (line for line in result.output.splitlines() if question.text in line)
    return [cell.strip() for cell in line.strip("│").split("│")]


# --- what is counted ------------------------------------------------------------------------------


def test_a_learners_own_guesses_with_their_units(class_room: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LABKIT_CACHE", str(class_room / "cache"))
    guesses.keep(RATIO, Guess(12.0, "2026-11-21T10:15:00+01:00"))
    guesses.keep(WIDTH, Guess(1200.0, "2026-11-21T10:05:00+01:00"))
    result = run("cache")
    assert result.exit_code == 0
    assert row(result) == [RATIO.text, "1", "0", "12×", "12 to 12×"]
    assert row(result, WIDTH) == [WIDTH.text, "1", "0", "width 1200", "1200 to 1200"]
    assert (
        "Guesses: 2; learners' folders that hold them: 1." in result.output and "Skipped" not in result.output
    )


def test_a_folder_of_folders_and_the_predictions_folder_itself(class_room: Path) -> None:
    for number, value in enumerate((1, 2, 4, 8, 16)):
        seal(class_room / "class" / f"group {number % 2}" / str(number), value=value)
    for sources in (["class"], ["class", "class/group 0"], ["class", class_room / "class"]):
        assert row(run(*sources)) == [RATIO.text, "5", "0", "4×", "1.74 to 9.19×"], sources
    assert row(run("class/group 0/0/predictions"))[1:4] == ["1", "0", "1×"]


def test_the_archive_of_one_machine_and_one_for_each_learner(class_room: Path) -> None:
    files = [(who, text(value=value)) for who, value in (("ada", 2), ("ben", 4), ("eve", 8))]
    place = "labkit/results/predictions/ratio-at-160.json"
    others = [
        member("ada/labkit/01.ipynb", "{}"),
        member("ada/labkit/results/attempts/x.json", text(value=99)),
    ]
    archive(class_room / "all.tar.gz", *(member(f"{who}/{place}", data) for who, data in files), *others)
    archive(class_room / "all.tar", *(member(f"{who}/{place}", data) for who, data in files), mode="w")
    for who, data in files:
        archive(class_room / f"{who}.tar.gz", member(place, data))
    for sources in (["all.tar.gz"], ["all.tar"], ["ada.tar.gz", "ben.tar.gz", "eve.tar.gz"]):
        result = run(*sources)
        assert row(result)[:4] == [RATIO.text, "3", "0", "4×"] and "Skipped" not in result.output
        assert "learners' folders that hold them: 3." in result.output
    assert {path.suffix for path in class_room.iterdir()} == {".gz", ".tar"}, "nothing is unpacked"


def test_who_had_seen_the_answer_is_counted_but_not_in_the_median(class_room: Path) -> None:
    for number, value in enumerate((2, 8)):
        seal(class_room / f"fresh {number}", value=value)
    for number in range(3):
        seal(class_room / f"seen {number}", value=1.02, seen=True)
        seal(class_room / f"seen {number}", WIDTH, value=900, seen=True)
    result = run(class_room)
    assert row(result)[1:4] == ["5", "3", "4×"]
    assert row(result, WIDTH)[1:] == ["3", "3", "none", ""]


def test_questions_stand_in_the_order_in_which_they_were_met(class_room: Path) -> None:
    late = Question("a late one", "The last?", 1, 10)
    for learner in "abc":
        seal(class_room / learner, minute=1)
        seal(class_room / learner, late, minute=30)
    seal(class_room / "early", late, minute=0)
    lines = run(class_room).output
    assert lines.index(RATIO.text) < lines.index(late.text)


def test_files_of_older_versions_take_the_unit_of_the_others(class_room: Path) -> None:
    old = json.loads(text(value=4.0))
    del old["unit"], old["axis"]
    for number in range(2):
        put(class_room / f"old {number}", json.dumps(old))
    assert row(run(class_room))[3] == "4"
    seal(class_room / "new", value=4)
    assert row(run(class_room))[3] == "4×"
    for number in range(2):
        seal(class_room / f"other {number}", value=4, unit="bananas")
    assert row(run(class_room))[3] == "4 bananas", "most have it"


def test_another_text_is_another_question(class_room: Path) -> None:
    seal(class_room / "a")
    seal(class_room / "b", Question(RATIO.name, "How many times slower?", 0.1, 10, "x"))
    assert row(run(class_room))[1] == "1"


# --- what is skipped ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        '"guess"',
        "null",
        "[" * 60_000,
        '{"guess": {}}',
        text(value="3"),
        text(value=True),
        text(value=None),
        text(value=float("nan")),
        text(value=float("inf")),
        text(value=0),
        text(value=-3),
        text(value=1e300),
        text(value=1e-300),
        text(value=int("7" * 400)),
        text(name=None),
        text(name="?"),
        text(question=3),
        text(question="\x1b\x07"),
        text(unit=["x"]),
        text(seen="no"),
        text().replace("2026-11-21T", "soon "),
        text().replace("2026-11-21T10:00:00+01:00", "0001-01-01T00:00:00"),
        text().replace('"revealed"', '"__class__"'),
        text() + " " * tally.MOST_BYTES,
    ],
)
def test_a_file_that_is_no_guess_is_named_and_the_rest_is_counted(class_room: Path, content: str) -> None:
    seal(class_room / "ada")
    put(class_room / "eve", content)
    archive(class_room / "ben.tar.gz", member("predictions/ratio-at-160.json", content))
    result = run("ada", "eve", "ben.tar.gz")
    assert result.exit_code == 0 and row(result)[1] == "1"
    why = "larger than 64 KiB" if len(content) > tally.MOST_BYTES else "no guess"
    for name in ("eve", "ben.tar.gz"):
        assert f"  {name}/predictions/ratio-at-160.json: {why}\n" in result.output
    assert "Skipped: 2.\n" in result.output


def test_bytes_that_are_no_text_are_no_guess(class_room: Path) -> None:
    seal(class_room / "ada").write_bytes(b"\xff\xfe\x00")
    assert "ratio-at-160.json: no guess" in run(class_room).output


def test_links_and_pipes_are_not_followed(class_room: Path) -> None:
    kept = seal(class_room / "outside", value=500)
    secret = class_room / "secret"
    secret.write_text("of the teacher")
    seal(class_room / "class" / "ada")
    (class_room / "class" / "ben").symlink_to(class_room / "outside")
    (class_room / "class" / "again").symlink_to(class_room / "class")
    for name, target in (("link", kept), ("secret", secret), ("passwd", Path("/etc/passwd"))):
        (class_room / "class" / "ada" / "predictions" / f"{name}.json").symlink_to(target)
    os.mkfifo(class_room / "class" / "ada" / "predictions" / "pipe.json")
    result = run("class")
    assert row(result)[1:4] == ["1", "0", "3×"]
    assert "Skipped: 4." in result.output
    for name in ("link", "secret", "passwd", "pipe"):
        assert f"  class/ada/predictions/{name}.json: no regular file" in result.output
    assert "of the teacher" not in result.output and "root:" not in result.output


def test_what_takes_a_files_place_while_it_is_read_is_not_followed(class_room: Path) -> None:
    link, pipe = class_room / "link", class_room / "pipe"
    link.symlink_to(seal(class_room / "ada"))
    os.mkfifo(pipe)
    found = tally.Tally()
    with pytest.raises(OSError, match="symbolic link"):
        tally._read(str(link))
    assert tally._read(str(pipe)) == b"", "and nobody is waited for"
    assert not found.guesses


def test_what_cannot_be_opened_is_named(class_room: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for learner in ("ada", "ben"):
        seal(class_room / learner)
    scan = os.scandir

    def closed(path: str) -> Any:
        if path.endswith("ada"):
            raise PermissionError(13, "Permission denied", path)
        return scan(path)

    def unreadable(path: str, *_: Any) -> int:
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(os, "scandir", closed)
    result = run(class_room)
    assert row(result)[1] == "1" and "  ada: Permission denied\n" in result.output
    monkeypatch.setattr(os, "open", unreadable)
    result = run(class_room)
    assert result.exit_code == 1
    assert "  ben/predictions/ratio-at-160.json: Permission denied\n" in result.output
    monkeypatch.setattr("builtins.open", unreadable)
    assert tally.read([put(class_room, "")]).skipped == ["predictions/ratio-at-160.json: Permission denied"]


def test_no_control_character_and_no_markup_reaches_the_terminal(class_room: Path) -> None:
    evil = "\x1b]0;owned\x07\x1b[2J\x9b31m[bold red]hi[/] [link=http://x]y[/link]\r\n\u202e :skull: \ud800 \\"
    put(class_room / "ada", text(question=evil, unit="\x1b[31m[red]" + "z" * 500, axis="\x07[/]"))
    put(class_room / "ben", text(question="How " + "long " * 5000))
    archive(
        class_room / "eve.tar",
        member("\x1b[2J[red]\udcff/predictions/x.json", "no guess"),
        mode="w",
    )
    result = run("ada", "ben", "eve.tar")
    assert result.exit_code == 0
    assert not [sign for sign in result.output if not (sign.isprintable() or sign == "\n")]
    assert "]0;owned[2J31m[bold red]hi[/] [link=http://x]y[/link] :skull: \\ " in " ".join(
        result.output.split()
    )
    assert "  eve.tar/[2J[red]/predictions/x.json: no guess" in result.output
    assert len(result.output) < 5000


def test_members_that_are_no_files_or_lead_elsewhere(class_room: Path) -> None:
    place = "predictions/ratio-at-160.json"
    archive(
        class_room / "eve.tar.gz",
        member("a/predictions/link.json", type=tarfile.SYMTYPE, linkname="/etc/passwd"),
        member("a/predictions/hard.json", type=tarfile.LNKTYPE, linkname=f"b/{place}"),
        member("a/predictions/device.json", type=tarfile.CHRTYPE, devmajor=1, devminor=5),
        member("a/predictions/folder.json", type=tarfile.DIRTYPE),
        member("a/predictions/sparse.json", type=tarfile.GNUTYPE_SPARSE),
        member(f"../../../ada/{place}", text(value=500)),
        member(f"/ada/{place}", text(value=600)),
        member(f"//ada/./{place}", text(value=700)),
        member(f"{class_room}/ada/{place}", text(value=900)),
        member(f"b/{place}", text(value=3)),
    )
    seal(class_room / "ada", value=3)
    result = run("ada", "eve.tar.gz")
    assert row(result)[1] == "4", "one name for a file twice is one file, and no other learner's"
    assert "Skipped: 5." in result.output and result.output.count("no regular file") == 5
    assert sorted(path.name for path in class_room.iterdir()) == ["ada", "eve.tar.gz"]
    assert json.loads((class_room / "ada" / place).read_text())["guess"]["value"] == 3


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (lambda data: data[: len(data) // 2], "no tar archive, or damaged (unexpected end of data)"),
        (lambda data: data[:1024], "no tar archive, or damaged (it ends too early)"),
        (
            lambda data: data[:1024] + b"x" * 512 + data[1536:],
            "no tar archive, or damaged (it ends too early)",
        ),
        (lambda data: gzip.compress(data)[:-300], "no tar archive, or damaged (Compressed file ended"),
        (lambda data: gzip.compress(data)[:40] + b"\0" * 300, "no tar archive, or damaged ("),
        (lambda data: b"", "no tar archive, or damaged (empty file)"),
        (lambda data: b"PK\3\4" * 500, "no tar archive, or damaged ("),
    ],
)
def test_a_damaged_archive_is_named_and_the_rest_is_counted(
    class_room: Path, damage: Callable[[bytes], bytes], why: str
) -> None:
    noise = os.urandom(30_000)
    files = [member(f"{who}/predictions/ratio-at-160.json", text()) for who in "ab"]
    path = archive(class_room / "eve.tar", files[0], member("noise", noise), files[1], mode="w")
    path.write_bytes(damage(path.read_bytes()))
    seal(class_room / "ada")
    result = run("eve.tar", "ada")
    assert result.exit_code == 0 and row(result)[1] in ("1", "2")
    assert f"  eve.tar: {why}" in result.output and "Skipped: 1." in result.output


# --- bombs ----------------------------------------------------------------------------------------


def header(kind: bytes, size: int, name: str = "x") -> bytes:
    info = tarfile.TarInfo(name)
    info.type, info.size = kind, size
    return info.tobuf(tarfile.GNU_FORMAT)


def sparse(data: bytes) -> bytes:
    """A file whose map of holes is in its data."""
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w", format=tarfile.PAX_FORMAT) as archive:
        keys = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.realsize": "1"}
        info, _ = member("a/predictions/sparse.json", data, pax_headers=keys)
        archive.addfile(info, io.BytesIO(data))
    return made.getvalue()


@pytest.mark.parametrize(
    ("blocks", "why"),
    [
        (header(tarfile.XHDTYPE, 2**40), f"{2**40} bytes more in a header"),
        (header(tarfile.GNUTYPE_LONGNAME, 2**40), f"{2**40} bytes more in a header"),
        (header(tarfile.REGTYPE, 2**40), f"byte {2**40 + 1535} is behind, or beyond the limit"),
        (header(tarfile.REGTYPE, -512), ""),  # each version of Python finds something else wrong with these
        (header(tarfile.XHDTYPE, -512), ""),
        (header(tarfile.GNUTYPE_LONGNAME, 512) * 3000, "512 bytes more in a header"),
        (header(tarfile.XHDTYPE, 60_000) + b"1" * 60_000, "digits without an end in a header"),
        (sparse(b"many\n"), "invalid literal"),
        (sparse(b"1000000\n" + b"1\n" * 100_000), "512 bytes more in a header"),
    ],
    ids=[
        "a long header",
        "a long name",
        "a long file",
        "backwards",
        "a header backwards",
        "a chain of headers",
        "digits",
        "no map",
        "a long map",
    ],
)
def test_headers_of_an_archive_that_lie(class_room: Path, blocks: bytes, why: str) -> None:
    first = header(tarfile.REGTYPE, len(text()), "a/predictions/ratio-at-160.json") + text().encode().ljust(
        512, b"\0"
    )
    (class_room / "eve.tar.gz").write_bytes(gzip.compress(first + blocks + bytes(10240)))
    result = run("eve.tar.gz")
    assert row(result)[1] == "1"
    assert f"  eve.tar.gz: no tar archive, or damaged ({why}" in result.output
    assert "what comes before the damage is counted" in result.output


def test_a_guess_of_negative_size_does_not_read_the_rest(class_room: Path) -> None:
    blocks = header(tarfile.REGTYPE, -512, "a/predictions/x.json") + bytes(2 * tally.MOST_BYTES)
    (class_room / "eve.tar").write_bytes(blocks)
    said = run("eve.tar").output
    assert any(
        words in said for words in ("  eve.tar/a/predictions/x.json: no guess\n", "or damaged (invalid")
    )


def test_a_long_archive_is_read_to_its_end_and_its_members_are_forgotten(
    class_room: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = [member(f"attempts/{number}.py") for number in range(300)]
    archive(class_room / "long.tar", *files, member("predictions/ratio-at-160.json", text()), mode="w")
    held, step = [], tarfile.TarFile.next

    def spied(self: Any) -> Any:
        held.append(len(self.members))
        return step(self)

    monkeypatch.setattr(tarfile.TarFile, "next", spied)
    result = run("long.tar")
    assert row(result)[1] == "1" and "Skipped" not in result.output
    assert len(held) > 300 and max(held) <= 1
    monkeypatch.setattr(tally, "MOST_UNPACKED", 512 * 200)
    result = run("long.tar")
    assert result.exit_code == 1 and "  long.tar: no tar archive, or damaged (" in result.output


def test_what_is_looked_at_has_limits(class_room: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(30):
        seal(class_room / "class" / f"{number}")
        seal(class_room / "class" / f"{number}", Question(f"q {number}", f"Question {number}?", 1, 10))
    monkeypatch.setattr(tally, "MOST_ROWS", 5)
    result = run("class")
    assert row(result)[1] == "30" and result.output.count("Question ") == 4
    assert "Questions: 31; the table has the 5 that most have guessed." in result.output
    monkeypatch.setattr(tally, "MOST_GUESSES", 10)
    result = run("class")
    assert "Guesses: 10;" in result.output and "Skipped: 50." in result.output
    assert result.output.count("there are 10 guesses before it") == tally.MOST_NAMED
    assert "  and 30 more\n" in result.output
    monkeypatch.setattr(tally, "MOST_ENTRIES", 30)
    result = run("class")
    assert result.exit_code == 1 and "  class: only its first 30 entries were looked at\n" in result.output


# --- nothing --------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", ["folder", "empty.tar.gz", "damaged"])
def test_without_a_guess_a_sentence_says_where_they_are(class_room: Path, source: str) -> None:
    (class_room / "folder").mkdir()
    (class_room / "folder" / "ratio-at-160.json").write_text(text())  # not in predictions/
    archive(class_room / "empty.tar.gz")
    put(class_room / "damaged", "{")
    result = run(source)
    assert result.exit_code == 1
    assert f"Error: {tally.NOTHING}" in result.output and "│" not in result.output
    assert ("no guess\n" in result.output) == (source == "damaged")


def test_wrong_calls() -> None:
    result = run("nowhere")
    assert result.exit_code == 2 and "nowhere: there is no such folder or archive" in result.output
    result = run()
    assert result.exit_code == 2 and "Missing argument 'FOLDER_OR_ARCHIVE...'" in result.output
    assert "tally" in CliRunner().invoke(cli.cli, ["-h"]).output
