"""What the README shows is run as it stands there."""

import re
from pathlib import Path

import pytest
import tiny
import torch

import epikv
from epikv import CacheShape, EvictionConfig, Tokens
from generate import generate
from model import Transformer

README = (Path(epikv.__file__).parent / "README.md").read_text(encoding="utf-8")


@pytest.fixture
def own_policy(tmp_path, monkeypatch):
    """The code of the section, run with a model; what it defines, and the policy that it enters."""
    section = README.partition("## A policy of your own")[2]
    text = re.search(r"```python\n(.*?)```", section, re.DOTALL)[1]
    tiny.make_tokenizer(
        tiny.make_model(tmp_path, max_position_embeddings=400),
        chat_template="{{ messages[0]['content'] }}",
    )
    names = {"model": Transformer.from_pretrained(tmp_path)}
    results = []

    def eager(*args, **settings):
        results.append(generate(*args, ignore_eos=True, compile_mode="none", **settings))
        return results[-1]

    before = dict(epikv.POLICIES)
    exec(text, names | {"generate": eager})
    (entered,) = epikv.POLICIES.keys() - before.keys()
    yield text, epikv.POLICIES[entered], results
    del epikv.POLICIES[entered]
    assert epikv.POLICIES == before


def test_the_policy_of_ones_own(own_policy):
    """At most 15 lines define, enter and use it: 400 tokens in all, of which 256 stay."""
    text, _, (result,) = own_policy
    assert len(text.splitlines()) <= 15
    assert len(result.outputs[0].kept) == 256
    assert result.statistics.tokens_evicted == 400 - 256 - 1  # the last one drawn is not stored


def test_the_score_of_ones_own_policy(own_policy):
    """Change over mean key norm: norms 5 and 13 in one layer, 1 and 1 in the other, mean 5."""
    _, policy, _ = own_policy
    shape = CacheShape(n_layers=2, n_kv_heads=2, head_dim=2, hidden_size=3)
    k = torch.tensor([[[3.0, 4.0], [5.0, 12.0]], [[0.0, 1.0], [1.0, 0.0]]])[None, :, :, None]
    tokens = Tokens(torch.tensor([[7]]), torch.tensor([[[30.0]]]), k, k)
    score = policy(EvictionConfig(64, "streaming"), shape).score(tokens)
    assert score.tolist() == [[6.0]]
