"""Choose which rounds of a long run are drawn: few, but with all that a reader would look for in the curve."""

from __future__ import annotations

import itertools

import numpy as np
from numpy.typing import NDArray


def thinned(lines: NDArray[np.float64], stretches: int) -> NDArray[np.intp]:
    """Return the places to draw of lines with a common x axis: their ends, and the extremes of each in every stretch.

    Args:
        lines: [lines, places]; NaN where a line has no value.
        stretches: of equal length, in which each line keeps its smallest and its largest value.

    >>> thinned(np.array([[0.0, 0, 9, 0, 0, 0, -9, 0, 0, 0]]), 1).tolist()
    [0, 2, 6, 9]
    """
    count = lines.shape[1]
    if count <= 2 * len(lines) * stretches:
        return np.arange(count)
    kept = {0, count - 1}
    edges = np.linspace(0, count, stretches + 1).astype(int)
    for line in lines:
        for start, end in itertools.pairwise(edges.tolist()):
            kept |= {start + place for place in extremes(line[start:end])}
    return np.array(sorted(kept), np.intp)


def extremes(line: NDArray[np.float64]) -> set[int]:
    """Return the places of the smallest and the largest value; none if all are NaN."""
    if np.isnan(line).all():
        return set()
    return {int(np.nanargmin(line)), int(np.nanargmax(line))}
