"""The exercises of lesson 9."""

from labkit.tasks import (
    Task,
    ledger_cell,
    ledger_cell_hints,
    ledger_floor,
    ledger_floor_hints,
    ledger_wall,
    ledger_wall_hints,
)

TASKS = {
    "floor": Task(
        "The floor of the network", ledger_floor.check, "floor_us", "1bbd136222fb", ledger_floor_hints.SLIPS
    ),
    "cell": Task(
        "Two recurrences in one loop", ledger_cell.check, "both", "92d21a1bbdbb", ledger_cell_hints.SLIPS
    ),
    "wall": Task(
        "When is the step over?", ledger_wall.check, "wall_us", "6ace2ada6cd8", ledger_wall_hints.SLIPS
    ),
}
