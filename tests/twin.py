"""One row of the cache and every policy once more: slow, obvious, in plain lists and floats.

Written from the formulas of the method, for the tests to compare `epikv.py` with. A token is a dict
of its position and its score; nothing is ever overwritten in place.
"""

import math

EPSILON = 1e-6

# The blocks of band A and band B in a model of 32 blocks.
BANDS = {
    "epikv": ([10], [21]),
    "epikv-smooth": ([10], [21]),
    "epikv-raw": ([10], [21]),
    "epikv-band": ([7, 8, 9, 10, 11, 12, 13], [18, 19, 20, 21, 22, 23, 24, 25]),
    "streaming": (),
    "random": (),
    "full": (),
}


def scaled(band, n_layers):
    """The distinct blocks of `band` in a model of `n_layers` blocks."""
    return sorted({round(layer * n_layers / 32) for layer in band})


def mean(values):
    return sum(values) / len(values)


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


class TwinRow:
    """A row that holds at most `budget` tokens. `bands`: named blocks, else the policy's scaled."""

    def __init__(
        self,
        policy,
        *,
        budget,
        sinks=4,
        recent=None,
        window=64,
        seed=0,
        n_layers=32,
        bands=None,
        n_prompt=0,
    ):
        self.policy = policy
        self.budget = budget
        self.recent = min(128, budget // 4) if recent is None else recent
        self.window = window
        self.seed = seed
        self.bands = bands or [scaled(band, n_layers) for band in BANDS[policy]]
        self.protected = sinks
        if n_prompt <= budget // 2 and n_prompt <= budget - self.recent - 1:
            self.protected = max(sinks, n_prompt)
        self.tokens = []
        self.residuals = None  # of the token before
        self.changes = [[] for _ in self.bands]  # of every token that has one
        self.flat = []  # the unsmoothed scores of the same tokens

    def append(self, position, residuals):
        """Decode the token at `position`. Returns the position of its victim, None without one.

        residuals: the residual, a list of floats, after each block that counts.
        """
        victim = None
        if len(self.tokens) == self.budget and self.policy != "full":
            victim = self.worst(newest=position)
            self.tokens.remove(victim)
        self.tokens.append({"position": position, "score": self.score(position, residuals)})
        return None if victim is None else victim["position"]

    def admit(self, position, chunk):
        """Take prompt tokens, the first at `position`; then the worst go until the budget holds."""
        for residuals in chunk:
            self.tokens.append({"position": position, "score": self.score(position, residuals)})
            position += 1
        while len(self.tokens) > self.budget and self.policy != "full":
            self.tokens.remove(self.worst(newest=position - 1))

    def worst(self, newest):
        """The lowest score of the tokens that may go, the oldest of equal ones."""
        candidates = [
            token
            for token in self.tokens
            if token["position"] >= self.protected
            and token["position"] <= newest - self.recent
            and token["position"] != newest
        ]
        return min(candidates, key=lambda token: (token["score"], token["position"]))

    def score(self, position, residuals):
        if self.policy in ("streaming", "full"):
            return 0.0
        if self.policy == "random":
            return hash_uniform(self.seed, position)

        before, self.residuals = self.residuals, residuals
        if position == 0:
            return 0.0  # no token before it, no change
        for band, changes in zip(self.bands, self.changes, strict=True):
            changes.append(mean([math.dist(residuals[block], before[block]) for block in band]))
        a, b = (changes[-self.window :] for changes in self.changes)
        if self.policy == "epikv-raw":
            return mean(a) - mean(b)
        if self.policy == "epikv-band":
            return 1.29 * zscore(a) - zscore(b)
        flat = zscore(a) - zscore(b)
        if self.policy == "epikv":
            return flat
        self.flat.append(flat)
        return mean(self.flat[-self.window :])
