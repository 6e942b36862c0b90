# SPDX-License-Identifier: Apache-2.0
"""Other ways to use the score of `epikv-fit`, each replayed on given texts beside it.

    python scripts/variants.py --traces held-out.jsonl --calibration calibration.json

Give traces that the calibration was not chosen on (`calibrate.py --held-out` writes them). Writes a
JSON file with the loss gap to the full cache, in nats per token (see `fidelity.py`), of every trace
under every variant, and prints their means.
"""

import argparse
import json
import statistics
import sys
from pathlib import Path

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from epikv import (  # noqa: E402
    POLICIES,
    CacheShape,
    EpiKVFit,
    EvictionConfig,
    LastBlocks,
    RollingWindow,
    Tokens,
    hash_uniform,
    rolling_mean,
)
from fidelity import cut, replay, tokenize_trace  # noqa: E402
from generate import ArgumentParser, parse_calibration  # noqa: E402
from records import check_output, read_records, told_in_one_line  # noqa: E402
from replay import add_model, check_numbers, describe, fingerprint, load_model  # noqa: E402
from tables import markdown  # noqa: E402

CLAUSE = 8  # tokens whose scores are smoothed
SPAN = 16  # tokens that go as one
LOT = 0.5  # of a score's deviation, the scale of the lots


class Smoothed(EpiKVFit):
    """The mean of the last CLAUSE scores: a token counts for what led to it."""

    def __init__(self, config: EvictionConfig, shape: CacheShape):
        super().__init__(config, shape)
        self.smoothing = RollingWindow(CLAUSE, shape.n_layers * shape.n_kv_heads, shape)

    def score(self, tokens: Tokens) -> Tensor:
        score = super().score(tokens)  # [B, L, H_kv, T]
        windows = self.smoothing(score.flatten(1, 2).transpose(1, 2), tokens.position + 1)
        return rolling_mean(*windows).transpose(1, 2).view_as(score)


class Spans(EpiKVFit):
    """Once a span of `lag` tokens is complete, each of them has the mean score.

    Age still tells them apart, so the span goes from its oldest token on.
    """

    has_lag = True
    blocks = 1

    def revise(self, last: LastBlocks) -> Tensor:
        return last.score.mean(-1, keepdim=True).expand_as(last.score)


class Lots(EpiKVFit):
    """Plus a lot (Gumbel noise), so that a token goes by a chance that its score sets."""

    def score(self, tokens: Tokens) -> Tensor:
        lot = -torch.log(-torch.log(hash_uniform(0, tokens.position)))  # [B, T]
        return super().score(tokens) + LOT * lot[:, None, None]


POLICIES_BESIDE = {"fit-smoothed": Smoothed, "fit-spans": Spans, "fit-lots": Lots}

VARIANTS = {
    "epikv-fit": dict(policy="epikv-fit"),
    "one map for all heads": dict(policy="epikv-fit", slot_map="shared"),
    f"mean of the last {CLAUSE} scores": dict(policy="fit-smoothed"),
    f"spans of {SPAN} tokens": dict(policy="fit-spans", lag=SPAN),
    "with a lot": dict(policy="fit-lots"),
    "16 largest values spared": dict(policy="epikv-fit", value_reserve=16),
}


def make_parser() -> argparse.ArgumentParser:
    parser = ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--traces", type=Path, required=True, help="JSON lines: id, prompt, trace")
    add("--calibration", type=parse_calibration, required=True, help="a file of calibrate.py")
    add_model(parser)
    add("--budget", type=int, default=128, help="slots (default: 128)")
    add(
        "--tokens",
        type=int,
        default=1000,
        help="of each trace; shorter are left out (default: 1000)",
    )
    add("--output", type=Path, default=Path("variants.json"), help="default: variants.json")
    return parser


def main() -> None:
    parser = make_parser()
    args = parser.parse_args()
    POLICIES.update(POLICIES_BESIDE)
    with told_in_one_line(parser):
        check_numbers(args, "budget", "tokens")
        check_output(args.output, ".json")
        configs = {
            name: EvictionConfig(args.budget, calibration=args.calibration, **options)
            for name, options in VARIANTS.items()
        }
        records = read_records(args.traces, dict.fromkeys(("id", "prompt", "trace"), str))
        model = load_model(args)
        traces = [tokenize_trace(record, model.tokenizer) for record in records]
        traces = cut(traces, args.tokens, None)
        gaps = {}
        for name, config in configs.items():
            measures = replay(model, traces, {name: config}, args.compile_mode)[name]
            means = measures[0].mean(-1).tolist()
            gaps[name] = dict(zip([trace.id for trace in traces], means, strict=True))
            print(f"{name}: {statistics.mean(means):.4f}", file=sys.stderr)
        settings = describe(args, model) | {"budget": args.budget, "tokens": args.tokens}
        settings["calibration"] = fingerprint(args.calibration)
        text = json.dumps({"settings": settings, "loss_gap": gaps}, indent=1)
        args.output.write_text(text + "\n", encoding="utf-8")
        rows = [[name, f"{statistics.mean(gap.values()):.4f}"] for name, gap in gaps.items()]
        print(markdown(["variant", "loss gap, nats per token"], rows))


if __name__ == "__main__":
    main()
