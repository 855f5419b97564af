"""The comparison of locally adaptive methods: its table says what the records say."""

import csv
import dataclasses
import doctest
import re
import statistics
import sys
from pathlib import Path

import pytest
from PIL import Image

from helpers import cells
from lamina import algorithms
from lamina.experiment.config import load
from lamina.experiment.trials import reproduction
from lamina.experiment.trials.compare import points_of

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "reproduction"))  # as a script there has it

import adaptive  # noqa: E402
import figures  # noqa: E402
import page  # noqa: E402
import record  # noqa: E402
from words import named  # noqa: E402

PAPERS = reproduction.papers()
RESULTS = ROOT / "reproduction" / "results"
T_QUANTILE_9 = 2.262  # of Student's t, 97.5 %, nine degrees of freedom


def test_the_examples_are_right():
    assert doctest.testmod(adaptive).failed == 0


@pytest.mark.parametrize("name", adaptive.TITLES)
def test_all_methods_of_a_panel_have_as_many_candidates(name):
    experiment = load(PAPERS[name])
    assert {len(points_of(experiment, method)) for method in experiment.compare.algorithms} == {14}
    assert experiment.compare.select == "validation"
    assert experiment.compare.seeds >= 3


def test_all_presets_of_the_comparison_have_a_title():
    assert set(adaptive.TITLES) == {name for name in PAPERS if name.startswith(adaptive.PANEL)}


@pytest.fixture(scope="module")
def digits():
    return record.read_result(RESULTS / "adaptive-2026")


def panel_of(result):
    """Return the part of the page below the part of all panels."""
    return adaptive.page([result], {result.name: page.findings_of(result, PAPERS)}).split("end of front page")[1]


def by_hand(column, name):
    """The values of a column in the record, by seed and round."""
    with (RESULTS / "adaptive-2026" / "as-given" / "rounds.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["algorithm"] == name and row[column]]
    seeds = dict.fromkeys(row["seed"] for row in rows)
    return [{int(row["round"]): float(row[column]) for row in rows if row["seed"] == seed} for seed in seeds]


def test_the_table_has_means_of_the_last_ten_rounds_and_paired_differences(digits):
    text = panel_of(digits)
    last_ten = {
        name: [100 * statistics.fmean(seed[number] for number in range(51, 61)) for seed in by_hand("accuracy", name)]
        for name in ("fedavg", "fedams")
    }
    differences = [a - b for a, b in zip(last_ten["fedams"], last_ten["fedavg"], strict=True)]
    lead = statistics.fmean(differences)
    margin = T_QUANTILE_9 * statistics.stdev(differences) / len(differences) ** 0.5
    row = cells(text, "Fed-AMS")
    assert row[0] == f"{statistics.fmean(last_ten['fedams']):.1f} ± {statistics.stdev(last_ten['fedams']):.1f}"
    assert row[1] == f"{lead:+.2f} [{lead - margin:+.2f}, {lead + margin:+.2f}]"


def test_the_table_of_all_panels_has_the_same_differences_and_marks_what_is_above(digits):
    text = adaptive.page([digits], {digits.name: page.findings_of(digits, PAPERS)})
    overview, panel = text.split("<!-- end of front page -->")
    for row in adaptive.rows_of(digits, page.findings_of(digits, PAPERS)):
        if row.pair:
            shown = cells(panel, named(row.name))[1]
            is_above = float(re.search(r"\[(\S+),", shown)[1]) > 0
            assert cells(overview, named(row.name)) == [f"**{shown}**" if is_above else shown]
    assert overview.index("| Fed-AMS") < overview.index("| FedSPS") < overview.index("| LocalAdam")


def test_the_cost_to_the_target_is_the_rounds_times_a_round(digits):
    text = panel_of(digits)
    # By hand: FedAvg's 4,810 parameters of 4 bytes go to and come from ten clients in every round.
    rounds, megabytes, seconds = map(float, cells(text, "FedAvg (Fed-SGD)")[2:])
    assert megabytes == pytest.approx(rounds * 2 * 10 * 4 * 4810 / 1e6, rel=5e-3)
    per_round = statistics.fmean(seed[60] / 60 for seed in by_hand("clock_seconds", "fedavg"))
    assert seconds == pytest.approx(rounds * per_round, rel=5e-3)


@pytest.mark.parametrize("name", adaptive.TITLES)
def test_the_page_says_which_methods_have_weight_decay(name):
    """Only FedAvg's is tuned; the others have the default that the page gives for them."""
    experiment = load(PAPERS[name])
    compare = experiment.compare
    tuned = [method for method in compare.algorithms if "decay" in points_of(experiment, method)[0]]
    assert tuned == [adaptive.BASELINE]
    text = " ".join(adaptive.GRIDS.split())
    listing = re.search(r"default: 0\.01 for (.*), 0\.1 for (.*), and none for the rest", text)
    titles = {0.01: set(re.split(", | and ", listing[1])), 0.1: {listing[2]}}
    for method in compare.algorithms:
        if method != adaptive.BASELINE:
            decay = algorithms.create(method, **compare.options.get(method, {})).decay
            title = algorithms.find(method).card.title
            assert [value for value, named in titles.items() if title in named] == ([decay] if decay else []), method


def test_the_page_shows_the_order_on_the_data_that_chose_the_settings(digits):
    """One seed: the best candidate of each method, which is not the order of the table."""
    text = adaptive.page([digits], {digits.name: page.findings_of(digits, PAPERS)})
    with (RESULTS / "adaptive-2026" / "as-given" / "tuning.csv").open(newline="") as file:
        best = {row["algorithm"]: float(row["final_validation_accuracy"]) for row in csv.DictReader(file)
                if row["chosen"] == "True"}  # fmt: skip
    first = max(best, key=best.get)
    assert first == "fedlada_lamb"
    assert f"the order is different (accuracy in %): FedLADA-LAMB {100 * best[first]:.1f}, Local AdamW" in text
    assert f"FedAvg (Fed-SGD) {100 * best['fedavg']:.1f}" in text
    assert "We first ran five seeds, then ten. Intervals that barely exclude 0: FedMuon, FedLADA-LAMB, FedLADA." in text


def test_an_order_that_agrees_is_not_mentioned(digits):
    rows = adaptive.rows_of(digits, page.findings_of(digits, PAPERS))
    agreeing = {("as-given", row.name): 1 - number / 100 for number, row in enumerate(rows)}
    assert adaptive.held_out_order(dataclasses.replace(digits, held_out=agreeing), rows) == ""


def test_a_panel_that_was_not_run_is_named(digits):
    text = adaptive.page([digits], {digits.name: page.findings_of(digits, PAPERS)})
    assert "`adaptive-2026-cifar100-skewed`" in text.split("Not run yet:")[1]
    assert "`adaptive-2026`" not in text.split("Not run yet:")[1]


def test_the_committed_page_and_picture_are_made_from_the_records():
    results = [record.read_result(path.parent) for path in RESULTS.glob(f"{adaptive.PANEL}*/facts.json")]
    findings = {one.name: page.findings_of(one, PAPERS) for one in adaptive.panels(results)}
    committed = page.PAGES / "adaptive.md"
    assert committed.read_text(encoding="utf-8") == adaptive.page(results, findings), "run python reproduction/page.py"
    picture = Image.open(page.PAGES / adaptive.PICTURE)
    assert picture.info[figures.DRAWN_FROM] == adaptive.digest(results), "run python reproduction/page.py"


def test_a_figure_of_many_methods_gives_each_a_look_of_its_own(digits):
    looks = figures.line_looks(list(digits.histories))
    assert len(set(looks.values())) == len(looks) == 17
