import torch

from labkit.measure import contender


def test_only_a_backward_pass_is_made_to_be_repeated():
    plain = torch.compiler.config.cache_key_tag
    with contender.repeatable_backward("forward_backward"):
        assert torch.compiler.config.cache_key_tag == plain
    with contender.repeatable_backward("backward"):
        assert torch.compiler.config.cache_key_tag != plain
    assert torch.compiler.config.cache_key_tag == plain
