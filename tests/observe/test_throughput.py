"""Rates from a clock that the test moves."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moejax.observe.throughput import Throughput


class Clock:
    now = 1000.0

    def __call__(self):
        return self.now


def run(seconds, **options):
    """A run whose steps take `seconds`, one each; the first one is the compile."""
    clock = Clock()
    meter = Throughput(100.0, 6.0, len(seconds) + 10, clock=clock, **options)
    meter.start(0)
    for step, length in enumerate(seconds, 1):
        clock.now += length
        meter.finish(step)
    return meter, clock


def test_the_compile_step_does_not_count_and_alone_gives_no_rate():
    assert run([60.0])[0].rates() is None
    rates = run([60.0, 2.0, 2.0])[0].rates()
    assert rates == pytest.approx((2.0, 50.0, 300.0, 20.0))


@given(st.lists(st.sampled_from([1.0, 2.0, 4.0]), min_size=3, max_size=30))
def test_rates_are_those_of_the_median_step_in_the_window(lengths):
    meter, _ = run([99.0, *lengths], window=5)
    last = sorted(lengths[-5:])
    middle = (last[(len(last) - 1) // 2] + last[len(last) // 2]) / 2
    rates = meter.rates()
    assert rates.seconds_per_step == pytest.approx(middle)
    assert rates.tokens_per_s * rates.seconds_per_step == pytest.approx(100.0)
    assert rates.flops_per_s == pytest.approx(rates.tokens_per_s * 6.0)
    assert rates.seconds_left == pytest.approx(10 * middle)


def test_one_slow_step_moves_nothing():
    assert run([9.0, *[1.0] * 10, 500.0])[0].rates().seconds_per_step == pytest.approx(1.0)


def test_a_pause_does_not_count():
    meter, clock = run([9.0, 1.0])
    clock.now += 3600.0
    meter.start(2)
    clock.now += 3.0
    meter.finish(3)
    assert meter.rates().seconds_per_step == pytest.approx(2.0)


def test_steps_fetched_together_share_their_time():
    meter, clock = run([9.0])
    clock.now += 8.0
    meter.finish(5)
    assert meter.rates().seconds_per_step == pytest.approx(2.0)


def test_a_clock_that_stands_still_gives_no_infinity_and_past_the_end_nothing_is_left():
    meter, _ = run([0.0, 0.0])
    meter.total_steps = 1
    assert meter.rates().tokens_per_s < 1e12 and meter.rates().seconds_left == 0.0


def test_faults_of_the_caller_are_said():
    meter = Throughput(1.0, 1.0, 10, clock=Clock())
    with pytest.raises(ValueError, match="comes before"):
        meter.finish(1)
    meter.start(3)
    with pytest.raises(ValueError, match="cannot end after"):
        meter.finish(3)
