"""Stacked embedding tables."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from lamina.engines.stacked.folding import CannotStack, unfold_clients
from lamina.engines.stacked.layers.per_client import StackedLayer


class StackedEmbedding(StackedLayer, nn.Embedding):
    """A table per client. weight [C, number, features]."""

    def forward(self, input: Tensor) -> Tensor:
        """Token ids [C * B, ...] -> [C * B, ..., features]."""
        clients, number, features = self.weight.shape
        rows = F.embedding(_own_rows(input, clients, number), self.weight.reshape(clients * number, features))
        return _without_padding_gradient(rows, input, self.padding_idx)


class PlainEmbedding(nn.Embedding):
    """An Embedding of one client that computes what `StackedEmbedding` does."""

    def forward(self, input: Tensor) -> Tensor:
        """Token ids [B, ...] -> [B, ..., features]."""
        return _without_padding_gradient(F.embedding(input, self.weight), input, self.padding_idx)


class StackedEmbeddingBag(StackedLayer, nn.EmbeddingBag):
    """Sums, means or largest values of a table per client. weight [C, number, features]."""

    def forward(self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None) -> Tensor:
        """Bags of token ids [C * B, length] -> [C * B, features]."""
        if offsets is not None or input.dim() != 2:
            raise CannotStack("EmbeddingBag with offsets has no stacked form: give it bags of one length [n, length]")
        clients, number, features = self.weight.shape
        ids = _own_rows(input, clients, number)
        if self.padding_idx is not None:  # one row stands for the padding of all clients: no result depends on it
            ids = torch.where(input == self.padding_idx, self.padding_idx, ids)
        table = self.weight.reshape(clients * number, features)
        weights = None if per_sample_weights is None else per_sample_weights.to(table.dtype)
        return F.embedding_bag(ids, table, mode=self.mode, per_sample_weights=weights, padding_idx=self.padding_idx)


def _own_rows(ids: Tensor, clients: int, number: int) -> Tensor:
    """Return where the rows of every client's ids [C * B, ...] are if all tables lie one after the other."""
    by_client = unfold_clients(ids, clients)
    first = torch.arange(clients, device=ids.device).reshape(clients, *[1] * (by_client.dim() - 1)) * number
    return (by_client + first).flatten(0, 1)


def _without_padding_gradient(rows: Tensor, ids: Tensor, padding_idx: int | None) -> Tensor:
    """Stop the gradient at the rows of the padding token."""
    return rows if padding_idx is None else torch.where((ids == padding_idx).unsqueeze(-1), rows.detach(), rows)
