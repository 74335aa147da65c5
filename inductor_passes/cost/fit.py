"""Fitting a line to measured times that have outliers.

Times over sizes span orders of magnitude, so errors count relative to the time itself, and points far from
the line count less and less (iteratively reweighted least squares with Huber's weights: P. J. Huber, "Robust
Estimation of a Location Parameter", 1964). Both coefficients are costs and stay at or above zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

_ROUNDS = 30
#: Huber's constant: residuals beyond it (in robust standard deviations) lose weight.
_HUBER = 1.345


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
        scale = max(1.4826 * median(residuals), 1e-9)
        weights = [min(1.0, _HUBER * scale / r) if r > 0 else 1.0 for r in residuals]
    return alpha, beta


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
