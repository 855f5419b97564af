"""The metrics of a round: its row in the history, and the evaluation of the new model."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from lamina import rng
from lamina.algorithms.contract import Algorithm
from lamina.clients import Clients
from lamina.data.dataset import Dataset
from lamina.engines.state import RoundReport
from lamina.errors import Diverged
from lamina.history import Row
from lamina.objective import Buffers, Objective
from lamina.plan import Round

EVALUATION_BATCH = 1000  # samples at a time
# input numbers at a time on a GPU, if that is more: small images come in large batches
EVALUATION_NUMBERS_GPU = 8 << 20
MOST_EVALUATED = 16_384  # samples; tokens are small, but their activations are not


def evaluate(objective: Objective, x: Tensor, buffers: Buffers, data: Dataset) -> dict[str, float]:
    """Return the mean loss of a model on data and, where it is defined (see `Objective.correct`), its accuracy."""
    return named(measure(objective, x, buffers, data))


def measure(objective: Objective, x: Tensor, buffers: Buffers, data: Dataset) -> Tensor:
    """Return the mean loss and the accuracy, if there is one, as a tensor on the device."""
    losses, correct = predict(objective, x, buffers, data)
    return torch.stack([values.double().mean() for values in (losses, correct) if values is not None])


def named(measured: Tensor) -> dict[str, float]:
    """Return the values of `measure` by name; this waits for the GPU once."""
    return dict(zip(("loss", "accuracy"), measured.tolist(), strict=False))


def predict(objective: Objective, x: Tensor, buffers: Buffers, data: Dataset) -> tuple[Tensor, Tensor | None]:
    """Return the loss of every sample and, where there is an accuracy, whether its prediction is right (0 or 1)."""
    losses, correct = [], []
    batch = EVALUATION_BATCH
    if objective.device.type != "cpu":
        batch = min(max(batch, EVALUATION_NUMBERS_GPU // data.sample_numbers), MOST_EVALUATED)
    with torch.no_grad(), rng.forked(objective.device, seed=0):  # a module may draw random numbers in evaluation, too
        for start in range(0, len(data), batch):
            part = slice(start, start + batch)
            inputs = data.inputs(part, objective.dtype)
            outputs = objective.outputs(x, buffers, inputs, train=False)
            targets = data.y[part]
            losses.append(objective.loss(outputs, targets))
            hits = objective.correct(outputs, targets, data.classes)
            if hits is not None:
                correct.append(hits)
    return torch.cat(losses), torch.cat(correct) if correct else None


def client_metrics(correct: Tensor, clients: Clients) -> dict[str, float]:
    """Return the accuracy on every client's own training data: how evenly the model serves them."""
    hits, parts = correct.cpu().numpy(), clients.parts
    accuracies = np.sort(np.add.reduceat(hits[parts.samples], parts.bounds[:-1]) / parts.sizes.astype(hits.dtype))
    worst = max(1, round(0.1 * len(accuracies)))
    return {
        "client_accuracy": float(accuracies.mean()),
        "client_accuracy_worst10": float(accuracies[:worst].mean()),
        "client_accuracy_std": float(accuracies.std()),
    }


def round_row(
    algorithm: Algorithm, x: Tensor, plan: Round, report: RoundReport, seconds: float
) -> dict[str, float | int]:
    """Return the metrics of a round without its evaluation."""
    models = algorithm.paper_models(plan.number)
    row: dict[str, float | int] = {
        "round": plan.number,
        "lr": plan.lr,
        "clients": len(plan.cohort),
        "steps": int(plan.steps.sum()),
        "train_loss": report.train_loss,
        "consistency": report.consistency,
        "update_norm": report.update_norm,
        "bytes_down": report.bytes_down,
        "bytes_up": report.bytes_up,
        "seconds": seconds,
    }
    if models is not None:  # the bytes as the papers count them, beside those sent
        row["paper_bytes"] = models * x.numel() * x.element_size() * len(plan.cohort)
    return row | {f"trust_ratio/{layer}": value for layer, value in report.trust_ratios.items()}


def refuse_nonfinite(row: Row) -> None:
    """Raise `Diverged` for a round whose weights are finite but whose test loss is not."""
    if not math.isfinite(row.get("loss", 0.0)):
        raise Diverged(
            f"round {row['round']}: the test loss of the new model is {row['loss']}; "
            f"lower the learning rate (now {row['lr']:g}) or clip the gradients. All rounds are kept",
            round=int(row["round"]),
            client=None,
            layer="loss",
        )
