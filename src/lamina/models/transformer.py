"""A small transformer for text: it predicts every next token, with learned positions and causal attention."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from lamina.base.errors import BadInput
from lamina.models.registry import checked_shape, model, whole


class Block(nn.Module):
    """One layer: causal attention, then a perceptron, each on normalised inputs and added to them."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return the new representation of every position [batch, length, width]."""
        batch, length, width = x.shape
        shape = (batch, length, self.heads, width // self.heads)
        q, k, v = (part.view(shape).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, dim=-1))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        x = x + self.down(F.gelu(self.up(self.norm2(x))))
        return x


class Transformer(nn.Module):
    """Token and position embeddings, blocks, a norm, and logits at every position."""

    def __init__(self, length: int, classes: int, width: int, depth: int, heads: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(classes, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of the next token after each position [batch, length, classes]."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        logits: Tensor = self.head(self.norm(self.blocks(self.tokens(tokens) + self.positions(places))))
        return logits


@model(paper="our study of the layers (Shakespeare)")
def transformer(
    input_shape: tuple[int, ...], classes: int, *, width: int = 64, depth: int = 2, heads: int = 4
) -> nn.Module:
    """Transformer for text: pre-norm blocks with causal attention, logits at every position."""
    shape = checked_shape("transformer", input_shape, classes)
    if len(shape) != 1:
        raise BadInput(f"transformer needs texts [tokens], not {list(shape)}: use it with data such as shakespeare")
    if whole("width", width) % whole("heads", heads):
        raise BadInput(f"width = {width} is not a multiple of heads = {heads}")
    return Transformer(shape[0], classes, width, whole("depth", depth), heads)
