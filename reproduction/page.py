"""Write the pages of docs/reproduction and their figures: ``python reproduction/page.py``.

The index has the verdicts, and each paper has a page with its experiments. Everything measured comes from
reproduction/results, every explanation from reproduction/notes.toml.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import statistics
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from collect import called
from figures import drawn, metrics_of, save_figures, window_of
from record import Result, labelled, read_results

from lamina import algorithms
from lamina.errors import unknown
from lamina.experiment import reproduction
from lamina.experiment.claims import named_in, written
from lamina.experiment.settings import shown
from lamina.experiment.toml import complete_text
from lamina.history import History
from lamina.report.figures import METRICS
from lamina.report.tables import NONE, mean_and_spread, significant, values

HERE = Path(__file__).parent
PAGES, FIGURES = HERE.parent / "docs" / "reproduction", Path("figures")
PAPERS = {  # the pages: the prefix of the presets' names, and the title
    "fed-lamb": ("lamb-", "Fed-LAMB and Mime-LAMB (Karimi, Li & Li)"),
    "fedlada": ("lada-", "FedLADA (Sun et al. 2023)"),
    "other": ("", "Other experiments"),
}
JUDGED = ("holds", "holds in part", "does not hold")
DIVERGED = "†"
NEVER = "*never*: not within the rounds that were run, which may be fewer than the paper's."
FEW_METHODS = 3  # a single comparison of so few methods gets no table
LAST = 10  # the mean of so many last rounds is shown, because the accuracy of some methods swings
VERDICTS = {
    "holds": "reproduced",
    "holds in part": "partly",
    "does not hold": "not reproduced",
    "not run": "not finished",
    "none": "none (small version)",
}


def main() -> None:
    """Write the pages and their figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--results", type=Path, default=HERE / "results", help="records (default: %(default)s)")
    parser.add_argument("--pages", type=Path, default=PAGES, help="folder of the pages and figures (%(default)s)")
    asked = parser.parse_args()
    results = read_results(asked.results)
    pages = make(results, reproduction.papers(), read_notes(HERE / "notes.toml"))
    for name, text in pages.items():
        (asked.pages / name).write_text(text, encoding="utf-8")
    figures = save_figures(results, asked.pages / FIGURES)
    print(f"wrote {len(pages)} pages and {len(figures)} figures to {asked.pages}")


def make(results: Sequence[Result], presets: Mapping[str, Path], notes: Mapping[str, Any]) -> dict[str, str]:
    """Return the text of each page by its file name: the index, and a page for each paper with results."""
    for name in notes["notes"]:
        if name not in presets:
            raise unknown("preset in notes.toml", name, presets)
    groups: dict[str, list[Result]] = {}
    for result in results:
        groups.setdefault(page_of(result.name), []).append(result)
    papers = [paper for paper in PAPERS if paper in groups]
    pages = {"index.md": index(results, papers, presets, notes)}
    for paper in papers:
        parts = [
            f"# {PAPERS[paper][1]}",
            PAPER_HEAD,
            notes.get("paper", {}).get(paper, "").strip(),
            at_a_glance(groups[paper]),
            summary(groups[paper]),
            *(section(result, presets, notes["notes"].get(result.name, [])) for result in groups[paper]),
        ]
        pages[f"{paper}.md"] = "\n\n".join(filter(None, parts)) + "\n"
    return pages


def page_of(preset: str) -> str:
    """Return the page that a preset belongs to.

    >>> page_of("lamb-epsilon"), page_of("lada-lamb-cifar10"), page_of("mine")
    ('fed-lamb', 'fedlada', 'other')
    """
    return next(page for page, (prefix, _) in PAPERS.items() if preset.startswith(prefix))


PAPER_HEAD = """This page is generated from the records in `reproduction/results`. [The index](index.md) has all
verdicts, and says how everything was run. To run an experiment again, give the command in its section.

- P2-text and P2-code are the protocols of Karimi, Li & Li's text and of their public code; P3 is that of Sun et al.
- A1, B3 and the like are passages that can be read in more than one way;
  [the register](../reference/algorithms.md#register) says how lamina reads them.
- *Consistency* is the mean over the clients of ‖y − x⁺‖², the squared distance of a client's model from the next global
  model: smaller means closer."""


# --- read --------------------------------------------------------------------------------------------------------


def read_notes(path: Path) -> dict[str, Any]:
    """Read the explanations."""
    return {"overall": "", "sitting": [], "notes": {}, **tomllib.loads(path.read_text(encoding="utf-8"))}


# --- the index ---------------------------------------------------------------------------------------------------


def index(
    results: Sequence[Result], papers: Sequence[str], presets: Mapping[str, Path], notes: Mapping[str, Any]
) -> str:
    """Return the index: what was found, all verdicts, how it was run, and what was not run."""
    parts = [
        "# Do the papers' claims hold?",
        "[`lamina reproduce`](../how-to/reproduce.md) runs the comparisons that the Fed-LAMB and FedLADA papers "
        "report, and a few of our own. These pages show the results, whether or not they agree with the papers. They "
        "are generated by `reproduction/page.py` from the records in `reproduction/results`; only the explanations "
        "are written by hand.",
        notes["overall"].strip(),
        verdicts(results, papers),
        how(results, notes["sitting"]),
        not_run(results, presets, notes["notes"]),
        "\n".join(["```{toctree}", ":hidden:", "", *papers, "```"]) if papers else "",
    ]
    return "\n\n".join(filter(None, parts)) + "\n"


def verdicts(results: Sequence[Result], papers: Sequence[str]) -> str:
    """Return how often each verdict occurs, and a table of all claims with their verdicts for each paper."""
    if not results:
        return "## Verdicts\n\nNothing has been run yet."
    words = list(dict.fromkeys([*VERDICTS.values(), *VERDICTS]))
    claims = {paper: [] for paper in papers}  # type: dict[str, list[tuple[Result, Mapping[str, Any]]]]
    for result in results:
        claims[page_of(result.name)] += [(result, claim) for claim in result.facts["claims"]]
    found = {paper: [verdict(claim) for _, claim in own] for paper, own in claims.items()}
    used = [word for word in words if any(word in own for own in found.values())]
    counts = [
        [f"[{PAPERS[paper][1]}]({paper}.md)", str(len(own)), *(str(own.count(word)) for word in used)]
        for paper, own in found.items()
    ]
    parts = ["## Verdicts", PAIRS, markdown(["paper", "claims", *used], counts)]
    for paper, own in claims.items():
        rows = [
            [
                link(result.name),
                f"{escaped(claim['text'])} ({escaped(claim['unit'])})",
                verdict(claim) + of_pairs(claim) + marks(result, claim),
            ]
            for result, claim in own
        ]
        parts += [f"### {PAPERS[paper][1]}", markdown(["preset", "claim", "verdict"], rows)]
    return "\n\n".join([*parts, *footnotes(results)])


PAIRS = (
    'A claim is split into pairs ("this method is better than that one") of means over seeds. It is *reproduced* '
    "if all pairs are as the paper says, and *partly* reproduced if some are. Seeds share initial weights, clients "
    "and batches, so each seed can be compared by itself: the verdict says if a pair does not hold in every seed. "
    "Claims of our own, which are in no paper, *hold* or *do not hold*."
)


def link(preset: str) -> str:
    """Return a link to a preset's section."""
    return f"[`{preset}`]({page_of(preset)}.md#{preset})"


# --- the page of a paper -----------------------------------------------------------------------------------------


def at_a_glance(results: Sequence[Result]) -> str:
    """Return tables of the best accuracy of each method, one for each set of methods; the best of a row is bold."""
    alike: dict[tuple[str, ...], list[Result]] = {}
    for result in results:
        methods = tuple(name for variant, name in result.histories if variant == reproduction.FOLDER_AS_GIVEN)
        if result.facts["complete"] and result.facts["scale"] == "full" and len(methods) > 1:
            alike.setdefault(methods, []).append(result)
    tables = []
    for methods, group in alike.items():
        rows = []
        for result in group if len(group) > 1 or len(methods) > FEW_METHODS else []:
            runs = [result.histories[reproduction.FOLDER_AS_GIVEN, name] for name in methods]
            best = [values(histories, lambda history: 100 * history.best(optional=True)) for histories in runs]
            means = [round(statistics.fmean(own), 1) if own else -math.inf for own in best]  # as they are written
            cells = [mean_and_spread(own) for own in best]
            cells = [f"**{c}**" if mean == max(means) else c for c, mean in zip(cells, means, strict=True)]
            rows.append([f"[`{result.name}`](#{result.name})", *cells])
        if rows:
            tables.append(markdown(["preset", *(named(name) for name in methods)], rows))
    explained = "Best test accuracy of a run in %: mean ± standard deviation over seeds. The highest is bold."
    return "\n\n".join(["## At a glance", explained, *tables]) if tables else ""


def summary(results: Sequence[Result]) -> str:
    """Return a table of all claims with the paper's numbers, ours and the verdict."""
    rows = [
        [
            f"[`{result.name}`](#{result.name})",
            f"{escaped(claim['text'])} ({escaped(claim['unit'])})",
            numbers(claim["paper"])
            or f"{escaped(claim['expected'])}; {'in no paper' if ours(claim) else 'no numbers'}",
            numbers(claim["here"], rounds=claim["target"] is not None),
            verdict(claim) + of_pairs(claim) + marks(result, claim),
        ]
        for result in results
        for claim in result.facts["claims"]
    ]
    found = [verdict(claim) for result in results for claim in result.facts["claims"]]
    counted = ", ".join(f"{found.count(word)} {word}" for word in [*VERDICTS.values(), *VERDICTS] if word in found)
    parts = [
        "## All claims",
        f"{amount(len(found), 'claim')} of {amount(len(results), 'preset')}: {counted}. {PAIRS}",
        markdown(["preset", "claim", "paper", "ours", "verdict"], rows),
    ]
    if any(unreached(claim) for result in results for claim in result.facts["claims"]):
        parts.append(NEVER)
    return "\n\n".join([*parts, *footnotes(results)])


def footnotes(results: Sequence[Result]) -> list[str]:
    """Return the explanations of the marks behind verdicts."""
    notes = []
    if any(result.facts["sets"] for result in results):
        notes.append("\\* run with other settings than the preset has now; its section lists them.")
    if any(DIVERGED in marks(result, claim) for result in results for claim in result.facts["claims"]):
        notes.append(
            f"{DIVERGED} a final run of one of these methods diverged. Claims about the best round use what it had "
            "reached; in claims about the last or a later round it loses."
        )
    return notes


def how(results: Sequence[Result], sittings: Sequence[Mapping[str, Any]]) -> str:
    """Return the protocol, the machines and the cost of everything that was run."""
    if not results:
        return ""
    facts = [result.facts for result in results]

    def all_of(key: str) -> str:
        return ", ".join(dict.fromkeys(str(value) for one in facts for value in one[key])) or "unknown"

    runs, diverged = sum(one["runs"] for one in facts), sum(one["diverged_runs"] for one in facts)
    unfinished = [link(result.name) for result in results if not result.facts["complete"]]
    lines = [
        "## How it was run",
        "A preset is an experiment file in `src/lamina/papers`. Data, model, rounds, seeds and the rates to try are "
        "the paper's where it gives them; the description of each preset says where they differ. Within a comparison "
        "all methods have the same initial weights, clients and batches. Where there is a grid, each combination is "
        "started on the first seed. Where the preset says so, two thirds are dropped after a few rounds, and again "
        "later. The best combination is run on every seed. *Mime* is the method that the Fed-LAMB paper calls by "
        "that name; [Algorithms](../reference/algorithms.md) says how each method reads its paper.",
        markdown(
            ["what", ""],
            [
                ["machine", all_of("device")],
                ["versions", f"lamina {all_of('lamina')}, torch {all_of('torch')}"],
                ["arithmetic", all_of("precision")],
                ["runs", f"{runs}, {sum(one['tuning_runs'] for one in facts)} of them to choose settings"],
                ["diverged", str(diverged)],
                *(
                    [spent(own[0]), f"{sum(one['seconds'] for one in own):,.0f}"]
                    for own in ([one for one in facts if one["gpu"]], [one for one in facts if not one["gpu"]])
                    if own
                ),
                ["not finished", ", ".join(unfinished) or "none"],
            ],
        ),
        "Seconds are training and evaluation, summed over all runs; runs that train side by side share them. Reading "
        "data and starting are not included.",
    ]
    if sittings:
        lines.append(
            "Where several presets shared a machine, the seconds of each include waiting for the others. The "
            "sessions in wall-clock time, with everything that was not training:"
        )
        rows = [[str(one[key]) for key in ("date", "machine", "seconds", "what")] for one in sittings]
        lines.append(markdown(["date", "machine", "seconds", "what"], rows))
    return "\n\n".join(lines)


def not_run(results: Sequence[Result], presets: Mapping[str, Path], notes: Mapping[str, Sequence[str]]) -> str:
    """Return the list of presets without results."""
    left = [name for name in presets if name not in {result.name for result in results}]
    lines = [f"- `{name}`" + "".join(f" {note.strip()}" for note in notes.get(name, [])) for name in left]
    return "\n\n".join(["## Not run yet", "\n".join(lines) or "Every preset was run."])


# --- one reproduction --------------------------------------------------------------------------------------------


def section(result: Result, presets: Mapping[str, Path], notes: Sequence[str]) -> str:
    """Return the section of a preset: description, command, cost, table, figure, claims and notes."""
    facts = result.facts
    parts = [f"## {result.name}"]
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
    parts.append(cost(facts))
    parts.append(results_table(result))
    if drawn(result):
        parts.append(f"![{result.name}: {' and '.join(metrics_of(result))} over rounds]({FIGURES}/{result.name}.png)")
        window = window_of(result)
        parts[-1] += f"\n\nEach point of the figure is the mean of {window} rounds." if window > 1 else ""
    parts += [claim_table(claim) for claim in facts["claims"]]
    parts += filter(None, (cost_to_target(result, claim) for claim in facts["claims"]))
    if notes:
        parts.append("\n".join(f"- {note.strip()}" for note in notes))
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


def cost(facts: Mapping[str, Any]) -> str:
    """Return the number of runs, their rounds and seconds, and what went wrong."""
    tuning = facts["tuning_runs"]
    chosen = {"test": "the test data, as the paper does", "validation": "held-out training data"}[facts["select"]]
    line = f"{amount(facts['runs'] - tuning, 'final run')} of {either(facts['rounds'])} rounds; "
    line += (
        f"{amount(tuning, 'tuning run')} of {either(facts['tuning_rounds'])} rounds, on {chosen}"
        if tuning
        else "no tuning runs"
    )
    line += f"; {facts['seconds']:,.0f} {spent(facts)}"
    for what, key in (("diverged", "diverged_runs"), ("not finished", "unfinished_runs")):
        line += f"; {facts[key]} {what}" if facts[key] else ""
    line += f"; {', '.join(facts['device']) or 'machine unknown'}, {', '.join(facts['precision'])}"
    every = max(variant["every"] for variant in facts["variants"].values())
    return line + "." + (f" The record keeps one round in {every}, and the best." if every > 1 else "")


def spent(facts: Mapping[str, Any]) -> str:
    """Return the unit of the seconds."""
    return "GPU seconds" if facts["gpu"] else "CPU seconds"


def results_table(result: Result) -> str:
    """Return a table of each method's best and last accuracy, and of the other metrics in the claims."""
    others = [name for name in metrics_of(result) if name != "accuracy"]
    per_cent = {metric.column for metric in METRICS if metric.percent}
    head = ["method", "settings", "seeds", "best accuracy, %", f"last {LAST} rounds, %", "last accuracy, %"]
    head += [f"last {escaped(name)}{', %' if name in per_cent else ''}" for name in others]
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
        row.append(mean_and_spread(values(histories, last_rounds)))
        row.append(mean_and_spread(values(histories, lambda history: 100 * history.last(optional=True))))
        for other in others:
            scale = 100 if other in per_cent else 1
            last = values(
                histories,
                lambda history, of=other, by=scale: by * history.last(of, optional=True),  # type: ignore[misc]
            )
            row.append(mean_and_spread(last, significant))
        rows.append(row)
    return markdown(head, rows) + "\n\nMean ± standard deviation over seeds." if rows else "No final run has finished."


def last_rounds(history: History) -> float:
    """Return the mean accuracy of the last rounds that were kept, in per cent."""
    kept = [row["accuracy"] for row in history[-LAST:] if not math.isnan(row.get("accuracy", math.nan))]
    return 100 * statistics.fmean(kept) if kept else math.nan


def claim_table(claim: Mapping[str, Any]) -> str:
    """Return a claim with its verdict, and a table of the paper's numbers beside ours."""
    labels = dict.fromkeys([*claim["here"], *claim["paper"]])
    rounds = claim["target"] is not None
    here = {label: number(value, rounds=rounds) for label, value in claim["here"].items()}
    rows = [[named(label), number(claim["paper"].get(label)), here.get(label, NONE)] for label in labels]
    said = f"**{verdict(claim)}**"
    if claim["verdict"] in JUDGED:
        said += f" ({claim['pairs'] - len(claim['wrong'])} of {amount(claim['pairs'], 'pair')}"
        for what, pairs in (("not", claim["wrong"]), ("not in every seed", claim["weak"])):
            listed = ", ".join(f"{named(better)} / {named(worse)}" for better, worse in pairs)
            said += f"; {what} {listed}" if pairs else ""
        said += ")"
    told = f"Claim: {escaped(claim['text'])}. Expected: {escaped(claim['expected'])}. Verdict: {said}\n\n"
    told += markdown([claim["unit"], "paper", "ours"], rows)
    return told + (f"\n\n{NEVER}" if unreached(claim) else "")


def unreached(claim: Mapping[str, Any]) -> bool:
    """Return whether one of our runs ended before it reached a claim's target."""
    return claim["target"] is not None and math.inf in map(float, claim["here"].values())


def cost_to_target(result: Result, claim: Mapping[str, Any], baseline: str = "fedavg") -> str:
    """Return the cost to reach a claim's target in multiples of the baseline's, as in FedLADA's Table 12."""
    as_given = reproduction.FOLDER_AS_GIVEN
    runs = {name: histories for (variant, name), histories in result.histories.items() if variant == as_given}
    here = {name: float(claim["here"].get(name, math.nan)) for name in claim["paper"] if any(runs.get(name, []))}
    here = {name: rounds for name, rounds in here.items() if not math.isnan(rounds)}
    if claim["target"] is None or baseline not in here:
        return ""
    # The cost of a baseline that never reaches the target is unknown, but more than that of its whole run.
    never = math.isinf(here[baseline])
    rounds = float(max(map(len, runs[baseline]))) if never else here[baseline]
    rows = []
    for name, own in here.items():
        counted = algorithms.find(name).card.paper_cost or math.nan
        printed = counted * float(claim["paper"][name]) / float(claim["paper"][baseline])
        really = bytes_of_a_round(runs[name]) / bytes_of_a_round(runs[baseline])
        costs = [("< " if never else "") + times(own / rounds * by) for by in (counted, really)]
        costs = [NONE, NONE] if math.isinf(own) else costs
        rows.append([named(name), number(claim["paper"][name]), times(printed), number(own), *costs])
    head = ["method", "paper: rounds", "paper: cost", "ours: rounds", "ours: cost as the paper counts", "ours: bytes"]
    lines = (
        f"The cost to reach {100 * claim['target']:g} %, in multiples of {named(baseline)}'s. The paper counts one or "
        "two models per round (Table 11; its rounds times these give its Table 12). Bytes are those sent in both "
        "directions."
    )
    lines += f" {named(baseline)} does not reach it in {rounds:g} rounds." if never else ""
    return lines + "\n\n" + markdown(head, rows)


def bytes_of_a_round(histories: Sequence[History]) -> float:
    """Return the mean bytes that a round sends in both directions."""
    kept = [row for history in histories for row in history if "bytes_up" in row]
    return statistics.fmean(row["bytes_down"] + row["bytes_up"] for row in kept)


def times(ratio: float) -> str:
    """Return a multiple as text.

    >>> times(0.688), times(math.inf), times(math.nan)
    ('0.69 ×', '–', '–')
    """
    return f"{ratio:.2f} ×" if math.isfinite(ratio) else NONE


# --- words -------------------------------------------------------------------------------------------------------


def verdict(claim: Mapping[str, Any]) -> str:
    """Return a verdict in the words of the pages; our own claims hold or do not hold."""
    judged = claim["verdict"] in JUDGED
    return str(claim["verdict"]) if judged and ours(claim) else VERDICTS[claim["verdict"]]


def of_pairs(claim: Mapping[str, Any]) -> str:
    """Return how many of a claim's pairs hold, and how many of these in every seed."""
    if claim["verdict"] not in JUDGED:
        return ""
    right, weak = claim["pairs"] - len(claim["wrong"]), len(claim["weak"])
    found = [f"{right} of {claim['pairs']}"] if claim["pairs"] > 1 else []
    found += [f"{right - weak} in every seed" if claim["pairs"] > 1 else "not in every seed"] if weak else []
    return f" ({', '.join(found)})" if found else ""


def marks(result: Result, claim: Mapping[str, Any]) -> str:
    """Return the marks of a verdict: other settings, diverged runs."""
    found = " \\*" if result.facts["sets"] else ""
    for label in claim["here"]:
        for algorithm, variant in named_in(label):
            known = result.facts["variants"].get(variant or reproduction.FOLDER_AS_GIVEN, {}).get("methods", {})
            if known.get(algorithm, {}).get("diverged"):
                return f"{found} {DIVERGED}"
    return found


def ours(claim: Mapping[str, Any]) -> bool:
    """Return whether a claim is our own."""
    return str(claim["text"]).endswith("(ours)")


def numbers(found: Mapping[str, Any], *, rounds: bool = True) -> str:
    """Return labelled numbers in one line."""
    return ", ".join(f"{named(label)}: {number(value, rounds=rounds)}" for label, value in found.items())


def number(value: Any, *, rounds: bool = True) -> str:
    """Return a claim's number as text; JSON stores non-finite numbers as text."""
    return NONE if value in (None, "nan") else written(float(value), rounds=rounds)


def named(label: str) -> str:
    """Return a claim's label, escaped for Markdown."""
    return escaped(called(label))


def amount(count: int, what: str) -> str:
    """Return a count with its noun.

    >>> amount(1, "run"), amount(3, "run")
    ('1 run', '3 runs')
    """
    return f"{count} {what}{'s' * (count != 1)}"


def either(counts: Sequence[int]) -> str:
    """Return counts joined by "or"."""
    return " or ".join(map(str, counts))


def shortened(lines: Sequence[str], most: int = 8) -> list[str]:
    """Return the first few lines, and how many more there are."""
    return [*lines[:most], *([f"and {len(lines) - most} more"] if len(lines) > most else [])]


def escaped(text: str) -> str:
    r"""Return text that Markdown shows unchanged.

    >>> print(escaped("FedAdam(*) | a_b"))
    FedAdam(\*) \| a\_b
    """
    return re.sub(r"([\\*_|<`\[\]])", r"\\\1", text)


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table."""
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *rows])


if __name__ == "__main__":
    main()
