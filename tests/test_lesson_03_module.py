"""Lesson 3: GroupedLinear in place of a list of linear layers: state, training, compiling."""

import copy

import pytest
import torch
from grouped import NAME, assert_close, bf16, compiled, fp16
from torch import nn
from torch.nn import functional

from labkit import device, lessons

pytestmark = pytest.mark.usefixtures("cache")


@pytest.fixture(scope="module")
def lesson(cache):
    return lessons.load(NAME)


def linears(groups=3, d_in=20, d_out=24, **options):
    torch.manual_seed(0)
    return nn.ModuleList(nn.Linear(d_in, d_out, **options) for _ in range(groups))


def chunked(layers, x):
    return torch.cat([layer(one) for layer, one in zip(layers, x.chunk(len(layers), -1), strict=True)], -1)


def same(one, other):
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("leading", [(37,), (2, 5), ()], ids=str)
def test_it_is_a_list_of_linear_layers(lesson, leading, bias):
    layers = linears(bias=bias).to(device.name())
    x = torch.randn(*leading, 60, device=device.name())
    made = lesson.GroupedLinear.from_linears(layers)
    assert_close(made(x), chunked(layers.double(), x.double()))


@pytest.mark.parametrize("bias", [True, False])
def test_its_state_is_that_of_the_list(lesson, bias):
    layers = linears(bias=bias)
    made = lesson.GroupedLinear.from_linears(layers)
    state, usual = made.state_dict(), layers.state_dict()
    same(state, usual)
    assert [name for name, _ in made.named_parameters()] == ["weight", "bias"][: 1 + bias]
    assert made.weight.shape == (3, 20, 24)
    assert bias or made.bias is None
    again = linears(bias=bias)
    for parameter in again.parameters():
        nn.init.zeros_(parameter)
    again.load_state_dict(state, strict=True)
    same(again.state_dict(), usual)


def test_a_state_that_lasts_shares_memory_with_the_weights(lesson):
    """As every state_dict does: it is no copy, and costs no memory."""
    made = lesson.GroupedLinear(3, 20, 24)
    state = made.state_dict()
    with torch.no_grad():
        made.weight.fill_(7.0)
        made.bias.fill_(5.0)
    assert all((value == (7 if name.endswith("weight") else 5)).all() for name, value in state.items())


@pytest.mark.parametrize("bias", [True, False])
def test_its_own_state_comes_back(lesson, bias):
    made = lesson.GroupedLinear.from_linears(linears(bias=bias))
    other = lesson.GroupedLinear(3, 20, 24, bias=bias)
    state = made.state_dict()
    names = list(state)
    other.load_state_dict(state, strict=True)
    assert list(state) == names, "somebody else's dictionary"
    same(other.state_dict(), state)
    same(copy.deepcopy(made).state_dict(), state)
    assert torch.equal(other.weight, made.weight)
    assert other.weight.is_contiguous()


def test_a_state_may_be_assigned(lesson):
    layers = linears().to(device.name())
    made = lesson.GroupedLinear(3, 20, 24, device="meta")
    made.load_state_dict(layers.state_dict(), assign=True)
    assert isinstance(made.weight, nn.Parameter) and made.weight.requires_grad
    x = torch.randn(5, 60, device=device.name())
    assert_close(made(x), chunked(layers.double(), x.double()))


class Usual(nn.ModuleList):
    """The list with a forward."""

    def __init__(self, groups, d_in, d_out):
        super().__init__(nn.Linear(d_in, d_out) for _ in range(groups))

    def forward(self, x):
        return chunked(self, x)


def inside(block):
    """A larger model with two of these blocks, at two depths."""
    model = nn.Module()
    model.first, model.last = block(3, 20, 24), nn.Linear(72, 60)
    model.layers = nn.ModuleList([nn.ModuleDict({"mix": block(2, 5, 7)})])
    return model


def test_weights_find_their_way_inside_a_larger_model(lesson):
    usual, ours = inside(Usual), inside(lesson.GroupedLinear)
    ours.load_state_dict(usual.state_dict(), strict=True)
    same(ours.state_dict(), usual.state_dict())
    assert torch.equal(ours.layers[0]["mix"].weight[1], usual.layers[0]["mix"][1].weight.T)
    again = inside(Usual)
    again.load_state_dict(ours.state_dict(), strict=True)
    same(again.state_dict(), usual.state_dict())
    assert set(ours.first.state_dict(prefix="a.")) == set(usual.first.state_dict(prefix="a."))


@pytest.mark.parametrize("lost", ["0.weight", "2.weight", "1.bias"])
def test_a_missing_weight_is_reported(lesson, lost):
    ours, state = inside(lesson.GroupedLinear), inside(Usual).state_dict()
    del state[f"first.{lost}"]
    name = lost.partition(".")[2]
    with pytest.raises(RuntimeError, match=rf'Missing key\(s\) in state_dict: "first.{name}"'):
        ours.load_state_dict(state)
    assert ours.load_state_dict(state, strict=False).missing_keys == [f"first.{name}"]


def test_a_layer_too_many_is_reported(lesson):
    with pytest.raises(RuntimeError, match=r"Unexpected key\(s\) in state_dict: .*3.weight"):
        lesson.GroupedLinear(3, 20, 24).load_state_dict(linears(groups=4).state_dict())
    with pytest.raises(RuntimeError, match="Missing key"):
        lesson.GroupedLinear(4, 20, 24).load_state_dict(linears(groups=3).state_dict())


def test_weights_of_another_size_are_refused_by_name(lesson):
    with pytest.raises(RuntimeError, match="size mismatch for weight"):
        lesson.GroupedLinear(3, 24, 20).load_state_dict(linears().state_dict())


UNLIKE = {
    "of two shapes": lambda: [nn.Linear(4, 5), nn.Linear(5, 4)],
    "of two widths": lambda: [nn.Linear(4, 5), nn.Linear(4, 6)],
    "one without a bias": lambda: [nn.Linear(4, 5), nn.Linear(4, 5, bias=False)],
    "of two dtypes": lambda: [nn.Linear(4, 5), nn.Linear(4, 5, dtype=bf16)],
    "on two devices": lambda: [nn.Linear(4, 5), nn.Linear(4, 5, device="meta")],
    "one frozen": lambda: [nn.Linear(4, 5), nn.Linear(4, 5).requires_grad_(False)],
}


@pytest.mark.parametrize("kind", UNLIKE)
def test_layers_that_do_not_go_together_are_refused(lesson, kind):
    with pytest.raises(ValueError, match=r"^linears: should be of one shape, dtype and device.* 2 kinds"):
        lesson.GroupedLinear.from_linears(UNLIKE[kind]())


@pytest.mark.parametrize("layers", [[], [nn.Linear(4, 5), nn.Conv1d(4, 5, 1)], [nn.Identity()]], ids=str)
def test_what_is_no_linear_layer_is_refused(lesson, layers):
    with pytest.raises(ValueError, match=r"^linears: should be one or more nn.Linear$"):
        lesson.GroupedLinear.from_linears(layers)


def test_frozen_layers_stay_frozen_and_evaluated_ones_stay_so(lesson):
    made = lesson.GroupedLinear.from_linears(linears().requires_grad_(False).eval())
    assert not made.training and not any(p.requires_grad for p in made.parameters())
    half = linears()
    for layer in half:
        layer.bias.requires_grad_(False)
    made = lesson.GroupedLinear.from_linears(half)
    assert made.training and made.weight.requires_grad and not made.bias.requires_grad


def test_layers_come_from_any_iterable_and_are_copied(lesson):
    layers = linears(dtype=bf16)
    made = lesson.GroupedLinear.from_linears(layer for layer in layers)
    assert {p.dtype for p in made.parameters()} == {bf16}
    before = made.weight.clone()
    with torch.no_grad():
        layers[0].weight.zero_()
    assert torch.equal(made.weight, before)


def test_it_is_drawn_as_linear_layers_are(lesson):
    torch.manual_seed(0)
    made = lesson.GroupedLinear(7, 100, 30, dtype=fp16)
    assert {p.dtype for p in made.parameters()} == {fp16}
    for parameter in made.parameters():
        assert 0.09 < parameter.abs().max() <= 0.1 + 1e-4
        assert parameter.float().mean().abs() < 0.02


def losses(network, steps=8):
    torch.manual_seed(1)
    network = network.to(device.name())
    optimizer, curve = torch.optim.AdamW(network.parameters(), lr=3e-3), []
    for _ in range(steps):
        x = torch.randn(32, 60, device=device.name())
        loss = functional.mse_loss(network(x), torch.roll(x, 1, 1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        curve.append(loss.item())
    return curve


def test_training_follows_the_curve_of_the_list(lesson):
    torch.manual_seed(0)
    usual = nn.Sequential(Usual(3, 20, 24), nn.GELU(), Usual(3, 24, 20))
    ours = nn.Sequential(lesson.GroupedLinear(3, 20, 24), nn.GELU(), lesson.GroupedLinear(3, 24, 20))
    ours.load_state_dict(usual.state_dict())
    before = {name: value.clone() for name, value in usual.state_dict().items()}
    curves = losses(usual), losses(ours)
    assert curves[1] == pytest.approx(curves[0], rel=1e-4)
    assert curves[1][-1] < 0.99 * curves[1][0], "a network that does not learn agrees with any other"
    for name, value in ours.state_dict().items():
        assert not torch.equal(value.cpu(), before[name]), f"{name} was not trained"
        assert torch.allclose(value, usual.state_dict()[name], atol=1e-3), name


@pytest.mark.usefixtures("fresh_compiler")
def test_the_module_compiles(lesson):
    made = lesson.GroupedLinear.from_linears(linears().to(device.name()))
    x = torch.randn(2, 60, 5, device=device.name()).mT
    assert torch.equal(compiled(made)(x), made(x))
