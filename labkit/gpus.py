"""The GPUs that this session sees, and those of them that `--gpus` names."""

import os
from collections.abc import Sequence
from dataclasses import dataclass

MIG = "MIG-"
"""What the name of a slice of a GPU begins with in CUDA_VISIBLE_DEVICES."""


@dataclass(frozen=True)
class Gpu:
    """A GPU by the number that CUDA gives it in this session, and the name that it has in every session."""

    number: int
    name: str
    visible: str
    """The value of CUDA_VISIBLE_DEVICES that leaves this GPU alone."""

    def __str__(self) -> str:
        return f"GPU {self.number}"


def found() -> list[Gpu]:
    """The GPUs that kernels run on here; those that CUDA_VISIBLE_DEVICES hides are not among them.

    They are told apart by UUID: numbers mean other GPUs once the variable is set, or CUDA_DEVICE_ORDER is.
    """
    import torch  # not above: a cluster's jobs are submitted where no GPU and no need for it is

    from labkit import backend, device

    if not device.has_gpu():
        return []

    outer = [entry.strip() for entry in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    if all(entry.startswith(MIG) for entry in outer):  # a process sees one slice, so torch lists only that
        name = torch.cuda.get_device_name(0)
        return [Gpu(number, name, entry) for number, entry in enumerate(outer)]
    cards = [torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count())]
    return [
        Gpu(number, card.name, f"GPU-{card.uuid}")
        for number, card in enumerate(cards)
        if (card.major, card.minor) >= backend.OLDEST_CAPABILITY
    ]


def chosen(wanted: str, here: Sequence[Gpu]) -> list[Gpu]:
    """The GPUs that ``all`` or numbers like ``0,2`` name, in that order.

    ValueError without any GPU, and for one that is unknown or named twice.
    """
    if not here:
        raise ValueError("--gpus needs a GPU, and this session has none: see `labkit doctor`")
    if wanted == "all":
        return list(here)
    by_number = {str(gpu.number): gpu for gpu in here}
    numbers = [number.strip() for number in wanted.split(",")]
    for number in numbers:
        if not (number.isascii() and number.isdigit()):
            raise ValueError(f"--gpus {wanted!r}: write all, or numbers like 0,2")
        if number not in by_number:
            listed = ", ".join(f"{gpu.number} ({gpu.name})" for gpu in here)
            raise ValueError(f"--gpus {wanted!r}: there is no GPU {number}; this session sees {listed}")
        if numbers.count(number) > 1:
            raise ValueError(f"--gpus {wanted!r}: GPU {number} is named twice")
    return [by_number[number] for number in numbers]
