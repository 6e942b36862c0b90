# SPDX-License-Identifier: Apache-2.0
"""How far a policy's predictions are from the full cache's, on given texts: teacher-forced replay.

    python scripts/fidelity.py --traces FILE.jsonl --policies epikv,streaming --budgets 128,256

Texts are fed token by token under the full cache and under every policy and budget, all in step. At
each token the distribution of the next is compared with the full cache's: the loss gap in nats (on
the text's own next token), the KL divergence, and whether the likeliest token agrees. No answer key
is needed, and a small model shows differences in minutes.

FILE holds JSON lines with `id`, `prompt` and `trace`: the prompt is prefilled, the trace replayed.
Prints a Markdown table with standard errors over the traces, and writes JSON with every trace.
"""

import argparse
import json
import statistics
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from baselines import BASELINES  # noqa: E402
from epikv import POLICIES, EvictionConfig  # noqa: E402
from generate import Engine, Sampling, full_budget  # noqa: E402
from model import Transformer, one_line  # noqa: E402

MEASURES = ("loss_gap", "kl", "agreement")
# Tokens by how far the text has run past the budget.
DISTANCES = {"before": (-1e9, 0), "to 127": (0, 128), "to 511": (128, 512), "beyond": (512, 1e9)}


@dataclass(frozen=True)
class Trace:
    """A text of which the first part is prefilled and the second replayed."""

    id: str
    prompt: list[int]
    tokens: list[int]


class Forced(nn.Module):
    """Stands where the sampler does: the next token [B] is given, logits [B, vocab] are kept."""

    def __init__(self, batch_size: int, vocab_size: int, dtype: torch.dtype):
        super().__init__()
        self.register_buffer("token", torch.zeros(batch_size, dtype=torch.int64))
        self.register_buffer("logits", torch.zeros(batch_size, vocab_size, dtype=dtype))

    def draw(self, logits: Tensor, position: Tensor) -> None:
        self.logits.copy_(logits)


def compare(full: Tensor, other: Tensor, target: Tensor) -> Tensor:
    """The `MEASURES` of logits [B, vocab] against the full cache's. [3, B]"""
    full, other = full.log_softmax(-1), other.log_softmax(-1)
    difference = full - other
    loss_gap = difference.gather(1, target[:, None])[:, 0]
    kl = (full.exp() * difference).sum(-1)
    agreement = full.argmax(-1) == other.argmax(-1)
    return torch.stack([loss_gap, kl, agreement.to(kl.dtype)])


class Replay:
    """One policy and budget, fed the tokens that it is given.

    positions: "true", or "cache-length" to let those of RoPE stop at the budget, as they do where a
    position is taken from the length of an evicting cache: the ablation of the authors' code.
    """

    def __init__(
        self,
        model: Transformer,
        config: EvictionConfig,
        traces: list[Trace],
        compile_mode: str,
        positions: str = "true",
    ):
        self.engine = Engine(model, config, Sampling(), len(traces), compile_mode)
        if positions == "cache-length":
            self.engine.cache.rotary_limit = self.engine.prompt_cache.rotary_limit = config.budget
        dtype = torch.promote_types(model.dtype, torch.float32)
        with torch.device(model.device):
            self.engine.state = Forced(len(traces), model.config.vocab_size, dtype)
        self.lengths = [len(trace.prompt) for trace in traces]
        steps = range(len(traces[0].tokens))
        self.engine.warm_up([self.prefix(step) for step in steps])
        self.engine.prefill([trace.prompt for trace in traces])

    @property
    def logits(self) -> Tensor:
        return self.engine.state.logits

    def prefix(self, step: int) -> int | None:
        return self.engine.prefix(min(self.lengths) + step + 1, max(self.lengths) + step + 1)

    def feed(self, step: int, token: Tensor) -> None:
        """Take every row's token number `step` of its trace."""
        self.engine.state.token.copy_(token)
        self.engine.step(self.prefix(step))
        block = self.engine.cache.block
        if block and any((length + step + 1) % block == 0 for length in self.lengths):
            self.engine.end_block()


@torch.no_grad()
def replay(
    model: Transformer,
    traces: list[Trace],
    settings: dict[str, EvictionConfig],
    compile_mode: str = "blocks",
    positions: str = "true",
) -> dict[str, Tensor]:
    """The `MEASURES` [3, B, N] of every setting at the N tokens of B traces of equal length.

    A budget that holds everything is raised to the full cache's, so that both run the same shapes
    and a policy that forgets nothing differs by nothing, not by rounding.
    """
    n_tokens = len(traces[0].tokens)
    longest = max(len(trace.prompt) for trace in traces) + n_tokens
    everything = full_budget(longest)
    full = Replay(model, EvictionConfig(everything, "full"), traces, compile_mode)
    others = {}
    for name, config in settings.items():
        if config.budget >= longest:
            config = replace(config, budget=everything)
        others[name] = Replay(model, config, traces, compile_mode, positions)
    tokens = torch.tensor([trace.tokens for trace in traces], device=model.device)  # [B, N]
    found = {name: [] for name in settings}
    for step in range(n_tokens):
        token = tokens[:, step]
        for name, other in others.items():
            found[name].append(compare(full.logits, other.logits, token))
        for one in (full, *others.values()):
            one.feed(step, token)
    return {name: torch.stack(values, dim=-1).cpu() for name, values in found.items()}


# Reporting -------------------------------------------------------------------------------------


def summarise(values: Tensor, traces: list[Trace], budget: int) -> list[dict]:
    """A record for each trace: means of `values` [3, B, N] over all tokens, and by distance."""
    records = []
    for row, trace in enumerate(traces):
        # The distribution compared at a token follows all those before it.
        past = len(trace.prompt) + torch.arange(len(trace.tokens)) - budget
        record = {"trace": trace.id, "all": means(values[:, row])}
        for name, (low, high) in DISTANCES.items():
            inside = (past >= low) & (past < high)
            if inside.any():
                record[name] = means(values[:, row, inside])
        records.append(record)
    return records


def means(values: Tensor) -> dict[str, float]:
    return dict(zip(MEASURES, values.double().mean(-1).tolist(), strict=True))


def mean_and_error(values: list[float]) -> tuple[float, float]:
    """Mean, and its standard error over the traces (0 for a single one)."""
    error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0
    return statistics.mean(values), error


def table(results: dict[str, list[dict]]) -> str:
    """A Markdown table: a row for each setting, means and standard errors over the traces."""
    titles = ["loss gap, nats", "KL, nats", "agreement", *(f"gap {name}" for name in DISTANCES)]
    lines = [f"| | {' | '.join(titles)} |", "|---" * (len(titles) + 1) + "|"]
    for name, records in results.items():
        cells = [cell([record["all"][measure] for record in records]) for measure in MEASURES]
        for distance in DISTANCES:
            gaps = [record[distance]["loss_gap"] for record in records if distance in record]
            cells.append(cell(gaps) if gaps else "")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def cell(values: list[float]) -> str:
    mean, error = mean_and_error(values)
    return f"{mean:.4f} ± {error:.4f}"


def read_traces(path: Path, tokenizer, n_tokens: int, limit: int | None) -> list[Trace]:
    """The first `limit` traces of a JSON-lines file that have `n_tokens` tokens, cut to them.

    Raises ValueError, with the line's number, for a line that is none or an id that comes twice.
    """
    traces, ids = [], set()
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            name, prompt, trace = record["id"], record["prompt"], record["trace"]
            prompt = tokenizer.encode(prompt)
            tokens = tokenizer.ids(trace, add_special_tokens=False)[:n_tokens]
        except KeyError as error:
            raise ValueError(f"{path}, line {number}: no field {error}") from None
        except (AttributeError, TypeError, ValueError) as error:
            raise ValueError(f"{path}, line {number}: {one_line(error)}") from None
        if name in ids:
            raise ValueError(f"{path}, line {number}: id {name!r} comes twice")
        ids.add(name)
        if len(tokens) == n_tokens and prompt:
            traces.append(Trace(name, prompt, tokens))
    if not traces:
        raise ValueError(f"{path}: no trace has {n_tokens} tokens; lower --tokens")
    return traces[:limit]


def parse_settings(policies: str, budgets: str, recent: int | None) -> dict[str, EvictionConfig]:
    """Every policy at every budget, by a name that says both."""
    try:
        sizes = [int(budget) for budget in budgets.split(",")]
    except ValueError:
        raise ValueError(f"budgets must be numbers with commas, got {budgets!r}") from None
    return {
        f"{policy}, {budget}": EvictionConfig(budget, policy, recent=recent)
        for budget in sizes
        for policy in policies.split(",")
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    demo = ROOT / "models/SmolLM2-135M-Instruct"
    add("--checkpoint", type=Path, default=demo, help="local folder (default: the demo model)")
    add("--traces", type=Path, required=True, help="JSON lines: id, prompt, trace")
    add("--policies", default="epikv,streaming,random", help="names with commas")
    add("--budgets", default="256", help="slots, with commas (default: 256)")
    add("--recent", type=int, help="last tokens always kept (default: the policy's)")
    add("--tokens", type=int, default=1500, help="of each trace (default: 1500)")
    add("--limit", type=int, help="traces to read (default: all)")
    add("--batch-size", type=int, default=8, help="traces at once (default: 8)")
    add("--no-compile", dest="compile_mode", action="store_const", const="none", default="blocks")
    add(
        "--positions",
        choices=("true", "cache-length"),
        default="true",
        help="an ablation: cache-length lets RoPE's positions stop at the budget (default: true)",
    )
    add("--output", type=Path, default=Path("fidelity.json"), help="default: fidelity.json")
    args = parser.parse_args()
    POLICIES.update(BASELINES)
    try:
        settings = parse_settings(args.policies, args.budgets, args.recent)
        for name in ("tokens", "batch_size"):
            if getattr(args, name) < 1:
                raise ValueError(f"{name.replace('_', '-')} must be at least 1")
        model = Transformer.from_pretrained(args.checkpoint)
        traces = read_traces(args.traces, model.tokenizer, args.tokens, args.limit)
    except (OSError, ValueError) as error:
        parser.error(one_line(error))
    results = {name: [] for name in settings}
    start = time.perf_counter()
    for first in range(0, len(traces), args.batch_size):
        batch = traces[first : first + args.batch_size]
        found = replay(model, batch, settings, args.compile_mode, args.positions)
        for name, values in found.items():
            results[name] += summarise(values, batch, settings[name].budget)
        done = first + len(batch)
        left = (time.perf_counter() - start) / done * (len(traces) - done)
        print(f"{done} of {len(traces)} traces, {left / 60:.0f} minutes left", file=sys.stderr)
        args.output.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print(f"{args.checkpoint.name}, {len(traces)} traces x {args.tokens} tokens\n")
    print(table(results))


if __name__ == "__main__":
    main()
