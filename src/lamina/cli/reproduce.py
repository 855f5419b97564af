"""``lamina reproduce``: run a comparison a paper reports, and hold the paper's claims against it."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import math
import os
from importlib import resources
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich import box
from rich.markup import escape
from rich.table import Table

from lamina.cli.base import Interrupted, Overwrite, Quiet, Set, Stop, app, err, interruptible, out, tell
from lamina.cli.compare import Lines, LiveTable, show_comparison
from lamina.cli.run import TO_GO_ON
from lamina.data import sources
from lamina.data.dataset import Dataset, Splits
from lamina.errors import BadInput, unknown
from lamina.experiment import claims, compare
from lamina.experiment.build import build_aggregation, build_algorithm, build_partition, build_schedule
from lamina.experiment.claims import AS_GIVEN, Finding
from lamina.experiment.config import Claim, Experiment, Tried, load
from lamina.experiment.toml import complete_text
from lamina.storage.files import cannot_write, write_file, write_json
from lamina.text import plural

FOLDER_AS_GIVEN = "as-given"  # of the variant that changes nothing
SMALL_TRAIN, SMALL_TEST, SMALL_ROUNDS = 2000, 500, 10
Scale = Literal["full", "small"]


@app.command()
@interruptible(f"finished rounds are kept; {TO_GO_ON}")
def reproduce(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="a paper's figure or table, or an experiment file with claims")
    ] = None,
    listed: Annotated[bool, typer.Option("--list", help="list the names and their claims")] = False,
    copy: Annotated[
        Path | None, typer.Option("--write", metavar="FILE", help="run nothing: copy the experiment file, to edit it")
    ] = None,
    scale: Annotated[Scale, typer.Option("--scale", help="small: about a minute, and no verdict")] = "full",
    overrides: Set = None,
    out_folder: Annotated[Path | None, typer.Option("--out", help="folder for runs, pictures and tables")] = None,
    overwrite: Overwrite = False,
    quiet: Quiet = False,
) -> None:
    """Run a comparison that a paper reports; prints the paper's numbers beside ours and whether its claims hold.

    Started again, it skips the runs that are complete and goes on with the others.
    """
    if listed:
        list_papers()
        return
    if name is None:
        raise BadInput("say which: lamina reproduce NAME; lamina reproduce --list has the names")
    file = find(name)
    if copy is not None:
        write_copy(file, copy)
        return
    experiments = plan(file, overrides or [], scale)
    if scale == "full" and not quiet:
        for claim in load(file, overrides or []).claim:
            note_if_too_short(claim, experiments)
    path = out_folder or Path("runs") / (file.stem + ("-small" if scale == "small" else ""))
    entries: dict[str, compare.Entry] = {}
    stop = Stop()  # one for all variants: asked in the last round of one, no other begins
    for variant, experiment in experiments.items():
        if not quiet and variant:
            tell(f"{variant}:")
        finished = run(experiment, path / (variant or FOLDER_AS_GIVEN), entries, variant, stop, overwrite, quiet)
        finished = finished and (not stop() or variant == list(experiments)[-1])
        if not finished:
            raise Interrupted(f"stopped after a round; {TO_GO_ON}{' without --overwrite' * overwrite}")
    rounds = next(iter(experiments.values())).train.rounds
    wanted = load(file, overrides or []).claim
    findings = [claims.evaluate(in_reach(claim, rounds) if scale == "small" else claim, entries) for claim in wanted]
    save(findings, path, scale)
    if not quiet:
        show(findings, scale)
        if overrides:
            tell(f"note: not as in the file: {', '.join(overrides)}")
    compare.refuse_all_diverged(entries.values())


def papers() -> dict[str, Path]:
    """The experiment files that come with lamina, by name."""
    folder = Path(str(resources.files("lamina") / "papers"))
    return {file.stem: file for file in sorted(folder.glob("*.toml"))}


def find(name: str) -> Path:
    """The file of a name, or a file of the user's own."""
    if name.endswith(".toml"):
        return Path(name)
    if name not in papers():
        raise unknown("paper's claim", name, papers())
    return papers()[name]


def write_copy(file: Path, copy: Path) -> None:
    """Write a complete copy of an experiment file, without `extends`, for the user to edit; replace nothing."""
    text = complete_text(file)
    try:
        if os.path.lexists(copy):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
        write_file(copy, text.encode())
    except OSError as error:
        raise BadInput(f"cannot write '{copy}': {error.strerror or error}") from error
    tell(f"wrote {copy}; run it with: lamina reproduce {copy}")


def list_papers() -> None:
    """Every name with its claims."""
    made = Table(box=None, pad_edge=False)
    for heading in ("name", "claims"):
        made.add_column(heading, overflow="fold")
    for name, file in papers().items():
        for number, claim in enumerate(load(file).claim):
            made.add_row("" if number else name, escape(claim.text))
    out.print(made)


def plan(file: Path, overrides: list[str], scale: Scale = "full") -> dict[str, Experiment]:
    """The comparisons a file's claims need, by variant; all is made once, so that a wrong option costs no time."""
    experiment = load(file, overrides)
    claims.check(experiment)
    made = {}
    for variant, names in claims.needed(experiment).items():
        chosen = "compare.algorithms=[" + ",".join(f'"{name}"' for name in names) + "]"
        own = load(file, [*overrides, *claims.variants(experiment)[variant], chosen])
        own = small(own) if scale == "small" else own
        build_partition(own), build_schedule(own), build_aggregation(own), compare.tuning_rounds(own)
        for name in names:
            for settings in compare.points_of(own, name):
                build_algorithm(compare.with_algorithm(own, name, settings))
        made[variant] = own
    return made


def note_if_too_short(claim: Claim, experiments: dict[str, Experiment]) -> None:
    """Say before the runs if they are too short for a claim."""
    wanted = max(claim.at if isinstance(claim.at, int) else 0, claim.within or 0)
    variants = {variant for label in claims.labels(claim) for _, variant in claims.named_in(label)}
    rounds = min(experiments[variant].train.rounds for variant in variants)
    if rounds < wanted:
        tell(f"note: no verdict on '{claim.text}': it is about round {wanted}, and the runs have {rounds}")


def run(
    experiment: Experiment,
    path: Path,
    entries: dict[str, compare.Entry],
    variant: str,
    stop: Stop,
    overwrite: bool,
    quiet: bool,
) -> bool:
    """Run one comparison and enter its results by label; whether it was finished, not stopped."""
    watcher = compare.Watcher() if quiet else LiveTable(experiment) if err.is_terminal else Lines(experiment)
    comparison = compare.Comparison(experiment, path, overwrite=overwrite, watcher=watcher, stop=stop)
    with stop, watcher if isinstance(watcher, LiveTable) else contextlib.nullcontext():
        finished = comparison.run()
    if comparison.entries:
        show_comparison(comparison, quiet)
    for entry in comparison.entries:
        entries[entry.name if variant == AS_GIVEN else f"{entry.name}@{variant}"] = entry
    return finished


# --- the small version -------------------------------------------------------------------------------------------


def small(experiment: Experiment) -> Experiment:
    """The same with a part of the data, few rounds, one seed, no choice, and no ResNet: to see that it runs."""
    data, train, spec = experiment.data, experiment.train, experiment.compare
    rounds = min(train.rounds, SMALL_ROUNDS)
    model = experiment.model
    if model.name.startswith("resnet"):
        model = model.model_validate({"name": "small_cnn"})
    return experiment.model_copy(
        update={
            "data": data.model_copy(update={"name": small_source(data.name)}),
            "model": model,
            "train": train.model_copy(update={"rounds": rounds}),
            "run": experiment.run.model_copy(update={"checkpoint_every": rounds}),
            "compare": spec.model_copy(
                update={
                    "seeds": 1,
                    "tuning_rounds": None,  # nothing is tried
                    "grid": {name: middle(tried) for name, tried in spec.grid.items()},
                }
            ),
        }
    )


def middle(tried: Tried) -> Tried:
    """One value of each list."""
    return Tried.model_validate({name: values[len(values) // 2 :][:1] for name, values in tried.values().items()})


def small_source(name: str) -> str:
    """Enter a part of a data set as a data set of its own, so that no folder holds it under the whole one's name."""
    if name not in sources.SOURCES:
        raise unknown("data set", name, sources.SOURCES)
    source, part = sources.SOURCES[name], f"{name}-small"

    def read(root: Path) -> Splits:
        whole = sources.load(name, root if root.is_dir() else None)  # else it is the default, which need not be there
        return Splits(some(whole.train, SMALL_TRAIN), some(whole.test, SMALL_TEST))

    sources.SOURCES[part] = dataclasses.replace(source, description=f"a part of {name}", read=read, hub=None)
    return part


def some(data: Dataset, samples: int) -> Dataset:
    """That many random samples, the same every time."""
    return data if len(data) <= samples else data.holdout(samples / len(data), seed=0)[1]


def in_reach(claim: Claim, rounds: int) -> Claim:
    """The claim about all rounds, or the last, if those it is about are not reached."""
    at = "last" if isinstance(claim.at, int) and claim.at > rounds else claim.at
    within = None if claim.within is not None and claim.within > rounds else claim.within
    return claim.model_copy(update={"at": at, "within": within})


# --- what is said ------------------------------------------------------------------------------------------------


def save(findings: list[Finding], path: Path, scale: Scale) -> None:
    """Write claims.json, beside the comparisons' folders."""
    rows = [
        {
            "text": finding.claim.text,
            "paper": finding.claim.paper,
            "here": finding.values,
            **({"verdict": finding.verdict} if scale == "full" else {}),
        }
        for finding in findings
    ]
    try:
        write_json(path / "claims.json", {"scale": scale, "claims": rows})
    except OSError as error:
        raise cannot_write(path, error) from error


def show(findings: list[Finding], scale: Scale) -> None:
    """Print the paper's numbers beside ours and, at full scale, a verdict for every claim."""
    for finding in findings:
        claim = finding.claim
        tell("")
        tell(f"claim: {claim.text}")
        made = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        made.add_column(unit(claim), overflow="fold")
        for heading in ("paper", "here"):
            made.add_column(heading, justify="right", no_wrap=True)
        for label in dict.fromkeys([*finding.values, *claim.paper]):
            published = written(claim.paper[label]) if label in claim.paper else "-"
            here = in_per_cent(claim, finding.values.get(label, math.nan))
            made.add_row(escape(label), published, written(here, rounds=claim.target is not None))
        out.print(made)
        if scale == "full":
            so = sum(finding.pairs.values())
            wrong = [pair for pair, holds in finding.pairs.items() if not holds]
            but = [("not", wrong), ("not in every seed", finding.weak)]
            told = [
                f"{what} " + ", ".join(f"{better} / {worse}" for better, worse in them) for what, them in but if them
            ]
            tell(f"verdict: {finding.verdict} ({'; '.join([f'{so} of {len(finding.pairs)} pairs', *told])})")
    if scale == "small":
        tell("")
        tell(
            f"small version: at most {SMALL_TRAIN} training samples and {SMALL_ROUNDS} rounds, one seed, "
            "untuned rates, small_cnn in place of a ResNet; it shows that all runs, and is no verdict about the paper"
        )


def unit(claim: Claim) -> str:
    """What the numbers of a claim are."""
    per_cent = ", %" if in_per_cent(claim, 1) != 1 else ""
    within = f" of {plural(claim.within, 'round')}" if claim.within is not None else ""
    if claim.target is not None:
        return f"rounds to {claim.metric} {claim.target:g}{within and ','}{within}"
    return f"{claim.metric}{per_cent}, " + (f"round {claim.at}" if isinstance(claim.at, int) else claim.at) + within


def in_per_cent(claim: Claim, value: float) -> float:
    """A value as papers print it."""
    return 100 * value if claim.target is None and "accuracy" in claim.metric else value


def written(value: float, *, rounds: bool = True) -> str:
    """A number as text, in characters every terminal has: infinitely many `rounds` are never, else a run diverged."""
    if math.isnan(value):
        return "-"
    if math.isinf(value):
        return "never" if rounds and value > 0 else "diverged"
    return f"{value:.4g}"
