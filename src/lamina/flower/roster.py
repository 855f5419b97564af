"""Which node is which client: the server has a list. Only the id that Flower gave a node identifies it."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping

from flwr.serverapp import Grid

from lamina.flower.records import Attendance
from lamina.flower.setup import Setup

log = logging.getLogger(__name__)
FIRST_LINE_S, NEXT_LINE_S = 10.0, 60.0  # until a line says who is waited for, and until the next one


class Roster:
    """The clients and their nodes."""

    def __init__(self, setup: Setup, grid: Grid, nodes: Mapping[int, int]) -> None:
        self.grid, self.clients, self.deadline, self.poll = grid, setup.plan.clients.count, setup.deadline, setup.poll
        privacy = setup.plan.protocol.privacy
        self._has_secret_cohorts = privacy is not None and privacy.secret_cohorts
        self.nodes = {client: node for node, client in nodes.items()}  # by client
        self.unlisted = [client for client in range(self.clients) if client not in self.nodes]
        self.online: set[int] = set()
        self._is_first_call = True
        self._next_line = 0.0  # time.monotonic() at which a line says who is waited for

    def is_online(self, client: int) -> bool:
        """Return whether the node of a client is connected."""
        return self.nodes.get(client) in self.online

    def call(self, cohort: list[int], needed: int, record: Attendance) -> list[int]:
        """Find out which nodes are connected, wait for the clients of a round, and return those that are connected.

        The first call, at the start of a run, waits for all clients until the deadline. A later one ends as soon as the
        `needed` clients of the cohort are connected. The record takes notes of clients that are absent, and of nodes
        that are not on the list.
        """
        wait_for_all, self._is_first_call = self._is_first_call, False
        possible = [c for c in (range(self.clients) if wait_for_all else cohort) if c not in self.unlisted]
        until = time.monotonic() + self.deadline
        self._next_line = time.monotonic() + FIRST_LINE_S
        while True:
            self.online = set(self.grid.get_node_ids())
            absent = [client for client in possible if not self.is_online(client)]
            now = time.monotonic()
            is_enough = len(possible) - len(absent) >= needed and not wait_for_all
            if not absent or now >= until or is_enough:
                break
            self.log_waiting(absent, "to connect", of_cohort=not wait_for_all)
            time.sleep(min(self.poll, max(0.0, until - now)))
        for node in sorted(self.online - set(self.nodes.values())):
            record.note(f"node {node} is not on the server's list of nodes, and takes no part", of_cohort=False)
        for client in cohort:
            if not self.is_online(client):
                record.miss(client, "no node is listed for it" if client in self.unlisted else "it is not connected")
        return [client for client in cohort if self.is_online(client)]

    def log_waiting(self, clients: Iterable[int], what: str, *, of_cohort: bool = True) -> None:
        """Log now and then which clients the server is waiting for, unless they are of a secret cohort."""
        if time.monotonic() < self._next_line:
            return
        self._next_line = time.monotonic() + NEXT_LINE_S
        names = sorted(clients)
        whom = f"client{'s' * (len(names) > 1)} {', '.join(map(str, names))}"
        whom = "clients" if of_cohort and self._has_secret_cohorts else whom
        log.warning("waiting for %s %s (deadline: %g s)", whom, what, self.deadline)
