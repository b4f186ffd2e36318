"""The predicted speedup, by hand."""

from dataclasses import replace

import pytest

from masw.build.predicted_speedup import Latencies


@pytest.mark.parametrize(
    ("numbers", "speedup"),
    [
        ((2.0, 30.0, 3.0, 5), 4 * 30 / 40),
        ((2.0, 30.0, 3.0, 5, 24.0), 4 * 24 / 40),
        ((0.001, 30.0, 0.0, 5), 30 / 30.005),
    ],
)
def test_speedup_is_tokens_per_time_over_plain_decoding(numbers, speedup):
    assert Latencies(*numbers).speedup == pytest.approx(speedup)


def test_a_poor_pair_is_warned_about_and_breaks_even_where_it_says():
    poor = Latencies(draft=12.0, verify=30.0, accepted=2.0, draft_tokens=5)
    assert poor.speedup == pytest.approx(1.0)
    assert "1.00x is below 1.1x" in poor.warning and "67% of an iteration" in poor.warning
    assert replace(poor, accepted=poor.break_even).speedup == pytest.approx(1.0)
    assert Latencies(2.0, 30.0, 3.0, 5).warning is None


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ((0, 30, 2, 5), "draft is 0"),
        ((2, -1, 2, 5), "verify is -1"),
        ((2, 30, 6, 5), "accepted is 6; of 5 draft tokens 0 to 5"),
        ((2, 30, -1, 5), "accepted is -1"),
        ((2, 30, 0, 0), "draft_tokens is 0"),
        ((2, 30, 2, 5, 0), "decode is 0"),
        ((float("inf"), 30, 2, 5), "draft is inf"),
        ((2, float("nan"), 2, 5), "verify is nan"),
        ((2, 30, float("nan"), 5), "accepted is nan"),
        ((2, 30, 2, 5, float("inf")), "decode is inf"),
    ],
)
def test_impossible_latencies_are_refused(numbers, message):
    with pytest.raises(ValueError, match=message):
        Latencies(*numbers)
