"""How a run of a federation goes, from its folder: for people, health checks and Prometheus."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from lamina.base.text import plural
from lamina.experiment.runs.records import Record, read_record
from lamina.flower.records import Journal
from lamina.storage.leases import LEASE_S, NAME, is_held

COMPLETE, RUNNING, DIVERGED, STOPPED, NO_QUORUM = "complete", "running", "diverged", "stopped", "without a quorum"
EXIT_CODES = {COMPLETE: 0, RUNNING: 0, DIVERGED: 3, STOPPED: 4, NO_QUORUM: 5}
GROUPS = ("took_part", "missing", "refused")  # of an attempt's clients

Family = tuple[str, str, str, list[tuple[dict[str, str], float]]]  # name, type, help, samples by labels


class Status(NamedTuple):
    """What is known of a run."""

    record: Record
    attempts: list[dict[str, Any]]  # as in federation.jsonl
    last_attempt: float  # when it ended, or else when the run began: seconds since 1970
    has_server: bool  # a process writes to the folder

    @classmethod
    def read(cls, folder: Path) -> Status:
        """Return the status of the run in a folder."""
        record, journal = read_record(folder), Journal(folder)
        last = journal.path if journal.path.exists() else folder / "metrics.jsonl"
        return cls(record, journal.read(), last.stat().st_mtime, is_held(folder) and _is_renewed(folder / NAME))

    @property
    def state(self) -> str:
        """Return the state of the run: one of `EXIT_CODES`."""
        if self.record.diverged is not None:
            return DIVERGED
        if self.record.complete:
            return COMPLETE
        if not self.has_server:
            return STOPPED
        return NO_QUORUM if self.attempts and not self.attempts[-1]["complete"] else RUNNING

    def lines(self) -> list[str]:
        """Return the state in one line, and a line for each client that was not in the last mean."""
        done, rounds = len(self.record.history), self.record.config["train"]["rounds"]
        head = f"{self.state}: {done} of {plural(rounds, 'round')} finished"
        if self.state in (RUNNING, NO_QUORUM):
            head += f", last attempt at a round {max(0.0, time.time() - self.last_attempt):.0f} s ago"
        last: Mapping[str, Any] = self.attempts[-1] if self.attempts and not self.record.complete else {}
        return [head, *(_absence(one, group) for group in GROUPS[1:] for one in last.get(group, []))]

    def metrics(self) -> str:
        """Return the numbers of the run in Prometheus' text format."""
        history, config = self.record.history, self.record.config
        run = {"run": self.record.folder.name}
        clients = range(int(config["data"]["clients"]))
        counts = {group: Counter(one["client"] for a in self.attempts for one in a.get(group, [])) for group in GROUPS}
        took_part, missing, refused = (
            [({**run, "client": str(client)}, float(counts[group][client])) for client in clients] for group in GROUPS
        )
        sent = [
            ({**run, "direction": way}, history.total(f"wire_bytes_{way}", optional=True)) for way in ("down", "up")
        ]
        of_cohort: list[Family] = [  # what tells who took part
            ("replies_total", "counter", "Replies of a client that are in the mean of a round.", took_part),
            ("missing_total", "counter", "Times that a client did not answer, or with an error.", missing),
            ("refusals_total", "counter", "Replies of a client that the server refused.", refused),
            ("bytes_total", "counter", "Bytes of messages in finished rounds, as Flower serialises them.", sent),
            (
                "seconds_total",
                "counter",
                "Seconds of finished rounds.",
                [(run, history.total("seconds", optional=True))],
            ),
        ]
        is_secret = bool(config.get("privacy")) and not any(GROUPS[0] in attempt for attempt in self.attempts)
        states = [({**run, "state": name}, float(name == self.state)) for name in EXIT_CODES]
        families: list[Family] = [
            ("state", "gauge", "1 for the state that the run is in.", states),
            ("round", "gauge", "Finished rounds.", [(run, float(len(history)))]),
            ("rounds", "gauge", "Rounds that the run will have.", [(run, float(config["train"]["rounds"]))]),
            ("attempts_total", "counter", "Attempts at a round.", [(run, float(len(self.attempts)))]),
            *([] if is_secret else of_cohort),
            ("last_attempt_timestamp_seconds", "gauge", "When the last attempt ended.", [(run, self.last_attempt)]),
        ]
        return "".join(_family(name, kind, text, found) for name, kind, text, found in families)


def _is_renewed(lease: Path) -> bool:
    """Return whether a lease was renewed of late: whether its owner has ended cannot be seen from another container."""
    try:
        return time.time() - lease.stat().st_mtime < 2 * LEASE_S
    except OSError:
        return False


def _absence(one: Mapping[str, Any], group: str) -> str:
    node = f" (node {one['node']})" if one.get("node") else ""
    return f"client {one['client']}{node}: {'refused: ' * (group == 'refused')}{one['why']}"


def _family(name: str, kind: str, text: str, samples: Iterable[tuple[Mapping[str, str], float]]) -> str:
    r"""Return a metric with its samples.

    >>> print(_family("a_total", "counter", "All.", [({"run": 'x"y'}, 3.0)]), end="")
    # HELP lamina_federation_a_total All.
    # TYPE lamina_federation_a_total counter
    lamina_federation_a_total{run="x\"y"} 3
    """
    name = f"lamina_federation_{name}"
    lines = [f"# HELP {name} {text}", f"# TYPE {name} {kind}"]
    for labels, value in samples:
        shown = ",".join(f"{key}={_quoted(label)}" for key, label in labels.items())
        lines.append(f"{name}{{{shown}}} {value:.15g}")
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'
