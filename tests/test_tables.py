"""Intervals against published quantiles."""

import math
import statistics

import pytest

from tables import t_interval


@pytest.mark.parametrize("n, quantile", [(5, 2.776), (8, 2.365), (16, 2.131), (31, 2.042)])
def test_students_interval(n, quantile):
    """Quantiles of the usual tables at 97.5 % with n - 1 degrees of freedom."""
    values = [float(i * i) for i in range(n)]
    low, high = t_interval(values)
    assert (low + high) / 2 == pytest.approx(statistics.mean(values))
    spread = quantile * statistics.stdev(values) / math.sqrt(n)
    assert (high - low) / 2 == pytest.approx(spread, rel=6e-3)
