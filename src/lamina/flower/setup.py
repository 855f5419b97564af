"""`Setup`: what both the server and the nodes of a federation know about it."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, Unpack

import torch
from flwr.app import Context
from torch import nn

from lamina.algorithms.contract import Algorithm
from lamina.algorithms.rehearsal import is_user_defined, rehearse
from lamina.base.errors import BadInput, is_whole, unknown
from lamina.base.limits import check_count, check_number
from lamina.data.dataset import Dataset, as_dataset
from lamina.data.matching import inherit_normalisation, match
from lamina.engines.devices import choose_device
from lamina.flower.checks import Limits
from lamina.objective.objective import Objective
from lamina.rounds.clients import Clients
from lamina.rounds.plan import Plan
from lamina.rounds.settings import TrainArguments, TrainSettings
from lamina.training.evaluation import ClientSamples
from lamina.training.inputs import as_algorithm
from lamina.training.masks import with_mask
from lamina.training.metrics import Metric, find_all, is_function_of_mean
from lamina.training.preflight import check_model

PLACES = ("central", "nodes", "both")


class Setup:
    """The settings of a federation, validated; `lamina.flower.Federation` documents each of them."""

    def __init__(
        self,
        algorithm: Algorithm | str,
        model: Callable[[], nn.Module],
        data: Callable[[Context], Any],
        *,
        clients: int,
        rounds: int = 50,
        out: str | Path | None = None,
        test: Callable[[], Any] | None = None,
        metrics: Any = None,
        node_test: Callable[[Context], Any] | None = None,
        device: str | torch.device = "auto",
        evaluate_every: int = 1,
        evaluate_on: Literal["central", "nodes", "both"] = "central",
        accept_changed_code: bool = False,
        nodes: Mapping[int, int] | str | Path | None = None,
        quorum: float | int = 0.5,
        deadline: float = 600.0,
        attempts: int = 3,
        poll: float = 0.2,
        limits: Limits | None = None,
        state_dir: str | Path | None = None,
        signing_key: str | Path | None = None,
        **settings: Unpack[TrainArguments],
    ) -> None:
        self.algorithm = as_algorithm(algorithm)
        self.protocol = TrainSettings.of(self.algorithm, settings, inspect.signature(type(self)).parameters)
        self.plan = Plan(Clients.elsewhere(clients), self.protocol)
        self.make_model, self.data, self.test, self.node_test, self.device = model, data, test, node_test, device
        self.rounds, self.evaluate_every, self.evaluate_on = rounds, evaluate_every, evaluate_on
        self.quorum, self.deadline, self.attempts, self.poll = quorum, deadline, attempts, poll
        self.limits, self.state_dir, self.signing_key = limits or Limits(), state_dir, signing_key
        self.out, self.nodes, self.accept_changed_code = out, nodes, accept_changed_code
        self.metrics = find_all(metrics)
        # of an experiment file
        self.described: Callable[[], tuple[dict[str, Any], dict[str, Any]]] | None = None  # config.json and model.json
        self.known_clients: Callable[[], Clients] | None = None  # None: only their nodes know what data clients have
        self.client_samples: Callable[[], list[ClientSamples]] = list  # that no client trains on
        for name, maker in {"model": model, "data": data, "test": test, "node_test": node_test}.items():
            if isinstance(maker, nn.Module) or (maker is not None and not callable(maker)):
                raise BadInput(f"{name} is a {type(maker).__name__}: give a function that makes it, such as lambda: …")
        if evaluate_on not in PLACES:
            raise unknown("evaluate_on", evaluate_on, PLACES)
        for metric in self.metrics or ():
            if evaluate_on == "nodes" and not is_function_of_mean(metric):
                raise BadInput(
                    f"metric '{metric.name}' cannot be averaged over nodes: leave it out, or let the server evaluate "
                    "(evaluate_on='central' or 'both')"
                )
        for name, count in {"rounds": rounds, "attempts": attempts, "evaluate_every": evaluate_every}.items():
            check_count(name, count)
        self.protocol.rate(rounds)  # refuses a schedule that ends before
        for name, value in {"deadline": deadline, "poll": poll, "quorum": quorum}.items():
            check_number(name, value, above=0)
        if not is_whole(quorum) and quorum > 1:
            raise BadInput(f"quorum = {quorum!r} is neither a fraction up to 1 nor a whole number of clients")
        if is_whole(quorum) and quorum > clients:
            raise BadInput(f"quorum = {quorum} of {clients} clients can never answer: give at most {clients}")

    @property
    def node_metrics(self) -> tuple[Metric, ...] | None:
        """What nodes report: the metrics that can be averaged over nodes; None stands for the default."""
        return None if self.metrics is None else tuple(filter(is_function_of_mean, self.metrics))

    def needed(self, cohort: int) -> int:
        """Return how many clients of a cohort of this size must answer."""
        wanted = int(self.quorum) if is_whole(self.quorum) else math.ceil(self.quorum * cohort)
        return max(1, min(cohort, wanted))

    def dataset(self, given: Any, objective: Objective, train: Dataset | None = None) -> Dataset:
        """Return data of the app on the model's device; refuse text labels that have no common numbers.

        `train` are the training data of the same node, which test data must match.
        """
        data = as_dataset(given)
        if data.class_names is not None and (data.names_from_labels or not isinstance(given, Dataset)):
            raise BadInput(
                "text labels have no numbers that all nodes agree on: return lamina.Dataset(x, y, class_names=[…]) "
                "with the names of all classes"
            )
        if train is not None:
            data = match(data if isinstance(given, Dataset) else inherit_normalisation(data, train), train)
        return with_mask(data, objective.module).to(objective.device)

    def objective(self) -> Objective:
        """Build the model on the device of this process."""
        objective = Objective(
            self.make_model().to(choose_device(self.device)), self.protocol.loss, self.protocol.private
        )
        check_model(objective)
        self.algorithm.check_model(objective.layers)
        if is_user_defined(self.algorithm):
            rehearse(self.algorithm, objective.layers, objective.device)
        self.protocol.check(self.algorithm, objective.shared_layers)
        return objective
