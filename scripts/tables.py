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


def mcnemar(only_first: int, only_second: int) -> float:
    """The exact two-sided p of problems that only one of two solved, were both as likely."""
    n, fewer = only_first + only_second, min(only_first, only_second)
    return min(1.0, 2 * sum(math.comb(n, k) for k in range(fewer + 1)) / 2**n)


def markdown(titles: list[str], rows: list[list[str]]) -> str:
    lines = [titles, ["---"] * len(titles), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
