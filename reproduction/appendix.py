"""The page of one preset: what was run, what came out, and what that says about the paper's claims."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from collect import expected
from figures import drawn, metrics_of, window_of
from record import Result, labelled
from words import amount, either, escaped, markdown, named, number, shortened, spent, verdict

from lamina import algorithms
from lamina.experiment.toml import complete_text
from lamina.experiment.trials import reproduction
from lamina.experiment.trials.claims import Finding, in_per_cent, unit, written_lead, written_outcome
from lamina.experiment.trials.settings import shown
from lamina.report.tables import NONE, mean_and_spread, significant
from lamina.training.history import LAST_ROUNDS, History, mean, values
from lamina.training.metrics import is_percent


def preset_page(result: Result, findings: Sequence[Finding], presets: Mapping[str, Path], notes: Sequence[str]) -> str:
    """Return the page of a preset: description, command, cost, table, figure, claims and notes."""
    facts = result.facts
    parts = [f"# {result.name}", "[The index](../index.md#words-on-these-pages) explains the words on this page."]
    if result.name in presets:
        parts.append(about(presets[result.name]))
    parts.append(f"```sh\n{command(result)}\n```")
    if facts["sets"]:
        parts.append(
            "The experiment was run with the settings in the command; a variant's own settings override them. The "
            "description above is the preset's."
        )
    if facts["scale"] == "small":
        parts.append("This is the small version, a smoke test; it says nothing about the paper.")
    if not facts["complete"]:
        parts.append("**Not finished.** Missing: " + escaped("; ".join(shortened(facts["missing"]))) + ".")
    parts.append(cost(result))
    parts.append(results_table(result))
    if drawn(result):
        parts.append(f"![{result.name}: {' and '.join(metrics_of(result))} over rounds](../figures/{result.name}.png)")
        window = window_of(result)
        if window > 1:
            parts.append(f"Each point of the figure is the mean of what was measured in {window} rounds.")
    if findings:
        parts += ["## Claims", *(claim_tables(result, finding) for finding in findings)]
        parts += filter(None, (cost_to_target(result, finding) for finding in findings))
    if notes:
        parts += ["## Notes", *(note.strip() for note in notes)]
    return "\n\n".join(parts)


def about(preset: Path) -> str:
    """Return the comment at the head of a preset: the paper's claim, the protocol, and our deviations."""
    lines = complete_text(preset).splitlines()
    first = next((i for i, line in enumerate(lines) if not line.startswith("#")), len(lines))
    return escaped(" ".join(line.lstrip("# ") for line in lines[:first] if line != "#"))


def command(result: Result) -> str:
    """Return the command that reproduces a result."""
    words = ["lamina reproduce", result.name]
    words += ["--scale small"] if result.facts["scale"] == "small" else []
    for key, value in result.facts["sets"].items():
        word = f"{key}={json.dumps(value)}"
        words.append(f"--set '{word}'" if re.search(r"[^\w=.,:-]", word) else f"--set {word}")
    return " ".join(words)


def cost(result: Result) -> str:
    """Return the number of runs, their rounds and seconds, and what went wrong."""
    facts = result.facts
    tuning = facts["tuning_runs"]
    chosen = {"test": "the test data, as the paper does", "validation": "held-out training data"}[facts["select"]]
    line = f"{amount(facts['runs'] - tuning, 'final run')} of {either(facts['rounds'])} rounds; "
    line += (
        f"{amount(tuning, 'tuning run')} of {either(facts['tuning_rounds'])} rounds, on {chosen}"
        if tuning
        else "no tuning runs"
    )
    line += f" (listed in `{tuning_tables(result)}`)" if tuning and result.lists_tuning else ""
    line += f"; {facts['seconds']:,.0f} {spent(facts)}"
    for what, key in (("diverged", "diverged_runs"), ("not finished", "unfinished_runs")):
        line += f"; {facts[key]} {what}" if facts[key] else ""
    line += f"; {', '.join(facts['device']) or 'machine unknown'}, {', '.join(facts['precision'])}"
    every = max(variant["every"] for variant in facts["variants"].values())
    kept = f" The record keeps one round in {every}, the best and the last {LAST_ROUNDS}." if every > 1 else ""
    return f"{line}.{kept}"


def tuning_tables(result: Result) -> str:
    """Return the path of the tables that list the tuning runs, from the root of the repository.

    >>> tuning_tables(Result("a", {"variants": {"as-given": {}}}, {}))
    'reproduction/results/a/as-given/tuning.csv'
    """
    variants = list(result.facts["variants"])
    return f"reproduction/results/{result.name}/{variants[0] if len(variants) == 1 else '*'}/tuning.csv"


def results_table(result: Result) -> str:
    """Return a table of each method's best and last accuracy, and of the other metrics in the claims."""
    others = [name for name in metrics_of(result) if name != "accuracy"]
    head = ["method", "settings", "seeds", "best accuracy, %", f"last {LAST_ROUNDS} rounds, %", "last accuracy, %"]
    head += [f"last {escaped(name)}{', %' if is_percent(name) else ''}" for name in others]
    rows = []
    for (variant, name), histories in result.histories.items():
        method = result.facts["variants"][variant]["methods"][name]
        settings = [
            f"{key} {shown(value)}" + (f" ({method['edge'][key]} tried)" if key in method["edge"] else "")
            for key, value in method["settings"].items()
        ]
        diverged = f", {len(method['diverged'])} diverged" if method["diverged"] else ""
        row = [escaped(labelled(name, variant)), ", ".join(settings), f"{len(histories)}{diverged}"]
        row.append(mean_and_spread(values(histories, lambda history: 100 * history.best(optional=True))))
        row.append(mean_and_spread(values(histories, lambda history: 100 * history.final(optional=True))))
        row.append(mean_and_spread(values(histories, lambda history: 100 * history.last(optional=True))))
        for other in others:
            scale = 100 if is_percent(other) else 1
            last = values(
                histories,
                lambda history, of=other, by=scale: by * history.last(of, optional=True),  # type: ignore[misc]
            )
            row.append(mean_and_spread(last, significant))
        rows.append(row)
    if not rows:
        return "No final run has finished."
    several = any(len(histories) > 1 for histories in result.histories.values())
    return markdown(head, rows) + ("\n\nMean ± standard deviation over seeds." if several else "")


def claim_tables(result: Result, finding: Finding) -> str:
    """Return a claim with its verdict, a table of the paper's numbers beside ours, and one of its pairs."""
    claim, labels = finding.claim, dict.fromkeys([*finding.values, *finding.claim.paper])
    rounds = claim.target is not None
    rows = []
    for label in labels:
        here = finding.values.get(label, math.nan)
        row = [named(label), number(claim.paper.get(label)), number(in_per_cent(claim, here), rounds=rounds)]
        if rounds:
            row[2:] = [number(here, of=finding.rounds), number(finding.touches.get(label), of=finding.rounds)]
            row.append(megabytes(result, label, here))
        rows.append(row)
    head = [unit(claim), "paper", "ours", *(["first touch", "MB until it stays"] if rounds else [])]
    seeds = f" ({amount(finding.seeds, 'seed')})" if finding.seeds else ""
    parts = [
        f"### {escaped(claim.text)}",
        f"**{verdict(finding)}**{seeds}. Expected: {escaped(expected(claim))}.",
        markdown(head, rows),
    ]
    if finding.pairs:
        lead = "rounds saved" if rounds else "lead, points" if in_per_cent(claim, 1) != 1 else "lead"
        pairs = [
            [f"{named(pair.better)} / {named(pair.worse)}", written_lead(claim, pair), written_outcome(pair)]
            for pair in finding.pairs
        ]
        parts.append(markdown(["pair", f"{lead} [95 % interval]", "outcome"], pairs))
    return "\n\n".join(parts)


def megabytes(result: Result, label: str, rounds: float) -> str:
    """Return the megabytes that one method sends in both directions in some rounds."""
    name, _, variant = label.partition("@")
    histories = result.histories.get((variant or reproduction.FOLDER_AS_GIVEN, name), [])
    return f"{rounds * bytes_of_a_round(histories) / 1e6:,.0f}" if math.isfinite(rounds) and any(histories) else NONE


def cost_to_target(result: Result, finding: Finding, baseline: str = "fedavg") -> str:
    """Return the cost to reach a claim's target in multiples of the baseline's, as in FedLADA's Table 12."""
    as_given, claim = reproduction.FOLDER_AS_GIVEN, finding.claim
    runs = {name: histories for (variant, name), histories in result.histories.items() if variant == as_given}
    here = {name: finding.values.get(name, math.nan) for name in claim.paper if any(runs.get(name, []))}
    here = {name: rounds for name, rounds in here.items() if not math.isnan(rounds)}
    if claim.target is None or baseline not in here or math.isinf(claim.paper[baseline]):
        return ""
    if min(here.values()) == math.inf:  # no cost was measured
        return ""
    # The cost of a baseline that never reaches the target is unknown, but more than that of its whole run.
    never = math.isinf(here[baseline])
    rounds = float(max(map(len, runs[baseline]))) if never else here[baseline]
    rows = []
    for name, needed in here.items():
        models = algorithms.find(name).card.paper_cost or math.nan
        printed = models * claim.paper[name] / claim.paper[baseline]
        measured = bytes_of_a_round(runs[name]) / bytes_of_a_round(runs[baseline])
        costs = [("< " if never else "") + times(needed / rounds * by) for by in (models, measured)]
        costs = [NONE, NONE] if math.isinf(needed) else costs
        row = [named(name), number(claim.paper[name]), times(printed), number(needed, of=finding.rounds), *costs]
        rows.append(row)
    head = ["method", "paper: rounds", "paper: cost", "ours: rounds", "ours: cost as the paper counts", "ours: bytes"]
    lines = (
        f"The cost to reach {100 * claim.target:g} %, in multiples of {named(baseline)}'s. The paper counts one or "
        "two models per round (Table 11; on CIFAR-10 its rounds times these are its Table 12). Bytes are those sent "
        "in both directions."
    )
    if never:
        lines += f" {named(baseline)} does not reach it in {rounds:g} rounds."
        lines += " Costs with < are in multiples of the cost of all these rounds."
    return lines + "\n\n" + markdown(head, rows)


def bytes_of_a_round(histories: Sequence[History]) -> float:
    """Return the mean bytes that a round sends in both directions."""
    kept = [row for history in histories for row in history if "bytes_up" in row]
    return mean(row["bytes_down"] + row["bytes_up"] for row in kept)


def times(ratio: float) -> str:
    """Return a multiple as text.

    >>> times(0.688), times(math.inf), times(math.nan)
    ('0.69 ×', '–', '–')
    """
    return f"{ratio:.2f} ×" if math.isfinite(ratio) else NONE
