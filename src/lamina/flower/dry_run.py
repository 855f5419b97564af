"""Try on a node, before it joins, what a round will ask of it: with its own data, and without a server.

The messages are made as the server makes them, answered by the node's own app, and checked as the server checks them.
Only signatures are left out, because a node cannot sign for its server.
"""

from __future__ import annotations

import dataclasses
import logging
import secrets
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import numpy as np
from flwr.app import ArrayRecord, Context, RecordDict

from lamina.algorithms.contract import ClientInfo, ServerInfo
from lamina.base.errors import BadInput, LaminaError, describe_error, where_it_failed
from lamina.base.limits import in_bytes
from lamina.base.text import plural
from lamina.engines.state import State
from lamina.flower import checks, internals, keys, signing, wire
from lamina.flower.apps import AppFolder
from lamina.flower.checks import Expected, FullGradient, Refused
from lamina.flower.exchange import write_message
from lamina.flower.judge import Judge
from lamina.flower.node import Node, client_number
from lamina.flower.records import Memory
from lamina.rounds.clients import Clients
from lamina.rounds.plan import Plan
from lamina.storage.files import check_writable
from lamina.training.evaluation import WEIGHT
from lamina.training.preflight.model import check_lone_samples

log = logging.getLogger(__name__)
T = TypeVar("T")
Say = Callable[[str], None]


def check_node(folder: Path, node_config: str, say: Say) -> list[str]:
    """Report what a node has and would send, and return what would go wrong: one line per problem.

    Args:
        folder: of the Flower app.
        node_config: what the SuperNode will be started with.
        say: is called with each line of the report.
    """
    app = AppFolder.read(folder)
    context = Context(1, 0, internals.parse_node_config(node_config), RecordDict(), app.config)
    problems: list[str] = []

    def attempt(check: Callable[[], T]) -> T | None:
        try:
            return check()
        except Refused as error:
            problems.append(f"the server would refuse what this node sends: {error}")
        except LaminaError as error:
            problems.append(str(error))
        except Exception as error:  # the app's code may raise anything
            problems.append(_missing_option(error, context) or describe_error(error))
        return None

    attempt(lambda: _check_key(context))
    node = attempt(app.node)
    if node is not None:
        attempt(lambda: _check_state_folder(node, context))
        client = attempt(lambda: _check_number(node, context))
        if client is not None and attempt(lambda: _check_data(node, context, say)):
            with tempfile.TemporaryDirectory(prefix="lamina-check-") as state:
                context.node_config["state-dir"] = state
                attempt(lambda: _try_round(node, context, client, say))
    return problems


def _missing_option(error: Exception, context: Context) -> str:
    """Return which option the app's code did not find in the node's configuration, if that is what an error means."""
    option = error.args[0] if isinstance(error, KeyError) and error.args else None
    where = where_it_failed(error)
    if not isinstance(option, str) or option in context.node_config or not where:
        return ""
    return (
        f"{where} reads '{option}', which this node's configuration does not have: start the node with "
        f"--node-config '… {option}=…'"
    )


def _check_key(context: Context) -> None:
    path = context.node_config.get(signing.NODE_OPTION)
    if not path:
        raise BadInput(
            f"without {signing.NODE_OPTION} in its configuration, this node would refuse every task: give it the path "
            "of the server's tasks.pub"
        )
    file = Path(str(path)).expanduser()
    signing.load_key(file)
    for line in keys.ending_soon(file.parent):  # ca.crt came together with the key
        log.warning(line)


def _check_state_folder(node: Node, context: Context) -> None:
    try:
        check_writable(node.state_folder(context))
    except BadInput as error:
        raise BadInput(str(error).replace("--out (out=…)", "state-dir in the node's configuration")) from error


def _check_number(node: Node, context: Context) -> int:
    client, clients = client_number(context), node.setup.plan.clients.count
    if not 0 <= client < clients:
        raise BadInput(f"partition-id = {client}, but the clients are numbered 0 to {clients - 1}")
    return client


def _check_data(node: Node, context: Context, say: Say) -> bool:
    objective = node.objective
    say(f"model: {plural(objective.start.numel(), 'trainable parameter')} on {objective.device}")
    started = time.monotonic()
    data = node.setup.dataset(node.setup.data(context), objective)
    say(f"data: {data!r}, read in {time.monotonic() - started:.1f} s")
    own_part = Clients([np.arange(len(data))], len(data))
    check_lone_samples(objective, data, Plan(own_part, node.setup.protocol))
    return True


def _try_round(node: Node, context: Context, client: int, say: Say) -> None:
    """Have the node answer round 1, with one local step, and check its answers as the server does."""
    setup, objective, algorithm, protocol = node.setup, node.objective, node.algorithm, node.setup.protocol
    # one message to one client: whom a clock would leave out makes no difference
    one_step = dataclasses.replace(protocol, epochs=None, local_steps=1, clock=None)
    plan = dataclasses.replace(setup.plan, protocol=one_step)
    state = State.start(algorithm, objective, plan.clients.count)
    memory, app = Memory(run=secrets.token_hex(16)), wire.fingerprint(algorithm, objective)
    about_x, channel = {"x": wire.encode(state.server.x)}, protocol.channel
    layers, rate, needs = objective.shared_layers, protocol.rate(1), algorithm.needs(1)
    buffers = objective.shared_buffers(state.buffers)
    info = ServerInfo(1, rate, layers, participation=protocol.participation)
    replies = []
    if needs.control_variate:
        sent_x = {"x": wire.encode(channel.narrow_vector(state.server.x, layers))}
        reply = node.send_gradient(write_message(plan, app, memory, buffers, sent_x, 1, client), context)
        replies.append(reply)
        expected = Expected.plain(FullGradient(state.server.x), {}, None, setup.limits)
        info = info._replace(mean_gradient=checks.read_update(reply, expected, client).up.gradient)
    down = channel.seen_broadcast(algorithm.broadcast(state.server, info), layers)
    for _ in range(2):  # the first step of a process takes longer than all others
        arrays = wire.pack(channel.narrow(down, layers))
        reply = node.send_update(write_message(plan, app, memory, buffers, arrays, 1, client), context)
    replies.append(reply)
    fields, sent = ", then ".join(map(_fields, replies)), in_bytes(sum(map(wire.wire_bytes, replies)))
    example = state.server.x if needs.full_gradient else None
    expected = Judge(setup, memory).expect(buffers, down, ClientInfo(1, rate, layers, full_gradient=example))
    update = checks.read_update(reply, expected._replace(steps=lambda examples: 1), client)
    steps, seconds = int(protocol.steps(np.array([update.examples]))[0]), node.training_seconds
    say(f"one local step: {seconds:.3f} s, loss {update.loss:.4f}; a round has {plural(steps, 'local step')}")
    others = f", {plural(len(update.buffers), 'buffer')} of the model" if update.buffers else ""
    say(f"would send: {fields}{others}, numbers of examples and steps, mean loss: {sent} a round")
    if setup.evaluate_on != "central":
        reply = node.send_evaluation(write_message(plan, app, memory, buffers, about_x, 1, client), context)
        figures = checks.read_evaluation(reply, setup.limits, None, setup.node_metrics)
        means = ", ".join(f"{name} {value:.4f}" for name, value in figures.figures.items() if not name.endswith(WEIGHT))
        say(f"evaluation: would send {means}, from {plural(figures.examples, 'example')}")
    if steps * seconds > setup.deadline:
        raise BadInput(
            f"{steps} local steps of {seconds:.3g} s take longer than the {setup.deadline:g} s that the server waits: "
            "raise deadline, or lower epochs or local_steps"
        )


def _fields(reply: RecordDict) -> str:
    """Return the names, shapes and types of the vectors in a reply."""
    up = wire.entries_of(reply, "up", ArrayRecord)
    return ", ".join(f"{name} {list(array.shape)} {array.dtype}" for name, array in up.items())
