"""Bars: values, kinds, whiskers and floors; a logarithmic axis where one is due; stacks."""

import pytest
from drawn import assert_apart, layers, of_gid, row, texts
from matplotlib.colors import to_hex

from labkit import plots
from labkit.measure import rows

PARTS = {"traffic": "bytes", "launches": "waiting for the host"}


def mixed():
    posted = {"kind": "published", "source": "A blog", "p20_us": None, "p80_us": None}
    ours = [row("labkit", 1024, 33.3), row("labkit", 1024, 31.3, kind="recorded")]
    others = [row("nn.Linear", 1024, 102.0), *ours, row("Liger", 1024, 92.8, **posted)]
    return rows.as_results(
        [*others, row("a name that goes on and on", 1024, None, note="out of memory " * 20)]
    )


def test_bars_print_values_kinds_and_floors_and_say_it_in_words():
    shown = plots.bars(mixed(), title="t", floor={"copy": "copy_us"})
    said = texts(shown)
    assert {"102 µs", "33.3 µs", "31.3 µs", "92.8 µs", "labkit (recorded)", "Liger (published)"} <= set(said)
    assert "time per call (lower is better)" in said and any("× out of memory" in text for text in said)
    looks = [(bar.get_linestyle(), bar.get_facecolor()) for bar in of_gid(shown, "bar")]
    assert len(looks) == 4 and len(set(looks)) == 4
    assert_apart(of_gid(shown, "label", "value", "gap"), shown)
    assert "nn.Linear 102 µs, labkit 33.3 µs, labkit (recorded) 31.3 µs" in shown.alt
    assert "none (out of memory" in shown.alt
    assert "graph clock" in shown.alt and "copy" in said
    assert shown.figure.axes[0].get_xlim()[0] == 0


@pytest.mark.parametrize(
    ("most", "linear", "scale"), [(99.0, False, "linear"), (101.0, False, "log"), (101.0, True, "linear")]
)
def test_more_than_a_decade_is_logarithmic_and_says_so(most, linear, scale):
    table = rows.as_results([row("eager", 64, most), row("labkit", 64, 10.0)])
    shown = plots.bars(table, title="t", linear=linear)
    assert shown.figure.axes[0].get_xscale() == scale
    assert ("logarithmic axis" in " ".join(texts(shown))) == (scale == "log") == ("logarithmic" in shown.alt)
    assert len(of_gid(shown, "live bar")) == 2


def test_bars_in_groups_of_other_values_and_of_nothing():
    table = rows.as_results([*layers(), *layers(dtype="fp32")])
    table = table[table["width"] == 1024].assign(share=[0.25, 0.5, 0.75, 1.0])
    shown = plots.bars(table, title="t", value="share", unit=" of copy", group="dtype")
    assert {"bf16", "fp32", "0.25 of copy", "1 of copy", "share (higher is better)"} <= set(texts(shown))
    assert "fp32: nn.Linear 0.75 of copy, labkit 1 of copy." in shown.alt
    assert "nothing measured yet" in plots.bars(rows.as_results([]), title="t", floor={"copy": "copy_us"}).alt
    with pytest.raises(ValueError, match="no column 'gone'"):
        plots.bars(table, title="t", value="gone")


def test_a_disturbed_bar_has_a_ring_and_a_footnote():
    table = rows.as_results([row("labkit", 64, 5.0, noise="spread above 30%"), row("nn.Linear", 64, 8.0)])
    shown = plots.bars(table, title="Bars")
    assert [said for said in texts(shown) if "◯" in said] == ["5 µs ◯", "◯ spread above 30%: labkit"]
    assert shown.alt.endswith("Disturbed: spread above 30%: labkit.")
    shown = plots.bars(table.assign(share=[0.5, 1.0]), title="Shares", value="share", unit="x")
    assert "0.5x ◯" in texts(shown) and "1x" in texts(shown)


def test_the_learners_kernel_stands_out():
    names = ("eager", "torch.compile", "labkit", "your kernel")
    shown = plots.bars(rows.as_results([row(name, 64, 5.0) for name in names]), title="t")
    assert len({to_hex(bar.get_facecolor()) for bar in of_gid(shown, "live bar")}) == 4
    bold = [label.get_text() for label in of_gid(shown, "label") if label.get_weight() == "bold"]
    assert bold == ["labkit", "your kernel"]


def ledger(**changes):
    table = rows.as_results([row("eager", 64, 5.0), row("labkit", 64, 5.0)])
    return table.assign(traffic=[20.0, 10.0], launches=[60.0, 0.0], wall=[81.0, 11.0], **changes)


def test_stacked_bars_add_up_and_show_the_total():
    shown = plots.stacked(ledger(), PARTS, total="wall", title="The ledger")
    first = [bar for bar in shown.figure.axes[0].patches if round(bar.get_y() + bar.get_height() / 2) == 0]
    assert [(bar.get_x(), bar.get_width()) for bar in first] == [(0, 20), (20, 60)]
    assert "eager: traffic 20 µs + launches 60 µs = 80 µs, wall 81 µs" in shown.alt
    assert "81 µs" in texts(shown)
    shown = plots.stacked(ledger(noise=["", "other work"]), PARTS, total="wall", title="t")
    assert [said for said in texts(shown) if "◯" in said] == ["11 µs ◯", "◯ other work: labkit"]
    assert shown.alt.endswith("Disturbed: other work: labkit.")
    recorded = plots.stacked(ledger(kind="recorded"), PARTS, total="wall", title="t").figure.axes[0].patches
    assert recorded[0].get_facecolor() != first[0].get_facecolor()


@pytest.mark.parametrize(
    ("table", "parts", "message"),
    [
        (ledger().iloc[:0], PARTS, "one device and kind, and are of 0"),
        (ledger().assign(traffic=-1.0), PARTS, "zero or more in every row"),
        (ledger().assign(kind=["live", "recorded"]), PARTS, "one device and kind, and are of 2"),
        (ledger(), {str(i): "" for i in range(7)}, "there are 7"),
        (ledger(), {"gone": ""}, "no column 'gone'"),
    ],
)
def test_stacked_bars_refuse(table, parts, message):
    with pytest.raises(ValueError, match=message):
        plots.stacked(table, parts, total="wall", title="t")
