"""TCP proxies with the speed of a network: what passes them is delayed, and changed in no other way."""

import contextlib
import math
import socket
import threading
import time

from lamina.flower.local.federation import LocalFederation
from lamina.flower.local.processes import HOST, free_port

PIECE = 1 << 14  # bytes that pass at a time


class Link:
    """One direction of a link, which all connections through it share."""

    def __init__(self):
        self.mbits = math.inf  # per second
        self._free, self._lock = 0.0, threading.Lock()  # the time at which the last piece has passed

    def wait(self, count):
        """Wait until `count` bytes have passed."""
        with self._lock:
            self._free = max(self._free, time.monotonic()) + count * 8 / (self.mbits * 1e6)
            until = self._free
        time.sleep(max(0.0, until - time.monotonic()))


class Proxy:
    """Passes TCP connections on to a port, through the links of each direction, one after the other."""

    def __init__(self, target, down, up):
        self.target, self.down, self.up, self.port = target, down, up, free_port()
        self._listener = socket.create_server((HOST, self.port))
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self):
        while True:
            here, _ = self._listener.accept()
            try:
                there = socket.create_connection((HOST, self.target))
            except OSError:  # the SuperLink has ended
                here.close()
                continue
            threading.Thread(target=self._pass, args=(here, there, self.up), daemon=True).start()
            threading.Thread(target=self._pass, args=(there, here, self.down), daemon=True).start()

    def _pass(self, source, sink, links):
        with contextlib.suppress(OSError):
            while piece := source.recv(PIECE):
                for link in links:
                    link.wait(len(piece))
                sink.sendall(piece)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


class Throttled(LocalFederation):
    """A federation whose nodes reach the SuperLink through links of their own and that of the server, fast at first."""

    def __init__(self, folder, nodes, **more):
        super().__init__(folder, nodes, **more)
        self.links = [{"download": Link(), "upload": Link()} for _ in range(nodes)]
        self.server = {"download": Link(), "upload": Link()}

    def start_node(self, client):
        """Start a node behind its links."""
        ways = ([self.links[client][way], self.server[way]] for way in ("download", "upload"))
        direct, self.port = self.port, Proxy(self.port, *ways).port
        try:
            return super().start_node(client)
        finally:
            self.port = direct

    def follow_clock(self, clock):
        """Give every link the speed that it has on a clock with a table by client."""
        for way in ("download", "upload"):
            for client, links in enumerate(self.links):
                links[way].mbits = getattr(clock, way)[client]
            self.server[way].mbits = clock.server_link or math.inf
