"""`Federation`: the one object that describes a federation, and makes the server's and the nodes' apps."""

from __future__ import annotations

import copy
import functools
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flwr.app import Context
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from torch import nn

from lamina.algorithms import BUILT_IN
from lamina.algorithms.declaration import options
from lamina.base.errors import BadInput, LaminaError
from lamina.data.dataset import Dataset, Splits
from lamina.data.partitions import Partition
from lamina.engines.devices import choose_device
from lamina.experiment import build as building
from lamina.experiment.config import Experiment
from lamina.experiment.runs.folder import RunFolder
from lamina.experiment.runs.log_lines import LogLines
from lamina.experiment.runs.model_file import describe_model
from lamina.experiment.sections import augment_keys
from lamina.flower.mail import Mail
from lamina.flower.node import Node, client_number
from lamina.flower.server import Server
from lamina.flower.setup import Setup
from lamina.flower.signing import SERVER_OPTION, read_signing_key
from lamina.objective.fingerprint import code_digests
from lamina.rounds.clients import Reserved, deal, reserve
from lamina.storage.identity import parts_with_code
from lamina.training.evaluation import ClientSamples, reserved_samples
from lamina.training.metrics import description

log = logging.getLogger(__name__)


class Federation(Setup):
    """A federation: what is trained, on whose data, by which rules.

    The server and every node build the same object; each side calls only what it needs, and loads it then.

    Args:
        algorithm: an algorithm, or the name of one.
        model: makes the module. The server's initial weights are sent to the nodes; weights that are not trained must
            be the same on both sides.
        data: what a node holds, from its Flower context: a `Dataset`, a pair of arrays, or a `datasets.Dataset`. Only
            called on nodes.
        clients: how many clients there are; they are numbered from 0.
        rounds: how many rounds the run has.
        out: the run's folder, on the server; else ``out`` in Flower's run configuration, else ``runs/flower``.
        test: makes test data, on the server.
        metrics: what the server reports on them, as in `lamina.Simulation`. Nodes report those that can be averaged
            over nodes: not F1, mean IoU, AUROC, R² and your own functions.
        node_test: what a node evaluates on; its training data unless given, which they must match as in a simulation.
        participation, sampling, cohort_cap, min_separation, batch_size, epochs, local_steps, lr, schedule, clip,
            weighting, aggregation, channel, privacy, loss, augmentation, clock, seed, device, evaluate_every,
            accept_changed_code: as in `lamina.Simulation`.
        private: patterns of names, such as ["head.*"], as in `lamina.Simulation`: parts of the model that a node never
            sends, and keeps in `state_dir`. The model function must give them the same values in every process.
        evaluate_on: where the model is evaluated: "central" (the server's test data), "nodes", or "both".
        nodes: Flower's node ids and the client each is, or a JSON file with such a table; else ``nodes`` in Flower's
            run configuration. Nobody else takes part.
        quorum: how many of a round's clients must answer: a fraction (``1.0`` is all of them), or a whole number (``1``
            is one client).
        deadline: seconds that nodes have to answer a message; the original Mime has two in a round, and an evaluation
            on nodes is one more. That is time that passes; the `deadline` of a `clock` is planned, and decides before a
            round whom the server asks, as in a simulation.
        attempts: how often a round that misses the quorum is tried before the run stops. It is not tried again if the
            quorum is out of reach without clients that have reported the same error twice in a row.
        poll: seconds between two looks for replies.
        limits: what an update may be.
        signing_key: the file with the server's private key, which signs every message to a node; else
            ``signing-key`` in Flower's run configuration. Nodes verify messages with ``server-key`` in their node
            configuration, the file with the public key.
        state_dir: where a node keeps its clients' state; ``state-dir`` in its node configuration goes first; else
            ``lamina`` in the user's state folder.
    """

    @classmethod
    def from_experiment(cls, experiment: Experiment, **more: Any) -> Federation:
        """Return the federation of an experiment file: client i holds what the simulation deals to client i.

        Every machine needs the data set, and uses only its part. So a federation can be compared with its simulation.

        Args:
            experiment: the experiment.
            **more: what a file does not say: out, nodes, quorum, deadline, attempts, poll, limits, state_dir, ...
        """
        algorithm, settings = building.build_algorithm(experiment), building.settings_of(experiment)
        partition, run = building.build_partition(experiment), experiment.run
        if experiment.data.partition.name == "reallocate":
            raise BadInput(
                "partition 'reallocate' gives clients other data in every round, and a node keeps its own: "
                "choose another partition, such as 'dirichlet'"
            )
        if experiment.train.patience is not None:
            raise BadInput("train.patience stops simulations only: take it out of the file of a federation")
        if run.trust_ratios or run.client_metrics or run.diagnostics:
            log.warning("a federation measures no trust_ratios, client_metrics or diagnostics; see evaluate_on")
        if run.precision != "fp32":
            log.warning("precision = '%s' is for simulations only: nodes use the model's own precision", run.precision)
        dealt = _Dealt(experiment, partition)
        clients = building.count_clients(experiment) if experiment.data.heldout_clients is None else None
        given: dict[str, Any] = {
            "clients": clients or dealt.reserved.training.count,
            "rounds": experiment.train.rounds,
            "out": run.out,
            "test": lambda: dealt.splits.test,
            "device": run.device,
            "evaluate_every": run.evaluate_every,
            "metrics": experiment.train.metrics,
        }
        federation = cls(algorithm, dealt.model, dealt.part, **(given | dict(settings) | more))
        federation.described = lambda: dealt.facts
        federation.known_clients = lambda: dealt.reserved.training
        if experiment.data.heldout_clients is not None or experiment.data.local_test is not None:
            federation.client_samples = dealt.client_samples
        return federation

    def config(self) -> dict[str, Any]:
        """Return the run's configuration, as its folder stores it."""
        config = self._described() if self.described is None else copy.deepcopy(self.described()[0])
        config["train"]["rounds"] = self.rounds
        config["run"] |= {"device": str(choose_device(self.device)), "engine": "flower"}
        # A separate section, so that a report does not take a federation for a repetition of its simulation.
        return config | {"federation": {"on": "flower"}}

    def _described(self) -> dict[str, Any]:
        """Return the sections of an experiment file that describe this federation."""
        card, train = self.algorithm.card, self.protocol.record()
        del train["augmentation"]  # which a file has in [data]
        channel, privacy = train.pop("channel"), train.pop("privacy")
        clock = train.pop("clock")
        if self.metrics is not None:
            train["metrics"] = [metric.name for metric in self.metrics]
        named = {name: getattr(self.algorithm, name) for name in options(type(self.algorithm))}
        return {
            "data": {
                "name": "the nodes' own",
                "clients": self.plan.clients.count,
                "partition": {"name": "own"},
                **augment_keys(self.protocol.augmentation),
            },
            "model": {"name": getattr(self.make_model, "__qualname__", type(self.make_model).__name__)},
            "algorithm": {"name": card.name, "preset": None, **named},
            "train": {"rounds": self.rounds, **train},
            "run": {"evaluate_every": self.evaluate_every, "accept_changed_code": self.accept_changed_code},
            "code": code_digests(parts_with_code(self.algorithm, self.make_model, self.protocol)),
            **({} if channel is None else {"channel": channel}),
            **({} if privacy is None else {"privacy": privacy}),
            **({} if card.name in BUILT_IN else {"title": card.title}),  # a report does not import the user's code
            **({} if self.metrics is None else {"metrics": description(self.metrics)}),
            **({} if clock is None else {"clock": clock}),
        }

    def server_app(self) -> ServerApp:
        """Return the app for Flower's server."""
        app = ServerApp()

        @app.main()
        def main(grid: Grid, context: Context) -> None:
            out = Path(str(self.out or context.run_config.get("out") or "runs/flower"))
            nodes = read_nodes(self.nodes or context.run_config.get("nodes"), self.plan.clients.count)
            key_file = self.signing_key or context.run_config.get(SERVER_OPTION)
            key = read_signing_key(key_file)
            with LogLines() as lines, RunFolder(out, self.config(), lines=lines) as folder:
                if folder.diverged is not None:
                    raise folder.diverged
                if folder.complete:
                    log.info("%s is complete: %d rounds", out, len(folder.history))
                    return
                log.info(
                    "quorum %s, deadline %g s, %d attempts, %s", self.quorum, self.deadline, self.attempts, self.limits
                )
                try:
                    Server(self, folder, Mail(grid, key), nodes, Path(str(key_file)).expanduser().parent).run()
                except Exception as error:  # Flower's log may be gone when somebody asks why
                    why = str(error) if isinstance(error, LaminaError) else f"{type(error).__name__}: {error}"
                    log.error("the run stopped: %s", why)
                    raise

        return app

    def client_app(self) -> ClientApp:
        """Return the app for Flower's nodes."""
        return Node(self)


class _Dealt:
    """An experiment's data, dealt to clients; loaded on first use, once per process."""

    def __init__(self, experiment: Experiment, partition: Partition) -> None:
        self.experiment, self.partition = experiment, partition

    @functools.cached_property
    def splits(self) -> Splits:
        return building.load_data(self.experiment)

    @functools.cached_property
    def reserved(self) -> Reserved:
        data, count, seed = self.experiment.data, building.count_clients(self.experiment), self.experiment.train.seed
        dealt = deal(self.splits.train, count, self.partition, seed)
        return reserve(dealt, data.heldout_clients, data.local_test, seed)

    def part(self, context: Context) -> Dataset:
        """Return the data of a node."""
        client, clients = client_number(context), self.reserved.training
        if not 0 <= client < clients.count:
            raise BadInput(f"partition-id = {client}, but the clients are numbered 0 to {clients.count - 1}")
        return self.splits.train.subset(clients.parts[client])

    def client_samples(self) -> list[ClientSamples]:
        return reserved_samples(self.reserved, self.splits.train, choose_device(self.experiment.run.device))

    def model(self) -> nn.Module:
        return building.build_model(self.experiment, self.splits.train)

    @functools.cached_property
    def facts(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """The resolved configuration, with the engine that nodes use, and the content of model.json."""
        plain = self.experiment.changed(run={"engine": "loop", "precision": "fp32"})
        training = building.build(plain, self.splits)
        return building.resolved(plain, training), describe_model(training, plain)


def read_nodes(given: Any, clients: int) -> dict[int, int]:
    """Return the client of every listed node, from a mapping or a JSON file."""
    if not given:
        raise BadInput(
            "the server has no list of nodes: give its path as nodes in the run configuration, or as "
            'Federation(nodes=...): {"<node id>": 0, ...}, with the ids that `flwr supernode register` printed'
        )
    try:
        table = given if isinstance(given, Mapping) else json.loads(Path(str(given)).read_text(encoding="utf-8"))
        nodes = {int(node): int(client) for node, client in table.items()}
    except (OSError, AttributeError, TypeError, ValueError) as error:
        raise BadInput(f'nodes: {given} is no table such as {{"1234": 0, "5678": 1}} ({error})') from error
    if len(set(nodes.values()) & set(range(clients))) < len(nodes):
        raise BadInput(f"nodes: every node needs a client of its own, 0 to {clients - 1}, not {list(nodes.values())}")
    return nodes
