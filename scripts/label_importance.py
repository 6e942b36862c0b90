# SPDX-License-Identifier: Apache-2.0
"""How much a text needs each of its tokens: importance labels.

    python scripts/label_importance.py --traces FILE.jsonl --outcomes loss --fillers drop

Windows of a trace (32 tokens, every 16) are taken away one at a time, after Kolawole and Smith
(arXiv:2606.26472, section 4), and outcomes are looked at:

- `loss`: by how many nats the rest of the trace becomes less likely, summed over its tokens;
- `flip`: whether the answer that the model gives after its thoughts, regenerated greedily, is
  another than without the occlusion;
- `attention`: no window is taken away; the attention weight, mean over layers and heads, that a
  token gets from those after it;
- `effect`: likewise, how much the loss would change, by its gradient, if one of those did not see
  the token; squared. It takes a backward pass, and memory for layers x heads x tokens x tokens.

Filler `drop` takes the keys and values of the window out of the cache once it and --delays more
tokens have been read, which is what eviction does, with a recency window of so many tokens; `pad`,
`eos` and `random` put other tokens in its place. The text before that is computed once and shared
by all windows, and windows go through the model together.

FILE holds JSON lines with `id`, `prompt` and `trace`. A token's label is the mean of the losses,
and the "or" of the flips, of the windows that cover it; or the mean of the attention and effects
over the tokens more than the delay after it. The output folder gets a line for each trace, filler
and delay, with the answer of a control run that occludes nothing. The same command goes on where it
was stopped.
"""

import argparse
import hashlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import isnan
from pathlib import Path

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from answers import is_right, last_boxed  # noqa: E402
from baselines import causal_weights  # noqa: E402
from epikv import NO_POSITION, EvictionConfig, SlotCache, upcast  # noqa: E402
from fidelity import tokenize_trace  # noqa: E402
from generate import ArgumentParser, Engine, Sampling, full_budget  # noqa: E402
from model import ModelConfig, Transformer  # noqa: E402
from records import (  # noqa: E402
    RunFolder,
    process_rank,
    read_lines,
    read_records,
    told_in_one_line,
)
from replay import (  # noqa: E402
    Trace,
    add_model,
    check_numbers,
    describe,
    load_model,
    parse_numbers,
)

FILLERS = ("drop", "pad", "eos", "random")
OUTCOMES = ("loss", "flip", "attention", "effect")
CHUNK = 256  # tokens whose logits stand in memory at once
FEWEST = 64  # tokens that a mean over later ones is taken of


@dataclass(frozen=True)
class Window:
    """Positions `begin` to `end`, the latter not included, in prompt and trace.

    delay: tokens after it that see it still, where it is dropped.
    """

    begin: int
    end: int
    delay: int = 0

    @property
    def gone(self) -> int:
        """The first position that does not see it."""
        return self.end + self.delay


def cut_windows(begin: int, end: int, size: int, stride: int, delay: int = 0) -> list[Window]:
    """Windows of `size` every `stride` tokens from `begin`, the last ones cut short.

    They are gone by `end`.
    """
    end -= delay
    return [Window(at, min(at + size, end), delay) for at in range(begin, end, stride)]


class SharedPrefix:
    """Stands where a cache does: `n_tokens` of one row's keys and values, seen by many rows.

    reads: blocks whose residuals are wanted.
    """

    rotary_limit = None

    def __init__(self, cache: SlotCache, n_tokens: int, n_rows: int, reads: Sequence[int] = ()):
        self.layers = [SharedLayer(layer, n_tokens, n_rows) for layer in cache.layers]
        self.reads = reads

    def per_layer(self, mask: Tensor) -> list[Tensor]:
        return [mask[:, 0]] * len(self.layers)


class SharedLayer:
    reads_attention = False

    def __init__(self, layer, n_tokens: int, n_rows: int):
        self.k = layer.k[:, :, :n_tokens].expand(n_rows, -1, -1, -1)
        self.v = layer.v[:, :, :n_tokens].expand(n_rows, -1, -1, -1)


class Watched:
    """A `SharedLayer` that adds to `total` [N, N] what queries gave to keys, mean over heads."""

    reads_attention = True

    def __init__(self, layer: SharedLayer, total: Tensor):
        self.k, self.v, self.total = layer.k, layer.v, total

    def observe_prompt(self, q: Tensor, k: Tensor) -> None:
        n_tokens = k.shape[2]
        first = n_tokens - q.shape[2]
        self.total[first:n_tokens, :n_tokens] += causal_weights(q, k, first)[0].mean((0, 1))


def attention_matrix(model: Transformer, tokens: list[int]) -> Tensor:
    """Attention weights of each query and key, mean over layers and heads. [N, N] float32"""
    total = torch.zeros(len(tokens), len(tokens), device=model.device)
    cache = model.new_cache(EvictionConfig(full_budget(len(tokens)), "full"))

    def watch(start: int) -> SharedPrefix:
        prefix = SharedPrefix(cache, start, 1)
        prefix.layers = [Watched(layer, total) for layer in prefix.layers]
        return prefix

    for _ in read_chunks(model, cache, tokens, watch):
        pass
    return total / len(model.blocks)


class Probe:
    """A layer without a prefix whose queries get a bias [1, H, N, N], for the sake of its gradient.

    take: is given the effects [H, N, N] of its heads on the way back.
    """

    reads_attention = True

    def __init__(self, config: ModelConfig, mask: Tensor, take: Callable[[Tensor], object]):
        self.k = self.v = mask.new_empty(1, config.n_kv_heads, 0, config.head_dim)
        self.bias = mask.expand(1, config.n_heads, -1, -1).clone().requires_grad_()
        self.bias.register_hook(self.add)
        self.take = take

    def observe_prompt(self, q: Tensor, k: Tensor) -> None:
        self.weights = causal_weights(q.detach(), k.detach(), 0)[0].flatten(0, 1)  # [H, N, N]

    def add(self, gradient: Tensor) -> None:
        """A key of weight p that goes leaves the others 1 / (1 - p) as heavy."""
        self.take(gradient[0] / (1 - self.weights).clamp(min=0.01))
        del self.weights


class Probes:
    """Stands where a cache does; every layer is a `Probe`."""

    reads = ()
    rotary_limit = None

    def __init__(self, layers: list[Probe]):
        self.layers = layers

    def per_layer(self, mask: Tensor) -> list[Tensor]:
        return [layer.bias for layer in self.layers]


def probe_effects(
    model: Transformer, tokens: list[int], take: Callable[[int, Tensor], object]
) -> None:
    """Give `take` the effects [H, N, N] of each layer's heads, by its number.

    An effect is by how much the loss changes if one query of the head does not see one key, to
    first order in the output of attention, in which such a key has the share p (v - o) / (1 - p).
    """
    n_tokens = len(tokens)
    shape = (n_tokens, n_tokens)
    mask = torch.full(shape, -torch.inf, dtype=model.dtype, device=model.device).triu(1)
    ids = torch.tensor(tokens, device=model.device)
    position = torch.arange(n_tokens, device=model.device)[None]
    probes = Probes(
        [Probe(model.config, mask, partial(take, i)) for i in range(model.config.n_layers)]
    )
    x, *_ = model(ids[None], position, probes, mask=mask)
    torch.nn.functional.cross_entropy(model.logits(x[0, :-1]), ids[1:], reduction="sum").backward()


def effect_matrix(model: Transformer, tokens: list[int]) -> Tensor:
    """The squares of the effects, summed over layers and heads before. [N, N] float32"""
    shape = (len(tokens), len(tokens))
    total = torch.zeros(shape, dtype=model.dtype, device=model.device)
    probe_effects(model, tokens, lambda layer, effects: total.add_(effects.sum(0)))
    return upcast(total) ** 2


def head_effects(model: Transformer, tokens: list[int], delays: Sequence[int]) -> Tensor:
    """The squared effects of every key on each key-value head's queries more than a delay later.

    Means over those queries, NaN where they are few. [delays, N, L, H_kv] float32
    """
    found = [torch.empty(0)] * model.config.n_layers

    def take(layer: int, effects: Tensor) -> None:
        of_keys = effects.unflatten(0, (model.config.n_kv_heads, -1)).sum(1)  # [H_kv, N, N]
        squares = upcast(of_keys) ** 2
        found[layer] = torch.stack([mean_beyond(squares, delay) for delay in delays])

    probe_effects(model, tokens, take)
    return torch.stack(found).permute(1, 3, 0, 2)


def mean_beyond(matrix: Tensor, delay: int) -> Tensor:
    """For each key the mean over the queries more than `delay` after it; NaN if they are few.

    matrix: [..., N, N] of queries and keys. [..., N]
    """
    at = torch.arange(matrix.shape[-1], device=matrix.device)
    beyond = at[:, None] > at + delay
    count = beyond.sum(0)
    means = (matrix * beyond).sum(-2) / count.clamp(min=1)
    return means.masked_fill(count < FEWEST, torch.nan)


@torch.no_grad()
def read_chunks(
    model: Transformer, cache: SlotCache, tokens: list[int], view: Callable[[int], SharedPrefix]
) -> Iterator[tuple[int, Tensor, list[Tensor], list[Tensor], list[Tensor]]]:
    """Read a text into an empty full cache, CHUNK tokens at a time.

    view: what a chunk from a position on sees of the cache. Yields that position and what the model
    returns.
    """
    start = 0
    for chunk in torch.tensor(tokens, device=model.device).split(CHUNK):
        position = torch.arange(start, start + len(chunk), device=model.device)[None]
        x, residuals, k, v = model(chunk[None], position, view(start), n_cached=start)
        cache.admit(k, v, [])
        yield start, x, residuals, k, v
        start += len(chunk)


@dataclass
class Suffix:
    """What a batch of windows changes: everything from position `start` on.

    x: residuals [W, T, hidden]. k, v: per layer [W, H_kv, T, D].
    """

    start: int
    x: Tensor
    k: list[Tensor]
    v: list[Tensor]


class Reader:
    """A text in a full cache, read once.

    tokens: [N] int64. loss: [N - 1], nats of each token after the first.
    """

    @torch.no_grad()
    def __init__(self, model: Transformer, tokens: list[int]):
        self.model = model
        self.tokens = torch.tensor(tokens, device=model.device)
        self.cache = model.new_cache(EvictionConfig(full_budget(len(tokens)), "full"))
        chunks = read_chunks(model, self.cache, tokens, lambda start: self.prefix(start, 1))
        self.loss = torch.cat([self.loss_after(x[0], start) for start, x, *_ in chunks])

    def prefix(self, n_tokens: int, n_rows: int) -> SharedPrefix:
        return SharedPrefix(self.cache, n_tokens, n_rows)

    def loss_after(self, x: Tensor, start: int) -> Tensor:
        """Nats of the tokens that follow the residuals x [T, hidden] from position `start` on."""
        targets = self.tokens[start + 1 : start + 1 + len(x)]
        parts = []
        for part, target in zip(x[: len(targets)].split(CHUNK), targets.split(CHUNK), strict=True):
            logits = self.model.logits(part)
            parts.append(logits.logsumexp(-1) - logits.gather(1, target[:, None])[:, 0])
        return torch.cat(parts) if parts else x.new_zeros(0)

    @torch.no_grad()
    def occlude(
        self, windows: list[Window], filler: Tensor | None, start: int | None = None
    ) -> Suffix:
        """Read the text with a window taken away in each row.

        filler: tokens [size] to put in a window's place; None drops it after it was read. start:
        where to begin; None is where the first window changes something.
        """
        drops = filler is None
        if start is None:
            # With the last token before a drop, which tells the one after: `Answerer` wants it.
            start = min(window.gone - 1 if drops else window.begin for window in windows)
        n_rows, n_tokens = len(windows), len(self.tokens)
        ids = self.tokens[start:].expand(n_rows, -1).clone()  # [W, T]
        key = torch.arange(n_tokens, device=ids.device)
        query = key[start:]
        seen = (key <= query[:, None]).expand(n_rows, -1, -1).clone()  # [W, T, N]
        for row, window in enumerate(windows):
            if drops:
                seen[row, window.gone - start :, window.begin : window.end] = False
            else:
                inside = slice(window.begin - start, window.end - start)
                ids[row, inside] = filler[: window.end - window.begin]
        x, _, k, v = self.model(
            ids,
            query.expand(n_rows, -1),
            self.prefix(start, n_rows),
            mask=seen[:, None, None],
            n_cached=start,
        )
        return Suffix(start, x, k, v)

    @torch.no_grad()
    def loss_increases(self, windows: list[Window], suffix: Suffix) -> list[float]:
        """Nats by which what follows each window became less likely, summed over its tokens.

        The last token that sees the window tells the next one, so counting starts with the one
        after.
        """
        increases = []
        for window, x in zip(windows, suffix.x, strict=True):
            changed = self.loss_after(x[window.gone - suffix.start :], window.gone)
            increases.append((changed - self.loss[window.gone :]).double().sum().item())
        return increases


class Answerer:
    """Greedy continuations of a text from `end` on, of several rows together."""

    @torch.no_grad()  # as in `answers`, or its steps would compile anew
    def __init__(
        self, reader: Reader, end: int, n_rows: int, n_answer: int, compile_mode: str = "blocks"
    ):
        self.reader, self.end, self.n_answer = reader, end, n_answer
        budget = full_budget(end + n_answer)
        config = EvictionConfig(budget, "full")
        self.engine = Engine(reader.model, config, Sampling(), n_rows, compile_mode)
        self.engine.warm_up([self.prefix(step) for step in range(n_answer)])

    def prefix(self, step: int) -> int | None:
        return self.engine.prefix(self.end + step + 1, self.end + step + 1)

    @torch.no_grad()
    def answers(self, windows: list[Window], suffix: Suffix, drops: bool) -> list[str | None]:
        """The last boxed answer without each window, of which at most one a row may come."""
        cache, end, start = self.engine.cache, self.end, suffix.start
        n_rows = len(windows)
        cache.reset()
        for layer, prefix, k, v in zip(
            cache.layers, self.reader.cache.layers, suffix.k, suffix.v, strict=True
        ):
            for mine, shared, own in ((layer.k, prefix.k, k), (layer.v, prefix.v, v)):
                mine[:, :, :start] = shared[:, :, :start]
                mine[:n_rows, :, start:end] = own[:, :, : end - start]
        cache.position[..., :end] = torch.arange(end, device=cache.position.device)
        if drops:
            for row, window in enumerate(windows):
                cache.position[row, ..., window.begin : window.end] = NO_POSITION
        cache.length.fill_(end)
        last = suffix.x[:, end - 1 - start]
        logits = self.reader.model.logits(last)
        padding = logits[-1:].expand(cache.length.shape[0] - n_rows, -1)
        self.engine.state.draw(torch.cat([logits, padding]), cache.length - 1)
        return [last_boxed(text) for text in self.texts()[:n_rows]]

    def texts(self) -> list[str]:
        """Decode until all rows have ended, or `n_answer` tokens."""
        model, rows = self.reader.model, self.engine.read_tokens(1)()
        for step in range(self.n_answer - 1):
            if all(model.eos_ids & {*row} for row in rows):
                break
            self.engine.step(self.prefix(step))
            for row, token in zip(rows, self.engine.read_tokens(1)(), strict=True):
                row += token
        ends = [
            next((i for i, token in enumerate(row) if token in model.eos_ids), len(row))
            for row in rows
        ]
        return [model.tokenizer.decode(row[:end]) for row, end in zip(rows, ends, strict=True)]


# Labels ----------------------------------------------------------------------------------------


def answer_start(text: str) -> int:
    """Where the answer begins, in characters: after the thoughts, else at the last box.

    A text without either has none to regenerate; its end.
    """
    thoughts = text.rfind("</think>")
    if thoughts >= 0:
        return thoughts + len("</think>")
    box = text.rfind(r"\boxed")
    return box if box >= 0 else len(text)


def over_tokens(windows: list[Window], values: list[float], begin: int, end: int) -> list[list]:
    """For each token from `begin` to `end` the values of the windows that cover it."""
    covering: list[list] = [[] for _ in range(begin, end)]
    for window, value in zip(windows, values, strict=True):
        for position in range(window.begin, window.end):
            covering[position - begin].append(value)
    return covering


def filler_tokens(name: str, model: Transformer, size: int, seed: int) -> Tensor | None:
    """What stands in a window's place; None where it is dropped.

    Raises ValueError for a model without such a token.
    """
    if name == "drop":
        return None
    if name == "random":
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.randint(model.config.vocab_size, (size,), generator=generator)
        return tokens.to(model.device)
    text = model.tokenizer.special_tokens.get(f"{name}_token", "")
    token = model.tokenizer.tokenizer.token_to_id(text)
    if token is None:
        raise ValueError(f"the model has no {name} token; choose another filler")
    return torch.full((size,), token, device=model.device)


def batches_of(windows: list[Window], size: int) -> list[list[Window]]:
    return [windows[first : first + size] for first in range(0, len(windows), size)]


def label_losses(
    reader: Reader, windows: list[Window], filler: Tensor | None, batch_size: int
) -> list[float]:
    """The loss increase of every window."""
    increases = []
    for batch in batches_of(windows, batch_size):
        increases += reader.loss_increases(batch, reader.occlude(batch, filler))
    return increases


def label_flips(
    reader: Reader,
    windows: list[Window],
    filler: Tensor | None,
    answerer: Answerer,
    batch_size: int,
) -> tuple[str | None, list[bool]]:
    """The answer without occlusion, and for every window whether it becomes another.

    Without an answer in the control run nothing can flip.
    """
    # A window of nothing just before the end leaves all as it is.
    nothing = [Window(answerer.end, answerer.end)]
    (control,) = answerer.answers(nothing, reader.occlude(nothing, None), True)
    if control is None:
        return None, []
    flips = []
    for batch in batches_of(windows, batch_size):
        answers = answerer.answers(batch, reader.occlude(batch, filler), filler is None)
        flips += [answer is None or not is_right(answer, control) for answer in answers]
    return control, flips


def label_trace(
    model: Transformer, trace: Trace, settings: list[tuple[str, int]], args: argparse.Namespace
) -> Iterator[dict]:
    """A record for each filler and delay: a label for each of the trace's tokens, and the control.

    A delay counts for what is dropped; other fillers stand in the text from the start.
    """
    begin, tokens = len(trace.prompt), trace.prompt + trace.tokens
    end = len(tokens)
    before_answer = model.tokenizer.decode(trace.tokens)
    before_answer = before_answer[: answer_start(before_answer)]
    answer_at = begin + len(model.tokenizer.ids(before_answer, add_special_tokens=False))
    makers = {"attention": attention_matrix, "effect": effect_matrix}
    matrices = {name: make(model, tokens) for name, make in makers.items() if name in args.outcomes}
    windowed = {"loss", "flip"} & {*args.outcomes}
    reader = Reader(model, tokens) if windowed else None
    answerer = None
    if "flip" in args.outcomes and answer_at < end:
        shape = (args.batch_size, args.answer_tokens, args.compile_mode)
        answerer = Answerer(reader, answer_at, *shape)
    for name, delay in settings:
        record = {"trace": trace.id, "filler": name, "delay": delay, "n_prompt": begin}
        for outcome, matrix in matrices.items():
            means = mean_beyond(matrix, delay)[begin:].tolist()
            record[outcome] = [None if isnan(mean) else float(f"{mean:.4g}") for mean in means]
        filler = filler_tokens(name, model, args.window, args.seed)
        late = delay if filler is None else 0
        windows = cut_windows(begin, min(answer_at, end), args.window, args.stride, late)
        if "loss" in args.outcomes:
            losses = label_losses(reader, windows, filler, args.batch_size)
            covering = over_tokens(windows, losses, begin, end)
            record["loss"] = [round(sum(c) / len(c), 5) if c else None for c in covering]
        if answerer is not None:
            control, flips = label_flips(reader, windows, filler, answerer, args.batch_size)
            record["control"] = control
            if control is not None:
                covering = over_tokens(windows, flips, begin, end)
                record["flip"] = [int(any(c)) if c else None for c in covering]
        yield record


# Command line ----------------------------------------------------------------------------------


def make_parser() -> argparse.ArgumentParser:
    parser = ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--traces", type=Path, required=True, help="JSON lines: id, prompt, trace")
    add_model(parser)
    add("--outcomes", default="loss", help=f"of {', '.join(OUTCOMES)}, with commas (default: loss)")
    add("--fillers", default="drop", help=f"of {', '.join(FILLERS)}, with commas (default: drop)")
    add("--window", type=int, default=32, help="tokens taken away at a time (default: 32)")
    add("--stride", type=int, default=16, help="tokens from window to window (default: 16)")
    add("--delays", default="0", help="tokens that see what is then dropped, with commas")
    add("--tokens", type=int, default=1500, help="of each trace at most (default: 1500)")
    add("--limit", type=int, help="traces to take (default: all)")
    add("--answer-tokens", type=int, default=512, help="of an answer at most (default: 512)")
    add("--batch-size", type=int, default=16, help="windows at once (default: 16)")
    add("--output", type=Path, default=Path("labels"), help="folder (default: labels)")
    return parser


def parse_names(text: str, known: tuple[str, ...], option: str) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in known:
            raise ValueError(f"unknown {option} {name!r}; known: {', '.join(known)}")
    return names


def settings_of(args: argparse.Namespace, model: Transformer) -> dict:
    digest = hashlib.sha256(args.traces.read_bytes()).hexdigest()
    names = ("outcomes", "window", "stride", "tokens", "limit", "answer_tokens")
    return describe(args, model) | {
        "texts": f"{args.traces.name}, sha256 {digest}",
        **{name: getattr(args, name) for name in names},
        "batch_size": args.batch_size,
    }


def main() -> None:
    parser = make_parser()
    args = parser.parse_args()
    with told_in_one_line(parser):
        rank, world = process_rank()
        args.outcomes = parse_names(args.outcomes, OUTCOMES, "outcome")
        fillers = parse_names(args.fillers, FILLERS, "filler")
        numbers = ("window", "stride", "tokens", "limit", "answer_tokens", "batch_size")
        check_numbers(args, *numbers)
        delays = parse_numbers(args.delays, "delays")
        if min(delays) < 0:
            raise ValueError(f"delays must be 0 or more, got {args.delays!r}")
        settings = list(dict.fromkeys((filler, delay) for filler in fillers for delay in delays))
        records = read_records(args.traces, dict.fromkeys(("id", "prompt", "trace"), str))
        model = load_model(args)
        for filler in fillers:
            filler_tokens(filler, model, args.window, args.seed)
        traces = [tokenize_trace(record, model.tokenizer) for record in records[: args.limit]]
        with RunFolder(args.output, settings_of(args, model), rank) as folder:
            found = read_lines(args.output, "records")
            done = {(record["trace"], record["filler"], record["delay"]) for record in found}
            work = [
                (trace, [setting for setting in settings if (trace.id, *setting) not in done])
                for trace in traces[rank::world]
            ]
            work = [(trace, left) for trace, left in work if left]
            start = time.perf_counter()
            for finished, (trace, left) in enumerate(work, start=1):
                cut = replace(trace, tokens=trace.tokens[: args.tokens])
                for record in label_trace(model, cut, left, args):
                    folder.append(record)
                minutes = (time.perf_counter() - start) / finished * (len(work) - finished) / 60
                told = f"{finished} of {len(work)} traces, {minutes:.0f} minutes left"
                print(told, file=sys.stderr)


if __name__ == "__main__":
    main()
