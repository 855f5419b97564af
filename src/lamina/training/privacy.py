"""Differential privacy of a run: its noise before the first round, what it refuses, and what its rows say."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from lamina.algorithms.contract import Algorithm, has_displacement
from lamina.base.atomic import sync_folder
from lamina.base.errors import BadInput, Diverged
from lamina.base.text import plural
from lamina.channel.privacy import Noise, Privacy
from lamina.data.dataset import Dataset
from lamina.engines.divergence import went_nonfinite
from lamina.engines.ranks import Ranks
from lamina.objective.objective import Objective
from lamina.privacy.accounting import Accountant, noise_for, remaining_multiplier
from lamina.privacy.correlated import square_root
from lamina.rounds.aggregation import Mean
from lamina.rounds.plan import Plan, cohort_size
from lamina.rounds.settings import TrainSettings
from lamina.storage.files import state_folder, writing_to
from lamina.storage.identity import Identity, json_digest
from lamina.storage.releases import Releases

log = logging.getLogger(__name__)
SECRET_BYTES = 32
COHORT_PER_COUNT_NOISE = 20  # clients, by default (Andrew et al. 2021)
PARTICIPATION = ("participation", "sampling", "cohort_cap", "min_separation")  # settings that the account depends on
# The columns of a private run, besides ε and the evaluation on public test data. Others are not written.
PUBLIC = ("round", "lr", "update_norm", "clip_bound", "evaluation_seconds")  # of settings, and of means with noise
OF_COHORT = ("clients", "bytes_down", "bytes_up", "paper_bytes")  # of an expected cohort, if the real ones are secret
TELLING_COHORT = (  # only if everybody may know the cohorts
    "asked", "missing", "refused", "wire_bytes_down", "wire_bytes_up", "seconds", "clock_seconds",
)  # fmt: skip


def with_noise(protocol: TrainSettings, clients: int, identity: Identity, *, can_repeat: bool = False) -> TrainSettings:
    """Return the settings with the noise of this run; unchanged without differential privacy.

    The noise is a function of the secret and of the run's identity: a run that is resumed or repeated draws the same
    noise, so that it tells nothing new, and no two different runs share noise that their difference would cancel. A
    ledger beside the secret has what was released. `can_repeat`: a round may be released with another mean, which
    counts in ε; only a federation cannot compute the same mean again.
    """
    privacy = protocol.privacy
    if privacy is None or privacy.noise is not None:
        return protocol
    if protocol.sampling == "exact" and cohort_size(clients, protocol.participation) == clients:
        privacy = replace(privacy, secret_cohorts=False)  # everybody knows that all take part
    how = _participation(protocol, privacy)
    multiplier = privacy.noise_multiplier
    if multiplier is None:
        if privacy.epsilon is None or privacy.rounds is None:
            missing = "epsilon" if privacy.epsilon is None else "rounds"
            raise BadInput(
                f"privacy: without '{missing}' the noise is not known: give epsilon and rounds, or noise_multiplier"
            )
        multiplier = noise_for(privacy.epsilon, privacy.delta, privacy.rounds, clients, **how)
    accountant = Accountant(multiplier, privacy.delta, clients, **how)
    warn_of_lost_amplification(accountant)
    facts = {name: value for name, value in identity.items() if name != "code"}
    path, ranks = _secret_path(privacy), Ranks.current()
    secret = ranks.of_first(lambda: _secret(path))  # several machines may have several
    key = secret + json_digest([facts, multiplier]).encode()
    on_mean, on_count = _deviations(privacy, multiplier, accountant.deviation(1.0))
    noise = Noise(key, on_mean, square_root(privacy.bands), on_count)
    if ranks.rank == 0:  # all ranks compute the same means
        ledger = path.with_name(f"{path.name}.releases") / f"{noise.id}.jsonl"
        noise = replace(noise, releases=Releases(ledger, can_repeat=can_repeat))
    return replace(protocol, privacy=privacy.with_noise(multiplier, noise))


def _deviations(privacy: Privacy, multiplier: float, deviation: float) -> tuple[float, float]:
    """Return the deviations of the noise on the mean, for a bound of 1, and on the part within an adaptive bound.

    Both together are equivalent to the noise multiplier (Andrew et al. 2021, theorem 1).
    """
    if privacy.quantile is None:
        return deviation, 0.0
    expected = multiplier / deviation  # clients in a round
    count_noise = max(expected / COHORT_PER_COUNT_NOISE, multiplier)
    if privacy.count_noise is not None:
        count_noise = privacy.count_noise
    if 2 * count_noise <= multiplier:
        raise BadInput(
            f"privacy: count_noise = {count_noise:g} leaves no noise multiplier of {multiplier:.4g} for the uploads: "
            f"choose more than half of it, {multiplier:.4g} or more, say"
        )
    return deviation * remaining_multiplier(multiplier, 2 * count_noise) / multiplier, count_noise / expected


def accountant_of(protocol: TrainSettings, clients: int) -> Accountant | None:
    """Return the accountant of a run whose noise is known; None without differential privacy."""
    privacy = protocol.privacy
    if privacy is None:
        return None
    assert privacy.noise_multiplier is not None
    accountant = Accountant(privacy.noise_multiplier, privacy.delta, clients, **_participation(protocol, privacy))
    if privacy.epsilon is not None and (first := accountant.epsilon(1)) > privacy.epsilon:
        raise BadInput(
            f"privacy: epsilon = {privacy.epsilon:g} allows no round, for with noise_multiplier = "
            f"{privacy.noise_multiplier:g} the first one spends {first:.3g}: raise one of them"
        )
    return accountant


def check_privacy(algorithm: Algorithm, objective: Objective, plan: Plan, recorded: Mapping[str, Any]) -> None:
    """Refuse what breaks the guarantee; `recorded` are the settings that let rows tell of single clients."""
    protocol, privacy = plan.protocol, plan.protocol.privacy
    if privacy is None:
        return
    privacy.check(algorithm, objective.shared_layers)
    if privacy.debias and algorithm.squares is None:
        raise BadInput(
            f"privacy: debias is for servers that square the mean (FedAdam, Mime), which {algorithm.card.title} does "
            "not: leave it out"
        )
    if has_displacement(algorithm):
        raise BadInput(
            f"privacy: a bound is for displacements y_K - x, which {algorithm.card.title} does not send: use another "
            "algorithm, such as fedavg"
        )
    if protocol.by_examples:
        raise BadInput('privacy: weighting = "examples" lets a large client move the mean by more: weight by "clients"')
    if not isinstance(protocol.aggregation, Mean):
        raise BadInput("privacy: a robust mean moves by more than clipping allows for: use the mean")
    if plan.clients.reallocation is not None:
        raise BadInput("privacy: clients that are dealt anew in every round are nobody to protect: fix the partition")
    if protocol.chooser is not None:
        raise BadInput(
            "privacy: rounds that leave out slow clients have other cohorts than those that are accounted for: leave "
            "deadline and over_select out of the clock"
        )
    if protocol.local_steps is None:
        raise BadInput(
            "privacy: the mean number of local steps tells of the clients' sizes: give local_steps in place of epochs"
        )
    if algorithm.needs(1).control_variate:
        raise BadInput(
            f"privacy: {algorithm.card.title} with a control variate publishes the mean gradient without noise: use "
            "another variant"
        )
    moving = [n for n, b in objective.shared_buffers(objective.buffers).items() if b.is_floating_point()]
    if moving:
        raise BadInput(
            f"privacy: the buffer '{moving[0]}' is averaged without noise: use GroupNorm, or keep it with the clients "
            f'(private = ["*{moving[0].rpartition(".")[2]}"])'
        )
    accountant = Accountant(1.0, privacy.delta, plan.clients.count, **_participation(protocol, privacy))
    kept = _kept_by_clients(algorithm, objective, protocol)
    if kept and accountant.is_amplified and not accountant.amplifies_state:
        raise BadInput(
            f"privacy: sampling of this kind does not protect clients that keep {kept}, which depends on who took part "
            'before: give sampling = "bernoulli" without a cohort_cap, or secret_cohorts = False (a larger ε)'
        )
    revealing = [name for name, value in recorded.items() if value]
    if revealing:
        raise BadInput(f"privacy: {revealing[0]} publishes figures of single clients without noise: leave it out")


def _kept_by_clients(algorithm: Algorithm, objective: Objective, protocol: TrainSettings) -> str:
    """Return what clients keep from one of their rounds to the next; empty if nothing."""
    layers = objective.shared_layers
    if any(value is not None for value in algorithm.client_init(torch.zeros(layers.size), layers)):
        return f"{algorithm.card.title}'s state"
    if protocol.channel.feedback:
        return "the rests of error feedback"
    return "private parts of the model" if objective.private is not None else ""


def warn_of_inexact_replays(device: torch.device, *, deterministic: bool) -> None:
    """Warn that a killed run on a GPU may not be resumed, because its means differ in the last bits."""
    if device.type == "cuda" and not deterministic:
        log.warning(
            "privacy: on a GPU a killed run may compute other last bits and is refused then: give deterministic=True "
            "(run.deterministic), so that it can be resumed"
        )


def warn_of_lost_amplification(accountant: Accountant) -> None:
    """Warn of correlated noise that makes ε larger, because independent noise would be amplified by sampling."""
    if accountant.bands > 1 and replace(accountant, bands=1).is_amplified:
        log.warning(
            "privacy: correlated noise (bands = %d) is not amplified by sampling, and without min_separation ε counts "
            "every client in every round: give min_separation, or bands = 1",
            accountant.bands,
        )


def warn_of_fitted_preprocessing(data: Dataset) -> None:
    """Warn of statistics of the training rows that no noise protects."""
    if data.preprocessing is not None and data.preprocessing.has_statistics:
        log.warning(
            "privacy: the table's preprocessing was fitted to rows without noise: the model and preprocessing.json "
            "tell their means and categories, unless these rows are public"
        )


def published(
    row: Mapping[str, Any], evaluated: Iterable[str], algorithm: Algorithm, plan: Plan, accountant: Accountant
) -> dict[str, Any]:
    """Return what may be known of a round, with ε.

    The size of a secret cohort, its bytes and its time tell who is there: its row is that of a cohort of the expected
    size. `evaluated` are the columns of an evaluation on public test data.
    """
    privacy = plan.protocol.privacy
    assert privacy is not None
    is_telling = {"clock_seconds"} if algorithm.needs(int(row["round"])).full_gradient else set()  # numbers of samples
    names = {*PUBLIC, *OF_COHORT, *evaluated, *(() if privacy.secret_cohorts else TELLING_COHORT)} - is_telling
    public = {name: value for name, value in row.items() if name in names}
    if privacy.secret_cohorts:
        ratio = plan.expected_size / row["clients"]
        public |= {name: round(row[name] * ratio) for name in OF_COHORT if name in row}
    return public | {"epsilon": _spent(accountant, privacy, int(row["round"]), is_released=True)}


def published_error(error: Diverged, protocol: TrainSettings) -> Diverged:
    """Return the error of a run whose training diverged; with differential privacy, without the client."""
    if protocol.privacy is None or error.client is None:
        return error
    return went_nonfinite("training went non-finite", "", error.round, protocol.rate(error.round), None)


def spends_too_much(accountant: Accountant | None, privacy: Privacy | None, round: int) -> bool:
    """Return whether a round would exceed the budget of a run, if it has one."""
    if accountant is None or privacy is None or privacy.epsilon is None:
        return False
    return _spent(accountant, privacy, round, is_released=False) > privacy.epsilon


def refuse_spent(privacy: Privacy | None) -> None:
    """Refuse a federation that starts again in a new folder without a budget for its first round."""
    releases = None if privacy is None or privacy.noise is None else privacy.noise.releases
    if releases is not None and (count := sum(releases.counts().values())):
        raise BadInput(
            f"privacy: the budget is spent: this federation has released {plural(count, 'round')} into another folder; "
            "resume that one, or choose another train.seed, for a new run with a budget of its own"
        )


def _spent(accountant: Accountant, privacy: Privacy, round: int, *, is_released: bool) -> float:
    """Return ε after a round; in a federation, of all releases with this noise, also into other folders.

    `is_released`: the ledger has the round's last release; otherwise there will be one more.
    """
    releases = None if privacy.noise is None else privacy.noise.releases
    if releases is None or not releases.can_repeat:
        return accountant.epsilon(round)
    counts = releases.counts()
    if not is_released:
        counts[round] = counts.get(round, 0) + 1
    return accountant.epsilon(len(counts), [count - 1 for count in counts.values() if count > 1])


def _participation(protocol: TrainSettings, privacy: Privacy) -> dict[str, Any]:
    how = {name: getattr(protocol, name) for name in PARTICIPATION}
    return how | {"secret_cohorts": privacy.secret_cohorts, "bands": privacy.bands}


def _secret_path(privacy: Privacy) -> Path:
    path = Path(privacy.secret).expanduser() if privacy.secret else state_folder() / "privacy.key"
    return path.resolve()  # a link to a secret has its ledger


def _secret(path: Path) -> bytes:
    """Return the secret of the noise; make it if there is none."""
    if not path.exists():
        with writing_to(path.parent):
            path.parent.mkdir(parents=True, exist_ok=True)
            new = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
            descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)  # nobody else can ever read it
            with os.fdopen(descriptor, "wb") as file:
                file.write(secrets.token_bytes(SECRET_BYTES))
                file.flush()
                os.fsync(file.fileno())
            with contextlib.suppress(FileExistsError):  # of several processes, the first one's counts
                os.link(new, path)
            new.unlink()
            sync_folder(path.parent)
    try:
        secret = path.read_bytes()
    except OSError as error:
        raise BadInput(f"cannot read the secret '{path}': {error.strerror or error}") from error
    if len(secret) < SECRET_BYTES:
        raise BadInput(f"'{path}' holds {len(secret)} bytes, and the secret of noise has {SECRET_BYTES}: remove it")
    return secret
