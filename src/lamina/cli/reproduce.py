"""``lamina reproduce``: run a comparison that a paper reports, and check the paper's claims."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from lamina.base.errors import BadInput
from lamina.base.text import plural
from lamina.cli import base
from lamina.cli.base import Interrupted, Overwrite, Quiet, Set, echo
from lamina.cli.compare import run_comparison
from lamina.cli.workers import Slurm, Workers, launch

if TYPE_CHECKING:
    from lamina.experiment.trials.claims import Finding
    from lamina.experiment.trials.trial import Trial

Scale = Literal["full", "small"]


@base.app.command()
@base.resumable
def reproduce(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            help="a figure or table, as `lamina list papers` names it, or an experiment file with claims",
        ),
    ],
    copy: Annotated[
        Path | None, typer.Option("--write", metavar="FILE", help="run nothing: copy the experiment file, to edit it")
    ] = None,
    scale: Annotated[Scale, typer.Option("--scale", help="small: about a minute, and no verdict")] = "full",
    overrides: Set = None,
    out_folder: Annotated[Path | None, typer.Option("--out", help="folder for runs, pictures and tables")] = None,
    overwrite: Overwrite = False,
    quiet: Quiet = False,
    workers: Workers = 1,
    slurm: Slurm = None,
) -> None:
    """Run a comparison that a paper reports; prints the paper's numbers beside ours and whether its claims hold.

    Started again, it skips the runs that are complete and resumes the others. Several of these commands at once, on
    any machines that share the folder, share the work.
    """
    from lamina.experiment.config import load
    from lamina.experiment.trials import claims, reproduction
    from lamina.experiment.trials.compare import count_runs
    from lamina.experiment.trials.trial import refuse_all_diverged
    from lamina.storage.leases import turn

    file = reproduction.find(name)
    if copy is not None:
        write_copy(file, copy)
        return
    experiments = reproduction.plan(file, overrides or [], scale)
    wanted = load(file, overrides or []).claim
    if scale == "full":
        for note in filter(None, (reproduction.too_short(claim, experiments) for claim in wanted)):
            echo(f"note: {note}")
    path = out_folder or Path("runs") / (file.stem + "-small" * (scale == "small"))
    places = {variant: path / (variant or reproduction.FOLDER_AS_GIVEN) for variant in experiments}
    replaced = [(place, experiments[variant].compare) for variant, place in places.items()] * overwrite
    if launch(workers, slurm, max(map(count_runs, experiments.values())), path, replaced):
        return
    entries: dict[str, Trial] = {}
    stop = base.Stop()  # shared by all variants: a stop in the last round of one keeps the next from starting
    for variant, experiment in experiments.items():
        if variant:
            echo(f"{variant}:")
        comparison, finished = run_comparison(experiment, places[variant], stop, overwrite)
        entries |= {f"{entry.name}@{variant}" if variant else entry.name: entry for entry in comparison.entries}
        if not finished or (stop() and variant != list(experiments)[-1]):
            raise Interrupted(f"stopped after a round; {base.how_to_resume(overwrite)}")
    if scale == "small":
        rounds = next(iter(experiments.values())).train.rounds
        wanted = [reproduction.in_reach(claim, rounds) for claim in wanted]
    findings = [claims.evaluate(claim, entries) for claim in wanted]
    with turn(path):  # other processes may write there
        reproduction.save(findings, path, scale)
    show(findings, scale)
    if overrides:
        echo(f"note: not as in the file: {', '.join(overrides)}")
    refuse_all_diverged(entries.values())


def write_copy(file: Path, copy: Path) -> None:
    """Write a complete copy of an experiment file, without `extends`, for the user to edit; replace nothing."""
    from lamina.base.atomic import write_file
    from lamina.experiment.toml import complete_text

    text = complete_text(file)
    if os.path.lexists(copy):
        raise BadInput(f"cannot write '{copy}': File exists")
    try:
        write_file(copy, text.encode())
    except OSError as error:
        raise BadInput(f"cannot write '{copy}': {error.strerror or error}") from error
    echo(f"wrote {copy}; run it with: lamina reproduce {copy}")


def show(findings: list[Finding], scale: Scale) -> None:
    """Print the paper's numbers beside ours and, at full scale, a verdict for every claim."""
    from lamina.experiment.trials import claims, reproduction

    for finding in findings:
        claim, numbers = finding.claim, ["paper", "here"]
        is_rounds = claim.target is not None
        numbers += ["first touch"] if is_rounds else []
        unreached = f"not within {plural(finding.rounds, 'round')}"
        rows = []
        for label in dict.fromkeys([*finding.values, *claim.paper]):
            published = claims.written(claim.paper[label], never="not reached") if label in claim.paper else "-"
            here = claims.in_per_cent(claim, finding.values.get(label, math.nan))
            row = [label, published, claims.written(here, rounds=is_rounds, never=unreached)]
            touch = finding.touches.get(label, math.nan)
            rows.append([*row, claims.written(touch, never=unreached)] if is_rounds else row)
        echo("")
        echo(f"claim: {claim.text}")
        base.out.print(base.table((claims.unit(claim), *numbers), rows, right=numbers, no_wrap=numbers))
        if scale == "full":
            show_pairs(finding)
    if scale == "small":
        echo("")
        echo(
            f"small version: at most {reproduction.SMALL_TRAIN} training samples and {reproduction.SMALL_ROUNDS} "
            "rounds, one seed, untuned rates, small_cnn in place of a ResNet; a smoke test, and no verdict about the "
            "paper"
        )


def show_pairs(finding: Finding) -> None:
    """Print the difference of every pair with its interval, and the verdict."""
    from lamina.experiment.trials import claims

    rows = [
        [f"{pair.better} / {pair.worse}", claims.written_lead(finding.claim, pair), claims.written_outcome(pair)]
        for pair in finding.pairs
    ]
    lead = "lead [95 %]" if finding.seeds > 1 else "lead"
    if rows:
        base.out.print(base.table(("pair", lead, "outcome"), rows, no_wrap=(lead,)))
    right = sum(pair.outcome == "right" for pair in finding.pairs)
    details = [f"{right} of {plural(len(rows), 'pair')}"] if rows else []
    details += ["one seed" if finding.seeds == 1 else f"{finding.seeds} seeds"] if finding.seeds else []
    echo(f"verdict: {finding.verdict}" + (f" ({', '.join(details)})" if details else ""))
