"""Checks of the inputs: the model's forward takes them, its embeddings have their ids, and it can see padding."""

from __future__ import annotations

import contextlib
import difflib
import inspect
import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lamina.base.errors import BadInput, nearest
from lamina.base.registry import parameters_of
from lamina.base.text import listed
from lamina.data.dataset import Dataset
from lamina.data.feed import prepare
from lamina.objective.batch import Inputs, map_batch
from lamina.objective.objective import Objective
from lamina.training.masks import MASK_FORMS, forward_of
from lamina.training.preflight.dry_run import DryRun

log = logging.getLogger(__name__)

CHUNK_SAMPLES = 1000
EMBEDDINGS = nn.Embedding | nn.EmbeddingBag


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
    known, takes_any = parameters_of(forward_of(run.objective.module))
    for key in keys:
        # a misspelt name would be ignored by a forward that takes any
        others = [other for other in known if other not in keys]
        if key not in known and (not takes_any or difflib.get_close_matches(key, others)):
            raise BadInput(
                f"the {name} data have an input '{key}', which the model's forward does not take{nearest(key, known)} "
                f"(it takes {listed(list(known))})"
            )
    for key, parameter in known.items():
        if key not in keys and parameter.default is inspect.Parameter.empty:
            raise BadInput(f"the {name} data lack the input '{key}' of the model's forward (they have {listed(keys)})")


def check_token_ids(run: DryRun) -> None:
    """Refuse data with a token id, or a position, that an embedding has no row for.

    The embedding notices too late: on a GPU such an id kills the process, and among stacked clients it is another
    client's row.
    """
    objective, data, name = run.objective, run.data, run.name
    if not any(isinstance(layer, EMBEDDINGS) for layer in objective.module.modules()):
        return
    # The largest and smallest values of every position, as two samples: cheap, but they need not occur together.
    extremes = map_batch(lambda values: torch.stack([values.amax(0), values.amin(0)]), data.x)
    if all(ids.have_rows for ids in _token_ids(objective, [prepare(extremes, data.mean, data.std, objective.dtype)])):
        return
    starts = range(0, len(data), CHUNK_SAMPLES)
    for ids in _token_ids(objective, (data.inputs(slice(i, i + CHUNK_SAMPLES), objective.dtype) for i in starts)):
        if not ids.have_rows:
            layer, count = f"layer '{ids.name}' ({type(ids.layer).__name__})", ids.layer.num_embeddings
            rows = (
                f"its rows are 0 to {count - 1}: map the ids or enlarge num_embeddings; if they are positions, shorten "
                "the sequences or enlarge n_positions or max_position_embeddings"
            )
            raise BadInput(
                f"{layer} gets the id {ids.high if ids.low >= 0 else ids.low} from the {name} data, but {rows}",
                without_data=f"{layer} gets an id from the {name} data that it has no row for: {rows}",
            )


@dataclass
class _TokenIds:
    """The ids that an embedding is called with."""

    name: str
    layer: Any
    low: int = 0
    high: int = 0

    @property
    def have_rows(self) -> bool:
        return self.low >= 0 and self.high < int(self.layer.num_embeddings)

    def look(self, layer: Any, args: Any, kwargs: Any) -> Any:
        """Note the ids of a call; a hook of the layer."""
        ids = args[0] if args else kwargs["input"]
        if not ids.numel():
            return None
        self.low, self.high = min(self.low, int(ids.min())), max(self.high, int(ids.max()))
        ids = ids.clamp(0, layer.num_embeddings - 1)  # so that the other embeddings are reached
        return ((ids, *args[1:]), kwargs) if args else (args, kwargs | {"input": ids})


def _token_ids(objective: Objective, batches: Iterable[Inputs]) -> list[_TokenIds]:
    """Return the ids that every embedding is called with in passes over these batches."""
    layers = [_TokenIds(n, m) for n, m in objective.seeded.named_modules() if isinstance(m, EMBEDDINGS)]
    with contextlib.ExitStack() as hooks, torch.no_grad():
        for ids in layers:
            hooks.enter_context(ids.layer.register_forward_pre_hook(ids.look, with_kwargs=True))
        for inputs in batches:
            with contextlib.suppress(Exception):  # other problems are reported when the model runs
                objective.outputs(objective.start, objective.buffers, inputs, train=False)
    return layers
