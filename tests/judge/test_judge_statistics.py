"""Counting against published values, SciPy's own tests, brute force, and the planning table."""

import math

import pytest
from scipy import stats

from manners.judge.statistics import clopper_pearson, p_worse, pairs_needed, passes_needed, worse_by_at_most


@pytest.mark.parametrize(
    ("k", "n", "low", "high"),
    [
        (0, 10, 0.0, 0.3085),  # standard tables of exact limits
        (1, 10, 0.0025, 0.4450),
        (5, 10, 0.1871, 0.8129),
        (10, 10, 0.6915, 1.0),
        (0, 400, 0.0, 0.009180),
        (400, 400, 0.990820, 1.0),
    ],
)
def test_clopper_pearson_against_tables(k, n, low, high):
    assert clopper_pearson(k, n) == pytest.approx((low, high), abs=5e-5)


@pytest.mark.parametrize("n", [1, 7, 30, 400])
def test_clopper_pearson_against_scipys_search(n):
    for k in {0, 1, n // 3, n - 1, n}:
        oracle = stats.binomtest(k, n).proportion_ci(0.95, "exact")
        assert clopper_pearson(k, n) == pytest.approx((oracle.low, oracle.high), abs=1e-9)


def test_clopper_pearson_covers_at_least_95_percent():
    n = 40
    for share in (0.01, 0.2, 0.5, 0.93, 0.999):
        covered = [k for k in range(n + 1) if clopper_pearson(k, n)[0] <= share <= clopper_pearson(k, n)[1]]
        assert sum(stats.binom.pmf(covered, n, share)) >= 0.95


def test_nothing_is_known_from_nothing():
    assert clopper_pearson(0, 0) == (0.0, 1.0)
    assert worse_by_at_most(0, 0, 0) == 1.0


@pytest.mark.parametrize(("k", "n"), [(-1, 5), (6, 5)])
def test_impossible_counts_are_refused(k, n):
    with pytest.raises(ValueError, match="no count"):
        clopper_pearson(k, n)
    with pytest.raises(ValueError, match="no count"):
        worse_by_at_most(k, 0, n)


@pytest.mark.parametrize(
    ("harms", "gains", "p"), [(0, 0, 1.0), (4, 0, 0.0625), (5, 0, 0.03125), (0, 5, 1.0), (1, 1, 0.75)]
)
def test_p_worse_by_hand(harms, gains, p):
    assert p_worse(harms, gains) == pytest.approx(p, abs=1e-12)


def test_p_worse_against_the_sum_of_the_tail():
    for harms in range(8):
        for gains in range(8):
            n = harms + gains
            tail = sum(math.comb(n, k) for k in range(harms, n + 1)) / 2**n
            assert p_worse(harms, gains) == pytest.approx(tail, abs=1e-12)


@pytest.mark.parametrize(("n", "most_harms"), [(200, 0), (400, 3), (1000, 12)])
def test_harms_allowed_without_gains_as_published_for_the_score_test(n, most_harms):
    """The planning notes enumerated these for a margin of two points at 95 %, one-sided."""
    assert worse_by_at_most(most_harms, 0, n) < 0.02 < worse_by_at_most(most_harms + 1, 0, n)


@pytest.mark.parametrize(
    ("harms", "gains", "n"), [(0, 0, 50), (3, 1, 400), (0, 6, 100), (20, 5, 200), (1, 1, 30)]
)
def test_the_bound_is_where_the_score_test_turns(harms, gains, n):
    """Against the score written out with a likelihood maximised by brute force."""

    def score(difference):
        def likelihood(q):  # gain rate q, harm rate q + difference
            cells = ((harms, q + difference), (gains, q), (n - harms - gains, 1 - 2 * q - difference))
            return sum(k * math.log(p) if k else 0.0 for k, p in cells)

        low, high = max(0.0, -difference) + 1e-12, (1 - difference) / 2 - 1e-12
        for _ in range(300):
            a, b = low + (high - low) / 3, high - (high - low) / 3
            low, high = (a, high) if likelihood(a) < likelihood(b) else (low, b)
        variance = 2 * low + difference * (1 - difference)
        return (harms - gains - n * difference) / math.sqrt(n * variance)

    bound = worse_by_at_most(harms, gains, n)
    assert (harms - gains) / n <= bound <= 1
    assert score(bound) == pytest.approx(-1.644854, abs=1e-4)


def test_the_bound_errs_in_about_five_percent():
    """Exact, over all outcomes of 60 pairs with 10 % harms and 4 % gains."""
    n, harm, gain = 60, 0.10, 0.04
    missed = 0.0
    for harms in range(n + 1):
        for gains in range(n + 1 - harms):
            if worse_by_at_most(harms, gains, n) < harm - gain:
                missed += stats.multinomial.pmf(
                    [harms, gains, n - harms - gains], n, [harm, gain, 1 - harm - gain]
                )
            elif harms > 20 and gains > 20:
                break
    assert 0.02 < missed < 0.06


@pytest.mark.parametrize(
    ("flip_rate", "margin", "published"),
    [
        (0.02, 0.02, 420), (0.04, 0.02, 680), (0.06, 0.02, 960), (0.10, 0.02, 1580),
        (0.02, 0.03, 220), (0.06, 0.03, 440), (0.10, 0.03, 720),
        (0.06, 0.05, 180), (0.10, 0.05, 280),
    ],
)  # fmt: skip
def test_pairs_needed_against_the_enumerated_table(flip_rate, margin, published):
    assert pairs_needed(flip_rate, margin) == pytest.approx(published, rel=0.08)


def test_pairs_needed_without_flips_is_what_the_bound_itself_needs():
    n = pairs_needed(0.0, 0.02)
    assert worse_by_at_most(0, 0, n) <= 0.02 < worse_by_at_most(0, 0, n - 1)


@pytest.mark.parametrize(("threshold", "n"), [(0.98, 149), (0.99, 299), (0.995, 598), (1.0, None), (0.0, 0)])
def test_passes_needed(threshold, n):
    assert passes_needed(threshold) == n
