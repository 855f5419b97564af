"""The record of reproductions: it says what the runs say, hides nothing, and the page is made from it."""

import csv
import doctest
import hashlib
import io
import json
import math
import re
import shutil
import statistics
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from PIL import Image

import helpers
from helpers import cells
from lamina import BadInput
from lamina.channel.channel import OPEN
from lamina.data.readers import sources
from lamina.experiment.build import build_algorithm, resolved, settings_of
from lamina.experiment.config import load
from lamina.experiment.trials import claims, reproduction
from lamina.experiment.trials.compare import with_algorithm
from lamina.rounds.clock import as_clock
from lamina.storage.files import as_json

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "reproduction"))  # as a script there has it

import appendix  # noqa: E402
import collect  # noqa: E402
import figures  # noqa: E402
import join  # noqa: E402
import page  # noqa: E402
import record  # noqa: E402
import words  # noqa: E402

import report  # noqa: E402

PAPERS = reproduction.papers()
TOML = """# Somebody 2020, Table 1: digits, after a * and a |.
# Protocol: none.

[data]
name = "digits"
clients = 8

[model]
name = "mlp"
hidden = 8

[train]
rounds = 4

[compare]
algorithms = ["fedavg", "fedlamb"]
seeds = 2

[compare.grid]
fedavg.lr = [0.05, 0.2]
fedlamb.lr = [0.03]

[[claim]]
text = "FedAvg is better, the more so the longer"
kind = "order"
expect = ["fedavg", ["fedlamb", "fedlamb@short"]]
within = 2
paper = { fedavg = 99.5, fedlamb = 98, "fedlamb@short" = 97.25 }
[claim.variants]
short = ["train.rounds=2"]

[[claim]]
text = "neither gets there"
kind = "rounds_to"
expect = ["fedavg", "fedlamb"]
target = 0.999
paper = { fedavg = 7, fedlamb = inf }

[[claim]]
text = "Fed-LAMB's clients stay closer"
kind = "order"
expect = ["fedlamb", "fedavg"]
metric = "consistency"
at = "last"
lower_is_better = true
"""
NOTES = {
    "session": [{"date": "2020-01-01", "machine": "a desk", "seconds": 7, "what": "digits"}],
    "notes": {"mine": ["It is only digits."], "other": ["No data."]},
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A finished reproduction, a small one and one with other settings, in folders of runs."""
    folder = tmp_path_factory.mktemp("reproduction")
    (folder / "mine.toml").write_text(TOML)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources, "SOURCES", dict(sources.SOURCES))  # the small version enters one
        helpers.skip_pictures(patch)
        for name, *options in (
            ("full",),
            ("small", "--scale", "small"),
            ("changed", "--set", "compare.seeds=1", "--set", "compare.grid.fedavg.lr=[0.1]", "--set", "train.clip=5.0"),
        ):
            out = str(folder / name / "mine")
            assert helpers.call("reproduce", str(folder / "mine.toml"), *options, "--out", out, "--quiet") == 0
    return folder


@pytest.fixture
def presets(runs):
    return {"mine": runs / "mine.toml", "other": runs / "mine.toml"}


def collected(runs, presets, tmp_path):
    """The facts of the only reproduction in a folder, and the text of the pages made from it."""
    said = collect.collect(runs, tmp_path / "results", presets)
    results = page.read_results(tmp_path / "results")
    facts = json.loads((tmp_path / "results" / "mine" / "facts.json").read_text())
    return said, facts, "\n".join(page.make(results, presets, NOTES).values())


def verdict_of(text, claim):
    """The verdict on a claim, given by the start of its text."""
    return re.search(rf"### {claim}.*\n\n\*\*(.*?)\*\*", text).group(1)


def metrics(folder):
    """A run's rounds, read by hand."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def mean_and_std(numbers):
    numbers = list(numbers)
    return f"{statistics.fmean(numbers):.1f} ± {statistics.stdev(numbers):.1f}"


# --- a finished reproduction -------------------------------------------------------------------------------------


def records_by_method(runs, presets, tmp_path):
    """The record of all runs, and one of each method's, as if each had run on a machine of its own."""
    collect.collect(runs / "full", tmp_path / "whole", presets)
    methods = {"fedavg": "fedlamb", "fedlamb": "fedavg"}
    for name, other in methods.items():
        shutil.copytree(runs / "full", tmp_path / name / "runs")
        for path in [*(tmp_path / name).rglob(other)]:
            shutil.rmtree(path)
        for path in (tmp_path / name).rglob("tuning.csv"):
            rows = path.read_text().splitlines()
            path.write_text("\n".join(row for row in rows if not row.startswith(f"{other},")) + "\n")
        for path in (tmp_path / name).rglob("as-given/config.json"):
            config = json.loads(path.read_text())
            config["compare"]["algorithms"], config["algorithms"] = [name], {name: config["algorithms"][name]}
            path.write_text(json.dumps(config))
        collect.collect(tmp_path / name / "runs", tmp_path / name, presets)
    return tmp_path / "whole" / "mine", [tmp_path / name / "mine" for name in methods]


def facts_of(record):
    return json.loads((record / "facts.json").read_text())


@pytest.mark.long
def test_records_of_several_machines_are_joined(runs, presets, tmp_path):
    whole, parts = records_by_method(runs, presets, tmp_path)
    into = tmp_path / "both" / "mine"
    into.parent.mkdir()
    for _ in range(2):  # again, after one that was interrupted, perhaps
        join.join(parts, into, presets["mine"])
    joined, expected = facts_of(into), facts_of(whole)
    assert joined["missing"] == [join.NO_CLAIMS]
    assert not joined["complete"]
    for one, other in zip(joined["claims"], expected["claims"], strict=True):
        here = {label: float(value) for label, value in other.pop("here").items()}
        assert {label: float(value) for label, value in one.pop("here").items()} == pytest.approx(here, rel=1e-4)
        assert one == other
    for key in ("runs", "tuning_runs", "device", "torch", "rounds", "tuning_rounds"):
        assert joined[key] == expected[key]
    assert joined["seconds"] == pytest.approx(expected["seconds"], abs=0.2)
    for variant, known in expected["variants"].items():
        assert joined["variants"][variant]["methods"] == known["methods"]
        for table in ("rounds.csv", "tuning.csv"):
            tables = [
                sorted(csv.DictReader(io.StringIO(path.read_text())), key=str) if path.exists() else []
                for path in (record / variant / table for record in (into, whole))
            ]
            assert tables[0] == tables[1]
    configs = [json.loads((record / "as-given" / "config.json").read_text()) for record in (into, whole)]
    assert configs[0]["algorithms"] == configs[1]["algorithms"]
    assert configs[0]["compare"]["algorithms"] == ["fedavg", "fedlamb"]


@pytest.mark.long
def test_a_joined_record_says_what_is_missing(runs, presets, tmp_path):
    _, (fedavg, fedlamb) = records_by_method(runs, presets, tmp_path)
    lines = [f"as-given: fedlamb, seed {seed}: not begun" for seed in (0, 1)]
    (fedavg / "facts.json").write_text(json.dumps(facts_of(fedavg) | {"missing": list(lines)}))
    lines[1] = "as-given: fedlamb, seed 1: 3 of 4 rounds"  # begun on the other machine
    facts = facts_of(fedlamb) | {"missing": lines}
    del facts["variants"]["as-given"]["methods"]["fedlamb"]
    (fedlamb / "facts.json").write_text(json.dumps(facts))
    join.join([fedavg, fedlamb], tmp_path / "mine", presets["mine"])
    assert facts_of(tmp_path / "mine")["missing"] == lines


@pytest.mark.long
def test_what_cannot_be_joined_is_refused_and_changes_nothing(runs, presets, tmp_path):
    whole, (fedavg, _) = records_by_method(runs, presets, tmp_path)
    collect.collect(runs / "changed", tmp_path / "changed", presets)
    before = {path: path.read_bytes() for path in whole.rglob("*") if path.is_file()}
    with pytest.raises(ValueError, match="have other settings"):
        join.join([whole, tmp_path / "changed" / "mine"], whole, presets["mine"])
    with pytest.raises(ValueError, match="several records have fedavg: "):
        join.join([whole, fedavg], whole, presets["mine"])
    assert {path: path.read_bytes() for path in whole.rglob("*") if path.is_file()} == before


@pytest.mark.long
def test_the_record_has_every_round_seconds_and_verdicts(runs, presets, tmp_path):
    said, facts, _ = collected(runs / "full", presets, tmp_path)
    assert said == ["mine: complete"]
    raw, kept = runs / "full" / "mine", tmp_path / "results" / "mine"
    assert (kept / "claims.json").read_bytes() == (raw / "claims.json").read_bytes()
    every = [row for file in raw.rglob("metrics.jsonl") for row in metrics(file.parent)]
    assert facts["seconds"] == pytest.approx(sum(row["seconds"] + row["evaluation_seconds"] for row in every), abs=0.06)
    assert (facts["runs"], facts["tuning_runs"], facts["diverged_runs"], facts["unfinished_runs"]) == (8, 2, 0, 0)
    assert (facts["complete"], facts["missing"], facts["sets"], facts["scale"]) == (True, [], {}, "full")
    assert (facts["rounds"], facts["torch"], facts["precision"]) == ([4, 2], [torch.__version__], ["fp32"])
    assert facts["gpu"] is False
    for variant, seeds in (("as-given", ["fedavg", "fedlamb"]), ("short", ["fedlamb"])):
        with (kept / variant / "rounds.csv").open() as file:
            rows = list(csv.DictReader(file))
        finals = [(name, seed, raw / variant / name / f"seed{seed}") for name in seeds for seed in (0, 1)]
        expected = [(name, seed, row) for name, seed, run in finals for row in metrics(run)]
        assert [(row["algorithm"], int(row["seed"]), int(row["round"])) for row in rows] == [
            (name, seed, row["round"]) for name, seed, row in expected
        ]
        for row, (_, _, measured) in zip(rows, expected, strict=True):
            asked = collect.COLUMNS[: collect.COLUMNS.index("client_accuracy")]  # nobody asked for the columns after it
            assert list(row)[3:] == ["round", *asked]
            for column in asked:
                assert float(row[column]) == pytest.approx(measured[column], rel=1e-4)
        tried, own = ((folder / variant / "tuning.csv").read_text() for folder in (raw, kept))
        assert own == tried
    stored = json.loads((raw / "claims.json").read_text())["claims"]
    for ours, theirs in zip(facts["claims"], stored, strict=True):
        assert (ours["text"], ours["verdict"], ours["paper"]) == (theirs["text"], theirs["verdict"], theirs["paper"])
    assert facts["claims"][1]["here"] == {"fedavg": "inf", "fedlamb": "inf"}


def test_the_page_says_what_the_runs_say(runs, presets, tmp_path):
    _, facts, text = collected(runs / "full", presets, tmp_path)
    raw = runs / "full" / "mine"
    early, last = {}, {}
    for variant, name, label in (
        ("as-given", "fedavg", "FedAvg (Fed-SGD)"),
        ("as-given", "fedlamb", "Fed-LAMB"),
        ("short", "fedlamb", "Fed-LAMB short"),
    ):
        seeds = [metrics(raw / variant / name / f"seed{seed}") for seed in (0, 1)]
        accuracies = [[100 * row["accuracy"] for row in seed] for seed in seeds]
        row = cells(text, label)
        lately = mean_and_std([statistics.fmean(seed[-10:]) for seed in accuracies])
        ended = mean_and_std([seed[-1] for seed in accuracies])
        assert row[1:5] == ["2", mean_and_std(map(max, accuracies)), lately, ended]
        early[label] = [statistics.fmean(seed[:2]) for seed in accuracies]
        last[label] = statistics.fmean(seed[-1]["consistency"] for seed in seeds)
        assert float(row[5].split(" ± ")[0]) == pytest.approx(last[label], rel=5e-3)  # a claim is about it
    tuned = {
        rate: max(row["accuracy"] for row in metrics(raw / f"as-given/tuning/fedavg/lr{rate}")) for rate in (0.05, 0.2)
    }
    chosen = max(tuned, key=tuned.get)
    assert cells(text, "FedAvg (Fed-SGD)")[0] == f"lr {chosen:g} ({'largest' if chosen == 0.2 else 'smallest'} tried)"
    leads = [[a - b for a, b in zip(early["FedAvg (Fed-SGD)"], early[other], strict=True)] for other in list(early)[1:]]
    margins = [12.706 * statistics.stdev(lead) / math.sqrt(2) for lead in leads]
    pairs = [statistics.fmean(lead) > margin for lead, margin in zip(leads, margins, strict=True)]
    word = "reproduced" if all(pairs) else "partly" if any(pairs) else "tie"
    assert verdict_of(text, "FedAvg is better, the more so the longer") == word
    claim = text[text.index("### FedAvg is better") :]
    for label, seeds in early.items():
        paper, ours = cells(claim, label)
        assert paper == {"FedAvg (Fed-SGD)": "99.5", "Fed-LAMB": "98", "Fed-LAMB short": "97.25"}[label]
        assert float(ours) == pytest.approx(statistics.fmean(seeds), rel=1e-3)
    for lead, margin, other in zip(leads, margins, list(early)[1:], strict=True):
        numbers = re.findall(r"[+-][\d.e-]+", cells(claim, f"FedAvg (Fed-SGD) / {other}")[0])
        mean = statistics.fmean(lead)
        assert [*map(float, numbers)] == pytest.approx([mean, mean - margin, mean + margin], rel=1e-2, abs=1e-2)
    assert verdict_of(text, "neither gets there") == "tie"
    claim = text[text.index("### neither gets there") :]
    assert cells(claim, "FedAvg (Fed-SGD)") == ["7", "not within 4", "not within 4", "–"]
    found = [verdict_of(text, start) for start in ("FedAvg is better", "neither gets there", "Fed-LAMB's clients")]
    counts = ", ".join(f"{found.count(one)} {one}" for one in words.counted() if one in found)
    assert cells(text, "[`mine`](appendix/mine.md)") == [counts, "", ""]
    row = cells(text, "Other experiments")
    assert row[:2] == ["3", "3"]
    assert sorted(map(int, row[2:])) == sorted(found.count(one) for one in set(found))
    assert f"{facts['seconds']:,.0f} CPU seconds" in text
    listed = "(listed in `reproduction/results/mine/*/tuning.csv`)"
    assert f"6 final runs of 4 or 2 rounds; 2 tuning runs of 4 rounds, on held-out training data {listed}; " in text
    assert "```sh\nlamina reproduce mine\n```" in text
    assert "Somebody 2020, Table 1: digits, after a \\* and a \\|. Protocol: none." in text
    assert "## Notes\n\nIt is only digits.\n" in text
    assert "| 2020-01-01 | a desk | 7 | digits |" in text
    assert "## Not run\n\n- `other`: No data.\n" in text


def test_the_record_of_a_claim_has_the_pairs_that_are_not_right():
    claim = load(next(iter(PAPERS.values()))).claim[0]
    pairs = [
        claims.Pair("a", "b", "right"),
        claims.Pair("a", "c", "right", remark="holds by less than the interval"),
        claims.Pair("b", "a", "tie"),
    ]
    told = collect.claim_facts(claims.Finding(claim, {"a": 1.0, "b": 0.5}, pairs), small=False)
    assert (told["wrong"], told["weak"], told["verdict"]) == ([["b", "a"]], [["a", "c"]], "partly")


def test_verdicts_are_recomputed_from_the_record(runs, presets, tmp_path):
    _, facts, _ = collected(runs / "full", presets, tmp_path)
    (result,) = page.read_results(tmp_path / "results")
    findings = record.judged(result, presets["mine"])
    assert [finding.verdict for finding in findings] == [claim["verdict"] for claim in facts["claims"]]
    stored = json.loads((runs / "full/mine/claims.json").read_text())["claims"]
    for finding, written in zip(findings, stored, strict=True):
        for pair, kept in zip(finding.pairs, written["pairs"], strict=True):
            assert pair.outcome == kept["outcome"]
            assert pair.lead.mean == pytest.approx(kept["lead"], rel=1e-3, abs=1e-4)


def test_claims_of_today_are_checked_against_the_record(runs, presets, tmp_path):
    collected(runs / "full", presets, tmp_path)
    (result,) = page.read_results(tmp_path / "results")
    changed = TOML.replace("target = 0.999", "target = 0.01").replace(
        '["fedavg", "fedlamb"]\ntarget', '["fedavg", "fedlamb@x"]\ntarget'
    )
    (tmp_path / "mine.toml").write_text(changed.replace("inf }", "inf }\nvariants = { x = [] }"))
    findings = record.judged(result, tmp_path / "mine.toml")
    assert findings[1].verdict == "not run"  # the record has no variant x
    assert findings[1].values["fedavg"] == 1.0


def test_a_run_that_diverged_is_known_from_the_record(runs, presets, tmp_path):
    shutil.copytree(runs / "full", tmp_path / "runs")
    lost = tmp_path / "runs/mine/as-given/fedlamb/seed0"
    (lost / "diverged.json").write_text('{"message": "round 5: a NaN"}')
    (lost / "metrics.jsonl").write_text("\n".join((lost / "metrics.jsonl").read_text().splitlines()[:3]) + "\n")
    collected(tmp_path / "runs", presets, tmp_path)
    (result,) = page.read_results(tmp_path / "results")
    reached, closer = record.judged(result, presets["mine"])[1:]
    assert (reached.verdict, reached.pairs[0].remark) == ("not comparable", "fedlamb diverged in 1 of 2 seeds")
    assert (closer.verdict, closer.pairs[0].remark) == ("not reproduced", "fedlamb diverged in 1 of 2 seeds")


def test_figures_are_small_and_follow_the_results(runs, presets, tmp_path):
    collected(runs / "full", presets, tmp_path)
    (tmp_path / "gone.png").touch()
    files = figures.save_figures(page.read_results(tmp_path / "results"), tmp_path)
    assert [file.name for file in files] == [file.name for file in tmp_path.glob("*.png")] == ["mine.png"]
    first = files[0].read_bytes()
    assert len(first) < 80_000
    rounds = [tmp_path / "results" / "mine" / variant / "rounds.csv" for variant in ("as-given", "short")]
    digest = hashlib.sha256(b"".join(file.read_bytes() for file in rounds)).hexdigest()
    with Image.open(files[0]) as image:
        assert image.info[figures.DRAWN_FROM] == digest
    figures.save_figures(page.read_results(tmp_path / "results"), tmp_path)
    assert files[0].read_bytes() == first


def test_a_long_comparison_keeps_every_accuracy_but_fewer_of_the_other_values(runs, presets, tmp_path, monkeypatch):
    monkeypatch.setattr(collect, "LARGE", 700)
    monkeypatch.setattr(collect, "LAST_ROUNDS", 1)
    collected(runs / "full", presets, tmp_path)
    (result,) = page.read_results(tmp_path / "results")
    for seed, history in enumerate(result.histories["as-given", "fedavg"]):
        measured = [row["accuracy"] for row in metrics(runs / f"full/mine/as-given/fedavg/seed{seed}")]
        assert history.column("accuracy") == pytest.approx(measured, rel=1e-3)
        assert any(math.isnan(value) for value in history.column("loss"))


def test_a_long_comparison_keeps_fewer_rounds_but_the_best_and_the_last(runs, presets, tmp_path, monkeypatch):
    monkeypatch.setattr(collect, "LARGE", 700)
    monkeypatch.setattr(collect, "LAST_ROUNDS", 2)
    monkeypatch.setattr(appendix, "LAST_ROUNDS", 2)
    monkeypatch.setattr("lamina.training.history.LAST_ROUNDS", 2)
    _, facts, text = collected(runs / "full", presets, tmp_path)
    every = facts["variants"]["as-given"]["every"]
    assert every > 1
    assert (tmp_path / "results/mine/as-given/rounds.csv").stat().st_size < 1200
    assert f"keeps one round in {every}, the best and the last 2." in text
    seeds = [metrics(runs / f"full/mine/as-given/fedavg/seed{seed}") for seed in (0, 1)]
    accuracies = [[100 * row["accuracy"] for row in seed] for seed in seeds]
    row = cells(text, "FedAvg (Fed-SGD)")
    assert (row[2], row[4]) == (mean_and_std(map(max, accuracies)), mean_and_std([seed[-1] for seed in accuracies]))
    assert row[3] == mean_and_std([(seed[-2] + seed[-1]) / 2 for seed in accuracies])


def test_a_long_comparison_keeps_all_evaluations(tmp_path, monkeypatch):
    (tmp_path / "mine.toml").write_text(TOML)
    helpers.skip_pictures(monkeypatch)
    sparse = ["--set", "run.evaluate_every=3", "--set", "train.rounds=11", "--out", str(tmp_path / "runs/mine")]
    assert helpers.call("reproduce", str(tmp_path / "mine.toml"), *sparse, "--quiet") == 0
    monkeypatch.setattr(collect, "LARGE", 1500)
    monkeypatch.setattr(collect, "LAST_ROUNDS", 1)
    collect.collect(tmp_path / "runs", tmp_path / "results", {"mine": tmp_path / "mine.toml"})
    (result,) = page.read_results(tmp_path / "results")
    assert result.facts["variants"]["as-given"]["every"] == 3
    for name in ("fedavg", "fedlamb"):
        for history in result.histories["as-given", name]:
            evaluated = [row["round"] for row in history if not math.isnan(row.get("accuracy", math.nan))]
            assert evaluated == [3, 6, 9, 11]


# --- others ------------------------------------------------------------------------------------------------------


def test_what_is_not_finished_says_so(runs, presets, tmp_path):
    shutil.copytree(runs / "full", tmp_path / "runs")
    raw = tmp_path / "runs" / "mine"
    (raw / "claims.json").unlink()
    shutil.rmtree(raw / "short")
    file = raw / "as-given" / "fedlamb" / "seed1" / "metrics.jsonl"
    file.write_text("\n".join(file.read_text().split("\n")[:3]) + "\n")
    said, facts, text = collected(tmp_path / "runs", presets, tmp_path)
    missing = ["as-given: fedlamb, seed 1: 3 of 4 rounds", "short was not begun"]
    assert said == ["mine: " + "; ".join(missing)]
    assert (facts["complete"], facts["missing"], facts["unfinished_runs"]) == (False, missing, 1)
    assert not (tmp_path / "results/mine/claims.json").exists()
    assert {claim["verdict"] for claim in facts["claims"]} == {"not run"}
    assert "**Not finished.** Missing: as-given: fedlamb, seed 1: 3 of 4 rounds; short was not begun." in text
    assert cells(text, "not finished") == ["[`mine`](appendix/mine.md)"]
    assert cells(text, "Fed-LAMB")[1] == "1"  # the seed that has ended
    assert verdict_of(text, "neither gets there") == "not run"
    there = text[text.index("### neither gets there") :]
    assert cells(there, "FedAvg (Fed-SGD)")[:2] == ["7", "not within 4"]
    assert cells(there, "Fed-LAMB")[:2] == ["never", "–"]
    # the whole one takes its place, and is not replaced by less
    assert collect.collect(runs / "full", tmp_path / "results", presets) == ["mine: complete"]
    assert "left as it was" in collect.collect(tmp_path / "runs", tmp_path / "results", presets)[0]
    assert (tmp_path / "results/mine/claims.json").exists()


def test_claims_of_other_runs_are_not_believed(runs, presets, tmp_path):
    shutil.copytree(runs / "full", tmp_path / "runs")
    file = tmp_path / "runs" / "mine" / "claims.json"
    file.write_text(file.read_text().replace('"outcome": "tie"', '"outcome": "right"'))
    _, facts, text = collected(tmp_path / "runs", presets, tmp_path)
    assert facts["missing"] == ["claims.json is not there, or not of these runs: start lamina reproduce again"]
    assert verdict_of(text, "neither gets there") == "tie"


def test_who_diverged_is_counted(runs, presets, tmp_path):
    shutil.copytree(runs / "full", tmp_path / "runs")
    lost = tmp_path / "runs" / "mine" / "as-given" / "fedlamb" / "seed0"
    (lost / "metrics.jsonl").write_text("")
    (lost / "diverged.json").write_text('{"message": "a NaN in round 1"}')
    _, facts, text = collected(tmp_path / "runs", presets, tmp_path)
    assert facts["diverged_runs"] == 1
    assert cells(text, "Fed-LAMB")[1] == "2, 1 diverged"
    assert "; 1 diverged;" in text
    assert facts["variants"]["as-given"]["methods"]["fedlamb"]["diverged"] == ["seed 0: a NaN in round 1"]
    assert figures.save_figures(page.read_results(tmp_path / "results"), tmp_path / "figures")


def test_a_small_version_has_no_verdict(runs, presets, tmp_path):
    said, facts, text = collected(runs / "small", presets, tmp_path)
    assert said == ["mine: complete, but of the small version"]
    assert (facts["scale"], facts["sets"]) == ("small", {})
    assert "lamina reproduce mine --scale small" in text
    assert "says nothing about the paper" in text
    assert "## Claims" not in text


def test_other_settings_than_the_presets_are_named(runs, presets, tmp_path):
    _, facts, text = collected(runs / "changed", presets, tmp_path)
    assert facts["sets"] == {"train.clip": 5.0, "compare.seeds": 1, "compare.grid.fedavg.lr": [0.1]}
    line = "lamina reproduce mine --set train.clip=5.0 --set compare.seeds=1 --set 'compare.grid.fedavg.lr=[0.1]'"
    assert line in text
    assert "The experiment was run with the settings in the command" in text
    assert "±" not in cells(text, "Fed-LAMB")[2]  # one seed
    config = json.loads((tmp_path / "results/mine/as-given/config.json").read_text())
    assert (config["data"]["dir"], config["run"]["out"]) == (None, None)


@pytest.mark.long
@pytest.mark.parametrize("name", PAPERS)
def test_a_preset_as_given_is_not_called_changed(name):
    """Every preset's configuration as a run's folder would have it."""
    given = claims.variants(load(PAPERS[name]))
    variants = {}
    for variant in claims.needed(load(PAPERS[name])):
        own = load(PAPERS[name], given[variant])
        own = with_algorithm(own, own.compare.algorithms[0])
        simulation = SimpleNamespace(
            reserved=SimpleNamespace(dealt=own.data.clients),
            protocol=SimpleNamespace(
                **{
                    **settings_of(own),
                    "lr": own.train.lr,
                    "channel": OPEN,
                    "clock": as_clock(own.clock and own.clock.table()),
                }
            ),
            algorithm=build_algorithm(own),
            device="cuda",
            engine=SimpleNamespace(name="stacked"),
            objective=SimpleNamespace(start=torch.zeros(1), module=torch.nn.Identity()),
            metrics=(),
            metric="accuracy",
        )
        config = as_json({"lamina": "0", "format": 1, **resolved(own, simulation)})
        variants[variant] = collect.Variant(Path(variant), config, [], [], [])
    assert collect.changed(PAPERS[name], variants) == {}
    config["train"]["rounds"] += 1
    assert collect.changed(PAPERS[name], variants) == {"train.rounds": config["train"]["rounds"]}


def test_folders_that_are_no_reproduction(runs, presets, tmp_path):
    (tmp_path / "runs" / "demo-compare").mkdir(parents=True)
    for name in ("mine", "mine-small"):
        (tmp_path / "runs" / name / "as-given").mkdir(parents=True)
    said = collect.collect(tmp_path / "runs", tmp_path / "results", presets)
    assert said == [
        "demo-compare: left out, no preset has this name",
        "mine: left out, it has no finished round",
        "mine-small: left out, a small version is no reproduction",
    ]
    said = collect.collect(tmp_path / "runs" / "mine", tmp_path / "results", presets)
    assert said == ["as-given: left out, it is part of 'mine': give the folder that holds it"]
    assert page.read_results(tmp_path / "results") == []
    (text,) = page.make([], presets, {"session": [], "notes": {}}).values()
    assert "Nothing has been run yet." in text
    assert "- `mine`\n- `other`" in text
    with pytest.raises(BadInput, match="did you mean 'mine'"):
        page.make([], presets, {"session": [], "notes": {"mime": ["…"]}})


def test_the_scripts_examples_are_true():
    for script in (collect, page, figures, appendix, words, report):
        tried = doctest.testmod(script)
        assert tried.attempted, script
        assert not tried.failed
