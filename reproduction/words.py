"""The words, numbers and tables of the pages."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from collect import called
from record import Result

from lamina.experiment.trials import reproduction
from lamina.experiment.trials.claims import named_in, written
from lamina.report.tables import NONE

JUDGED = ("holds", "holds in part", "does not hold")
DIVERGED = (
    "A final run of one of these methods diverged. Claims about the best round use what it had reached; in claims "
    "about the last or a later round it loses."
)
NEVER = "*never*: not within the rounds that were run, which may be fewer than the paper's."
VERDICTS = {
    "holds": "reproduced",
    "holds in part": "partly",
    "does not hold": "not reproduced",
    "not run": "not finished",
    "none": "none (small version)",
}
README, OURS = "the simulator's README", "our own"  # sources of claims that are not a paper's
SOURCES = (README, OURS)
PAIRS = (
    'A claim is split into pairs ("this method is better than that one") of means over seeds. It is *reproduced* '
    "if all pairs are as the paper says, and *partly* reproduced if some are. With the same seed all methods have the "
    "same initial weights, clients and batches, so each seed can be compared by itself: the verdict says if a pair "
    "does not hold in every seed. Claims of our own, which are in no paper, *hold* or *do not hold*."
)


def source(claim: Mapping[str, Any]) -> str:
    """Return whose claim it is; empty: the paper's.

    >>> source({"text": "the README's order"}), source({"text": "it works (ours)"}), source({"text": "it works"})
    ("the simulator's README", 'our own', '')
    """
    if str(claim["text"]).endswith("(ours)"):
        return OURS
    return README if "README" in claim["text"] else ""


def verdict(claim: Mapping[str, Any]) -> str:
    """Return a verdict in the words of the pages; our own claims hold or do not hold."""
    judged = claim["verdict"] in JUDGED
    return str(claim["verdict"]) if judged and source(claim) == OURS else VERDICTS[claim["verdict"]]


def counted() -> list[str]:
    """Return all verdicts in the order of the tables."""
    return list(dict.fromkeys([*VERDICTS.values(), *JUDGED]))


def with_diverged(result: Result, claim: Mapping[str, Any]) -> bool:
    """Return whether a final run of one of a claim's methods diverged."""
    for label in claim["here"]:
        for algorithm, variant in named_in(label):
            methods = result.facts["variants"].get(variant or reproduction.FOLDER_AS_GIVEN, {}).get("methods", {})
            if methods.get(algorithm, {}).get("diverged"):
                return True
    return False


def unreached(claim: Mapping[str, Any]) -> bool:
    """Return whether one of our runs ended before it reached a claim's target."""
    return claim["target"] is not None and math.inf in map(float, claim["here"].values())


def number(value: Any, *, rounds: bool = True) -> str:
    """Return a claim's number as text; JSON stores non-finite numbers as text."""
    return NONE if value in (None, "nan") else written(float(value), rounds=rounds)


def named(label: str) -> str:
    """Return a claim's label, escaped for Markdown."""
    return escaped(called(label))


def spent(facts: Mapping[str, Any]) -> str:
    """Return the unit of the seconds."""
    return "GPU seconds" if facts["gpu"] else "CPU seconds"


def amount(count: int, what: str) -> str:
    """Return a count with its noun.

    >>> amount(1, "run"), amount(3, "run")
    ('1 run', '3 runs')
    """
    return f"{count} {what}{'s' * (count != 1)}"


def either(counts: Sequence[int]) -> str:
    """Return counts joined by "or"."""
    return " or ".join(map(str, counts))


def shortened(lines: Sequence[str], most: int = 8) -> list[str]:
    """Return the first few lines, and how many more there are."""
    return [*lines[:most], *([f"and {len(lines) - most} more"] if len(lines) > most else [])]


def escaped(text: str) -> str:
    r"""Return text that Markdown shows unchanged.

    >>> print(escaped("FedAdam(*) | a_b"))
    FedAdam(\*) \| a\_b
    """
    return re.sub(r"([\\*_|<`\[\]])", r"\\\1", text)


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table."""
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *rows])
