"""Keyed random numbers: every draw is a function of (seed, purpose, counters), never of what was drawn before.

So evaluation, logging, retries and resuming change nothing. Philox is counter-based (Salmon et al. 2011, "Parallel random
numbers: as easy as 1, 2, 3"): the key holds seed and purpose, the counter the step, the group and the sample.
"""

import hashlib

import numpy as np


def generator(seed: int, purpose: str, *counters: int) -> np.random.Generator:
    """A generator for one purpose, such as ("rollout", step, group, sample); at most three counters."""
    assert len(counters) <= 3
    word = int.from_bytes(hashlib.sha256(purpose.encode()).digest()[:8], "little")
    high = [0, *counters, *([0] * (3 - len(counters)))]  # word 0 is Philox's own running counter
    return np.random.Generator(np.random.Philox(key=np.array([seed, word], np.uint64), counter=np.array(high, np.uint64)))


def uniforms(seed: int, purpose: str, step: int, P: int, G: int, T: int, first: int = 0) -> np.ndarray:
    """(P, G, T) float32 in [0, 1): the value at [p, g, t] does not depend on P, G or T. `first` is the number of group 0."""
    table = np.empty((P, G, T), np.float32)
    for p in range(P):
        for g in range(G):
            generator(seed, purpose, step, first + p, g).random(out=table[p, g], dtype=np.float32)
    return table


def permutation(seed: int, purpose: str, epoch: int, n: int) -> np.ndarray:
    """The order of n items in one epoch."""
    return generator(seed, purpose, epoch).permutation(n)
