"""The roofs of recorded devices, beside their tapes: sets, each measured on one machine.

GPUs of one kind differ, most in the power that they may draw, so a floor goes with the card. Recording takes
the roofs first: to the rows of a tape belongs the set that was measured last before them on their card. Rows
once did not name it; to those belongs the last of any.
"""

from collections.abc import Sequence
from pathlib import Path

from labkit import places, rows
from labkit.rows import Row

FILE = "roofs.jsonl"


def of(device: str, began: str | None, card: str = "") -> list[Row]:
    """The set that belongs to rows of this kind of device, the first of which was measured at ``began``.

    The newest where that date is unknown; empty where the device left none.
    """
    found = [row for path in sorted(places.RECORDED.glob(f"*/{FILE}")) for row in rows.of_a_tape(path)]
    return _chosen(sets([row for row in found if row.device == device]), began, card)


def sets(tape: Sequence[Row]) -> list[list[Row]]:
    """The rows of a file, or of several, set by set, oldest first."""
    found: list[list[Row]] = []
    for row in tape:
        if not found or row.key == found[-1][0].key:
            found.append([])
        found[-1].append(row)
    return sorted(found, key=lambda one: one[0].date)


def add(folder: Path, new: list[Row], unfinished: Path) -> None:
    """Put a set into the folder of a recorded device; of the others those stay that belong to its tapes.

    To those of recordings that are not finished, too, in the folder ``unfinished``: what was cut short on
    one machine goes on upon another, and keeps its rows.
    """
    there = sets(rows.readable(folder / FILE))
    tapes = [path for each in (folder, unfinished) for path in each.glob("*.jsonl") if path.name != FILE]
    measured = {(row.date, row.card) for path in tapes for row in rows.readable(path)}
    used = [_chosen(there, *each) for each in measured]
    kept = [one for one in there if one in used and one != new]
    rows.write(folder / FILE, [row for one in (*kept, new) for row in one])


def _chosen(found: list[list[Row]], began: str | None, card: str) -> list[Row]:
    found = [one for one in found if card and one[0].card == card] or found
    earlier = [one for one in found if began is None or one[0].date <= began]
    return earlier[-1] if earlier else found[0] if found else []
