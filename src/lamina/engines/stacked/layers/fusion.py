"""Spare a GPU passes over a network's activations, without changing a result.

- GroupNorm also adds the residual and applies the ReLU that follow it, and adds the gradients of two later layers,
  between which `nn.Identity` (a shortcut, say) does not count.
- Max-pooling also applies the ReLU before or after it, and Dropout2d comes after it, where the images are smaller.

The network's operations are found with `torch.fx`. A network that it cannot trace, that does something else in training
than in evaluation, or whose layers have hooks, stays as it is.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional as F  # noqa: N812

from lamina.engines.stacked.layers.modules import PlainMaxPool2d, StackedConv2d, StackedGroupNorm
from lamina.objective.dropout import FromStreams
from lamina.objective.fingerprint import HOOKS

ADDITIONS = (operator.add, torch.add)
RELUS = (F.relu, torch.relu)


class _LayerTracer(fx.Tracer):
    """A tracer that does not look into layers."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return not isinstance(m, nn.Sequential) and (not list(m.children()) or m.__module__.startswith("torch.nn"))


def fuse(module: nn.Module) -> nn.Module:
    """Return a module that computes the same with fewer operations."""
    if not any(isinstance(layer, StackedGroupNorm | PlainMaxPool2d) for layer in module.modules()):
        return module
    if any(getattr(layer, kind) for layer in module.modules() for kind in HOOKS):
        return module  # a hook sees, or changes, what a layer alone computes
    try:
        graphs = [_LayerTracer().trace(module.train(mode)) for mode in (False, True)]
    except Exception:  # whatever a user's module raises when its inputs are not tensors
        return module
    graph = graphs[1]
    if str(graphs[0]) != str(graph):
        return module
    layers = dict(module.named_modules())
    for node in list(graph.nodes):
        if node.op == "call_module" and type(layers[node.target]) is nn.Identity and len(node.args) == 1:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
    for node in list(graph.nodes):
        layer = layers[node.target] if node.op == "call_module" and node.args else None  # no args: called by keyword
        if isinstance(layer, StackedGroupNorm):
            _fuse_norm(graph, node, layers)
        elif isinstance(layer, PlainMaxPool2d):
            _fuse_pooling(graph, node, layers)
    for node in list(graph.nodes):
        if node.op == "call_module" and isinstance(layers[node.target], StackedGroupNorm):
            _split_users(graph, node, layers)
    graph.lint()
    fused = fx.GraphModule(module, graph)
    same = all(
        {name for name, _ in getattr(fused, kind)()} == {name for name, _ in getattr(module, kind)()}
        for kind in ("named_parameters", "named_buffers")
    )
    return fused if same else module


def _fuse_norm(graph: fx.Graph, norm: fx.Node, layers: dict[str, Any]) -> None:
    """Let a norm do what its only user, and that one's only user, does."""
    if len(norm.users) != 1:
        return
    last = next(iter(norm.users))
    residual: tuple[Any, ...] = ()
    if last.op == "call_function" and last.target in ADDITIONS and len(last.args) == 2 and not last.kwargs:
        other = last.args[0] if last.args[1] is norm else last.args[1]
        if not isinstance(other, fx.Node) or other is norm or len(last.users) != 1:
            return
        residual, last = (other,), next(iter(last.users))
    if not _is_relu(last, layers):
        return
    with graph.inserting_before(last):
        fused = graph.call_module(str(norm.target), (norm.args[0], *residual), {"relu": True})
    last.replace_all_uses_with(fused)
    for node in [last, *norm.users, norm]:
        if node in graph.nodes and not node.users:
            graph.erase_node(node)


def _split_users(graph: fx.Graph, norm: fx.Node, layers: dict[str, Any]) -> None:
    """Return a norm's result twice, once for each of two users, so that the norm itself adds up their gradients.

    Both results share their memory, so the users must be layers that do not change their inputs in place.
    """
    users = list(norm.users)
    if len(users) != 2 or not norm.kwargs.get("relu"):
        return
    kinds = StackedConv2d | StackedGroupNorm
    if not all(user.op == "call_module" and isinstance(layers[str(user.target)], kinds) for user in users):
        return
    norm.kwargs = {**norm.kwargs, "twice": True}
    for i, user in enumerate(users):
        with graph.inserting_after(norm):
            result = graph.call_function(operator.getitem, (norm, i))
        user.replace_input_with(norm, result)


def _fuse_pooling(graph: fx.Graph, pool: fx.Node, layers: dict[str, Any]) -> None:
    """Let a pooling take over its ReLU, and move Dropout2d behind it.

    A function that never decreases keeps the place of a window's maximum, so values and gradients stay the same.
    """
    dropouts = []
    while (before := pool.args[0]) and isinstance(before, fx.Node) and len(before.users) == 1:
        source = before.args[0] if before.args else None
        if not isinstance(source, fx.Node) or len(source.users) != 1:  # others may read what a ReLU changes in place
            break
        if _is_relu(before, layers):
            pool.kwargs = {"relu": True}
        elif _is_channel_dropout(before, layers):
            dropouts.append(str(before.target))
        else:
            break
        pool.args = (source,)
        graph.erase_node(before)
    for name in dropouts:
        with graph.inserting_after(pool):
            moved = graph.call_module(name, (pool,))
        pool.replace_all_uses_with(moved)
        moved.args = (pool,)
    after = pool
    while len(after.users) == 1:
        user = next(iter(after.users))
        if _is_relu(user, layers):
            pool.kwargs = {"relu": True}
            user.replace_all_uses_with(after)
            graph.erase_node(user)
        elif _is_channel_dropout(user, layers):
            after = user
        else:
            break


def _is_channel_dropout(node: fx.Node, layers: dict[str, Any]) -> bool:
    """Return whether a node is a Dropout2d that may come after a ReLU, whose result must not change in place."""
    layer = layers[str(node.target)] if node.op == "call_module" else None
    return isinstance(layer, FromStreams) and isinstance(layer, nn.Dropout2d) and not layer.inplace


def _is_relu(node: fx.Node, layers: dict[str, Any]) -> bool:
    if node.op == "call_module":
        return type(layers[str(node.target)]) is nn.ReLU
    return (node.op == "call_function" and node.target in RELUS) or (node.op == "call_method" and node.target == "relu")
