# SPDX-License-Identifier: Apache-2.0
"""Write the page of results from the records of the evaluations.

    python scripts/report.py   # scripts/results/ -> scripts/RESULTS.md

The folder of results holds the output folders `fidelity`, `cache-length` (fidelity with positions
that stop at the budget) and `passkey`, and the files `memory-*.json`; and, where there is a
calibration, `calibration/first.json` and `second.json`, by the half of the problems on which they
were chosen, `held-out-first` and `held-out-second`, fidelity of each to the other half's traces,
and `passkey-calibrated`. Nothing on the page is written by hand: to change a number, run what made
it.
"""

import json
import os
import re
import statistics
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import passkey  # noqa: E402
from baselines import BASELINES  # noqa: E402
from calibrate import spearman  # noqa: E402
from epikv import POLICIES  # noqa: E402
from fidelity import cell, mean_and_error  # noqa: E402
from generate import ArgumentParser  # noqa: E402
from model import one_line  # noqa: E402
from records import read_lines, told_in_one_line  # noqa: E402
from replay import Setting, by_setting  # noqa: E402
from tables import markdown, t_interval  # noqa: E402

Results = dict[Setting, list[dict]]
CONTROL = "streaming"  # what every policy has to beat
HALVES = ("first", "second")  # of the problems, on which a calibration was chosen
GIB = 2**30

TRACES = (
    "The traces are of DeepSeek-R1-Distill-Llama-8B and -Qwen-14B, right and wrong ones, on five"
    " problems of MATH level 5 (interp-reasoning/thought-anchors.com, MIT). Intervals take them as"
    " independent, and are not corrected for the number of comparisons: a single one that excludes"
    " zero by little is no discovery. The layers and thresholds of `thinkv` were calibrated on"
    " traces of the same kind; besides, it forgets at the end of a thought, room or no room."
)

PAPER = """\
The protocol of the paper for one GPU with 80 GB. It has not been run for this page. On purpose
different from the authors' run: true positions and equal budgets; the instruction stands in the
user's turn, as the model's makers advise; the first 100 problems of MATH-500 as they come, where
the authors left out those whose answer their pattern could not read; an answer cut off at the limit
is not counted as solved. They counted it if its last box was right: compare with the column "right
with capped".

```bash
MODEL=deepseek-ai/DeepSeek-R1-Distill-Llama-8B
POLICIES=streaming,epikv,epikv-raw,epikv-band,epikv-seg,lag-kv,key-var,value-var,random,full
POLICIES=$POLICIES,h2o,raas,thinkv,r-kv,longflow,attn-hs
python scripts/evaluate.py --checkpoint $MODEL --dataset math500 --limit 100 --greedy \\
    --max-new-tokens 8192 --policies $POLICIES --budgets 512,1024,2048,4096 --output runs/math500
python scripts/evaluate.py --checkpoint $MODEL --dataset aime2024 --greedy \\
    --max-new-tokens 16384 --policies $POLICIES --budgets 512,1024,2048,4096,8192 \\
    --output runs/aime2024
```

With `torchrun --nproc-per-node N scripts/evaluate.py ...` N GPUs share the work."""


def read_run(folder: Path) -> tuple[dict, Results]:
    """Settings and records of an output folder."""
    settings = json.loads((folder / "settings.json").read_text(encoding="utf-8"))
    return settings, by_setting(read_lines(folder, "records"))


def budgets_of(results: Results) -> list[int]:
    return sorted({setting.budget for setting in results if setting.budget is not None})


def at_budget(results: Results, budget: int) -> Results:
    return {setting: found for setting, found in results.items() if setting.budget == budget}


# Fidelity --------------------------------------------------------------------------------------


def values_of(records: list[dict], measure: str) -> dict[str, float]:
    return {record["trace"]: record["all"][measure] for record in records}


def difference(records: list[dict], others: list[dict]) -> tuple[float, float, float]:
    """Mean difference of the loss gap over the same traces, and its 95 % interval."""
    mine, theirs = values_of(records, "loss_gap"), values_of(others, "loss_gap")
    differences = [mine[trace] - theirs[trace] for trace in sorted(mine) if trace in theirs]
    return mean_and_interval(differences)


def mean_and_interval(values: list[float]) -> tuple[float, float, float]:
    return statistics.mean(values), *t_interval(values)


def with_interval(mean: float, low: float, high: float) -> str:
    return f"{mean:+.3f} ({low:+.3f} to {high:+.3f})"


def loss_gap(records: list[dict]) -> float:
    return mean_and_error([*values_of(records, "loss_gap").values()])[0]


Rows = dict[tuple[str, str], list[dict]]  # by name and slot map


def rows_of(results: Results) -> Rows:
    return {(setting.line, setting.slot_map): records for setting, records in results.items()}


def fidelity_table(results: Rows, control: list[dict]) -> str:
    """The rows of one budget, nearest to the full cache first."""
    titles = ["policy", "slot map", "loss gap, nats", f"less {CONTROL}'s (95 % interval)"]
    titles += ["KL, nats", "same likeliest token", "slots held"]
    rows = []
    for names, records in sorted(results.items(), key=lambda item: loss_gap(item[1])):
        against = with_interval(*difference(records, control))
        cells = [cell([*values_of(records, m).values()]) for m in ("loss_gap", "kl", "agreement")]
        held = mean_and_error([*values_of(records, "held").values()])[0]
        rows.append([*names, cells[0], against, *cells[1:], f"{held:.0%}"])
    return markdown(titles, rows)


def verdict(results: Rows, control: list[dict]) -> str:
    """Which rows of one budget are nearer to the full cache than the control, which farther."""
    signs: dict[str, list[str]] = {"nearer": [], "farther": [], "as near as can be told": []}
    for (name, _), records in results.items():
        if name != CONTROL:
            _, low, high = difference(records, control)
            sign = "nearer" if high < 0 else "farther" if low > 0 else "as near as can be told"
            signs[sign].append(f"`{name}`")
    parts = [f"{sign}: {', '.join(names) or 'none'}" for sign, names in signs.items()]
    return f"Than `{CONTROL}`, {'; '.join(parts)}."


def rounding(results: Results) -> str:
    """What differs while nothing is forgotten yet. (ThinKV may forget with room to spare.)"""
    before = [r["before"] for found in results.values() for r in found if "before" in r]
    before = [record for record in before if record["held"] == 1]
    kl, agreement = (statistics.mean(r[name] for r in before) for name in ("kl", "agreement"))
    return (
        "Where the text is shorter than the budget and nothing has been forgotten, what differs is"
        f" rounding: KL {kl:.4f} nats, the same likeliest token in {agreement:.1%} of tokens."
    )


def fidelity_section(folder: Path, page: Path) -> str:
    settings, results = read_run(folder)
    n_traces = max(len(found) for found in results.values())
    parts = [
        f"{settings['checkpoint']} in {settings['dtype']}, {n_traces} reasoning traces x"
        f" {settings['tokens']} tokens fed to every policy; means and standard errors over traces."
        " Loss gap: nats a token by which the text is less likely than under the full cache, whose"
        " own gap is zero. Slots held: of those that could be; the rest of a budget stands empty.",
        TRACES,
        rounding(results),
        f"![Loss gap against budget]({relative(folder / 'loss_gap.png', page)})",
    ]
    for budget in budgets_of(results):
        found = rows_of(at_budget(results, budget))
        control = found[CONTROL, "shared"]
        parts += [f"### Budget {budget}", verdict(found, control), fidelity_table(found, control)]
    return "\n\n".join(parts)


def positions_section(folder: Path, true_folder: Path) -> str:
    """What positions that stop at the budget cost, beside the same settings with true ones."""
    stopped, true = read_run(folder)[1], read_run(true_folder)[1]
    rows = []
    for setting, records in stopped.items():
        names = {record["trace"] for record in records}
        same = [record for record in true[setting] if record["trace"] in names]
        gaps = [cell([*values_of(found, "loss_gap").values()]) for found in (same, records)]
        agreements = [cell([*values_of(f, "agreement").values()]) for f in (same, records)]
        rows.append([str(setting), *gaps, *agreements])
    titles = ["", "loss gap, true", "loss gap, stopped", "agreement, true", "agreement, stopped"]
    return (
        "The authors' code takes a token's position from the length of the cache, so positions stop"
        " at the budget (`fidelity.py --positions cache-length`).\n\n" + markdown(titles, rows)
    )


# Passkey ---------------------------------------------------------------------------------------


def passkey_section(folder: Path, page: Path) -> str:
    settings, results = read_run(folder)
    n_texts = len({record["trial"] for found in results.values() for record in found})
    full = {setting: found for setting, found in results.items() if setting.budget is None}
    parts = [
        f"{settings['checkpoint']} in {settings['dtype']}, {n_texts} texts; numbers told that many"
        " tokens before they are asked for; share recalled, with Wilson's 95 % interval, which"
        " takes the answers of one text as independent. `full` is what the model can do at all. The"
        " share of slots that a policy holds stands in the tables above.",
        f"![Recall against budget]({relative(folder / 'recall.png', page)})",
    ]
    for budget in budgets_of(results):
        found = at_budget(results, budget).items()
        ranked = sorted(found, key=lambda item: -passkey.recalled(item[1]))
        parts += [f"### Recall within {budget} slots", passkey.table(full | dict(ranked))]
        plot = relative(folder / f"recall-{budget}.png", page)
        parts.append(f"![Recall against distance, budget {budget}]({plot})")
    return "\n\n".join(parts)


# Memory ----------------------------------------------------------------------------------------


def memory_section(file: Path, page: Path) -> str:
    """One account, and its measurements where there are any, by length and contender."""
    content = json.loads(file.read_text(encoding="utf-8"))
    settings, rows = content["settings"], content["rows"]
    contenders = list(dict.fromkeys(row["contender"] for row in rows))
    cells = {(row["length"], row["contender"]): memory_cell(row) for row in rows}
    table = [
        [f"{length:,}", *(cells[length, contender] for contender in contenders)]
        for length in sorted({row["length"] for row in rows})
    ]
    plot = relative(file.with_suffix(".png"), page)
    return (
        f"### {settings['model']}, {settings['dtype']} on {settings['device']}, budget"
        f" {settings['budget']:,}\n\n{markdown(['context, tokens', *contenders], table)}\n\n"
        f"![Peak memory against context length]({plot})"
    )


def memory_cell(row: dict) -> str:
    """GiB accounted for, and the rise above the model, accounted and measured."""
    text = f"{row['accounted_bytes'] / GIB:.2f}"
    if row["measured_rise"] is not None:
        text += f" (rise {row['accounted_rise'] / GIB:.2f}, measured"
        text += f" {row['measured_rise'] / GIB:.2f})"
    elif "error" in row:
        text += f" (not measured: {row['error']})"
    return text


# Calibration -----------------------------------------------------------------------------------


def calibration_section(source: Path, page: Path) -> str:
    """What was chosen on each half of the problems, and how it does on the other."""
    folder = source / "calibration"
    chosen = [json.loads((folder / f"{half}.json").read_text("utf-8")) for half in HALVES]
    rows = [
        [f"{half} half: {name}", *correlation_cells(evidence), head_cell(one["by_head"].get(name))]
        for half, one in zip(HALVES, chosen, strict=True)
        for name, evidence in one["checked"].items()
    ]
    bands = [
        f"Chosen on the {half} half: for a token blocks {blocks(one['band_a'])}, against it"
        f" {blocks(one['band_b'])}, weights {one['weight_a']:.2f} and {one['weight_b']:.2f}. On the"
        f" other half their score goes with a token's position by {one['trend']['raw']:+.2f} from"
        f" raw changes, by {one['trend']['z-score']:+.2f} from z-scores."
        for half, one in zip(HALVES, chosen, strict=True)
    ]
    plot = relative(folder / f"{HALVES[0]}.png", page)
    return "\n\n".join(
        [
            f"Labels: {chosen[0]['outcome']} (see `label_importance.py`). Correlations are"
            " Spearman's, within traces, means over the traces of the half that chose nothing; of a"
            " fit's scores, mean over heads, with the labels, and of each head's own with what its"
            " later queries do.",
            markdown(["chosen on the", "correlation (95 % interval)", "p", "by head"], rows),
            attention_line(source / "labels"),
            drop_line(source / "labels-loss", source / "labels"),
            *bands,
            *map(tuning, HALVES, chosen),
            f"![Correlation of each block's change with importance]({plot})",
            *held_out_tables(source),
            "### Other uses of the fitted score",
            variants_table(source),
            "### Recall of planted facts, calibrated on the first half",
            passkey.table(read_run(source / "passkey-calibrated")[1]),
        ]
    )


def attention_line(folder: Path) -> str:
    """How the attention that tokens get goes with their effect, on the same labels."""
    by_delay: dict[int, list[float]] = {}
    for record in read_lines(folder, "records"):
        both = [record["attention"], record["effect"]]
        known = [pair for pair in zip(*both, strict=True) if None not in pair]
        if known:
            attention, effect = torch.tensor(known, dtype=torch.float64).T
            found = by_delay.setdefault(record["delay"], [])
            found.append(spearman(attention[:, None], effect).item())
    told = [
        f"{with_interval(*mean_and_interval(found))} after {delay} tokens ({len(found)} traces)"
        for delay, found in sorted(by_delay.items())
    ]
    return (
        "The attention that a token will get, mean over layers and heads, which no policy can know,"
        f" goes with its effect by {', '.join(told)}."
    )


def drop_line(dropped: Path, labels: Path) -> str:
    """How effect and attention, means over a window, go with the loss when it is dropped."""
    settings = json.loads((dropped / "settings.json").read_text(encoding="utf-8"))
    window = settings["window"]  # as far apart as they are long
    by_key = {(one["trace"], one["delay"]): one for one in read_lines(labels, "records")}
    found: dict[str, list[float]] = {"effect": [], "attention": []}
    for record in read_lines(dropped, "records"):
        label = by_key[record["trace"], record["delay"]]
        for name, correlations in found.items():
            both = zip(record["loss"], label[name], strict=True)
            known = torch.tensor([pair for pair in both if None not in pair], dtype=torch.float64)
            whole = known[: len(known) // window * window].view(-1, window, 2).mean(1)
            correlations.append(spearman(whole[:, 1:], whole[:, 0]).item())
    told = [
        f"{name} by {with_interval(*mean_and_interval(correlations))}"
        for name, correlations in found.items()
    ]
    return (
        f"Where windows of {window} tokens are dropped {record['delay']} tokens later, the loss on"
        f" the rest of the text goes with their mean {', with their '.join(told)}"
        f" ({len(found['effect'])} traces)."
    )


def correlation_cells(evidence: dict) -> list[str]:
    (mean,), (low,), (high,) = (evidence[name] for name in ("within_trace", "low", "high"))
    return [with_interval(mean, low, high), f"{evidence['p']:.3f}"]


def head_cell(found: list[float] | None) -> str:
    """Mean and interval; bands have no score by head."""
    return "" if found is None else with_interval(*found)


def tuning(half: str, chosen: dict) -> str:
    """What each weight of age and each recency window lost on the traces that chose."""
    by_age, by_recent = (
        ", ".join(f"{float(value):g}: {gap:.3f}" for value, gap in chosen["tuned"][name].items())
        for name in ("age", "recent")
    )
    return (
        f"Tuned on the {half} half in a budget of {chosen['budget']}, loss gap in nats by the"
        f" weight of log(1 + age): {by_age}; then by the share of recent tokens: {by_recent}."
    )


def blocks(band: list[int]) -> str:
    return f"{band[0]} to {band[-1]}" if len(band) > 1 else str(band[0])


def held_out_tables(source: Path) -> list[str]:
    """Fidelity of what was calibrated on one half of the problems to traces of the other."""
    plain = read_run(source / "fidelity")[1]
    calibrated: Results = {}
    for half in HALVES:
        for setting, records in read_run(source / f"held-out-{half}")[1].items():
            calibrated.setdefault(setting, []).extend(records)
    parts = []
    for budget in budgets_of(calibrated):
        rows = rows_of(at_budget(plain, budget))
        for setting, records in at_budget(calibrated, budget).items():
            rows[f"{setting.line}, calibrated", setting.slot_map] = records
        found = [{record["trace"] for record in records} for records in rows.values()]
        common = set.intersection(*found)
        rows = {
            name: [record for record in records if record["trace"] in common]
            for name, records in rows.items()
        }
        control = rows[CONTROL, "shared"]
        reading = [name for name in rows if name[0] in BASELINES]  # attention weights
        nearest = min(reading, key=lambda name: loss_gap(rows[name]))
        fit = next(name for name in rows if name[0] == "epikv-fit, calibrated")
        bands = [("epikv, calibrated", "shared"), ("epikv", "shared")]
        parts += [
            f"### Held-out traces, budget {budget}",
            f"Over {len(common)} traces, in nats (95 % interval): {less(rows, *bands)};"
            f" {less(rows, fit, nearest)}, the nearest of those that read attention weights."
            f" {verdict(rows, control)}",
            fidelity_table(rows, control),
        ]
    return parts


def less(rows: Rows, one: tuple[str, str], other: tuple[str, str]) -> str:
    """The difference of two rows' loss gaps, in words."""
    return f"`{one[0]}` less `{other[0]}` {with_interval(*difference(rows[one], rows[other]))}"


def variants_table(source: Path) -> str:
    """Loss gaps of other uses of the fit on all held-out traces, and less the plain one's."""
    files = sorted(source.glob("variants-*.json"))
    contents = [json.loads(file.read_text("utf-8")) for file in files]
    gaps: dict[str, list[float]] = {}
    for content in contents:
        for name, by_trace in content["loss_gap"].items():
            gaps.setdefault(name, []).extend(by_trace.values())
    plain, *_ = gaps.values()
    rows = []
    for name, values in gaps.items():
        differences = [value - same for value, same in zip(values, plain, strict=True)]
        low, high = t_interval(differences)
        rows.append(
            [
                name,
                f"{statistics.mean(values):.4f}",
                f"{statistics.mean(differences):+.4f} ({low:+.4f} to {high:+.4f})",
            ]
        )
    settings = contents[0]["settings"]
    titles = ["variant", "loss gap, nats", "less the first's (95 % interval)"]
    return (
        f"{len(plain)} held-out traces x {settings['tokens']} tokens, budget {settings['budget']}"
        f" (`variants.py`).\n\n{markdown(titles, rows)}"
    )


# Speed -----------------------------------------------------------------------------------------


SPEED = {  # the files of benchmark.py and quantization.py, in order
    "peers": "Against transformers and kvpress",
    "peers-step": "Likewise, with `--compile-mode step`",
    "peers-batch4": "Likewise, batch 4",
    "peers-batch16": "Likewise, batch 16",
    "peers-budgets": "Likewise, other budgets",
    "processes": "Peak memory and compilation, each in a process of its own",
    "step": "What a step spends",
    "policies": "Policies",
    "labels": "Labels of token importance",
    "quantization": "What fewer bits cost",
}


def speed_section(folder: Path, page: Path) -> str:
    """The tables as they were printed, and the plots."""
    parts = [
        "Of what is compared, short runs alternate in one process. Times are medians with"
        " quartiles, ratios medians over the rounds. The share of the bandwidth is what a step"
        " reads of weights, keys and values in its time, over what a plain sum read in the same"
        " round. Ours is faster by: how many times the time of the first line it takes. Goals were"
        " set for batch 1 and budget 512; tables of others show them for comparison."
    ]
    for name, title in SPEED.items():
        if (file := folder / f"{name}.md").is_file():
            parts += [f"### {title}", file.read_text(encoding="utf-8").strip()]
            for plot in sorted(folder.glob("*.png")):
                if re.fullmatch(rf"{name}-batch\d+-budget\d+", plot.stem):
                    parts.append(f"![Milliseconds a step]({relative(plot, page)})")
    return "\n\n".join(parts)


# The page --------------------------------------------------------------------------------------


def relative(file: Path, page: Path) -> str:
    return Path(os.path.relpath(file, page.parent)).as_posix()


def write_page(source: Path, page: Path) -> str:
    memory = [memory_section(file, page) for file in sorted(source.glob("memory-*.json"))]
    calibration = []
    if (source / "calibration").is_dir():
        calibration = [
            "## Calibration: bands and weights of this model",
            calibration_section(source, page),
        ]
    speed = []
    if (source / "speed").is_dir():
        speed = ["## Speed, and what fewer bits cost", speed_section(source / "speed", page)]
    parts = [
        "# Results",
        f"Written by `scripts/{Path(__file__).name}` from `{relative(source, page)}/`; how each"
        " was run stands in `settings.json` there, or above its table. Every policy runs in the"
        " same cache, with the same budget, sinks and true positions, and its own default recency"
        " window; see the README for what they do, and `baselines.py` for those that read"
        " attention; its"
        " `-reference` variants, the authors' simplifications, were left out.",
        "## Fidelity: how far from the full cache",
        fidelity_section(source / "fidelity", page),
        "## Positions that stop at the budget",
        positions_section(source / "cache-length", source / "fidelity"),
        "## Passkey: what is still known",
        passkey_section(source / "passkey", page),
        *calibration,
        "## Memory against context length",
        "Peak GiB of model and run, by the account of `memory.py`: a prompt of that length"
        " prefilled and one token decoded, batch 1. Where it was measured too, the rise above the"
        " loaded model by account and by measurement stands in brackets, and in the plot the"
        " measured rise on top of the model's weights. `attention` is the full cache with attention"
        " weights that stand in memory.",
        *memory,
        *speed,
        "## The paper's protocol, ready to run",
        PAPER,
    ]
    return "\n\n".join(parts) + "\n"


def main() -> None:
    parser = ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    here = Path(__file__).resolve().parent
    add("--results", type=Path, default=here / "results", help="folder (default: beside this file)")
    add("--output", type=Path, default=here / "RESULTS.md", help="default: beside this file")
    args = parser.parse_args()
    POLICIES.update(BASELINES)
    with told_in_one_line(parser):
        try:
            text = write_page(args.results.resolve(), args.output.resolve())
        except KeyError as error:
            raise ValueError(f"the results are not complete: no {one_line(error)}") from None
        args.output.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
