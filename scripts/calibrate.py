# SPDX-License-Identifier: Apache-2.0
"""Find what tells the importance of a model's tokens: two bands of blocks, and a linear score.

    python scripts/label_importance.py --traces FILE.jsonl --outcomes effect --delays 64,256
    python scripts/calibrate.py --labels labels --traces FILE.jsonl --output calibration.json
    python generate.py --policy epikv-fit --calibration calibration.json --prompt ...

The labels are those of `label_importance.py`, the traces those they were made from. For every block
l the change g_l(t) = ||h_l(t) - h_l(t-1)||_2 is correlated (Spearman) with the labels, within each
trace and pooled over all: raw, as a rolling mean, and as the z-score that the policies use; bands
are where it is largest and lowest. The score of the policy `epikv-fit` is, for each head, a ridge
regression of a token's effect on what the head's later queries do (as the outcome `effect`, at the
labels' delays) on its features; then, of several weights of a token's age, and of several recency
windows, those are taken under which replayed traces lose least (see `fidelity.py`).

All is chosen on one half of the problems and checked on the other: the verdicts are about those
traces alone, and --held-out writes them to a file, to go on with in `fidelity.py`. Circular shifts
of the labels against the signals, which keep what neighbours have in common, say how large a
correlation chance gives.

Writes a small JSON with bands, weights and evidence, and a plot.
"""

import argparse
import json
import math
import statistics
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from epikv import (  # noqa: E402
    CacheShape,
    Calibration,
    EvictionConfig,
    FitWeights,
    RollingWindow,
    Tokens,
    rolling_mean,
    rolling_zscore,
    upcast,
)
from fidelity import replay, tokenize_trace  # noqa: E402
from generate import ArgumentParser, full_budget  # noqa: E402
from label_importance import OUTCOMES, SharedPrefix, head_effects, read_chunks  # noqa: E402
from model import Transformer  # noqa: E402
from plots import line_plot, need_matplotlib  # noqa: E402
from records import check_output, read_lines, read_records, told_in_one_line  # noqa: E402
from replay import Trace, add_model, check_numbers, describe, load_model  # noqa: E402
from tables import t_interval  # noqa: E402

N_SHIFTS = 999
AGES = (0.0, -0.5, -1.0, -1.5, -2.0, -3.0)  # weights of log(1 + age); a score's deviation is 1
RECENTS = (0.25, 0.125, 0.375, 0.5, 0.625, 0.75)  # shares of the budget, the first until tuned
N_SUMS = 16  # that the scores of all heads are mixtures of: fewer tell less, more tell little more
N_PARTS = 4  # of the problems, to choose a ridge
STRENGTHS = (1e-4, 1e-3, 1e-2, 1e-1, 1.0)  # of a ridge, beside the variance of a feature


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


def columnwise(x: Tensor, y: Tensor) -> Tensor:
    """Rank correlation of each column of x [N, C] with that of y [N, C]. [C]"""
    return (standardised(x) * standardised(y)).sum(0)


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
    return difference(over_window(band_means(change, bands), window, rolling_zscore), bands)


def band_means(change: Tensor, bands: Bands) -> Tensor:
    """[N, 2]"""
    return torch.stack([change[:, band].mean(1) for band in (bands.band_a, bands.band_b)], dim=1)


def difference(x: Tensor, bands: Bands) -> Tensor:
    """[N, 1] of the two bands' x [N, 2]."""
    return x @ torch.tensor([[bands.weight_a], [-bands.weight_b]], dtype=x.dtype)


def trend(scores: list[Tensor]) -> float:
    """Correlation of scores [N, 1] with position, mean over texts."""
    return statistics.mean(
        spearman(score, torch.arange(len(score)).double()).item() for score in scores
    )


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


# Fit -------------------------------------------------------------------------------------------


@dataclass
class Text:
    """A labelled trace of N tokens.

    prompt: the problem. changes: [N, L]. features: [N, 6 L]. labels: [N], NaN where there is none.
    effects: for each delay, on later queries of each head, [N, L, H_kv], NaN likewise.
    """

    trace: Trace
    prompt: str
    changes: Tensor
    features: Tensor
    labels: Tensor
    effects: Tensor


def regression(text: Text) -> tuple[Tensor, Tensor]:
    """What to tell from what: x [M, 6 L] and y [M, L H_kv], M tokens and delays with labels.

    Features, and the fourth roots of the effects, which span orders of magnitude, with a deviation
    of 1; both less their means in the trace at that delay.
    """
    rows, roots = [], []
    for effects in text.effects:
        known = ~effects.isnan().flatten(1).any(1)
        x, y = text.features[known].double(), effects[known].flatten(1).double() ** 0.25
        if len(x) < 2:
            continue
        rows.append(x - x.mean(0))
        roots.append((y - y.mean(0)) / y.std(0).clamp(min=1e-300))
    return torch.cat(rows), torch.cat(roots)


def ridge(data: list[tuple[Tensor, Tensor]], columns: Tensor, strength: float) -> Tensor:
    """Weights [F, H] of the features; 0 for those that are not among `columns` or never change."""
    x, y = (torch.cat(parts) for parts in zip(*data, strict=True))
    deviation = x.std(0)
    used = columns & (deviation > 0)
    x = x[:, used] / deviation[used]
    penalty = strength * len(x) * torch.eye(x.shape[1], dtype=x.dtype)
    weights = torch.zeros(len(deviation), y.shape[1], dtype=x.dtype)
    weights[used] = torch.linalg.solve(x.T @ x + penalty, x.T @ y) / deviation[used, None]
    return weights


def choose_ridge(texts: list[Text], columns: Tensor) -> Tensor:
    """A ridge whose strength tells best those problems that it has not seen, of four parts."""
    data = [regression(text) for text in texts]
    problems = list(dict.fromkeys(text.prompt for text in texts))
    parts = [problems.index(text.prompt) % N_PARTS for text in texts]

    def held_out(strength: float) -> float:
        found = []
        for part in {*parts}:
            known = [one for one, of in zip(data, parts, strict=True) if of != part]
            weights = ridge(known, columns, strength)
            unknown = [one for one, of in zip(data, parts, strict=True) if of == part]
            found += [columnwise(x @ weights, y).mean().item() for x, y in unknown]
        return statistics.mean(found)

    strength = max(STRENGTHS, key=held_out) if len({*parts}) > 1 else STRENGTHS[-1]
    return ridge(data, columns, strength)


def fit(texts: list[Text], columns: Tensor) -> FitWeights:
    """The score of each head, with a deviation of 1, by way of at most N_SUMS sums. No age yet.

    The sums are those that lose the least of the ridge's scores (reduced-rank regression).
    """
    weights = choose_ridge(texts, columns)  # [6 L, L H_kv]
    x = torch.cat([text.features for text in texts]).double()
    scores = (x - x.mean(0)) @ weights
    by_head = torch.linalg.svd(scores, full_matrices=False).Vh[:N_SUMS]  # [R, L H_kv]
    sums = weights @ by_head.T  # [6 L, R]
    deviation = (x @ sums @ by_head).std(0)
    # A head on which nothing ever had an effect scores nothing, not its rounding errors.
    by_head = by_head / torch.where(deviation > 1e-9 * deviation.max(), deviation, torch.inf)
    n_layers = texts[0].changes.shape[1]
    by_feature = sums.T.unflatten(1, (6, n_layers)).transpose(0, 1)  # [6, R, L]
    heads = by_head.unflatten(1, (n_layers, -1))
    return FitWeights(
        *map(rounded, by_feature.tolist()), heads=rounded(heads.tolist()), log_age=0.0
    )


def head_scores(text: Text, fit: FitWeights) -> Tensor:
    """[N, L H_kv] float64, without age."""
    by_feature, by_head = fit.tensors(torch.float64)
    return text.features.double() @ by_feature.flatten(1).T @ by_head.flatten(1)


def head_correlation(texts: list[Text], fit: FitWeights) -> tuple[float, float, float]:
    """Of each head's scores and near effects, mean over heads: mean and 95 % interval over texts.

    The effects are those of the shortest delay.
    """
    found = []
    for text in texts:
        effects = text.effects[0].flatten(1)
        known = ~effects.isnan().any(1)
        found.append(columnwise(head_scores(text, fit)[known], effects[known]).mean().item())
    return statistics.mean(found), *t_interval(found)


def tune(
    model: Transformer, texts: list[Text], calibration: Calibration, budget: int
) -> tuple[Calibration, dict]:
    """The calibration with the best weight of age, then with the best recency window.

    Also the loss gaps [nats] under each of them, by name. Replayed are the traces as long as their
    median, so many tokens of each.
    """
    n_tokens = statistics.median_high(len(text.trace.tokens) for text in texts)
    traces = [text.trace for text in texts if len(text.trace.tokens) >= n_tokens]
    traces = [replace(trace, tokens=trace.tokens[:n_tokens]) for trace in traces]
    if budget >= n_tokens:
        raise ValueError(f"budget {budget} holds the traces' {n_tokens} tokens; lower it")
    aged = {age: replace(calibration, fit=replace(calibration.fit, log_age=age)) for age in AGES}
    calibration, by_age = least_loss(model, traces, aged, budget)
    windowed = {recent: replace(calibration, recent=recent) for recent in RECENTS}
    calibration, by_recent = least_loss(model, traces, windowed, budget)
    return calibration, {"age": by_age, "recent": by_recent}


def least_loss(
    model: Transformer, traces: list[Trace], candidates: dict[float, Calibration], budget: int
) -> tuple[Calibration, dict[float, float]]:
    """The candidate under which the traces lose least, and the loss gap [nats] under each."""
    configs = {
        value: EvictionConfig(budget, "epikv-fit", calibration=calibration)
        for value, calibration in candidates.items()
    }
    found = replay(model, traces, configs, compile_mode="none")
    gaps = {value: rounded(values[0].mean().item()) for value, values in found.items()}
    return candidates[min(gaps, key=gaps.__getitem__)], gaps


def rounded(x):
    """Numbers to four digits, lists to tuples of such."""
    return tuple(map(rounded, x)) if isinstance(x, list) else float(f"{x:.4g}")


# A model's signals -----------------------------------------------------------------------------


@torch.no_grad()
def read_signals(model: Transformer, tokens: list[int], window: int) -> tuple[Tensor, Tensor]:
    """Of every token g_l(t) of each block, 0 for the first one, and the features of `epikv-fit`.

    [N, L] and [N, 6 L] float32.
    """
    n_layers = model.config.n_layers
    cache = model.new_cache(EvictionConfig(full_budget(len(tokens)), "full"))
    zeros = [((0.0,) * n_layers,)] * 6
    by_head = (((0.0,) * model.config.n_kv_heads,) * n_layers,)
    weights = FitWeights(*zeros, heads=by_head, log_age=0.0)
    nothing = Calibration(n_layers, window, (0,), (0,), 0.0, 0.0, weights, 0.0)
    policy = model.new_cache(EvictionConfig(64, "epikv-fit", calibration=nothing)).policy

    def view(start: int) -> SharedPrefix:
        return SharedPrefix(cache, start, n_rows=1, reads=range(n_layers))

    changes, features, before = [], [], None
    for start, _, residuals, k, v in read_chunks(model, cache, tokens, view):
        h = upcast(torch.stack(residuals, dim=2))  # [1, T, L, hidden]
        before = h[:, :1] if before is None else before
        change = torch.linalg.vector_norm(h - torch.cat([before, h[:, :-1]], dim=1), dim=-1)
        before = h[:, -1:]
        position = torch.arange(start, start + h.shape[1], device=h.device)[None]
        seen = Tokens(position, change, torch.stack(k, 1), torch.stack(v, 1))
        changes.append(change[0].cpu())
        features.append(policy.features(seen)[0].cpu())
    return torch.cat(changes), torch.cat(features)


def read_texts(
    model: Transformer, records: list[dict], labels: dict[str, dict[int, list]], window: int
) -> list[Text]:
    """The traces that have labels and effects, of which those at the shortest delay count.

    One that is too short to have more than one such token is left out.
    """
    texts = []
    for record in records:
        if record["id"] not in labels:
            continue
        whole = tokenize_trace(record, model.tokenizer)
        by_delay = labels[record["id"]]
        near = [math.nan if x is None else x for x in by_delay[min(by_delay)]]
        if len(near) > len(whole.tokens):
            raise ValueError(f"trace {record['id']!r} has fewer tokens than labels: other traces?")
        trace = replace(whole, tokens=whole.tokens[: len(near)])
        tokens, begin = trace.prompt + trace.tokens, len(trace.prompt)
        changes, features = (signal[begin:] for signal in read_signals(model, tokens, window))
        effects = head_effects(model, tokens, sorted(by_delay))[:, begin:].cpu()
        near = torch.tensor(near, dtype=torch.float64)
        known = (~near.isnan()).sum(), (~effects[0, :, 0, 0].isnan()).sum()
        if min(known) < 2:
            continue
        texts.append(Text(trace, record["prompt"], changes, features, near, effects))
        print(f"{len(texts)} of {len(labels)} traces read", file=sys.stderr)
    return texts


def labelled(signals: list[Tensor], labels: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Both without the tokens that have no label."""
    known = [~label.isnan() for label in labels]
    return (
        [signal[mask] for signal, mask in zip(signals, known, strict=True)],
        [label[mask] for label, mask in zip(labels, known, strict=True)],
    )


def calibrate(first: list[Text], second: list[Text], window: int) -> dict:
    """Bands and weights from the `first` texts, verdicts of the `second`, correlations of all."""
    z_scores = [over_window(text.changes, window, rolling_zscore) for text in first]
    chosen = correlate(*labelled(z_scores, [text.labels for text in first]))
    bands = choose_bands(chosen.mean.tolist())

    def check(scores: list[Tensor]) -> Evidence:
        return correlate(*labelled(scores, [text.labels for text in second]))

    checked = {"bands": check([band_score(text.changes, bands, window) for text in second])}
    n_layers, n_features = first[0].changes.shape[1], first[0].features.shape[1]
    column, by_head = torch.arange(n_features), {}
    for name, columns in {
        "changes": column < n_layers,
        "keys and values": column >= n_layers,
        "fit": column >= 0,
    }.items():
        weights = fit(first, columns)
        checked[name] = check([head_scores(text, weights).mean(1, True) for text in second])
        by_head[name] = head_correlation(second, weights)
    verdicts = {name: verdict(checked[name]) for name in ("bands", "fit")}
    return asdict(bands) | {
        "window": window,
        "fit": asdict(weights),
        "recent": RECENTS[0],
        "reliable": {name: reliable for name, (reliable, _) in verdicts.items()},
        "verdict": "\n".join(f"{name}: {words}" for name, (_, words) in verdicts.items()),
        "chosen_on": [text.trace.id for text in first],
        "checked_on": [text.trace.id for text in second],
        "trend": {
            "raw": trend([difference(band_means(text.changes, bands), bands) for text in second]),
            "z-score": trend([band_score(text.changes, bands, window) for text in second]),
        },
        "checked": {name: evidence.as_dict() for name, evidence in checked.items()},
        "by_head": by_head,
        "correlation": correlations([*first, *second], window),
    }


def correlations(texts: list[Text], window: int) -> dict:
    """Of the change after every block with the labels: raw, as a rolling mean, as a z-score."""
    statistics_of = {"rolling mean": rolling_mean, "z-score": rolling_zscore}
    signals = {"raw": [text.changes for text in texts]} | {
        name: [over_window(text.changes, window, statistic) for text in texts]
        for name, statistic in statistics_of.items()
    }
    labels = [text.labels for text in texts]
    return {name: correlate(*labelled(x, labels)).as_dict() for name, x in signals.items()}


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
    add("--outcome", default="effect", help=f"of {', '.join(OUTCOMES)} (default: effect)")
    add("--filler", default="drop", help="of the labels (default: drop)")
    add("--window", type=int, default=64, help="tokens in a score's statistics (default: 64)")
    add("--budget", type=int, default=128, help="that age and recency are tuned in (default: 128)")
    add("--swap", action="store_true", help="choose on the half that otherwise checks")
    add("--held-out", type=Path, help="a file for the traces that chose nothing")
    add("--output", type=Path, default=Path("calibration.json"), help="default: calibration.json")
    return parser


def main() -> None:
    parser = make_parser()
    args = parser.parse_args()
    with told_in_one_line(parser):
        need_matplotlib()
        check_numbers(args, "window", "budget")
        check_output(args.output, ".json")
        if args.held_out is not None:
            check_output(args.held_out, ".jsonl")
        records = read_records(args.traces, dict.fromkeys(("id", "prompt", "trace"), str))
        labels: dict[str, dict[int, list]] = {}
        for record in read_lines(args.labels, "records"):
            if record.get("filler") == args.filler and args.outcome in record:
                by_delay = labels.setdefault(record["trace"], {})
                by_delay[record["delay"]] = record[args.outcome]
        if not labels:
            what = f"{args.outcome!r} and filler {args.filler!r}"
            raise ValueError(f"{args.labels} has no labels of outcome {what}")
        model = load_model(args)
        texts = read_texts(model, records, labels, args.window)
        if not texts:
            raise ValueError(f"{args.traces} has no trace that {args.labels} tells of")
        parts = [[texts[i] for i in half] for half in halves([text.prompt for text in texts])]
        first, second = reversed(parts) if args.swap else parts
        if not (first and second):
            raise ValueError(
                "all traces are on one problem; two are needed: to choose and to check"
            )
        result = {"n_layers": model.config.n_layers} | calibrate(first, second, args.window)
        tuned, gaps = tune(model, first, Calibration.from_dict(result), args.budget)
        result |= {"fit": asdict(tuned.fit), "recent": tuned.recent, "tuned": gaps}
        described = describe(args, model) | {"outcome": args.outcome, "budget": args.budget}
        args.output.write_text(json.dumps(described | result) + "\n", encoding="utf-8")
        plot(result, args.output.with_suffix(".png"))
        if args.held_out is not None:
            held_out = [record for record in records if record["id"] in result["checked_on"]]
            lines = [json.dumps(record, ensure_ascii=False) + "\n" for record in held_out]
            args.held_out.write_text("".join(lines), encoding="utf-8")
        print(result["verdict"])


if __name__ == "__main__":
    main()
