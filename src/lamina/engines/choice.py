"""The choice of an engine: the fastest that computes what the reference loop computes."""

from __future__ import annotations

import logging
import weakref
from collections import deque
from collections.abc import Iterator
from typing import Any, Literal, get_args

from lamina.algorithms.contract import Algorithm
from lamina.base.errors import BadInput, unknown
from lamina.base.registry import field_values
from lamina.data.dataset import Dataset
from lamina.engines.devices import Precision
from lamina.engines.loop import Loop
from lamina.engines.preference import why_apart
from lamina.engines.ranks import Ranks
from lamina.engines.stacked.apart import why_not_captured
from lamina.engines.stacked.engine import Stacked
from lamina.engines.stacked.forward import CapturedForward, stacked_forward, why_not_stacked
from lamina.engines.stacked.gpu.launch import stop_compilers
from lamina.engines.stacked.independence import ignores_order, number_without_column, works_by_row
from lamina.engines.stacked.memory import keep_freed_memory
from lamina.engines.stacked.precompile import precompile
from lamina.engines.stacked.probe import probe_samples
from lamina.objective.batch import Inputs, Targets, same_kind, take
from lamina.objective.fingerprint import same_tensors
from lamina.objective.objective import Objective

UNCONTROLLED = (
    "the module's forward draws random numbers itself (torch.randn_like, an LSTM's dropout, dropout in evaluation, in "
    "activation checkpointing or in torch.func), so clients train one by one from seeds of their own; for dropout, use "
    "nn.Dropout or F.dropout(…, training=self.training)"
)
PER_BATCH = "the loss is one of a whole batch (per_batch), so each client's batch passes alone"
EngineName = Literal["auto", "stacked", "captured", "loop"]
ENGINES: tuple[EngineName, ...] = get_args(EngineName)
Engine = Loop | Stacked
log = logging.getLogger(__name__)


def choose_engine(
    name: str, precision: Precision, *, is_random: bool, cohort: int, batch: int, **settings: Any
) -> Engine:
    """Return the engine to run on.

    Args:
        name: "auto" takes the fastest that fits the model, and logs which and why.
        precision: the model's arithmetic.
        is_random: whether the module draws random numbers itself: `torch.rand`, or dropout in evaluation mode.
        cohort: how many clients train in a round.
        batch: samples of a local step.
        settings: the fields that `Loop` and `Stacked` share.
    """
    if name not in ENGINES:
        raise unknown("engine", name, ENGINES)
    words = (name, precision, cohort, batch)
    recent = _recent_engines(words, settings["data"])
    lent = (_lent_engine(similar, **settings) for similar in recent)
    engine = next((one for one in lent if one is not None), None)
    if engine is None:
        engine = _fastest_engine(name, precision, is_random, cohort, batch, **settings)
        _recent.append((words, weakref.ref(engine)))
    settings["objective"].autocasts = precision == "bf16"
    if settings["objective"].device.type == "cpu":
        keep_freed_memory()
    log.info("engine %s: %s", engine.name, engine.why)
    return engine


# the engines of this process that were chosen last, if they still exist: seeds and rates share one choice
_recent: deque[tuple[Any, weakref.ref[Engine]]] = deque(maxlen=4)


def _recent_engines(words: Any, data: Dataset) -> Iterator[Engine]:
    """Yield engines that were chosen by the same words for the same data."""
    for other_words, reference in reversed(_recent):
        engine = reference()
        if engine is None or other_words != words:
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
    is_captured = isinstance(lender.forward, CapturedForward)
    if not is_same and (
        _why_client_by_client(algorithm, objective) or (not is_captured and _why_one_order(algorithm, objective))
    ):
        return None
    forward = CapturedForward(objective, lender.forward.precision) if is_captured else lender.forward
    return Stacked(forward=forward, **settings, why=lender.why)


def _why_client_by_client(algorithm: Algorithm, objective: Objective) -> str:
    """Return why an algorithm cannot compute rows of several clients, or an empty string."""
    if not works_by_row(algorithm, objective.layers, objective.device):
        cause = "a branch on a tensor's value, a norm without dim=-1, or random numbers?"
        return f"the algorithm gives other results for several clients together than for each alone ({cause})"
    number = "" if objective.device.type == "cpu" else number_without_column(algorithm)  # inputs of a captured step
    return f"the algorithm cannot take '{number}' as a tensor (a branch on it? declare it as float)" if number else ""


def _why_one_order(algorithm: Algorithm, objective: Objective) -> str:
    """Return why a stacked model does not suit an algorithm, or an empty string."""
    if objective.device.type == "cpu" or ignores_order(algorithm, objective.layers, objective.device):
        return ""
    return "the algorithm treats coordinates by number, and convolution kernels have another order on a GPU"


def _fastest_engine(
    name: str, precision: Precision, is_random: bool, cohort: int, batch: int, **settings: Any
) -> Engine:
    if name == "loop":
        return _loop("engine='loop' was asked for", **settings)
    algorithm, objective = settings["algorithm"], settings["objective"]
    why = UNCONTROLLED if is_random else _why_client_by_client(algorithm, objective)
    if not why:
        sample = _probe_batch(settings["data"], objective)
        is_shared = Ranks.current().world > 1 and objective.device.type == "cpu"  # by torchrun, which the loop is not
        why = why_apart(objective, cohort, batch, sample[0]) if name == "auto" and not is_shared else ""
        why = PER_BATCH if objective.mixes_samples and name != "captured" else why
        if name != "captured" and not why:
            forward, why = stacked_forward(objective, sample, precision)
            if forward is not None:
                reason = "the fastest for this model" if name == "auto" else "engine='stacked' was asked for"
                engine = Stacked(forward=forward, **settings, why=reason)
                precompile(engine, cohort, batch)  # other processes compile while this one checks
                why = why_not_stacked(forward, sample, precision) or _why_one_order(algorithm, objective)
                if not why:
                    return engine
                stop_compilers()
        if name == "captured" or (name == "auto" and (is_shared or objective.device.type == "cuda")):
            reason = why_not_captured(objective, sample)
            if not reason:
                why = why or "engine='captured' was asked for"
                return Stacked(forward=CapturedForward(objective, precision), **settings, why=why)
            why = "; ".join(filter(None, [why, reason]))
    if name != "auto":
        raise BadInput(f"engine='{name}' is not possible here: {why}; engine='auto' falls back by itself")
    return _loop(why, **settings)


def _loop(why: str, **settings: Any) -> Loop:
    if Ranks.current().world > 1:
        raise BadInput(f"torchrun shares the clients of the stacked and the captured engine, not of the loop: {why}")
    return Loop(**settings, why=why)


def _probe_batch(data: Dataset, objective: Objective) -> tuple[Inputs, Targets]:
    """Return inputs and targets that show whether clients can share a batch."""
    chosen = probe_samples(data.x)
    return data.inputs(chosen, objective.dtype), take(data.y, chosen)
