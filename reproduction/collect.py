"""Keep a compact record of reproductions: ``python reproduction/collect.py RUNS_FOLDER``.

RUNS_FOLDER is what ``lamina reproduce NAME`` writes to, by default ``runs``: every folder in it that has a preset's
name becomes ``reproduction/results/NAME``. One that is not finished is kept, too, and says so.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lamina import models
from lamina.algorithms import registry
from lamina.base.atomic import write_file
from lamina.experiment.build import build_partition, build_schedule
from lamina.experiment.config import Claim, Experiment, load
from lamina.experiment.runs.records import Record, find_records, flatten, read_json
from lamina.experiment.trials import claims, reproduction
from lamina.experiment.trials.settings import Range
from lamina.experiment.trials.trial import Trial
from lamina.rounds.clock import as_clock
from lamina.storage.files import as_json, write_json
from lamina.training.history import LAST_ROUNDS, History, Row
from lamina.training.metrics import DIAGNOSTICS

MIME_IS = " (in the Fed-LAMB paper's sense)"  # the index explains it once, so labels leave it out
RESULTS = Path(__file__).parent / "results"
WHOLE = ["algorithm", "learning_rate", "seed", "round"]  # columns that are not rounded
COLUMNS = ["accuracy", "loss", "train_loss", "consistency", "update_norm"]
COLUMNS += ["bytes_down", "bytes_up", "client_accuracy", "accuracy@cropped"]
COLUMNS += [column for columns in DIAGNOSTICS.values() for column in columns] + ["clock_seconds"]
# Significant digits; above LARGE bytes, fewer digits, then only the accuracy of some rounds.
DIGITS, FEWER_DIGITS, LARGE = 5, 4, 300_000
# what says where a run was made, not what it computes
PLACES = {
    "data.dir",
    "run.out",
    "run.device",
    "run.engine",
    "run.threads",
    "run.checkpoint_every",
    "run.accept_changed_code",
    "run.ranks",
}


@dataclass(frozen=True)
class Variant:
    """One comparison of a reproduction, finished or not."""

    folder: Path
    config: dict[str, Any]  # as the comparison wrote it; empty if it has not started
    runs: list[Record]  # all runs that have started, including tuning runs
    entries: list[Trial]  # each algorithm with its finished seeds
    missing: list[str]  # what has not finished, in words

    @property
    def finals(self) -> list[tuple[Trial, int, Record]]:
        """Return the final runs that have finished."""
        return [(entry, record.seed, record) for entry in self.entries for record in entry.records]


def main() -> None:
    """Collect all reproductions in a folder."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("runs", type=Path, metavar="RUNS_FOLDER", help="the folder of the presets' folders, e.g. runs")
    parser.add_argument("--into", type=Path, default=RESULTS, help="where the records go (default: %(default)s)")
    arguments = parser.parse_args()
    if not arguments.runs.is_dir():
        parser.error(f"no folder '{arguments.runs}'")
    for line in collect(arguments.runs, arguments.into, reproduction.papers()):
        print(line)


def collect(runs: Path, into: Path, presets: Mapping[str, Path]) -> list[str]:
    """Write a record of each reproduction in a folder; return one line about each."""
    lines = []
    for folder in sorted(path for path in runs.iterdir() if path.is_dir()):
        if folder.name not in presets:
            why = "no preset has this name"
            if folder.name == reproduction.FOLDER_AS_GIVEN:
                why = f"it is part of '{runs.name}': give the folder that holds it"
            elif folder.name.removesuffix("-small") in presets:
                why = "a small version is no reproduction"
            lines.append(f"{folder.name}: left out, {why}")
            continue
        variants = read_variants(folder, load(presets[folder.name]))
        if not any(variant.runs for variant in variants.values()):
            lines.append(f"{folder.name}: left out, it has no finished round")
            continue
        facts = describe(folder, presets[folder.name], variants)
        old = read_json(into / folder.name / "facts.json") if (into / folder.name / "facts.json").exists() else None
        if old is not None and worth(facts) < worth(old):
            lines.append(f"{folder.name}: left as it was, the record has more than this folder")
            continue
        write(folder, into / folder.name, facts, variants)
        scale = ", but of the small version" if facts["scale"] == "small" else ""
        lines.append(f"{folder.name}: " + (f"complete{scale}" if facts["complete"] else "; ".join(facts["missing"])))
    return lines


def worth(facts: Mapping[str, Any]) -> tuple[bool, bool, int]:
    """Return how much a record holds, so that a fuller record is never replaced."""
    return facts["scale"] == "full", facts["complete"], facts["runs"]


# --- read --------------------------------------------------------------------------------------------------------


def read_variants(folder: Path, experiment: Experiment) -> dict[str, Variant]:
    """Return the comparisons that a preset's claims need, by variant, whether or not they have started."""
    needed = claims.needed(experiment)
    return {
        variant: read_variant(folder / (variant or reproduction.FOLDER_AS_GIVEN), needed[variant]) for variant in needed
    }


def read_variant(folder: Path, algorithms: Sequence[str]) -> Variant:
    """Read one comparison, finished or not."""
    if not (folder / "config.json").exists():
        return Variant(folder, {}, [], [], [f"{folder.name} was not begun"])
    folder = folder.resolve()
    config = read_json(folder / "config.json")
    runs = find_records([folder]) if any(folder.rglob("metrics.jsonl")) else []
    by_folder = {run.folder: run for run in runs}
    train = config["train"]
    entries, missing = [], []
    for name in algorithms:
        records: list[Record] = []
        for seed in range(train["seed"], train["seed"] + config["compare"]["seeds"]):
            run = by_folder.get(place(folder, name, seed))
            if run is None or not run.ended or run.config["train"]["rounds"] != train["rounds"]:
                got = f"{len(run.history)} of {train['rounds']} rounds" if run else "not begun"
                missing.append(f"{folder.name}: {name}, seed {seed}: {got}")
                continue
            records.append(run)
        if records:
            tried = config["compare"]["grid"].get(name, {})
            options = {key: records[-1].config["algorithm"][key] for key in tried if key != "lr"}
            entries.append(Trial(name, {"lr": records[-1].lr, **options}, records))
    return Variant(folder, config, runs, entries, missing)


def place(folder: Path, algorithm: str, seed: int) -> Path:
    """Return the folder of a comparison's final run."""
    return folder / algorithm.replace(":", ".") / f"seed{seed}"


# --- the facts of a reproduction ---------------------------------------------------------------------------------


def describe(folder: Path, preset: Path, variants: Mapping[str, Variant]) -> dict[str, Any]:
    """Return the content of facts.json."""
    begun = [variant for variant in variants.values() if variant.config]
    runs = [run for variant in begun for run in variant.runs]
    missing = [line for variant in variants.values() for line in variant.missing]
    experiment = load(preset)
    small = begun[0].config["data"]["name"] == f"{experiment.data.name}-small"
    rounds = begun[0].config["train"]["rounds"]
    wanted = [reproduction.in_reach(claim, rounds) if small else claim for claim in experiment.claim]
    findings = judge(wanted, variants)
    if not missing and not agrees(folder / "claims.json", findings, small):
        missing.append("claims.json is not there, or not of these runs: start lamina reproduce again")
    return {
        "complete": not missing,
        "missing": missing,
        "scale": "small" if small else "full",
        "sets": {} if small else changed(preset, variants),
        **{
            name: distinct(run.environment.get(key) for run in runs)
            for name, key in (("device", "device_name"), ("torch", "torch"), ("lamina", "lamina"))
        },
        "precision": distinct(run.config["run"]["precision"] for run in runs),
        "gpu": all(run.config["run"]["device"].startswith("cuda") for run in runs),
        "seconds": round(sum(seconds(run) for run in runs), 1),
        "runs": len(runs),
        "tuning_runs": sum(run.tuning for run in runs),
        "diverged_runs": sum(run.diverged is not None for run in runs),
        "unfinished_runs": sum(not run.ended for run in runs),
        "rounds": distinct(variant.config["train"]["rounds"] for variant in begun),
        "select": begun[0].config["compare"]["select"],
        "tuning_rounds": distinct(run.config["train"]["rounds"] for run in runs if run.tuning),
        "claims": [claim_facts(finding, small) for finding in findings],
        "variants": {variant.folder.name: described(variant) for variant in begun},
    }


def described(variant: Variant) -> dict[str, Any]:
    """Return the facts about one comparison."""
    grid = variant.config["compare"]["grid"]
    return {
        "seconds": round(sum(seconds(run) for run in variant.runs), 1),
        "runs": len(variant.runs),
        "methods": {
            entry.name: {
                "settings": entry.settings,
                "edge": edges(entry, grid.get(entry.name, {})),
                "seeds": [run.seed for run in entry.records],
                "diverged": [f"seed {run.seed}: {run.diverged}" for run in entry.records if run.diverged],
            }
            for entry in variant.entries
        },
    }


def edges(entry: Trial, grid: Mapping[str, Any]) -> dict[str, str]:
    """Return the chosen settings on the edge of the grid, each with its side: a better value may lie beyond."""
    sides = {}
    for key, value in entry.settings.items():
        way = Range(choices=tuple(grid.get(key) or [value])).way_beyond(value, entry.records[0].algorithm, key)
        if way:
            sides[key] = {"smaller": "smallest", "larger": "largest"}[way]
    return sides


def seconds(run: Record) -> float:
    """Return the seconds of training and evaluation; runs that train side by side share them."""
    return run.history.total("seconds", optional=True) + run.history.total("evaluation_seconds", optional=True)


def distinct(values: Any) -> list[Any]:
    """Return the distinct values that are not None, in order."""
    return [value for value in dict.fromkeys(values) if value is not None]


def changed(preset: Path, variants: Mapping[str, Variant]) -> dict[str, Any]:
    """Return the settings that differ from the preset's, by key: those given with --set."""
    differences: dict[str, Any] = {}
    for name, variant in variants.items():
        if variant.config:
            given = flatten(as_json(defaults_filled(load(preset, claims.variants(load(preset))[name]))))
            used = flatten({key: value for key, value in variant.config.items() if isinstance(value, Mapping)})
            for key in [key for key in used if not key.startswith(("algorithm.", "algorithms."))]:
                unsaid = key in PLACES or (key == "data.clients" and given[key] is None) or key == "compare.algorithms"
                if not unsaid and given.get(key) != used[key]:
                    differences[key] = used[key]
    return differences


def defaults_filled(experiment: Experiment) -> dict[str, Any]:
    """Return an experiment's settings with all defaults, as a run folder stores them."""
    config = experiment.model_dump()
    partition = build_partition(experiment)
    config["data"]["partition"] |= vars(getattr(partition, "base", partition))
    if experiment.data.partition.name == "reallocate":
        config["data"]["partition"] |= {"base": "iid", **experiment.data.partition.options()}
    config["model"] = {**models.registry()[experiment.model.name].options, **config["model"]}
    config["train"]["schedule"] |= vars(build_schedule(experiment))
    if experiment.clock is not None:
        clock = as_clock(experiment.clock.table())
        config["clock"] |= clock.record() if clock else {}
    return config


# --- claims ------------------------------------------------------------------------------------------------------


def judge(wanted: Sequence[Claim], variants: Mapping[str, Variant]) -> list[claims.Finding]:
    """Evaluate the claims on the runs; an algorithm counts only if all its seeds have finished."""
    entries = {}
    for label, variant in variants.items():
        for entry in variant.entries:
            if len(entry.records) == variant.config["compare"]["seeds"]:
                entries[f"{entry.name}@{label}" if label else entry.name] = entry
    return [claims.evaluate(claim, entries) for claim in wanted]


def claim_facts(finding: claims.Finding, small: bool) -> dict[str, Any]:
    """Return a claim and its result for the pages; accuracies are in per cent, as papers print them."""
    claim, pairs = finding.claim, finding.pairs
    return {
        "text": claim.text,
        "expected": expected(claim),
        "unit": claims.unit(claim),
        "metric": claim.metric,
        "target": claim.target,
        "paper": claim.paper,
        "here": {label: claims.in_per_cent(claim, value) for label, value in finding.values.items()},
        "verdict": "none" if small else finding.verdict,
        "pairs": len(pairs),
        "wrong": [[pair.better, pair.worse] for pair in pairs if pair.outcome != "right"],
        "weak": [[pair.better, pair.worse] for pair in pairs if "less than" in pair.remark and pair.outcome == "right"],
    }


def expected(claim: Claim) -> str:
    """Return in one line what a claim says about the methods."""
    groups = [", ".join(map(called, [group] if isinstance(group, str) else group)) for group in claim.expect]
    if claim.kind == "gap":
        amount = (claim.at_most if claim.at_least is None else claim.at_least) or 0.0
        by = f"{100 * amount:g} points" if "accuracy" in claim.metric else f"{amount:g}"
        how = f"at least {by} above" if claim.at_least is not None else f"within {by} of"
        return f"{groups[0]} {how} {', '.join(groups[1:])}"
    return {"rounds_to": " before ", "order": " < " if claim.lower_is_better else " > "}[claim.kind].join(groups)


def called(label: str) -> str:
    """Return a claim's label with the papers' names of the methods; a preset's own name of one stays as it is.

    >>> called("fedlamb@Z=3 - mime"), called("fedavg"), called("fedlamb-whole")
    ('Fed-LAMB Z=3 − Mime', 'FedAvg (Fed-SGD)', 'fedlamb-whole')
    """
    titles = {name: kind.card.title.removesuffix(MIME_IS) for name, kind in registry().items()}
    names = [(titles.get(algorithm, algorithm), variant) for algorithm, variant in claims.named_in(label)]
    return " − ".join(f"{name} {variant}".strip() for name, variant in names)


def agrees(path: Path, findings: Sequence[claims.Finding], small: bool) -> bool:
    """Return whether claims.json agrees with the runs."""
    scale: reproduction.Scale = "small" if small else "full"
    rows = [reproduction.described(finding, scale) for finding in findings]
    return path.exists() and read_json(path) == as_json({"scale": scale, "claims": rows})


# --- write -------------------------------------------------------------------------------------------------------


def write(folder: Path, into: Path, facts: dict[str, Any], variants: Mapping[str, Variant]) -> None:
    """Replace the record of a reproduction."""
    if into.exists():
        shutil.rmtree(into)
    into.mkdir(parents=True)
    if facts["complete"]:
        shutil.copyfile(folder / "claims.json", into / "claims.json")
    for variant in variants.values():
        if not variant.config:
            continue
        folder_of_variant = into / variant.folder.name
        folder_of_variant.mkdir()
        config = json.loads(json.dumps(variant.config))
        config["data"]["dir"] = config["run"]["out"] = None  # paths of the machine that ran it
        write_json(folder_of_variant / "config.json", config)
        if (variant.folder / "tuning.csv").exists():
            write_file(
                folder_of_variant / "tuning.csv", (variant.folder / "tuning.csv").read_text(encoding="utf-8").encode()
            )
        text, facts["variants"][variant.folder.name]["every"] = rounds_table(variant)
        write_file(folder_of_variant / "rounds.csv", text.encode())
    write_json(into / "facts.json", facts)


def rounds_table(variant: Variant) -> tuple[str, int]:
    """Return the rounds of all final runs as CSV, and the interval between the rounds with all columns."""
    text = as_csv(variant, DIGITS, 1)
    if len(text) <= LARGE:
        return text, 1
    text = as_csv(variant, FEWER_DIGITS, 1)
    if len(text) <= LARGE:
        return text, 1
    every = interval([run.history for _, _, run in variant.finals], math.ceil(len(text) / LARGE))
    return as_csv(variant, FEWER_DIGITS, every), every


def interval(histories: Sequence[History], at_least: int) -> int:
    """Return the distance between kept rounds: a multiple of the distance between evaluations.

    >>> interval([History({"round": i, **({} if i % 5 else {"accuracy": 0.5})} for i in range(1, 21))], at_least=2)
    5
    """
    # evaluate_every is the round of the first evaluation; the last round is evaluated, too, so gaps do not tell it
    apart = min((int(row["round"]) for history in histories for row in history if "accuracy" in row), default=1)
    return apart * math.ceil(at_least / apart)


def as_csv(variant: Variant, digits: int, every: int) -> str:
    """Return the rounds of all final runs as CSV; rounds that are not kept have only their accuracy.

    All seeds of a method keep the same rounds.
    """
    there = {column for _, _, run in variant.finals for column in run.history.columns}
    columns = [column for column in COLUMNS if column in there]
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*WHOLE, *columns])
    for entry, seed, run in variant.finals:
        kept = kept_rounds(entry, every)
        for row in run.history:
            shown = row if row["round"] in kept else {"accuracy": row.get("accuracy", math.nan)}
            cells = [shortest(shown, column, digits) for column in columns]
            if row["round"] in kept or any(cells):
                writer.writerow([entry.name, f"{run.lr:g}", seed, row["round"], *cells])
    return text.getvalue()


def kept_rounds(entry: Trial, every: int) -> set[int]:
    """Return the rounds to keep with all columns: every n-th, the first, the last ten, and each seed's best."""
    kept = set()
    for history in entry.histories:
        rounds = [int(row["round"]) for row in history]
        accuracies = [-math.inf if math.isnan(value) else value for value in history.column("accuracy", optional=True)]
        if rounds:
            kept |= {number for number in rounds if number % every == 0}
            kept |= {1, *rounds[-LAST_ROUNDS:], rounds[accuracies.index(max(accuracies))]}
    return kept


def shortest(row: Row, column: str, digits: int) -> str:
    """Return a number rounded to some significant digits, as short as possible; empty if it is missing."""
    value = row.get(column, math.nan)
    if isinstance(value, float) and math.isnan(value):
        return ""
    rounded = f"{value:.{digits}g}"
    return min(rounded, str(value), key=len) if isinstance(value, int) else rounded


if __name__ == "__main__":
    main()
