"""A rehearsal: one round without data before the real ones, to name the function that breaks the contract.

Without it, a missing field or a write into an argument would show up as an error far from its cause, or as wrong
numbers in one engine only. The layers are those of the real model, because what an algorithm does may depend on their
sizes. Lamina's own algorithms are rehearsed in the tests.
"""

from __future__ import annotations

import functools
import inspect
import logging
import traceback
from collections.abc import Callable, Iterator
from itertools import zip_longest
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from lamina.algorithms.contract import (
    Algorithm,
    Analysis,
    ClientInfo,
    Needs,
    ServerInfo,
    has_displacement,
    has_second_point,
    loss_argument,
    step_kinds,
    trial_step,
)
from lamina.base.errors import BadInput, LaminaError, where_it_failed
from lamina.objective.layers import Layers

# its numbers of elements and layers differ; its matrices are a first, a hidden and a last one
TINY = Layers({"a.weight": (3, 4), "a.bias": (3,), "b.weight": (2, 3), "c.weight": (2, 2)})


# the functions that engines call with one client's vectors [p], or with rows of several clients [rows, p]
CLIENT_FUNCTIONS = ("begin", "second_point", "step", "trust_ratios", "finish", "displacement")

log = logging.getLogger(__name__)
_random: set[type[Algorithm]] = set()  # algorithms that were warned of


def is_user_defined(algorithm: Algorithm) -> bool:
    """Return whether an algorithm is not one of lamina's, which the tests have tried on many models."""
    return not type(algorithm).__module__.startswith("lamina.algorithms.")


def rehearse(algorithm: Algorithm, layers: Layers = TINY, device: torch.device | str = "cpu") -> None:
    """Run one round twice, refuse an algorithm that breaks the contract, and warn of a random one."""
    one, other = (_run_round(algorithm, layers, device) for _ in range(2))
    if not _all(_same, one, other) and type(algorithm) not in _random:
        _random.add(type(algorithm))
        log.warning(
            "the algorithm '%s' draws random numbers, which do not follow from the seed: its runs can be neither "
            "repeated nor resumed exactly",
            algorithm.card.name,
        )


def trial_rounds(algorithm: Algorithm, x: Tensor, layers: Layers, rounds: int) -> Iterator[tuple[Any, Any, Any]]:
    """Yield the broadcast, the upload and the client's new state of rounds with one client and without data."""
    server, client = algorithm.init(x, layers), algorithm.client_init(x, layers)
    for number in range(1, rounds + 1):
        needs = algorithm.needs(number)
        server_info = ServerInfo(number, 0.1, layers, mean_gradient=x if needs.control_variate else None)
        info = ClientInfo(number, 0.1, layers, full_gradient=x if needs.full_gradient else None)
        down = algorithm.broadcast(server, server_info)
        local = trial_step(algorithm, algorithm.begin(down, client, info), down, x, info)
        up, client = algorithm.finish(local, down, client, info)
        yield down, up, client
        server = algorithm.update(server, up, server_info)


@functools.lru_cache(maxsize=256)
def _sizes_sent(algorithm: Algorithm, layers: Layers) -> tuple[dict[str, int], int]:
    """Return the sizes of all fields of `Up` that are sent in some rounds at least, and the model's.

    A user's algorithm may depend on the model's layers; lamina's do not.
    """
    if not is_user_defined(algorithm):
        layers = TINY
    sizes: dict[str, int] = {}
    for _, up, _ in trial_rounds(algorithm, torch.ones(layers.size), layers, algorithm.cycle):
        sizes |= {name: value.shape[-1] for name, value in up._asdict().items() if value is not None}
    return {name: sizes[name] for name in up._fields if name in sizes}, layers.size


def sent_fields(algorithm: Algorithm, layers: Layers = TINY) -> list[str]:
    """Return the fields of `Up` that are sent in some rounds at least."""
    return list(_sizes_sent(algorithm, layers)[0])


def sent_vectors(algorithm: Algorithm, layers: Layers = TINY) -> list[str]:
    """Return the fields of `Up` that are vectors like the model, and sent in some rounds at least.

    >>> from lamina.algorithms import FedLamb
    >>> sent_vectors(FedLamb())
    ['delta', 'v']
    """
    sizes, model = _sizes_sent(algorithm, layers)
    return [name for name, size in sizes.items() if size == model]


def _run_round(algorithm: Algorithm, layers: Layers, device: torch.device | str) -> Any:
    """Run one round with one client; return all that it computes."""
    x = torch.linspace(-1.0, 1.0, layers.size, device=device)
    gradient = torch.linspace(0.5, -0.5, layers.size, device=device)
    sizes = (layers.size, len(layers.group_sizes(algorithm.grouping)), 1)
    calls: list[tuple[str, tuple[Any, ...], dict[str, Any], Any]] = []  # of functions of the client, with their results

    def broken(name: str, what: str) -> BadInput:
        return BadInput(f"the algorithm '{algorithm.card.name}' breaks the contract: {name} {what}")

    def call(name: str, *arguments: Any, **more: Any) -> Any:
        tensors = _tensors((*arguments, *more.values()))
        before = [value.clone() for value in tensors]
        try:
            result = getattr(algorithm, name)(*arguments, **more)
        except LaminaError:
            raise
        except Exception as error:
            reason = " ".join(str(error).split())
            where = where_it_failed(error)
            if traceback.extract_tb(error.__traceback__)[-1].filename == __file__:  # it does not take the arguments
                taken = [*inspect.signature(getattr(Algorithm, name)).parameters, *more]
                where = f"it is called as {name}({', '.join(taken)})"
            where = f" ({where})" if where else ""
            raise broken(name, f"fails in a trial round: {type(error).__name__}: {reason}{where}") from error
        if not all(map(_same, before, tensors)):
            raise broken(name, "writes into its arguments: return new tensors, y - lr * grad and not y.sub_(lr * grad)")
        if name in CLIENT_FUNCTIONS:
            calls.append((name, arguments, more, result))
        return result

    def checked(name: str, record: Any, field: str = "", like: Any = None) -> Any:
        if not isinstance(record, tuple) or not hasattr(record, "_fields"):
            raise broken(name, f"must return a NamedTuple of tensors, found {type(record).__name__}")
        if field and getattr(record, field, None) is None:
            raise broken(name, f"must return a state with the field '{field}', found {_signature(record)}")
        if like is not None and record._fields != like._fields:
            raise broken(name, f"must return the state it was given, {_signature(like)}, found {_signature(record)}")
        for key, value in zip(record._fields, record, strict=True):
            if value is not None and not (isinstance(value, Tensor) and value.dim() and value.shape[-1] in sizes):
                shapes = "[..., p], [..., layers] or [..., 1]"
                raise broken(name, f"field '{key}' must be a tensor {shapes}, or None, found {_describe(value)}")
            expected = x if key == field else getattr(like, key, None)
            if value is not None and expected is not None and _kind(value) != _kind(expected):
                raise broken(name, f"field '{key}' must stay {_kind(expected)}, found {_kind(value)}")
        return record

    def check_vector(name: str, vector: Any, what: str) -> None:
        if not isinstance(vector, Tensor) or vector.shape != x.shape:
            raise broken(name, f"must return {what}, [..., p], found {_describe(vector)}")

    needs = algorithm.needs(1)
    if not isinstance(needs, Needs):
        raise broken("needs", f"must return a Needs, found {_describe(needs)}")
    if needs.second_gradient and not has_second_point(algorithm):
        raise broken("needs", "asks for a second gradient, but second_point is missing: define it to say where")
    server_info = ServerInfo(1, 0.1, layers, mean_gradient=gradient if needs.control_variate else None)
    info = ClientInfo(1, 0.1, layers, full_gradient=gradient if needs.full_gradient else None)

    server = checked("init", call("init", x, layers), "x")
    client = checked("client_init", call("client_init", x, layers))
    down = checked("broadcast", call("broadcast", server, server_info), "x")
    local = checked("begin", call("begin", down, client, info), "y")
    start = local
    for has_second in step_kinds(algorithm):
        more = ({"second_grad": gradient} if has_second else {}) | loss_argument(algorithm, gradient[:1])
        if has_second:
            point = call("second_point", start, down, gradient, 0.1, layers)
            check_vector("second_point", point, "a point like local.y")
        local = checked("step", call("step", start, down, gradient, 0.1, layers, **more), "y", like=start)
    ratios = call("trust_ratios", local)
    if ratios is not None and not (isinstance(ratios, Tensor) and ratios.shape[-1:] == sizes[1:2]):
        raise broken("trust_ratios", f"must return a tensor, one ratio per layer, or None, found {_describe(ratios)}")
    pair = call("finish", local, down, client, info)
    if not isinstance(pair, tuple) or hasattr(pair, "_fields") or len(pair) != 2:
        raise broken("finish", "must return two things: what is sent up, and the client's new state")
    up = checked("finish", pair[0], "" if has_displacement(algorithm) else "delta")
    if has_displacement(algorithm):
        if getattr(up, "delta", up) is not None:
            raise broken("finish", f"must leave 'delta' of the upload None beside displacement, found {_signature(up)}")
        check_vector("displacement", call("displacement", up), "y_K - x")
    for attribute in ("state_changes", "non_negative", "references"):
        for field in getattr(algorithm, attribute):
            if field not in up._fields:
                raise broken(attribute, f"names '{field}', which is not a field of {_signature(up)}")
    for name, field in algorithm.references.items():
        if getattr(up, name) is not None and getattr(down, field, None) is None:
            raise broken("references", f"names '{field}', which is not a field of {_signature(down)}")
    checked("finish", pair[1], like=client)
    after = checked("update", call("update", server, up, server_info), "x", like=server)
    check_vector("trained_model", call("trained_model", after), "a model like server.x")
    analysis = call("analysis", after, server)
    if not isinstance(analysis, Analysis) or any(
        vector is not None and getattr(vector, "shape", None) != x.shape for vector in analysis
    ):
        raise broken("analysis", f"must return an Analysis of vectors like x, [..., p], found {_describe(analysis)}")
    for name, arguments, more, result in calls:
        if not _accepts_rows(getattr(algorithm, name), arguments, more, result):
            advice = "index the last axis (grad[..., :3], dim=-1), the engine owns the leading ones"
            raise broken(name, f"computes something else for a row [1, p] than for a vector [p]: {advice}")
    return down, local, pair, after


def _accepts_rows(function: Any, arguments: tuple[Any, ...], more: dict[str, Any], result: Any) -> bool:
    """Return whether a function computes for a row [1, p] what it has computed for a vector [p]."""
    try:
        row = function(*_as_row(arguments), **{key: _as_row(value) for key, value in more.items()})
    except Exception:  # such as a dot product's, which takes vectors only: the engines then train client by client
        return True
    if _all(_close, _as_row(result), row):
        return True
    return not _all(_same, result, function(*arguments, **more))  # it is random


def _tensors(values: Any) -> list[Tensor]:
    """Return all tensors of nested tuples."""
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def _all(is_equal: Callable[[Tensor, Tensor], bool], one: Any, other: Any) -> bool:
    """Return whether all tensors of two results are equal."""
    pairs = list(zip_longest(_tensors((one,)), _tensors((other,))))
    return all(a is not None and b is not None and is_equal(a, b) for a, b in pairs)


def _as_row(values: Any) -> Any:
    """Return nested tuples with one more leading axis on every tensor."""
    return tree_map_only(Tensor, lambda tensor: tensor.unsqueeze(0), values)


def _close(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors are equal to rounding: sums over one axis may be taken in another order."""
    if one.shape != other.shape:
        return False
    size = float(one.nan_to_num(0.0, 0.0, 0.0).abs().max()) if one.numel() else 0.0
    return torch.allclose(one, other, rtol=1e-5, atol=1e-5 * size, equal_nan=True)


def _same(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors are equal; a NaN equals a NaN."""
    return torch.allclose(one, other, rtol=0.0, atol=0.0, equal_nan=True)


def _kind(value: Tensor) -> str:
    return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"


def _describe(value: Any) -> str:
    """Describe a wrong value in one line."""
    if isinstance(value, Tensor):
        return f"one of shape {list(value.shape)}"
    if isinstance(value, np.ndarray | np.generic):
        return "a numpy array: compute with torch, or return torch.from_numpy(...)"
    return " ".join(repr(value).split())


def _signature(state: Any) -> str:
    return f"{type(state).__name__}({', '.join(state._fields)})"
