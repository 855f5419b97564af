"""The server's side: the round loop over Flower's Grid, with the same algorithm, plan and records as a simulation.

Read `run`, `_round` and `_attempt`: the run with its records, a round with its repetitions, one attempt.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from lamina.algorithms.contract import ClientInfo, ServerInfo, has_client_models
from lamina.base.errors import Diverged, LaminaError
from lamina.base.text import listed, plural
from lamina.data.dataset import Dataset, as_dataset
from lamina.data.samples import describe_samples
from lamina.engines.divergence import went_nonfinite
from lamina.engines.state import RoundReport, RoundSums, State, client_weights, close_round
from lamina.experiment.runs.folder import RunFolder
from lamina.experiment.runs.model_file import describe_parts
from lamina.flower.checks import Update
from lamina.flower.exchange import Exchange
from lamina.flower.judge import Judge
from lamina.flower.keys import ending_soon
from lamina.flower.mail import LATE, Mail, Traffic
from lamina.flower.records import Attendance, Journal, Memory, count_start
from lamina.flower.roster import Roster
from lamina.flower.setup import Setup
from lamina.rounds.aggregation import combine_vectors
from lamina.rounds.plan import RoundFacts
from lamina.rounds.settings import needs_all_clients, smaller_cohort
from lamina.storage.checkpoint import load_newest
from lamina.storage.identity import of_run
from lamina.training import evaluation
from lamina.training.history import History, Row
from lamina.training.masks import with_mask
from lamina.training.metrics import ACCURACY
from lamina.training.preflight import check_evaluation
from lamina.training.privacy import (
    accountant_of,
    check_privacy,
    published,
    published_error,
    refuse_spent,
    spends_too_much,
    with_noise,
)
from lamina.training.timing import catch_up, timed, timeline_of

log = logging.getLogger(__name__)


class Stopped(LaminaError):
    """The federation cannot continue: too few nodes answer. All finished rounds are kept."""


class Server:
    """One run of a federation; `keys` is the folder of its keys and certificates."""

    def __init__(self, setup: Setup, folder: RunFolder, mail: Mail, nodes: Mapping[int, int], keys: Path) -> None:
        self.setup, self.folder, self.keys = setup, folder, keys
        self.algorithm, self.plan, self.protocol = setup.algorithm, setup.plan, setup.protocol
        self.objective = setup.objective()
        self.objective.refuse_rate(self.protocol.lr)
        if self.protocol.privacy is not None:
            figures = {"evaluate_on": setup.evaluate_on != "central", "max_norm": setup.limits.max_norm is not None}
            check_privacy(self.algorithm, self.objective, self.plan, figures)
            identity = of_run(self.algorithm, self.objective, self.plan)
            self.protocol = with_noise(self.protocol, self.plan.clients.count, identity, can_repeat=True)
            self.plan = replace(self.plan, protocol=self.protocol)
        self.has_secret_cohorts = self.protocol.privacy is not None and self.protocol.privacy.secret_cohorts
        self.accountant = accountant_of(self.protocol, self.plan.clients.count)
        if self.protocol.chooser is not None and setup.known_clients is not None:
            self.plan = replace(self.plan, clients=setup.known_clients())
        self.plan = setup.plan = timed(self.plan, self.algorithm, self.objective, None)
        self.timeline = timeline_of(self.plan, self.algorithm)
        test_data = None
        if setup.test is not None and setup.evaluate_on != "nodes":
            given = setup.test()
            test_data = setup.dataset(given, self.objective)
            check_evaluation(self.objective, test_data, setup.metrics)
            folder.preprocessing = test_data.preprocessing
            folder.model = self._describe_model(as_dataset(given))
        groups = setup.client_samples() if setup.evaluate_on != "nodes" else []
        groups = [group._replace(data=with_mask(group.data, self.objective.module)) for group in groups]
        if self.objective.private is not None or has_client_models(self.algorithm):  # the server has the shared one
            groups = [group.of_shared_model() for group in groups]
        more_tests = {} if test_data is None else test_data.more_tests
        more_tests = {name: setup.dataset(data, self.objective) for name, data in more_tests.items()}
        self.evaluation = evaluation.Evaluation(setup.metrics, test_data, groups, more_tests)
        self.state = State.start(self.algorithm, self.objective, self.plan.clients.count)
        self.history = History()
        self.journal = Journal(folder.path)
        memory = Memory(run=secrets.token_hex(16))
        self.judge = Judge(setup, memory)
        self.mail, self.roster = mail, Roster(setup, mail.grid, nodes)
        self.exchange = Exchange(setup, self.objective, self.mail, self.roster, memory)
        self._warned: dict[str, int] = {}  # by line: the last round with this warning

    def _describe_model(self, test: Dataset) -> dict[str, Any]:
        """Return the content of model.json; without an experiment file, only test data tell what samples look like."""
        setup = self.setup
        if setup.described is not None:
            return setup.described()[1]
        return describe_parts(
            self.objective,
            self.algorithm,
            loss=self.protocol.loss,
            metrics=setup.metrics or (),
            samples=describe_samples(test),
            clients=self.plan.clients.count,
            model={},
            given=setup.make_model,
        )

    # --- the run ----------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Run the rounds that are left; each is in the records before the next begins."""
        self._resume()
        self.folder.begin()  # so that the records name missing clients from the first attempt on
        memory = self.exchange.memory
        memory.last_task = count_start(self.folder.path, memory.last_task)
        for client in self.roster.unlisted:
            log.warning("no node is listed for client %d: it takes no part", client)
        try:
            if len(self.history):  # killed after the checkpoint of a round with an infinite test loss
                evaluation.refuse_nonfinite(self.history[-1])
            while self.state.round < self.setup.rounds:
                if spends_too_much(self.accountant, self.protocol.privacy, self.state.round + 1):
                    if self.state.round == 0:
                        refuse_spent(self.protocol.privacy)
                    log.info("round %d is the last: the next one would exceed the privacy budget", self.state.round)
                    break
                self._run_round()
        except Diverged as error:
            self.folder.diverge(error)
            raise
        self.folder.finish(self)

    def _run_round(self) -> None:
        """Run one more round, evaluate if an evaluation is due, and record it."""
        started = time.monotonic()
        traffic = self.mail.traffic = Traffic()
        facts, report, record = self._round(self.state.round + 1)
        row = evaluation.round_row(
            self.algorithm, self.objective.shared_start, facts, report, time.monotonic() - started
        )
        row |= {
            "asked": len(self.plan.cohort(record.round)),
            "missing": len(record.missing),
            "refused": len(record.refused),
            "wire_bytes_down": traffic.wire_down,
            "wire_bytes_up": traffic.wire_up,
        }
        if self.timeline is not None:
            catch_up(self.timeline, self.plan, self.history, facts.number - 1)
            row["clock_seconds"] = self.timeline.add(row, facts.cohort, facts.examples, facts.steps)
        is_due = facts.number % self.setup.evaluate_every == 0 or facts.number == self.setup.rounds
        metrics = self._evaluate(record) if is_due else {}
        row |= metrics
        if self.accountant is not None:
            row = published(row, metrics, self.algorithm, self.plan, self.accountant)
        self._record(row, record)
        evaluation.refuse_nonfinite(row)

    def _resume(self) -> None:
        """Resume the run in the folder from its newest sound checkpoint."""
        self.folder.checkpoints.identity = of_run(self.algorithm, self.objective, self.plan)
        loaded = load_newest([self.folder.checkpoints], [(self.state, None)], self.folder.rounds())
        if loaded is not None:
            ((self.state, (facts,)),) = loaded
            self.exchange.memory = self.judge.memory = Memory(**facts)
        self.history = self.folder.resume_after(self.state.round)
        self.journal.cut(self.state.round)

    def _record(self, row: Row, record: Attendance) -> None:
        """Keep a finished round; all that must survive a restart is in one checkpoint, so rounds are never mixed."""
        evaluation.warn_of_nan(row, self.history, self.setup.metrics or ())
        self.history.append(row)
        self.folder.refuse_lost()
        self.journal.write(record)
        self.folder.record(row, self)
        self.folder.checkpoint(self, [self.judge.memory.model_dump()])
        metric = self.setup.metrics[0].name if self.setup.metrics else "accuracy"
        shown = "".join(f", {name} {row[name]:.4f}" for name in (metric, f"node_{metric}") if name in row)
        taken = "finished"
        if not self.has_secret_cohorts:
            taken = f"{row['clients']} of {row['asked']} clients, {row['seconds']:.1f} s"
        log.info("round %d: %s%s", row["round"], taken, shown)

    # --- a round ----------------------------------------------------------------------------------------------------

    def _round(self, number: int) -> tuple[RoundFacts, RoundReport, Attendance]:
        """Run a round; while too few clients answer, try it again with the same plan.

        A client that reports the same error twice in a row will report it again. If there is no quorum without such
        clients, the run stops.
        """
        attempts, cohort = self.setup.attempts, self.plan.cohort(number).tolist()
        needed = self.setup.needed(len(cohort))
        errors: dict[int, str] = {}  # of the attempt before, by client
        for attempt in range(1, attempts + 1):
            record = Attendance(number, attempt, nodes=self.roster.nodes, privacy=self.protocol.privacy)
            for line in ending_soon(self.keys):
                record.note(line, of_cohort=False)
            down, updates = self._attempt(cohort, needed, record)
            is_smaller = needed <= len(updates) < len(cohort)
            if is_smaller and needs_all_clients(self.algorithm, self.protocol.weighting):
                self._note_once(record, smaller_cohort(self.algorithm, "quorum = 1.0, which repeats such rounds"))
            self._warn(record)
            if len(updates) >= needed:
                return *self._close(down, updates, record), record
            log.warning("round %d: %s, try %d of %d", number, self._came(len(updates), needed), attempt, attempts)
            self.folder.refuse_lost()
            self.journal.write(record)
            self._refuse_divergence(record, needed)
            repeated = {client: why for client, why in record.errors.items() if errors.get(client) == why}
            if len(cohort) - len(repeated) < needed:
                raise self._stopped_by_error(repeated, record, self._came(len(updates), needed))
            errors = record.errors
        who = "; ".join(record.lines()) or "nobody is connected"
        late = any(entry["why"].startswith(LATE) for entry in record.missing)
        advice = f"; if nodes need longer, raise deadline (now {self.setup.deadline:g} s)" * late
        advice += ", or lower quorum" * bool(updates)
        if self.has_secret_cohorts:
            who, advice = "who is missing is secret, as the cohorts are; see the nodes' logs", ""
        came = self._came(len(updates), needed)
        raise Stopped(f"round {number}: {came}, {attempts} times ({who}); {self._how_to_resume()}{advice}")

    def _came(self, count: int, needed: int) -> str:
        """Return how many of the needed updates came, unless it is secret who takes part."""
        return "too few updates came" if self.has_secret_cohorts else f"{count} of the {needed} updates needed came"

    def _stopped_by_error(self, repeated: Mapping[int, str], record: Attendance, came: str) -> Stopped:
        """Return the error that names what goes wrong on some clients each time they are asked."""
        clients: dict[str, list[int]] = {}
        for client, why in repeated.items():
            clients.setdefault(why, []).append(client)
        what = "; ".join(f"{listed([record.name(c) for c in some], 3)}: {why}" for why, some in clients.items())
        if self.protocol.privacy is not None:
            what = "the nodes' logs say which"
        return Stopped(
            f"round {record.round}: {came}, and the same error came twice, so the round is not tried again: {what}; "
            f"correct this, then {self._how_to_resume()}"
        )

    def _how_to_resume(self) -> str:
        done = self.state.round
        kept = f"{plural(done, 'finished round')} {'is' if done == 1 else 'are'} kept: " if done else ""
        return f"{kept}start the server again with the same folder '{self.folder.path}' to resume"

    def _attempt(self, cohort: list[int], needed: int, record: Attendance) -> tuple[Any, dict[int, Update]]:
        """Ask the clients of a round for their updates; return what was broadcast, and the updates to use by client."""
        clients = self.roster.call(cohort, needed, record)
        number = record.round
        needs = self.algorithm.needs(number)
        layers, rate = self.objective.shared_layers, self.protocol.rate(number)
        participation = self.plan.published(number, len(cohort))["participation"]
        info = ServerInfo(number, rate, layers, participation)
        gradients: dict[int, Update] = {}
        if needs.control_variate:
            gradients = self.exchange.gradients(self.state, clients, record)
            self.judge.remove_odd_gradients(gradients, record)
            if len(gradients) < needed:
                return None, {}  # nobody need train for nothing
            clients = list(gradients)
            weights = client_weights(self._facts(number, gradients), self.protocol.by_examples)
            vectors = [one.up.gradient for one in gradients.values()]
            info = info._replace(mean_gradient=combine_vectors(self.protocol.aggregation, vectors, weights))
        down = self.protocol.channel.seen_broadcast(self.algorithm.broadcast(self.state.server, info), layers)
        example = self.state.server.x if needs.full_gradient else None
        buffers = self.objective.shared_buffers(self.state.buffers)
        expected = self.judge.expect(buffers, down, ClientInfo(number, rate, layers, full_gradient=example))
        updates = self.exchange.updates(self.state, clients, record, down, expected, gradients)
        self.judge.remove_odd_updates(updates, record)
        return down, updates

    def _refuse_divergence(self, record: Attendance, needed: int) -> None:
        """Raise `Diverged` if a quorum of a round without enough updates reports that its training went non-finite."""
        count = len(record.diverged)
        if count >= needed:
            client, layer = min(record.diverged.items())
            what = f"training went non-finite on {count} clients, on client {client}"
            error = went_nonfinite(what, layer, record.round, self.protocol.rate(record.round), client)
            raise published_error(error, self.protocol)

    def _warn(self, record: Attendance) -> None:
        """Log who is not in the mean; what is the same in one round after another is logged once."""
        for line in record.lines():
            if self._warned.get(line, -1) < record.round - 1:
                log.warning("round %d: %s", record.round, line)
            self._warned[line] = record.round
        for line in record.details():
            log.debug("round %d: %s", record.round, line)

    def _note_once(self, record: Attendance, line: str) -> None:
        """Record a line, unless an earlier round had it."""
        if line not in self._warned:
            record.note(line)

    # --- the server's step ------------------------------------------------------------------------------------------

    def _close(self, down: Any, updates: dict[int, Update], record: Attendance) -> tuple[RoundFacts, RoundReport]:
        """Take the server's step on the mean of the updates, as the engines do."""
        facts = self._facts(record.round, updates)
        weights = client_weights(facts, self.protocol.by_examples)
        sums = RoundSums(weights=weights, aggregation=self.protocol.aggregation, channel=self.protocol.channel)
        by_examples = self.protocol.by_examples
        sums.privacy = self.protocol.privacy and self.protocol.privacy.at(self.state.clip_bound)
        for c, one in enumerate(updates.values()):
            loss, steps = one.loss, one.steps
            up = sums.clipped(c, one.up)
            sums.add_client(c, self.algorithm, up, one.buffers, loss=loss, steps=steps, by_examples=by_examples)
        state = self.state
        self.state, report = close_round(self.algorithm, self.objective, state, facts, down, sums, state.clients)
        self.exchange.accept(updates)
        self.judge.remember(updates)
        record.accept(updates)
        if not self.has_secret_cohorts:  # else the bytes would tell who answered
            report = replace(report, bytes_down=self.mail.traffic.down, bytes_up=self.mail.traffic.up)
        return facts, report

    def _facts(self, number: int, updates: Mapping[int, Update]) -> RoundFacts:
        """Return the round as it really was: the clients that answered, and how much each has trained."""
        examples = np.array([update.examples for update in updates.values()], dtype=np.int64)
        return RoundFacts(
            number=number,
            lr=self.protocol.rate(number),
            **self.plan.published(number, len(updates)),
            cohort=np.array(list(updates), dtype=np.int64),
            examples=examples,
            steps=self.protocol.steps(examples),
        )

    # --- evaluation -------------------------------------------------------------------------------------------------

    def _evaluate(self, record: Attendance) -> dict[str, float]:
        """Return the new model's loss and metrics: on the server's test data, on the nodes, or both."""
        started = time.monotonic()
        metrics: dict[str, float] = {}
        x = self.objective.whole(self.algorithm.trained_model(self.state.server), self.state.private_start)
        metrics |= self.evaluation.run(self.objective, x, self.state.buffers)
        if self.setup.evaluate_on != "central":
            metrics |= self._evaluate_on_nodes(record)
        return metrics | {"evaluation_seconds": time.monotonic() - started} if metrics else {}

    def _evaluate_on_nodes(self, record: Attendance) -> dict[str, float]:
        """Return the means over the examples of all connected nodes."""
        self.mail.traffic = Traffic()
        # a record of its own: a client that does not evaluate still took part in the round
        attendance = Attendance(record.round, nodes=self.roster.nodes)
        examples = self.judge.memory.examples if self.setup.node_test is None else {}  # those that clients train on
        results = self.exchange.evaluations(self.state, attendance, examples)
        self.judge.remove_odd_evaluations(results, attendance)
        for line in attendance.lines():
            record.note(f"evaluation: {line}")
        self._warn(record)
        metrics: dict[str, float] = {"evaluating_nodes": len(results), "evaluation_bytes": self.mail.traffic.down}
        chosen = self.setup.node_metrics
        for metric in evaluation.with_loss((ACCURACY,) if chosen is None else chosen):
            name, weight = metric.name, evaluation.weight_name(metric)
            nodes = [one for one in results.values() if name in one.figures]
            means = [(one.figures[name], one.examples * one.figures[weight]) for one in nodes]
            if means:
                mean = sum(value * count for value, count in means) / sum(count for _, count in means)
                metrics[f"node_{metric.name}"] = evaluation.metric_of_mean(metric, mean)
        return metrics
