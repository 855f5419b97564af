"""The page of the frontier on Fashion-MNIST: it is made from the committed runs, and its sentences are true of them."""

import csv
import doctest
import statistics
import sys
from pathlib import Path

import pytest

from helpers import cells

sys.path.insert(0, str(Path(__file__).parents[2] / "reproduction"))  # as a script there has it

import frontier

T_QUANTILE_2 = 4.303  # of Student's t, 97.5 %, two degrees of freedom
METHODS = ["fedavg", "fedlada", "fedlamb", "fedams_server"]


@pytest.fixture(scope="module")
def study():
    return frontier.read()


def column(name, method, channel="none", epsilon=""):
    """The values of a column of the committed runs, in the order of the seeds."""
    with frontier.RUNS.open(newline="") as file:
        rows = list(csv.DictReader(file))
    wanted = (method, channel, epsilon)
    return [float(row[name] or "nan") for row in rows if (row["method"], row["channel"], row["epsilon"]) == wanted]


def test_the_examples_are_right():
    assert doctest.testmod(frontier).failed == 0


def test_the_committed_page_is_made_from_the_committed_runs(study):
    assert frontier.PAGE.read_text(encoding="utf-8") == frontier.page(study), "run python reproduction/frontier.py"


def test_another_run_makes_another_page(study, tmp_path):
    path = tmp_path / "runs.csv"
    text = frontier.RUNS.read_text()
    assert text.count("0.75587") == 1  # FedAvg's first run
    path.write_text(text.replace("0.75587", "0.70587"))
    accuracies = [100 * value for value in column("final_accuracy", "fedavg")]
    accuracies[0] -= 5
    shown = f"{statistics.mean(accuracies):.1f} ± {statistics.stdev(accuracies):.1f}"
    assert f"| fedavg | none | ∞ | 0.1 | {shown} |" in frontier.page(frontier.read(path))


def test_numbers_of_the_tables_by_hand(study):
    with_codec, without = (column("final_accuracy", "fedlada", channel) for channel in ("sign, feedback", "none"))
    lost = [100 * (one - other) for one, other in zip(with_codec, without, strict=True)]
    margin = T_QUANTILE_2 * statistics.stdev(lost) / 3**0.5
    numbers = [statistics.mean(lost), statistics.mean(lost) - margin, statistics.mean(lost) + margin]
    middle, low, high = (f"{number:+.1f}".replace("-", "−") for number in numbers)
    assert cells(frontier.codecs_table(study), "sign, feedback")[1] == f"{middle} [{low}, {high}]"
    seconds = statistics.mean(column("seconds_to_70_4g", "fedlamb", "qsgd 4 bits"))
    assert cells(frontier.networks_table(study), "`4g`")[2] == f"**{seconds:.2f}** (4 bits)"
    assert cells(frontier.privacy_table(study), "1")[0] == "9.8 (two of three seeds diverged)"


def test_the_text_says_what_the_tables_show(study):
    assert study.methods == METHODS
    assert {len(point.runs) for point in study.points} == {3}
    for network in frontier.NETWORKS:
        seconds = {method: study.fastest(network, method).seconds(network) for method in METHODS}
        assert max(seconds, key=seconds.get) == "fedavg"
        row = cells(frontier.networks_table(study), f"`{network}`")
        assert [cell.endswith("=") or cell.startswith("**") for cell in row] == [network == "lan", True, True, True]
    for channel in (f"qsgd {bits} bits{more}" for bits in (8, 4) for more in frontier.FEEDBACK):
        assert all(frontier.cost(study, method, channel).includes(0) for method in METHODS)
    assert min((frontier.cost(study, method, "qsgd 2 bits") for method in METHODS), key=lambda one: one.mean).includes(
        0
    )
    without_noise, *private = [
        {method: statistics.mean(study.of(method, epsilon=epsilon).accuracies) for method in METHODS}
        for epsilon in (float("inf"), 8.0, 1.998, 0.9989)
    ]
    assert min(without_noise, key=without_noise.get) == max(private[0], key=private[0].get) == "fedavg"
    assert all(abs(accuracy - 10) < 1 for level in private[1:] for accuracy in level.values())
    for method in METHODS:
        largest = max(float(point.rate) for point in study.points if point.method == method)
        assert float(study.of(method, epsilon=8.0).rate) == largest
    best = [row for row in frontier.all_table(study).splitlines() if row.endswith("| yes |")]
    assert any(row.startswith("| fedams_server | none | 0.999 |") for row in best)
