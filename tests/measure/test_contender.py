import logging

import torch

from labkit.measure import contender

LOG = "torch._inductor.select_algorithm"


def test_candidates_that_do_not_fit_are_not_logged_and_other_errors_are(caplog):
    log = logging.getLogger(LOG)
    log.addHandler(caplog.handler)
    try:
        contender.silence_compiler()
        log.error("Runtime error during autotuning: \n%s. \nIgnoring this choice.", "out of resource")
        log.error("something else")
    finally:
        log.removeHandler(caplog.handler)
    assert {record.getMessage() for record in caplog.records} == {"something else"}


def test_only_a_backward_pass_is_made_to_be_repeated():
    plain = torch.compiler.config.cache_key_tag
    with contender.repeatable_backward("forward_backward"):
        assert torch.compiler.config.cache_key_tag == plain
    with contender.repeatable_backward("backward"):
        assert torch.compiler.config.cache_key_tag != plain
    assert torch.compiler.config.cache_key_tag == plain
