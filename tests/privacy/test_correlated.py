"""Correlated noise against dense matrices, and its sensitivity against all ways in which a client can take part."""

import itertools
import math

import numpy as np
import pytest
import torch

from lamina.privacy.correlated import inverse, next_noise, relative_deviation, sensitivity, square_root
from lamina.rounds.clients import Clients
from lamina.rounds.plan import Plan
from lamina.rounds.settings import TrainSettings


def dense(coefficients, rounds):
    matrix = np.zeros((rounds, rounds))
    for band, value in enumerate(coefficients[:rounds]):
        matrix += value * np.eye(rounds, k=-band)
    return matrix


def test_the_coefficients_are_the_square_root_of_the_prefix_sum():
    """Fichtenberger, Henzinger & Upadhyay 2023: C · C is the matrix of ones on and below the diagonal."""
    root = dense(square_root(60), 60)
    assert np.allclose(root @ root, np.tri(60), atol=1e-13)


@pytest.mark.parametrize("k", range(8))
def test_the_coefficients_are_central_binomials(k):
    assert square_root(8)[k] == pytest.approx(math.comb(2 * k, k) / 4**k, rel=1e-14)


@pytest.mark.parametrize("rounds", [10, 100, 1000])
def test_the_error_of_the_full_factorisation_is_a_landau_constant(rounds):
    """The largest error of a prefix sum is Σ c², for large n (ln n + γ + 4 ln 2)/π - 1/(4πn) (Watson 1930)."""
    coefficients = square_root(rounds)
    error = np.linalg.norm(np.cumsum(inverse(coefficients, rounds))) * sensitivity(coefficients, rounds, rounds)
    landau = (math.log(rounds) + np.euler_gamma + 4 * math.log(2)) / math.pi - 1 / (4 * math.pi * rounds)
    assert error == pytest.approx(landau, abs=0.1 / rounds**2)


@pytest.mark.parametrize("bands", [1, 2, 5, 12, 30])
def test_the_recurrence_is_the_inverse_of_the_matrix(bands):
    """A round needs the noise of the last `bands` - 1 rounds only."""
    rounds, size, coefficients = 12, 7, square_root(bands)
    white = torch.randn(rounds, size, generator=torch.Generator().manual_seed(bands), dtype=torch.float64)
    noises = []
    for z in white:
        noises.append(next_noise(z, noises[: -bands if bands > 1 else None : -1][: bands - 1], coefficients))
    matrix = dense(coefficients, rounds)
    assert np.allclose(matrix @ torch.stack(noises).numpy(), white.numpy(), atol=1e-12)
    assert np.allclose(inverse(coefficients, rounds), np.linalg.inv(matrix)[:, 0], atol=1e-12)
    for t in (1, 3, rounds):
        assert relative_deviation(coefficients, t) == pytest.approx(np.linalg.norm(np.linalg.inv(matrix)[t - 1]))


def test_one_band_is_independent_noise():
    white = torch.randn(5)
    assert torch.equal(next_noise(white, [], square_root(1)), white)


def test_later_noise_cancels_earlier_noise():
    """Over 200 rounds the sum of the noise grows as the theory says, and not like a random walk."""
    rounds, coefficients = 200, square_root(20)
    white = torch.randn(rounds, 4000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    noises = []
    for z in white:
        noises.append(next_noise(z, noises[:-20:-1], coefficients))
    measured = torch.stack(noises).sum(0).std().item()
    expected = np.linalg.norm(np.cumsum(inverse(coefficients, rounds)))
    assert measured == pytest.approx(expected, rel=0.05)
    assert expected < 0.35 * math.sqrt(rounds)


@pytest.mark.parametrize("rounds", [1, 4, 7, 10])
@pytest.mark.parametrize("separation", [1, 2, 3, 5, 20])
@pytest.mark.parametrize("bands", [1, 2, 3, 5, 20])
def test_the_sensitivity_is_the_worst_of_all_participations(rounds, separation, bands):
    coefficients = square_root(bands)
    matrix, worst = dense(coefficients, rounds), 0.0
    for chosen in itertools.product([False, True], repeat=rounds):
        active = np.flatnonzero(chosen)
        if (np.diff(active) >= separation).all():
            worst = max(worst, np.linalg.norm(matrix[:, active].sum(1)))
    assert sensitivity(coefficients, rounds, separation) == pytest.approx(worst, abs=1e-12)


def test_no_client_of_a_plan_exceeds_the_sensitivity_and_one_reaches_it():
    """Every client sends 1 whenever the plan calls it; C x then moves by at most the sensitivity."""
    rounds, separation = 60, 5
    protocol = TrainSettings(0.1, participation=0.2, min_separation=separation)
    plan, takes_part = Plan(Clients.elsewhere(10), protocol), np.zeros((rounds, 10))
    for number in range(1, rounds + 1):
        takes_part[number - 1, plan.cohort(number)] = 1
    moved = np.linalg.norm(dense(square_root(separation), rounds) @ takes_part, axis=0)
    assert moved.max() <= sensitivity(square_root(separation), rounds, separation) + 1e-12
    assert moved.max() == pytest.approx(sensitivity(square_root(separation), rounds, separation))
