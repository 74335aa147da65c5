"""Fitting a line to measured times that have outliers.

Times over sizes span orders of magnitude, so errors count relative to the time itself, and points far from
the line count less and less (iteratively reweighted least squares with Huber's weights: P. J. Huber, "Robust
Estimation of a Location Parameter", 1964). Both coefficients are costs and stay at or above zero.

Whether the times tell a slope at all says its standard error, from the spread of the times (W. H. Press et al.,
"Numerical Recipes", 3rd edition, section 15.2, "Fitting Data to a Straight Line").
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

_ROUNDS = 30
#: Huber's constant: residuals beyond it (in robust standard deviations) lose weight.
_HUBER = 1.345
#: A median of absolute deviations times this is the standard deviation of normal errors.
_NORMAL = 1.4826
_HALVINGS = 60


def fit_line(sizes: Sequence[float], times: Sequence[float]) -> tuple[float, float]:
    """``(alpha, beta)`` with ``time = alpha + beta * size``, both at least 0.

    Args:
        sizes: at least one, not negative.
        times: as many, above 0.

    Raises:
        ValueError: no points, unequal numbers of them, or a time that is not above 0.
    """
    if not sizes or len(sizes) != len(times) or min(times) <= 0:
        raise ValueError(f"cannot fit a line to sizes {list(sizes)} and times {list(times)}")
    weights = [1.0] * len(sizes)
    alpha = beta = 0.0
    for _ in range(_ROUNDS):
        alpha, beta = _weighted(sizes, times, [w / (t * t) for w, t in zip(weights, times)])
        residuals = [abs(alpha + beta * x - t) / t for x, t in zip(sizes, times)]
        scale = max(_NORMAL * median(residuals), 1e-9)
        weights = [min(1.0, _HUBER * scale / r) if r > 0 else 1.0 for r in residuals]
    return alpha, beta


def spread(values: Sequence[float]) -> float | None:
    """The standard deviation of values around their median, which outliers do not move; None of fewer than two."""
    if len(values) < 2:
        return None
    middle = median(values)
    away = sorted(abs(value - middle) for value in values)
    # Of an odd number one is the median itself and deviates by nothing.
    return _NORMAL * median(away[len(values) % 2 :])


def slope_error(sizes: Sequence[float], errors: Sequence[float]) -> float:
    """Standard error of the slope of a line through times with these standard deviations; infinite where all sizes are
    equal, 0 where a time has no error."""
    if len(set(sizes)) < 2:
        return math.inf
    if min(errors) <= 0:
        return 0.0
    weights = [1.0 / (e * e) for e in errors]
    mean = sum(w * x for w, x in zip(weights, sizes)) / sum(weights)
    return 1 / math.sqrt(sum(w * (x - mean) ** 2 for w, x in zip(weights, sizes)))


def shared_out(alpha: float, beta: float, sizes: Sequence[float], total: float) -> tuple[float, float]:
    """``(alpha, beta)`` moved so that times of ``sizes`` add up to ``total``, where nobody can tell which of the two is
    wrong.

    Each moves, by its logarithm, in proportion to its share of the times so far: of two factors of equal prior
    uncertainty that is the likeliest pair, to first order. Where latency makes up the times it takes the difference
    and bandwidth stays, and the other way round; where both make up half of them both are scaled alike.
    """
    fixed, moving = alpha * len(sizes), beta * sum(sizes)
    larger, smaller = max(fixed, moving), min(fixed, moving)
    if larger <= 0:
        return total / len(sizes), 0.0
    if total <= smaller:
        # Less than the smaller part alone: the larger one cannot be there.
        return (0.0, beta * total / smaller) if fixed >= moving else (alpha * total / smaller, 0.0)
    low, high = min(0.0, math.log((total - smaller) / larger)), math.log(total / larger)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if fixed * math.exp(middle * fixed / larger) + moving * math.exp(middle * moving / larger) < total:
            low = middle
        else:
            high = middle
    return alpha * math.exp(high * fixed / larger), beta * math.exp(high * moving / larger)


def _weighted(x: Sequence[float], y: Sequence[float], w: Sequence[float]) -> tuple[float, float]:
    total = sum(w)
    mean_x = sum(wi * xi for wi, xi in zip(w, x)) / total
    mean_y = sum(wi * yi for wi, yi in zip(w, y)) / total
    spread = sum(wi * (xi - mean_x) ** 2 for wi, xi in zip(w, x))
    if spread <= 0:
        return mean_y, 0.0
    beta = sum(wi * (xi - mean_x) * (yi - mean_y) for wi, xi, yi in zip(w, x, y)) / spread
    alpha = mean_y - beta * mean_x
    if beta < 0:
        return mean_y, 0.0
    if alpha < 0:
        return 0.0, sum(wi * xi * yi for wi, xi, yi in zip(w, x, y)) / sum(wi * xi * xi for wi, xi in zip(w, x))
    return alpha, beta
