"""What a client keeps between rounds, the model that it sees if parts of the model are private, and what it sends.

For its private parameters a client is a federation of one: it keeps the algorithm's server record of these parameters,
broadcasts it to itself, and takes the server's step on its own upload. Their values after the round are those of the
local model. All functions accept records with leading axes, so they serve one client and many rows.

Without private parts a client sees the server's model. It keeps the algorithm's Client record, the private parts, and
what its uploads have left out (`Channel.feedback`); without the last two, the Client record and nothing else.
"""

from __future__ import annotations

import functools
from collections import namedtuple
from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor

from lamina.algorithms.contract import Algorithm, ClientInfo, ServerInfo
from lamina.channel.channel import OPEN, Channel, Link, Sent
from lamina.engines.state import State
from lamina.objective.layers import ChannelsLast
from lamina.objective.objective import Buffers, Objective


class Kept(NamedTuple):
    """The parts of what a client keeps."""

    client: Any  # the algorithm's Client record, of whole vectors
    server: Any = None  # the algorithm's Server record of the private parameters, if there are any
    buffers: Buffers = {}  # noqa: RUF012  # the private buffers
    rests: Mapping[str, Tensor] = {}  # by field of the upload: what the last ones left out


def first_record(
    algorithm: Algorithm,
    objective: Objective,
    x: Tensor,
    start: Tensor | None = None,
    buffers: Buffers | None = None,
    channel: Channel = OPEN,
) -> Any:
    """Return what a client keeps before its first round.

    Args:
        algorithm: the algorithm.
        objective: the model.
        x: the shared parameters that the server holds.
        start: where the private parameters start; by default where the objective's do.
        buffers: the same for the buffers.
        channel: what uploads pass.
    """
    private = objective.private
    client = algorithm.client_init(objective.whole(x, start), objective.layers)
    rests = channel.first_rests(algorithm, x, objective.shared_layers)
    if private is None:
        return _pack(Kept(client, rests=rests))
    start = objective.private_start if start is None else start
    server = None if private.layers is None or start is None else algorithm.init(start, private.layers)
    starts = objective.buffers if buffers is None else buffers
    return _pack(Kept(client, server, {name: starts[name] for name in private.buffers}, rests))


def unpack(record: Any) -> Kept:
    """Return the parts of what a client keeps."""
    kinds = getattr(record, "kinds", None)
    if kinds is None:
        return Kept(record)
    client, server, names, rests = kinds
    a = len(client._fields)
    b = a if server is None else a + len(server._fields)
    c = b + len(names)
    kept_server = None if server is None else server(*record[a:b])
    buffers, left = (dict(zip(n, v, strict=True)) for n, v in ((names, record[b:c]), (rests, record[c:])))
    return Kept(client(*record[:a]), kept_server, buffers, left)


def personal_model(objective: Objective, x: Tensor, buffers: Buffers, record: Any) -> tuple[Tensor, Buffers]:
    """Return the parameters and buffers that a client sees; the record is None for a client without one."""
    private = objective.private
    if private is None or record is None:
        return objective.whole(x), buffers
    kept = unpack(record)
    return x if kept.server is None else private.join(x, kept.server.x), buffers | kept.buffers


def model_in_use(algorithm: Algorithm, objective: Objective, state: State, client: int) -> tuple[Tensor, Buffers]:
    """Return the parameters and buffers of the model that a client uses for itself."""
    record = state.clients.get(client)
    if record is None:  # it has not taken part yet
        record = first_record(algorithm, objective, state.server.x, state.private_start, state.buffers)
    record = type(record)(*(None if value is None else value.to(objective.device) for value in record))
    x, buffers = personal_model(objective, algorithm.trained_model(state.server), state.buffers, record)
    return algorithm.client_model(x, unpack(record).client), buffers


def client_broadcast(
    algorithm: Algorithm,
    objective: Objective,
    down: Any,
    kept: Kept,
    info: ClientInfo,
    mean_gradient: Tensor | None = None,
    layout: ChannelsLast | None = None,
) -> Any:
    """Return the broadcast as the client sees it: with its private parameters.

    Args:
        algorithm: the algorithm.
        objective: the model.
        down: the broadcast of the shared parameters.
        kept: what the client keeps.
        info: the client's, about the round.
        mean_gradient: the client's own full gradient, if the algorithm's `broadcast` gets the mean of them.
        layout: the order of the result, and of `mean_gradient`.
    """
    private = objective.private
    if private is None or kept.server is None:
        return down
    gradient = None if mean_gradient is None else private.split(mean_gradient, layout)[1]
    private_broadcast = algorithm.broadcast(kept.server, _of_one(info, objective, gradient))
    return private.join_records(down, private_broadcast, layout)


def client_result(
    algorithm: Algorithm,
    objective: Objective,
    kept: Kept,
    trained: tuple[Any, Any, Any],
    buffers: Buffers,
    info: ClientInfo,
    layout: ChannelsLast | None = None,
) -> tuple[Any, Any]:
    """Return the upload without the private parts, in the usual order, and the record that the client keeps.

    Args:
        algorithm: the algorithm.
        objective: the model.
        kept: what the client kept before the round.
        trained: the local state at the end, the upload and the new Client record.
        buffers: the model's buffers after local training.
        info: the client's, about the round.
        layout: the order of the vectors in `trained`.
    """
    private, (local, up, client) = objective.private, trained
    if private is None:
        return up, _pack(Kept(client, rests=kept.rests))
    server = None
    if kept.server is not None:
        up, private_up = private.split_record(up, layout)
        private_y = private.split(local.y, layout)[1]
        server = algorithm.update(kept.server, private_up, _of_one(info, objective))._replace(x=private_y)
    return up, _pack(Kept(client, server, {name: buffers[name] for name in private.buffers}, kept.rests))


def pass_channel(
    channel: Channel, algorithm: Algorithm, up: Any, down: Any, record: Any, link: Link
) -> tuple[Sent, Any]:
    """Return what a client sends in place of an upload, and the record that it keeps.

    Args:
        channel: what uploads pass.
        algorithm: the algorithm.
        up: the upload, of the shared parameters.
        down: the broadcast of the shared parameters, as clients see it.
        record: what the client keeps, with the rests of its last upload.
        link: what both ends of the channel know.
    """
    sent = channel.send(algorithm, up, down, unpack(record).rests, link)
    return sent, record._replace(**{_rest_field(name): rest for name, rest in sent.rests.items()})


def _rest_field(name: str) -> str:
    return f"rest_{name}"


def _of_one(info: ClientInfo, objective: Objective, mean_gradient: Tensor | None = None) -> ServerInfo:
    """Return what the server of a federation of one client knows about the round."""
    private = objective.private
    assert private is not None
    assert private.layers is not None
    return ServerInfo(info.round, info.lr, private.layers, 1.0, info.steps, mean_gradient)


# --- one flat record, which checkpoints, nodes' disks and stacked rows take as they take any Client record ------------


def _pack(kept: Kept) -> Any:
    if kept.server is None and not kept.buffers and not kept.rests:
        return kept.client
    server_fields = () if kept.server is None else kept.server
    server = None if kept.server is None else type(kept.server)
    kind = _record_type((type(kept.client), server, tuple(kept.buffers), tuple(kept.rests)))
    return kind(*kept.client, *server_fields, *kept.buffers.values(), *kept.rests.values())


@functools.cache
def _record_type(kinds: tuple[Any, Any, tuple[str, ...], tuple[str, ...]]) -> Any:
    """Return the class of the flat record of a Client, a Server, some buffers and the rests of some fields."""
    client, server, buffers, rests = kinds
    fields = [f"client_{name}" for name in client._fields]
    fields += [f"private_{name}" for name in (() if server is None else server._fields)]
    fields += [f"buffer_{i}" for i in range(len(buffers))]
    fields += map(_rest_field, rests)
    kind = namedtuple("PersonalRecord", fields)  # type: ignore[misc]
    kind.kinds = kinds  # type: ignore[attr-defined]
    return kind
