"""`Population`: several experiments side by side on one device, as one stacked model."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from lamina.algorithms.declaration import options
from lamina.base.errors import BadInput, Diverged
from lamina.base.limits import check_count
from lamina.data.dataset import Dataset
from lamina.engines.devices import arithmetic
from lamina.engines.ranks import everywhere
from lamina.engines.stacked.engine import Stacked
from lamina.engines.stacked.independence import work_together
from lamina.engines.stacked.rows import Member, Outcome
from lamina.engines.state import RoundReport
from lamina.objective.fingerprint import alike, same_tensors
from lamina.rounds.plan import RoundPlan
from lamina.rounds.settings import PER_MEMBER, TrainSettings
from lamina.training.evaluation import refuse_nonfinite
from lamina.training.history import History, Row
from lamina.training.privacy import published_error
from lamina.training.training import Stop, Training, check_on_round, evaluate_together


class Population:
    """Simulations that differ in seed, learning rate and other numbers, trained as one; each ends as if it ran alone.

    They may also differ in `clip`, `weighting`, the test data and all that the round plan decides but `batch_size`.
    What they must share (the training data, the model, the algorithm, ...) is compared; a difference is refused by
    name. Members that run client by client are trained in turn. A member that diverges is frozen and reported in
    `diverged`, and one that its `patience` has stopped stays as it is; the others continue. Seconds of a round are
    shared equally among its members.

    >>> import torch, lamina
    >>> x, y = torch.randn(60, 5), torch.randint(0, 3, (60,))
    >>> make = lambda lr: lamina.Simulation(torch.nn.Linear(5, 3), (x, y), "fedlamb", clients=4, lr=lr)
    >>> population = lamina.Population([make(0.01), make(0.1)])
    >>> [len(history) for history in population.run(2)]
    [2, 2]
    """

    def __init__(self, simulations: Sequence[Training]) -> None:
        if not (isinstance(simulations, Sequence) and all(isinstance(each, Training) for each in simulations)):
            raise BadInput("a population needs a list of simulations: lamina.Population([first, second])")
        self.simulations = list(simulations)
        self.diverged: dict[int, Diverged] = {}
        if not self.simulations:
            raise BadInput("a population needs at least one simulation")
        for i, simulation in enumerate(self.simulations):
            if getattr(simulation, "out", None) is not None:  # a `Simulation` may write its own folder
                raise BadInput(
                    f"simulation {i} has out=, and a population writes no folders: use lamina.tune, or no out="
                )
            problem = mismatch(self.simulations[0], simulation)
            if problem:
                raise BadInput(f"simulations 0 and {i} cannot be stacked: {problem}")
        # members that differ only in rates and options share one plan: computing it is the host's longest task
        plans = [simulation.plan for simulation in self.simulations]
        self._same_rounds = [next(j for j, other in enumerate(plans) if other.same_rounds(plan)) for plan in plans]

    def run(self, rounds: int, on_round: Callable[[int, Row], None] | None = None) -> list[History]:
        """Train all members for `rounds` more rounds; `on_round` is called with (member, row) as rounds finish.

        If it raises StopIteration, the run ends after that round.
        """
        check_on_round(on_round, "member", "row")
        stop = Stop(on_round or (lambda i, row: None))
        for left in range(check_count("run: rounds", rounds, least=0), 0, -1):
            for i, row in self.run_round(evaluate=left == 1).items():
                stop.call(i, row)
            if not everywhere(not stop()):
                break
        return [simulation.history for simulation in self.simulations]

    def run_round(self, *, evaluate: bool = False, continues: bool = True) -> dict[int, Row]:
        """Train one round of all members that have not diverged; return the finished members' rows.

        The arguments are as for `Simulation.run_round`.
        """
        engine = self.simulations[0].engine
        rows: dict[int, Row] = {}
        active = [i for i, one in enumerate(self.simulations) if i not in self.diverged and not one.has_stopped]
        if not active:
            return rows
        started = time.perf_counter()
        chosen = [self.simulations[i] for i in active]
        leaders = {self._same_rounds[i]: self.simulations[i] for i in reversed(active)}
        plans = {leader: simulation.next_plan() for leader, simulation in leaders.items()}
        members = [
            Member(s.algorithm, s.state, replace(plan, lr=s.protocol.rate(plan.number)), s.protocol)
            for i, s in zip(active, chosen, strict=True)
            for plan in [plans[self._same_rounds[i]]]
        ]

        def plan_ahead() -> list[RoundPlan] | None:
            with ThreadPoolExecutor(len(leaders)) as pool:  # numpy sorts without Python's lock
                planned = dict(zip(leaders, pool.map(Training.plan_ahead, leaders.values()), strict=True))
            upcoming = [planned[self._same_rounds[i]] for i in active]
            return None if None in upcoming else [plan for plans in upcoming if plans is not None for plan in plans]

        first = self.simulations[0]
        with arithmetic(first.precision, first.deterministic):
            if isinstance(engine, Stacked):
                is_evaluated = evaluate or any(s.is_evaluated(members[0].plan.number) for s in chosen)
                outcomes = engine.run_members(members, plan_ahead, continues=continues and not is_evaluated)
            else:
                outcomes = [_run_alone(simulation, member) for simulation, member in zip(chosen, members, strict=True)]
        seconds = (time.perf_counter() - started) / len(active)
        finished: list[tuple[int, Member, RoundReport]] = []
        for i, member, outcome in zip(active, members, outcomes, strict=True):
            if isinstance(outcome, Diverged):
                self.diverged[i] = published_error(outcome, member.protocol)
            else:
                self.simulations[i].state, report = outcome
                finished.append((i, member, report))
        with arithmetic(first.precision, first.deterministic):
            evaluated = evaluate_together([self.simulations[i] for i, *_ in finished], always=evaluate)
            for (i, member, report), metrics in zip(finished, evaluated, strict=True):
                rows[i] = self.simulations[i].record(member.state, member.plan, report, seconds, metrics)
        for i, row in rows.items():
            try:
                refuse_nonfinite(row)
            except Diverged as error:
                self.diverged[i] = error
        return rows


def _run_alone(simulation: Training, member: Member) -> Outcome:
    """Run the round of one member, client by client."""
    try:
        return simulation.engine.run_round(member.state, member.plan)
    except Diverged as error:
        return error


def mismatch(first: Training, other: Training) -> str:
    """Return why two simulations cannot be stacked, or an empty string."""
    if first.engine.name != other.engine.name:
        return f"they run on different engines ({first.engine.name} and {other.engine.name})"
    if type(other.algorithm) is not type(first.algorithm):
        return "they run different algorithms"
    has_other_numbers = False
    for name in options(type(first.algorithm)):
        a, b = getattr(first.algorithm, name), getattr(other.algorithm, name)
        if a != b and not (isinstance(a, float | int) and isinstance(b, float | int) and not isinstance(a, bool)):
            return f"they differ in the option '{name}', which is not a number"
        has_other_numbers = has_other_numbers or a != b
    if first.algorithm.cycle != other.algorithm.cycle:
        return "their algorithms synchronise after different numbers of rounds"
    if has_other_numbers:
        number = first.state.round + 1
        if first.algorithm.needs(number) != other.algorithm.needs(number):
            return "their algorithms' options give them different needs"
        parts = [one.engine.parts for one in (first, other) if isinstance(one.engine, Stacked)]
        if parts and len(parts[0]) != len(parts[1]):
            return "their algorithms' options let only one of them step layer by layer"
        if not work_together(first.algorithm, other.algorithm):
            return "their algorithm does not compute with an option that is a tensor (a branch on the option?)"
    difference = first.objective.difference(other.objective) or _data_difference(first.train_data, other.train_data)
    if difference:
        return difference
    if first.state.round != other.state.round:
        return f"they are at different rounds ({first.state.round} and {other.state.round})"
    for name, a, b in (
        *(
            (name, getattr(first.protocol, name), getattr(other.protocol, name))
            for name in TrainSettings.names(PER_MEMBER)
            if name != "privacy"  # whose noise is each member's own
        ),
        ("privacy", repr(first.protocol.privacy), repr(other.protocol.privacy)),
        ("precision", first.precision, other.precision),
        ("deterministic", first.deterministic, other.deterministic),
        ("trust_ratios", first.engine.record_trust_ratios, other.engine.record_trust_ratios),
    ):
        if not alike(a, b):
            return f"they differ in {name} ({a} and {b})"
    return ""


def _data_difference(one: Dataset, other: Dataset) -> str:
    """Return how two data sets differ in the batches they give a model, or an empty string."""
    if not same_tensors(one.x, other.x):
        return "they have different training data"
    if not same_tensors(one.y, other.y):
        return "their training data have different labels or targets"
    for name in ("mean", "std"):
        a, b = getattr(one, name), getattr(other, name)
        if not alike(a, b):
            return f"their training data differ in {name} ({a} and {b})"
    return ""
