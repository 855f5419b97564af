"""Write docs/reproduction/frontier.md from the final runs of the frontier on Fashion-MNIST, frontier-fmnist.csv.

    python reproduction/frontier.py

`frontier-fmnist.md` is its text: `{tables}` and `{numbers}` in braces follow from the runs.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from words import markdown

from lamina.experiment.trials.pairs import Difference, paired_difference
from lamina.report.frontier import ON_FRONTIER, pareto
from lamina.report.tables import NONE, fixed, mean_and_spread, rounds_text, significant
from lamina.training.history import mean

HERE = Path(__file__).parent
RUNS, TEXT = HERE / "frontier-fmnist.csv", HERE / "frontier-fmnist.md"
PAGE = HERE.parent / "docs" / "reproduction" / "frontier.md"
ROUNDS = 100  # of a run that did not diverge
BASELINE = "fedavg"
NETWORKS = ("lan", "fibre", "home", "4g", "mixed")
NO_CODEC = "none"
FEEDBACK = ("", ", feedback")  # the ends of a channel's name


class Run(NamedTuple):
    """A final run."""

    accuracy: float  # the mean of the last ten rounds, in per cent
    rounds: int
    rounds_to_target: float  # NaN if it does not stay there
    megabytes_up: float
    megabytes: float  # in both directions
    seconds: Mapping[str, float]  # to the target, by network


@dataclass(frozen=True)
class Point:
    """A method with a codec or a level of privacy, and its runs by seed."""

    method: str
    channel: str
    epsilon: float
    rate: str
    runs: Mapping[int, Run]

    def by_seed(self, value: Callable[[Run], float]) -> dict[int, float]:
        """Return a value of every run."""
        return {seed: value(run) for seed, run in self.runs.items()}

    def mean(self, value: Callable[[Run], float]) -> float:
        """Return the mean of a value over the seeds."""
        return mean(self.by_seed(value).values())

    def seconds(self, network: str) -> float:
        """Return the mean seconds to the target on a network; NaN if a seed does not stay there."""
        return self.mean(lambda run: run.seconds[network])

    @property
    def accuracies(self) -> list[float]:
        """The accuracies of the runs that did not diverge."""
        return [run.accuracy for run in self.runs.values() if run.rounds == ROUNDS]

    def difference(self, other: Point, value: Callable[[Run], float]) -> Difference:
        """Return the difference of a value to that of another point, paired by seed."""
        found = paired_difference(self.by_seed(value), other.by_seed(value))
        assert found is not None
        return found


class Study:
    """The points of the study."""

    def __init__(self, points: Iterable[Point]) -> None:
        self.points = list(points)
        self.methods = list(dict.fromkeys(point.method for point in self.points))
        self.open = [point for point in self.points if math.isinf(point.epsilon)]

    def of(self, method: str, channel: str = NO_CODEC, epsilon: float = math.inf) -> Point:
        """Return one point."""
        wanted = (method, channel, epsilon)
        return next(point for point in self.points if (point.method, point.channel, point.epsilon) == wanted)

    def fastest(self, network: str, method: str | None = None) -> Point:
        """Return the point that is the first at the target on a network, of all methods or of one."""
        chosen = [point for point in self.open if method in (None, point.method)]
        return min((each for each in chosen if not math.isnan(each.seconds(network))), key=lambda p: p.seconds(network))


def read(path: Path = RUNS) -> Study:
    """Return the points of a file of final runs."""
    points: dict[tuple[str, str, float, str], dict[int, Run]] = {}

    def number(text: str) -> float:
        return float(text) if text else math.nan

    with path.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            epsilon = float(row["epsilon"] or math.inf)
            seconds = {network: number(row[f"seconds_to_70_{network}"]) for network in NETWORKS}
            run = Run(
                100 * float(row["final_accuracy"]),
                int(row["rounds"]),
                number(row["rounds_to_70"]),
                float(row["mb_up"]),
                float(row["mb_in_all"]),
                seconds,
            )
            points.setdefault((row["method"], row["channel"], epsilon, row["lr"]), {})[int(row["seed"])] = run
    return Study(Point(*key, runs) for key, runs in points.items())


# --- tables -----------------------------------------------------------------------------------------------------------


def networks_table(study: Study) -> str:
    """Return each method's fastest seconds on every network, with the codec."""
    rows = []
    for network in NETWORKS:
        first, cells = study.fastest(network), [f"`{network}`"]
        for method in study.methods:
            point = study.fastest(network, method)
            text, codec = significant(point.seconds(network)), point.channel.removeprefix("qsgd ")
            is_tie = point is not first and seconds_behind(point, first, network).includes(0)
            cells.append(f"{f'**{text}**' if point is first else text} ({codec})" + " =" * is_tie)
        rows.append(cells)
    return markdown(["network", *study.methods], rows)


def seconds_behind(point: Point, first: Point, network: str) -> Difference:
    """Return how many seconds later a point is at the target than another one."""
    return point.difference(first, lambda run: run.seconds[network])


def codecs_table(study: Study) -> str:
    """Return the cost of every codec in accuracy."""
    plain = list(dict.fromkeys(point.channel.removesuffix(", feedback") for point in study.open))
    channels = [f"{codec}{more}" for codec in plain if codec != NO_CODEC for more in FEEDBACK]
    return markdown(
        ["codec", *study.methods],
        [[channel, *(points_text(cost(study, method, channel)) for method in study.methods)] for channel in channels],
    )


def cost(study: Study, method: str, channel: str) -> Difference:
    """Return the accuracy of a method with a codec minus that without."""
    return study.of(method, channel).difference(study.of(method), lambda run: run.accuracy)


def points_text(difference: Difference) -> str:
    """Return a difference with its interval.

    >>> points_text(Difference(-0.04, 0.16, 3))
    '0.0 [−0.2, +0.1]'
    """
    return "{} [{}, {}]".format(*map(signed, (difference.mean, difference.low, difference.high)))


def signed(value: float) -> str:
    """Return a number with one decimal and its sign; zero has none."""
    text = fixed(value)
    return text.lstrip("-") if float(text) == 0 else text.replace("-", "−") if value < 0 else f"+{text}"


def privacy_table(study: Study) -> str:
    """Return the accuracies of the methods at every level of privacy."""
    levels = sorted({point.epsilon for point in study.points}, reverse=True)
    rows = [
        ["∞" if math.isinf(level) else f"{level:.0f}", *(accuracy(study.of(m, epsilon=level)) for m in study.methods)]
        for level in levels
    ]
    return markdown(["ε", *study.methods], rows)


def accuracy(point: Point) -> str:
    """Return the accuracy of a point, and how many of its runs diverged."""
    diverged, words = len(point.runs) - len(point.accuracies), ("no", "one", "two", "three")
    text = mean_and_spread(point.accuracies)
    return f"{text} ({words[diverged]} of {words[len(point.runs)]} seeds diverged)" if diverged else text


def all_table(study: Study) -> str:
    """Return a row for every point, as `lamina frontier` prints it."""
    is_best = pareto([
        (-mean(point.accuracies) if len(point.accuracies) == len(point.runs) else math.inf,
         point.mean(lambda run: run.megabytes), point.epsilon)
        for point in study.points
    ])  # fmt: skip
    rows = []
    for point, best in zip(study.points, is_best, strict=True):
        to_target = point.mean(lambda run: run.megabytes * run.rounds_to_target / run.rounds)
        seconds = [point.seconds(network) for network in NETWORKS]
        rows.append(
            [
                point.method,
                point.channel,
                significant(point.epsilon),
                point.rate,
                mean_and_spread(point.accuracies),
                significant(point.mean(lambda run: run.megabytes_up)),
                significant(point.mean(lambda run: run.megabytes)),
                rounds_text(math.nan, ROUNDS) if math.isnan(to_target) else significant(to_target),
                *(NONE if math.isnan(each) else significant(each) for each in seconds),
                ON_FRONTIER if best else "",
            ]
        )
    head = ["method", "channel", "ε", "rate", "final accuracy, %", "MB up", "MB in all", "MB to 70%"]
    return markdown([*head, *(f"s, {network}" for network in NETWORKS), "frontier"], rows)


# --- numbers in sentences ---------------------------------------------------------------------------------------------


def between(values: Iterable[float], write: Callable[[float], str] = fixed) -> str:
    """Return the smallest and the largest of some values.

    >>> between([30.0, 20.0, 25.0], "{:.0f}".format)
    '20 to 30'
    """
    ordered = sorted(values)
    return f"{write(ordered[0])} to {write(ordered[-1])}"


def whole(value: float) -> str:
    """Return a number without decimals."""
    return fixed(value, 0)


def numbers(study: Study) -> dict[str, str]:
    """Return the numbers of the text by name."""
    others = [method for method in study.methods if method != BASELINE]
    chosen = {(network, method): study.fastest(network, method) for network in NETWORKS for method in study.methods}

    def rounds(*methods: str) -> str:
        points = [point for (_, method), point in chosen.items() if method in methods]
        return between((run.rounds_to_target for point in points for run in point.runs.values()), whole)

    def saved(*networks: str) -> list[float]:
        """Return the seconds that the fastest codec saves every method, in per cent."""
        return [
            100 * (1 - chosen[network, method].seconds(network) / study.of(method).seconds(network))
            for network in networks
            for method in study.methods
        ]

    def costs(*channels: str) -> list[float]:
        return [-cost(study, method, channel).mean for method in study.methods for channel in channels]

    def lost(epsilon: float, *methods: str) -> list[float]:
        return [mean(study.of(m).accuracies) - mean(study.of(m, epsilon=epsilon).accuracies) for m in methods]

    def megabytes(method: str, channel: str) -> str:
        return f"{study.of(method, channel).mean(lambda run: run.megabytes):,.0f}"

    def accuracy_with(method: str, channel: str) -> str:
        return fixed(mean(study.of(method, channel).accuracies))

    levels = sorted({point.epsilon for point in study.points})
    feedback = cost(study, "fedlamb", "qsgd 2 bits, feedback")
    return {
        "combinations": str(len(study.points)),
        "times_slower": between(
            chosen[network, BASELINE].seconds(network) / study.fastest(network).seconds(network) for network in NETWORKS
        ),
        "fedavg_rounds": rounds(BASELINE),
        "other_rounds": rounds(*others),
        "fewest_rounds": rounds("fedlamb", "fedlada"),
        "fedavg_on_lan": between(run.seconds["lan"] for run in chosen["lan", BASELINE].runs.values()),
        "saved_on_fibre": fixed(max(saved("fibre"))),
        "saved_on_mixed": between(saved("mixed"), whole),
        "saved_elsewhere": between(saved("lan", "home", "4g"), whole),
        "most_for_4_bits": fixed(max(costs(*(f"qsgd {bits} bits{more}" for bits in (8, 4) for more in FEEDBACK)))),
        "most_for_2_bits": fixed(max(costs("qsgd 2 bits"))),
        "without_feedback": between(costs("sign", "topk 1%"), whole),
        "with_feedback": between(costs("sign, feedback", "topk 1%, feedback")),
        "fedlamb_feedback": f"{fixed(-feedback.mean)} points [{fixed(-feedback.high)}, {fixed(-feedback.low)}]",
        "fedlamb_2_bits": fixed(-cost(study, "fedlamb", "qsgd 2 bits").mean),
        "server_accuracy": accuracy_with("fedams_server", "qsgd 2 bits"),
        "server_megabytes": megabytes("fedams_server", "qsgd 2 bits"),
        "fedlamb_accuracy": accuracy_with("fedlamb", "qsgd 2 bits"),
        "fedlamb_megabytes": megabytes("fedlamb", "qsgd 2 bits"),
        "fedavg_private": whole(*lost(8.0, BASELINE)),
        "others_private": between(lost(8.0, *others)),
        "chance": fixed(mean(study.of("fedams_server", epsilon=levels[0]).accuracies)),
    }


def page(study: Study) -> str:
    """Return the page: the text with tables and numbers."""
    tables = {
        "networks": networks_table(study),
        "codecs": codecs_table(study),
        "privacy": privacy_table(study),
        "all": all_table(study),
    }
    return TEXT.read_text(encoding="utf-8").format(**tables, **numbers(study))


if __name__ == "__main__":
    PAGE.write_text(page(read()), encoding="utf-8")
