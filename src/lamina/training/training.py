"""`Training`: one algorithm that trains one model over simulated clients, round by round, in memory.

`__init__` builds the parts of a run and checks that they fit each other. `run_round` is one round: plan, engine,
evaluation, history. The maths of a round is in engines/loop.py. `lamina.Simulation` is a `Training` for users;
experiment files create a plain one.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import torch
from torch import Tensor, nn

from lamina.algorithms.contract import Algorithm, has_client_models
from lamina.algorithms.rehearsal import is_user_defined, rehearse
from lamina.base import rng
from lamina.base.errors import BadInput, Diverged, unknown
from lamina.base.limits import check_count
from lamina.data.dataset import Dataset
from lamina.data.matching import match
from lamina.data.samples import describe_samples
from lamina.engines.choice import Engine, choose_engine
from lamina.engines.devices import Precision, arithmetic, check_model_fits, usable_precision
from lamina.engines.personal import first_record, model_in_use
from lamina.engines.ranks import everywhere
from lamina.engines.stacked.engine import Stacked
from lamina.engines.stacked.layers.convolution import prepare_kernels
from lamina.engines.state import RoundReport, State
from lamina.models.registry import Factory
from lamina.objective.objective import Buffers, Objective, copy_module
from lamina.rounds.clients import Heldout, deal, reserve
from lamina.rounds.plan import Plan, RoundPlan
from lamina.rounds.settings import TrainSettings
from lamina.storage.identity import of_run
from lamina.training.diagnostics import Diagnostics, check_names
from lamina.training.evaluation import (
    ClientSamples,
    Evaluation,
    in_order,
    refuse_nonfinite,
    reserved_samples,
    round_row,
    samples_by_client,
    warn_of_nan,
)
from lamina.training.history import History, Row
from lamina.training.inputs import as_model
from lamina.training.masks import with_mask
from lamina.training.metrics import ACCURACY, LOSS, Metric, client_mean
from lamina.training.preflight import check_evaluation, check_model, check_run
from lamina.training.preflight.inputs import warn_of_padding
from lamina.training.preflight.targets import check_settings
from lamina.training.privacy import (
    accountant_of,
    check_privacy,
    published,
    published_error,
    spends_too_much,
    warn_of_fitted_preprocessing,
    warn_of_inexact_replays,
    with_noise,
)
from lamina.training.timing import catch_up, timed, timeline_of

log = logging.getLogger(__name__)
NO_OWN_TESTS = (
    "clients have models of their own, which are judged on the clients' own test data: give local_test=0.2 ([data] "
    "local_test), or test data by client"
)


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """How a run computes and what it records, but not what it trains; `lamina.Simulation` explains each."""

    engine: str = "auto"
    precision: Precision = "fp32"
    deterministic: bool = False
    evaluate_every: int = 1
    client_metrics: bool = False
    trust_ratios: bool = False
    diagnostics: Sequence[str] | None = None

    def __post_init__(self) -> None:
        if self.precision not in get_args(Precision):
            raise unknown("precision", self.precision, get_args(Precision))
        check_count("evaluate_every", self.evaluate_every)
        if self.diagnostics is not None:
            check_names(self.diagnostics)


def check_on_round(on_round: Callable[..., None] | None, *arguments: str) -> None:
    """Refuse a function that cannot be called with these arguments, before the first round rather than after it."""
    if on_round is None:
        return
    try:
        inspect.signature(on_round).bind(*arguments)
    except TypeError as error:
        raise BadInput(f"on_round is called with ({', '.join(arguments)}), which it does not take: {error}") from None
    except ValueError:  # a function without a signature, written in C
        return


class Stop:
    """Calls a function with the results of every round, and notes if it raises StopIteration."""

    def __init__(self, on_round: Callable[..., None]) -> None:
        self._on_round, self._is_requested = on_round, False

    def __call__(self) -> bool:
        """Return whether the run is to end."""
        return self._is_requested

    def call(self, *results: Any) -> None:
        """Call the function."""
        try:
            self._on_round(*results)
        except StopIteration:
            self._is_requested = True


class Training:
    """One run in memory: its parts, its state after the last round, and its history.

    `lamina.Simulation` explains the arguments. Data, algorithm, metrics and device are objects here, not names.

    Args:
        metrics: the primary one first; None: the accuracy, where there is one, else the loss.
        patience: as for `Simulation`.
    """

    def __init__(
        self,
        model: nn.Module | Factory | str,
        train: Dataset,
        test: Dataset | None,
        algorithm: Algorithm,
        protocol: TrainSettings,
        options: RunOptions,
        *,
        device: torch.device,
        clients: int | Sequence[Any] | None,
        partition: Any,
        heldout_clients: Heldout | None,
        local_test: float | None,
        metrics: Sequence[Metric] | None,
        patience: int | None = None,
    ) -> None:
        self.patience = None if patience is None else check_count("patience", patience)
        # what trains, by which settings, where
        self.algorithm, self.protocol, self.options, self.device = algorithm, protocol, options, device
        self.precision, self.deterministic = usable_precision(options.precision, device), options.deterministic
        prepare_kernels(device, self.precision)  # in a thread, while this one builds the run
        module = as_model(model, train, protocol.seed)
        check_model_fits(module, device)
        self.objective = Objective(module.to(device), protocol.loss, protocol.private)
        check_model(self.objective)
        protocol.check(algorithm, self.objective.shared_layers)
        self.objective.refuse_rate(protocol.lr)  # one that is infinite in the model's type
        algorithm.check_model(self.objective.layers)
        if is_user_defined(algorithm):
            rehearse(algorithm, self.objective.layers, device)
        if self.objective.frozen:
            log.info("the model %s", self.objective.frozen_note())

        # the data, and which client trains on which of them in a round
        self.samples = describe_samples(train)  # for a run's folder: what new data must look like
        self.train_data = with_mask(train, module).to(device)
        warn_of_padding(self.train_data)
        self.test_data = None if test is None else with_mask(match(test, train), module).to(device)
        more_tests = {} if test is None else test.more_tests
        named = {name: with_mask(match(each, train), module).to(device) for name, each in more_tests.items()}
        check_settings(protocol, self.train_data)
        self.all_clients = deal(self.train_data, clients, partition, protocol.seed)
        self.reserved = reserve(self.all_clients, heldout_clients, local_test, protocol.seed)
        self.plan = Plan(self.reserved.training, protocol)  # makes a `RoundPlan` for each round
        if protocol.privacy is not None:
            figures: dict[str, Any] = {"client_metrics": options.client_metrics, "local_test": local_test}
            figures |= {"trust_ratios": options.trust_ratios, "diagnostics": options.diagnostics}
            check_privacy(algorithm, self.objective, self.plan, figures)
            identity = of_run(algorithm, self.objective, self.plan, self.train_data)
            warn_of_inexact_replays(device, deterministic=options.deterministic)
            warn_of_fitted_preprocessing(self.train_data)
            self.protocol = protocol = with_noise(protocol, self.plan.clients.count, identity)
            self.plan = Plan(self.reserved.training, protocol)
        self.accountant = accountant_of(protocol, self.plan.clients.count)

        # the evaluation and the engine
        if options.deterministic:  # cuBLAS reads it when it starts
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        with rng.forked(device, seed=0):  # the module runs, and may draw random numbers itself
            dry_run = check_run(algorithm, self.objective, self.train_data, self.test_data, self.plan, metrics)
            self.metrics = (LOSS if dry_run.batch.hits is None else ACCURACY,) if metrics is None else tuple(metrics)
            for each in named.values():
                check_evaluation(self.objective, each, metrics)
            clients_samples = self._client_samples(options.client_metrics, metrics)
            self.evaluation = Evaluation(metrics, self.test_data, clients_samples, named)
            self.plan = timed(self.plan, algorithm, self.objective, self.train_data)
            self.protocol = protocol = self.plan.protocol
            self.plan.round(1)  # so that an impossible plan is refused here, not in round 1
            self.engine: Engine = choose_engine(
                options.engine,
                self.precision,
                is_random=dry_run.is_random,
                cohort=max(1, round(protocol.participation * self.plan.clients.count)),
                batch=self.plan.largest_batch,
                algorithm=algorithm,
                objective=self.objective,
                data=self.train_data,
                protocol=protocol,
                record_trust_ratios=options.trust_ratios,
            )

        first = self.metrics[0].name
        if self.has_client_models and self.metric != client_mean(first):
            if patience is not None:
                raise BadInput(f"patience: {NO_OWN_TESTS}")
            if test is not None:
                log.warning("the test data see the shared model only: %s", NO_OWN_TESTS)
        elif patience is not None and test is None and self.metric == first:
            raise BadInput(
                "patience counts evaluations on test data without a better value: give test=(x, y) or local_test=0.2"
            )
        names = tuple(options.diagnostics or ())
        if names and self.objective.private is not None:
            raise BadInput("diagnostics are about one model that all clients share: leave them out, or `private`")
        self.diagnostics = Diagnostics(names, algorithm, self.objective, self.train_data, self.plan)
        self.state, _ = self.start()
        self.history = History(metric=self.metric)
        self.timeline = timeline_of(self.plan, algorithm)
        self._planned: RoundPlan | None = None  # the next round's plan, if it was computed ahead

    def run(self, rounds: int, on_round: Callable[[Row], None] | None = None) -> History:
        """Train for `rounds` more rounds and return the history; `on_round` is called with every round's metrics.

        With `patience`, training may stop earlier. If `on_round` raises StopIteration, the run ends after that round,
        under torchrun in all processes.
        """
        last = self.state.round + check_count("run: rounds", rounds, least=0)
        stop = Stop(on_round or (lambda row: None))
        while self.state.round < last and everywhere(not (self.has_stopped or stop())):
            row = self.run_round(evaluate=self.state.round + 1 == last)
            stop.call(row)
            refuse_nonfinite(row)
        return self.history

    def run_round(self, *, evaluate: bool = False, continues: bool = True) -> Row:
        """Train one round and return its metrics; evaluate if this round is due, or if `evaluate` is set.

        Unless the model is evaluated, a GPU may begin the next round before this one returns. Set `continues=False` to
        prevent that: if the model is read after this round, to write a checkpoint, say.
        """
        started = time.perf_counter()
        plan = self.next_plan()
        before = self.state
        with arithmetic(self.precision, self.deterministic):  # torch's process-wide switches, for this block
            try:
                if isinstance(self.engine, Stacked):  # it sends the next round's batches while a GPU works on this one
                    continues = continues and not (evaluate or self.is_evaluated(plan.number))
                    self.state, report = self.engine.run_round(self.state, plan, self.plan_ahead, continues=continues)
                else:
                    self.state, report = self.engine.run_round(self.state, plan)
            except Diverged as error:
                raise published_error(error, self.protocol) from None
            seconds = time.perf_counter() - started
            (metrics,) = evaluate_together([self], always=evaluate)  # empty if no evaluation is due
            return self.record(before, plan, report, seconds, metrics)

    def is_evaluated(self, number: int) -> bool:
        """Return whether an evaluation is due after a round."""
        return number % self.options.evaluate_every == 0

    def next_plan(self) -> RoundPlan:
        """Return the plan of the next round: its cohort, every client's batches and the learning rate."""
        number = self.state.round + 1
        if number == 1 and self.evaluation.metrics and self.test_data is None and not self.evaluation.clients:
            log.warning("metrics are computed on test data, and there are none: give test=(x, y)")
        planned, self._planned = self._planned, None
        if planned is None or planned.number != number:
            planned = self.plan.round(number)
        self.objective.refuse_rate(planned.lr)
        return planned

    def plan_ahead(self) -> list[RoundPlan] | None:
        """Return the plan of the round after the one that is running; None if there cannot be such a round."""
        if self._planned is None:
            with contextlib.suppress(BadInput):  # raised again if that round is reached
                self._planned = self.plan.round(self.state.round + 2)
        return None if self._planned is None else [self._planned]

    def record(
        self, before: State, plan: RoundPlan, report: RoundReport, seconds: float, metrics: Mapping[str, float]
    ) -> Row:
        """Append the row of a finished round, with its evaluation and diagnostics if they were due, and return it."""
        row = round_row(self.algorithm, self.objective.shared_start, plan, report, seconds) | dict(metrics)
        if self.timeline is not None:
            catch_up(self.timeline, self.plan, self.history, plan.number - 1)
            row["clock_seconds"] = self.timeline.add(row, plan.cohort, plan.examples, plan.steps)
        if metrics and self.diagnostics.names:
            started = time.perf_counter()
            row |= self.diagnostics.measure(before, self.state, plan, report)
            row["evaluation_seconds"] += time.perf_counter() - started
        if self.accountant is not None:
            row = published(row, metrics, self.algorithm, self.plan, self.accountant)
        warn_of_nan(row, self.history, self.metrics)
        self.history.append(row)
        return row

    def start(self) -> tuple[State, Any]:
        """Return the state before round 1 and the initial state of a client."""
        state = State.start(self.algorithm, self.objective, self.plan.clients.count)
        return state, first_record(self.algorithm, self.objective, state.server.x, channel=self.protocol.channel)

    @property
    def model(self) -> nn.Module:
        """A copy of the trained module in evaluation mode; later rounds do not change it."""
        return copy_module(self.objective.module_at(self._trained_parameters(), self.state.buffers)).eval()

    @property
    def has_stopped(self) -> bool:
        """Whether the run has ended early: no better value within `patience` evaluations, or no privacy budget left."""
        if spends_too_much(self.accountant, self.protocol.privacy, self.state.round + 1):
            return True
        return self.history.has_stalled(self.patience, self.options.evaluate_every)

    @property
    def metric(self) -> str:
        """The column that the run is judged by: of the first metric."""
        return self.evaluation.judged_column(self.metrics[0].name, self.has_client_models)

    def evaluate(self) -> dict[str, float]:
        """Return the loss and the metrics of the current model on the test data, and on clients' data if enabled."""
        with arithmetic(self.precision, self.deterministic):
            return self.start_evaluation()()

    def evaluate_clients(self) -> list[dict[str, Any]]:
        """Return a row for every client that has samples to evaluate on: its name, its loss and the metrics.

        They are those of the columns ``client_…``: the clients' test splits or test data, or, with `client_metrics`,
        what they train on. A client that has a model of its own is evaluated with that.
        """
        state, names = self.state, self.reserved.names
        model_of = self.client_parameters if self.has_client_models else None
        with arithmetic(self.precision, self.deterministic):
            rows = self.evaluation.of_clients(self.objective, self._trained_parameters(), state.buffers, model_of)
        return [{"client": names[client], **row} for client, row in rows.items()]

    def start_evaluation(self) -> Callable[[], dict[str, float]]:
        """Start the evaluation of the current model, and of the clients' own models if they have any."""
        model_of = self.client_parameters if self.has_client_models else None
        return self.evaluation.start(self.objective, self._trained_parameters(), self.state.buffers, model_of)

    def _trained_parameters(self) -> Tensor:
        """Return the parameters of the trained model; private ones as they start."""
        return self.objective.whole(self.algorithm.trained_model(self.state.server), self.state.private_start)

    @property
    def has_client_models(self) -> bool:
        """Whether clients use models of their own: with private parts, or by the algorithm."""
        return self.objective.private is not None or has_client_models(self.algorithm)

    def client_parameters(self, client: int) -> tuple[Tensor, Buffers]:
        """Return the parameters and buffers of the model that a client uses, by its number in training."""
        return model_in_use(self.algorithm, self.objective, self.state, client)

    def _client_samples(self, client_metrics: bool, chosen: Sequence[Metric] | None) -> list[ClientSamples]:
        """Return the clients' samples to evaluate on."""
        reserved, parts = reserved_samples(self.reserved, self.train_data, self.device), self.plan.clients.parts
        test = self.test_data
        is_by_client = test is not None and test.client_column is not None
        if is_by_client and self.all_clients.column_name != self.train_data.client_column:
            log.warning("the data are dealt to other clients, so the clients' test data are evaluated together only")
        elif is_by_client and self.protocol.privacy is not None:
            log.warning("privacy: figures of single clients have no noise: their test data are evaluated together only")
        elif is_by_client:
            if self.reserved.local_tests:
                raise BadInput("the clients have test data of their own: leave local_test out")
            assert test is not None
            reserved.insert(0, samples_by_client(test, self.reserved.names))
        if not client_metrics:
            return reserved
        if any(group.prefix == "client_" for group in reserved):
            raise BadInput(
                "client_metrics evaluates on the clients' training data, and local_test or test data by client do not: "
                "give one"
            )
        if not parts or (chosen is None and self.metrics[0] is not ACCURACY):
            raise BadInput(
                "client_metrics needs an accuracy (class labels, one output per class or one logit for two, a loss "
                "other than 'mse') and clients that keep their data"
            )
        everyone = range(self.plan.clients.count)
        samples = ClientSamples("client_", "", self.train_data, parts, pooled=False, clients=everyone)
        return [in_order(samples) if self.objective.mixes_samples or self.has_client_models else samples, *reserved]


def evaluate_together(simulations: Sequence[Training], *, always: bool = False) -> list[dict[str, float]]:
    """Evaluate the simulations that are due, or all of them; start every one before waiting for a GPU.

    The caller sets the arithmetic.
    """
    started = time.perf_counter()
    due = [one for one in simulations if always or one.is_evaluated(one.state.round)]
    finish = {one: one.start_evaluation() for one in due}
    metrics = {one: finish[one]() for one in due}
    seconds = {"evaluation_seconds": (time.perf_counter() - started) / max(1, len(due))}
    return [metrics[one] | seconds if one in metrics else {} for one in simulations]
