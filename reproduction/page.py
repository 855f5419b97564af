"""Write docs/reproduction and its figures: ``python reproduction/page.py``.

The report tests the central claims, the index counts all verdicts, each preset with a record has a page in the
appendix, and adaptive.md compares the locally adaptive methods. Everything measured comes from reproduction/results;
reproduction/report.md has the report's prose, central.toml its claims, and notes.toml the notes of the presets.
"""

from __future__ import annotations

import argparse
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import adaptive
from appendix import preset_page
from figures import save, save_figures
from record import Result, judged, read_results
from words import RULE, SOURCES, counted, markdown, source, spent, verdict

from lamina.base.errors import unknown
from lamina.experiment.trials import reproduction
from lamina.experiment.trials.claims import Finding
from report import digest, forest_plot, read_central, report

HERE = Path(__file__).parent
PAGES = HERE.parent / "docs" / "reproduction"
PAPERS = {  # the prefix of the presets' names, and the title
    "lamb-": "Fed-LAMB and Mime-LAMB (Karimi, Li & Li)",
    "lada-": "FedLADA (Sun et al. 2023)",
    "": "Other experiments",
}


def main() -> None:
    """Write the pages and their figures; remove pages of presets that have no record."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--results", type=Path, default=HERE / "results", help="records (default: %(default)s)")
    parser.add_argument("--pages", type=Path, default=PAGES, help="folder of the pages and figures (%(default)s)")
    arguments = parser.parse_args()
    results = read_results(arguments.results)
    pages = make(results, reproduction.papers(), read_notes(HERE / "notes.toml"))
    (arguments.pages / "appendix").mkdir(parents=True, exist_ok=True)
    for old in arguments.pages.glob("appendix/*.md"):
        old.unlink()
    for name, text in pages.items():
        (arguments.pages / name).write_text(text, encoding="utf-8")
    figures = save_figures(results, arguments.pages / "figures")
    if arguments.results == HERE / "results":  # the central claims are about these records
        findings = {result.name: findings_of(result, reproduction.papers()) for result in results}
        central = read_central(findings)
        (arguments.pages / "report.md").write_text(report(central), encoding="utf-8")
        save(forest_plot(central), arguments.pages / "figures" / "report.png", digest(central))
        (arguments.pages / "adaptive.md").write_text(adaptive.page(results, findings), encoding="utf-8")
        save(adaptive.picture(results, findings), arguments.pages / adaptive.PICTURE, adaptive.digest(results))
    print(f"wrote {len(pages)} pages and {len(figures)} figures to {arguments.pages}")


def make(results: Sequence[Result], presets: Mapping[str, Path], notes: Mapping[str, Any]) -> dict[str, str]:
    """Return the text of each page by its path: the index, the sessions, and a page for each preset with a record."""
    for name in notes["notes"]:
        if name not in presets:
            raise unknown("preset in notes.toml", name, presets)
    findings = {result.name: findings_of(result, presets) for result in results}
    pages = {"index.md": index(results, findings, presets, notes["notes"])}
    if notes["session"]:
        pages["appendix/sessions.md"] = sessions(notes["session"])
    for result in results:
        text = preset_page(result, findings[result.name], presets, notes["notes"].get(result.name, []))
        pages[f"appendix/{result.name}.md"] = text + "\n"
    return pages


def findings_of(result: Result, presets: Mapping[str, Path]) -> list[Finding]:
    """Return a preset's claims with their verdicts; the small version has none."""
    return judged(result, presets[result.name]) if result.facts["scale"] == "full" else []


def paper_of(preset: str) -> str:
    """Return the title of the paper that a preset belongs to.

    >>> paper_of("lamb-epsilon"), paper_of("lada-lamb-cifar10"), paper_of("mine")
    ('Fed-LAMB and Mime-LAMB (Karimi, Li & Li)', 'FedLADA (Sun et al. 2023)', 'Other experiments')
    """
    return next(title for prefix, title in PAPERS.items() if preset.startswith(prefix))


def read_notes(path: Path) -> dict[str, Any]:
    """Read the explanations."""
    return {"session": [], "notes": {}, **tomllib.loads(path.read_text(encoding="utf-8"))}


# --- the index ---------------------------------------------------------------------------------------------------

HEAD = """# Appendix: every preset

[The report](report.md) has the findings. This page lists the experiments behind it: a *preset* is an experiment file in
`src/lamina/papers`, [`lamina reproduce`](../how-to/reproduce.md) runs it, and each preset that was run has a page with
its protocol, results, figure and claims. `reproduction/page.py` writes these pages from the records in
`reproduction/results`; only the notes are written by hand."""

WORDS = """## Words on these pages

- P1 is the protocol of the drafts of Karimi, Li & Li; P2-text and P2-code are those of their text and of their public
  code; P3 is that of Sun et al.'s text. *The simulator* is the public simulator of Sun et al.'s first author.
- A1, B3 and the like are passages that can be read in more than one way;
  [the register](../reference/algorithms.md#register) says how lamina reads them.
- *Mime* is the method that the Fed-LAMB paper calls by that name, and *Adp-Fed* its name for FedAdam.
- *Consistency* is the mean over the clients of ‖y − x⁺‖², the squared distance of a client's model from the next global
  model: smaller means closer."""

HOW = """## How it was run

Data, model, rounds, seeds and the rates to try are the paper's where it gives them; each preset's page says where they
differ. Within a comparison all methods have the same initial weights, clients and batches. Where there is a grid, each
combination is started on the first seed. Where the preset says so, two thirds are dropped after a few rounds, and again
later; in newer runs all neighbours of the best combination are also run to the end. The best combination is run on
every seed.

Since 2026-11-16 lamina draws partial cohorts in a new way. These presets use it: FedLADA's with the simulator's
protocol, the six three-epoch panels, `lamb-mnist-mlp-layers`, `lamb-no-sharing`, `lamb-theory-fmnist-cnn-noniid` and
the presets `lamb-drafts-…` and `layers-…`. All others are older: if you run one again, the same seed selects other
clients, except where all take part."""


def index(
    results: Sequence[Result],
    findings: Mapping[str, Sequence[Finding]],
    presets: Mapping[str, Path],
    notes: Mapping[str, Sequence[str]],
) -> str:
    """Return the index: the verdicts of all claims and of each preset, how it was run, and what was not run."""
    toctree = "\n".join(["```{toctree}", ":hidden:", ":glob:", "", "appendix/*", "```"])
    parts = [HEAD, verdicts(findings), WORDS, how(results), not_run(results, presets, notes), toctree]
    return "\n\n".join(filter(None, parts)) + "\n"


def verdicts(findings: Mapping[str, Sequence[Finding]]) -> str:
    """Return how often each verdict occurs, by the claims' source, and each preset's verdicts."""
    if not findings:
        return "## Verdicts\n\nNothing has been run yet."
    groups: dict[str, list[Finding]] = {title: [] for title in (*PAPERS.values(), *SOURCES)}
    for preset, of_preset in findings.items():
        for finding in of_preset:
            groups[source(finding.claim) or paper_of(preset)].append(finding)
    groups = {title: group for title, group in groups.items() if group}
    outcomes = {title: [verdict(finding) for finding in group] for title, group in groups.items()}
    columns = [word for word in counted() if any(word in group for group in outcomes.values())]
    rows = [
        [title, str(len(group)), str(len({finding.claim.text for finding in group}))]
        + [str(outcomes[title].count(word)) for word in columns]
        for title, group in groups.items()
    ]
    parts = ["## Verdicts", RULE, markdown(["whose claims", "claims", "distinct texts", *columns], rows)]
    for title in PAPERS.values():
        presets = [preset for preset in findings if paper_of(preset) == title]
        if presets:
            head = ["preset", "the paper's claims", "the simulator README's", "ours"]
            rows = [[link(preset), *(tally(findings[preset], whose) for whose in ("", *SOURCES))] for preset in presets]
            parts += [f"## Presets: {title}", markdown(head, rows)]
    return "\n\n".join(parts)


def tally(findings: Sequence[Finding], whose: str) -> str:
    """Return how often each verdict occurs among the claims of one source, in words."""
    outcomes = [verdict(finding) for finding in findings if source(finding.claim) == whose]
    return ", ".join(f"{outcomes.count(word)} {word}" for word in counted() if word in outcomes)


def link(preset: str) -> str:
    """Return a link to a preset's page."""
    return f"[`{preset}`](appendix/{preset}.md)"


def how(results: Sequence[Result]) -> str:
    """Return the rules of all comparisons, the machines and the cost of everything that was run."""
    if not results:
        return ""
    facts = [result.facts for result in results]

    def all_of(key: str) -> str:
        return ", ".join(dict.fromkeys(str(value) for one in facts for value in one[key])) or "unknown"

    runs, diverged = sum(one["runs"] for one in facts), sum(one["diverged_runs"] for one in facts)
    unfinished = [link(result.name) for result in results if not result.facts["complete"]]
    table = markdown(
        ["what", ""],
        [
            ["machine", all_of("device")],
            ["versions", f"lamina {all_of('lamina')}, torch {all_of('torch')}"],
            ["arithmetic", all_of("precision")],
            ["runs", f"{runs}, {sum(one['tuning_runs'] for one in facts)} of them to choose settings"],
            ["diverged", str(diverged)],
            *(
                [spent(group[0]), f"{sum(one['seconds'] for one in group):,.0f}"]
                for group in ([one for one in facts if one["gpu"]], [one for one in facts if not one["gpu"]])
                if group
            ),
            ["not finished", ", ".join(unfinished) or "none"],
        ],
    )
    seconds = (
        "Seconds are training and evaluation, summed over all runs; runs that train side by side share them. Reading "
        "data and starting are not included, nor is the [speed-up](speed-up.md) study, whose page has its own. "
        "[The sessions](appendix/sessions.md) in wall-clock time include everything."
    )
    return "\n\n".join([HOW, table, seconds])


def not_run(results: Sequence[Result], presets: Mapping[str, Path], notes: Mapping[str, Sequence[str]]) -> str:
    """Return the list of presets without results."""
    left = [name for name in presets if name not in {result.name for result in results}]
    lines = [": ".join([f"- `{name}`", *filter(None, [" ".join(notes.get(name, []))])]) for name in left]
    return "\n\n".join(["## Not run", "\n".join(lines) or "Every preset was run."])


def sessions(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the page of the sessions in which the presets were run."""
    table = markdown(
        ["date", "machine", "seconds", "what"],
        [[str(row[key]) for key in ("date", "machine", "seconds", "what")] for row in rows],
    )
    text = (
        "# Sessions\n\nWall-clock seconds that a machine was held, with starting, copying and everything else that was "
        "not training. Where several presets shared a machine, the seconds on each preset's page include waiting for "
        "the others."
    )
    return f"{text}\n\n{table}\n"


if __name__ == "__main__":
    main()
