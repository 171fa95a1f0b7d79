"""Whether numbers are random as they should be, by the tests of SciPy.

Seeds are fixed, so what passes once passes always: bounds are such that right draws fail one of
these tests in fewer than one choice of seeds in a hundred.
"""

from __future__ import annotations

from scipy import stats

LEAST = 1e-5  # of the probability that right draws are as far off, among some hundred tests


def has_share(is_hit, p):
    """Whether as many entries are set as independent ones of probability `p` would be."""
    return stats.binomtest(int(is_hit.sum()), is_hit.numel(), p).pvalue > LEAST


def are_even(counts):
    """Whether all values of which these are the counts are equally probable."""
    return LEAST < stats.chisquare(counts).pvalue < 1 - LEAST


def are_gaussian(x):
    """Whether numbers are standard normal: moments, distribution and tails."""
    x = x.double()
    squares = stats.chi2(x.numel()).cdf(float(x.square().sum()))
    found = [
        stats.ttest_1samp(x, 0.0).pvalue,
        2 * min(squares, 1 - squares),
        stats.skewtest(x).pvalue,
        stats.kurtosistest(x).pvalue,
        stats.kstest(x, "norm").pvalue,
    ]
    tails = all(has_share(x.abs() > bound, 2 * stats.norm.sf(bound)) for bound in (3.0, 4.0, 4.5))
    return tails and min(found) > LEAST
