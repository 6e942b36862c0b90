"""One row of the cache and every policy once more: slow, obvious, in plain lists and floats.

Written from the formulas of the method, for the tests to compare `epikv.py` with. A token is a dict
of its position, its score, the size of its value and whether it is beyond its block's quota; a map
is the list of tokens that a head holds, or all heads together. Nothing is ever overwritten in
place, but for the score of a token whose block is complete.
"""

import math

EPSILON = 1e-6
HISTORY = 1024  # complete blocks that `epikv-seg` ranks
WITHIN = math.inf  # in place of a block: the token is within its block's quota

# The blocks of band A and band B in a model of 32 blocks.
BANDS = {
    "epikv": ([10], [21]),
    "epikv-smooth": ([10], [21]),
    "epikv-raw": ([10], [21]),
    "epikv-seg": ([10], [21]),
    "epikv-band": ([7, 8, 9, 10, 11, 12, 13], [18, 19, 20, 21, 22, 23, 24, 25]),
}

# What the z-scores of the two bands count; 1 and 1 where it is not said.
WEIGHTS = {"epikv-band": (1.29, 1.0)}

CALIBRATED = {*BANDS, "epikv-fit"}  # others have no use for a calibration

# Blocks that must be among the recent tokens.
BLOCKS = {"lag-kv": 2, "epikv-seg": 1}


def scaled(band, n_layers):
    """The distinct blocks of `band` in a model of `n_layers` blocks."""
    return sorted({round(layer * n_layers / 32) for layer in band})


def mean(values):
    return sum(values) / len(values)


def variance(values):
    """Sample variance."""
    middle = mean(values)
    return sum((value - middle) ** 2 for value in values) / (len(values) - 1)


def norm(values):
    return math.sqrt(sum(value * value for value in values))


def log_norm(values):
    return math.log(max(norm(values), 1e-6))


def log_variance(values):
    return math.log(max(variance(values), 1e-12))


STATISTICS = {
    "range": lambda values: max(values) - min(values),
    "var": variance,
    "norm": norm,
}


def zscore(values):
    """How far the last of `values` is from their mean, in population standard deviations."""
    if len(values) < 2:
        return 0.0
    middle = mean(values)
    deviation = math.sqrt(mean([(value - middle) ** 2 for value in values]))
    return (values[-1] - middle) / (deviation + EPSILON)


def hash_uniform(*keys):
    """A number in (0, 1) from integers: 32-bit rounds chained over the keys, the top 23 bits."""
    state = 0
    for key in keys:
        state = (state + key + 0x9E3779B9) % 2**32
        state ^= state >> 16
        state = state * 0x21F0AAAD % 2**32
        state ^= state >> 15
        state = state * 0x735A2D97 % 2**32
        state ^= state >> 15
    return (state // 2**9 + 0.5) / 2**23


def each_head(function, *vectors):
    """`function` of the vectors [layer][head] of a token, as [layer][head]."""
    return [
        [function(*of_head) for of_head in zip(*of_layer, strict=True)]
        for of_layer in zip(*vectors, strict=True)
    ]


def over_heads(numbers):
    """The mean of numbers [layer][head]."""
    return mean([number for layer in numbers for number in layer])


class TwinRow:
    """A row that holds at most `budget` tokens. `bands`: named blocks, else the policy's scaled.

    A token comes as its residuals, a list of floats for each block that counts, and where they
    matter its keys and values, a list of floats for each head of each layer.
    """

    def __init__(
        self,
        policy,
        *,
        budget,
        sinks=4,
        recent=None,
        window=None,
        seed=0,
        n_layers=32,
        n_heads=1,
        bands=None,
        calibration=None,
        n_prompt=0,
        lag=None,
        lag_reference="next",
        quotas=None,
        value_reserve=0,
        value_statistic="range",
        slot_map=None,
    ):
        self.policy = policy
        self.budget = budget
        n_blocks = BLOCKS.get(policy, 0)
        self.lag = (min(128, budget // 8) if lag is None else lag) if n_blocks else 0
        quarter = min(128, budget // 4)
        self.recent = max(quarter, n_blocks * self.lag) if recent is None else recent
        self.seed = seed
        calibration = calibration if policy in CALIBRATED else None
        self.window = window or (calibration.window if calibration else 64)
        self.weights = WEIGHTS.get(policy, (1.0, 1.0))
        self.log_age = 0.0
        self.fit = None
        if policy == "epikv-fit":
            self.fit = calibration.fit
            self.log_age = self.fit.log_age
            self.bands = [[block] for block in range(n_layers)]
        elif calibration:
            self.weights = (calibration.weight_a, calibration.weight_b)
            self.bands = bands or [calibration.band_a, calibration.band_b]
        else:
            self.bands = bands or [scaled(band, n_layers) for band in BANDS.get(policy, ())]
        self.lag_reference = lag_reference
        self.quotas = quotas or (self.lag // 2, self.lag // 4, self.lag // 16)
        self.value_reserve = value_reserve
        self.value_statistic = STATISTICS[value_statistic]
        self.protected = sinks
        if n_prompt <= budget // 2 and n_prompt <= budget - self.recent - value_reserve - 1:
            self.protected = max(sinks, n_prompt)

        heads = [(layer, head) for layer in range(n_layers) for head in range(n_heads)]
        slot_map = slot_map or ("head" if policy == "epikv-fit" else "shared")
        self.maps = {head: [] for head in (heads if slot_map == "head" else ["shared"])}

        self.residuals = None  # of the token before
        self.changes = [[] for _ in self.bands]  # of every token that has one
        self.flat = []  # the unsmoothed scores of the same tokens
        self.variances = []  # of the keys or values of every token
        self.block_variances = []  # of the keys of every complete block
        self.directions = None  # [layer][head], the sum of all normalised keys
        self.last = []  # keys and values of the last two blocks and the one that is growing

    @property
    def tokens(self):
        """What the one map of all heads holds."""
        return self.maps["shared"]

    def append(self, position, residuals, keys=None, values=None):
        """Decode the token at `position`. Returns the victim's position, None without one.

        Where each head has its own map, the victims' positions [layer][head].
        """
        victims = {}
        for head, tokens in self.maps.items():
            if len(tokens) == self.budget and self.policy != "full":
                victim = self.worst(tokens, newest=position)
                tokens.remove(victim)
                victims[head] = victim["position"]
        self.enter(position, residuals, keys, values)
        if not victims:
            return None
        if "shared" in victims:
            return victims["shared"]
        layers = sorted({layer for layer, _ in victims})
        return [[p for (of, _), p in sorted(victims.items()) if of == layer] for layer in layers]

    def admit(self, position, residuals, keys=None, values=None):
        """Take prompt tokens, the first at `position`; then the worst go until the budget holds."""
        nothing = [None] * len(residuals)
        for token in zip(residuals, keys or nothing, values or nothing, strict=True):
            self.enter(position, *token)
            position += 1
        for tokens in self.maps.values():
            while len(tokens) > self.budget and self.policy != "full":
                tokens.remove(self.worst(tokens, newest=position - 1))

    def worst(self, tokens, newest):
        """The lowest score of the tokens that may go, the oldest of equal ones.

        Before all others those beyond their block's quota, the oldest block's first. Where age
        counts it is that at this moment, when the newest token stands at `newest`.
        """
        candidates = [
            token
            for token in tokens
            if token["position"] >= self.protected
            and token["position"] <= newest - self.recent
            and token["position"] != newest
        ]
        if self.value_reserve:
            candidates.sort(key=lambda token: (token["size"], token["position"]))
            candidates = candidates[: -self.value_reserve]

        def aged(token):
            return token["score"] + self.log_age * math.log(1 + newest - token["position"])

        return min(candidates, key=lambda t: (t["beyond"], aged(t), t["position"]))

    def enter(self, position, residuals, keys, values):
        """Score a token, put it into every map, and end its block if it is the last one there."""
        score = self.score(position, residuals, keys, values)
        size = each_head(self.value_statistic, values) if self.value_reserve else 0.0
        for head, tokens in self.maps.items():
            entry = {"position": position, "beyond": WITHIN}
            entry["score"] = self.on_map(score, head)
            entry["size"] = self.on_map(size, head)
            tokens.append(entry)
        if self.lag:
            self.last.append((keys, values))
            if (position + 1) % self.lag == 0:
                self.end_block(position // self.lag)
                self.last = self.last[-2 * self.lag :]

    @staticmethod
    def on_map(numbers, head):
        """A number of the token, or numbers [layer][head] of it, for the map of `head`."""
        if not isinstance(numbers, list):
            return numbers
        if head == "shared":
            return over_heads(numbers)
        return numbers[head[0]][head[1]]

    def score(self, position, residuals, keys, values):
        """A number, or [layer][head]."""
        match self.policy:
            case "streaming" | "full" | "lag-kv":  # lag-kv: until its block is scored
                return 0.0
            case "random":
                return hash_uniform(self.seed, position)
            case "k-norm":
                return each_head(lambda key: -norm(key), keys)
            case "key-diff":
                return self.score_direction(keys)
            case "epikv-fit":
                return self.score_fit(position, residuals, keys, values)
            case "key-var" | "value-var":
                vectors = keys if self.policy == "key-var" else values
                self.variances.append(over_heads(each_head(variance, vectors)))
                return mean(self.variances[-self.window :])
        return self.score_change(position, residuals)

    def score_direction(self, keys):
        """Minus the cosine of each key to the mean of all normalised keys so far.

        The sum of them points where their mean does.
        """
        unit = each_head(lambda key: [x / norm(key) for x in key], keys)
        total = self.directions or each_head(lambda key: [0.0] * len(key), keys)
        total = each_head(lambda a, b: [x + y for x, y in zip(a, b, strict=True)], total, unit)
        self.directions = total

        def minus_cosine(a, b):
            return -sum(x * y for x, y in zip(a, b, strict=True)) / (norm(a) * norm(b))

        return each_head(minus_cosine, unit, total)

    def score_fit(self, position, residuals, keys, values):
        """Of each head the mixture of the sums over a token's features, and over blocks."""
        self.see_change(position, residuals)
        minus_cosine = self.score_direction(keys)
        sums = [0.0] * len(self.fit.heads)
        for block in range(len(keys)):
            changes = self.changes[block][-self.window :]
            features = {
                "change": zscore(changes) if position > 0 else 0.0,
                "key_norm": mean([log_norm(key) for key in keys[block]]),
                "key_variance": mean([log_variance(key) for key in keys[block]]),
                "value_norm": mean([log_norm(value) for value in values[block]]),
                "value_variance": mean([log_variance(value) for value in values[block]]),
                "key_similarity": -mean(minus_cosine[block]),
            }
            for name, number in features.items():
                for i, weights in enumerate(getattr(self.fit, name)):
                    sums[i] += weights[block] * number
        return [
            [
                sum(
                    weights[block][head] * s
                    for weights, s in zip(self.fit.heads, sums, strict=True)
                )
                for head in range(len(keys[block]))
            ]
            for block in range(len(keys))
        ]

    def see_change(self, position, residuals):
        """Add the token's change after the blocks of each band to those before; the first has none.

        That of a band is the mean over its blocks.
        """
        before, self.residuals = self.residuals, residuals
        if position == 0:
            return
        for band, changes in zip(self.bands, self.changes, strict=True):
            changes.append(mean([math.dist(residuals[block], before[block]) for block in band]))

    def score_change(self, position, residuals):
        self.see_change(position, residuals)
        if position == 0:
            return 0.0  # no token before it, no change
        a, b = (changes[-self.window :] for changes in self.changes)
        weight_a, weight_b = self.weights
        if self.policy == "epikv-raw":
            return weight_a * mean(a) - weight_b * mean(b)
        flat = weight_a * zscore(a) - weight_b * zscore(b)
        if self.policy in ("epikv", "epikv-band", "epikv-seg"):
            return flat
        self.flat.append(flat)
        return mean(self.flat[-self.window :])

    def end_block(self, block):
        """Block `block`, counted from 0, is complete."""
        if self.policy == "epikv-seg":
            self.decide_tier(block)
        elif self.lag_reference == "previous":
            mine = self.last[-self.lag :]
            before = self.last[-2 * self.lag : -self.lag] if block > 0 else mine
            self.score_block(block, mine, before)
        elif block > 0:
            self.score_block(
                block - 1, self.last[-2 * self.lag : -self.lag], self.last[-self.lag :]
            )

    def decide_tier(self, block):
        """Mark the tokens of the block that are beyond the quota of its tier."""
        keys = [keys for keys, _ in self.last[-self.lag :]]
        statistic = mean([over_heads(each_head(variance, of_token)) for of_token in keys])
        self.block_variances.append(statistic)
        ranked = sorted(self.block_variances[-HISTORY:])
        if statistic >= ranked[2 * len(ranked) // 3]:
            quota = self.quotas[0]
        elif statistic >= ranked[len(ranked) // 3]:
            quota = self.quotas[1]
        else:
            quota = self.quotas[2]
        mine = self.of_block(self.tokens, block)
        mine.sort(key=lambda token: (token["score"], token["position"]))
        for token in mine[: self.lag - quota]:
            token["beyond"] = block

    def score_block(self, block, contents, reference):
        """Standard deviations of its keys and values, in the range that `reference` spans."""
        for i, (keys, values) in enumerate(contents):
            of_keys = self.deviations(keys, [keys for keys, _ in reference])
            of_values = self.deviations(values, [values for _, values in reference])
            score = each_head(lambda a, b: a + b, of_keys, of_values)
            for head, tokens in self.maps.items():
                self.of_block(tokens, block)[i]["score"] = self.on_map(score, head)

    @staticmethod
    def deviations(vectors, references):
        """[layer][head] of a token, by the lowest and highest of `references` in each channel."""

        def deviation(vector, *others):
            scaled = []
            for channel, x in enumerate(vector):
                column = [other[channel] for other in others]
                low, high = min(column), max(column)
                scaled.append((x - low) / (high - low + 1e-9))
            return math.sqrt(variance(scaled))

        return each_head(deviation, vectors, *references)

    def of_block(self, tokens, block):
        """The tokens of a complete block, which are all still there."""
        first = block * self.lag
        mine = [token for token in tokens if first <= token["position"] < first + self.lag]
        assert [token["position"] for token in mine] == list(range(first, first + self.lag))
        return mine
