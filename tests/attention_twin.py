"""A row under an attention policy once more: slow, obvious, in plain lists and floats.

Written from the formulas of the methods, for tests/test_baselines.py to compare with
scripts/baselines.py. A token is a dict; a map is the list of tokens that one head, one layer or all
layers together hold. Below the twin stands what drives a cache without a model: `Text`, `admit` and
`decode`, which serve any cache whose layers read attention.
"""

import math
from dataclasses import dataclass

import torch

from epikv import NO_POSITION, POLICIES, CacheShape

RAAS = ("raas", "raas-token", "raas-reference")
PAGE = 16  # tokens in a page of RaaS
WINDOW = 32  # queries that SnapKV looks at
REACH = 3  # neighbours on either side that SnapKV pools over


def mean(numbers):
    return sum(numbers) / len(numbers)


def dot(a, b):
    return sum(x * y for x, y in zip(a, b, strict=True))


def softmax(numbers):
    largest = max(numbers)
    powers = [math.exp(number - largest) for number in numbers]
    return [power / sum(powers) for power in powers]


def zscore(values):
    """How far the last of `values` is from their mean, in population standard deviations."""
    if len(values) < 2:
        return 0.0
    middle = mean(values)
    deviation = math.sqrt(mean([(value - middle) ** 2 for value in values]))
    return (values[-1] - middle) / (deviation + 1e-6)


def to_unit_range(numbers):
    low, high = min(numbers), max(numbers)
    return [(number - low) / (high - low + 1e-9) for number in numbers]


def default_recent(policy, budget, sinks):
    match policy:
        case "h2o":
            return budget // 2
        case "h2o-reference":
            return min(128, budget - sinks - 1)
        case "snapkv":
            return min(32, budget // 2)
        case "attn-hs":
            return min(128, budget // 4)
    return 1


class AttentionTwin:
    """A row that holds at most `budget` tokens in each map.

    Keys, values and weights come as [layer][head]; what a query gave is {position: weight} for each
    of the query heads that share a head of keys. To decode a token, call `enter` and then
    `observe`; to take a piece of a prompt, call `admit`.
    """

    def __init__(
        self,
        policy,
        *,
        budget,
        sinks=4,
        recent=None,
        window=64,
        n_layers=2,
        n_heads=2,
        slot_map="shared",
        n_prompt=0,
    ):
        self.policy = policy
        self.budget = budget
        self.recent = default_recent(policy, budget, sinks) if recent is None else recent
        self.window = window
        fits = n_prompt + self.recent + 1 <= budget  # with one token left to evict
        if policy not in RAAS:
            fits = fits and n_prompt <= budget // 2
        self.protected = max(sinks, n_prompt) if fits else sinks

        heads = [(layer, head) for layer in range(n_layers) for head in range(n_heads)]
        self.heads = {"shared": heads}  # that share a map
        if slot_map == "layer":
            self.heads = {i: [(i, head) for head in range(n_heads)] for i in range(n_layers)}
        if slot_map == "head":
            self.heads = {head: [head] for head in heads}
        self.maps = {name: [] for name in self.heads}
        self.residual = None  # of the token before
        self.changes = []

    def enter(self, position, values, residual=None):
        """Decode the token at `position`. Returns the victim's position of every map, or None."""
        victims = []
        for tokens in self.maps.values():
            victims.append(None)
            if len(tokens) == self.budget:
                victim = self.worst(tokens, newest=position)
                tokens.remove(victim)
                victims[-1] = victim["position"]
        self.add(position, values, residual)
        return victims

    def observe(self, weights):
        """What the query of the token just decoded gave to every token held."""
        self.note(weights, counts=True)
        self.rescore()

    def admit(self, position, queries, keys, values, residuals):
        """Take tokens of a prompt, the first at `position`; then the worst go, one by one.

        queries: a list over the query heads of each head. Scores are those after the last query.
        """
        first = position
        for key, value, residual in zip(keys, values, residuals, strict=True):
            self.add(position, value, residual, key)
            position += 1
        for query, at in zip(queries, range(first, position), strict=True):
            self.note(self.weights_of(query, at), counts=self.policy not in NOT_IN_PROMPT)
        self.rescore()
        for tokens in self.maps.values():
            while len(tokens) > self.budget:
                tokens.remove(self.worst(tokens, newest=position - 1))

    def add(self, position, values, residual, keys=None):
        entry = self.change_score(position, residual) if self.policy == "attn-hs" else 0.0
        for name, tokens in self.maps.items():
            heads = self.heads[name]
            token = {"position": position, "entry": entry, "total": 0.0, "received": []}
            token["score"] = position if self.policy in RAAS else 0.0  # a stamp for RaaS
            token["keys"] = keys and {(layer, head): keys[layer][head] for layer, head in heads}
            token["sizes"] = [sum(map(abs, values[layer][head])) for layer, head in heads]
            tokens.append(token)

    def change_score(self, position, residual):
        before, self.residual = self.residual, residual
        if position == 0:
            return 0.0
        self.changes.append(math.dist(residual, before))
        return zscore(self.changes[-self.window :])

    def weights_of(self, query, position):
        """Softmax of the query's products with the keys of the tokens up to its own position."""
        weights = {}
        for name, heads in self.heads.items():
            seen = [token for token in self.maps[name] if token["position"] <= position]
            for layer, head in heads:
                weights[layer, head] = []
                for q in query[layer][head]:
                    keys = [token["keys"][layer, head] for token in seen]
                    shares = softmax([dot(q, key) / math.sqrt(len(q)) for key in keys])
                    given = zip([token["position"] for token in seen], shares, strict=True)
                    weights[layer, head].append(dict(given))
        return weights

    def note(self, weights, counts):
        """Write down what a query gave: weights {(layer, head): [{position: weight}]}."""
        for name, tokens in self.maps.items():
            given = [weights[head] for head in self.heads[name]]
            for token in tokens:
                p = token["position"]
                if p not in given[0][0]:
                    continue  # a later token than the query
                token["now"] = [sum(query[p] for query in head) / len(head) for head in given]
                token["received"].append(mean(token["now"]))
                del token["received"][:-WINDOW]
                if counts:
                    token["total"] += token["received"][-1]

    def rescore(self):
        newest = max(token["position"] for tokens in self.maps.values() for token in tokens)
        for tokens in self.maps.values():
            tokens.sort(key=lambda token: token["position"])
            for token, score in zip(tokens, self.scores(tokens, newest), strict=True):
                token["score"] = score

    def scores(self, tokens, newest):
        """New scores of the tokens of a map, which stand in order of position."""
        match self.policy:
            case "h2o" | "h2o-reference":
                return [token["total"] for token in tokens]
            case "tova":
                return [token["received"][-1] for token in tokens]
            case "longflow":
                return [mean([*map(math.prod, of_heads(token))]) for token in tokens]
            case "longflow-reference":
                return [mean(token["now"]) * mean(token["sizes"]) for token in tokens]
            case "snapkv":
                sums = [sum(token["received"]) for token in tokens]
                return [max(sums[max(0, i - REACH) : i + REACH + 1]) for i in range(len(sums))]
            case "attn-hs":
                return self.attention_and_change(tokens)
        return self.stamps(tokens, newest)

    def attention_and_change(self, tokens):
        decoded = [token for token in tokens if token["position"] >= self.protected]
        if not decoded:
            return [0.0] * len(tokens)
        attention = to_unit_range([token["total"] for token in decoded])
        change = to_unit_range([token["entry"] for token in decoded])
        scores = {t["position"]: a + c for t, a, c in zip(decoded, attention, change, strict=True)}
        return [scores.get(token["position"], 0.0) for token in tokens]

    def stamps(self, tokens, newest):
        weight = {token["position"]: token["received"][-1] for token in tokens}
        if self.policy == "raas":
            pages = {}
            for p in weight:
                pages.setdefault(p // PAGE, []).append(weight[p])
            weight = {p: max(pages[p // PAGE]) for p in weight}
        decoded = sorted(weight[p] for p in weight if p >= self.protected)
        threshold = math.inf
        if decoded and self.policy == "raas-reference":
            threshold = decoded[(len(decoded) - 1) // 2]  # the lower median
        elif decoded:
            threshold = decoded[-math.ceil(len(decoded) / 2)]
        return [
            newest
            if token["position"] >= self.protected and weight[token["position"]] >= threshold
            else token["score"]
            for token in tokens
        ]

    def worst(self, tokens, newest):
        """The lowest score of the tokens that may go, the oldest of equal ones."""
        candidates = [
            token
            for token in tokens
            if token["position"] >= self.protected
            and token["position"] <= newest - self.recent
            and token["position"] != newest
        ]
        return min(candidates, key=lambda token: (token["score"], token["position"]))


NOT_IN_PROMPT = ("h2o-reference", "attn-hs")  # they count what decoded tokens gave, only


def of_heads(token):
    """Weight and size of the value of each head."""
    return zip(token["now"], token["sizes"], strict=True)


# Driving a cache without a model ---------------------------------------------------------------


@dataclass
class Text:
    """N tokens of every row. residuals: [B, N, len(reads), hidden].

    q: [B, L, H_kv, G, N, D], of the prompt only. k, v: [B, L, H_kv, N, D].
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    residuals: torch.Tensor

    def __getitem__(self, tokens):
        if isinstance(tokens, int):
            tokens = slice(tokens, tokens + 1)
        at = (..., tokens, slice(None))
        return Text(self.q[at], self.k[at], self.v[at], self.residuals[:, tokens])

    def row(self, row):
        return Text(*(x[row : row + 1] for x in (self.q, self.k, self.v, self.residuals)))

    @property
    def n_tokens(self):
        return self.k.shape[3]


def new_cache(config, batch_size=1, dtype=torch.float64, **sizes):
    sizes = dict(n_layers=2, n_kv_heads=2, head_dim=3, hidden_size=3) | sizes
    shape = CacheShape(batch_size=batch_size, dtype=dtype, **sizes)
    return POLICIES[config.policy].cache_type()(config, shape)


def random_text(cache, n_tokens, seed=0, n_queries=2, batch_size=None):
    """Queries and keys of which some fit and most do not, values and residuals of many sizes."""
    generator = torch.Generator().manual_seed(seed)
    batch_size = batch_size or cache.length.shape[0]
    _, n_heads, _, dim = cache.layers[0].k.shape
    shape = (batch_size, len(cache.layers), n_heads)

    def randn(*sizes):
        return torch.randn(*sizes, generator=generator, dtype=torch.float64)

    q = 2 * randn(*shape, n_queries, n_tokens, dim)
    k = 2 * randn(*shape, n_tokens, dim)
    v = randn(*shape, n_tokens, 1).exp() * randn(*shape, n_tokens, dim)
    residuals = (batch_size, n_tokens, *cache.previous.shape[1:])
    residuals = (randn(*residuals[:3], 1).exp() * randn(*residuals)).cumsum(dim=1)
    return Text(q, k, v, residuals)


def random_weights(seed, n_queries=2, sharpness=1.5, palette=None):
    """What gives the weights of a step: softmaxed random numbers over the slots that are taken.

    palette: numbers to draw from instead, and not to normalise.
    """
    generator = torch.Generator().manual_seed(seed)

    def weigh(taken):
        """[B, L, H_kv, G, S] for taken [B, L, H_kv, S]."""
        taken = taken[:, :, :, None].expand(-1, -1, -1, n_queries, -1)
        if palette is not None:
            drawn = torch.randint(len(palette), taken.shape, generator=generator)
            return torch.tensor(palette, dtype=torch.float64)[drawn] * taken
        logits = sharpness * torch.randn(taken.shape, generator=generator, dtype=torch.float64)
        return logits.masked_fill(~taken, -torch.inf).softmax(dim=-1)

    return weigh


def taken_slots(cache):
    """[B, L, H_kv, S] for any slot map."""
    n_heads = cache.layers[0].k.shape[1]
    return (cache.position != NO_POSITION).expand(-1, len(cache.layers), n_heads, -1)


def admit(cache, text):
    """Take the tokens of `text` at once, as part of a prompt."""
    n_cached = min(cache.length[0].item(), cache.config.budget)
    dtype = cache.layers[0].k.dtype
    keys, values = ([*x.to(dtype).unbind(1)] for x in (text.k, text.v))
    queries = text.q.to(dtype).flatten(2, 3).unbind(1)
    for layer, q, k in zip(cache.layers, queries, keys, strict=True):
        layer.observe_prompt(q, torch.cat([layer.k[:, :, :n_cached], k], dim=2))
    cache.admit(keys, values, [*text.residuals.unbind(2)])


def prefill(cache, text, chunk):
    cache.protect_prompt(text.n_tokens)
    for start in range(0, text.n_tokens, chunk):
        admit(cache, text[start : start + chunk])


def decode(cache, text, weigh):
    """Take one token per row, whose query gives the weights that `weigh` says.

    Returns the positions of the victims [B, l, h], negative for none, and the weights.
    """
    before = cache.position.clone()
    slot, position = cache.begin_step()
    weights = weigh(taken_slots(cache)).to(cache.rows.dtype)
    parts = cache.layers, cache.per_layer(slot), text.k.unbind(1), text.v.unbind(1)
    for i, (layer, at, k, v) in enumerate(zip(*parts, strict=True)):
        layer.write(at, k.to(layer.k.dtype), v.to(layer.v.dtype))
        layer.observe(weights[:, i])
    cache.end_step(slot, position, [*text.residuals.unbind(2)])
    if cache.block and (cache.length % cache.block == 0).any():
        cache.end_block()
    return before.gather(-1, slot[..., None])[..., 0], weights


# From tensors to lists -------------------------------------------------------------------------


def weights_by_position(cache, weights):
    """For every row what `AttentionTwin.observe` takes, of weights [B, L, H_kv, G, S] by slot."""
    position = cache.position.expand(*weights.shape[:3], -1).tolist()
    rows = []
    for row_position, row in zip(position, weights.tolist(), strict=True):
        given = {}
        for layer, of_layer in enumerate(row):
            for head, of_head in enumerate(of_layer):
                at = row_position[layer][head]
                given[layer, head] = [dict(zip(at, query, strict=True)) for query in of_head]
        rows.append(given)
    return rows


def lists_of(text, row=0):
    """The queries, keys, values and residuals of a row by token, as `AttentionTwin.admit` wants."""
    q = text.q[row].movedim(3, 0).tolist()  # [N][L][H_kv][G][D]
    k, v = (x[row].movedim(2, 0).tolist() for x in (text.k, text.v))
    n_blocks = text.residuals.shape[2]
    residuals = text.residuals[row, :, 0].tolist() if n_blocks else [None] * text.n_tokens
    return q, k, v, residuals
