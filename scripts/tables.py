# SPDX-License-Identifier: Apache-2.0
"""Intervals, tests and Markdown tables of the evaluations."""

import math
import statistics

import torch

DRAWS = 10_000  # of the bootstrap


def wilson(share: float, n: int) -> tuple[float, float]:
    """The 95 % interval of a share of n, by Wilson's score."""
    z = statistics.NormalDist().inv_cdf(0.975)
    centre = share + z * z / (2 * n)
    spread = z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    scale = 1 + z * z / n
    return max(0.0, (centre - spread) / scale), min(1.0, (centre + spread) / scale)


def bootstrap(values: list[float]) -> tuple[float, float]:
    """The 95 % interval of a mean: percentiles of the means of DRAWS samples, always the same."""
    generator = torch.Generator().manual_seed(0)
    chosen = torch.randint(len(values), (DRAWS, len(values)), generator=generator)
    means = torch.tensor(values, dtype=torch.float64)[chosen].mean(1)
    low, high = means.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return low, high


def t_interval(values: list[float]) -> tuple[float, float]:
    """The 95 % interval of a mean by Student's t: few values make a bootstrap too sure of itself.

    The quantile is Fisher and Cornish's expansion about the normal one. Of a single value nothing
    is known.
    """
    mean, dof = statistics.mean(values), len(values) - 1
    if dof == 0:
        return -math.inf, math.inf
    z = statistics.NormalDist().inv_cdf(0.975)
    t = z + (z**3 + z) / (4 * dof) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * dof**2)
    t += (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * dof**3)
    spread = t * statistics.stdev(values) / len(values) ** 0.5
    return mean - spread, mean + spread


def mcnemar(only_first: int, only_second: int) -> float:
    """The exact two-sided p of problems that only one of two solved, were both as likely."""
    n, fewer = only_first + only_second, min(only_first, only_second)
    return min(1.0, 2 * sum(math.comb(n, k) for k in range(fewer + 1)) / 2**n)


def markdown(titles: list[str], rows: list[list[str]]) -> str:
    lines = [titles, ["---"] * len(titles), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
