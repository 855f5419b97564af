"""Checks of the inputs: the model's forward takes them, its embeddings have their ids, and it can see padding."""

from __future__ import annotations

import contextlib
import difflib
import inspect
import logging
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.overrides import TorchFunctionMode

from lamina.base import rng
from lamina.base.errors import BadInput, nearest
from lamina.base.registry import parameters_of
from lamina.base.text import listed
from lamina.data.dataset import Dataset
from lamina.data.feed import Augment, OwnAugmentation, as_augmentation, draw, prepare
from lamina.data.mapped import Mapped
from lamina.objective.batch import Inputs, map_batch, tensors
from lamina.objective.fingerprint import same_tensors
from lamina.objective.objective import Objective
from lamina.rounds.settings import is_own_augmentation
from lamina.training.masks import MASK_FORMS, forward_of
from lamina.training.preflight.dry_run import DryRun

log = logging.getLogger(__name__)

CHUNK_SAMPLES = 1000


def warn_of_padding(data: Dataset) -> None:
    """Warn of sequences whose padding the model cannot tell from their values; `data` have passed `with_mask`."""
    has_mask = isinstance(data.x, dict) and any(name.endswith(tuple(MASK_FORMS)) for name in data.x)
    if data.mask is not None and not has_mask:
        log.warning(
            "the sequences have different lengths and are padded with 0, which the model takes for values: let its "
            "forward take 'attention_mask', 'mask' or 'lengths'"
        )


def check_names(run: DryRun) -> None:
    """Refuse inputs by name that the model's forward does not take, or lacks."""
    if not isinstance(run.data.x, dict):
        return
    name, keys = run.name, list(run.data.x)
    parameters, takes_any = parameters_of(forward_of(run.objective.module))
    for key in keys:
        # a misspelt name would be ignored by a forward that takes any
        others = [other for other in parameters if other not in keys]
        if key not in parameters and (not takes_any or difflib.get_close_matches(key, others)):
            raise BadInput(
                f"the {name} data have an input '{key}', which the model's forward does not take"
                f"{nearest(key, parameters)} (it takes {listed(list(parameters))})"
            )
    for key, parameter in parameters.items():
        if key not in keys and parameter.default is inspect.Parameter.empty:
            raise BadInput(f"the {name} data lack the input '{key}' of the model's forward (they have {listed(keys)})")


def check_token_ids(run: DryRun) -> None:
    """Refuse data with a token id, or a position, that an embedding has no row for.

    The embedding notices too late: on a GPU such an id kills the process, and among stacked clients it is another
    client's row.
    """
    objective, data, name = run.objective, run.data, run.name
    has_tables = any(isinstance(layer, nn.Embedding | nn.EmbeddingBag) for layer in objective.module.modules())
    if not has_tables and all(values.is_floating_point() for values in tensors(data.x)):
        return
    # The largest and smallest values of every position, as two samples: cheap, but they need not occur together.
    extremes = map_batch(_extremes, data.x)
    if _id_without_row(objective, [prepare(extremes, data.mean, data.std, objective.dtype)]) is None:
        return
    starts = range(0, len(data), CHUNK_SAMPLES)
    missing_row = _id_without_row(
        objective, (data.inputs(slice(i, i + CHUNK_SAMPLES), objective.dtype) for i in starts)
    )
    if missing_row is None:
        return
    table, number = missing_row
    owner = objective.module.get_submodule(table.rpartition(".")[0])
    is_layer = isinstance(owner, nn.Embedding | nn.EmbeddingBag)
    where = f"layer '{table.rpartition('.')[0]}' ({type(owner).__name__})" if is_layer else f"the table '{table}'"
    count = len(objective.module.get_parameter(table))
    rows = (
        f"its rows are 0 to {count - 1}: map the ids or enlarge num_embeddings; if "
        "they are positions, shorten the sequences or enlarge n_positions or max_position_embeddings"
    )
    raise BadInput(
        f"{where} gets the id {number} from the {name} data, but {rows}",
        without_data=f"{where} gets an id from the {name} data that it has no row for: {rows}",
    )


def check_augmentation(run: DryRun, augmentation: Augment | OwnAugmentation | str | None) -> None:
    """Refuse a function of the user's that does not return a batch, or draws other random numbers than its own."""
    if not is_own_augmentation(augmentation):
        return
    function = as_augmentation(augmentation)
    copies = [map_batch(Tensor.clone, run.inputs) for _ in range(2)]
    results = []
    for seed, batch in enumerate(copies):  # process-wide generators in two states
        with rng.forked(run.objective.device, seed=seed):
            results.append(draw(function, batch, key=1))  # type: ignore[arg-type]
    if not same_tensors(*map(_without_nan, results)):
        raise BadInput(
            "the augmentation gives another result when it is called again with the same generator: let it draw all "
            "random numbers from it, as in torch.rand(n, generator=generator)"
        )


def _without_nan(batch: Inputs) -> Inputs:
    result: Inputs = map_batch(lambda values: values.nan_to_num() if values.is_floating_point() else values, batch)
    return result


def _extremes(values: Tensor | Mapped) -> Tensor:
    """Return the largest and the smallest value of every position [2, ...]."""
    if isinstance(values, Mapped):
        values = torch.cat([_extremes(chunk) for chunk in values.chunks()])
    return torch.stack([values.amax(0), values.amin(0)])


class _TableReads(TorchFunctionMode):
    """Notes the ids that the rows of every table are read by, and lets ids without a row read another one.

    It watches the reads themselves: a table of positions may take the tokens only to count them.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.lowest: dict[str, int] = {}  # by the name of the table
        self.highest: dict[str, int] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (F.embedding, F.embedding_bag):
            bound = inspect.signature(func).bind(*args, **kwargs or {})
            ids, table = bound.arguments["input"], bound.arguments["weight"]
            name = next((name for name, own in self.module.named_parameters() if own is table), "")
            if name and ids.numel():
                self.lowest[name] = min(self.lowest.get(name, 0), int(ids.min()))
                self.highest[name] = max(self.highest.get(name, 0), int(ids.max()))
                bound.arguments["input"] = ids.clamp(0, len(table) - 1)  # so that the other tables are reached
            args, kwargs = bound.args, bound.kwargs
        return func(*args, **kwargs or {})

    def without_row(self) -> tuple[str, int] | None:
        """Return the first table that is read by an id that it has no row for, and the id."""
        for name, high in self.highest.items():
            low, rows = self.lowest[name], len(self.module.get_parameter(name))
            if low < 0 or high >= rows:
                return name, high if low >= 0 else low
        return None


def _id_without_row(objective: Objective, batches: Iterable[Inputs]) -> tuple[str, int] | None:
    """Return the name of a table that passes over these batches read by an id that it has no row for, and the id."""
    reads = _TableReads(objective.seeded)
    for inputs in batches:
        with contextlib.suppress(Exception), torch.no_grad(), reads:  # other problems are reported when the model runs
            objective.outputs(objective.start, objective.buffers, inputs, train=False)
    return reads.without_row()
