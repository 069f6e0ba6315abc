"""Learning-rate schedules against what their formulas give by hand."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import minidist as md
from minidist.errors import UsageError
from minidist.optim.schedules import Decay, PerEpoch, Piecewise, WarmUp


def test_piecewise_changes_just_at_its_times():
    schedule = Piecewise((0.3, 0.2, 0.02), (10, 25))
    assert [schedule(time) for time in (0, 9.99, 10, 24.99, 25, 1e9)] == [
        *(0.3, 0.3),
        *(0.2, 0.2),
        *(0.02, 0.02),
    ]
    assert Piecewise((0.5,), ())(123) == 0.5


def test_decay_is_a_staircase_with_a_floor():
    schedule = Decay(0.8, every=2, factor=0.5)
    assert [schedule(time) for time in (0, 1.9, 2, 3.9, 4, 10)] == [0.8, 0.8, 0.4, 0.4, 0.2, 0.025]
    floored = Decay(0.8, every=2, factor=0.5, minimum=0.3)
    assert [floored(time) for time in (0, 2, 4, 100)] == [0.8, 0.4, 0.3, 0.3]
    assert Decay(0.8, every=2, factor=0.5)(10**6) == 0, "a small number becomes 0, no error"


def test_a_warm_up_is_a_line_from_zero():
    schedule = WarmUp(Piecewise((0.4, 0.1), (6,)), 4)
    assert [schedule(time) for time in (0, 1, 2, 3, 4, 5, 6)] == pytest.approx(
        [0, 0.1, 0.2, 0.3, 0.4, 0.4, 0.1]
    )
    decaying = WarmUp(Decay(0.4, every=2, factor=0.5), 4)
    assert [decaying(time) for time in (3, 4)] == pytest.approx([0.3, 0.1])


@pytest.mark.parametrize("tenths", range(1, 40))
def test_tenths_of_an_epoch_are_whole_steps(tenths):
    """As decimal fractions; in binary 0.3 / 0.1 is below 3."""
    epoch = float(f"{tenths / 10:.1f}")
    changed = PerEpoch(Piecewise((1.0, 0.0), (epoch,)), 10)
    assert [changed(tenths - 1), changed(tenths)] == [1, 0]
    fallen = PerEpoch(Decay(1.0, epoch, 0.5), 10)
    assert [fallen(3 * tenths - 1), fallen(3 * tenths)] == [0.25, 0.125]
    risen = PerEpoch(WarmUp(Piecewise((1.0,), ()), epoch), 10)
    assert [risen(step) for step in range(tenths)] == [
        float(Fraction(step, tenths)) for step in range(tenths)
    ]
    assert risen(tenths) == 1


@given(st.lists(st.floats(0, 1e6), unique=True).map(sorted), st.data())
def test_a_piecewise_schedule_survives_its_text(times, data):
    count = len(times) + 1
    rates = data.draw(st.lists(st.floats(0, 10), min_size=count, max_size=count))
    schedule = Piecewise(tuple(rates), tuple(times))
    assert Piecewise.parse(str(schedule)) == schedule


@pytest.mark.parametrize(
    "make",
    [
        lambda: Piecewise((0.1,), (1.0,)),
        lambda: Piecewise((0.1, 0.2, 0.3), (2.0, 2.0)),
        lambda: Piecewise((-0.1,), ()),
        lambda: Piecewise((float("nan"),), ()),
        lambda: Decay(0.1, 0, 0.5),
        lambda: Decay(0.1, 1, 1.5),
        lambda: Decay(0.1, 1, float("nan")),
        lambda: Decay(-0.1, 1, 0.5),
        lambda: WarmUp(Piecewise((0.1,), ()), 0),
        lambda: PerEpoch(Piecewise((0.1,), ()), 0),
    ],
)
def test_numbers_that_make_no_schedule_are_refused(make):
    with pytest.raises(UsageError):
        make()


@pytest.mark.parametrize(
    "text", ["", ";", "0.1;2", "0.1;two;0.2", "-1", "0.1;5;0.2;5;0.3", "0.1;5;0.2;4;0.3", "nan"]
)
def test_malformed_text_is_answered_with_the_form(text):
    with pytest.raises(UsageError, match=r"'.*' is not .*0\.02;10;0\.01;15;0\.005"):
        Piecewise.parse(text)


def test_an_optimizer_takes_a_schedule_as_its_rate():
    """w −= lr(t)·1 with rates 0, ½, 1, 1 and then ¼."""
    schedule = PerEpoch(WarmUp(Piecewise((1.0, 0.25), (2,)), 1), steps_per_epoch=2)
    optimizer = md.optim.SGD(schedule)
    variable = md.Variable(np.float32(0), name="w")
    for _ in range(5):
        optimizer.apply_gradients([(md.constant(np.float32(1)), variable)])
    assert float(variable) == -(0 + 0.5 + 1 + 1 + 0.25)
