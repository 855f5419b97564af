"""Stacked recurrent layers: the time steps written out, each one a batched matrix product over the clients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from lamina.engines.stacked.folding import CannotStack, unfold_clients
from lamina.engines.stacked.layers.per_client import StackedLayer


class _StackedRecurrent(StackedLayer):
    """The layers, directions and time steps of a recurrent layer. weight_ih_l0 [C, gates * hidden, in], and so on."""

    call_folded = nn.Module.__call__  # it knows the axis of its samples

    def step(self: Any, inputs: Tensor, hidden: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return the next state from what the weights make of the input and of the hidden state."""
        raise NotImplementedError

    def forward(self: Any, input: Any, hx: Any = None) -> Any:
        """[C * B, T, in] -> the outputs [C * B, T, out] and the last state, [layers, C * B, ...] each."""
        if not isinstance(input, Tensor) or input.dim() != 3:  # packing reads lengths, which the probe refuses before
            raise CannotStack("recurrent layers have a stacked form for padded sequences [n, length, features] only")
        clients = self.weight_ih_l0.shape[0]
        x = unfold_clients(input if self.batch_first else input.transpose(0, 1), clients)  # [C, B, T, in]
        directions = ["", "_reverse"] if self.bidirectional else [""]
        given = () if hx is None else hx if isinstance(hx, tuple) else (hx,)
        ends: list[tuple[Tensor, ...]] = []
        for layer in range(self.num_layers):
            outputs = []
            for suffix in directions:
                start = tuple(unfold_clients(one[len(ends)], clients) for one in given)
                output, end = self.scan(x, f"_l{layer}{suffix}", start)
                outputs.append(output)
                ends.append(end)
            x = torch.cat(outputs, -1)
        last = tuple(torch.stack([one.flatten(0, 1) for one in ones]) for ones in zip(*ends, strict=True))
        out = x.flatten(0, 1)
        return (out if self.batch_first else out.transpose(0, 1)), last if len(last) > 1 else last[0]

    def scan(self: Any, x: Tensor, suffix: str, start: tuple[Tensor, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Run one layer in one direction: [C, B, T, in] -> [C, B, T, out] and the last state."""
        batch, steps = x.shape[1:3]
        weight_in, weight = getattr(self, "weight_ih" + suffix), getattr(self, "weight_hh" + suffix)
        projection = getattr(self, "weight_hr" + suffix, None)
        bias_in, bias = (getattr(self, f"bias_{kind}{suffix}", None) for kind in ("ih", "hh"))
        projected = _times(x.flatten(1, 2), weight_in, bias_in)
        inputs = projected.reshape(-1, batch, steps, projected.shape[-1]).unbind(2)
        state = start or self.zeros(x, projection)
        outputs = []
        for one in reversed(inputs) if suffix.endswith("reverse") else inputs:
            state = self.step(one, _times(state[0], weight, bias), state)
            if projection is not None:
                state = (_times(state[0], projection, None), *state[1:])
            outputs.append(state[0])
        if suffix.endswith("reverse"):
            outputs.reverse()
        return torch.stack(outputs, 2), state

    def zeros(self: Any, x: Tensor, projection: Tensor | None) -> tuple[Tensor, ...]:
        """Return the state before the first time step."""
        return (x.new_zeros(*x.shape[:2], self.hidden_size),)


class StackedRNN(_StackedRecurrent, nn.RNN):
    """tanh or ReLU of the input and of the last output."""

    def step(self, inputs: Tensor, hidden: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """See the base class."""
        total = inputs + hidden
        return (F.relu(total) if self.nonlinearity == "relu" else torch.tanh(total),)


class StackedGRU(_StackedRecurrent, nn.GRU):
    """Gated recurrent units."""

    def step(self, inputs: Tensor, hidden: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """See the base class."""
        reset_in, update_in, new_in = inputs.chunk(3, -1)
        reset_hidden, update_hidden, new_hidden = hidden.chunk(3, -1)
        reset, update = torch.sigmoid(reset_in + reset_hidden), torch.sigmoid(update_in + update_hidden)
        new = torch.tanh(new_in + reset * new_hidden)
        return (new + update * (state[0] - new),)


class StackedLSTM(_StackedRecurrent, nn.LSTM):
    """Long short-term memory, with or without a projection; its state is an output and a memory."""

    def step(self, inputs: Tensor, hidden: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """See the base class."""
        return _lstm_step(inputs + hidden, state[1])

    def zeros(self, x: Tensor, projection: Tensor | None) -> tuple[Tensor, ...]:
        """See the base class."""
        size = self.hidden_size if projection is None else self.proj_size
        return x.new_zeros(*x.shape[:2], size), x.new_zeros(*x.shape[:2], self.hidden_size)


class VmapLSTMCell(nn.LSTMCell):
    """An LSTMCell with its arithmetic written out: `torch.func.vmap` has no rule for torch's own kernel."""

    def forward(self, input: Tensor, hx: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor]:
        """[B, in] and the state -> the next state, two tensors [B, hidden]."""
        zeros = input.new_zeros(*input.shape[:-1], self.hidden_size)
        hidden, memory = (zeros, zeros) if hx is None else hx
        gates = F.linear(input, self.weight_ih, self.bias_ih) + F.linear(hidden, self.weight_hh, self.bias_hh)
        return _lstm_step(gates, memory)


def _lstm_step(gates: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
    """Return the next output and memory of an LSTM."""
    enter, forget, cell, leave = gates.chunk(4, -1)
    memory = torch.sigmoid(forget) * memory + torch.sigmoid(enter) * torch.tanh(cell)
    return torch.sigmoid(leave) * torch.tanh(memory), memory


def _times(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [C, n, in], weight [C, out, in], bias [C, out] -> [C, n, out]."""
    if bias is None:
        return torch.bmm(x, weight.transpose(1, 2))
    return torch.baddbmm(bias.to(weight.dtype).unsqueeze(1), x, weight.transpose(1, 2))
