"""The models that a run's clients use for themselves, as its checkpoints hold them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from lamina import algorithms
from lamina.algorithms.contract import Algorithm, has_client_models
from lamina.base.errors import BadInput
from lamina.base.text import listed
from lamina.channel.channel import as_channel
from lamina.engines.personal import first_record, model_in_use
from lamina.engines.state import State
from lamina.experiment.runs.folder import round_of
from lamina.experiment.runs.model_file import MissingCode
from lamina.objective.objective import Objective, copy_module
from lamina.rounds.clients import client_number
from lamina.storage.checkpoint import Checkpoints, Damaged


def client_module(
    folder: Path, config: Mapping[str, Any], facts: Mapping[str, Any], model: nn.Module, client: Any
) -> nn.Module:
    """Return a copy of a run's model with what one of its clients keeps.

    Args:
        folder: the run's folder.
        config: its configuration.
        facts: the content of its ``model.json``.
        model: its trained module.
        client: the client's name, or its number.
    """
    if "federation" in config:
        raise BadInput(f"'{folder}' is a federation, whose clients' parts never leave their nodes")
    algorithm = _algorithm(facts["algorithm"], config["algorithm"])
    private = config["train"].get("private") or ()
    if not private and not has_client_models(algorithm):
        raise BadInput(f"all clients of '{folder}' use one model: leave the client out")
    names = facts["clients"] if isinstance(facts["clients"], list) else range(facts["clients"])
    number = client_number(client, names)
    objective = Objective(copy_module(model), "mse", private)  # no loss is computed
    like = State.start(algorithm, objective, len(names))
    record = first_record(algorithm, objective, like.server.x, channel=as_channel(config.get("channel")))
    state = _state(folder, _checkpoints_of(folder, number, config), like, record)
    return copy_module(objective.module_at(*model_in_use(algorithm, objective, state, number)))


def _algorithm(name: str, section: Mapping[str, Any]) -> Algorithm:
    """Return a run's algorithm; refuse one of the user's that cannot be imported."""
    try:
        kind = algorithms.find(name)
    except BadInput as error:
        raise MissingCode(
            f"the run's algorithm '{section['name']}' is your own, and what clients keep is read with it: {error}"
        ) from error
    values = {option: section[option] for option in algorithms.options(kind) if option in section}
    infinite = ("inf", "-inf")  # as JSON has them
    return kind(**{option: float(value) if value in infinite else value for option, value in values.items()})


def _checkpoints_of(folder: Path, client: int, config: Mapping[str, Any]) -> Path:
    """Return the folder of the checkpoints that hold a client: under torchrun every process writes its own."""
    rank = client % int(config["run"].get("ranks", 1))
    return folder / "checkpoints" / f"rank-{rank}" if rank else folder / "checkpoints"


def _state(folder: Path, checkpoints: Path, like: State, record: Any) -> State:
    """Return the state after the round of the trained model, given one like it and a record like its clients'."""
    store, (number, _) = Checkpoints(checkpoints), round_of(folder / "model.safetensors")
    if number not in store.rounds():
        held = f" (it has those of round {listed(list(map(str, store.rounds())))})" if store.rounds() else ""
        raise BadInput(
            f"'{checkpoints}' has no checkpoint of round {number}{held}, and what a client keeps is only there: copy "
            "the run's folder with its checkpoints"
        )
    try:
        return store.load(number, like, record)[0]
    except Damaged as error:
        raise BadInput(f"the client's model cannot be read: {error}") from error
