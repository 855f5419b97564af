"""Check that every token id of a data set has a row in the embeddings of a model."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from lamina.batch import map_batch
from lamina.data.dataset import Dataset
from lamina.data.feed import prepare
from lamina.errors import BadInput
from lamina.objective import Objective

CHUNK = 1000  # samples at a time


def check_vocabulary(objective: Objective, data: Dataset, name: str) -> None:
    """Refuse data with a token id that an embedding has no row for; `name` says which data they are.

    The embedding notices too late: on a GPU such an id kills the process, and among stacked clients it is another
    client's row.
    """
    if not any(isinstance(m, nn.Embedding | nn.EmbeddingBag) for m in objective.module.modules()):
        return
    # The largest and smallest values of every position, as two samples: cheap, but they need not occur together.
    extremes = map_batch(lambda values: torch.stack([values.amax(0), values.amin(0)]), data.x)
    if not any(_is_outside(*ids) for ids in _token_ids(objective, data, [extremes]).values()):
        return
    starts = range(0, len(data), CHUNK)
    chunks = (map_batch(lambda v, i=i: v[i : i + CHUNK], data.x) for i in starts)  # type: ignore[misc]
    for layer_name, (layer, low, high, are_positions) in _token_ids(objective, data, chunks).items():
        if _is_outside(layer, low, high, are_positions):
            where = f"layer '{layer_name}' ({type(layer).__name__})"
            if are_positions:
                rows = (
                    f"{where} has {layer.num_embeddings}: shorten the sequences or enlarge the layer (in transformers' "
                    "configurations: n_positions or max_position_embeddings)"
                )
                raise BadInput(
                    f"the sequences of the {name} data are too long: they need {high + 1} positions, but {rows}",
                    without_data=f"the sequences of the {name} data need more positions than the model has: {rows}",
                )
            rows = (
                f"{where} has a vocabulary of {layer.num_embeddings} ids, 0 to {layer.num_embeddings - 1}: enlarge "
                "num_embeddings or map the ids"
            )
            raise BadInput(
                f"the {name} data hold the token id {high if low >= 0 else low}, but {rows}",
                without_data=f"the {name} data hold a token id that has no row in the model: {rows}",
            )


def _is_outside(layer: Any, low: int, high: int, _: bool) -> bool:
    return low < 0 or high >= layer.num_embeddings


def _token_ids(objective: Objective, data: Dataset, chunks: Any) -> dict[str, tuple[Any, int, int, bool]]:
    """Return every embedding by its name: the layer, its smallest and largest id, and whether the ids are positions.

    Ids are positions if they count up in every sequence.
    """
    seen: dict[str, tuple[Any, int, int, bool]] = {}

    def watch(name: str) -> Callable[..., Any]:
        def hook(layer: Any, args: Any, kwargs: Any) -> Any:
            ids = args[0] if args else kwargs["input"]
            if not ids.numel():
                return None
            _, low, high, are_positions = seen.get(name, (layer, 0, 0, True))
            are_positions = are_positions and ids.dim() > 0 and ids.shape[-1] > 1 and bool((ids.diff() == 1).all())
            seen[name] = layer, min(low, int(ids.min())), max(high, int(ids.max())), are_positions
            ids = ids.clamp(0, layer.num_embeddings - 1)  # so that the other embeddings are reached too
            return ((ids, *args[1:]), kwargs) if args else (args, kwargs | {"input": ids})

        return hook

    layers = [(n, m) for n, m in objective.seeded.named_modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)]
    with contextlib.ExitStack() as handles, torch.no_grad():
        for name, layer in layers:
            handles.enter_context(layer.register_forward_pre_hook(watch(name), with_kwargs=True))
        for x in chunks:
            inputs = prepare(x, data.mean, data.std, objective.dtype)
            with contextlib.suppress(Exception):  # other problems are reported when the model runs
                objective.outputs(objective.start, objective.buffers, inputs, train=False)
    return seen
