# SPDX-License-Identifier: Apache-2.0
"""What 16-bit and quantised weights, and a cache of int8, cost on given texts: loss, KL, agreement.

    python scripts/quantization.py --traces FILE.jsonl --tokens 900 --limit 8

Texts (JSON lines with `id`, `prompt` and `trace`) are fed under the full cache to the model in
float32 and, in step, to each variant; nothing is evicted. CHUNK tokens pass at once, so in a cache
of int8 these see each other as they were before they are rounded. Prints a Markdown table with
standard errors over the traces, and writes it to a file.
"""

import argparse
import math
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from fidelity import cell, compare, cut, longest, tokenize_trace  # noqa: E402
from generate import ArgumentParser, slot_bytes, weight_bytes  # noqa: E402
from model import Transformer  # noqa: E402
from records import read_records, told_in_one_line  # noqa: E402
from replay import CHUNK, Replay, Setting, Trace, check_numbers  # noqa: E402
from tables import markdown  # noqa: E402


@dataclass(frozen=True)
class Variant:
    """How weights and cache are held."""

    dtype: torch.dtype = torch.float32
    quantize: str | None = None
    kv_dtype: str | None = None

    def load(self, args: argparse.Namespace) -> Transformer:
        return Transformer.from_pretrained(args.checkpoint, args.device, self.dtype, self.quantize)


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
def measure(
    reference: Transformer, model: Transformer, kv_dtype: str | None, traces: list[Trace]
) -> tuple[Tensor, int]:
    """Means over each trace of loss, KL and agreement [3, B], and the bytes of a token's cache."""
    tokens = torch.tensor([trace.tokens for trace in traces], device=model.device)  # [B, N]
    prompts, n_tokens = [trace.prompt for trace in traces], tokens.shape[1]
    config = Setting("full").config(longest(traces))
    wanted = Replay(reference, config, prompts, n_tokens, "none")
    found = Replay(model, replace(config, kv_dtype=kv_dtype), prompts, n_tokens, "none")
    parts = []
    for chunk in tokens.split(CHUNK, dim=1):
        logits = found.feed(chunk)
        _, kl, agreement = compare(wanted.feed(chunk), logits, chunk)
        loss = -logits.log_softmax(-1).gather(-1, chunk[..., None])[..., 0].double()
        parts.append(torch.stack([loss, kl, agreement]))
    return torch.cat(parts, dim=-1).mean(-1).cpu(), slot_bytes(found.cache)


def row(name: str, args: argparse.Namespace, reference: Transformer, traces: list[Trace]) -> list:
    """The cells of a variant."""
    model = VARIANTS[name].load(args)
    means, n_bytes = [], 0
    for first in range(0, len(traces), args.batch_size):
        batch = traces[first : first + args.batch_size]
        mean, n_bytes = measure(reference, model, VARIANTS[name].kv_dtype, batch)
        means.append(mean)
    loss, kl, agreement = torch.cat(means, dim=1).tolist()
    perplexity = math.exp(sum(loss) / len(loss))
    megabytes = weight_bytes(model) / 1e6
    cells = [cell(loss), f"{perplexity:.3f}", cell(kl), cell(agreement)]
    return [name, *cells, f"{megabytes:.1f}", f"{n_bytes:,}"]


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
        records = read_records(args.traces, dict.fromkeys(("id", "prompt", "trace"), str))
        reference = Variant().load(args)
        traces = [tokenize_trace(record, reference.tokenizer) for record in records]
        traces = cut(traces, args.tokens, args.limit)
        table = markdown(TITLES, [row(name, args, reference, traces) for name in VARIANTS])
        title = f"{Path(args.checkpoint).name}, {len(traces)} traces x {args.tokens} tokens"
        args.output.write_text(f"{title}\n\n{table}\n", encoding="utf-8")
        print(f"{title}\n\n{table}")


if __name__ == "__main__":
    main()
