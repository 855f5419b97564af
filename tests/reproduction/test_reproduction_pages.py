"""The pages and figures of reproductions, and those that are committed."""

import itertools
import math
import re
import sys
from pathlib import Path

import pytest
from PIL import Image

from helpers import cells
from lamina import BadInput, algorithms
from lamina.experiment.config import Claim, load
from lamina.experiment.trials import claims, reproduction
from lamina.experiment.trials.pairs import Difference
from lamina.report.figures import described
from lamina.training.history import History
from lamina.training.metrics import DIAGNOSTICS

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "reproduction"))  # as a script there has it

import appendix  # noqa: E402
import figures  # noqa: E402
import page  # noqa: E402
import words  # noqa: E402
from record import labelled  # noqa: E402

import report  # noqa: E402

PAPERS = reproduction.papers()


def finding(text="it works", *, outcome="right", target=None, paper=None, values=None, rounds=0):
    """A claim that FedAvg is above Mime, with one pair."""
    kind = "order" if target is None else "rounds_to"
    claim = Claim(text=text, kind=kind, expect=["fedavg", "mime"], target=target, paper=paper or {})
    pair = claims.Pair("fedavg", "mime", outcome, Difference(0.012, 0.009, 3), "by a little")
    return claims.Finding(claim, values or {"fedavg": 0.5, "mime": 0.4}, [pair], rounds=rounds)


def test_a_claim_has_its_verdict_seeds_and_intervals():
    text = appendix.claim_tables(page.Result("mine", {}, {}), finding(paper={"fedavg": 51.5}))
    assert "### it works\n\n**reproduced** (3 seeds). Expected: FedAvg (Fed-SGD) > Mime." in text
    assert cells(text, "FedAvg (Fed-SGD)") == ["51.5", "50"]
    assert cells(text, "Mime") == ["–", "40"]
    assert cells(text, "FedAvg (Fed-SGD) / Mime") == ["+1.2 [+0.3, +2.1]", "right: by a little"]


def test_a_claim_about_rounds_has_the_first_touch_and_the_megabytes():
    rows = [{"round": r, "accuracy": 0.5, "bytes_down": 1.5e6, "bytes_up": 0.5e6} for r in (1, 2)]
    result = page.Result("mine", {}, {("as-given", "fedavg"): [History(rows)]})
    claim = finding(target=0.7, values={"fedavg": 30.0, "mime": math.inf}, rounds=50)
    claim.touches.update(fedavg=20.0, mime=45.0)
    text = appendix.claim_tables(result, claim)
    assert cells(text, "FedAvg (Fed-SGD)") == ["–", "30", "20", "60"]
    assert cells(text, "Mime") == ["–", "not within 50", "45", "–"]


@pytest.mark.parametrize(("variants", "folder"), [(["as-given"], "as-given"), (["as-given", "E=2"], "*")])
@pytest.mark.parametrize("runs", [3, 0])
def test_the_files_that_list_tuning_runs_are_named(runs, variants, folder):
    facts = {
        "runs": 10 + runs, "tuning_runs": runs, "rounds": [9], "tuning_rounds": [5], "select": "validation",
        "seconds": 7.0, "gpu": True, "diverged_runs": 0, "unfinished_runs": 0, "device": ["H200"],
        "precision": ["bf16"], "variants": {variant: {"every": 1} for variant in variants},
    }  # fmt: skip
    listed = f"listed in `reproduction/results/mine/{folder}/tuning.csv`"
    tuning = f"3 tuning runs of 5 rounds, on held-out training data ({listed})"
    expected = f"10 final runs of 9 rounds; {tuning if runs else 'no tuning runs'}; 7 GPU seconds; H200, bf16."
    assert appendix.cost(page.Result("mine", facts, {})) == expected
    without = expected.replace(f" ({listed})", "")
    assert appendix.cost(page.Result("mine", facts, {}, lists_tuning=False)) == without


def test_costs_are_in_multiples_of_fedavgs():
    """By hand: FedAvg sends 2 models a round and the paper counts 1; FedLADA sends 5 and the paper counts 2."""

    def run(accuracies, sent):
        return History(
            [{"round": r, "accuracy": a, "bytes_down": sent, "bytes_up": 0.0} for r, a in accuracies.items()]
        )

    histories = {
        ("as-given", "fedavg"): [run({1: 0.1, 2: 0.2, 3: 0.7, 4: 0.7}, 20.0)],
        ("as-given", "fedlada"): [run({1: 0.5, 2: 0.8}, 50.0)],
        ("short", "fedlada"): [run({1: 0.5}, 70.0)],
        ("as-given", "fedcm"): [History([])],
    }
    result = page.Result("mine", {}, histories)
    paper = {"fedavg": 94, "fedlada": 44.6}
    claim = finding(target=0.7, paper=paper, values={"fedavg": 3.0, "fedlada": 2.0})
    text = appendix.cost_to_target(result, claim)
    assert "The cost to reach 70 %" in text
    assert cells(text, "FedAvg (Fed-SGD)") == ["94", "1.00 ×", "3", "1.00 ×", "1.00 ×"]
    assert cells(text, "FedLADA") == ["44.6", "0.95 ×", "2", "1.33 ×", "1.67 ×"]  # 2*44.6/94, 2*2/3, 5*2/(2*3)

    paper = {"fedavg": 536.9, "fedlada": 186.4}
    never = finding(target=0.8, paper=paper, values={"fedavg": math.inf, "fedlada": 2.0}, rounds=4)
    text = appendix.cost_to_target(result, never)
    assert "FedAvg (Fed-SGD) does not reach it in 4 rounds." in text
    assert cells(text, "FedAvg (Fed-SGD)") == ["536.9", "1.00 ×", "not within 4", "–", "–"]
    assert cells(text, "FedLADA") == ["186.4", "0.69 ×", "2", "< 1.00 ×", "< 1.25 ×"]  # less than of 4 rounds
    nobody = finding(target=0.8, paper=paper, values={"fedavg": math.inf, "fedlada": math.inf})
    assert appendix.cost_to_target(result, nobody) == ""
    assert appendix.cost_to_target(result, finding(paper=paper, values={"fedavg": 3.0})) == ""
    assert appendix.cost_to_target(result, finding(target=0.7, values={"fedavg": 3.0})) == ""


def test_costs_of_what_is_not_finished_are_left_out():
    row = {"round": 1, "accuracy": 0.7, "bytes_down": 2.0, "bytes_up": 2.0}
    begun = {("as-given", "fedavg"): [History([row])], ("as-given", "fedcm"): [History([])]}
    paper = {"fedavg": 94, "fedcm": 71.5, "fedlada": 44.6}
    some = finding(target=0.7, paper=paper, values={"fedavg": 1.0, "fedcm": math.nan, "fedlada": math.nan})
    text = appendix.cost_to_target(page.Result("mine", {}, begun), some)
    assert cells(text, "FedAvg (Fed-SGD)") == ["94", "1.00 ×", "1", "1.00 ×", "1.00 ×"]
    assert "FedCM" not in text
    assert "FedLADA |" not in text
    none = finding(target=0.7, paper=paper, values=dict.fromkeys(paper, math.nan))
    assert appendix.cost_to_target(page.Result("mine", {}, begun), none) == ""
    assert appendix.cost_to_target(page.Result("mine", {}, {}), none) == ""


def test_claims_are_counted_by_whose_they_are():
    texts = {"lamb-a": ["one", "two (ours)"], "lada-b": ["the README's order", "one", "one"]}
    text = page.verdicts({preset: [finding(one) for one in of_preset] for preset, of_preset in texts.items()})
    assert cells(text, page.PAPERS["lamb-"]) == ["1", "1", "1", "0"]
    assert cells(text, page.PAPERS["lada-"]) == ["2", "1", "2", "0"]  # two claims with one text
    assert cells(text, words.README) == ["1", "1", "1", "0"]
    assert cells(text, words.OURS) == ["1", "1", "0", "1"]
    assert cells(text, "[`lada-b`](appendix/lada-b.md)") == ["2 reproduced", "1 reproduced", ""]
    assert cells(text, "[`lamb-a`](appendix/lamb-a.md)") == ["1 reproduced", "", "1 holds"]


def test_many_lines_are_drawn_in_two_rows_with_a_legend_each():
    history = History([{"round": 1, "accuracy": 0.5}, {"round": 2, "accuracy": 0.6}])
    names = list(algorithms.registry())
    lines = [("as-given", name) for name in names[:9]] + [("short", names[1]), ("long", names[1])]
    made = figures.figure(page.Result("mine", {"claims": []}, {line: [history] for line in lines}))
    rows = [[line.get_label() for line in part.axes[0].get_lines()] for part in made.subfigs]
    first = [labelled(name, "as-given") for name in names[:9]]
    assert rows == [first, [labelled(names[1], variant) for variant in ("as-given", "short", "long")]]
    assert [[text.get_text() for text in part.legends[0].get_texts()] for part in made.subfigs] == rows
    assert len(figures.figure(page.Result("mine", {"claims": []}, {lines[0]: [history]})).subfigs) == 1
    assert figures.rows_of([(f"v{i}", "fedavg") for i in range(12)]) == [[(f"v{i}", "fedavg") for i in range(12)]]


def figure_of(metrics, names, lacking=()):
    """Draw made-up runs with these metrics in every 10th round; `lacking` are pairs of method and missing metric."""
    histories = {
        ("as-given", name): [
            History(
                {"round": r, **{m: r / 100 for m in metrics if r % 10 == 0 and (name, m) not in lacking}}
                for r in range(1, 31)
            )
        ]
        for name in names
    }
    facts = {"claims": [{"metric": metric} for metric in metrics]}
    return figures.figure(page.Result("mine", facts, histories))


@pytest.mark.parametrize(
    ("count", "grid"), [(1, (1, 1)), (2, (1, 2)), (3, (1, 3)), (4, (2, 3)), (5, (2, 3)), (7, (3, 3))]
)
def test_more_than_three_panels_are_drawn_in_several_rows(count, grid):
    metrics = ["accuracy", *itertools.chain(*DIAGNOSTICS.values())][:count]
    picture = figure_of(metrics, ["fedavg"])
    (part,) = picture.subfigs
    assert [axes.get_ylabel() for axes in part.axes] == [described(metric).title for metric in metrics]
    places = [axes.get_subplotspec() for axes in part.axes]
    assert {place.get_gridspec().get_geometry() for place in places} == {grid}
    assert [place.num1 for place in places] == list(range(count))  # row by row; the unused cells are empty
    assert tuple(picture.get_size_inches()) == pytest.approx((5.6 * grid[1], 3.5 * grid[0] + 0.19))


def test_diagnostics_that_span_decades_have_a_logarithmic_axis():
    metrics = ["accuracy", "consistency", *itertools.chain(*DIAGNOSTICS.values())]
    (part,) = figure_of(metrics, ["fedavg"]).subfigs
    linear = [metric for metric, axes in zip(metrics, part.axes, strict=True) if axes.get_yscale() == "linear"]
    # A second moment may shrink, so its growth may be negative.
    assert linear == ["accuracy", "pseudo_gradient_cosine", "amendment_cosine", "second_moment_growth"]


def test_a_method_without_a_metric_is_still_in_the_legend():
    names, metrics = ["fedavg", "fedcm", "fedlada"], ["accuracy", "drift", "amendment_cosine"]
    (part,) = figure_of(metrics, names, lacking=[("fedavg", "amendment_cosine"), ("fedcm", "accuracy")]).subfigs
    fedavg, fedcm, fedlada = labels = [labelled(name, "as-given") for name in names]
    drawn = [[line.get_label() for line in axes.get_lines()] for axes in part.axes]
    assert drawn == [[fedavg, fedlada], labels, [fedcm, fedlada]]
    assert [text.get_text() for text in part.legends[0].get_texts()] == labels


@pytest.mark.parametrize("name", PAPERS)
def test_no_two_lines_of_a_figure_look_the_same(name):
    needed = claims.needed(load(PAPERS[name]))
    lines = [(variant or "as-given", algorithm) for variant, names in needed.items() for algorithm in names]
    different = len(figures.COLOURS) * len(figures.DASHES)
    rows = figures.rows_of(lines)
    assert {line for row in rows for line in row} == set(lines)
    for row in rows:
        looks = figures.line_looks(row)
        assert len({look % different for look in looks.values()}) == len(row)
    given = [line for line in rows[-1] if line[0] == "as-given"]  # has its method's colour in every row
    if len(rows) == 2:
        assert all(figures.line_looks(rows[1])[line] == figures.COLOUR[line[1]] for line in given)


def test_many_rounds_are_drawn_as_means():
    history = History([{"round": r, "accuracy": float(r)} for r in range(1, 8)])
    made = figures.averaged(history, "accuracy", 3)
    assert len(made) == 7
    assert {row["round"]: row["accuracy"] for row in made if "accuracy" in row} == {3: 2.0, 6: 5.0}


def test_what_the_notes_point_to_was_run():
    notes = page.read_notes(ROOT / "reproduction" / "notes.toml")
    run = {result.name for result in page.read_results(ROOT / "reproduction" / "results")}
    texts = [line for lines in notes["notes"].values() for line in lines]
    named = {name for text in texts for name in re.findall(r"`([\w-]+)`", text) if name in PAPERS}
    assert len(named) > 5
    assert named <= run


@pytest.mark.parametrize(
    ("outcome", "paper", "ours"),
    [("right", "reproduced", "holds"), ("wrong", "not reproduced", "does not hold"), ("tie", "tie", "tie")],
)
def test_what_no_paper_claims_is_not_called_reproduced(outcome, paper, ours):
    assert words.verdict(finding(outcome=outcome)) == paper
    assert words.verdict(finding("it works (ours)", outcome=outcome)) == ours


@pytest.mark.parametrize("value", [math.inf, 0.123456, 7, 598.0, math.nan, None])
def test_numbers_as_text(value):
    assert words.number(value) == {0.123456: "0.1235", 7: "7", 598.0: "598", math.inf: "never"}.get(value, "–")


CENTRAL = """
[[claim]]
title = "it works"
text = "It works on both."
paper = "above"
[[claim.rows]]
panel = "MNIST"
preset = "mine"
claim = "one"
pairs = ["fedavg / mime"]
[[claim.rows]]
panel = "Fashion-MNIST"
preset = "mine"
claim = "two"
pairs = ["fedavg / mime"]

[[claim]]
title = "by hand"
text = "It is linear."
verdict = "not reproduced"
[[claim.rows]]
panel = "slope"
paper = "-1"
ours = "-0.5"
outcome = "wrong"
"""


@pytest.mark.parametrize(("second", "verdict"), [("right", "reproduced"), ("tie", "partly"), ("wrong", "partly")])
def test_a_central_claim_is_judged_by_its_pairs(tmp_path, second, verdict):
    (tmp_path / "central.toml").write_text(CENTRAL)
    findings = {"mine": [finding("one"), finding("two", outcome=second, paper={"fedavg": 51.5, "mime": 50})]}
    central = report.read_central(findings, tmp_path / "central.toml")
    assert [one.verdict for one in central] == [verdict, "not reproduced"]
    table = report.results_table(central)
    assert cells(table, "**1**") == ["**it works**", "", "", f"**{verdict}**"]
    ours = "+1.2 [+0.3, +2.1] points, n = 3"
    assert cells(table, "", "MNIST: FedAvg (Fed-SGD) / Mime") == ["above", ours, "right: by a little"]
    assert cells(table, "", "Fashion-MNIST: FedAvg (Fed-SGD) / Mime") == ["+1.5", ours, f"{second}: by a little"]
    assert cells(table, "", "slope") == ["-1", "-0.5", "wrong"]
    (accuracies, rounds) = report.forest_plot(central).axes
    assert len(accuracies.get_yticks()) == 2
    assert len(rounds.get_yticks()) == 0
    (tmp_path / "report.md").write_text(f"{report.CLAIMS}\n{report.RESULTS}\n")
    text = report.report(central, tmp_path / "report.md")
    assert text == f"1. It works on both.\n2. It is linear.\n{table}\n"


def test_a_central_claim_that_no_preset_has_is_refused(tmp_path):
    (tmp_path / "central.toml").write_text(CENTRAL)
    with pytest.raises(BadInput, match=r"mine has no pairs .* of a claim 'two'"):
        report.read_central({"mine": [finding("one")]}, tmp_path / "central.toml")


@pytest.mark.parametrize(
    ("claim", "paper"),
    [
        (finding(paper={"fedavg": 51.5, "mime": 50}), "+1.5"),
        (finding(target=0.7, paper={"fedavg": 5, "mime": 20}), "+15"),
        (finding(target=0.7, paper={"fedavg": 5, "mime": math.inf}), "never"),
        (finding(paper={"fedavg": 51.5}), ""),
    ],
)
def test_the_papers_difference(claim, paper):
    assert report.papers_lead(claim.claim, claim.pairs[0]) == paper


# --- what is committed -------------------------------------------------------------------------------------------


@pytest.mark.long  # it concerns only who changes the committed results
def test_the_committed_pages_are_made_from_the_committed_results():
    results = page.read_results(ROOT / "reproduction" / "results")
    if not results:
        pytest.skip("nothing has been collected yet")
    pages = page.make(results, PAPERS, page.read_notes(ROOT / "reproduction" / "notes.toml"))
    elsewhere = {
        "speed-up.md",
        "toy.md",
        "adaptive.md",
        "frontier.md",
    }  # tested beside what makes them
    there = {str(file.relative_to(page.PAGES)) for file in page.PAGES.rglob("*.md")}
    central = report.read_central({one.name: page.findings_of(one, PAPERS) for one in results})
    pages["report.md"] = report.report(central)
    assert there == {*pages, *elsewhere}
    for name, text in pages.items():
        assert (page.PAGES / name).read_text(encoding="utf-8") == text, "run python reproduction/page.py"
    folder = page.PAGES / "figures"
    shown = [one for one in results if figures.drawn(one)]
    assert {file.stem for file in folder.glob("*.png")} == {"report", *(one.name for one in shown)}
    for one in shown:
        with Image.open(folder / f"{one.name}.png") as image:
            assert image.info[figures.DRAWN_FROM] == one.digest, f"{one.name}.png: run python reproduction/page.py"
    with Image.open(folder / "report.png") as image:
        assert image.info[figures.DRAWN_FROM] == report.digest(central), "run python reproduction/page.py"
    assert all(file.stat().st_size < 120_000 for file in folder.glob("*.png"))  # the largest, of four panels: 90 kB
