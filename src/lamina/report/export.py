"""Tables as CSV for programs and as LaTeX for papers; page.js does the same for the tables on the page."""

from __future__ import annotations

import re

from lamina.report.tables import NEVER, NONE, SPREAD, Table
from lamina.text import csv_text, printable

WORDS = {NEVER: "inf", NONE: ""}  # in CSV
_NUMBER = re.compile(r"[-+]?[\d.]+%?|\d+/\d+|[∞–]|[-+]?[\d.]+ ± [\d.]+")
_LATEX = str.maketrans(
    {
        "\\": r"\textbackslash{}",
        "{": r"\{",
        "}": r"\}",
        "$": r"\$",
        "&": r"\&",
        "#": r"\#",
        "%": r"\%",
        "_": r"\_",
        "^": r"\textasciicircum{}",
        "~": r"\textasciitilde{}",
        "<": r"\textless{}",
        ">": r"\textgreater{}",
        "|": r"\textbar{}",
        '"': r"\textquotedbl{}",
        "±": r"$\pm$",
        "∞": r"$\infty$",
        "×": r"$\times$",
        "–": "--",
        "\n": " ",
    }
)


def to_csv(table: Table) -> str:
    """Return a table as CSV, with mean and spread in separate columns; never reached is inf, no value is empty."""
    has_spread = [any(SPREAD in row[i] for row in table.rows) for i in range(len(table.head))]
    rows: list[list[str]] = [[] for _ in range(len(table.rows) + 1)]
    for i, two in enumerate(has_spread):
        rows[0] += [table.head[i], f"{table.head[i]}, std"] if two else [table.head[i]]
        for cells, row in zip(rows[1:], table.rows, strict=True):
            mean, _, spread = row[i].partition(SPREAD) if two else (row[i], "", "")
            cells += [WORDS.get(cell, cell) for cell in ((mean, spread) if two else (mean,))]
    return csv_text(rows)


def to_latex(table: Table) -> str:
    """Return a booktabs table; a rule separates the groups of rows that share their first cell, if there are groups."""
    columns = list(zip(*table.rows, strict=True)) if table.rows else [()] * len(table.head)
    numeric = [bool(cells) and all(_NUMBER.fullmatch(cell) for cell in cells) for cells in columns]
    firsts = [row[0] for row in table.rows]
    grouped = len(set(firsts)) < len(firsts)
    lines = [
        r"% needs \usepackage{booktabs} and \usepackage[T1]{fontenc}",
        rf"\begin{{tabular}}{{{''.join('r' if number else 'l' for number in numeric)}}}",
        r"\toprule",
        " & ".join(latex_escape(heading) for heading in table.head) + r" \\",
        r"\midrule",
    ]
    for i, row in enumerate(table.rows):
        if grouped and i and firsts[i] != firsts[i - 1]:
            lines.append(r"\midrule")
        lines.append(" & ".join(latex_escape(cell) for cell in row) + r" \\")
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", ""])


def latex_escape(text: str) -> str:
    r"""Return text that LaTeX prints unchanged.

    >>> print(latex_escape("50% of a_b & {c} ± 1"))
    50\% of a\_b \& \{c\} $\pm$ 1
    """
    return printable(text, lines=True).translate(_LATEX)
