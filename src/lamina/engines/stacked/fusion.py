"""Fuse what follows a GroupNorm in a network: the residual sum and the ReLU.

A GPU computes relu(norm(x) + residual) in the time it needs to read x and the residual once. The network's operations
are found with `torch.fx`; a network that it cannot trace, or that does something else in training than in evaluation,
stays as it is.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional as F  # noqa: N812

from lamina.engines.stacked.modules import StackedGroupNorm

ADDITIONS = (operator.add, torch.add)
RELUS = (F.relu, torch.relu)


class _LayerTracer(fx.Tracer):
    """A tracer that does not look into layers."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return not isinstance(m, nn.Sequential) and (not list(m.children()) or m.__module__.startswith("torch.nn"))


def fuse_norms(module: nn.Module) -> nn.Module:
    """Return the module with GroupNorms that also add the residual and apply the ReLU that follow them."""
    if not any(isinstance(layer, StackedGroupNorm) for layer in module.modules()):
        return module
    try:
        graphs = [_LayerTracer().trace(module.train(mode)) for mode in (False, True)]
    except Exception:  # whatever a user's module raises when its inputs are not tensors
        return module
    graph = graphs[1]
    if str(graphs[0]) != str(graph):
        return module
    layers = dict(module.named_modules())
    for node in list(graph.nodes):
        if node.op == "call_module" and isinstance(layers[node.target], StackedGroupNorm):
            _fuse(graph, node, layers)
    graph.lint()
    fused = fx.GraphModule(module, graph)
    same = all(
        {name for name, _ in getattr(fused, kind)()} == {name for name, _ in getattr(module, kind)()}
        for kind in ("named_parameters", "named_buffers")
    )
    return fused if same else module


def _fuse(graph: fx.Graph, norm: fx.Node, layers: dict[str, Any]) -> None:
    """Let a norm do what its only user, and that one's only user, does."""
    layer = layers[str(norm.target)]
    if len(norm.users) != 1 or sum(n.target == norm.target for n in graph.nodes if n.op == "call_module") != 1:
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
        fused = graph.call_module(str(norm.target), (norm.args[0], *residual))
    last.replace_all_uses_with(fused)
    for node in [last, *norm.users, norm]:
        if node in graph.nodes and not node.users:
            graph.erase_node(node)
    layer.relu = True


def _is_relu(node: fx.Node, layers: dict[str, Any]) -> bool:
    if node.op == "call_module":
        return type(layers[str(node.target)]) is nn.ReLU
    return (node.op == "call_function" and node.target in RELUS) or (node.op == "call_method" and node.target == "relu")
