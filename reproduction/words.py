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

JUDGED = ("reproduced", "partly", "not reproduced", "tie", "not comparable", "holds", "holds in part", "does not hold")
DIVERGED = "†"
NEVER = "*never*: not within the rounds that were run, which may be fewer than the paper's."
VERDICTS = {
    **{verdict: verdict for verdict in ("reproduced", "partly", "not reproduced", "tie", "not comparable")},
    "holds": "reproduced",
    "holds in part": "partly",
    "does not hold": "not reproduced",
    "not run": "not finished",
    "none": "none (small version)",
}


def verdict(claim: Mapping[str, Any]) -> str:
    """Return a verdict in the words of the pages; our own claims hold or do not hold."""
    judged = claim["verdict"] in JUDGED
    return str(claim["verdict"]) if judged and ours(claim) else VERDICTS[claim["verdict"]]


def of_pairs(claim: Mapping[str, Any]) -> str:
    """Return how many of a claim's pairs hold, and how many of these in every seed."""
    if claim["verdict"] not in JUDGED:
        return ""
    right, weak = claim["pairs"] - len(claim["wrong"]), len(claim["weak"])
    counts = [f"{right} of {claim['pairs']}"] if claim["pairs"] > 1 else []
    counts += [f"{right - weak} in every seed" if claim["pairs"] > 1 else "not in every seed"] if weak else []
    return f" ({', '.join(counts)})" if counts else ""


def marks(result: Result, claim: Mapping[str, Any]) -> str:
    """Return the marks of a verdict: other settings, diverged runs."""
    settings = " \\*" if result.facts["sets"] else ""
    for label in claim["here"]:
        for algorithm, variant in named_in(label):
            methods = result.facts["variants"].get(variant or reproduction.FOLDER_AS_GIVEN, {}).get("methods", {})
            if methods.get(algorithm, {}).get("diverged"):
                return f"{settings} {DIVERGED}"
    return settings


def ours(claim: Mapping[str, Any]) -> bool:
    """Return whether a claim is our own."""
    return str(claim["text"]).endswith("(ours)")


def unreached(claim: Mapping[str, Any]) -> bool:
    """Return whether one of our runs ended before it reached a claim's target."""
    return claim["target"] is not None and math.inf in map(float, claim["here"].values())


def numbers(labelled: Mapping[str, Any], *, rounds: bool = True) -> str:
    """Return labelled numbers in one line."""
    return ", ".join(f"{named(label)}: {number(value, rounds=rounds)}" for label, value in labelled.items())


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
