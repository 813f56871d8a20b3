"""Variants in virtual time: which clock sees what, what a graph holds, what is profiled."""

import pytest
import torch
from simulated import DOUBLING, doubling, install

from labkit import paths
from labkit.measure import clocks, rows
from labkit.measure.contender import Contender
from labkit.profiling import profiles
from labkit.profiling.variants import CLOCKS, Variants, _without_graph, table

FULL, SMALL = {"batch": 2, "width": 64}, {"batch": 2, "width": 16}


@pytest.fixture(autouse=True)
def folders(tmp_path, monkeypatch):
    monkeypatch.setenv("LABKIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv(rows.TAPE, raising=False)
    monkeypatch.setattr(paths, "RECORDED", tmp_path / "recorded")


@pytest.fixture
def gpu(monkeypatch):
    return install(monkeypatch.setattr)


@pytest.fixture
def variants():
    return Variants("ledger", DOUBLING, FULL, SMALL, "float32")


def replayed(gpu, held):
    """A graph's launch besides, which would be seen if the clock captured it."""

    def call(x):
        gpu.launch(2.0, 64.0)
        return held(x)

    call.held = held
    return Contender("in a graph", call, DOUBLING)


def medians(found):
    return found.set_index("contender").median_us.to_dict()


def test_of_a_graph_the_graph_clock_captures_what_it_holds_and_the_copy_of_its_input(gpu, variants):
    plain = doubling(gpu)
    graphed = replayed(gpu, plain.call)
    found = variants.by_clock("first", plain, graphed)
    assert list(found) == list(CLOCKS)
    assert set(found["graph"].suite) == {"ledger/first"} and set(found["graph"].cache) == {"warm"}
    assert medians(found["graph"]) == {"labkit": 64.0, "in a graph": 64.0}
    assert gpu.log.count("capture") >= 2
    alone = variants.by_clock("second", graphed)["graph"]
    assert medians(alone) == {"in a graph": 64.0}, "not the 128 of replay and kernels"


def test_what_is_captured_in_place_of_a_graph_copies_the_input():
    given = []

    def held(x):
        given.append(x)
        return 2 * x

    def call(x):
        raise AssertionError("this is the graph's replay")

    call.held = held
    x = torch.ones(2, 4)
    assert torch.equal(_without_graph(Contender("graphed", call, DOUBLING)).call(x), 2 * x)
    assert torch.equal(given[0], x) and given[0].data_ptr() != x.data_ptr()


def test_the_table_has_a_row_for_each_variant_and_a_column_for_each_clock(gpu, variants, monkeypatch):
    slow, fast = doubling(gpu, "slow", 2.0), doubling(gpu, "fast", 1.0)
    shown = table(variants.by_clock("first", slow, fast)).data
    assert list(shown.index) == ["slow", "fast"] and list(shown.columns) == list(CLOCKS)
    assert shown.loc["slow", "graph"] == 128.0
    monkeypatch.setattr("labkit.gpu.available", lambda: False)
    assert table(variants.by_clock("first", doubling(None))).data.empty, "nothing is recorded"


def test_without_a_gpu_a_graph_is_profiled_by_what_it_holds_at_the_small_size(monkeypatch, variants):
    monkeypatch.setattr("labkit.gpu.available", lambda: False)
    widths = []

    def held(x):
        widths.append(x.shape[1])
        return 2 * x

    def call(x):
        raise AssertionError("there is no graph without a GPU")

    call.held = held
    found = variants.profiled(Contender("plain", held, DOUBLING), Contender("graphed", call, DOUBLING))
    assert list(found) == ["plain", "graphed"] and set(widths) == {16}
    assert [made.launches for made in found.values()] == [1, 1]


def test_on_a_gpu_what_is_profiled_is_the_variant_itself_at_full_size(monkeypatch, gpu, variants):
    ran = []
    monkeypatch.setattr(profiles, "profile", lambda call, tape: ran.append((tape, call().shape)))
    variants.profiled(replayed(gpu, lambda x: 3 * x))
    assert ran == [("ledger/in a graph", (2, 64))]
    assert clocks.DeviceTimer() is gpu
