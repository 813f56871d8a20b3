"""The exercises of lesson 4."""

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
        "8c9d6348d161",
        neighbour_hints.SLIPS,
    ),
    "bias": Task(
        "Write the bias epilogue", group_bias.check, "with_bias", "398fdabe7490", group_bias_hints.SLIPS
    ),
}
