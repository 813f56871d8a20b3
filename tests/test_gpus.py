import types

import pytest
import torch

from labkit import device, gpus
from labkit.gpus import Gpu

HERE = [Gpu(0, "NVIDIA H200", "GPU-a"), Gpu(1, "NVIDIA L4", "GPU-b"), Gpu(10, "NVIDIA L4", "GPU-c")]


@pytest.mark.parametrize(("wanted", "numbers"), [("all", [0, 1, 10]), ("10,0", [10, 0]), (" 1 ", [1])])
def test_gpus_are_named_by_all_or_numbers(wanted, numbers):
    assert [gpu.number for gpu in gpus.chosen(wanted, HERE)] == numbers


@pytest.mark.parametrize(
    ("wanted", "says"),
    [
        ("0,7", "there is no GPU 7; this session sees 0 (NVIDIA H200), 1 (NVIDIA L4), 10 (NVIDIA L4)"),
        ("0,1,0", "GPU 0 is named twice"),
        ("", "write all, or numbers like 0,2"),
        ("0,", "write all"),
        ("-1", "write all"),
        ("1_0", "write all"),
        ("٠", "write all"),
        ("GPU-a; rm", "write all"),
        ("00", "there is no GPU 00"),
    ],
)
def test_other_names_are_refused_in_a_sentence(wanted, says):
    with pytest.raises(ValueError) as refused:
        gpus.chosen(wanted, HERE)
    assert says in str(refused.value) and "\n" not in str(refused.value)


def test_without_a_gpu_every_name_is_refused():
    with pytest.raises(ValueError, match="this session has none"):
        gpus.chosen("all", [])


@pytest.fixture
def cards(monkeypatch):
    """Three GPUs as torch lists them, the second too old for Triton."""
    made = [
        types.SimpleNamespace(name=name, uuid=f"uuid-{number}", major=major, minor=0)
        for number, (name, major) in enumerate([("H200", 9), ("T4", 7), ("L4", 8)])
    ]
    monkeypatch.setattr(device, "has_gpu", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(made))
    monkeypatch.setattr(torch.cuda, "get_device_properties", made.__getitem__)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda number: made[number].name)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_gpus_are_found_by_their_uuid_and_old_ones_are_left_out(cards):
    assert gpus.found() == [Gpu(0, "H200", "GPU-uuid-0"), Gpu(2, "L4", "GPU-uuid-2")]


def test_numbers_of_an_outer_variable_change_nothing_in_the_uuids(cards, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1,2")  # torch then lists these three
    assert [gpu.visible for gpu in gpus.found()] == ["GPU-uuid-0", "GPU-uuid-2"]


def test_slices_of_a_gpu_are_taken_as_they_are_named(cards, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-x, MIG-y")
    assert gpus.found() == [Gpu(0, "H200", "MIG-x"), Gpu(1, "H200", "MIG-y")]


def test_without_a_gpu_none_is_found(monkeypatch):
    monkeypatch.setattr(device, "has_gpu", lambda: False)
    assert gpus.found() == []
