"""Second moments with noise: never negative, and squares of noised means without the noise's variance."""

import pytest
import torch

from lamina.privacy.moments import debiased_square, non_negative

DRAWS, NOISE = 200_000, 0.3


def test_a_debiased_square_is_right_on_average_where_the_mean_is_large():
    noise = NOISE * torch.randn(DRAWS, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    square = (2.0 + noise).square()
    assert square.mean().item() == pytest.approx(4 + NOISE**2, abs=5 * 1.2 / DRAWS**0.5)  # var ≈ (2·2·0.3)²
    assert debiased_square(2.0 + noise, NOISE).mean().item() == pytest.approx(4, abs=5 * 1.2 / DRAWS**0.5)


def test_pure_noise_keeps_less_than_its_variance():
    """E max(n² - s², 0) = 2 s² φ(1), because ∫ (x² - 1) φ = -x φ: 0.484 s² instead of s²."""
    noise = NOISE * torch.randn(DRAWS, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    kept = debiased_square(noise, NOISE)
    assert kept.min() == 0
    assert kept.mean().item() / NOISE**2 == pytest.approx(0.48394, abs=0.02)


def test_without_noise_nothing_changes():
    values = torch.tensor([-1.5, 0.0, 2.0])
    assert torch.equal(debiased_square(values, 0.0), values.square())


def test_negative_second_moments_become_zero():
    assert non_negative(torch.tensor([-0.1, 0.0, 0.2])).tolist() == pytest.approx([0.0, 0.0, 0.2])
