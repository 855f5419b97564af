"""`audit`: what observers of the released means can in fact tell about one client of a federation.

Half of the clients become *canaries*: each sends a vector far longer than the bound in a random direction of its own.
The directions are orthogonal, so Gaussian noise hides each canary independently of the others, and a direction in which
nobody sends shows what an observer sees without a canary. Canaries pass the very clipping, mean and noise of real
clients, because only their uploads are replaced (`CanaryMixin`).
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
    present: NDArray[np.float64]  # the scores of the canaries
    absent: NDArray[np.float64]  # the same of directions without one

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
        runs: how many to train side by side. More bring the bound closer to the truth.
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
    canaries = _Canaries.of(simulation, accountant, privacy)
    if runs * canaries.count < LEAST_SCORES:
        needed, each = math.ceil(LEAST_SCORES / canaries.count), plural(canaries.count, "canary", "canaries")
        raise BadInput(f"audit: runs = {runs} with {each} each show next to nothing: take at least {needed}")

    source = secrets.token_bytes(32) if seed is None else f"audit {seed}/".encode()
    keys = [hashlib.sha256(source + f"{run}".encode()).digest() for run in range(runs)]
    members = [_member(simulation, canaries, key) for key in keys]
    population = Population(members)
    for number in range(1, rounds + 1):
        population.run_round()
        for error in population.diverged.values():
            raise error
        if on_round is not None:
            on_round(number)
    present, absent = np.concatenate([_scores(member, canaries, accountant, rounds) for member in members], axis=1)
    noise = shown_noise(present, absent, accountant, rounds, CONFIDENCE)
    shown = 0.0
    if math.isfinite(noise):
        shown = dataclasses.replace(accountant, noise_multiplier=noise).epsilon(rounds)
    return Audit(
        accountant.epsilon(rounds), shown, accountant.delta, accountant.noise_multiplier, noise, rounds, CONFIDENCE,
        present, absent,
    )  # fmt: skip


def _member(simulation: Training, canaries: _Canaries, key: bytes) -> Training:
    """Return a run like the simulation at its start, with canaries, and with cohorts and noise that follow a key."""
    member = copy.copy(simulation)
    privacy = simulation.protocol.privacy
    assert privacy is not None
    assert privacy.noise is not None
    noise = Noise(key, privacy.noise.deviation, privacy.noise.coefficients)
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
    for number, client in enumerate(canaries.clients):
        algorithm = _with_canaries(simulation.algorithm, canaries, number)
        member.state.clients[client] = first_record(algorithm, simulation.objective, x, channel=channel)
    return member


# --- the canaries -----------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Canaries:
    """The canaries of all runs: which clients they are, and what they send.

    Args:
        clients: the number of every client that is a canary. Those after the first `count` send the opposite of their
            directions: where neighbours differ in a client that is replaced, they are the worst replacement.
        count: of directions with a canary, and as many without one.
        directions: by field of the upload [2 count, p]; a canary's own is its number's.
        lengths: by field: what a canary sends in it at most, once it is clipped, times √fields.
    """

    clients: list[int]
    count: int
    directions: Mapping[str, Tensor]
    lengths: Mapping[str, float]

    @classmethod
    def of(cls, simulation: Training, accountant: Accountant, privacy: Privacy) -> _Canaries:
        objective = simulation.objective
        names = sent_vectors(simulation.algorithm, objective.shared_layers)
        size, clients = objective.shared_layers.size, simulation.plan.clients.count
        share = 4 if _replaces(accountant) else 2
        count = max(1, min(clients // share, MOST_CANARIES, size // 4, MOST_NUMBERS // size))
        generator = torch.Generator().manual_seed(0)
        directions, lengths = {}, {}
        for name in names:
            drawn = torch.randn((size, 1 + 2 * count), generator=generator, dtype=torch.float64)
            drawn[:, 0] = 1.0  # orthogonal to it, a direction sees nothing of what all numbers have in common
            directions[name] = (torch.linalg.qr(drawn)[0].T[1:] / math.sqrt(len(names))).to(objective.start)
            each = privacy.bound[name] * math.sqrt(len(names)) if isinstance(privacy.bound, Mapping) else privacy.bound
            lengths[name] = float(each)
        return cls(list(range(2 * count if _replaces(accountant) else count)), count, directions, lengths)

    def upload(self, name: str, number: Tensor) -> Tensor:
        """Return a field of the uploads of canaries by their numbers [..., 1]; those of number -1 are none."""
        which = number.squeeze(-1).long()
        sign = torch.where(which < self.count, 1.0, -1.0) * (which >= 0)
        return (BOUNDS_SENT * self.lengths[name] * sign).unsqueeze(-1) * self.directions[name][which.clamp(min=0)]

    def seen(self, up: Any) -> NDArray[np.float64]:
        """Return what a released mean shows in every direction, in units of a canary's part of the mean [2 count]."""
        fields = {name: value for name in self.directions if (value := getattr(up, name)) is not None}
        seen = [self.directions[name] @ value / self.lengths[name] for name, value in fields.items()]
        # the fields that are sent share the bound
        share = len(fields) / len(self.directions)
        return np.array(torch.stack(seen).sum(0).tolist()) / math.sqrt(share)


class CanaryMixin(Algorithm):
    """An algorithm of which some clients are canaries: inherit from it first, then from the algorithm.

    What a client keeps says which canary it is, by number; -1 for the others.
    """

    canaries: _Canaries
    number: int  # of the clients whose first state `client_init` returns
    released: dict[int, NDArray[np.float64]]  # by round, see `_Canaries.seen`

    def client_init(self, x: Tensor, layers: Any) -> Any:
        """Return the algorithm's state of a client, and its number."""
        client = super().client_init(x, layers)
        return _numbered(client)(*client, per_client(x, self.number))

    def begin(self, down: Any, client: Any, info: Any) -> Any:
        """Return what the algorithm does."""
        return super().begin(down, client.kind(*client[:-1]), info)

    def finish(self, local: Any, down: Any, client: Any, info: Any) -> tuple[Any, Any]:
        """Return the algorithm's upload, or a canary's in its place."""
        up, after = super().finish(local, down, client.kind(*client[:-1]), info)
        own = {name: value * (client.number < 0) for name, value in up._asdict().items() if value is not None}
        sent = {
            name: value + self.canaries.upload(name, client.number) if name in self.canaries.directions else value
            for name, value in own.items()
        }
        return up._replace(**sent), _numbered(after)(*after, client.number)

    def update(self, server: Any, up: Any, info: Any) -> Any:
        """Return what the algorithm does; note what the released mean shows of the canaries."""
        self.released[info.round] = self.canaries.seen(up)
        return super().update(server, up, info)  # type: ignore[safe-super]  # the other class has one

    def client_model(self, x: Tensor, client: Any) -> Tensor:
        """Return what the algorithm does."""
        return super().client_model(x, client.kind(*client[:-1]))


def _with_canaries(algorithm: Algorithm, canaries: _Canaries, number: int = -1) -> Any:
    """Return an algorithm that does the same for all clients but canaries."""
    options = {each.name: getattr(algorithm, each.name) for each in dataclasses.fields(algorithm)}  # type: ignore[arg-type]
    changed = _canary_class(type(algorithm))(**options)
    for name, value in {"canaries": canaries, "number": number, "released": {}}.items():
        object.__setattr__(changed, name, value)  # the record is frozen
    return changed


@functools.cache
def _canary_class(kind: Any) -> Any:
    return type(f"{kind.__name__}WithCanaries", (CanaryMixin, kind), {})


def _numbered(client: Any) -> Any:
    """Return the class of a client's state with its number as a canary."""
    kind: Any = type(client)
    return _numbered_kind(kind)


@functools.cache
def _numbered_kind(kind: Any) -> Any:
    numbered = namedtuple(f"Numbered{kind.__name__}", [*kind._fields, "number"])  # type: ignore[misc]
    numbered.kind = kind  # type: ignore[attr-defined]
    return numbered


# --- the observer -----------------------------------------------------------------------------------------------------


def _scores(member: Training, canaries: _Canaries, accountant: Accountant, rounds: int) -> NDArray[np.float64]:
    """Return the scores of a run's directions with and without a canary [2, count].

    Each is the logarithm of how much likelier the releases are with the canary, to an observer who knows of the
    cohorts what the accountant takes for known.
    """
    privacy, algorithm, numbers = member.protocol.privacy, member.algorithm, range(1, rounds + 1)
    assert isinstance(algorithm, CanaryMixin)
    assert privacy is not None
    noise = privacy.noise
    assert noise is not None
    cohort = accountant.noise_multiplier / noise.deviation  # what the sum is divided by
    seen = cohort * np.stack([algorithm.released[number] for number in numbers], axis=1)
    seen = seen.reshape(2, canaries.count, rounds)
    variance = accountant.noise_multiplier**2
    if accountant.is_amplified:
        chance, clients = accountant.participation, accountant.clients
        if accountant.sampling == "exact":
            chance = cohort_size(clients, chance) / clients
        ratios = _log_ratio(seen, chance, variance)
        if _replaces(accountant):
            ratios = ratios - _log_ratio(-seen, chance, variance)
        return np.asarray(ratios.sum(-1))
    cohorts = [() if member.plan.chooses_nobody(number) else member.plan.cohort(number) for number in numbers]
    takes_part = np.array([[client in cohort for cohort in cohorts] for client in canaries.clients], dtype=float)

    def uncorrelated(values: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.array([np.convolve(each, noise.coefficients)[:rounds] for each in values])

    expected = uncorrelated(takes_part)
    ratios = np.stack([expected * (uncorrelated(each) - expected / 2) for each in seen]) / variance
    return np.asarray(ratios.sum(-1)[:, takes_part.any(1)])


def _log_ratio(seen: NDArray[np.float64], chance: float, variance: float) -> NDArray[np.float64]:
    """Return log of the density of (1 - chance) N(0, variance) + chance N(1, variance) ÷ that of N(0, variance)."""
    return np.asarray(np.logaddexp(math.log1p(-chance), math.log(chance) + (2 * seen - 1) / (2 * variance)))


def _replaces(accountant: Accountant) -> bool:
    """Return whether neighbours differ in one client that is replaced by another."""
    return accountant.relation == "one client is replaced"
