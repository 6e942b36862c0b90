"""The page of results: numbers by hand, and the page that is kept is the one that is written."""

import json
import re
import sys
from pathlib import Path

import pytest

import report
from epikv import POLICIES

pytestmark = pytest.mark.usefixtures("registered")

HERE = Path(report.__file__).parent


def record(policy, trace, gap, budget=64, kl=0.5, agreement=0.75, held=1.0, **more):
    measures = {"loss_gap": gap, "kl": kl, "agreement": agreement, "held": held}
    return (
        {"policy": policy, "budget": budget, "recent": None, "trace": trace}
        | more
        | {"all": measures}
    )


def write_run(folder, settings, records):
    folder.mkdir(parents=True)
    (folder / "settings.json").write_text(json.dumps(settings), encoding="utf-8")
    lines = "".join(json.dumps(record) + "\n" for record in records)
    (folder / "records.jsonl").write_text(lines, encoding="utf-8")


def row_of(text, name):
    """The cells of the table's row that begins with `name`."""
    (line,) = (line for line in text.splitlines() if line.startswith(f"| {name} |"))
    return [cell.strip() for cell in line.strip("|").split("|")]


FIDELITY = [
    *(record("streaming", str(i), 0.2 + 0.1 * i) for i in range(4)),  # mean 0.35
    *(record("epikv", str(i), 0.1 + 0.1 * i) for i in range(4)),  # 0.1 less in each trace
    *(record("thinkv", str(i), 0.25 + 0.1 * i, held=0.5) for i in range(4)),  # 0.05 more
    *(record("random", str(i), 0.2 + 0.1 * (3 - i)) for i in range(4)),  # the same in the mean
]


@pytest.fixture
def source(tmp_path):
    """A folder of results with all that the page tells of."""
    settings = {"checkpoint": "Tiny", "dtype": "float32", "tokens": 100}
    before = {"loss_gap": 0.0, "kl": 0.002, "agreement": 0.99, "held": 1.0}
    records = [*FIDELITY, record("streaming", "0", 0.0, 128, before=before)]
    write_run(tmp_path / "results/fidelity", settings, records)
    stopped = [record("epikv", str(i), 2.5) for i in range(2)]
    write_run(tmp_path / "results/cache-length", settings, stopped)
    answers = [
        {"policy": policy, "budget": budget, "recent": None, "trial": trial, "distance": 100}
        | {"answer": "1234", "found": found}
        for policy, budget, told in (("full", None, 2), ("streaming", 64, 0), ("epikv", 64, 1))
        for trial, found in enumerate(["1234"] * told + ["9"] * (2 - told))
    ]
    write_run(tmp_path / "results/passkey", settings, answers)
    rows = [
        {"contender": name, "length": n, "accounted_bytes": size * 2**30, "measured_rise": None}
        | {"accounted_rise": 2**30}
        for name, n, size in (
            ("full", 1024, 2),
            ("epikv", 1024, 1),
            ("full", 2048, 4),
            ("epikv", 2048, 1),
        )
    ]
    rows[0]["measured_rise"] = 1.5 * 2**30
    memory = {"settings": {"model": "Tiny", "dtype": "float32", "device": "cpu", "budget": 64}}
    (tmp_path / "results/memory-tiny.json").write_text(
        json.dumps(memory | {"rows": rows}), encoding="utf-8"
    )
    return tmp_path / "results"


def test_fidelity_by_hand(source):
    """Best first. Standard errors: of 0.2, 0.3, 0.4, 0.5 it is 0.1291 / 2."""
    text = report.fidelity_section(source / "fidelity", source.parent / "page.md")
    at_64 = text.partition("### Budget 64")[2].partition("### Budget 128")[0]
    lines = [line.split(" | ")[0] for line in at_64.splitlines() if line.startswith("| ")]
    assert lines[2:] in (
        ["| epikv", "| streaming", "| random", "| thinkv"],
        ["| epikv", "| random", "| streaming", "| thinkv"],
    )
    assert row_of(at_64, "epikv") == [
        "epikv",
        "shared",
        "0.2500 ± 0.0645",
        "-0.100 (-0.100 to -0.100)",
        "0.5000 ± 0.0000",
        "0.7500 ± 0.0000",
        "100%",
    ]
    assert row_of(at_64, "streaming")[3] == "+0.000 (+0.000 to +0.000)"
    assert row_of(at_64, "thinkv")[1] == "layer" and row_of(at_64, "thinkv")[6] == "50%"
    assert (
        "Than `streaming`, nearer: `epikv`; farther: `thinkv`; as near as can be told: `random`."
    ) in at_64
    assert "rounding: KL 0.0020 nats, the same likeliest token in 99.0% of tokens" in text
    assert "Tiny in float32, 4 reasoning traces x 100 tokens" in text


def test_positions_beside_true_ones(source):
    """Over the same traces: 0.1 and 0.2 of `epikv` against 2.5."""
    text = report.positions_section(source / "cache-length", source / "fidelity")
    assert row_of(text, "epikv, 64")[1:3] == ["0.1500 ± 0.0500", "2.5000 ± 0.0000"]


def test_recall_beside_the_full_cache(source):
    text = report.passkey_section(source / "passkey", source.parent / "page.md")
    names = [line.split(" | ")[0] for line in text.splitlines() if line.startswith("| ")]
    assert names[2:] == ["| full", "| epikv, 64", "| streaming, 64"]
    assert row_of(text, "epikv, 64")[2].startswith("50% (")


def test_memory_by_length(source):
    text = report.memory_section(source / "memory-tiny.json", source.parent / "page.md")
    assert row_of(text, "1,024") == ["1,024", "2.00 (rise 1.00, measured 1.50)", "1.00"]
    assert row_of(text, "2,048") == ["2,048", "4.00", "1.00"]
    assert "(results/memory-tiny.png)" in text


@pytest.fixture
def calibrated(source):
    """The same with calibrations: each half held out two of the four traces."""
    (source / "calibration").mkdir()
    for half, sign, traces in (("first", 1, "01"), ("second", -1, "23")):
        evidence = {"within_trace": [0.3 * sign], "low": [0.1 * sign], "high": [0.5 * sign]}
        content = {"band_a": [3, 4, 5], "band_b": [7], "weight_a": 1.0, "weight_b": 0.25}
        content |= {"outcome": "effect", "trend": {"raw": 0.5, "z-score": -0.125}}
        content["checked"] = {"bands": evidence | {"p": 0.01}, "fit": evidence | {"p": 0.02}}
        content["by_head"] = {"fit": [0.6 * sign, 0.55, 0.65]}
        content |= {"budget": 128, "tuned": {"age": {"-0.5": 0.25, "0.0": 0.5}}}
        content["tuned"]["recent"] = {"0.25": 0.125, "0.375": 0.0625}
        text = json.dumps(content)
        (source / "calibration" / f"{half}.json").write_text(text, encoding="utf-8")
        records = [record("epikv", trace, 0.15 + 0.1 * int(trace)) for trace in traces]
        records += [record("epikv-fit", trace, 0.1 * int(trace)) for trace in traces]
        records.append(record("epikv-fit", f"only in the {half}", 9.0))
        write_run(source / f"held-out-{half}", {}, records)
        gaps = {trace: 0.1 * int(trace) for trace in traces}
        longer = {trace: gap + 0.25 for trace, gap in gaps.items()}
        content = {"settings": {"budget": 64, "tokens": 100}}
        content["loss_gap"] = {"epikv-fit": gaps, "spans": longer}
        (source / f"variants-{half}.json").write_text(json.dumps(content), encoding="utf-8")
    effects = {"0": [None, 1.0, 2.0, 3.0], "1": [None, 3.0, 2.0, 1.0], "2": [None, 1.0, 3.0, 2.0]}
    labels = [
        {"trace": trace, "delay": delay, "attention": [0.5, 0.1, 0.2, 0.3], "effect": effect}
        for delay in (8, 64)
        for trace, effect in effects.items()
    ]
    write_run(source / "labels", {}, labels)
    losses = [{"trace": "0", "delay": 8, "loss": [None, 1.0, 2.0, 3.0]}]
    write_run(source / "labels-loss", {"window": 1}, losses)
    answer = {"policy": "epikv-fit", "budget": 64, "recent": None, "trial": 0, "distance": 100}
    answers = [answer | {"answer": "1234", "found": found} for found in ("1234", "1234", "9", "9")]
    write_run(source / "passkey-calibrated", {}, answers)
    return source


def test_calibration_by_hand(calibrated):
    """Both halves' evidence; and of the held-out traces of both one table beside the rivals.

    Traces that some policy has not seen are left out.
    """
    text = report.calibration_section(calibrated, calibrated.parent / "page.md")
    assert row_of(text, "first half: bands")[1:] == ["+0.300 (+0.100 to +0.500)", "0.010", ""]
    assert row_of(text, "first half: fit")[2:] == ["0.020", "+0.600 (+0.550 to +0.650)"]
    assert (
        "Tuned on the second half in a budget of 128, loss gap in nats by the weight of"
        " log(1 + age): -0.5: 0.250, 0: 0.500; then by the share of recent tokens: 0.25: 0.125,"
        " 0.375: 0.062."
    ) in text
    assert row_of(text, "second half: bands")[1] == "-0.300 (-0.100 to -0.500)"
    assert "for a token blocks 3 to 5, against it 7, weights 1.00 and 0.25" in text
    assert "by +0.50 from raw changes, by -0.12 from z-scores" in text
    assert (
        "Over 4 traces, in nats (95 % interval): `epikv, calibrated` less `epikv` +0.050 (+0.050 to"
        " +0.050); `epikv-fit, calibrated` less `thinkv` -0.250 (-0.250 to -0.250), the nearest of"
    ) in text
    # Of three ranks 1, -1 and 1/2; Student's t of two degrees of freedom is 4.303,
    # of which the expansion has 4.16.
    low, high = 1 / 6 - 4.303 * 1.0408 / 3**0.5, 1 / 6 + 4.303 * 1.0408 / 3**0.5
    (told,) = (line for line in text.splitlines() if line.startswith("The attention"))
    found = [float(number) for number in re.findall(r"[+-]\d\.\d+", told)]
    assert found == pytest.approx([1 / 6, low, high] * 2, abs=0.1)
    assert "after 8 tokens (3 traces), " in told and "after 64 tokens (3 traces)." in told
    assert "4 held-out traces x 100 tokens, budget 64" in text
    assert row_of(text, "spans")[1:] == ["0.4000", "+0.2500 (+0.2500 to +0.2500)"]
    gaps = {row: row_of(text, row)[2] for row in ("epikv", "epikv, calibrated", "random")}
    assert [gap.split()[0] for gap in gaps.values()] == ["0.2500", "0.3000", "0.3500"]
    assert row_of(text, "epikv-fit, calibrated")[2:4] == [
        "0.1500 ± 0.0645",
        "-0.200 (-0.200 to -0.200)",
    ]
    assert "(results/calibration/first.png)" in text
    assert row_of(text, "epikv-fit, 64")[2].startswith("50% (")


def test_dropped_windows_by_hand(tmp_path):
    """Three windows of two tokens, the odd one left out: losses 1, 3 and 2, as ranks.

    Effects have means 1, 5 and 4 in one trace, as the losses, and 5, 1 and 4 in the other;
    attention falls.
    """
    losses = [1.0, 1.0, 3.0, 3.0, 2.0, 2.0, 7.0, None]
    attention = [9.0, 9.0, 5.0, 5.0, 1.0, 1.0, 0.0, 0.0]
    effects = {"0": [0.0, 2.0, 4.0, 6.0, 3.0, 5.0], "1": [4.0, 6.0, 0.0, 2.0, 3.0, 5.0]}
    labels = [
        {"trace": trace, "delay": 9, "attention": attention, "effect": [*effect, 9.0, 9.0]}
        for trace, effect in effects.items()
    ]
    write_run(tmp_path / "labels", {}, labels)
    dropped = [{"trace": trace, "delay": 9, "loss": losses} for trace in effects]
    write_run(tmp_path / "loss", {"window": 2}, dropped)
    text = report.drop_line(tmp_path / "loss", tmp_path / "labels")
    assert "windows of 2 tokens are dropped 9 tokens later" in text and "(2 traces)" in text
    # Ranks 0, 2, 1 against 0, 2, 1 and 2, 0, 1: 1 and -1. Against 2, 1, 0: -1/2.
    assert "mean effect by +0.000 (" in text and "their attention by -0.500 (-0.500 to" in text


def test_the_page_tells_of_a_calibration_where_there_is_one(source, calibrated):
    text = report.write_page(source, source.parent / "page.md")
    assert "## Calibration: bands and weights of this model" in text
    for file in (source / "calibration").iterdir():
        file.unlink()
    (source / "calibration").rmdir()
    assert "Calibration" not in report.write_page(source, source.parent / "page.md")


def test_the_page_tells_of_speed_where_it_was_measured(source):
    page = source.parent / "page.md"
    assert "## Speed" not in report.write_page(source, page)
    (source / "speed").mkdir()
    (source / "speed/step.md").write_text("| b | 2 |\n", encoding="utf-8")
    (source / "speed/peers.md").write_text("| a | 1 |\n", encoding="utf-8")
    (source / "speed/peers-batch1-budget512.png").touch()
    (source / "speed/peers-batch4-batch4-budget512.png").touch()  # of another file
    text = report.write_page(source, page)
    _, section = text.split("## Speed, and what fewer bits cost\n")
    section, _ = section.split("\n## ", 1)
    one, other = section.split("\n### ")[1:]
    assert one.startswith("Against transformers and kvpress\n\n| a | 1 |\n\n![")
    assert "(results/speed/peers-batch1-budget512.png)" in one and one.count("![") == 1
    assert other.strip() == "What a step spends\n\n| b | 2 |"


def test_every_file_of_speed_is_on_the_page():
    files = (HERE / "results/speed").glob("*.md")
    assert {file.stem for file in files} == set(report.SPEED)


def test_the_command(source, monkeypatch):
    """All sections, in a page beside the results; and a missing part is said in one line."""
    page = source.parent / "page.md"
    options = ["--results", str(source), "--output", str(page)]
    monkeypatch.setattr(sys, "argv", ["report.py", *options])
    report.main()
    text = page.read_text(encoding="utf-8")
    assert [line for line in text.splitlines() if line.startswith("## ")] == [
        "## Fidelity: how far from the full cache",
        "## Positions that stop at the budget",
        "## Passkey: what is still known",
        "## Memory against context length",
        "## The paper's protocol, ready to run",
    ]
    (source / "passkey/settings.json").unlink()
    with pytest.raises(SystemExit) as exit:
        report.main()
    assert exit.value.code == 2


def test_the_kept_page_is_the_written_one():
    """And every picture on it is there."""
    page = HERE / "RESULTS.md"
    text = page.read_text(encoding="utf-8")
    assert report.write_page(HERE / "results", page) == text
    pictures = [part.partition(")")[0] for part in text.split("](")[1:]]
    assert pictures and all((HERE / picture).is_file() for picture in pictures)


def test_every_policy_is_on_the_page():
    """Fidelity and recall at budgets 128, 256 and 512, over 16 traces of 1,500 tokens.

    But for `epikv-fit`, which was calibrated on some of them.
    """
    wanted = {
        (name, budget)
        for name in POLICIES
        if name not in ("full", "epikv-fit") and not name.endswith("-reference")
        for budget in (128, 256, 512)
    }
    settings, results = report.read_run(HERE / "results/fidelity")
    assert {(s.policy, s.budget) for s in results} == wanted
    assert settings["tokens"] >= 1500
    assert all(len({r["trace"] for r in found}) >= 16 for found in results.values())
    recalled = report.read_run(HERE / "results/passkey")[1]
    assert {(s.policy, s.budget) for s in recalled} == wanted | {("full", None)}
