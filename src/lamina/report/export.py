"""Tables as CSV for programs and as LaTeX for papers; page.js does the same for the tables on the page."""

from __future__ import annotations

import csv
import io
import re

from lamina.report.tables import NEVER, NONE, SPREAD, Table
from lamina.text import csv_cell, printable

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
    """Mean and spread in columns of their own; never reached is inf, nothing is empty."""
    split = [any(SPREAD in row[i] for row in table.rows) for i in range(len(table.head))]
    head = [name for heading, two in zip(table.head, split, strict=True)
            for name in ([heading, f"{heading}, std"] if two else [heading])]  # fmt: skip
    made = io.StringIO()
    writer = csv.writer(made, lineterminator="\n")
    writer.writerow([csv_cell(name) for name in head])
    for row in table.rows:
        cells: list[str] = []
        for cell, two in zip(row, split, strict=True):
            mean, _, spread = cell.partition(SPREAD) if two else (cell, "", "")
            cells += [_plain(mean), _plain(spread)] if two else [_plain(mean)]
        writer.writerow(cells)
    return made.getvalue()


def to_latex(table: Table) -> str:
    """A booktabs table; a rule separates the groups of rows that share their first cell, if there are groups."""
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
    r"""Text that LaTeX sets as it is.

    >>> print(latex_escape("50% of a_b & {c} ± 1"))
    50\% of a\_b \& \{c\} $\pm$ 1
    """
    return printable(text, lines=True).translate(_LATEX)


def _plain(cell: str) -> str:
    text: str = csv_cell({NEVER: "inf", NONE: ""}.get(cell, cell))
    return text
