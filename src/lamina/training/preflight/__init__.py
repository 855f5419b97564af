"""The checks before a run: whether the user's model, data, loss and metrics go together.

Each check looks at one thing and raises `BadInput` or logs a warning, in one line. The checks of a data set share one
`DryRun`: a few samples and the model's passes over them. To add a check, write it in the file of its theme and add it
to a list below. A list runs from top to bottom, and a check may rely on those above it.

Two kinds of checks are not here, because packages below `training` use them: whether clients can be stacked
(engines/stacked/probe.py and independence.py), and whether an algorithm keeps the contract (algorithms/rehearsal.py).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from lamina.algorithms.contract import Algorithm
from lamina.base import rng
from lamina.data.dataset import Dataset
from lamina.objective.objective import Objective
from lamina.rounds.plan import Plan
from lamina.training.evaluation import EVALUATION_BATCH
from lamina.training.metrics import Metric
from lamina.training.preflight import inputs, loss, metrics, model, outputs, targets
from lamina.training.preflight.dry_run import DryRun
from lamina.training.preflight.rounding import ignore_rounding

log = logging.getLogger(__name__)

MODEL = (model.check_max_norm, model.check_precision, model.check_finite)
TRAINING_AND_TEST_DATA: tuple[Callable[[DryRun], None], ...] = (
    inputs.check_names,
    inputs.check_token_ids,  # before the model runs: on a GPU, a wrong id kills the process
    model.check_forward,
    model.check_memory,
    model.check_parameters,
    outputs.check_sample_axis,
    targets.check_class_names,
    outputs.check_classes,
    loss.check_loss,
    loss.check_samples_alone,
    targets.check_binary_targets,
    targets.check_soft_labels,
    targets.check_counted,
)
TRAINING_DATA: tuple[Callable[[DryRun], None], ...] = (
    model.check_buffers,
    model.warn_of_state,
    loss.check_nan,
    loss.warn_of_unreached,
    outputs.warn_of_ignored_outputs,
    outputs.warn_of_logits,
    outputs.warn_of_softmax,
    outputs.warn_of_probabilities,
)


def check_model(objective: Objective) -> None:
    """Refuse a model that cannot be trained, whatever the data are."""
    for check in MODEL:
        check(objective)


def check_training(objective: Objective, data: Dataset, batch: int) -> DryRun:
    """Refuse training data that do not suit the model and the loss; `batch` is the largest batch of a local step."""
    run = DryRun(objective, data, "train", 2 * batch)  # an activation and its gradient are in memory at once
    with rng.forked(objective.device, seed=0):  # the module runs, and may draw random numbers itself
        for check in (*TRAINING_AND_TEST_DATA, *TRAINING_DATA):
            check(run)
        ignore_rounding(objective, data)
    return run


def check_evaluation(objective: Objective, data: Dataset, chosen: Sequence[Metric] | None) -> None:
    """Refuse test data, or metrics of them, that do not suit the model and the loss."""
    run = DryRun(objective, data, "test", min(len(data), EVALUATION_BATCH))
    with rng.forked(objective.device, seed=0):
        for check in TRAINING_AND_TEST_DATA:
            check(run)
        metrics.check_metrics(run, chosen or ())


def check_run(
    algorithm: Algorithm, objective: Objective, train: Dataset, test: Dataset | None, plan: Plan,
    chosen: Sequence[Metric] | None,
) -> DryRun:  # fmt: skip
    """Refuse a simulated run whose parts do not go together; return the dry run of its training data."""
    run = check_training(objective, train, plan.largest_batch)
    inputs.check_augmentation(run, plan.protocol.augmentation)
    model.check_lone_samples(objective, train, plan)
    needs = algorithm.needs(1)
    loss.check_small_batches(objective, train, plan, needs.full_gradient or needs.control_variate)
    if test is None:
        metrics.check_metrics(run, chosen or ())
    else:
        check_evaluation(objective, test, chosen)
    state = algorithm.client_init(objective.start, objective.layers)
    if plan.clients.reallocation is not None and any(value is not None for value in state):
        log.warning("clients keep state between rounds, but 'reallocate' gives them other data in every round")
    return run
