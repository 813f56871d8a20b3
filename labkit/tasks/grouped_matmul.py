"""The exercises of lesson 3."""

from labkit.tasks import (
    Task,
    group_bias,
    group_bias_hints,
    group_floor,
    group_floor_hints,
    neighbour,
    neighbour_hints,
)

TASKS = {
    "floor": Task("Derive the floor", group_floor.check, "floor_us", "c1690689df7e", group_floor_hints.SLIPS),
    "neighbour": Task(
        "Find what writes into the neighbour's group",
        neighbour.check,
        "neighbour",
        "bf086870619f",
        neighbour_hints.SLIPS,
    ),
    "bias": Task(
        "Write the bias epilogue", group_bias.check, "with_bias", "eb70128dc45f", group_bias_hints.SLIPS
    ),
}
