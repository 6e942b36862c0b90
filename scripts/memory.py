# SPDX-License-Identifier: Apache-2.0
"""Peak memory against context length: accounted for any shape, measured where it fits.

    python scripts/memory.py --checkpoint MODEL --lengths 1024,2048,4096 --budget 4096
    python scripts/memory.py --shape 8b   # the account alone, of a model that need not be here

A prompt of each length is prefilled and one more token decoded, eagerly, in batch 1:

- `epikv`: this engine within the budget; `full`: with a cache of all tokens;
- `attention`: `full`, but for attention weights [H, n, n] that stand in memory, one layer at a time
  and the whole prompt at once, as in implementations whose policy reads them. (The baselines of
  `baselines.py` observe attention chunk by chunk and do not pay this.)

The account runs the very program on tensors without values and adds up what is alive. It leaves out
what a kernel needs inside, the allocator's rounding, and the process itself; of RMS norms, fused on
CUDA, it counts the steps. A measurement takes weights of random values and a process of its own,
because the peak of one only grows. What is compared is the rise above the loaded model.

Prints a Markdown table, and writes JSON and a PNG of the same name.
"""

import argparse
import json
import os
import sys
import weakref
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import model as model_file  # noqa: E402
from epikv import EvictionConfig, LayerCache  # noqa: E402
from generate import DTYPES, ArgumentParser, Engine, Sampling  # noqa: E402
from model import ModelConfig, Transformer, attention_weights, one_line, read_json  # noqa: E402
from plots import line_plot, need_matplotlib  # noqa: E402
from records import check_output  # noqa: E402
from tables import markdown  # noqa: E402

CONTENDERS = ("full", "epikv", "attention")
# config.json of DeepSeek-R1-Distill-Llama-8B, without what makes no difference to memory.
LLAMA_8B = dict(architectures=["LlamaForCausalLM"], vocab_size=128256, hidden_size=4096)
LLAMA_8B |= dict(intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32)
LLAMA_8B |= dict(num_key_value_heads=8, max_position_embeddings=131072)
SHAPES = {"8b": LLAMA_8B}
SHARE_OF_FREE = 0.7  # of the memory that is free, which a measurement may need
GIB = 2**30

# The program ------------------------------------------------------------------------------------


def run(model: Transformer, contender: str, n_tokens: int, budget: int) -> None:
    """Prefill a prompt of `n_tokens` and decode one token."""
    if contender == "epikv":
        config = EvictionConfig(budget)
    else:  # exactly all tokens; no settings that a short text would not meet
        config = EvictionConfig(n_tokens + 1, "full", sinks=0, recent=1)
    engine = Engine(model, config, Sampling(), compile_mode="none")
    changes = {}
    if contender == "attention":
        changes = dict(attend_to_prompt=attend_with_weights, PREFILL_CHUNK=n_tokens)
        for layer in engine.cache.layers:  # for the decode step
            layer.reads_attention = True
            layer.observe = lambda weights: None  # that they stood there is all that counts
    with mock.patch.dict(vars(model_file), changes):
        engine.prefill([[1] * n_tokens])
    engine.step(engine.prefix(n_tokens + 1, n_tokens + 1))


def attend_with_weights(
    q: Tensor, k: Tensor, v: Tensor, cache: LayerCache, n_cached: int, mask: Tensor | None
) -> Tensor:
    """`model.attend_to_prompt` for a whole prompt, through weights [B, H, T, T]."""
    repeats = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeats, dim=1), v.repeat_interleave(repeats, dim=1)
    causal = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).tril()
    weights = attention_weights(q, k, causal)
    return (weights.to(v.dtype) @ v).transpose(1, 2).flatten(2)


# The account ------------------------------------------------------------------------------------


class LiveBytes(TorchDispatchMode):
    """Bytes of all storages alive, of `modules` and of what operators return: `now`, and `peak`.

    (torch's own MemTracker wants parameters with gradients.)
    """

    def __init__(self, *modules: nn.Module):
        super().__init__()
        self.now = self.peak = 0
        self.sizes: dict[int, int] = {}  # of storages, by address: none is reused while it lives
        for module in modules:
            for tensor in (*module.parameters(), *module.buffers()):
                self.add(tensor)

    def add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        address = storage._cdata
        if address not in self.sizes:
            self.sizes[address] = storage.nbytes()
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self.remove, address)

    def remove(self, address: int) -> None:
        self.now -= self.sizes.pop(address)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self.add(tensor)
        return result


def cuda_attention(q, k, v, attn_mask=None, is_causal=False, enable_gqa=False) -> Tensor:
    """F.scaled_dot_product_attention by CUDA's operators, which any build of torch knows by name.

    attn_mask: also "lower right", for what `causal_lower_right` gives.
    """
    if attn_mask is None or isinstance(attn_mask, str):
        flash = torch.ops.aten._scaled_dot_product_flash_attention
        return flash(q, k, v, 0.0, is_causal or attn_mask is not None)[0]
    bias = torch.zeros(attn_mask.shape, dtype=q.dtype).expand(*q.shape[:3], k.shape[2])
    efficient = torch.ops.aten._scaled_dot_product_efficient_attention
    return efficient(q, k, v, bias, False)[0]


@contextmanager
def without_values(device: str) -> Iterator[None]:
    """Tensors have no values, and attention takes the operators of `device`.

    They call themselves a CPU's in any case: a torch without CUDA cannot index others.
    """
    attention = dict(scaled_dot_product_attention=cuda_attention) if device == "cuda" else {}
    causal = {
        "cpu": lambda n, m: torch.ones(n, m, dtype=torch.bool).tril(m - n),
        "cuda": lambda n, m: "lower right",
    }[device]
    model_patch = mock.patch.object(model_file, "causal_lower_right", causal)
    with mock.patch.dict(vars(F), attention), model_patch, FakeTensorMode():
        yield


def account(
    config: ModelConfig, dtype: torch.dtype, device: str, contender: str, n_tokens: int, budget: int
) -> tuple[int, int]:
    """Bytes of the model, and peak bytes of `run` with it."""
    with without_values(device):
        model = Transformer(config, dtype)
        with LiveBytes(model) as live:
            before = live.now
            run(model, contender, n_tokens, budget)
    return before, live.peak


# The measurement --------------------------------------------------------------------------------


def measure(
    config: ModelConfig, dtype: torch.dtype, device: str, contender: str, n_tokens: int, budget: int
) -> tuple[int, int]:
    """Bytes once the model is there, and the peak of `run` with it. For a process of its own."""
    with torch.device(device):
        model = Transformer(config, dtype)
    for parameter in model.parameters():
        parameter.normal_(std=0.02)
    run(model, contender, 8, 16)  # loads libraries and starts threads
    if device == "cpu":  # where the start had a peak of its own; Linux alone can forget it
        Path("/proc/self/clear_refs").write_text("5")
    before = peak_bytes(device)
    run(model, contender, n_tokens, budget)
    return before, peak_bytes(device)


def peak_bytes(device: str) -> int:
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    status = Path("/proc/self/status").read_text()  # getrusage counts the parent process in
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


def free_memory(device: str) -> int:
    if device == "cuda":
        return torch.cuda.mem_get_info()[0]
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


# Reporting --------------------------------------------------------------------------------------


def table(rows: list[dict]) -> str:
    """A Markdown table in GiB; the ratio is of the rises above the model, measured to accounted."""
    titles = ["contender", "length", "account GiB", "measured GiB", "account's rise"]
    lines = []
    for row in rows:
        kinds = ("accounted_bytes", "measured_bytes", "accounted_rise", "measured_rise")
        cells = [f"{row[kind] / GIB:.3f}" if row[kind] is not None else "" for kind in kinds]
        cells[1] = row.get("error") or cells[1]
        ratio = (row["measured_rise"] or 0) / row["accounted_rise"]
        cells.append(f"{ratio:.2f}" if ratio else "")
        lines.append([row["contender"], f"{row['length']:,}", *cells])
    return markdown([*titles, "measured rise", "ratio"], lines)


def curves(rows: list[dict]) -> dict[str, list[tuple[float, float, float, float]]]:
    """Series of `line_plot`: GiB of the model and the rise above it, accounted and measured."""
    series = {}
    for kind, suffix in (("accounted", ""), ("measured", ", measured")):
        for row in rows:
            if row[f"{kind}_rise"] is not None:
                weights = row["accounted_bytes"] - row["accounted_rise"]
                y = (weights + row[f"{kind}_rise"]) / GIB
                series.setdefault(row["contender"] + suffix, []).append((row["length"], y, y, y))
    return series


def account_for(shape: tuple, lengths: list[int], budget: int) -> list[dict]:
    """A row for every contender and length, without a measurement yet."""
    rows = []
    for contender in CONTENDERS:
        for length in lengths:
            print(f"accounting for {contender} at {length:,}", file=sys.stderr)
            start, peak = account(*shape, contender, length, budget)
            rows.append(dict(contender=contender, length=length, accounted_bytes=peak))
            rows[-1] |= dict(accounted_rise=peak - start, measured_bytes=None, measured_rise=None)
    return rows


def measure_row(row: dict, shape: tuple, budget: int) -> None:
    """Add a measurement to a row, or the error that took its place, such as no memory."""
    print(f"measuring {row['contender']} at {row['length']:,}", file=sys.stderr)
    try:
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as own_process:
            what = (*shape, row["contender"], row["length"], budget)
            start, peak = own_process.submit(measure, *what).result()
        row |= dict(measured_bytes=peak, measured_rise=peak - start)
    except (RuntimeError, MemoryError, OSError) as error:  # or killed: a RuntimeError too
        row["error"] = one_line(error)


def parse_arguments() -> argparse.Namespace:
    parser = ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    demo = ROOT / "models/SmolLM2-135M-Instruct"
    add("--checkpoint", type=Path, default=demo, help="folder with config.json (default: the demo)")
    add("--shape", choices=SHAPES, help="account for this shape, and measure nothing")
    lengths = "1024,2048,4096,8192,16384,32768,65536"
    add("--lengths", default=lengths, help=f"tokens of the prompts (default: {lengths})")
    add("--budget", type=int, default=4096, help="slots of epikv (default: 4096)")
    add("--dtype", choices=DTYPES, help="default: bfloat16 on cuda, float32 on cpu")
    add("--device", choices=("cuda", "cpu"), help="default: cuda if there is one or for --shape")
    add("--measure-up-to", type=int, metavar="N", help="default: what takes 70 %% of free memory")
    add("--output", type=Path, default=Path("memory.json"), help="default: memory.json")
    args = parser.parse_args()
    if args.device is None:
        args.device = "cuda" if args.shape or torch.cuda.is_available() else "cpu"
    args.dtype = args.dtype or ("bfloat16" if args.device == "cuda" else "float32")
    try:
        check(args)
    except (OSError, ValueError) as error:
        parser.error(one_line(error))
    return args


def check(args: argparse.Namespace) -> None:
    """Turn lengths and shape into what they mean. Raises ValueError for what cannot be."""
    need_matplotlib()
    if args.device == "cuda" and args.dtype == "float32":
        raise ValueError("flash attention on cuda takes no float32: choose another dtype")
    check_output(args.output, ".json")
    try:
        lengths = sorted({int(length) for length in args.lengths.split(",")})
    except ValueError:
        lengths = [0]
    if lengths[0] < 1:
        raise ValueError(f"lengths must be whole numbers of at least 1, got {args.lengths!r}")
    EvictionConfig(args.budget)
    args.lengths = lengths
    args.name = args.shape or args.checkpoint.name
    hf = SHAPES[args.shape] if args.shape else read_json(args.checkpoint / "config.json")
    args.config = ModelConfig.from_hf(hf)


def main() -> None:
    args = parse_arguments()
    settings = dict(model=args.name, dtype=args.dtype, device=args.device, budget=args.budget)
    settings |= dict(lengths=args.lengths, torch=torch.__version__, config=asdict(args.config))
    shape = (args.config, DTYPES[args.dtype], args.device)
    rows = account_for(shape, args.lengths, args.budget)
    is_here = not args.shape and (args.device == "cpu" or torch.cuda.is_available())
    up_to = args.measure_up_to if is_here else 0
    for row in rows:
        fits = up_to is None and row["accounted_bytes"] <= SHARE_OF_FREE * free_memory(args.device)
        if fits or row["length"] <= (up_to or 0):
            measure_row(row, shape, args.budget)
        content = json.dumps({"settings": settings, "rows": rows}, indent=1)
        args.output.write_text(content + "\n", encoding="utf-8")
    print(table(rows))
    title = f"{args.name}, {args.dtype} on {args.device}, budget {args.budget:,}"
    labels = (title, "context length, tokens", "peak memory of model and run, GiB")
    line_plot(args.output.with_suffix(".png"), *labels, curves(rows), log_x=True, log_y=True)


if __name__ == "__main__":
    main()
