"""Sphinx directives whose content comes from lamina itself, so that the reference cannot fall behind the code.

- ``{algorithm-options} fedlamb`` is the table of an algorithm's options, and its presets.
- ``{command} run`` is the usage, the help text and the table of options of a command.
- ``{algorithm-costs}`` is the table of what every algorithm sends and stores.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import click
from docutils import nodes
from docutils.parsers.rst import Directive
from docutils.statemachine import StringList

from lamina import algorithms
from lamina.algorithms.declaration import allowed, options
from lamina.cli import command_line
from lamina.rounds.ledger import wire_cost


class Generated(Directive):
    """Base of the directives: parse the Markdown that `lines` returns."""

    optional_arguments = 2

    def run(self) -> list[nodes.Node]:
        """Return the parsed content."""
        container = nodes.container()
        self.state.nested_parse(StringList(self.lines(*self.arguments), source="generated"), 0, container)
        return container.children

    def lines(self, *arguments: str) -> list[str]:
        """Return the content as lines of Markdown."""
        raise NotImplementedError


class AlgorithmOptions(Generated):
    """The options of one algorithm."""

    def lines(self, *arguments: str) -> list[str]:
        """Return a table of the options, and one of the presets."""
        cls = algorithms.find(arguments[0])
        rows = [
            [f"`{name}`", f"`{field.default!r}`", cell(allowed(cls, name)), cell(field.metadata.get("doc", ""))]
            for name, field in options(cls).items()
        ]
        presets = [
            [f"`{name}`", ", ".join(f"`{key} = {value!r}`" for key, value in values.items())]
            for name, values in cls.card.presets.items()
        ]
        lines = table(["option", "default", "values", "meaning"], rows)
        return [*lines, "", *table(["preset", "sets"], presets)] if presets else lines


class AlgorithmCosts(Generated):
    """What every algorithm sends and stores."""

    def lines(self, *arguments: str) -> list[str]:
        """Return a table with one row for each algorithm."""
        rows = []
        for name, cls in sorted(algorithms.registry().items()):
            reference = f"[{cell(cls.card.reference)}]({cls.card.link})" if cls.card.link else cell(cls.card.reference)
            costs = [f"{models:g}" for models in wire_cost(algorithms.create(name))]
            rows.append([f"`{name}`", cell(cls.card.title), *costs, f"{cls.card.lr:g}", reference])
        return table(["name", "method", "down", "up", "keeps", "default `lr`", "reference"], rows)


class Command(Generated):
    """The reference of one command of the command line."""

    def lines(self, *arguments: str) -> list[str]:
        """Return the usage, the help and a table of the options."""
        command: Any = command_line()
        for name in arguments:
            command = command.commands[name]
        context = click.Context(command, info_name=" ".join(["lamina", *arguments]))
        usage = " ".join([context.command_path, *command.collect_usage_pieces(context)])
        rows = [
            [
                ", ".join(f"`{name}`" for name in parameter.opts)
                + (f" `{parameter.make_metavar(context)}`" if not parameter.is_flag else ""),
                cell(parameter.help or ""),
                f"`{parameter.default}`" if parameter.default not in (None, False, [], ()) else "",
            ]
            for parameter in command.params
            if getattr(parameter, "help", None) and parameter.param_type_name == "option"
        ]
        help_lines = (command.help or "").strip().splitlines()
        return ["```text", usage, "```", "", *help_lines, "", *table(["option", "meaning", "default"], rows)]


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a Markdown table, or nothing without rows."""
    return ["| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *rows]] if rows else []


def cell(text: str) -> str:
    """Return text for a cell of a table, with Markdown's characters escaped."""
    for character in "\\|*_<[":
        text = text.replace(character, f"\\{character}")
    return text


def prepare_docstring(app: Any, what: str, name: str, obj: Any, settings: Any, lines: list[str]) -> None:
    """Change what napoleon would misread: arguments that share one description, and a property's first colon."""
    if what in ("attribute", "property") and lines:
        lines[0] = lines[0].replace(": ", " – ")  # napoleon takes what precedes a colon for the type
    for i in range(len(lines) - 1, 0, -1):
        if re.fullmatch(r"\s+(\w+, )*\w+,", lines[i - 1]):
            lines[i - 1 : i + 1] = [f"{lines[i - 1]} {lines[i].strip()}"]


def setup(app: Any) -> dict[str, bool]:
    """Register the directives and the hook with Sphinx."""
    app.connect("autodoc-process-docstring", prepare_docstring, priority=100)  # before napoleon, at 500
    app.add_directive("algorithm-options", AlgorithmOptions)
    app.add_directive("algorithm-costs", AlgorithmCosts)
    app.add_directive("command", Command)
    return {"parallel_read_safe": True}
