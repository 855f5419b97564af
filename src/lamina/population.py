"""`Population`: several experiments side by side on one device, as one stacked model."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from lamina.algorithms.contract import options
from lamina.engines.stacked.engine import Member, Stacked
from lamina.engines.stacked.forward import arithmetic
from lamina.engines.state import RoundReport
from lamina.errors import BadInput, Diverged
from lamina.history import History, Row
from lamina.plan import Round
from lamina.simulation import Simulation, evaluate_together


class Population:
    """Simulations that differ in seed, learning rate and other numbers, trained as one; each ends as if it ran alone.

    They must share the data, the model's shape and the algorithm; a member that diverges is frozen and reported in
    `diverged`, the others go on. Seconds of a round are shared equally among its members.

    >>> import torch, lamina
    >>> x, y = torch.randn(60, 5), torch.randint(0, 3, (60,))
    >>> make = lambda lr: lamina.Simulation(torch.nn.Linear(5, 3), (x, y), "fedlamb", clients=4, lr=lr)
    >>> population = lamina.Population([make(0.01), make(0.1)])
    >>> [len(history) for history in population.run(2)]
    [2, 2]
    """

    def __init__(self, simulations: Sequence[Simulation]) -> None:
        self.simulations = list(simulations)
        self.diverged: dict[int, Diverged] = {}
        if not self.simulations:
            raise BadInput("a population needs at least one simulation")
        for i, simulation in enumerate(self.simulations):
            problem = mismatch(self.simulations[0], simulation)
            if problem:
                raise BadInput(f"simulations 0 and {i} cannot be stacked: {problem}")
        # members that differ in no more than rates and options share one plan: making it is the host's longest task
        plans = [simulation.plan for simulation in self.simulations]
        self._same_rounds = [next(j for j, other in enumerate(plans) if other.same_rounds(plan)) for plan in plans]

    def run(self, rounds: int, on_round: Callable[[int, Row], None] | None = None) -> list[History]:
        """Train all members for `rounds` more rounds; `on_round` is called with (member, row) as rounds finish."""
        for left in range(rounds, 0, -1):
            for i, row in self.run_round(evaluate=left == 1).items():
                if on_round is not None:
                    on_round(i, row)
        return [simulation.history for simulation in self.simulations]

    def run_round(self, *, evaluate: bool = False) -> dict[int, Row]:
        """Train one round of all members that have not diverged; the rows of those that finished it, by member."""
        engine = self.simulations[0].engine
        assert isinstance(engine, Stacked)
        rows: dict[int, Row] = {}
        going = [i for i in range(len(self.simulations)) if i not in self.diverged]
        if not going:
            return rows
        started = time.perf_counter()
        chosen = [self.simulations[i] for i in going]
        leaders = {self._same_rounds[i]: self.simulations[i] for i in reversed(going)}
        plans = {leader: simulation.next_plan() for leader, simulation in leaders.items()}
        members = [
            Member(s.algorithm, s.state, replace(plan, lr=s.plan.rate(plan.number)))
            for i, s in zip(going, chosen, strict=True)
            for plan in [plans[self._same_rounds[i]]]
        ]

        def plan_ahead() -> None:
            with ThreadPoolExecutor(len(leaders)) as pool:  # numpy sorts without Python's lock
                list(pool.map(lambda simulation: simulation.plan_ahead(), leaders.values()))

        engine.meanwhile = plan_ahead
        first = self.simulations[0]
        with arithmetic(first.precision, first.deterministic):
            outcomes = engine.run_members(members)
        seconds = (time.perf_counter() - started) / len(going)
        finished: list[tuple[int, Round, RoundReport]] = []
        for i, member, outcome in zip(going, members, outcomes, strict=True):
            if isinstance(outcome, Diverged):
                self.diverged[i] = outcome
            else:
                self.simulations[i].state, report = outcome
                finished.append((i, member.plan, report))
        evaluated = evaluate_together([self.simulations[i] for i, *_ in finished], always=evaluate)
        for (i, plan, report), metrics in zip(finished, evaluated, strict=True):
            rows[i] = self.simulations[i].record(plan, report, seconds, metrics)
            try:
                self.simulations[i].refuse_nonfinite(rows[i])
            except Diverged as error:
                self.diverged[i] = error
        return rows


def mismatch(first: Simulation, other: Simulation) -> str:
    """Why two simulations cannot be rows of one model, or an empty string."""
    if not isinstance(other.engine, Stacked):
        return "a member does not run on the stacked engine"
    if type(other.algorithm) is not type(first.algorithm):
        return "they run different algorithms"
    for name in options(type(first.algorithm)):
        a, b = getattr(first.algorithm, name), getattr(other.algorithm, name)
        if a != b and not (isinstance(a, float | int) and isinstance(b, float | int) and not isinstance(a, bool)):
            return f"they differ in the option '{name}', which is not a number"
        if a != b and name == "sync_every":
            return "they differ in 'sync_every', which changes what a round does"
    if first.engine.aggregation != other.engine.aggregation:
        return "they differ in 'aggregation'"
    difference = first.objective.difference(other.objective)
    if difference:
        return difference
    if first.train_data is not other.train_data and (
        first.train_data.x.shape != other.train_data.x.shape
        or not bool((first.train_data.x == other.train_data.x).all())
    ):
        return "they have different training data"
    if first.state.round != other.state.round or first.plan.batch_size != other.plan.batch_size:
        return "they are at different rounds or have different batch sizes"
    return ""
