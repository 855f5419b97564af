"""What a client keeps between rounds, and the model that it sees, if parts of the model are private.

For its private parameters a client is a federation of one: it keeps the algorithm's server record of these parameters,
broadcasts it to itself, and takes the server's step on its own upload. Their values after the round are those of the
local model. All functions accept records with leading axes, so they serve one client and many rows.

Without private parts a client keeps the algorithm's Client record and nothing else, and sees the server's model.
"""

from __future__ import annotations

import functools
from collections import namedtuple
from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor

from lamina.algorithms.contract import Algorithm, ClientInfo, ServerInfo
from lamina.engines.state import State
from lamina.objective.layers import ChannelsLast
from lamina.objective.objective import Buffers, Objective


class Kept(NamedTuple):
    """The parts of what a client keeps."""

    client: Any  # the algorithm's Client record, of whole vectors
    server: Any = None  # the algorithm's Server record of the private parameters, if there are any
    buffers: Buffers = {}  # noqa: RUF012  # the private buffers


def first_record(
    algorithm: Algorithm, objective: Objective, x: Tensor, start: Tensor | None = None, buffers: Buffers | None = None
) -> Any:
    """Return what a client keeps before its first round.

    Args:
        algorithm: the algorithm.
        objective: the model.
        x: the shared parameters that the server holds.
        start: where the private parameters start; by default where the objective's do.
        buffers: the same for the buffers.
    """
    private = objective.private
    client = algorithm.client_init(objective.whole(x, start), objective.layers)
    if private is None:
        return client
    start = objective.private_start if start is None else start
    server = None if private.layers is None or start is None else algorithm.init(start, private.layers)
    starts = objective.buffers if buffers is None else buffers
    return _pack(Kept(client, server, {name: starts[name] for name in private.buffers}))


def unpack(objective: Objective, record: Any) -> Kept:
    """Return the parts of what a client keeps."""
    return Kept(record) if objective.private is None else _unpack(record)


def personal_model(objective: Objective, x: Tensor, buffers: Buffers, record: Any) -> tuple[Tensor, Buffers]:
    """Return the parameters and buffers that a client sees; the record is None for a client without one."""
    private = objective.private
    if private is None or record is None:
        return objective.whole(x), buffers
    kept = _unpack(record)
    return x if kept.server is None else private.join(x, kept.server.x), buffers | kept.buffers


def model_in_use(algorithm: Algorithm, objective: Objective, state: State, client: int) -> tuple[Tensor, Buffers]:
    """Return the parameters and buffers of the model that a client uses for itself."""
    record = state.clients.get(client)
    if record is None:  # it has not taken part yet
        record = first_record(algorithm, objective, state.server.x, state.private_start, state.buffers)
    record = type(record)(*(None if value is None else value.to(objective.device) for value in record))
    x, buffers = personal_model(objective, state.server.x, state.buffers, record)
    return algorithm.client_model(x, unpack(objective, record).client), buffers


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
        return up, client
    server = None
    if kept.server is not None:
        up, private_up = private.split_record(up, layout)
        private_y = private.split(local.y, layout)[1]
        server = algorithm.update(kept.server, private_up, _of_one(info, objective))._replace(x=private_y)
    return up, _pack(Kept(client, server, {name: buffers[name] for name in private.buffers}))


def _of_one(info: ClientInfo, objective: Objective, mean_gradient: Tensor | None = None) -> ServerInfo:
    """Return what the server of a federation of one client knows about the round."""
    private = objective.private
    assert private is not None
    assert private.layers is not None
    return ServerInfo(info.round, info.lr, private.layers, 1.0, info.steps, mean_gradient)


# --- one flat record, which checkpoints, nodes' disks and stacked rows take as they take any Client record ------------


def _pack(kept: Kept) -> Any:
    server_fields = () if kept.server is None else kept.server
    server = None if kept.server is None else type(kept.server)
    kind = _record_type((type(kept.client), server, tuple(kept.buffers)))
    return kind(*kept.client, *server_fields, *kept.buffers.values())


def _unpack(record: Any) -> Kept:
    client, server, names = record.kinds
    a = len(client._fields)
    b = a if server is None else a + len(server._fields)
    buffers: Mapping[str, Tensor] = dict(zip(names, record[b:], strict=True))
    return Kept(client(*record[:a]), None if server is None else server(*record[a:b]), dict(buffers))


@functools.cache
def _record_type(kinds: tuple[Any, Any, tuple[str, ...]]) -> Any:
    """Return the class of the flat record of a Client, a Server and some buffers."""
    client, server, buffers = kinds
    fields = [f"client_{name}" for name in client._fields]
    fields += [f"private_{name}" for name in (() if server is None else server._fields)]
    fields += [f"buffer_{i}" for i in range(len(buffers))]
    kind = namedtuple("PersonalRecord", fields)  # type: ignore[misc]
    kind.kinds = kinds  # type: ignore[attr-defined]
    return kind
