"""``lamina conform``: compare an algorithm with another implementation of it, step by step."""

from __future__ import annotations

import tomllib
from typing import Annotated, Any

import typer

from lamina.base.errors import BadInput, short_repr
from lamina.cli.base import app, echo

SETTINGS = ("lr", "aggregation", "weighting")  # that --set takes besides the algorithm's options and `preset`
NAME = "the algorithm, as `lamina list algorithms` names it, or module:Class"
THEIRS = "the other implementation: an optimizer, a Flower strategy or a function"


@app.command()
def conform(
    name: Annotated[str, typer.Argument(metavar="NAME", help=NAME)],
    theirs: Annotated[str, typer.Argument(metavar="MODULE:THING", help=THEIRS)],
    ours: Annotated[
        list[str] | None,
        typer.Option("--set", help="an option of our algorithm, preset, lr, aggregation or weighting, e.g. beta1=0.8"),
    ] = None,
    options: Annotated[
        list[str] | None, typer.Option("--theirs", help="an argument of the other implementation, e.g. tau=1e-9")
    ] = None,
    half: Annotated[str | None, typer.Option("--half", help="of an optimizer: local or server")] = None,
    steps: Annotated[int, typer.Option("--steps", help="how many local or server steps to compare", min=1)] = 50,
    local_steps: Annotated[int, typer.Option("--local-steps", help="of a client in a round", min=1)] = 10,
    clients: Annotated[int, typer.Option("--clients", help="in every round", min=1)] = 3,
    tolerance: Annotated[float, typer.Option("--tolerance", help="relative difference that counts as none")] = 1e-12,
    seed: Annotated[int, typer.Option("--seed", help="of the gradients, or of the model and data")] = 0,
) -> None:
    """Feed the same gradients, or model and data, to an algorithm and to another implementation of a half of it.

    It names the first step and quantity that differ, and by how much. The exit code is 1 if the model differs.
    """
    from lamina.algorithms import create
    from lamina.conformance import conform as compare

    if ":" in name and ":" not in theirs:
        raise BadInput(f"the algorithm comes first: lamina conform {theirs} {name}")
    our_options = dict(parse("--set", each) for each in ours or [])
    settings = {key: our_options.pop(key) for key in SETTINGS if key in our_options}
    verdict = compare(
        create(name, **our_options),
        theirs,
        options=dict(parse("--theirs", each) for each in options or []),
        half=half,  # type: ignore[arg-type]  # it is checked there
        steps=steps,
        local_steps=local_steps,
        clients=clients,
        tolerance=tolerance,
        seed=seed,
        **settings,
    )
    for line in str(verdict).splitlines():
        echo(line)
    if not verdict.same:
        raise typer.Exit(1)


def settable_names() -> list[str]:
    """Return what --set takes with one algorithm or another."""
    from lamina import algorithms

    options = {name for algorithm in algorithms.registry().values() for name in algorithms.options(algorithm)}
    return [*SETTINGS, "preset", *sorted(options)]


def parse(option: str, text: str) -> tuple[str, Any]:
    """Return the name and the value of ``name=value``; the value is TOML, and a bare word is a string."""
    name, equals, value = text.partition("=")
    if not equals or not name.strip().isidentifier():
        raise BadInput(f"{option} {short_repr(text)} is not of the form name=value, for example beta1=0.8")
    try:
        return name.strip(), tomllib.loads(f"value = {value}")["value"]
    except (ValueError, RecursionError):
        return name.strip(), value.strip()
