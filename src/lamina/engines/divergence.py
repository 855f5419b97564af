"""Find and describe the first value of a training run that is not finite."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lamina.base.errors import Diverged
from lamina.base.finite import all_finite
from lamina.objective.layers import Layers
from lamina.objective.objective import Buffers, Objective
from lamina.rounds.plan import RoundPlan


@dataclass(frozen=True)
class StepCheck:
    """Check the local steps of the c-th active client: raise `Diverged` after the first one that is not finite."""

    objective: Objective
    buffers: Buffers
    plan: RoundPlan
    c: int
    batch: Callable[[int], Any]  # the `inputs` of a step and the `stream` of its dropout masks

    def __call__(self, k: int, loss: Tensor, grad: Tensor, before: Any, after: Any) -> None:
        """Check step k, which led from one local state to another."""
        if all_finite(loss, grad, *after):
            return
        plan, layers, client_id = self.plan, self.objective.layers, int(self.plan.cohort[self.c])
        step = f" (local step {k + 1} of {int(plan.steps[self.c])})"
        # what went wrong first: a layer's output, then its gradient, then the step itself
        module = self._first_nonfinite_module(before.y, self.batch(k))
        if module is not None:
            raise diverged(layers, before.y, plan.number, plan.lr, client_id, step, fallback=module)
        where = after.y if all_finite(grad) else grad
        raise diverged(layers, where, plan.number, plan.lr, client_id, step)

    def _first_nonfinite_module(self, y: Tensor, batch: Any) -> str | None:
        """Return the first layer, in the order of the forward pass, whose output on a batch is not finite."""
        nonfinite: list[str] = []

        def check_output(name: str) -> Callable[..., None]:
            def hook(_module: Any, _inputs: Any, output: Any) -> None:
                if isinstance(output, Tensor) and not all_finite(output):
                    nonfinite.append(name)

            return hook

        leaves = [(n, m) for n, m in self.objective.seeded.named_modules() if not list(m.children())]
        handles = [m.register_forward_hook(check_output(n or type(m).__name__)) for n, m in leaves]
        try:
            buffers = {name: buffer.clone() for name, buffer in self.buffers.items()}
            with torch.no_grad():
                self.objective.outputs(y, buffers, batch.inputs, train=True, streams=batch.stream)
        finally:
            for handle in handles:
                handle.remove()
        return nonfinite[0] if nonfinite else None


def diverged_upload(layers: Layers, up: Any, plan: RoundPlan, c: int) -> Diverged:
    """Return the error for a client whose upload or state is not finite, although its steps were."""
    client_id = int(plan.cohort[c])
    for name, value in zip(up._fields, up, strict=True):
        if not all_finite(value):
            return diverged(layers, value, plan.number, plan.lr, client_id, f" (upload '{name}')")
    sent = next(value for value in up if value is not None)
    return diverged(layers, sent, plan.number, plan.lr, client_id, fallback="loss or client state")


def diverged(
    layers: Layers, vector: Tensor, round: int, lr: float, client: int | None, step: str = "", fallback: str = "loss"
) -> Diverged:
    """Return the error for a NaN or an infinity in a flat vector: where it is and what to try."""
    layer = (layers.first_nonfinite(vector) if vector.shape[-1] == layers.size else None) or fallback
    who = "the server's step" if client is None else f"client {client}{step}"
    return went_nonfinite(f"{who} went non-finite,", layer, round, lr, client)


def went_nonfinite(what: str, layer: str, round: int, lr: float, client: int | None) -> Diverged:
    """Return the error for something that went non-finite in a layer (empty: unnamed), and what to try."""
    advice = f"lower the learning rate (now {lr:g}) or clip the gradients"
    kept = ". Earlier rounds are kept" if round > 1 else ""
    where = f" first in '{layer}'" if layer else ""
    text = f"round {round}: {what}{where}; {advice}{kept}"
    return Diverged(text, round=round, client=client, layer=layer)
