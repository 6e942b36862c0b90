# SPDX-License-Identifier: Apache-2.0
"""Find the two bands of a model: which blocks' change goes with importance, and which against it.

    python scripts/calibrate.py --labels labels --traces FILE.jsonl --output calibration.json

The labels are those of `label_importance.py`, the traces those they were made from. For every block
l the change g_l(t) = ||h_l(t) - h_l(t-1)||_2 is correlated (Spearman) with the labels, within each
trace and pooled over all: raw, as a rolling mean, and as the z-score that the policies use. Bands
are chosen on one half of the problems and checked on the other: the verdict is about those traces
alone. Circular shifts of the labels against the signals, which keep what neighbours have in common,
say how large a correlation chance gives.

Writes a small JSON with the bands, their weights and the evidence, and a plot.
"""

import argparse
import json
import math
import statistics
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from epikv import (  # noqa: E402
    CacheShape,
    EvictionConfig,
    RollingWindow,
    rolling_mean,
    rolling_zscore,
    upcast,
)
from fidelity import tokenize_trace  # noqa: E402
from generate import ArgumentParser, full_budget  # noqa: E402
from label_importance import CHUNK, SharedPrefix  # noqa: E402
from model import Transformer  # noqa: E402
from plots import line_plot, need_matplotlib  # noqa: E402
from records import read_lines, read_records, told_in_one_line  # noqa: E402
from replay import add_model, check_numbers, describe, load_model  # noqa: E402
from tables import t_interval  # noqa: E402

N_SHIFTS = 999


# Correlation -----------------------------------------------------------------------------------


def ranks(x: Tensor) -> Tensor:
    """Ranks of x [N, ...] along the first axis from 0, ties at their mean rank. float64"""
    order = x.double().argsort(dim=0)
    in_order = x.double().gather(0, order)
    same = in_order[1:] == in_order[:-1]
    group = torch.cat([torch.zeros_like(same[:1], dtype=torch.int64), (~same).cumsum(0)])
    place = torch.arange(len(x), dtype=torch.float64).view(-1, *[1] * (x.dim() - 1))
    zeros = torch.zeros_like(in_order)
    total = zeros.scatter_add(0, group, place.expand_as(in_order).contiguous())
    count = zeros.scatter_add(0, group, torch.ones_like(in_order))
    mean = (total / count.clamp(min=1)).gather(0, group)
    return torch.zeros_like(mean).scatter(0, order, mean)


def standardised(x: Tensor) -> Tensor:
    """Ranks of x [N, ...] with mean 0 and a sum of squares of 1; zeros if all are equal."""
    centred = ranks(x) - (len(x) - 1) / 2
    norm = torch.linalg.vector_norm(centred, dim=0, keepdim=True)
    return torch.where(norm > 0, centred / norm.clamp(min=1e-300), 0)


def spearman(x: Tensor, y: Tensor) -> Tensor:
    """Rank correlation of x [N, ...] with y [N]. [...]"""
    return (standardised(x) * standardised(y).view(-1, *[1] * (x.dim() - 1))).sum(0)


def shifted(y: Tensor, n_shifts: int, seed: int) -> Tensor:
    """y [N] rotated by random numbers of tokens, at least a tenth of N. [N, n_shifts]"""
    n = len(y)
    generator = torch.Generator().manual_seed(seed)
    shifts = torch.randint(n // 10, n - n // 10, (n_shifts,), generator=generator)
    return y[(torch.arange(n)[:, None] + shifts) % n]


@dataclass
class Evidence:
    """What a set of traces says on a signal of C channels.

    by_trace: [traces, C] correlation within each trace. pooled: [C] over all tokens. p: the share
    of shifted labels whose largest absolute mean correlation over the channels is as large.
    """

    by_trace: Tensor
    pooled: Tensor
    p: float

    @property
    def mean(self) -> Tensor:
        return self.by_trace.mean(0)

    def interval(self, channel: int) -> tuple[float, float]:
        """Of the mean over traces, 95 %."""
        return t_interval(self.by_trace[:, channel].tolist())

    def as_dict(self) -> dict:
        intervals = [self.interval(channel) for channel in range(self.by_trace.shape[1])]
        return {
            "within_trace": self.mean.tolist(),
            "low": [low for low, _ in intervals],
            "high": [high for _, high in intervals],
            "pooled": self.pooled.tolist(),
            "p": self.p,
        }


def correlate(signals: list[Tensor], labels: list[Tensor], seed: int = 0) -> Evidence:
    """signals: of each trace [N, C]. labels: of each trace [N]."""
    by_trace = torch.stack([spearman(x, y) for x, y in zip(signals, labels, strict=True)])
    chance = torch.stack(
        [
            standardised(x).T @ standardised(shifted(y, N_SHIFTS, seed + i))
            for i, (x, y) in enumerate(zip(signals, labels, strict=True))
        ]
    )  # [traces, C, shifts]
    largest = chance.mean(0).abs().amax(0)  # of as many channels, by chance
    found = by_trace.mean(0).abs().amax()
    p = (1 + (largest >= found).sum().item()) / (1 + N_SHIFTS)
    return Evidence(by_trace, spearman(torch.cat(signals), torch.cat(labels)), p)


# Bands -----------------------------------------------------------------------------------------


def peak_band(values: list[float]) -> list[int]:
    """The largest value's index and its neighbours, as far as all are at least half as large."""
    peak = max(range(len(values)), key=values.__getitem__)
    first = last = peak
    while first > 0 and values[first - 1] >= values[peak] / 2 > 0:
        first -= 1
    while last + 1 < len(values) and values[last + 1] >= values[peak] / 2 > 0:
        last += 1
    return [*range(first, last + 1)]


@dataclass
class Bands:
    """The blocks that speak for a token, those that speak against it, and weights up to 1."""

    band_a: list[int]
    band_b: list[int]
    weight_a: float
    weight_b: float


def choose_bands(correlation: list[float]) -> Bands:
    """The band of the largest correlation, and that of the most negative one.

    A weight is the band's mean correlation, over the larger of the two; a band of the wrong sign
    weighs nothing.
    """
    band_a, band_b = peak_band(correlation), peak_band([-rho for rho in correlation])
    strengths = [
        max(0.0, statistics.mean(correlation[block] for block in band_a)),
        max(0.0, -statistics.mean(correlation[block] for block in band_b)),
    ]
    largest = max(strengths) or 1.0
    return Bands(band_a, band_b, strengths[0] / largest, strengths[1] / largest)


def band_score(change: Tensor, bands: Bands, window: int) -> Tensor:
    """What the policy with these bands gives each token, from g [N, L]. [N, 1]"""
    means = [change[:, band].mean(1) for band in (bands.band_a, bands.band_b)]
    z = over_window(torch.stack(means, dim=1), window, rolling_zscore)
    return (bands.weight_a * z[:, 0] - bands.weight_b * z[:, 1])[:, None]


def over_window(change: Tensor, window: int, statistic) -> Tensor:
    """A rolling statistic of the cache's own over the tokens of g [N, C]. [N, C]"""
    n_tokens, channels = change.shape
    shape = CacheShape(1, 1, 1, 1, dtype=change.dtype)
    windows = RollingWindow(window, channels, shape)
    return statistic(*windows(change[None], torch.arange(1, n_tokens + 1)[None]))[0]


def verdict(evidence: Evidence) -> tuple[bool, str]:
    """Whether the bands' score goes with importance on traces that did not choose them."""
    mean, (low, high) = evidence.mean[0].item(), evidence.interval(0)
    reliable = low > 0 and evidence.p < 0.05
    words = "a reliable signal" if reliable else "no reliable signal"
    return reliable, (
        f"{words}: on held-out traces the score's correlation with importance is {mean:+.3f}"
        f" (95 % interval {low:+.3f} to {high:+.3f}, {len(evidence.by_trace)} traces,"
        f" p = {evidence.p:.3f})"
    )


def halves(groups: list[str]) -> tuple[list[int], list[int]]:
    """Indices of two halves of the traces, of which no group (a problem) is in both."""
    names = list(dict.fromkeys(groups))
    first = {*names[::2]}
    return (
        [i for i, group in enumerate(groups) if group in first],
        [i for i, group in enumerate(groups) if group not in first],
    )


# A model's signals -----------------------------------------------------------------------------


@torch.no_grad()
def read_changes(model: Transformer, tokens: list[int]) -> Tensor:
    """g_l(t) of every token and block, 0 for the first token. [N, L] float32"""
    n_layers = model.config.n_layers
    cache = model.new_cache(EvictionConfig(full_budget(len(tokens)), "full"))
    changes, before, start = [], None, 0
    for chunk in torch.tensor(tokens, device=model.device).split(CHUNK):
        prefix = SharedPrefix(cache, start, n_rows=1)
        prefix.reads = range(n_layers)
        position = torch.arange(start, start + len(chunk), device=model.device)[None]
        _, residuals, k, v = model(chunk[None], position, prefix, n_cached=start)
        cache.admit(k, v, [])
        h = upcast(torch.stack([residual[0] for residual in residuals], dim=1))  # [T, L, hidden]
        before = h[:1] if before is None else before
        changes.append(torch.linalg.vector_norm(h - torch.cat([before, h[:-1]]), dim=-1).cpu())
        before, start = h[-1:], start + len(chunk)
    return torch.cat(changes)


def read_data(
    model: Transformer, records: list[dict], labels: dict[str, dict]
) -> tuple[list[Tensor], list[Tensor], list[str]]:
    """Of each trace with labels: changes [N, L], labels [N], NaN where there is none, prompt."""
    changes, values, prompts = [], [], []
    for record in records:
        if record["id"] not in labels:
            continue
        trace = tokenize_trace(record, model.tokenizer)
        label = labels[record["id"]]["loss"]
        tokens = trace.prompt + trace.tokens[: len(label)]
        changes.append(read_changes(model, tokens)[len(trace.prompt) :])
        values.append(torch.tensor([math.nan if x is None else x for x in label]))
        prompts.append(record["prompt"])
    return changes, values, prompts


def labelled(signals: list[Tensor], labels: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Both without the tokens that have no label."""
    known = [~label.isnan() for label in labels]
    return (
        [signal[mask] for signal, mask in zip(signals, known, strict=True)],
        [label[mask] for label, mask in zip(labels, known, strict=True)],
    )


def calibrate(changes: list[Tensor], labels: list[Tensor], prompts: list[str], window: int) -> dict:
    """Bands from one half of the problems, the verdict of the other, and all correlations."""
    signals = {
        "raw": changes,
        "rolling mean": [over_window(change, window, rolling_mean) for change in changes],
        "z-score": [over_window(change, window, rolling_zscore) for change in changes],
    }
    first, second = halves(prompts)
    if not second:
        raise ValueError(
            "the traces are all on one problem; two are needed, to choose and to check"
        )
    chosen = correlate(
        *labelled([signals["z-score"][i] for i in first], [labels[i] for i in first])
    )
    bands = choose_bands(chosen.mean.tolist())
    scores = [band_score(changes[i], bands, window) for i in second]
    reliable, words = verdict(correlate(*labelled(scores, [labels[i] for i in second])))
    found = {name: correlate(*labelled(signal, labels)) for name, signal in signals.items()}
    return asdict(bands) | {
        "window": window,
        "reliable": reliable,
        "verdict": words,
        "traces": {"chosen_on": len(first), "checked_on": len(second)},
        "correlation": {name: evidence.as_dict() for name, evidence in found.items()},
    }


def plot(result: dict, path: Path) -> None:
    """The correlation of every block, within traces, with the bands shaded."""
    series = {}
    for name, evidence in result["correlation"].items():
        columns = (evidence["within_trace"], evidence["low"], evidence["high"])
        series[name] = [(block, *values) for block, values in enumerate(zip(*columns, strict=True))]
    shaded = {
        name: (result[key][0] - 0.5, result[key][-1] + 0.5)
        for name, key in (("for", "band_a"), ("against", "band_b"))
    }
    title = "Change after each block against importance, mean over traces, 95 % interval"
    line_plot(path, title, "block", "Spearman correlation", series, shaded=shaded)


def make_parser() -> argparse.ArgumentParser:
    parser = ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--labels", type=Path, required=True, help="output folder of label_importance.py")
    add("--traces", type=Path, required=True, help="JSON lines: id, prompt, trace")
    add_model(parser)
    add("--filler", default="drop", help="of the labels (default: drop)")
    add("--window", type=int, default=64, help="tokens in a score's statistics (default: 64)")
    add("--output", type=Path, default=Path("calibration.json"), help="default: calibration.json")
    return parser


def main() -> None:
    parser = make_parser()
    args = parser.parse_args()
    with told_in_one_line(parser):
        need_matplotlib()
        check_numbers(args, "window")
        records = read_records(args.traces, dict.fromkeys(("id", "prompt", "trace"), str))
        labels = {
            record["trace"]: record
            for record in read_lines(args.labels, "records")
            if record["filler"] == args.filler and "loss" in record
        }
        if not labels:
            raise ValueError(f"{args.labels} has no losses for filler {args.filler!r}")
        model = load_model(args)
        result = calibrate(*read_data(model, records, labels), args.window)
        described = describe(args, model) | {"n_layers": model.config.n_layers}
        text = json.dumps(described | result, indent=1) + "\n"
        args.output.write_text(text, encoding="utf-8")
        plot(result, args.output.with_suffix(".png"))
        print(result["verdict"])


if __name__ == "__main__":
    main()
