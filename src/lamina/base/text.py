"""Plurals, and text of unknown origin made safe for terminals and spreadsheets."""

from __future__ import annotations

import csv
import hashlib
import html
import io
import re
from collections.abc import Iterable, Sequence
from typing import Any

# C0 and C1 control characters, DEL, separators of lines, and marks that reverse the direction of text: with them, a
# name could move the cursor of a terminal, hide text or forge a line.
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_CONTROL_IN_LINES = re.compile(_CONTROL.pattern.replace("\x00-\x1f", "\x00-\x09\x0b-\x1f"))
FORMULA_STARTS = ("=", "+", "-", "@")


def plural(count: int, one: str, many: str | None = None) -> str:
    """Return a count with its noun; the plural is the singular with an s unless given.

    >>> plural(1, "round"), plural(0, "round"), plural(2, "class", "classes")
    ('1 round', '0 rounds', '2 classes')
    """
    return f"{count} {one}" if count == 1 else f"{count} {many or one + 's'}"


def listed(items: Sequence[str], most: int = 5) -> str:
    """Return the first items in a line, and how many more there are.

    >>> listed(["a", "b", "c"], most=2), listed(["a"])
    ('a, b and 1 more', 'a')
    """
    more = f" and {len(items) - most} more" if len(items) > most else ""
    return ", ".join(items[:most]) + more


def printable(text: str, *, lines: bool = False) -> str:
    r"""Return text with its control characters escaped, so that a terminal only shows them.

    Args:
        text: any text.
        lines: keep line breaks as they are.

    >>> printable("a\x1b[2Jb\n")
    'a\\x1b[2Jb\\n'
    """
    pattern = _CONTROL_IN_LINES if lines else _CONTROL
    return pattern.sub(lambda match: match[0].encode("unicode_escape").decode("ascii"), text)


def text_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table as lines: the first column to the left, the others to the right.

    >>> print(text_table(["name", "best"], [["fedavg", "0.91"]]))
    name    best
    fedavg  0.91
    """
    lines = [[cell.replace("\n", " ") for cell in line] for line in [head, *rows]]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    sides = ["<", *">" * (len(widths) - 1)]
    places = [f"{side}{width}" for side, width in zip(sides, widths, strict=False)]
    return "\n".join("  ".join(map(format, line, places)) for line in lines)


def html_table(head: Sequence[str], rows: Iterable[Sequence[str]], title: str = "") -> str:
    """Return a table as HTML, for notebooks.

    >>> html_table(["a"], [["<b>"]])
    '<table><thead><tr><th>a</th></tr></thead><tbody><tr><td>&lt;b&gt;</td></tr></tbody></table>'
    """
    top = "".join(f"<th>{html.escape(cell)}</th>" for cell in head)
    body = "".join(f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    caption = f"<caption>{html.escape(title)}</caption>" if title else ""
    return f"<table>{caption}<thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>"


def csv_cell(value: Any) -> Any:
    """Return a cell that no spreadsheet takes for a formula: such text gets an apostrophe, numbers do not change.

    >>> csv_cell("=1+1"), csv_cell("-0.5"), csv_cell(-0.5), csv_cell("fedlamb")
    ("'=1+1", '-0.5', -0.5, 'fedlamb')
    """
    if not isinstance(value, str):
        return value
    text = printable(value)
    return f"'{text}" if text.startswith(FORMULA_STARTS) and not _is_number(text) else text


def csv_text(rows: Iterable[Sequence[Any]], line_end: str = "\n") -> str:
    """Return rows as CSV that no spreadsheet takes for formulas."""
    file = io.StringIO()
    csv.writer(file, lineterminator=line_end).writerows([csv_cell(cell) for cell in row] for row in rows)
    return file.getvalue()


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def hash_parts(parts: Iterable[str]) -> str:
    """Return a short hash of several texts."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(f"{len(part)}:{part}".encode(errors="surrogatepass"))
    return digest.hexdigest()[:16]
