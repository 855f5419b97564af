"""Write the pages of docs/reproduction and their figures: ``python reproduction/page.py``.

The index has the verdicts, and each paper has a page with its experiments. Everything measured comes from
reproduction/results, every explanation from reproduction/notes.toml.
"""

from __future__ import annotations

import argparse
import math
import statistics
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from figures import save_figures
from record import Result, read_results
from section import FIGURES, section
from words import (
    DIVERGED,
    NEVER,
    VERDICTS,
    amount,
    escaped,
    markdown,
    marks,
    named,
    numbers,
    of_pairs,
    ours,
    spent,
    unreached,
    verdict,
)

from lamina.base.errors import unknown
from lamina.experiment.trials import reproduction
from lamina.report.tables import mean_and_spread
from lamina.training.history import values

HERE = Path(__file__).parent
PAGES = HERE.parent / "docs" / "reproduction"
PAPERS = {  # the pages: the prefix of the presets' names, and the title
    "fed-lamb": ("lamb-", "Fed-LAMB and Mime-LAMB (Karimi, Li & Li)"),
    "fedlada": ("lada-", "FedLADA (Sun et al. 2023)"),
    "other": ("", "Other experiments"),
}
FEW_METHODS = 3  # a single comparison of so few methods gets no table


def main() -> None:
    """Write the pages and their figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--results", type=Path, default=HERE / "results", help="records (default: %(default)s)")
    parser.add_argument("--pages", type=Path, default=PAGES, help="folder of the pages and figures (%(default)s)")
    arguments = parser.parse_args()
    results = read_results(arguments.results)
    pages = make(results, reproduction.papers(), read_notes(HERE / "notes.toml"))
    for name, text in pages.items():
        (arguments.pages / name).write_text(text, encoding="utf-8")
    figures = save_figures(results, arguments.pages / FIGURES)
    print(f"wrote {len(pages)} pages and {len(figures)} figures to {arguments.pages}")


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
verdicts and says how everything was run. To run an experiment again, use the command in its section.

- P1 is the protocol of the drafts of Karimi, Li & Li; P2-text and P2-code are those of their text and of their public
  code; P3 is that of Sun et al.'s text.
- A1, B3 and the like are passages that can be read in more than one way;
  [the register](../reference/algorithms.md#register) says how lamina reads them.
- *Consistency* is the mean over the clients of ‖y − x⁺‖², the squared distance of a client's model from the next global
  model: smaller means closer."""


COHORTS = """Since 2026-11-16 lamina draws partial cohorts in a new way. These presets use it: FedLADA's
with the simulator's protocol, the six three-epoch panels, `lamb-mnist-mlp-layers`, `lamb-no-sharing`,
`lamb-theory-fmnist-cnn-noniid` and the presets `lamb-drafts-…`. All others are older: if you run one again, the same
seed selects other clients, except where all take part."""


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
        COHORTS,
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
    claims: dict[str, list[tuple[Result, Mapping[str, Any]]]] = {paper: [] for paper in papers}
    for result in results:
        claims[page_of(result.name)] += [(result, claim) for claim in result.facts["claims"]]
    outcomes = {paper: [verdict(claim) for _, claim in pairs] for paper, pairs in claims.items()}
    columns = [word for word in words if any(word in of_paper for of_paper in outcomes.values())]
    counts = [
        [f"[{PAPERS[paper][1]}]({paper}.md)", str(len(of_paper)), *(str(of_paper.count(word)) for word in columns)]
        for paper, of_paper in outcomes.items()
    ]
    parts = ["## Verdicts", PAIRS, markdown(["paper", "claims", *columns], counts)]
    for paper, pairs in claims.items():
        rows = [
            [
                link(result.name),
                f"{escaped(claim['text'])} ({escaped(claim['unit'])})",
                verdict(claim) + of_pairs(claim) + marks(result, claim),
            ]
            for result, claim in pairs
        ]
        parts += [f"### {PAPERS[paper][1]}", markdown(["preset", "claim", "verdict"], rows)]
    return "\n\n".join([*parts, *footnotes(results)])


PAIRS = (
    'A claim is split into pairs ("this method is better than that one") of means over seeds. It is *reproduced* '
    "if all pairs are as the paper says, and *partly* reproduced if some are. With the same seed all methods have the "
    "same initial weights, clients and batches, so each seed can be compared by itself: the verdict says if a pair "
    "does not hold in every seed. Claims of our own, which are in no paper, *hold* or *do not hold*."
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
            means = [round(statistics.fmean(seeds), 1) if seeds else -math.inf for seeds in best]  # as written
            cells = [mean_and_spread(seeds) for seeds in best]
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
    outcomes = [verdict(claim) for result in results for claim in result.facts["claims"]]
    words = dict.fromkeys([*VERDICTS.values(), *VERDICTS])
    counts = ", ".join(f"{outcomes.count(word)} {word}" for word in words if word in outcomes)
    parts = [
        "## All claims",
        f"{amount(len(outcomes), 'claim')} of {amount(len(results), 'preset')}: {counts}. {PAIRS}",
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
        "later; in newer runs all neighbours of the best combination are run to the end, too. The best combination is "
        "run on every seed. *Mime* is the method that the Fed-LAMB paper calls by that name; "
        "[Algorithms](../reference/algorithms.md) says how each method reads its paper.",
        markdown(
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
        ),
        "Seconds are training and evaluation, summed over all runs; runs that train side by side share them. Reading "
        "data and starting are not included, nor is the [speed-up](speed-up.md) study, whose page has its own.",
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
    lines = [": ".join([f"- `{name}`", *filter(None, [" ".join(notes.get(name, []))])]) for name in left]
    return "\n\n".join(["## Not run yet", "\n".join(lines) or "Every preset was run."])


if __name__ == "__main__":
    main()
