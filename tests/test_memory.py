"""The account of memory against hand computation and measurement, and the command line."""

import json
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch
from tiny import make_model
from torch._subclasses.fake_tensor import FakeTensorMode

import memory
import model as model_file
from memory import LiveBytes, account, attend_with_weights, curves, measure, run, table
from model import ModelConfig, Transformer, attend_to_prompt

SCRIPT = Path(memory.__file__)


def config(**changes) -> ModelConfig:
    shape = dict(vocab_size=50, hidden_size=32, intermediate_size=48, n_layers=3, n_heads=4)
    shape |= dict(n_kv_heads=2, head_dim=8, norm_eps=1e-5, rope_theta=1e4, rope_scaling={})
    shape |= dict(max_positions=100_000, tied_embeddings=True, qk_norm=False)
    return ModelConfig(**shape | changes, qkv_bias=False, out_bias=False, mlp_bias=False)


# Programs that can be counted by hand -----------------------------------------------------------


@pytest.mark.parametrize("fake", [False, True])
def test_live_bytes_by_hand(fake):
    """Tensors alive at once add up; a view or a change in place is free; what is freed is not."""
    with FakeTensorMode() if fake else torch.no_grad(), LiveBytes() as live:
        a = torch.zeros(100)
        assert live.now == live.peak == 400
        b = a.view(10, 10)[2:].transpose(0, 1)
        a.add_(1)
        b.mul_(2)
        assert live.now == live.peak == 400
        c = torch.zeros(50, dtype=torch.float64)
        assert live.now == live.peak == 800
        del c
        assert (live.now, live.peak) == (400, 800)
        d = a + 1
        assert (live.now, live.peak) == (800, 800)
        del a
        assert live.now == 800  # b still holds it
        del b
        assert live.now == 400
        d = d + 1  # old and new at once
        assert (live.now, live.peak) == (400, 800)
        e = torch.cat([d, d, d])
        assert (live.now, live.peak) == (1600, 1600)
        del d, e
    assert (live.now, live.peak) == (0, 1600)


def test_live_bytes_count_the_modules_once():
    module = torch.nn.Linear(10, 5)  # 55 floats
    with LiveBytes(module, module) as live:
        module(torch.zeros(2, 10))
    assert live.peak == 55 * 4 + 20 * 4 + 10 * 4


# The account of the engine ----------------------------------------------------------------------


def test_the_model_is_counted_by_its_weights():
    model = Transformer(config())
    weights = sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
    before, peak = account(config(), torch.float32, "cpu", "full", 8, 64)
    assert before == weights < peak


def growth(contender, device, dtype, monkeypatch):
    """Bytes a token that the peak grows by from 96 to 192, and on to 288, in chunks of 32."""
    monkeypatch.setattr(model_file, "PREFILL_CHUNK", 32)
    peaks = [account(config(), dtype, device, contender, n, 64)[1] for n in (96, 192, 288)]
    return [(more - less) / 96 for less, more in zip(peaks, peaks[1:], strict=False)]


@pytest.mark.parametrize("device, dtype", [("cpu", torch.float32), ("cuda", torch.bfloat16)])
def test_full_grows_by_its_keys_and_values(monkeypatch, device, dtype):
    """2 L H_kv D values a token.

    On top comes what is made for one layer at a time, keys and values with the chunk's beside them
    or one of both and its gathered copy, and some numbers for each slot: position, score and size
    of the value, those with the chunk's, and their order. On a CPU a chunk's attention also has a
    mask, of bytes and once more of floats.
    """
    kv = 2 * 3 * 2 * 8 * dtype.itemsize  # L = 3, H_kv = 2, D = 8
    one_layer = 2 * 2 * 8 * dtype.itemsize
    mask = 32 * (1 + 4) if device == "cpu" else 0
    for step in growth("full", device, dtype, monkeypatch):
        assert kv <= step <= kv + one_layer + 100 + mask


@pytest.mark.parametrize("device, dtype", [("cpu", torch.float32), ("cuda", torch.bfloat16)])
def test_epikv_is_flat_beyond_the_budget(monkeypatch, device, dtype):
    """The prompt's tokens themselves, 8 bytes each, are all that grows."""
    assert all(0 <= step <= 8 for step in growth("epikv", device, dtype, monkeypatch))


@pytest.mark.parametrize("device, dtype", [("cpu", torch.float32), ("cuda", torch.bfloat16)])
def test_attention_has_the_quadratic_term(device, dtype):
    """8 H n^2 bytes: scores and their softmax in float32. And two masks [n, n] of a byte each.

    Of what grows with n alone little is left in second differences.
    """
    n = 256
    peaks = [account(config(), dtype, device, "attention", m, 64)[1] for m in (n, 2 * n, 3 * n)]
    quadratic = (peaks[2] - 2 * peaks[1] + peaks[0]) / (2 * n * n)
    assert 8 * 4 <= quadratic <= 8 * 4 + 2


@pytest.mark.parametrize("device, dtype", [("cpu", torch.float32), ("cuda", torch.bfloat16)])
@pytest.mark.parametrize("contender", ["full", "epikv"])
def test_no_other_contender_has_it(monkeypatch, device, dtype, contender):
    """Attention of the engine is not spelt out in steps: a chunk sees n tokens in less than n^2."""
    n = 256
    monkeypatch.setattr(model_file, "PREFILL_CHUNK", 10 * n)  # the whole prompt at once
    peaks = [account(config(), dtype, device, contender, m, 1024)[1] for m in (n, 2 * n, 3 * n)]
    assert abs(peaks[2] - 2 * peaks[1] + peaks[0]) / (2 * n * n) < 0.1


# The contenders ---------------------------------------------------------------------------------


def test_the_baseline_attends_as_the_engine_does():
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, heads, 20, 8) for heads in (4, 2, 2))
    cache = type("Cache", (), dict(reads_attention=False))
    expected = attend_to_prompt(q, k, v, cache, 0, None)
    torch.testing.assert_close(attend_with_weights(q, k, v, cache, 0, None), expected)


@pytest.mark.parametrize("contender", memory.CONTENDERS)
@pytest.mark.parametrize("n_tokens", [1, 40])
def test_a_contender_runs(contender, n_tokens):
    model = Transformer(config())
    for parameter in model.parameters():
        parameter.normal_(std=0.1)
    run(model, contender, n_tokens, 16)


def test_the_account_is_near_the_measurement():
    """In a shape whose matrices, 8 * 8 * 2048^2 bytes, dwarf what the allocator holds ready."""
    shape = config(n_heads=8, n_layers=1)
    arguments = (shape, torch.float32, "cpu", "attention", 2048, 64)
    before, peak = account(*arguments)
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        try:
            start, end = pool.submit(measure, *arguments).result()
        except OSError as error:
            pytest.skip(f"no measurement here: {error}")
    assert 0.9 <= (end - start) / (peak - before) <= 1.6


# Reporting --------------------------------------------------------------------------------------


def row(contender="full", length=1024, **changes):
    base = dict(contender=contender, length=length, accounted_bytes=4 * 2**30)
    base |= dict(accounted_rise=2**30, measured_bytes=None, measured_rise=None)
    return base | changes


def test_the_table_and_the_curves():
    measured = row(measured_bytes=5 * 2**30, measured_rise=3 * 2**29)
    rows = [measured, row(length=2048, error="no memory")]
    first, second = table(rows).splitlines()[2:]
    assert first == "| full | 1,024 | 4.000 | 5.000 | 1.000 | 1.500 | 1.50 |"
    assert second == "| full | 2,048 | 4.000 | no memory | 1.000 |  |  |"
    assert curves(rows) == {
        "full": [(1024, 4, 4, 4), (2048, 4, 4, 4)],
        "full, measured": [(1024, 4.5, 4.5, 4.5)],
    }


# The command line -------------------------------------------------------------------------------


def main(monkeypatch, *options):
    monkeypatch.setattr(sys, "argv", ["memory.py", *map(str, options)])
    memory.main()


def test_it_writes_json_and_a_plot(monkeypatch, capsys, tmp_path):
    make_model(tmp_path / "model")
    measured = []

    def fail(*arguments):
        measured.append(arguments[3:5])
        raise BrokenProcessPool("it died")

    monkeypatch.setattr(memory, "ProcessPoolExecutor", fail_pool(fail))
    options = ["--checkpoint", tmp_path / "model", "--device", "cpu", "--lengths", "64,32"]
    options += ["--budget", 32, "--measure-up-to", 32, "--output", tmp_path / "out.json"]
    main(monkeypatch, *options)
    result = json.loads((tmp_path / "out.json").read_text())
    settings, rows = result["settings"], result["rows"]
    assert settings["lengths"] == [32, 64] and settings["dtype"] == "float32"
    assert settings["config"]["n_layers"] == 3
    kinds = [(row["contender"], row["length"]) for row in rows]
    assert kinds == [(name, n) for name in memory.CONTENDERS for n in (32, 64)]
    assert measured == [(name, 32) for name in memory.CONTENDERS]
    for each in rows:
        assert each["measured_bytes"] is None and each["measured_rise"] is None
        assert each.get("error") == ("it died" if each["length"] == 32 else None)
        assert each["accounted_bytes"] > each["accounted_rise"] > 0
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
    assert "| full | 32 |" in capsys.readouterr().out


def fail_pool(function):
    """A stand-in for the pool of processes, whose every work is `function`."""

    class Pool:
        def __init__(self, *_, **__):
            pass

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def submit(self, _, *arguments):
            return type("Future", (), dict(result=lambda self: function(*arguments)))()

    return Pool


def test_what_does_not_fit_is_not_measured(monkeypatch, tmp_path):
    make_model(tmp_path / "model")
    monkeypatch.setattr(memory, "free_memory", lambda device: 1000)
    monkeypatch.setattr(memory, "ProcessPoolExecutor", fail_pool(lambda *_: pytest.fail("ran")))
    options = ["--checkpoint", tmp_path / "model", "--device", "cpu", "--lengths", "16"]
    main(monkeypatch, *options, "--budget", 32, "--output", tmp_path / "out.json")
    assert not any(
        "error" in row for row in json.loads((tmp_path / "out.json").read_text())["rows"]
    )


def test_a_shape_is_accounted_for_on_cuda(monkeypatch, tmp_path):
    monkeypatch.setitem(memory.SHAPES, "8b", memory.LLAMA_8B | dict(num_hidden_layers=2))
    main(monkeypatch, "--shape", "8b", "--lengths", "100", "--output", tmp_path / "out.json")
    settings = json.loads((tmp_path / "out.json").read_text())["settings"]
    assert (settings["device"], settings["dtype"]) == ("cuda", "bfloat16")


def test_the_shape_of_8b_has_its_weights():
    shape = ModelConfig.from_hf(memory.SHAPES["8b"])
    with FakeTensorMode():
        model = Transformer(shape, torch.bfloat16)
    assert sum(weight.numel() for weight in model.parameters()) == 8_030_261_248


@pytest.mark.parametrize(
    "options, message",
    [
        (["--lengths", "many"], "lengths must be whole numbers of at least 1, got 'many'"),
        (["--lengths", "1024,"], "lengths must be whole numbers"),
        (["--lengths", "0,5"], "lengths must be whole numbers of at least 1"),
        (["--shape", "9b"], "invalid choice: '9b'"),
        (["--budget", "3"], "budget 3 is smaller than"),
        (["--budget", "x"], "invalid int value"),
        (["--device", "cuda", "--dtype", "float32"], "takes no float32"),
        (["--checkpoint", "/nowhere/at/all"], "/nowhere/at/all"),
        (["--output", "/nowhere/out.json"], "no such folder: /nowhere"),
    ],
)
def test_bad_input_is_one_line(monkeypatch, capsys, options, message):
    monkeypatch.setattr(memory, "Transformer", lambda *_: pytest.fail("made a model"))
    with pytest.raises(SystemExit) as caught:
        main(monkeypatch, *options)
    assert caught.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and message in line


def test_the_script_starts():
    done = subprocess.run([sys.executable, SCRIPT, "--help"], capture_output=True, text=True)
    assert done.returncode == 0 and "--measure-up-to" in done.stdout


@pytest.mark.parametrize("contender", ["full", "epikv"])
def test_chunks_of_a_prompt_do_not_add_up(monkeypatch, contender):
    """Beside the cache one chunk's keys and values are alive, 2 L H_kv D T, not those of two."""
    monkeypatch.setattr(model_file, "PREFILL_CHUNK", 64)
    shape = config(n_layers=8)
    kv = 2 * 8 * 2 * 8 * 4  # bytes of a token

    def beside_the_cache(n_tokens):
        start, peak = account(shape, torch.float32, "cpu", contender, n_tokens, 256)
        return peak - start - kv * (n_tokens + 1 if contender == "full" else 256)

    assert beside_the_cache(128) - beside_the_cache(64) < kv * 64 / 4
