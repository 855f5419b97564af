"""``lamina audit``: what observers of an experiment with differential privacy can in fact tell."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lamina.base.errors import BadInput
from lamina.base.text import plural
from lamina.cli import base
from lamina.cli.base import Set, echo

if TYPE_CHECKING:
    from lamina.training.audit import Audit

ROUNDS = "of every run; default: as many as the experiment trains"
SEED = "of the audit's noise and cohorts; default: different in every audit"


@base.app.command()
@base.interruptible("an audit keeps nothing")
def audit(
    file: base.File,
    overrides: Set = None,
    runs: Annotated[int, typer.Option("--runs", help="how many runs to train side by side", min=1)] = 100,
    rounds: Annotated[int | None, typer.Option("--rounds", help=ROUNDS, min=1)] = None,
    seed: Annotated[int | None, typer.Option("--seed", help=SEED)] = None,
) -> None:
    """Measure how much a private experiment reveals about a client; the exit code is 1 if that proves an error.

    Half of the clients send the most visible upload that the clipping bound permits. The noise is that of the audit
    alone.
    """
    import torch

    from lamina.experiment.build import build, choose_threads
    from lamina.experiment.config import load
    from lamina.training.audit import audit as measure

    experiment = load(file, overrides or [])
    if experiment.privacy is None:
        raise BadInput(f"'{file}' has no [privacy]: there is nothing to audit")
    with tempfile.TemporaryDirectory() as folder:  # the user's secret is neither read nor made
        simulation = build(experiment.changed(privacy={"secret": str(Path(folder) / "secret")}))
    if rounds is None:
        rounds = experiment.train.rounds
        if experiment.privacy.epsilon is not None and simulation.accountant is not None:
            rounds = max(1, simulation.accountant.rounds_within(experiment.privacy.epsilon, rounds))
    torch.set_num_threads(choose_threads(experiment, simulation.objective.start.numel()))
    with base.round_bars(["audit"], state="", total=rounds, completed=0) as bars:
        audit = measure(simulation, rounds, runs=runs, seed=seed, on_round=lambda n: bars.update("audit", completed=n))
    print_audit(audit)
    if audit.proves_error:
        raise typer.Exit(1)


def print_audit(audit: Audit) -> None:
    """Print what is accounted for, what was measured, and what that means."""
    after = f"δ = {audit.delta:g} after {plural(audit.rounds, 'round')}"
    echo(f"accounted: ε = {audit.accounted:.3g} at {after}, noise multiplier {audit.noise_multiplier:.4g}")
    noise = "any noise multiplier is possible"
    if audit.shown > 0:
        noise = f"a noise multiplier of at most {audit.shown_noise:.4g}"
    echo(f"measured:  ε ≥ {audit.shown:.3g} with {audit.confidence:.0%} confidence, {noise}")
    echo(f"           (scores with a canary: {len(audit.present)}, without: {len(audit.absent)})")
    if audit.proves_error:
        echo("More is seen than the guarantee allows: the clipping, the noise or the account is wrong.")
    else:
        echo("No more is seen than the guarantee allows, which proves neither the guarantee nor an error.")
