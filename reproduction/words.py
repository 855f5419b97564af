"""The words, numbers and tables of the pages."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, get_args

from collect import called

from lamina.experiment.config import Claim
from lamina.experiment.trials import claims
from lamina.experiment.trials.claims import Finding
from lamina.report.tables import NONE

README, OURS = "the simulator's README", "our own"  # sources of claims that are not a paper's
SOURCES = (README, OURS)
OUR_VERDICTS = {"reproduced": "holds", "partly": "holds in part", "not reproduced": "does not hold"}
RULE = """A claim is split into pairs ("this method is better than that one"). The difference of a pair is the mean over
the seeds that both methods have, with its 95 % interval (Student's t). With the same seed, methods share initial
weights, clients and batches, so differences are taken seed by seed. An accuracy is the mean of the last ten rounds, and
a round to a target is the first from which the mean of five rounds stays there until the end, unless a claim says
otherwise.

- A pair is *right* or *wrong* by its sign, and a *tie* if the interval includes 0; one seed has no interval, only a
  sign. A claim of size is right if the mean difference is as large, or as small, as claimed; the page says if the
  interval leaves it open.
- A pair is *not comparable* if runs are shorter than the claim needs or not equally long, if one is dead (its accuracy
  never changes) or untuned, if survival decides because one diverged, or if both reach a target within 3 rounds.
- A claim is *reproduced* if all pairs are right and *partly* reproduced if some are. Without a right pair it is *not
  reproduced* if one is wrong, else a *tie* if one is a tie, else *not comparable*.
- An accuracy after all rounds of a paper is not compared with a run of less than half as many.

Claims of our own, which are in no paper, *hold* or *do not hold*."""


def source(claim: Claim) -> str:
    """Return whose claim it is; empty: the paper's."""
    if claim.text.endswith("(ours)"):
        return OURS
    return README if "README" in claim.text else ""


def verdict(finding: Finding) -> str:
    """Return a verdict in the words of the pages; our own claims hold or do not hold."""
    return OUR_VERDICTS.get(finding.verdict, finding.verdict) if source(finding.claim) == OURS else finding.verdict


def counted() -> list[str]:
    """Return all verdicts in the order of the tables."""
    paper = [str(word) for word in get_args(claims.Verdict)]
    return [*paper, *OUR_VERDICTS.values()]


def number(value: float | None, *, rounds: bool = True, of: int = 0) -> str:
    """Return a claim's number as text; a target that is not reached names the rounds that were run, if known.

    >>> number(598.0), number(float("inf"), of=300), number(float("inf")), number(None)
    ('598', 'not within 300', 'never', '–')
    """
    if value is None or value != value:
        return NONE
    return claims.written(value, rounds=rounds, never=f"not within {of}" if of else "never")


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
