"""How much a run reveals about one client: (ε, δ) after any number of rounds, as a pure function of the settings.

In every round each active client sends vectors that are clipped to a bound, and the server adds Gaussian noise to their
sum. The noise multiplier is the standard deviation of that noise divided by the bound; on the mean, the noise is
divided by the same constant number of clients as the sum. What two neighbouring federations are depends on how clients
take part:

| clients | neighbours differ in | the sum moves by | accounted as |
|---|---|---|---|
| `"bernoulli"` | one client more or less | 1 bound | Poisson-sampled Gaussian mechanism |
| `"bernoulli"` with a cap | one client more or less | 2 bounds if the cap cuts, else 1 | truncated Poisson sampling |
| `"exact"` | one client replaced by another | 2 bounds | sampling without replacement |
| all, or cohorts that others know | one client sends zeros | 1 bound | Gaussian mechanism, no amplification |

Under `"bernoulli"` the size of the cohort itself tells whether a client is there. So the sum must be divided by the
expected size of the cohort, not by the real one, and a round whose coins choose nobody must add noise to nothing
(`Plan.chooses_nobody`).

Clients may keep state that tells when they took part, except under amplified `"exact"` sampling and with a cap: there
the states of others would tell who took part before, which amplification counts on being secret
(`amplifies_state`, docs/how-to/privacy.md).

Sampled rounds are composed as privacy loss distributions (PLD) by `dp_accounting`. A PLD is rounded up to a grid, so
that ε is an upper bound; the grid is chosen so that the excess is about 0.1 %.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict, Unpack, get_args

import numpy as np
from numpy.typing import NDArray

from lamina.base.errors import BadInput, missing_extra, unknown
from lamina.base.limits import MOST, MOST_CLIENTS, check_count, check_number
from lamina.base.text import plural
from lamina.privacy.composition import Composition
from lamina.privacy.correlated import sensitivity, square_root
from lamina.rounds.plan import cohort_size
from lamina.rounds.settings import Sampling

LEAST_DELTA = 1e-12  # below it, rounding errors of the PLDs are as large as delta
LEAST_SAMPLED_NOISE = 0.1  # with less noise, ε is in the hundreds and amplification is not worth its computation
LEAST_NOISE, MOST_NOISE = 0.01, 1e5  # as multipliers, that `noise_for` tries
LARGEST_EPSILON = 1e6  # that `noise_for` tells from infinity
NOISE_TOLERANCE = 1e-3  # relative, of `noise_for`
GRID_STEPS = 16  # per standard deviation of one round's privacy loss
FINEST_GRID, COARSEST_GRID = 1e-5, 1e-2
TAIL_DEVIATIONS = 10  # of the privacy loss that the grid covers; less than 1e-23 lies beyond


@dataclass(frozen=True)
class Guarantee:
    """An (ε, δ) guarantee of differential privacy for every client."""

    epsilon: float
    delta: float


class Participation(TypedDict, total=False):
    """How clients take part and how noise is drawn: the optional arguments of `Accountant`."""

    participation: float
    sampling: Sampling
    cohort_cap: int | None
    secret_cohorts: bool
    min_separation: int | None
    bands: int


@dataclass(frozen=True)
class Accountant:
    """The accountant of a run. It has no state: ε is a function of the settings and the number of rounds.

    Args:
        noise_multiplier: standard deviation of the noise on the sum of the clients ÷ clipping bound. See
            `joint_multiplier` for several bounds.
        delta: the δ of the guarantee; less than 1 / clients.
        clients: number of clients of the federation, N.
        participation: fraction of them that takes part in a round, as in the round plan.
        sampling: "exact" or "bernoulli", as in the round plan.
        cohort_cap: the most clients that a "bernoulli" cohort may have; of a larger one, a random subset takes part.
        secret_cohorts: whether nobody but the server learns who takes part. If others do, sampling amplifies nothing.
        min_separation: the least distance between two rounds of a client, as in the round plan. Cohorts are
            then not drawn from all clients, so sampling amplifies nothing.
        bands: of the matrix of correlated noise; 1: independent noise. Correlated noise is not amplified either.
    """

    noise_multiplier: float
    delta: float
    clients: int
    participation: float = 1.0
    sampling: Sampling = "exact"
    cohort_cap: int | None = None
    secret_cohorts: bool = True
    min_separation: int | None = None
    bands: int = 1

    def __post_init__(self) -> None:
        check_number("noise_multiplier", self.noise_multiplier, above=0)
        check_count("clients", self.clients, MOST_CLIENTS)
        check_number("delta", self.delta, least=LEAST_DELTA, below=1)
        if self.clients > 1 and self.delta * self.clients >= 1:
            raise BadInput(
                f"delta = {self.delta:g} of {plural(self.clients, 'client')} promises nothing: a run that publishes "
                f"all data of a random client has it, too; choose a delta well below {1 / self.clients:g}"
            )
        check_number("participation", self.participation, above=0, most=1)
        if self.sampling not in get_args(Sampling):
            raise unknown("sampling", str(self.sampling), get_args(Sampling))
        if self.cohort_cap is not None:
            check_count("cohort_cap", self.cohort_cap)
            if self.sampling != "bernoulli":
                raise BadInput(
                    f'cohort_cap = {self.cohort_cap} needs sampling = "bernoulli": exact cohorts have one size'
                )
        if self.min_separation is not None:
            check_count("min_separation", self.min_separation)
        check_count("bands", self.bands)

    @property
    def is_amplified(self) -> bool:
        """Whether a client is the safer because nobody knows in which rounds it takes part."""
        if not self.secret_cohorts or self.min_separation is not None or self.bands > 1:
            return False
        if self.sampling == "exact":
            return cohort_size(self.clients, self.participation) < self.clients
        return self.participation < 1 or (self.cohort_cap is not None and self.cohort_cap < self.clients)

    @property
    def amplifies_state(self) -> bool:
        """Whether the amplification also holds for clients that keep state: only if no coin depends on another."""
        return self.sampling == "bernoulli" and (self.cohort_cap is None or self.cohort_cap >= self.clients)

    @property
    def relation(self) -> str:
        """What two neighbouring federations differ in, for reports."""
        if not self.is_amplified:
            return "one client sends zeros"
        return "one client is replaced" if self.sampling == "exact" else "one client more or less"

    def deviation(self, bound: float) -> float:
        """Return the standard deviation of the noise on the mean, in one coordinate, for a clipping bound.

        The mean is the sum of the uploads divided by the expected number of active clients, a constant.
        """
        expected = self.participation * self.clients
        cohort = cohort_size(self.clients, self.participation) if self.sampling == "exact" else expected
        return self.noise_multiplier * bound / cohort

    def epsilon(self, rounds: int, repeats: Sequence[int] = ()) -> float:
        """Return ε at `delta` after a number of rounds; the same call again is free.

        Args:
            rounds: how many.
            repeats: for each of these rounds that was released again, of the same cohort with independent noise: how
                many more times.
        """
        check_count("rounds", rounds, MOST, least=0)
        return _epsilon(self, rounds, tuple(sorted(repeats))) if rounds else 0.0

    def guarantee(self, rounds: int) -> Guarantee:
        """Return the guarantee after a number of rounds."""
        return Guarantee(self.epsilon(rounds), self.delta)

    def at(self, delta: float) -> Accountant:
        """Return the accountant for another δ, also for one that promises nothing, which audits compare at."""
        other = copy.copy(self)
        object.__setattr__(other, "delta", delta)  # the record is frozen, and refuses such a δ
        return other

    def rounds_within(self, epsilon: float, most: int) -> int:
        """Return how many rounds, at most `most`, the budget ε allows; 0 if the first round exceeds it."""
        check_number("epsilon", epsilon, above=0)
        fits, exceeds = 0, 1
        while exceeds <= most and self.epsilon(exceeds) <= epsilon:
            fits, exceeds = exceeds, 2 * exceeds
        exceeds = min(exceeds, most + 1)
        while exceeds - fits > 1:
            middle = (fits + exceeds) // 2
            fits, exceeds = (middle, exceeds) if self.epsilon(middle) <= epsilon else (fits, middle)
        return fits


def noise_for(epsilon: float, delta: float, rounds: int, clients: int, **participation: Unpack[Participation]) -> float:
    """Return the least noise multiplier, to 0.1 %, with which `rounds` rounds stay within (ε, δ)."""
    from scipy.optimize import brentq  # dp_accounting needs scipy, too

    check_number("epsilon", epsilon, above=0)
    check_count("rounds", rounds)
    accountant = Accountant(1.0, delta, clients, **participation)

    def excess(log_noise: float) -> float:
        spent = dataclasses.replace(accountant, noise_multiplier=math.exp(log_noise)).epsilon(rounds)
        return min(spent, LARGEST_EPSILON) - epsilon

    high = 0.0
    while excess(high) > 0:
        high += math.log(2)
        if high > math.log(MOST_NOISE):
            raise BadInput(
                f"epsilon = {epsilon:g} at delta = {delta:g} cannot be reached in {plural(rounds, 'round')}: "
                f"even the noise multiplier {math.exp(high) / 2:.0f} gives more; raise it, or train fewer rounds"
            )
    low = high - math.log(2)
    while excess(low) <= 0 and low > math.log(LEAST_NOISE):
        low, high = low - math.log(2), low
    if excess(low) > 0:
        high = brentq(excess, low, high, xtol=NOISE_TOLERANCE / 2)
        while excess(high) > 0:
            high += NOISE_TOLERANCE
    return math.exp(high)


def joint_multiplier(multipliers: Iterable[float]) -> float:
    """Return the one noise multiplier that is equivalent to several vectors of a client with bounds of their own.

    Each is the deviation of a vector's noise ÷ its bound: m vectors with the multiplier z √m each are one with z. The
    count for an adaptive bound (Andrew et al. 2021, each client sending ±1/2) has the multiplier 2 × its deviation.

    >>> joint_multiplier([2.0, 2.0, 2.0, 2.0])
    1.0
    """
    return 1 / math.sqrt(sum(each**-2 for each in multipliers))


def remaining_multiplier(noise_multiplier: float, other: float) -> float:
    """Return the multiplier that is equivalent to `noise_multiplier` together with another one, which is larger.

    >>> round(joint_multiplier([remaining_multiplier(3.0, 10.0), 10.0]), 9)
    3.0
    """
    return 1 / math.sqrt(noise_multiplier**-2 - other**-2)


@functools.cache
def _epsilon(accountant: Accountant, rounds: int, repeats: tuple[int, ...] = ()) -> float:
    a, more = accountant, sum(repeats)
    if not a.is_amplified:
        # at worst one client is in all repeated rounds, each of which moves by its bound alone
        reach = math.hypot(sensitivity(square_root(a.bands), rounds, a.min_separation or 1), math.sqrt(more))
        return _gaussian_epsilon(a.noise_multiplier / reach, a.delta)
    least = a.noise_multiplier / math.sqrt(1 + max(repeats, default=0))
    if least < LEAST_SAMPLED_NOISE:  # sampling only ever helps, so its bound without it holds
        reach = 1 if a.sampling == "bernoulli" and a.cohort_cap is None else 2
        return _gaussian_epsilon(a.noise_multiplier / (reach * math.sqrt(rounds + more)), a.delta)
    a = dataclasses.replace(a, delta=LEAST_DELTA)
    if repeats:
        return _epsilon_with_repeats(a, rounds, repeats, accountant.delta)
    return max(each.epsilon(rounds, accountant.delta) for each in _losses(a))


def _epsilon_with_repeats(accountant: Accountant, rounds: int, repeats: tuple[int, ...], delta: float) -> float:
    """Return ε of sampled rounds of which some were released again.

    n releases of one cohort are one release with 1/√n of the noise. They cost more than n rounds with cohorts of their
    own.
    """
    interval = _grid_of(accountant)  # for all of them
    times = Counter(repeats) + Counter({0: rounds - len(repeats)})
    parts = []
    for more, count in times.items():
        noise = accountant.noise_multiplier / math.sqrt(1 + more)
        parts.append(_round(dataclasses.replace(accountant, noise_multiplier=noise), interval).self_compose(count))
    return float(functools.reduce(lambda one, other: one.compose(other), parts).get_epsilon_for_delta(delta))


def _gaussian_epsilon(noise_multiplier: float, delta: float) -> float:
    """Return ε of the Gaussian mechanism (Balle & Wang 2018)."""
    with np.errstate(divide="ignore"):  # its logarithm of a δ that is 0
        return float(_dp_accounting().gaussian_mechanism.get_epsilon_gaussian(noise_multiplier, delta))


def _grid(noise_multiplier: float, fraction: float) -> float:
    """Return the distance of a PLD's values: a part of the standard deviation of one round's privacy loss."""
    deviation = fraction * math.sqrt(math.expm1(min(noise_multiplier**-2, 50.0)))
    return min(max(deviation / GRID_STEPS, FINEST_GRID), COARSEST_GRID)


@functools.lru_cache(maxsize=64)
def _losses(accountant: Accountant) -> list[Composition]:
    """Return the privacy losses of one sampled round, in both directions where they differ."""
    pld = _round(accountant, _grid_of(accountant))
    directions = [pld._pmf_remove] if accountant.sampling == "exact" else [pld._pmf_remove, pld._pmf_add]
    return [Composition(pmf) for pmf in directions]


def _grid_of(accountant: Accountant) -> float:
    """Return the distance of the values of one sampled round's PLD."""
    a = accountant
    if a.sampling == "exact":
        return _grid(a.noise_multiplier / 2, cohort_size(a.clients, a.participation) / a.clients)
    return _grid(a.noise_multiplier, a.participation)


def _round(accountant: Accountant, interval: float) -> Any:
    """Return the privacy loss distribution of one sampled round, on a grid of this interval."""
    a, distributions = accountant, _dp_accounting().pld.privacy_loss_distribution
    noise, fraction = a.noise_multiplier, a.participation
    if a.sampling == "exact":
        return distributions.PrivacyLossDistribution(
            _without_replacement(noise / 2, cohort_size(a.clients, fraction) / a.clients, interval)
        )
    grid = {"value_discretization_interval": interval}
    if a.cohort_cap is None:
        return distributions.from_gaussian_mechanism(noise, sampling_prob=fraction, **grid)
    return distributions.from_truncated_subsampled_gaussian_mechanism(a.clients, fraction, a.cohort_cap, noise, **grid)


def _without_replacement(noise_multiplier: float, fraction: float, interval: float) -> Any:
    """Return the PLD of a Gaussian mechanism on a uniform subset of fixed size, for one client replaced.

    `dp_accounting` has only a loose Rényi bound of it. One round has δ(ε) = f δ'(ε'), with δ' without sampling and
    e^ε' = 1 + (e^ε - 1)/f, for ε >= 0 (Balle, Barthe & Gaboardi 2018, theorem 9). Neighbours are symmetric, so δ(-ε)
    follows. Such a curve is that of a pair of distributions, which dominates the round also under composition (Zhu,
    Dong & Wang 2022); its PLD is the curve through grid points (Doroshenko et al. 2022).
    """
    from scipy.special import log_ndtr

    shift = 1 / noise_multiplier  # the distance of two Gaussians of variance 1
    largest = np.logaddexp(math.log1p(-fraction), math.log(fraction) + shift * (shift / 2 + TAIL_DEVIATIONS))
    steps = math.ceil(largest / interval)
    epsilons = np.arange(steps + 1) * interval

    def deltas_without_sampling(epsilon: NDArray[np.float64]) -> NDArray[np.float64]:
        above = np.exp(log_ndtr(shift / 2 - epsilon / shift))
        below = np.exp(epsilon + log_ndtr(-shift / 2 - epsilon / shift))
        return np.asarray(np.maximum(above - below, 0.0))

    amplified = epsilons - math.log(fraction) + np.log1p(-(1 - fraction) * np.exp(-epsilons))
    amplified[0] = 0.0
    positive = fraction * deltas_without_sampling(amplified)
    negative = -np.expm1(-epsilons) + np.exp(-epsilons) * positive  # δ(-ε) = 1 - e^-ε + e^-ε δ(ε)
    deltas = np.minimum.accumulate(np.concatenate([negative[:0:-1], positive]))
    return _dp_accounting().pld.pld_pmf.create_pmf_pessimistic_connect_dots_fixed_gap(interval, -steps, steps, deltas)


@functools.cache
def _dp_accounting() -> Any:
    try:
        import dp_accounting
        from dp_accounting import gaussian_mechanism, pld  # noqa: F401 - loads them
        from dp_accounting.pld import pld_pmf  # noqa: F401
    except ImportError as error:
        raise missing_extra("dp-accounting 0.6", "privacy", "computing ε") from error
    return dp_accounting
