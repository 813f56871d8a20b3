"""What a measurement asks of torch.compile."""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def repeatable(direction: str) -> Iterator[None]:
    """A backward pass that torch.compile makes here can run again and again on one forward pass.

    It leaves what the forward saved alone when the first backward asks for that. But compiled code is cached,
    and the cache does not tell it from code that overwrites it: a tag does. The backward thread would not
    see the tag, so there is none.
    """
    if direction != "backward":
        yield
        return
    config: Any = torch.compiler.config
    tag = f"{config.cache_key_tag} labkit: repeatable"
    with config.patch(cache_key_tag=tag), torch.autograd.set_multithreading_enabled(False):
        yield


@contextmanager
def quiet() -> Iterator[None]:
    """Without max-autotune's log of every candidate, and of those that ask for too much shared memory.

    And without the advice to allow TF32, from here on: that it is off is the course's rule for float32.
    """
    from torch._inductor import config  # not before it is needed: importing it takes a second

    warnings.filterwarnings("ignore", "TensorFloat32 tensor cores")
    log = logging.getLogger("torch._inductor.select_algorithm")
    log.addFilter(_is_no_candidate)
    try:
        with config.patch(autotune_num_choices_displayed=0, max_autotune_report_choices_stats=False):
            yield
    finally:
        log.removeFilter(_is_no_candidate)


def _is_no_candidate(record: logging.LogRecord) -> bool:
    return not str(record.msg).startswith("Runtime error during autotuning")
