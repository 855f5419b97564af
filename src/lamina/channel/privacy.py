"""Differential privacy for clients: uploads are clipped to a bound, and the mean gets Gaussian noise.

These are the settings and what engines do with them. `lamina.privacy` computes ε; `training/private.py` brings the two
together. Clipping acts on what the server reads, behind the codecs, so codecs cannot widen the bound.
"""

from __future__ import annotations

import functools
import hashlib
import hmac
import math
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from os import PathLike
from typing import Any, Protocol

import torch
from torch import Tensor

from lamina.algorithms.contract import Algorithm, Number
from lamina.algorithms.rehearsal import sent_fields
from lamina.base import secret_rng
from lamina.base.errors import BadInput, is_number, short_repr
from lamina.base.limits import check_count, check_number, check_switch
from lamina.base.registry import refuse_unknown_options
from lamina.objective.layers import Layers

MANY_NUMBERS = 100_000  # so many take long enough to draw that a thread draws them ahead
COUNT = "#within"  # the name of the noise on the number of uploads within the bound; no field has it
EXAMPLE = "{'bound': 1.0, 'epsilon': 8, 'rounds': 100, 'delta': 1e-5}"


class Register(Protocol):
    """Keeps which means were released with a run's noise: `lamina.storage.releases.Releases`."""

    can_repeat: bool

    def enter(self, number: int, tag: str) -> tuple[int, str]:
        """Return how often a round was released before with other means, and the salt of this release's noise."""

    def first_salt(self, number: int) -> str:
        """Return the salt of a round's first release."""

    def counts(self) -> dict[int, int]:
        """Return how often each round was released."""


@dataclass(frozen=True)
class Noise:
    """The noise of one run on the means of its rounds. Anybody who knows the key can take the noise away."""

    key: bytes = field(repr=False)
    deviation: float  # on the mean, for a bound of 1
    coefficients: tuple[float, ...] = (1.0,)  # of correlated noise; see lamina.privacy.correlated
    count_deviation: float = 0.0  # on the part of the cohort within an adaptive bound
    releases: Register | None = field(default=None, compare=False, repr=False)
    _repeats: dict[int, str] = field(default_factory=dict, compare=False, repr=False)  # the salt of a repeated round
    _earlier: dict[tuple[str, int], Tensor] = field(default_factory=dict, compare=False, repr=False)
    _inverse: list[float] = field(default_factory=lambda: [1.0], compare=False, repr=False)  # of z_t, z_{t-1}, … in y_t
    # numbers of the next round, which a thread draws while a GPU trains, by field, round and salt
    _ahead: dict[tuple[str, int, str], Future[Tensor]] = field(default_factory=dict, compare=False, repr=False)

    @property
    def id(self) -> str:
        """A name of the noise, which does not tell the key."""
        return hashlib.sha256(b"id" + self.key).hexdigest()[:16]

    def stream(self, purpose: str, *counters: int) -> int:
        """Return a random stream that nobody without the key knows, for the choice of a round's clients."""
        return secret_rng.stream(self.key, purpose, *counters)

    def enter(self, number: int, parts: Mapping[str, Any]) -> None:
        """Enter what a round will release in the ledger, if there is one, before any of it leaves the process.

        Args:
            number: of the round.
            parts: what the noise is added to, tensors or numbers by name.
        """
        if self.releases is None:
            return
        total = hmac.new(b"mean" + self.key, digestmod=hashlib.sha256)
        for name, value in parts.items():
            tensor = torch.as_tensor(value).detach().cpu().contiguous()
            total.update(f"{name} {tensor.dtype} {list(tensor.shape)} ".encode())
            total.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
        before, salt = self.releases.enter(number, total.hexdigest())
        self._repeats.pop(number, None)
        if before:
            self._repeats[number] = salt

    def of_round(self, name: str, number: int, like: Tensor) -> Tensor:
        """Return noise of the deviation 1 for a field: a pure function of the key, the field and the release.

        A repeated release has independent noise, and leaves the sequence of correlated noise as it is.
        """
        if number in self._repeats:
            return self._white(name, number, like, self._repeats[number])
        noise = self._first(name, number, like)
        # with a ledger that allows repeats, the numbers follow from the next release's salt, which is not drawn yet
        can_repeat = self.releases is not None and self.releases.can_repeat
        if like.is_cuda and like.numel() >= MANY_NUMBERS and not can_repeat:
            self._draw_ahead(name, number + 1, like)
        return noise

    def _first(self, name: str, number: int, like: Tensor) -> Tensor:
        """Return the noise of the first release of a round."""
        total, bands = self._white(name, number, like, self._first_salt(number)), len(self.coefficients)
        for back in range(1, min(bands, number)):  # the recurrence of `lamina.privacy.correlated.next_noise`
            total = total - self.coefficients[back] * self._correlated(name, number - back, like)
        if bands > 1:
            self._earlier[name, number] = total
            self._earlier.pop((name, number - bands), None)
        return total

    def variance(self, number: int) -> float:
        """Return the variance of the noise of a round, for a deviation of 1."""
        if number in self._repeats:
            return 1.0
        while len(self._inverse) < number:  # as `lamina.privacy.correlated.inverse`
            pairs = zip(self.coefficients[1:], reversed(self._inverse), strict=False)
            self._inverse.append(-sum(coefficient * weight for coefficient, weight in pairs))
        return sum(weight**2 for weight in self._inverse[:number])

    def _correlated(self, name: str, number: int, like: Tensor) -> Tensor:
        if (name, number) not in self._earlier:  # after a restart: from the first round on
            for earlier in range(1, number + 1):
                self._first(name, earlier, like)
        return self._earlier[name, number]

    def _draw_ahead(self, name: str, number: int, like: Tensor) -> None:
        for key in [key for key in self._ahead if key[0] == name]:
            self._ahead.pop(key).cancel()
        salt = self._first_salt(number)

        def draw() -> Tensor:
            noise = self._draw(name, number, like.shape, salt)
            return noise.pin_memory() if like.is_cuda else noise  # which a GPU reads several times as fast

        self._ahead[name, number, salt] = _threads().submit(draw)

    def _first_salt(self, number: int) -> str:
        return "" if self.releases is None else self.releases.first_salt(number)

    def _white(self, name: str, number: int, like: Tensor, salt: str) -> Tensor:
        ahead = self._ahead.pop((name, number, salt), None)
        return self._draw(name, number, like.shape, salt) if ahead is None else ahead.result()

    def _draw(self, name: str, number: int, shape: torch.Size, salt: str) -> Tensor:
        return secret_rng.normal(secret_rng.derived(self.key, "noise", name, number, salt), shape)


@functools.cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(2, thread_name_prefix="noise")


@dataclass(frozen=True)
class Privacy:
    """Differential privacy for every client.

    Args:
        bound: the largest norm of an upload, all fields together; or a table with one bound for each field.
        debias: whether a server that squares the noised mean (FedAdam, Mime) subtracts the variance of the noise.
        quantile: of the uploads' norms, which the bound follows; None: the bound stays as it is. After every round it
            is multiplied by exp(-bound_rate (b - quantile)), where b is the part of the cohort that was within it.
        bound_rate: how fast it follows.
        count_noise: the standard deviation of the noise on the number of uploads within the bound; by default a 20th of
            the expected cohort, or the noise multiplier if that is larger.
        delta: the δ of the guarantee, well below 1 / clients.
        noise_multiplier: the standard deviation of the noise on the sum of the uploads ÷ the bound; unless given, the
            least with which `rounds` rounds stay within `epsilon`.
        epsilon: the budget: a run stops before the round that would exceed it.
        rounds: for how many rounds the noise is chosen; in an experiment file, ``train.rounds``
            unless the noise multiplier is given.
        secret_cohorts: whether nobody but the server learns who takes part in a round. The cohorts then follow from the
            secret, not from the run's seed. If others see who trains, sampling amplifies nothing: give False.
        bands: of correlated noise, for runs with `min_separation`; 1: independent noise.
        secret: the file with the secret that the noise is drawn from, which is made if there is none; by default
            ``privacy.key`` in lamina's folder for the state of programs. Keep it, and keep it from others.
    """

    bound: float | Mapping[str, float]
    delta: float
    noise_multiplier: float | None = None
    epsilon: float | None = None
    rounds: int | None = None
    secret_cohorts: bool = True
    bands: int = 1
    secret: str | None = None
    debias: bool = False
    quantile: float | None = None
    bound_rate: float = 0.2
    count_noise: float | None = None
    noise: Noise | None = field(default=None, repr=False, compare=False)  # set when the run starts

    def __post_init__(self) -> None:
        bounds = self.bound if isinstance(self.bound, Mapping) else {"": self.bound}
        if not bounds or not (is_number(self.bound) or isinstance(self.bound, Mapping)):
            raise BadInput(
                f"privacy: bound = {short_repr(self.bound)}: give a number above 0, or a table with one for every "
                "field of the upload"
            )
        for name, value in bounds.items():
            check_number(f"privacy: bound{f'.{name}' if name else ''}", value, above=0)
        if self.noise_multiplier is not None:
            check_number("privacy: noise_multiplier", self.noise_multiplier, above=0)
        if self.epsilon is not None:
            check_number("privacy: epsilon", self.epsilon, above=0)
        if self.rounds is not None:
            check_count("privacy: rounds", self.rounds)
        check_switch("privacy: secret_cohorts", self.secret_cohorts)
        check_count("privacy: bands", self.bands)
        check_switch("privacy: debias", self.debias)
        if self.quantile is not None:
            check_number("privacy: quantile", self.quantile, above=0, below=1)
            if isinstance(self.bound, Mapping):
                raise BadInput("privacy: a quantile adapts one bound for the whole upload: give bound as one number")
        check_number("privacy: bound_rate", self.bound_rate, above=0)
        if self.count_noise is not None:
            check_number("privacy: count_noise", self.count_noise, above=0)
        if self.quantile is None and (self.count_noise is not None or self.bound_rate != type(self).bound_rate):
            name = "bound_rate" if self.count_noise is None else "count_noise"
            raise BadInput(f"privacy: {name} acts on a bound that follows a quantile: give quantile, too")
        if self.secret is not None and (not isinstance(self.secret, str | PathLike) or not str(self.secret)):
            raise BadInput(f"privacy: secret = {short_repr(self.secret)} is not the name of a file")

    def check(self, algorithm: Algorithm, layers: Layers) -> None:
        """Refuse bounds that are not one for each field of the algorithm's upload."""
        if not isinstance(self.bound, Mapping):
            return
        names = sent_fields(algorithm, layers)
        refuse_unknown_options(f"privacy: an upload of {algorithm.card.name}", self.bound, names, (), noun="field")
        missing = [name for name in names if name not in self.bound]
        if missing:
            raise BadInput(
                f"privacy: the bound of the field '{missing[0]}' is missing: give one for each, or one number"
            )

    def at(self, bound: float | None) -> Privacy:
        """Return the settings with an adapted bound; None: as they are."""
        return self if bound is None else replace(self, bound=bound)

    def clip(self, up: Any, bound: Number | None = None) -> Any:
        """Return uploads [..., p] within the bounds, or within a bound for each row [rows, 1]."""
        norms = _norms(up)
        if isinstance(self.bound, Mapping):
            factors = {name: _factor(norm, self.bound[name]) for name, norm in norms.items()}
        else:
            factors = dict.fromkeys(norms, _factor(_joint(norms), self.bound if bound is None else bound))
        fields = {name: getattr(up, name) for name in norms}
        return up._replace(**{name: value * factors[name].to(value.dtype) for name, value in fields.items()})

    def within(self, up: Any, bound: Number) -> Tensor:
        """Return 1 for uploads [..., p] within a bound, or one for each row [rows, 1], and 0 for others [...]."""
        return (_joint(_norms(up)) <= bound).squeeze(-1).double()

    @property
    def adaptive_bound(self) -> float | None:
        """The bound, if it follows a quantile."""
        return None if self.quantile is None or isinstance(self.bound, Mapping) else self.bound

    def next_bound(self, number: int, within: float, share: float) -> float | None:
        """Return the bound after a round; None if it stays as it is.

        Args:
            number: of the round.
            within: the part of the cohort within the bound.
            share: as for `private_mean`.
        """
        bound = self.adaptive_bound
        if bound is None or self.quantile is None:
            return None
        assert self.noise is not None
        noise = self.noise.of_round(COUNT, number, torch.zeros(1)) * self.noise.count_deviation
        noised = 0.5 + _centred(within, share) + float(noise)
        return bound * math.exp(-self.bound_rate * (noised - self.quantile))

    def private_mean(self, algorithm: Algorithm, up: Any, number: int, share: float) -> Any:
        """Return the mean of clipped uploads as it may be published.

        Args:
            algorithm: the algorithm.
            up: the mean over the cohort.
            number: of the round.
            share: the size of the cohort ÷ the constant that the sum is divided by.
        """
        assert self.noise is not None
        noised = {}
        for name, (total, deviation) in self._unnoised(up, share).items():
            noise = self.noise.of_round(name, number, total).to(total.device, non_blocking=True)
            noised[name] = total + (noise * deviation).to(total)
            if name in algorithm.non_negative:
                noised[name] = noised[name].clamp(min=0)  # costs no privacy
        return up._replace(**noised)

    def enter(self, up: Any, number: int, share: float, within: float = 0.0) -> None:
        """Enter what a round will release in the ledger; refuse what would use the same noise twice."""
        assert self.noise is not None
        parts: dict[str, Any] = {}
        for name, (total, deviation) in self._unnoised(up, share).items():
            parts |= {name: total + 0.0, f"{name}'s deviation": deviation}  # -0.0 and 0.0 are one mean
        if self.quantile is not None:
            parts[COUNT] = [_centred(within, share), self.noise.count_deviation]
        self.noise.enter(number, parts)

    def noise_variance(self, algorithm: Algorithm, up: Any, number: int) -> float:
        """Return the variance of the noise on the mean that the server squares, if it is to be subtracted; else 0."""
        mean = getattr(up, algorithm.squares or "", None)
        if not self.debias or mean is None:
            return 0.0
        assert self.noise is not None
        _, deviation = self._unnoised(up, 1.0)[algorithm.squares or ""]
        return deviation**2 * self.noise.variance(number)

    def _unnoised(self, up: Any, share: float) -> dict[str, tuple[Tensor, float]]:
        """Return by field what the noise is added to, and the deviation of the noise."""
        assert self.noise is not None
        fields = {name: value for name, value in up._asdict().items() if value is not None}
        # several bounds are as one, if each has so much more noise
        per_field = len(fields) ** 0.5
        bounds = {n: self.bound[n] * per_field if isinstance(self.bound, Mapping) else self.bound for n in fields}
        return {name: (value * share, self.noise.deviation * bounds[name]) for name, value in fields.items()}

    def with_noise(self, multiplier: float, noise: Noise) -> Privacy:
        """Return the same settings with the noise of a run."""
        return replace(self, noise_multiplier=multiplier, noise=noise)

    def record(self) -> dict[str, Any]:
        """Return the settings as an experiment file writes them; without the secret and where it lies."""
        names = ("delta", "noise_multiplier", "epsilon", "rounds", "secret_cohorts", "bands")
        bound = dict(self.bound) if isinstance(self.bound, Mapping) else self.bound
        noise_id = None if self.noise is None else self.noise.id
        options = {name: getattr(self, name) for name in names}
        if self.debias:
            options["debias"] = True
        if self.quantile is not None:
            options |= {name: getattr(self, name) for name in ("quantile", "bound_rate", "count_noise")}
        return {"bound": bound, **options, "noise_id": noise_id}


def as_privacy(given: Any) -> Privacy | None:
    """Return settings given as an object or a table; None: no differential privacy."""
    if given is None or isinstance(given, Privacy):
        return given
    if not isinstance(given, Mapping):
        raise BadInput(f"privacy = {short_repr(given)}: give a table such as {EXAMPLE}")
    known = [name for name in Privacy.__dataclass_fields__ if name != "noise"]
    options = {name: value for name, value in given.items() if name != "noise_id"}
    refuse_unknown_options("privacy", options, known, ())
    for name in ("bound", "delta"):
        if name not in options:
            raise BadInput(f"privacy needs '{name}', as in {EXAMPLE}")
    return Privacy(**options)


def _norms(up: Any) -> dict[str, Tensor]:
    """Return the norm of every field of uploads [..., 1]."""
    fields = {name: value for name, value in up._asdict().items() if value is not None}
    return {n: torch.linalg.vector_norm(v, dim=-1, keepdim=True, dtype=torch.float64) for n, v in fields.items()}


def _joint(norms: Mapping[str, Tensor]) -> Tensor:
    return functools.reduce(torch.hypot, norms.values())


def _centred(within: float, share: float) -> float:
    """Return the mean of what clients send for the count: 1/2 if they are within the bound, else -1/2."""
    return share * (within - 0.5)


def _factor(norm: Tensor, bound: Number) -> Tensor:
    """Return what a vector is multiplied by; slightly less than it must be, for rounding must not exceed the bound."""
    return (bound * (1 - 1e-6) / norm.clamp(min=1e-300)).clamp(max=1.0)
