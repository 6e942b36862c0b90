"""The baselines that free slots once more: slow, obvious, in plain lists and floats.

Written from the formulas of R-KV (arXiv:2505.24133), ThinKV (arXiv:2510.01290) and the simplified
versions of EpiKV's authors, for the tests to compare `scripts/baselines.py` with. A row holds, in
each of its maps, a dict from the position of a token to its score. Attention is computed here too,
from the queries and from the keys of the tokens held.
"""

import math
import operator

REASONING, EXECUTION, TRANSITION = "reasoning", "execution", "transition"
LEAST_IMPORTANT_FIRST = (TRANSITION, EXECUTION, REASONING)


def mean(values):
    return sum(values) / len(values)


def dot(a, b):
    return sum(map(operator.mul, a, b))


def softmax(values):
    largest = max(values)
    exps = [math.exp(value - largest) for value in values]
    total = sum(exps)
    return [e / total for e in exps]


def standardised(values):
    """In sample standard deviations from the mean."""
    middle = mean(values)
    variance = sum((value - middle) ** 2 for value in values) / (len(values) - 1)
    return [(value - middle) / (math.sqrt(variance) + 1e-8) for value in values]


def pooled(values, kernel=7):
    """The largest of each value and its neighbours, three on either side."""
    reach = kernel // 2
    return [max(values[max(0, i - reach) : i + reach + 1]) for i in range(len(values))]


def schedule(lag):
    """A half, a quarter, ... a thirty-second of a segment, but never below 4 tokens."""
    return [max(min(4, lag), math.floor(lag / 2**n)) for n in (1, 2, 3, 4, 5)]


def nearest_to_centroids(points, k):
    """Indices of the points that stand for the `k` clusters of k-means, in order of cluster."""
    centroids = [points[len(points) * i // k] for i in range(k)]
    for _ in range(10):
        members = [[] for _ in centroids]
        for point in points:
            distances = [math.dist(point, centroid) for centroid in centroids]
            members[distances.index(min(distances))].append(point)
        for i, mine in enumerate(members):
            if mine:
                centroids[i] = [mean(channel) for channel in zip(*mine, strict=True)]
    free = list(range(len(points)))
    chosen = []
    for centroid in centroids:
        nearest = min(free, key=lambda i: (math.dist(points[i], centroid), i))
        free.remove(nearest)
        chosen.append(nearest)
    return chosen


class TwinRow:
    """A row of `n_layers` x `n_heads` key-value heads that holds at most `budget` tokens.

    A token comes as its queries [layer][head][query head], and its keys [layer][head], lists of
    floats.
    """

    def __init__(
        self,
        policy,
        *,
        budget,
        lag,
        n_layers,
        n_heads,
        slot_map="shared",
        sinks=4,
        n_prompt=0,
        thresholds=(0.6, 0.8),
    ):
        self.policy = policy
        self.budget = budget
        self.lag = lag
        self.sinks = sinks
        self.thresholds = thresholds
        self.recent = {
            "r-kv": 8,
            "r-kv-reference": 8,
            "thinkv": lag,
            "thinkv-reference": max(min(128, budget // 4), lag),
        }[policy]
        self.n_queries = 8 if policy.startswith("r-kv") else 1
        self.protected = sinks
        if n_prompt <= budget // 2 and n_prompt <= budget - self.recent - 1:
            self.protected = max(sinks, n_prompt)

        self.n_layers = n_layers
        self.heads = [(layer, head) for layer in range(n_layers) for head in range(n_heads)]
        name = {"shared": lambda at: "shared", "layer": lambda at: at[0], "head": lambda at: at}
        self.map_of = {at: name[slot_map](at) for at in self.heads}
        self.maps = {self.map_of[at]: {} for at in self.heads}
        self.heads_of = {m: [at for at in self.heads if self.map_of[at] == m] for m in self.maps}

        self.keys = {at: {} for at in self.heads}  # position: key
        self.units = {at: {} for at in self.heads}  # position: key of length 1
        self.cosines = {at: {} for at in self.heads}  # position: {position: cosine}
        self.queries = []  # of the last queries: {head: {position: weight}}
        self.sparsities = []  # of the steps of the segment so far
        self.thoughts = {}  # of complete segments with a decode step in them
        self.levels = {}  # how often a segment has stepped down
        self.n_shrunk = self.n_dropped = 0

    def append(self, position, queries, keys):
        """Decode the token at `position`."""
        for held in self.maps.values():
            if len(held) == self.budget:
                del held[self.worst(held, newest=position)]
        self.enter(position, keys)
        self.attend(position, queries, decodes=True)
        if (position + 1) % self.lag == 0:
            self.end_block(position // self.lag, newest=position)

    def admit(self, position, queries, keys):
        """Take prompt tokens, the first at `position`; then the worst go until the budget holds."""
        for i, mine in enumerate(keys):
            self.enter(position + i, mine)
            self.attend(position + i, queries[i], decodes=False)
        newest = position + len(keys) - 1
        self.rank()
        for held in self.maps.values():
            while len(held) > self.budget:
                del held[self.worst(held, newest)]

    def may_go(self, held, newest):
        """Positions that may be evicted, oldest first."""
        return sorted(p for p in held if self.protected <= p <= newest - self.recent)

    def worst(self, held, newest):
        """The lowest score of those that may go, the oldest of equal ones."""
        return min(self.may_go(held, newest), key=lambda p: (held[p], p))

    def enter(self, position, keys):
        """A token has the score 0 until a block ends."""
        for held in self.maps.values():
            held[position] = 0.0
        for layer, head in self.heads:
            key = keys[layer][head]
            self.keys[layer, head][position] = key
            self.units[layer, head][position] = [x / math.hypot(*key) for x in key]

    def attend(self, position, queries, decodes):
        """Note down the weights of one query, which sees the tokens held."""
        weights, sparse = {}, []
        for layer, head in self.heads:
            keys = self.keys[layer, head]
            held = list(self.maps[self.map_of[layer, head]])
            rows = []
            for query in queries[layer][head]:
                scale = 1 / math.sqrt(len(query))
                row = softmax([dot(query, keys[p]) * scale for p in held])
                sparse.append(sum(weight < 0.01 * max(row) for weight in row) / len(held))
                rows.append(row)
            weights[layer, head] = dict(zip(held, map(mean, zip(*rows, strict=True)), strict=True))
        self.queries = [*self.queries, weights][-self.n_queries :]
        if decodes:
            self.sparsities.append(mean(sparse))

    def end_block(self, block, newest):
        match self.policy:
            case "r-kv" | "r-kv-reference":
                self.compress(newest)
            case "thinkv":
                self.end_segment(block)
            case "thinkv-reference":
                self.apply_quotas(newest)

    # R-KV

    def compress(self, newest):
        """Keep the best budget - lag tokens."""
        self.rank()
        for held in self.maps.values():
            while len(held) > self.budget - self.lag and self.may_go(held, newest):
                del held[self.worst(held, newest)]

    def rank(self):
        """Score every token of every map."""
        if not self.policy.startswith("r-kv"):
            return
        for at, held in self.maps.items():
            heads, tokens = self.heads_of[at], sorted(held)
            importance = pooled([self.importance(heads, p) for p in tokens])
            if self.policy == "r-kv":
                redundancies = [self.redundancy(head, tokens) for head in heads]
            else:
                redundancies = [self.plain_redundancy(head, tokens) for head in heads]
            redundancy = list(map(mean, zip(*redundancies, strict=True)))
            if self.policy == "r-kv-reference":
                importance, redundancy = standardised(importance), standardised(redundancy)
            for p, i, r in zip(tokens, importance, redundancy, strict=True):
                held[p] = 0.1 * i - 0.9 * r

    def importance(self, heads, position):
        """Mean weight of the last eight queries, 0 of queries before the token or the text."""
        total = [query[head].get(position, 0.0) for query in self.queries for head in heads]
        return sum(total) / (8 * len(heads))

    def similar(self, head, token, tokens):
        """Cosines of a token's key to the keys of `tokens`, each computed once."""
        known, unit = self.cosines[head].setdefault(token, {}), self.units[head]
        for other in tokens:
            if other not in known:
                known[other] = dot(unit[token], unit[other])
        return [known[other] for other in tokens]

    def redundancy(self, head, tokens):
        """What every other key has in common with a token's, its latest near-duplicate excepted."""
        rows = []
        for i, token in enumerate(tokens):
            row = self.similar(head, token, tokens)
            row[i] = 0.0
            for j in reversed(range(len(tokens))):
                if row[j] > 0.5:
                    row[j] = 0.0
                    break
            rows.append(row)
        return softmax([mean(column) for column in zip(*rows, strict=True)])

    def plain_redundancy(self, head, tokens):
        """Softmax of (unit . sum of all units - 1) / n."""
        units = [self.units[head][p] for p in tokens]
        total = [sum(channel) for channel in zip(*units, strict=True)]
        return softmax([(dot(unit, total) - 1) / len(tokens) for unit in units])

    # ThinKV

    def end_segment(self, last):
        sparsity = mean(self.sparsities)
        self.sparsities = []
        low, high = self.thresholds
        self.thoughts[last] = REASONING
        if sparsity < low:
            self.thoughts[last] = EXECUTION
        if sparsity > high:
            self.thoughts[last] = TRANSITION

        sizes = [self.sizes(held, last) for held in self.maps.values()]
        assert all(other == sizes[0] for other in sizes)  # layers differ in which, not in how many
        quotas = self.plan(last, sizes[0])
        for at, held in self.maps.items():
            for segment, size in sizes[0].items():
                if quotas.get(segment, 0) < size:
                    self.shrink(at, held, segment, quotas.get(segment, 0))

    def segment_of(self, held, segment):
        """Positions of a segment that may go, in order."""
        return sorted(p for p in held if p >= self.protected and p // self.lag == segment)

    def sizes(self, held, last):
        """Tokens of every segment before `last` that has some."""
        found = {segment: len(self.segment_of(held, segment)) for segment in range(last)}
        return {segment: size for segment, size in found.items() if size}

    def plan(self, last, sizes):
        """How many tokens each earlier segment keeps once segment `last` is complete."""
        steps, quotas = schedule(self.lag), dict(sizes)
        n_other = len(next(iter(self.maps.values()))) - sum(sizes.values())

        def step_down(segment):
            n = self.levels.get(segment, 0)
            quotas[segment] = min(quotas[segment], steps[min(n, len(steps) - 1)])
            self.levels[segment] = n + 1
            self.n_shrunk += 1

        if self.thoughts[last] == TRANSITION:
            for segment in sizes:
                step_down(segment)
        while quotas and self.budget - n_other - sum(quotas.values()) < self.lag:
            in_order = [
                segment
                for kind in LEAST_IMPORTANT_FIRST
                for segment in sorted(quotas)
                if self.thoughts.get(segment, REASONING) == kind  # of the prompt: reasoning
            ]
            can = [segment for segment in in_order if quotas[segment] > steps[-1]]
            if can:
                step_down(can[0])
            else:
                del quotas[in_order[0]]
                self.n_dropped += 1
        return quotas

    def shrink(self, at, held, segment, n_kept):
        tokens = self.segment_of(held, segment)
        kept = []
        if n_kept:
            points = [[x for head in self.heads_of[at] for x in self.keys[head][p]] for p in tokens]
            kept = [tokens[i] for i in nearest_to_centroids(points, n_kept)]
        for p in tokens:
            if p not in kept:
                del held[p]

    def apply_quotas(self, newest):
        """The simplified ThinKV: a third of the blocks each keep 1/2, 1/4 and 1/16 of a block."""
        held = self.maps["shared"]
        if self.budget - len(held) >= self.lag:
            return
        tokens = self.may_go(held, newest)
        blocks = [tokens[i : i + self.lag] for i in range(0, len(tokens), self.lag)]
        entropies = [self.entropy(block) for block in blocks]
        ranked, m = sorted(entropies), len(blocks)
        for block, entropy in zip(blocks, entropies, strict=True):
            if entropy <= ranked[m // 3]:
                quota = self.lag // 2
            elif entropy <= ranked[2 * m // 3]:
                quota = self.lag // 4
            else:
                quota = self.lag // 16
            deepest = [(self.n_layers - 1, head) for _, head in self.heads_of["shared"]]
            best = sorted(block, key=lambda p: -self.attention(deepest, p))
            for p in best[quota:]:
                del held[p]

    def attention(self, heads, position):
        """The last query's weight, mean over heads."""
        return mean([self.queries[-1][head].get(position, 0.0) for head in heads])

    def entropy(self, block):
        last_four = [(layer, head) for layer, head in self.heads if layer >= self.n_layers - 4]
        column = [self.attention(last_four, p) for p in block]
        shares = [c / (sum(column) + 1e-9) for c in column]
        return -sum(p * math.log(p + 1e-12) for p in shares)
