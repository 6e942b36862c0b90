# SPDX-License-Identifier: Apache-2.0
"""What 16-bit and quantised weights, and a cache of int8, cost on given texts: loss, KL, agreement.

    python scripts/quantization.py --traces FILE.jsonl --tokens 900 --limit 8

Texts (JSON lines with `id`, `prompt` and `trace`) are fed, in step, to the model in float32 and to
all variants, which are in memory together; nothing is evicted. CHUNK tokens pass at once, so in a
cache of int8 these see each other as they were before they are rounded. Prints a Markdown table
with standard errors over the traces, and writes it to a file.
"""

import math
import statistics
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from epikv import EvictionConfig  # noqa: E402
from fidelity import cell, compare, cut, longest, tokenize_trace  # noqa: E402
from generate import ArgumentParser, slot_bytes, weight_bytes  # noqa: E402
from model import Transformer  # noqa: E402
from records import check_output, read_records, told_in_one_line  # noqa: E402
from replay import CHUNK, Replay, Setting, Trace, check_numbers  # noqa: E402
from tables import markdown  # noqa: E402


@dataclass(frozen=True)
class Variant:
    """How weights and cache are held."""

    dtype: torch.dtype = torch.float32
    quantize: str | None = None
    kv_dtype: str | None = None

    @property
    def weights(self) -> "Variant":
        """The one of the same weights and a plain cache."""
        return replace(self, kv_dtype=None)


VARIANTS = {
    "float32": Variant(),
    "bfloat16": Variant(torch.bfloat16),
    "int8 weights": Variant(quantize="int8"),
    "int4 weights": Variant(quantize="int4"),
    "int8 cache": Variant(kv_dtype="int8"),
    "int8 weights and cache": Variant(quantize="int8", kv_dtype="int8"),
}
TITLES = ["", "loss", "perplexity", "KL", "agreement", "MB of weights a step", "KV bytes a token"]


@torch.no_grad()
def measure(models: dict[Variant, Transformer], traces: list[Trace]) -> dict[str, Tensor]:
    """Means over each trace of loss, KL and agreement, [3, B], of every variant."""
    tokens = torch.tensor([trace.tokens for trace in traces], device=models[Variant()].device)
    prompts, n_tokens = [trace.prompt for trace in traces], tokens.shape[1]
    full = Setting("full").config(longest(traces))
    replays = {}
    for name, variant in VARIANTS.items():
        config = replace(full, kv_dtype=variant.kv_dtype)
        replays[name] = Replay(models[variant.weights], config, prompts, n_tokens, "none")
    found = {name: [] for name in VARIANTS}
    for chunk in tokens.split(CHUNK, dim=1):
        logits = {name: one.feed(chunk) for name, one in replays.items()}
        for name, other in logits.items():
            _, kl, agreement = compare(logits["float32"], other, chunk)
            loss = -other.log_softmax(-1).gather(-1, chunk[..., None])[..., 0].double()
            found[name].append(torch.stack([loss, kl, agreement]))
    return {name: torch.cat(parts, dim=-1).mean(-1).cpu() for name, parts in found.items()}


def row(name: str, model: Transformer, means: Tensor) -> list[str]:
    """The cells of a variant with means [3, traces]."""
    loss, kl, agreement = means.tolist()
    n_bytes = slot_bytes(model.new_cache(EvictionConfig(8, kv_dtype=VARIANTS[name].kv_dtype)))
    cells = [cell(loss), f"{math.exp(statistics.mean(loss)):.3f}", cell(kl), cell(agreement)]
    return [name, *cells, f"{weight_bytes(model) / 1e6:.1f}", f"{n_bytes:,}"]


def main() -> None:
    parser = ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    demo = ROOT / "models/SmolLM2-135M-Instruct"
    add("--checkpoint", default=str(demo), help="repo id or folder (default: the demo model)")
    add("--device", help="cuda or cpu (default: cuda where there is one)")
    add("--traces", type=Path, required=True, help="JSON lines: id, prompt, trace")
    add("--tokens", type=int, default=900, help="of each trace (default: 900)")
    add("--limit", type=int, help="traces to take (default: all)")
    add("--batch-size", type=int, default=4, help="traces at once (default: 4)")
    add("--output", type=Path, default=Path("quantization.md"), help="default: quantization.md")
    args = parser.parse_args()
    with told_in_one_line(parser):
        check_numbers(args, "tokens", "limit", "batch_size")
        check_output(args.output, ".md")
        records = read_records(args.traces, dict.fromkeys(("id", "prompt", "trace"), str))
        models = {
            v: Transformer.from_pretrained(args.checkpoint, args.device, v.dtype, v.quantize)
            for v in {variant.weights for variant in VARIANTS.values()}
        }
        traces = [tokenize_trace(record, models[Variant()].tokenizer) for record in records]
        traces = cut(traces, args.tokens, args.limit)
        firsts = range(0, len(traces), args.batch_size)
        found = [measure(models, traces[at : at + args.batch_size]) for at in firsts]
        rows = [
            row(name, models[v.weights], torch.cat([means[name] for means in found], dim=1))
            for name, v in VARIANTS.items()
        ]
        table = markdown(TITLES, rows)
        title = f"{Path(args.checkpoint).name}, {len(traces)} traces x {args.tokens} tokens"
        args.output.write_text(f"{title}\n\n{table}\n", encoding="utf-8")
        print(f"{title}\n\n{table}")


if __name__ == "__main__":
    main()
