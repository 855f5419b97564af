"""`audit`: what observers of the released means can in fact tell about one client of a federation.

Half of the clients become *canaries*: in every other run, each sends a vector far longer than the bound in a random
direction of its own; in the other runs it sends nothing. The directions are orthogonal, so Gaussian noise hides each
canary independently of the others. Canaries pass the very clipping, mean and noise of real clients, because only their
uploads are replaced (`CanaryMixin`). Which canaries are in a cohort of fixed size is dependent, but so that hits and
false alarms vary less than independent ones, which the bounds take them for.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import hashlib
import math
import secrets
from collections import namedtuple
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lamina.algorithms.contract import Algorithm, per_client
from lamina.algorithms.rehearsal import sent_vectors
from lamina.base.errors import BadInput
from lamina.base.limits import MOST, check_count, check_seed
from lamina.base.text import plural
from lamina.channel.privacy import Noise, Privacy
from lamina.engines.personal import first_record
from lamina.engines.stacked.engine import Stacked
from lamina.privacy.accounting import Accountant
from lamina.privacy.audit import shown_noise
from lamina.rounds.plan import cohort_size
from lamina.training.history import History
from lamina.training.population import Population
from lamina.training.training import Training

BOUNDS_SENT = 100.0  # length of a canary's upload ÷ the clipping bound: clipping must cut it
MOST_CANARIES = 50
MOST_NUMBERS = 10_000_000  # of all directions of a field
LEAST_SCORES = 100
CONFIDENCE = 0.99


@dataclasses.dataclass(frozen=True)
class Audit:
    """What an audit has found."""

    accounted: float  # ε of the guarantee after these rounds
    shown: float  # the lower bound on ε that the scores show
    delta: float
    noise_multiplier: float  # of the guarantee
    shown_noise: float  # the largest noise multiplier that the scores leave possible
    rounds: int
    confidence: float
    present: NDArray[np.float64]  # the scores of canaries that sent something
    absent: NDArray[np.float64]  # and of those that sent nothing

    @property
    def proves_error(self) -> bool:
        """Whether more was seen than the guarantee allows."""
        return self.shown_noise < self.noise_multiplier


def audit(
    simulation: Training,
    rounds: int,
    *,
    runs: int = 100,
    seed: int | None = None,
    on_round: Callable[[int], None] | None = None,
) -> Audit:
    """Measure a lower bound on ε of a simulation with differential privacy, which is not trained itself.

    A bound above the accounted ε proves an error; one below it proves nothing. The audit draws noise from keys of its
    own.

    Args:
        simulation: what is audited: its model, data, algorithm, engine and settings.
        rounds: of every run.
        runs: how many to train side by side, rounded up to an even number. More bring the bound closer to the truth.
        seed: of the audit's noise and cohorts; None: different in every audit.
        on_round: called with the number of every finished round.
    """
    check_count("audit: runs", runs, MOST)
    check_count("audit: rounds", rounds, MOST)
    if seed is not None:
        check_seed(seed)
    accountant, privacy = simulation.accountant, simulation.protocol.privacy
    if accountant is None or privacy is None:
        raise BadInput("audit: the experiment has no differential privacy: add [privacy], or give privacy=")
    if simulation.objective.private is not None:
        raise BadInput("audit: canaries need a model that is sent as a whole: leave `private` out")
    if isinstance(simulation.engine, Stacked) and simulation.engine.forward.layout is not None:
        raise BadInput('audit: convolutions have another order on a GPU: set device = "cpu"')
    if privacy.epsilon is not None and accountant.epsilon(rounds) > privacy.epsilon:
        affordable = plural(accountant.rounds_within(privacy.epsilon, rounds), "round")
        raise BadInput(f"audit: rounds = {rounds} exceed the privacy budget, which is spent after {affordable}")
    canaries = _Canaries.of(simulation, privacy)
    if runs * canaries.count < LEAST_SCORES:
        needed, each = math.ceil(LEAST_SCORES / canaries.count), plural(canaries.count, "canary", "canaries")
        raise BadInput(f"audit: runs = {runs} with {each} each show next to nothing: take at least {needed}")

    runs += runs % 2  # so that every canary is there as often as not
    source = secrets.token_bytes(32) if seed is None else f"audit {seed}/".encode()
    keys = [hashlib.sha256(source + f"{run}".encode()).digest() for run in range(runs)]
    # a direction must be with and without its canary: the other clients move every direction by another amount
    shares = [canaries.shares(run, _replaces(accountant)) for run in range(runs)]
    members = [_member(simulation, canaries, *each) for each in zip(shares, keys, strict=True)]
    population = Population(members)
    for number in range(1, rounds + 1):
        population.run_round()
        for error in population.diverged.values():
            raise error
        if on_round is not None:
            on_round(number)
    scores = np.stack([_scores(member, canaries, accountant, rounds) for member in members])
    is_present = np.array(shares) == 1
    present, absent = scores[is_present & ~np.isnan(scores)], scores[~is_present & ~np.isnan(scores)]
    noise = shown_noise(present, absent, accountant, rounds, CONFIDENCE)
    shown = 0.0
    if math.isfinite(noise):
        shown = dataclasses.replace(accountant, noise_multiplier=noise).epsilon(rounds)
    return Audit(
        accountant.epsilon(rounds), shown, accountant.delta, accountant.noise_multiplier, noise, rounds, CONFIDENCE,
        present, absent,
    )  # fmt: skip


def _member(simulation: Training, canaries: _Canaries, shares: list[float], key: bytes) -> Training:
    """Return a run like the simulation at its start, with canaries, and with cohorts and noise that follow a key."""
    member = copy.copy(simulation)
    privacy = simulation.protocol.privacy
    assert privacy is not None
    assert privacy.noise is not None
    noise = Noise(key, privacy.noise.deviation, privacy.noise.coefficients, privacy.noise.count_deviation)
    member.protocol = dataclasses.replace(
        simulation.protocol,
        seed=int.from_bytes(key[:8], "little"),
        privacy=dataclasses.replace(privacy, noise=noise),
    )
    member.plan = dataclasses.replace(simulation.plan, protocol=member.protocol)
    member.algorithm = _with_canaries(simulation.algorithm, canaries)
    member.engine = dataclasses.replace(simulation.engine, algorithm=member.algorithm, protocol=member.protocol)
    member.options = dataclasses.replace(simulation.options, evaluate_every=MOST)
    member.patience, member.timeline, member._planned = None, None, None
    member.history = History(metric=simulation.metric)
    member.state, _ = member.start()
    x, channel = member.state.server.x, member.protocol.channel
    for number, share in enumerate(shares):  # the first clients are the canaries
        algorithm = _with_canaries(simulation.algorithm, canaries, number, share)
        member.state.clients[number] = first_record(algorithm, simulation.objective, x, channel=channel)
    return member


# --- the canaries -----------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Canaries:
    """What the canaries of all runs send, by their numbers; client c is canary number c.

    Args:
        count: of canaries.
        directions: by field of the upload [count, p]; a canary's fields together have length 1.
        lengths: by field: the length of what is left of it after clipping, ÷ its length in `directions`.
    """

    count: int
    directions: Mapping[str, Tensor]
    lengths: Mapping[str, float]

    @classmethod
    def of(cls, simulation: Training, privacy: Privacy) -> _Canaries:
        """Return the canaries of a simulation: half of its clients."""
        objective = simulation.objective
        names = sent_vectors(simulation.algorithm, objective.shared_layers)
        size, clients = objective.shared_layers.size, simulation.plan.clients.count
        count = max(1, min(clients // 2, MOST_CANARIES, size // 4, MOST_NUMBERS // size))
        generator = torch.Generator().manual_seed(0)
        directions, lengths = {}, {}
        for name in names:
            drawn = torch.randn((size, 1 + count), generator=generator, dtype=torch.float64)
            drawn[:, 0] = 1.0  # orthogonal to it, a direction sees nothing of what all numbers have in common
            directions[name] = (torch.linalg.qr(drawn)[0].T[1:] / math.sqrt(len(names))).to(objective.start)
            each = privacy.bound[name] * math.sqrt(len(names)) if isinstance(privacy.bound, Mapping) else privacy.bound
            lengths[name] = float(each)
        return cls(count, directions, lengths)

    def shares(self, run: int, replaces: bool) -> list[float]:
        """Return how much of its upload each canary sends in a run: all; or nothing, or its opposite if `replaces`."""
        return [1.0 if (number + run) % 2 == 0 else -1.0 * replaces for number in range(self.count)]

    def upload(self, name: str, number: Tensor, share: Tensor) -> Tensor:
        """Return a field of the uploads of canaries, by their numbers and shares [..., 1]."""
        direction = self.directions[name][number.squeeze(-1).long().clamp(min=0)]
        return BOUNDS_SENT * self.lengths[name] * share * direction

    def seen(self, up: Any) -> NDArray[np.float64]:
        """Return what a released mean shows in every direction, in units of a canary's part of the sum [count]."""
        fields = {name: value for name in self.directions if (value := getattr(up, name)) is not None}
        seen = [self.directions[name] @ value / self.lengths[name] for name, value in fields.items()]
        # the fields that are sent share the bound
        share = len(fields) / len(self.directions)
        return np.array(torch.stack(seen).sum(0).tolist()) / math.sqrt(share)


class CanaryMixin(Algorithm):
    """An algorithm of which some clients are canaries: inherit from it first, then from the algorithm.

    What a client keeps says which canary it is, by number, and how much it sends; others have the number -1.
    """

    canaries: _Canaries
    number: int  # of the client whose first state `client_init` returns
    share: float
    released: dict[int, NDArray[np.float64]]  # by round, see `_Canaries.seen`

    def client_init(self, x: Tensor, layers: Any) -> Any:
        """Return the algorithm's state of a client, and its number and share."""
        client = super().client_init(x, layers)
        return _numbered(client)(*client, per_client(x, self.number), per_client(x, self.share))

    def begin(self, down: Any, client: Any, info: Any) -> Any:
        """Return what the algorithm does."""
        return super().begin(down, client.kind(*client[:-2]), info)

    def finish(self, local: Any, down: Any, client: Any, info: Any) -> tuple[Any, Any]:
        """Return the algorithm's upload, or a canary's in its place."""
        up, after = super().finish(local, down, client.kind(*client[:-2]), info)
        fields = {name: value * (client.number < 0) for name, value in up._asdict().items() if value is not None}
        for name in fields.keys() & self.canaries.directions.keys():
            fields[name] = fields[name] + self.canaries.upload(name, client.number, client.share)
        return up._replace(**fields), _numbered(after)(*after, client.number, client.share)

    def update(self, server: Any, up: Any, info: Any) -> Any:
        """Return what the algorithm does; note what the released mean shows of the canaries."""
        self.released[info.round] = self.canaries.seen(up)
        return super().update(server, up, info)  # type: ignore[safe-super]  # the other class has one

    def client_model(self, x: Tensor, client: Any) -> Tensor:
        """Return what the algorithm does."""
        return super().client_model(x, client.kind(*client[:-2]))


def _with_canaries(algorithm: Algorithm, canaries: _Canaries, number: int = -1, share: float = 0.0) -> Any:
    """Return an algorithm that does the same for all clients but canaries."""
    options = {each.name: getattr(algorithm, each.name) for each in dataclasses.fields(algorithm)}  # type: ignore[arg-type]
    changed = _canary_class(type(algorithm))(**options)
    for name, value in {"canaries": canaries, "number": number, "share": share, "released": {}}.items():
        object.__setattr__(changed, name, value)  # the record is frozen
    return changed


@functools.cache
def _canary_class(kind: Any) -> Any:
    return type(f"{kind.__name__}WithCanaries", (CanaryMixin, kind), {})


def _numbered(client: Any) -> Any:
    """Return the class of a client's state with its number and share as a canary."""
    kind: Any = type(client)
    return _numbered_kind(kind)


@functools.cache
def _numbered_kind(kind: Any) -> Any:
    numbered = namedtuple(f"Numbered{kind.__name__}", [*kind._fields, "number", "share"])  # type: ignore[misc]
    numbered.kind = kind  # type: ignore[attr-defined]
    return numbered


# --- the observer -----------------------------------------------------------------------------------------------------


def _scores(member: Training, canaries: _Canaries, accountant: Accountant, rounds: int) -> NDArray[np.float64]:
    """Return the score of every canary of a run [count]; NaN for one that was never asked.

    It is the logarithm of how much likelier the releases are with the canary, to an observer who knows of the cohorts
    what the accountant takes for known.
    """
    privacy, algorithm, numbers = member.protocol.privacy, member.algorithm, range(1, rounds + 1)
    assert isinstance(algorithm, CanaryMixin)
    assert privacy is not None
    noise = privacy.noise
    assert noise is not None
    cohort = member.plan.expected_size  # what the sum is divided by
    seen = cohort * np.stack([algorithm.released[number] for number in numbers], axis=1)
    if privacy.adaptive_bound is not None:  # `seen` is in units of the first bound
        seen = seen * privacy.adaptive_bound / member.history.array("clip_bound")
    variance = (cohort * noise.deviation) ** 2  # the count of an adaptive bound has the rest of the noise multiplier
    if accountant.is_amplified:
        chance, clients = accountant.participation, accountant.clients
        if accountant.sampling == "exact":
            chance = cohort_size(clients, chance) / clients
        ratios = _log_ratio(seen, chance, variance)
        if _replaces(accountant):
            ratios = ratios - _log_ratio(-seen, chance, variance)
        return np.asarray(ratios.sum(1))
    cohorts = [() if member.plan.chooses_nobody(number) else member.plan.cohort(number) for number in numbers]
    takes_part = np.array([[number in cohort for cohort in cohorts] for number in range(canaries.count)], dtype=float)

    def uncorrelated(values: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.array([np.convolve(each, noise.coefficients)[:rounds] for each in values])

    expected = uncorrelated(takes_part)
    ratios = expected * (uncorrelated(seen) - expected / 2) / variance
    return np.where(takes_part.any(1), ratios.sum(1), np.nan)


def _log_ratio(seen: NDArray[np.float64], chance: float, variance: float) -> NDArray[np.float64]:
    """Return log of the density of (1 - chance) N(0, variance) + chance N(1, variance) ÷ that of N(0, variance)."""
    return np.asarray(np.logaddexp(math.log1p(-chance), math.log(chance) + (2 * seen - 1) / (2 * variance)))


def _replaces(accountant: Accountant) -> bool:
    """Return whether neighbours differ in one client that is replaced by another."""
    return accountant.relation == "one client is replaced"
