"""The check of a GPU as far as a CPU can run it, and its sums on made-up measurements."""

import json
import os
import subprocess
import sys
import time
import types
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import check_gpu
import generate
from check_gpu import FULL, PARTS, SHAPE_8B, SMALL, TINY, Filled, Trace, compare_rows
from epikv import EvictionConfig
from model import Transformer

SCRIPT = Path(check_gpu.__file__)
ON_CUDA = replace(TINY, device="cuda")


@pytest.fixture(scope="module")
def small_model():
    return check_gpu.random_model(SMALL, torch.float32, "cpu")


# The whole -------------------------------------------------------------------------------------


def test_a_tiny_run(tmp_path):
    """Every part measures something or says that it needs CUDA, and nothing fails."""
    output = tmp_path / "out.json"
    command = [sys.executable, str(SCRIPT), "--tiny", "--output", str(output)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    result = json.loads(output.read_text(encoding="utf-8"))
    assert list(result) == list(PARTS)
    for part, records in result.items():
        needs_cuda = part in ("graph", "reduce-overhead")
        assert records and all(("skipped" in one) == needs_cuda for one in records.values())
        assert not any(check_gpu.has_failed(record) for record in records.values())
    assert {record["must"] for record in result["victims"].values()} == {
        "all of 20 steps, or a gap of at most 0.0001"
    }
    assert len(result["victims"]) == 13
    assert all(record["rows_that_never_part"] == 5 for record in result["victims"].values())
    n_checks = sum(map(len, result.values()))
    assert len(done.stdout.strip().splitlines()) == 2 + n_checks  # the table, and that alone
    assert done.stdout.count("skipped: needs CUDA") == 2


def test_without_cuda_it_says_so(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["check_gpu.py"])
    with pytest.raises(SystemExit) as caught:
        check_gpu.main()
    assert caught.value.code == 2
    assert "no CUDA GPU here; --tiny runs on a CPU" in capsys.readouterr().err


# Models and decoders ---------------------------------------------------------------------------


def test_the_shape_is_that_of_llama_8b():
    """8,030,261,248 parameters, as published; llama3's slowed frequencies."""
    with torch.device("meta"):
        model = Transformer(SHAPE_8B, torch.bfloat16)
    assert sum(weight.numel() for weight in model.parameters()) == 8_030_261_248
    assert SHAPE_8B.rope_scaling["type"] == "llama3" and SHAPE_8B.rope_theta == 500_000


def test_random_weights(small_model):
    """The same each time; norms are 1, and a matrix of n columns has a variance of 1 / n."""
    again = check_gpu.random_model(SMALL, torch.float32, "cpu")
    for one, other in zip(small_model.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, other)
    assert torch.equal(small_model.norm.weight, torch.ones(256))
    assert small_model.blocks[0].down.weight.std().item() == pytest.approx(512**-0.5, rel=0.02)


@pytest.mark.parametrize("free", [0, 9])
def test_a_filled_cache(small_model, free):
    """All slots but `free` taken in both rows; steps take these first, then evict."""
    decoder = Filled(small_model, EvictionConfig(32), "none", batch_size=2, free=free)
    cache, length = decoder.engine.cache, 32 - free
    wanted = [*range(length), *[-1] * free]
    assert cache.position[:, 0, 0].tolist() == [wanted, wanted]
    assert cache.length.tolist() == [length, length]
    keys = torch.stack([layer.k for layer in cache.layers])
    assert keys.std().item() == pytest.approx(1, rel=0.02)
    decoder.run(free + 1)
    assert (cache.position >= 0).all() and cache.length.tolist() == [33, 33]
    assert (cache.position == 32).sum().item() == 2


def test_throughput_by_hand(small_model, monkeypatch):
    """Half a second a step, at a copy speed of twice the bytes of a step in that time."""
    n_weights = sum(w.nbytes for w in small_model.parameters()) - small_model.embedding.nbytes
    n_bytes = n_weights + 2 * 32 * 2048
    monkeypatch.setattr(check_gpu, "rounds", lambda decoder, sizes: [0.5] * 5)
    monkeypatch.setattr(check_gpu, "copy_bandwidth", lambda device, n: 4 * n_bytes)
    found = check_gpu.throughput(small_model, EvictionConfig(32), TINY, batch_size=2)
    assert found["tokens_per_second"] == pytest.approx(4)
    assert found["ms"] == pytest.approx(500)
    assert found["gigabytes_per_second"] == pytest.approx(2 * n_bytes / 1e9)
    assert found["share_of_copy"] == pytest.approx(0.5)
    assert "goal" not in found  # that is for batch 1


def test_a_generation_is_compared_with_its_bare_steps(small_model, monkeypatch):
    """Ten steps in ten seconds of the clock, of which the prefill took none."""
    sizes = replace(TINY, shape=SMALL)
    clock = types.SimpleNamespace(perf_counter=lambda: 10.0 * len(runs))
    runs = []

    class Told(check_gpu.Generation):
        def decode(self):
            runs.append(self)
            yield from super().decode()

    monkeypatch.setattr(check_gpu, "Generation", Told)
    monkeypatch.setattr(check_gpu, "rounds", lambda decoder, sizes: [0.25, 0.5, 4.0])
    monkeypatch.setattr(check_gpu, "time", clock)
    monkeypatch.setattr(generate, "time", clock)
    found = check_gpu.race_generation(small_model, sizes)
    (run,) = runs
    assert len(run.outputs[0].tokens) == 11 and run.prefix(0) is None
    assert (found["ms_generation"], found["ms_steps"], found["ratio"]) == (1000, 500, 2)
    assert found["holds"] is False


def test_a_race_by_hand():
    """Rounds of 1 to 6 and of 2 seconds a step; the first round does not count."""

    class Runner:
        def __init__(self, seconds):
            self.seconds = iter(seconds)

        def run(self, n_steps):
            assert n_steps == 7
            return next(self.seconds)

    found = check_gpu.race({"one": Runner([1, 2, 3, 4, 5, 6]), "other": Runner([2] * 6)}, 7)
    assert found == {"ms_one": 4000, "ms_other": 2000, "ratio": 2}


# What needs CUDA, as far as it goes --------------------------------------------------------------


def test_launches_are_counted():
    names = ["cudaGraphLaunch", "cudaLaunchKernel", "aten::add", "cudaLaunchKernelExC"]
    names += ["cuLaunchKernelEx", "cudaGraphLaunch", "cudaDeviceSynchronize", "cuLaunchKernel"]
    names += ["cudaGraphInstantiateWithFlags", "cudaStreamBeginCapture", "cudaGraphDestroy"]
    assert check_gpu.count_launches(names) == {"graphs": 2, "kernels": 4, "records": 2}


@pytest.fixture
def graph_part(monkeypatch):
    """Records of the part on a CPU, and the modes of sync debugging it set."""
    modes = []
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    checks = PARTS["graph"][0](TINY)
    return {name: check_gpu.attempt(measure) for name, measure in checks}, modes


def test_the_graph_part_without_a_graph(graph_part):
    """Everything runs; that no graph was launched is what fails."""
    records, modes = graph_part
    eager, step, undisturbed, launches = records.values()
    assert eager["holds"] and eager["settings"] == 19
    assert step["ms"] > 0
    assert undisturbed["holds"]
    assert not launches["holds"] and launches["graphs"] == launches["records"] == 0
    assert modes == ["error", "default"] * 20  # each of the settings, and the steps


def test_a_sync_is_told(small_model, monkeypatch):
    """As by a policy that reads a value, which on a GPU would raise in that mode."""

    def score(self, tokens):
        raise RuntimeError("called a\nsynchronizing operation")

    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", lambda mode: None)
    monkeypatch.setattr(check_gpu.POLICIES["k-norm"], "score", score)
    found = check_gpu.ask_no_value(small_model, TINY)
    assert found["failed"] == 2 and not found["holds"]
    assert set(found["failures"].values()) == {"called a synchronizing operation"}


def test_peaks_must_be_flat_on_cuda():
    assert check_gpu.flatness([1000, 1009, 1001], ON_CUDA)["holds"]
    assert not check_gpu.flatness([1000, 1011, 1001], ON_CUDA)["holds"]
    assert "holds" not in check_gpu.flatness([1000, 2000], TINY)


# Comparing traces --------------------------------------------------------------------------------


def make_trace():
    """4 steps of a row with 3 slots; scores are 0.1, 0.2 and 0.4 at all times."""
    position = torch.arange(3).repeat(5, 1, 1, 1, 1)
    score = torch.tensor([0.1, 0.2, 0.4]).expand(5, 1, 1, 1, 3).clone()
    return Trace(position, score, torch.zeros(4, 1, dtype=torch.int64))


MARGIN = torch.tensor([0.5, 0.7, 0.9, 1.1])


def test_equal_traces():
    found = compare_rows(make_trace(), make_trace(), MARGIN)
    assert (found["same_victims"], found["same_tokens"]) == (4, 4)
    assert found["gap_where_they_part"] == 0 and found["holds"]


@pytest.mark.parametrize("score, holds", [(0.4, False), (0.10005, True)])
def test_other_victims(score, holds):
    """State 3, after step number 2, has the token 9 in slot 0, or else in slot 2."""
    wanted, found = make_trace(), make_trace()
    wanted.position[3:, 0, 0, 0, 0] = 9
    found.position[3:, 0, 0, 0, 2] = 9
    wanted.score[2, 0, 0, 0, 2] = score  # just before
    found.token[2:] = 5  # drawn in that step and after: a consequence
    record = compare_rows(wanted, found, MARGIN)
    assert (record["same_victims"], record["same_tokens"]) == (2, 2)
    assert record["gap_where_they_part"] == pytest.approx(score - 0.1, abs=1e-6)
    assert record["holds"] == holds


def test_other_tokens():
    """In step 1: the margin there is what counts."""
    wanted, found = make_trace(), make_trace()
    found.token[1] = 5
    record = compare_rows(wanted, found, MARGIN)
    assert (record["same_victims"], record["same_tokens"]) == (4, 1)
    assert record["gap_where_they_part"] == pytest.approx(0.7)
    assert not record["holds"]
    assert compare_rows(wanted, found, MARGIN / 10_000)["holds"]


def test_another_choice_in_the_prompt():
    """Its scores were not kept, so it cannot be called a tie."""
    wanted, found = make_trace(), make_trace()
    found.position[:, 0, 0, 0, 0] = 7
    record = compare_rows(wanted, found, MARGIN)
    assert record["same_victims"] == record["same_tokens"] == 0
    assert not record["holds"]


def test_captured_steps_are_replayed(small_model, monkeypatch):
    """With stand-ins for graphs, which run what they recorded; row 0 fills 44 of its 64 slots."""
    recorded = []

    class Graph:
        def __init__(self, function):
            self.function, self.n_replays = function, 0
            recorded.append(self)

        def replay(self):
            self.function()
            self.n_replays += 1

    monkeypatch.setattr(generate, "record", Graph)
    fed = torch.randint(512, (40, 2), generator=torch.Generator().manual_seed(2))
    what = (small_model, EvictionConfig(64), [[1, 2, 3, 4], [*range(50)]], fed, "none")
    traces = [check_gpu.trace(*what, captures=captures) for captures in (False, True)]
    assert [graph.n_replays for graph in recorded] == [40]
    for name, value in vars(traces[0]).items():
        assert torch.equal(value, getattr(traces[1], name))


def test_rows_of_a_trace():
    """Each with its own states and tokens."""
    both = [make_trace(), make_trace()]
    both[1].position += 10
    both[1].token += 1
    stacked = (torch.cat([getattr(one, name) for one in both], 1) for name in vars(both[0]))
    for row, wanted in zip(Trace(*stacked).rows(), both, strict=True):
        for name, value in vars(wanted).items():
            assert torch.equal(getattr(row, name), value)


def test_models_that_differ_are_told_apart(small_model, monkeypatch):
    """The device's copy with other weights in a block: other victims, and not by a hair."""

    def copy(model):
        other = check_gpu.random_model(SMALL, torch.float32, "cpu")
        other.blocks[0].down.weight.mul_(2)
        return other

    monkeypatch.setattr(check_gpu, "deepcopy", copy)
    prompts = [[5, 6, 7], [*range(200)]]
    found = check_gpu.compare_victims(
        small_model, EvictionConfig(128), prompts, "none", replace(TINY, n_compared=8)
    )
    assert not found["holds"]


# Parts in processes ------------------------------------------------------------------------------


class Sender(list):
    send = list.append


def run_work(monkeypatch, checks, deadline=float("inf")):
    monkeypatch.setitem(PARTS, "made up", (checks, 1))
    sender = Sender()
    check_gpu.work("made up", TINY, deadline, sender)
    assert sender.pop() is None
    return {name: {k: v for k, v in record.items() if k != "seconds"} for name, record in sender}


def test_a_failure_stays_its_own(monkeypatch):
    def checks(sizes):
        yield "bad", lambda: 1 / 0
        yield "good", lambda: {"n": sizes.n_steps}

    assert run_work(monkeypatch, checks) == {
        "bad": {"error": "ZeroDivisionError: division by zero"},
        "good": {"n": 2},
    }


def test_a_part_that_cannot_go_on(monkeypatch):
    def checks(sizes):
        yield "good", lambda: {}
        raise MemoryError("all\nfull")

    wanted = {"good": {}, "made up": {"error": "MemoryError: all full"}}
    assert run_work(monkeypatch, checks) == wanted


def test_what_comes_too_late_is_skipped(monkeypatch):
    """A check of 10 seconds, with 15 left, and again with 5; then it is too late."""
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])

    def slow():
        now[0] += 10
        return {}

    def checks(sizes):
        yield from [("first", slow), ("second", slow), ("third", slow)]

    wanted = {"first": {}, "second": {}, "third": {"skipped": "no time left"}}
    assert run_work(monkeypatch, checks, deadline=115.0) == wanted


def crash(part, sizes, deadline, sender):
    sender.send(("before", {"n": 1}))
    os._exit(3)


def hang(part, sizes, deadline, sender):
    sender.send(("before", {"n": 1}))
    time.sleep(600)


def test_a_crash_ends_its_part_alone(monkeypatch, capsys):
    monkeypatch.setattr(check_gpu, "work", crash)
    found = check_gpu.run_part("any", ON_CUDA, 100)
    assert found == {"before": {"n": 1}, "its process": {"error": "ended with exit code 3"}}
    assert capsys.readouterr().err == "any: before: n 1\n"


def test_a_part_that_hangs_is_ended(monkeypatch):
    """The first message may take as long as its process does to load the libraries."""
    monkeypatch.setattr(check_gpu, "work", hang)
    monkeypatch.setattr(check_gpu, "GRACE", 0)
    receive = check_gpu.receive

    def patient(receiver, until):
        monkeypatch.setattr(check_gpu, "receive", receive)
        return receive(receiver, until + 60)

    monkeypatch.setattr(check_gpu, "receive", patient)
    found = check_gpu.run_part("any", ON_CUDA, 0.01)
    assert found == {"before": {"n": 1}, "its process": {"error": "stopped after 0 s"}}


def test_the_table():
    result = {
        "a": {"one": {"ms_per_step": 1.5, "names": ["x"], "seconds": 9.0}},
        "b": {
            "two": {"n": 3, "must": "n at most 2", "holds": False},
            "three": {"n": 3, "goal": "n at most 2", "holds": False},
            "four": {"n": 2, "must": "n at most 2", "holds": True},
            "five": {"error": "a | b"},
            "six": {"skipped": "needs CUDA"},
        },
    }
    assert check_gpu.table(result).splitlines()[2:] == [
        "| a | one | ms per step 1.5 |  |  |",
        "| b | two | n 3 | n at most 2 | FAILED |",
        "| b | three | n 3 | goal: n at most 2 | no |",
        "| b | four | n 2 | n at most 2 | yes |",
        "| b | five | error: a / b |  | FAILED |",
        "| b | six | skipped: needs CUDA |  |  |",
    ]


def test_the_full_run_fits():
    """The caches of the largest batch in 80 GB beside the weights; no part but in the time."""
    slot = 32 * 8 * 128 * 2 * 2  # bytes: layers, heads, channels, key and value, bfloat16
    largest = max(FULL.batches) * max(FULL.budgets) * slot
    assert 16.1e9 + 1.1 * largest < 75e9
    assert sum(seconds for _, seconds in list(PARTS.values())[:4]) < check_gpu.SECONDS
    assert all(seconds < check_gpu.SECONDS for _, seconds in PARTS.values())
    assert check_gpu.SECONDS + check_gpu.GRACE < 480
