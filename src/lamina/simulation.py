"""`Simulation`: a federation on one machine. The Python API in one class.

`__init__` checks the arguments and builds the parts. `run_round` is one round: plan, engine, evaluation, history.
The maths of a round is in engines/loop.py.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Unpack, get_args

import torch
from torch import Tensor, nn

from lamina import algorithms, rng
from lamina.algorithms.contract import Algorithm
from lamina.algorithms.rehearsal import rehearse
from lamina.clients import deal, reserve
from lamina.devices import check_model_fits, choose_device, usable_precision
from lamina.diagnostics import Diagnostics, check_names
from lamina.engines.choice import Engine, choose_engine
from lamina.engines.stacked.engine import Stacked
from lamina.engines.stacked.forward import Precision, arithmetic
from lamina.engines.state import RoundReport, State
from lamina.errors import BadInput, unknown
from lamina.evaluation import (
    ClientSamples,
    Evaluation,
    check_metrics,
    refuse_nonfinite,
    reserved_samples,
    round_row,
)
from lamina.fit import check_clients, check_fit, evaluation_rows, training_rows, with_mask
from lamina.history import History, Row
from lamina.inputs import as_model, as_splits
from lamina.limits import check_count
from lamina.metrics import ACCURACY, LOSS, Metric, find_all
from lamina.models.registry import Factory
from lamina.objective import Objective
from lamina.paths import checked_path
from lamina.plan import Plan, Round
from lamina.progress import python_bars
from lamina.protocol import Protocol, Settings
from lamina.storage.identity import Identity, of_run
from lamina.text import html_table, plural

if TYPE_CHECKING:
    from lamina.experiment.recorder import Recorder
    from lamina.storage.checkpoint import Checkpoints

log = logging.getLogger(__name__)


class Simulation:
    """Train a module with a federated algorithm over simulated clients.

    Every random choice follows from `seed`: two simulations with the same arguments give the same history, and
    two algorithms with the same seed see the same clients and batches.

    >>> import torch, lamina
    >>> x, y = torch.randn(200, 5), torch.randint(0, 3, (200,))
    >>> simulation = lamina.Simulation(torch.nn.Linear(5, 3), (x, y), "fedlamb", clients=10, seed=0)
    >>> history = simulation.run(2)
    >>> len(history), sorted(history[0])[:3]
    (2, ['bytes_down', 'bytes_up', 'clients'])

    Args:
        model: any module; it is copied, and its trainable parameters are the start. Or a function that returns a new
            module, or a model's name: their weights depend on the seed. Its outputs are the tensor that it returns, its
            result's `.logits` or ["logits"], or the first element of a tuple.
        train: the training data: a `Dataset`, a pair (x, y), a torch or a `datasets` data set; x may be a tensor (or
            array, list, table), a tuple or a dict of them: the model is called as ``model(x)``, ``model(*x)`` or
            ``model(**x)``. Or training and test data: the result of `lamina.data.load`, or the name of a data set.
        algorithm: an algorithm, or the name of one (its defaults).
        test: data to evaluate on; without it, metrics and loss are not reported.
        metrics: what to report besides the loss, by names, functions of (outputs, targets) or `lamina.Metric` objects;
            the first is the one that runs are judged by. Unless given: the accuracy where there is one (class labels
            and one output per class, or one logit for labels 0 and 1; never with loss="mse"), else the loss.
        clients: number of clients (10 unless the partition names them), or a list of sample indices for each; no
            sample may be given out twice.
        partition: how samples are dealt to a number of clients: a partition object or the name of one; default "iid".
        heldout_clients: clients that never train, to evaluate on: a fraction of the clients, or their numbers.
        local_test: fraction of every client's samples that it does not train on, to evaluate on.
        participation: fraction of the clients that take part in a round.
        sampling: exactly that fraction, or an independent coin per client ("bernoulli").
        batch_size: samples per local step; None: all of the client's.
        epochs: passes of a client over its data in a round; default 1.
        local_steps: a fixed number of local steps instead of epochs.
        lr: the local learning rate; default: the algorithm's card.
        schedule: the learning rate over rounds: a schedule object or the name of one.
        clip: largest norm of a mini-batch gradient. An algorithm with the option `clip_direction` set clips the
            direction of its step instead.
        weighting: mean over clients, or weighted by their number of examples.
        aggregation: how the server combines what the clients send: "mean", "median", "trimmed_mean", "norm_clipping",
            "centred_clipping", or an object such as `lamina.aggregation.TrimmedMean(0.1)`. All but the mean keep the
            uploads of the whole cohort in memory.
        loss: a name in `lamina.losses.LOSSES`, "module:function", or a function of (outputs, targets) that returns one
            loss per sample [n].
        augmentation: random crop and flip of training images, such as `lamina.data.Augment(pad=4)`.
        seed: the source of all randomness.
        device: "auto" (a GPU if there is one), or any torch device.
        engine: "auto" takes the fastest that fits the model; any other name forces that one. A simulation of the
            same model lends its choice: to test what fits takes longer than a small round.
        precision: the model's arithmetic: "fp32", "tf32", or "bf16" (weights and optimiser state stay float32).
        deterministic: on a GPU, the same bits in every run on the same machine, at some cost; a CPU gives them anyway.
        evaluate_every: evaluate on the test data after every n-th round, and at the end of `run`.
        client_metrics: also report the metrics on every client's own training data (mean, worst 10 % and spread).
        trust_ratios: also report the trust ratios of the layer-wise methods, of every client's last local step.
        diagnostics: quantities of the papers' theory to report in the rounds that are evaluated, by name: "gradient",
            "pseudo_gradient" (each one pass over the training data), "drift" (trains the round again, client by
            client), "amendment" and "second_moment" (free).
        out: a folder for the records, checkpoints and the trained model, as `lamina run` writes it. A simulation with
            the same arguments and folder resumes there: `run` does not train the rounds again that the folder holds.
        overwrite: whether `run` may replace an earlier run in the folder.
    """

    def __init__(
        self,
        model: nn.Module | Factory | str,
        train: Any,
        algorithm: Algorithm | str = "fedlamb",
        *,
        test: Any = None,
        metrics: Any = None,
        clients: int | Sequence[Any] | None = None,
        partition: Any = None,
        heldout_clients: float | Sequence[int] | None = None,
        local_test: float | None = None,
        device: str | torch.device = "auto",
        engine: Literal["auto", "stacked", "vmap", "loop"] | Simulation = "auto",
        precision: Precision = "fp32",
        deterministic: bool = False,
        evaluate_every: int = 1,
        client_metrics: bool = False,
        trust_ratios: bool = False,
        diagnostics: Sequence[str] = (),
        out: str | Path | None = None,
        overwrite: bool = False,
        **settings: Unpack[Settings],
    ) -> None:
        _check_kind("algorithm", algorithm, (str, Algorithm), "a name or an instance such as lamina.FedLamb()")
        if not (partition is None or isinstance(partition, str) or callable(getattr(partition, "split", None))):
            raise BadInput(f"partition = {partition!r} is neither a name nor a partition such as Dirichlet(0.3)")
        if precision not in get_args(Precision):
            raise unknown("precision", precision, get_args(Precision))
        check_count("evaluate_every", evaluate_every)
        chosen, measured = find_all(metrics), check_names(diagnostics)

        # what trains, by which settings, where
        self.algorithm = algorithms.create(algorithm) if isinstance(algorithm, str) else algorithm
        rehearse(self.algorithm)  # one round of a tiny model, to refuse an algorithm that breaks the contract
        self.protocol = Protocol.of(self.algorithm, settings)  # validated, with the defaults filled in
        self.device = choose_device(device)
        train_data, test_data = as_splits(train, test)
        module = as_model(model, train_data, self.protocol.seed)
        check_model_fits(module, self.device)
        self.objective = Objective(module.to(self.device), self.protocol.loss)
        self.objective.refuse_rate(self.protocol.lr)
        if self.objective.frozen:
            log.info("the model %s", self.objective.frozen_note())

        # the data, and which client trains on which of them in a round
        self.train_data = with_mask(train_data, module).to(self.device)
        self.test_data = None
        if test_data is not None:
            self.test_data = with_mask(test_data.with_labels_of(train_data), module).to(self.device)
        if self.protocol.loss == "cross_entropy" and self.train_data.classes is None and self.train_data.y.dim() == 1:
            raise BadInput("cross_entropy needs integer class labels; for float targets use loss='mse'")
        if self.protocol.augmentation is not None and self.train_data.y.dim() > 2:
            raise BadInput("augmentation moves the pixels of x, but not those of y: switch it off for target maps")
        dealt = deal(self.train_data, clients, partition, self.protocol.seed)
        self.reserved = reserve(dealt, heldout_clients, local_test, self.protocol.seed)
        self.plan = Plan(self.reserved.training, self.protocol)

        # the engine; another simulation lends the engine it has chosen, compiled and measured
        self.precision, self.deterministic = usable_precision(precision, self.device), deterministic
        if deterministic:  # cuBLAS reads it when it starts
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        lender = engine if isinstance(engine, Simulation) else None
        self.engine_name: str = engine.engine_name if isinstance(engine, Simulation) else engine
        with rng.forked(self.device, seed=0):  # the module runs, and may draw random numbers itself
            has_accuracy = self._check_fit()
            self.metrics = (ACCURACY if has_accuracy else LOSS,) if chosen is None else chosen
            self.evaluation = Evaluation(chosen, self.test_data, self._client_samples(client_metrics, chosen))
            if chosen is not None:
                tested = self.train_data if self.test_data is None else self.test_data
                check_metrics(self.objective, chosen, tested, "train" if self.test_data is None else "test")
            if lender is None or not lender.plan.same_rounds(self.plan):
                self.plan.round(1)  # so that an impossible plan is refused here, not in round 1
            self.engine: Engine = choose_engine(
                self.engine_name,
                self.precision,
                lender.engine if lender is not None and lender.precision == self.precision else None,
                algorithm=self.algorithm,
                objective=self.objective,
                data=self.train_data,
                protocol=self.protocol,
                record_trust_ratios=trust_ratios,
            )

        self.evaluate_every = evaluate_every
        self.diagnostics = Diagnostics(measured, self.algorithm, self.objective, self.train_data, self.plan)
        self.state, _ = self.start()
        self.history = History(metric=self.metric)
        self._checkpoints: Checkpoints | None = None
        self._planned: Round | None = None  # the next round's plan, if it was computed ahead
        self._requested = 0  # rounds, by all calls of `run`
        self._recorder: Recorder | None = None
        self.out = None if out is None else checked_path(out, "out")
        if self.out is not None:
            from lamina.experiment.recorder import Recorder  # here: it imports this module

            self._recorder = Recorder(
                self.out,
                overwrite=overwrite,
                model=model,
                data=train if isinstance(train, str) else train_data,  # converted only once
                test=test if isinstance(train, str) else test_data,
                algorithm=self.algorithm,
                clients=clients,
                partition=partition,
                settings={
                    **settings,
                    "device": self.device,
                    "engine": self.engine_name,
                    "precision": precision,
                    "deterministic": deterministic,
                    "evaluate_every": evaluate_every,
                    "client_metrics": client_metrics,
                    "trust_ratios": trust_ratios,
                    "diagnostics": list(measured) or None,
                    "metrics": metrics,
                    "heldout_clients": heldout_clients,
                    "local_test": local_test,
                },
            )

    def run(
        self, rounds: int, on_round: Callable[[Row], None] | None = None, *, progress: bool | None = None
    ) -> History:
        """Train for `rounds` more rounds and return the history.

        With a folder (`out`), rounds that it held when the simulation was created count: the same script, started
        again, trains only what is left.

        Args:
            rounds: how many.
            on_round: called with every finished round's metrics.
            progress: show a progress bar; by default only in a terminal or a notebook.
        """
        check_count("run: rounds", rounds, least=0)
        self._requested += rounds
        last = self._requested if self._recorder is not None else self.state.round + rounds
        name = self.algorithm.card.title
        with python_bars([name], progress, state="", total=last, completed=self.state.round) as bars:

            def show(row: Row) -> None:
                bars.update(name, row, completed=row["round"])
                if on_round is not None:
                    on_round(row)

            try:
                if self._recorder is not None:
                    self._recorder.run(self, last, show)
                else:
                    self._run_to(last, show)
            except BaseException:  # interrupted, say: the next call trains `rounds` more than there are now
                self._requested = self.state.round
                raise
        return self.history

    def _run_to(self, last: int, on_round: Callable[[Row], None]) -> None:
        while self.state.round < last:
            row = self.run_round(evaluate=self.state.round + 1 == last)
            on_round(row)
            refuse_nonfinite(row)

    def run_round(self, *, evaluate: bool = False) -> Row:
        """Train one round and return its metrics; evaluate if this round is due, or if `evaluate` is set."""
        started = time.perf_counter()
        plan = self.next_plan()
        if isinstance(self.engine, Stacked):
            self.engine.feed.upcoming = lambda: [ahead] if (ahead := self.plan_ahead()) else None
        before = self.state
        with arithmetic(self.precision, self.deterministic):  # torch's process-wide switches, for this block
            self.state, report = self.engine.run_round(self.state, plan)
        seconds = time.perf_counter() - started
        (metrics,) = evaluate_together([self], always=evaluate)  # empty if no evaluation is due
        return self.record(before, plan, report, seconds, metrics)

    def next_plan(self) -> Round:
        """Return the plan of the next round: its cohort, every client's batches and the learning rate."""
        number = self.state.round + 1
        planned, self._planned = self._planned, None
        if planned is None or planned.number != number:
            planned = self.plan.round(number)
        self.objective.refuse_rate(planned.lr)
        return planned

    def plan_ahead(self) -> Round | None:
        """Return the plan of the round after the current one; None if there cannot be such a round."""
        if self._planned is None:
            with contextlib.suppress(BadInput):  # raised again if that round is reached
                self._planned = self.plan.round(self.state.round + 2)
        return self._planned

    def save(self, folder: str | Path) -> None:
        """Write a checkpoint (safetensors). Later calls with the same folder write only the client states that changed.

        A folder with the checkpoints of another simulation is refused.
        """
        from lamina.storage.checkpoint import Checkpoints  # here: safetensors is not needed to simulate

        if self._checkpoints is None or self._checkpoints.folder != Path(folder):
            self._checkpoints = Checkpoints(Path(folder), self._identity())
        self._checkpoints.save(self.state, self.history)

    def restore(self, folder: str | Path) -> None:
        """Restore the newest checkpoint, with its history, of a simulation with the same arguments.

        A checkpoint of other settings is refused. Device, engine, precision, test data and evaluation may differ.
        """
        from lamina.storage.checkpoint import Checkpoints, load_newest

        checkpoints = Checkpoints(Path(folder), self._identity())
        # the stacked engine moves the client states that it needs to its device
        home = torch.device("cpu") if isinstance(self.engine, Stacked) else None
        loaded = load_newest([checkpoints], [self.start()], checkpoints.rounds(), home=home)
        if loaded is None:
            raise BadInput(f"no checkpoint of this simulation in '{folder}'")
        ((self.state, rows),) = loaded
        self.history = History(rows, metric=self.metric)
        self._checkpoints = checkpoints

    def _identity(self) -> Identity:
        return of_run(self.algorithm, self.objective, self.plan, self.train_data)

    def start(self) -> tuple[State, Any]:
        """Return the state before round 1 and the initial state of a client."""
        state = State.start(self.algorithm, self.objective, self.plan.clients.count)
        return state, self.algorithm.client_init(self.objective.start, self.objective.layers)

    def record(
        self, before: State, plan: Round, report: RoundReport, seconds: float, metrics: Mapping[str, float]
    ) -> Row:
        """Append the row of a finished round, with evaluation and diagnostics if they were due, and return it."""
        row = round_row(self.algorithm, self.objective.start, plan, report, seconds) | dict(metrics)
        if metrics and self.diagnostics.names:
            with arithmetic(self.precision, self.deterministic):
                self.diagnostics.add_to(row, before, self.state, plan, report)
        self.history.append(row)
        return row

    def __repr__(self) -> str:
        return f"Simulation({', '.join(f'{name}: {value}' for name, value in self._facts().items())})"

    def _repr_html_(self) -> str:
        facts = html_table(list(self._facts()), [list(self._facts().values())])
        return facts + (self.history._repr_html_() if len(self.history) else "")

    def _facts(self) -> dict[str, str]:
        """Return what a reader wants to know about the simulation, in words."""
        engine = self.engine.forward.name if isinstance(self.engine, Stacked) else "loop"
        facts = {
            "algorithm": self.algorithm.card.title,
            "model": f"{type(self.objective.module).__name__}, {plural(self.objective.layers.size, 'parameter')}",
            "data": f"{self.train_data.name}, {plural(len(self.train_data), 'sample')}",
            "clients": str(self.plan.clients.count),
            "lr": f"{self.protocol.lr:g}",
            "engine": f"{engine} on {self.device}",
            "rounds": str(self.state.round),
        }
        if len(self.history) and self.history.metric in self.history.columns:
            facts[f"best {self.history.metric}"] = f"{self.history.best():.4f}"
        return facts

    @property
    def model(self) -> nn.Module:
        """A copy of the trained module in evaluation mode; later rounds do not change it."""
        return copy.deepcopy(self.objective.module_at(self.state.server.x, self.state.buffers)).eval()

    @property
    def metric(self) -> str:
        """The name of the metric that the run is judged by."""
        return self.metrics[0].name

    def evaluate(self) -> dict[str, float]:
        """Return the loss and the metrics of the current model on the test data, and on clients' data if enabled."""
        return self.finish_evaluation(self.start_evaluation())

    def start_evaluation(self) -> Tensor | None:
        """Start evaluating the current model on the test data, without waiting for a GPU."""
        with arithmetic(self.precision, self.deterministic):
            return self.evaluation.start(self.objective, self.state.server.x, self.state.buffers)

    def finish_evaluation(self, measured: Tensor | None) -> dict[str, float]:
        """Return the measured values by name, with those of clients if enabled."""
        with arithmetic(self.precision, self.deterministic):
            return self.evaluation.finish(measured, self.objective, self.state.server.x, self.state.buffers)

    def _check_fit(self) -> bool:
        """Refuse a model that does not fit the data now, not in round 1; return whether there is an accuracy."""
        has_accuracy = check_fit(self.objective, self.train_data, "train", training_rows(self.plan))
        if self.test_data is not None:
            check_fit(self.objective, self.test_data, "test", evaluation_rows(self.test_data))
        check_clients(self.algorithm, self.objective, self.train_data, self.plan)
        return has_accuracy

    def _client_samples(self, client_metrics: bool, chosen: Sequence[Metric] | None) -> list[ClientSamples]:
        """Return the clients' samples to evaluate on."""
        reserved, parts = reserved_samples(self.reserved, self.train_data, self.device), self.plan.clients.parts
        if not client_metrics:
            return reserved
        if self.reserved.local_tests:
            raise BadInput("client_metrics evaluates on the clients' training data, local_test does not: give one")
        if not parts or (chosen is None and self.metric != "accuracy"):
            raise BadInput(
                "client_metrics needs an accuracy (class labels, one output per class or one logit for two, a loss "
                "other than 'mse') and clients that keep their data"
            )
        return [ClientSamples("client_", "", self.train_data, parts, pooled=False), *reserved]


def evaluate_together(simulations: Sequence[Simulation], *, always: bool = False) -> list[dict[str, float]]:
    """Evaluate the simulations that are due, or all of them; start every one before waiting for a GPU."""
    started = time.perf_counter()
    due = [one for one in simulations if always or one.state.round % one.evaluate_every == 0]
    measured = {one: one.start_evaluation() for one in due}
    metrics = {one: one.finish_evaluation(values) for one, values in measured.items()}
    seconds = {"evaluation_seconds": (time.perf_counter() - started) / max(1, len(due))}
    return [metrics[one] | seconds if one in metrics else {} for one in simulations]


def _check_kind(name: str, value: Any, kind: Any, wanted: str) -> None:
    if not isinstance(value, kind):
        shown = f"the class {value.__name__}" if isinstance(value, type) else repr(value)
        raise BadInput(f"{name} is {shown}: give {wanted}")
