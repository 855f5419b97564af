"""Which parts of a model stay with each client, and where they lie in the flat vector.

The *shared* parameters travel: the server's records, the broadcast and the upload hold these alone. *Private*
parameters are in no message. Local training works on the whole vector, which `join` makes of the two parts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor

from lamina.base.errors import BadInput, nearest
from lamina.base.text import listed
from lamina.objective.layers import ChannelsLast, Layers


class Private:
    """The parameters and buffers that match patterns such as "head.*"; the others are shared.

    >>> layers = Layers({"body.weight": (2,), "head.weight": (1,), "head.bias": (1,)})
    >>> private = Private(["head.*"], layers, [], torch.device("cpu"))
    >>> private.shared.names, private.layers.names
    (('body.weight',), ('head.weight', 'head.bias'))
    >>> private.join(torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0]))
    tensor([1., 2., 3., 4.])
    """

    def __init__(
        self,
        patterns: Sequence[str],
        layers: Layers,
        buffers: Sequence[str],
        device: torch.device,
        other_names: Mapping[str, str] | None = None,
        frozen: Iterable[str] = (),
    ) -> None:
        tied = {name: first for name, first in (other_names or {}).items() if first in (*layers.names, *buffers)}
        names = [*layers.names, *buffers, *tied]
        for pattern in patterns:
            is_matched = any(fnmatchcase(name, pattern) for name in names)
            if not is_matched and any(fnmatchcase(name, pattern) for name in frozen):
                raise BadInput(
                    f"private = {pattern!r} matches only frozen parameters, which are never sent and are the same "
                    "for every client: leave the pattern out, or let them train with requires_grad_(True)"
                )
            if not is_matched:
                raise BadInput(
                    f"private = {pattern!r} matches no trained parameter and no buffer of the model"
                    f"{nearest(pattern, names)}; patterns are like 'head.*' (names: {listed(names, most=10)})"
                )

        matching = {name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)}
        matching |= {tied[name] for name in matching if name in tied}  # a tensor with several names is one

        chosen = {name: shape for name, shape in layers.shapes.items() if name in matching}
        if len(chosen) == len(layers.names):
            raise BadInput("all parameters are private, so clients would share nothing: leave some out of `private`")
        self.whole = layers
        self.shared = Layers({name: shape for name, shape in layers.shapes.items() if name not in chosen})
        self.layers = Layers(chosen) if chosen else None  # None: only buffers are private
        self.buffers = tuple(name for name in buffers if name in matching)
        self.names = (*chosen, *self.buffers)
        # the places of both parts in the whole vector
        mask = layers.spread(torch.tensor([float(name in chosen) for name in layers.names])).bool()
        self._private_places, self._shared_places = (torch.nonzero(places)[:, 0].to(device) for places in (mask, ~mask))
        # from "shared, then private" to the vector
        self._order = torch.argsort(torch.cat([self._shared_places, self._private_places]))
        self._private_layers = [i for i, name in enumerate(layers.names) if name in chosen]
        self._shared_layers = [i for i, name in enumerate(layers.names) if name not in chosen]

    def join(self, shared: Tensor, private: Tensor, layout: ChannelsLast | None = None) -> Tensor:
        """Return the whole vectors [..., p], in the order of a layout if one is given."""
        both = torch.cat([shared.expand(*private.shape[:-1], -1), private], -1)  # one broadcast may serve many rows
        return both.index_select(-1, self._order if layout is None else self._order[layout.order])

    def split(self, whole: Tensor, layout: ChannelsLast | None = None) -> tuple[Tensor, Tensor]:
        """Return the shared and the private part of whole vectors; the layout is that of the vectors."""
        places = (self._shared_places, self._private_places)
        first, second = (whole.index_select(-1, at if layout is None else layout.inverse[at]) for at in places)
        return first, second

    def join_records(self, shared: Any, private: Any, layout: ChannelsLast | None = None) -> Any:
        """Return the record of whole vectors; one number per client is the shared record's."""
        return type(shared)(*(self._join_field(one, two, layout) for one, two in zip(shared, private, strict=True)))

    def split_record(self, whole: Any, layout: ChannelsLast | None = None) -> tuple[Any, Any]:
        """Return the records of the shared and of the private parts."""
        pairs = [(None, None) if value is None else self._split_field(value, layout) for value in whole]
        shared, private = zip(*pairs, strict=True)
        return type(whole)(*shared), type(whole)(*private)

    def shared_buffers(self, buffers: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the buffers that travel with the model."""
        return {name: value for name, value in buffers.items() if name not in self.buffers}

    def _join_field(self, shared: Tensor | None, private: Tensor | None, layout: ChannelsLast | None) -> Tensor | None:
        if shared is None or private is None:
            return None
        if shared.shape[-1] == self.shared.size:
            return self.join(shared, private, layout)
        if shared.shape[-1] == len(self._shared_layers) > 1:  # one number per layer
            both = torch.cat([shared, private], -1)
            return both[..., torch.argsort(torch.tensor([*self._shared_layers, *self._private_layers]))]
        return shared

    def _split_field(self, value: Tensor, layout: ChannelsLast | None) -> tuple[Tensor, Tensor]:
        if value.shape[-1] == self.whole.size:
            return self.split(value, layout)
        if value.shape[-1] == len(self.whole.names) > 1:
            return value[..., self._shared_layers], value[..., self._private_layers]
        return value, value
