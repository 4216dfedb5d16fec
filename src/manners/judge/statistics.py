"""The counting behind a verdict: pure functions of counts, no transcripts, no decisions.

A pair is one probe, asked of parent and candidate. A harm is a pair where the parent passes and the
candidate does not, a gain the reverse, and the flip rate is the share of both among all pairs.

Everything assumes that probes are drawn independently of each other. Probes that are variations of
few templates are less than that, and every interval here is then too narrow.

Sources: Clopper and Pearson, Biometrika 26 (1934); McNemar, Psychometrika 12 (1947), here exact;
Tango, Statistics in Medicine 17 (1998), for the difference of paired shares.
"""

from __future__ import annotations

import math
from statistics import NormalDist

from scipy import special


def clopper_pearson(passed: int, n: int, confidence: float = 0.95) -> tuple[float, float]:
    """The exact two-sided interval of a share: never too narrow, often a little wide.

    With n = 0 nothing is known, so it is (0, 1).
    """
    _refuse_impossible(passed, n)
    tail = (1 - confidence) / 2
    low = float(special.betaincinv(passed, n - passed + 1, tail)) if passed > 0 else 0.0
    high = float(special.betaincinv(passed + 1, n - passed, 1 - tail)) if passed < n else 1.0
    return low, high


def p_worse(harms: int, gains: int) -> float:
    """Exact one-sided McNemar test: how likely so many harms are if harms and gains were equally so.

    Without any flip it is 1. It is no proof of equality if large: that takes :func:`worse_by_at_most`.
    """
    _refuse_impossible(harms, harms + gains)
    return float(special.bdtrc(harms - 1, harms + gains, 0.5)) if harms else 1.0


def worse_by_at_most(harms: int, gains: int, n: int, confidence: float = 0.95) -> float:
    """How much lower the candidate's share may be than the parent's: a one-sided upper bound.

    Inverts Tango's score test, so that it is below a margin exactly if that test shows the candidate
    not inferior by this margin. In its author's and later studies, its error stays close to
    1 - ``confidence`` (5 %) at all n that matter here. With n = 0 it is 1.
    """
    _refuse_impossible(harms + gains, n)
    if n == 0:
        return 1.0
    z = NormalDist().inv_cdf(confidence)
    low, high = (harms - gains) / n, 1.0
    for _ in range(60):  # the score falls as the difference grows; 60 halvings exhaust a float
        middle = (low + high) / 2
        if _score(harms, gains, n, middle) > -z:
            low = middle
        else:
            high = middle
    return high


def pairs_needed(flip_rate: float, margin: float, confidence: float = 0.95, power: float = 0.8) -> int:
    """Pairs that it takes to show "worse by less than ``margin``", if truly equal.

    n = (z_confidence * sd0 + z_power * sd1)^2 / margin^2, with sd1^2 the flip rate, and sd0^2 the
    variance of one pair's difference at the margin itself, estimated from the same flip rate. This
    is the usual normal approximation to the power of Tango's test; exact enumeration differs by
    some percent. At least as many as it takes when no pair flips at all.
    """
    gains = harms = flip_rate / 2
    sd0 = math.sqrt(_null_variance(harms, gains, 1.0, margin))
    z_confidence, z_power = NormalDist().inv_cdf(confidence), NormalDist().inv_cdf(power)
    n = ((z_confidence * sd0 + z_power * math.sqrt(flip_rate)) / margin) ** 2
    without_flips = z_confidence**2 * (1 - margin) / margin
    return math.ceil(max(n, without_flips))


def passes_needed(threshold: float, confidence: float = 0.95) -> int | None:
    """Probes, all passing, that it takes to show a share of at least ``threshold``; None if none can."""
    if threshold <= 0:
        return 0
    return None if threshold >= 1 else math.ceil(math.log(1 - confidence) / math.log(threshold))


def _score(harms: float, gains: float, n: float, difference: float) -> float:
    variance = n * _null_variance(harms, gains, n, difference)
    distance = harms - gains - n * difference
    if variance <= 0:
        return 0.0 if distance == 0 else math.copysign(math.inf, distance)
    return distance / math.sqrt(variance)


def _null_variance(harms: float, gains: float, n: float, difference: float) -> float:
    """Variance of one pair's (harm - gain) if its mean is ``difference``, by maximum likelihood."""
    b = -harms - gains + (2 * n - harms + gains) * difference
    c = -gains * difference * (1 - difference)
    gain_rate = (math.sqrt(max(b * b - 8 * n * c, 0.0)) - b) / (4 * n)
    return 2 * gain_rate + difference * (1 - difference)


def _refuse_impossible(k: int, n: int) -> None:
    if not 0 <= k <= n:
        raise ValueError(f"{k} of {n} is no count")
