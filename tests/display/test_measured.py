"""A number knows where it is from, and two of different origin do not mix."""

import math

from labkit.display import say
from labkit.display.table import MISSING, Measured


def test_what_nobody_measured_is_missing_and_so_is_what_is_computed_from_it():
    for nothing in (MISSING, 2 / (1 + MISSING) * 3, MISSING["any"]["entry"]):
        assert math.isnan(float(nothing)) and nothing.device == ""


def test_figures_of_one_origin_compute_and_those_of_two_do_not_mix():
    here, there = Measured(6.0, "live", "gpu"), Measured(2.0, "recorded", "gpu")
    assert (here - here / 2) * 2 == here and 12 / here == Measured(2.0, "live", "gpu")
    assert f"{here:.1f} {MISSING:.0f}" == "6.0 nan" and round(float(here)) == 6
    for mixed in (here / there, here + there, here - Measured(2.0, "live", "another")):
        assert math.isnan(float(mixed)) and mixed.device == ""


def test_what_was_counted_is_a_number_like_any_other():
    assert isinstance(float(Measured(2, "live", "gpu")), float) and float(Measured(2, "live", "gpu")) == 2.0


def test_a_guess_is_told_how_far_off_it_was_and_to_which_side(capsys):
    asked = say.Guess("How many?", 1, 100, "x")
    for sealed, told in ((2.0, "4 times too low"), (24.0, "3 times too high"), (7.0, "That is close")):
        asked.sealed = sealed
        asked.answer(8.0)
        assert told in capsys.readouterr().out
