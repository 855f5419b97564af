"""The choice of an engine: the fastest that computes what the reference loop computes."""

from __future__ import annotations

import logging
import weakref
from collections import deque
from collections.abc import Iterator
from typing import Any

from lamina.algorithms.contract import Algorithm
from lamina.base.errors import BadInput, unknown
from lamina.base.registry import field_values
from lamina.data.dataset import Dataset
from lamina.engines.devices import Precision
from lamina.engines.loop import Loop
from lamina.engines.stacked.engine import Stacked
from lamina.engines.stacked.forward import choose_forward
from lamina.engines.stacked.independence import ignores_order, number_without_column, works_by_row
from lamina.engines.stacked.memory import keep_freed_memory
from lamina.engines.stacked.probe import probe_samples
from lamina.objective.batch import same_kind
from lamina.objective.fingerprint import same_tensors
from lamina.objective.objective import Objective

UNCONTROLLED = (
    "the module's forward draws random numbers itself (torch.rand, an LSTM's dropout, dropout in evaluation, in "
    "activation checkpointing or in torch.func): use nn.Dropout or F.dropout(…, training=self.training) elsewhere"
)
Engine = Loop | Stacked
log = logging.getLogger(__name__)


def choose_engine(
    name: str, precision: Precision, lender: Engine | None = None, *, is_random: bool, **settings: Any
) -> Engine:
    """Return the engine to run on.

    Args:
        name: "auto" takes the fastest that fits the model, and logs why if that is not the stacked one.
        precision: the model's arithmetic.
        lender: an engine of a similar simulation with the same precision; if the model and data are alike, its choice
            is taken over, because testing what fits takes longer than a small round.
        is_random: whether the module draws random numbers itself: `torch.rand`, or dropout in evaluation mode.
        settings: the fields that `Loop` and `Stacked` share.
    """
    if name not in ("auto", "stacked", "vmap", "loop"):
        raise unknown("engine", name, ("auto", "stacked", "vmap", "loop"))
    for similar in [lender, *_recent_engines(name, precision, settings["data"])]:
        lent = None if similar is None else _lent_engine(similar, **settings)
        if lent is not None:
            return lent
    if name in ("loop", "vmap") and precision == "bf16":
        raise BadInput(f"precision='bf16' needs stacked layers: engine='{name}' computes in the model's own precision")
    engine = _fastest_engine(name, precision, is_random, **settings)
    if precision == "bf16" and not (isinstance(engine, Stacked) and engine.forward.name == "stacked"):
        log.warning("precision='bf16' needs stacked layers: this run computes in the model's own precision")
    _recent.append((name, precision, weakref.ref(engine)))
    return engine


# the engines of this process that were chosen last, if they still exist: seeds and rates share one choice
_recent: deque[tuple[str, Precision, weakref.ref[Engine]]] = deque(maxlen=4)


def _recent_engines(name: str, precision: Precision, data: Dataset) -> Iterator[Engine]:
    """Yield engines that were chosen by the same words for the same data."""
    for other_name, other_precision, reference in reversed(_recent):
        engine = reference()
        if engine is None or (other_name, other_precision) != (name, precision):
            continue
        if same_tensors(engine.data.x, data.x) and same_tensors(engine.data.y, data.y):
            yield engine


def _lent_engine(lender: Engine, **settings: Any) -> Engine | None:
    """Return an engine like the lender's, or None if the model, data or algorithm must be tested again."""
    objective = settings["objective"]
    data, other = settings["data"], lender.data
    same_data = same_kind(other.x, data.x) and same_kind(other.y, data.y)
    same_device = lender.objective.device == objective.device
    if not same_device or not same_data or lender.objective.difference(objective):
        return None
    algorithm: Algorithm = settings["algorithm"]
    is_same = type(algorithm) is type(lender.algorithm) and field_values(algorithm) == field_values(lender.algorithm)
    if isinstance(lender, Loop):
        return Loop(**settings, why=lender.why) if is_same else None
    if not is_same and _why_not_stacked(algorithm, objective):
        return None
    return Stacked(forward=lender.forward, **settings)


def _why_not_stacked(algorithm: Algorithm, objective: Objective) -> str:
    """Return why an algorithm must train client by client, or an empty string."""
    layers, device = objective.layers, objective.device
    if not works_by_row(algorithm, layers, device):
        cause = "a branch on a tensor's value, a norm without dim=-1, or random numbers?"
        return f"the algorithm gives other results for several clients together than for each alone ({cause})"
    if device.type == "cpu":
        return ""
    if not ignores_order(algorithm, layers, device):
        return "the algorithm treats coordinates by number, and convolution kernels have another order on a GPU"
    number = number_without_column(algorithm)  # numbers are inputs of a captured step
    return f"the algorithm cannot take '{number}' as a tensor (a branch on it? declare it as float)" if number else ""


def _fastest_engine(name: str, precision: Precision, is_random: bool, **settings: Any) -> Engine:
    if name == "loop":
        return Loop(**settings)
    data, objective = settings["data"], settings["objective"]
    chosen = probe_samples(data.x)
    sample = data.inputs(chosen, objective.dtype), data.y[chosen]
    if is_random:
        forward, why = None, UNCONTROLLED
    else:
        forward, why = choose_forward(objective, sample, precision, name)
    if forward is not None and (reason := _why_not_stacked(settings["algorithm"], objective)):
        forward, why = None, reason
    if forward is None:
        if name != "auto":
            raise BadInput(f"engine='{name}' is not possible here: {why}; engine='auto' falls back by itself")
        log.info("running client by client: %s", why)
        return Loop(**settings, why=why)
    if why and name == "auto":
        log.info("using torch.func.vmap instead of stacked layers: %s", why)
    if objective.device.type == "cpu":
        keep_freed_memory()
    return Stacked(forward=forward, **settings)
