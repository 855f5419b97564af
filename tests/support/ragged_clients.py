"""Clients with different numbers of samples, for the tests of plans, clients and schedules."""

import itertools

import numpy as np

from lamina.rounds.clients import Clients


def ragged(sizes):
    """Return clients that own consecutive samples."""
    bounds = np.cumsum([0, *sizes])
    return Clients([np.arange(a, b) for a, b in itertools.pairwise(bounds)], samples=int(bounds[-1]))
