"""The objective: a module and a loss as a function of the flat parameter vector."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from lamina.base.errors import BadInput
from lamina.objective.batch import Inputs, Targets, arguments
from lamina.objective.dropout import set_streams, stream_layers, with_streams
from lamina.objective.fingerprint import alike, attributes_digest, same_tensors
from lamina.objective.functional_dropout import FunctionalDropout
from lamina.objective.layers import Layers
from lamina.objective.losses import Loss, PerBatch, as_loss, losses_of
from lamina.objective.outputs import map_outputs
from lamina.objective.private import Private

Buffers = dict[str, Tensor]

ONE_SAMPLE = (
    "BatchNorm cannot train on a batch of one sample: choose a batch_size that leaves no client "
    "with a single last sample, or use GroupNorm"
)
REENTRANT = (
    "activation checkpointing with use_reentrant=True does not work with torch.autograd.grad: "
    "call checkpoint(..., use_reentrant=False)"
)


class Objective:
    """A module's loss and gradient as functions of (flat parameters, buffers).

    The module itself is never changed; its trainable parameters are the start of the run, its other parameters
    stay as they are, its floating buffers (BatchNorm's statistics) are averaged over clients like the model. Parameters
    and buffers whose names match the patterns in `private` stay with the clients.
    """

    def __init__(self, module: nn.Module, loss: str | Loss = "cross_entropy", private: Sequence[str] = ()) -> None:
        _refuse_lazy_layers(module)
        self.module = module
        # the module that is trained: dropout draws its masks from the clients' random streams
        self.seeded, layers = with_streams(module)
        self.functional = FunctionalDropout(number=len(layers))
        self.dropouts = [*layers, self.functional]

        # the flat vector of trainable parameters, where training starts
        self.layers = Layers.of(module)
        trainable = {n: p.detach() for n, p in module.named_parameters() if p.requires_grad}
        dtypes = {p.dtype for p in trainable.values()}
        if len(dtypes) > 1 or not next(iter(dtypes)).is_floating_point:
            raise BadInput(f"all trainable parameters must have one floating dtype, not {sorted(map(str, dtypes))}")
        self.start = self.layers.flatten(trainable)
        self.dtype, self.device = self.start.dtype, self.start.device
        self.loss = _on_device(as_loss(loss), self.start)

        # 0 where a gradient is zero but for rounding, else 1; only parameters with such elements, None: not known yet
        self.kept_gradients: dict[str, Tensor] | None = None

        # everything else that decides what the module computes
        self.frozen = {n: p.detach() for n, p in module.named_parameters() if not p.requires_grad}
        self.buffers: Buffers = {n: b.detach().clone() for n, b in module.named_buffers()}
        self.private: Private | None = None
        if private:  # buffers of whole numbers stay as they are, for every client
            floating = [name for name, buffer in self.buffers.items() if buffer.is_floating_point()]
            self.private = Private(private, self.layers, floating, self.device, _other_names(module), self.frozen)
        self.attributes = attributes_digest(module)  # taken now, because a forward pass may change them
        # a layer the user froze with .eval() in a module that trains (BatchNorm, usually) stays as it is
        self.always_evaluated = {n for n, m in module.named_modules() if not m.training} if module.training else set()
        norms = (m for m in module.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm))
        # without running statistics, a sample's output depends on the samples it is evaluated with, as may a loss
        self.evaluates_by_batch = self.mixes_samples or any(norm.running_mean is None for norm in norms)
        self._other_names = _other_names(module)
        self._has_rnn = any(isinstance(m, nn.RNNBase) for m in module.modules())
        self.autocasts = False  # whether gradients are computed in bfloat16, as far as torch.autocast does that

    def difference(self, other: Objective) -> str:
        """Return how two objectives differ in more than their weights, or an empty string."""
        if self.layers.shapes != other.layers.shapes:
            return "their models have different shapes"
        if (self.dtype, self.device) != (other.dtype, other.device):
            return "their models have different types or are on different devices"
        if not alike(self.module, other.module, weights=False):
            return "their models differ in their layers or attributes"
        if self.always_evaluated != other.always_evaluated:
            return "their models differ in the layers that stay in evaluation mode"
        if not alike(self.loss, other.loss):
            return "they have different losses"
        if not same_tensors(self.frozen, other.frozen):
            return "their models have different frozen parameters"
        if (self.private and self.private.names) != (other.private and other.private.names):
            return "they have different private parts"
        return "" if same_tensors(self.buffers, other.buffers) else "their models have different buffers"

    @property
    def shared_layers(self) -> Layers:
        """The layout of the shared parameters, on which the server works: of all, unless some are private."""
        return self.layers if self.private is None else self.private.shared

    @property
    def shared_start(self) -> Tensor:
        """The shared parameters where training starts."""
        return self.shared_part(self.start)

    def shared_part(self, vector: Tensor) -> Tensor:
        """Return the shared part of a vector [..., p]."""
        return vector if self.private is None else self.private.split(vector)[0]

    def shared_buffers(self, buffers: Buffers) -> Buffers:
        """Return the buffers that travel with the model."""
        return buffers if self.private is None else self.private.shared_buffers(buffers)

    @property
    def private_start(self) -> Tensor | None:
        """The private parameters where training starts; None if there are none."""
        return None if self.private is None or self.private.layers is None else self.private.split(self.start)[1]

    def whole(self, x: Tensor, private_values: Tensor | None = None) -> Tensor:
        """Return all parameters from the shared ones and the private ones, which are by default where they start."""
        values = self.private_start if private_values is None else private_values
        return x if self.private is None or values is None else self.private.join(x, values)

    def frozen_note(self) -> str:
        """Return how many of the parameters are trained and sent, or an empty string if all are."""
        notes, trained = [], self.layers.size
        if self.frozen:
            total = trained + sum(parameter.numel() for parameter in self.frozen.values())
            notes.append(f"trains {trained:,} of {total:,} parameters; the others are frozen and not sent")
        if self.private is not None:
            size, count = trained - self.shared_layers.size, len(self.private.names)
            notes.append(f"keeps {size:,} trained parameters with each client ({count} private tensors)")
        return "; ".join(notes)

    @property
    def mixes_samples(self) -> bool:
        """Whether the loss is one of a whole batch, which must hold the samples of a single client."""
        return isinstance(self.loss, PerBatch)

    def in_type(self, dtype: torch.dtype) -> Objective:
        """Return the same objective in another floating type."""
        if dtype == self.dtype:
            return self
        self.set_mode(self.module, True)  # so that the copy knows which layers the user froze with .eval()
        return Objective(copy_module(self.module).to(dtype), self.loss)  # private parts play no role in a gradient

    def outputs(
        self,
        x: Tensor,
        buffers: Mapping[str, Tensor],
        inputs: Inputs,
        *,
        train: bool,
        streams: Tensor | None = None,
    ) -> Any:
        """Return what the module returns at parameters x; in training, it updates `buffers` in place, as modules do.

        `streams` is the random stream [1] that dropout draws its masks from; stream 0 unless given.
        """
        return self.outputs_at(self.layers.unflatten(x), buffers, inputs, train=train, streams=streams)

    def outputs_at(
        self,
        parameters: Mapping[str, Tensor],
        buffers: Mapping[str, Tensor],
        inputs: Inputs,
        *,
        train: bool,
        streams: Tensor | None = None,
        module: nn.Module | None = None,
        on_outputs: Callable[[Any], Any] | None = None,
        autocast: bool = False,
    ) -> Any:
        """Return what `outputs` returns, with the parameters given by name.

        `module` is a copy of `seeded` to run instead of it. `on_outputs` is a function of the outputs, whose result is
        returned instead of them. It runs while the module still holds the parameters: a backward pass may run parts of
        the module again (activation checkpointing). `autocast` computes in bfloat16 where torch.autocast does.
        """
        dropouts = self.dropouts if module is None else [*stream_layers(module), self.functional]
        module = self.seeded if module is None else module
        self.set_mode(module, train)
        state = self.under_all_names({**parameters, **self.frozen, **buffers})
        args, kwargs = arguments(inputs)

        def run(*args: Tensor, **kwargs: Tensor) -> Any:
            # without its cache, which a captured step cannot use
            rounding = torch.autocast(self.device.type, torch.bfloat16, enabled=autocast, cache_enabled=False)
            with rounding, self.functional.in_training(train):
                outputs = module(*args, **kwargs)
            outputs = self.in_own_type(outputs) if autocast else outputs
            set_streams(dropouts, None)  # dropout that a backward pass runs again would draw other masks
            return outputs if on_outputs is None else on_outputs(outputs)

        try:
            set_streams(dropouts, self.streams_or_zeros(streams, 1))
            lent = {f"module.{name}": tensor for name, tensor in state.items()}  # as `_Pass` names them
            return functional_call(_Pass(module, run), lent, args, kwargs, tie_weights=False)
        except ValueError as error:
            if "more than 1 value per channel" in str(error):
                raise BadInput(ONE_SAMPLE) from error
            raise
        finally:
            set_streams(dropouts, None)

    def losses(self, outputs: Any, targets: Targets) -> Tensor:
        """Return the loss of every sample [n], from what the module returns."""
        return losses_of(self.loss, outputs, targets)

    def in_own_type(self, outputs: Any) -> Any:
        """Return what the module returns with floating-point numbers in the type of the parameters."""
        return map_outputs(lambda values: values.to(self.dtype) if values.is_floating_point() else values, outputs)

    @property
    def tied(self) -> set[str]:
        """The names of the parameters and buffers that the module holds in several places."""
        return set(self._other_names.values())

    @property
    def draws_masks(self) -> bool:
        """Whether the module's dropout draws from streams; a module that has not run yet may."""
        return len(self.dropouts) > 1 or self.functional.is_called is not False

    def streams_or_zeros(self, streams: Tensor | None, clients: int) -> Tensor | None:
        """Return the streams, or stream 0 for every client if none are given; None if nothing draws from them."""
        if streams is None and self.draws_masks:
            return torch.zeros(clients, dtype=torch.int64, device=self.device)
        return streams

    def under_all_names(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Add every tied parameter and shared buffer of a state under its other names."""
        return state | {other: state[name] for other, name in self._other_names.items()}

    def set_mode(self, module: nn.Module, train: bool) -> None:
        """Put the module, or its stacked copy, into training or evaluation mode."""
        if module.training != train:
            module.train(train)
            for name in self.always_evaluated:
                module.get_submodule(name).eval()

    def gradient(
        self,
        x: Tensor,
        buffers: Mapping[str, Tensor],
        inputs: Inputs,
        targets: Targets,
        *,
        train: bool = True,
        streams: Tensor | None = None,
        weights: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the gradient of the mean loss over the batch, or of the sum with `weights` [n], and that loss."""
        leaf = x.detach().requires_grad_()
        (gradient,), loss = self._differentiate(
            self.layers.unflatten(leaf), [leaf], buffers, inputs, targets, train, streams, weights
        )
        return self.without_rounding(gradient) if train else gradient, loss

    def gradient_at(
        self,
        parameters: Mapping[str, Tensor],
        buffers: Mapping[str, Tensor],
        inputs: Inputs,
        targets: Targets,
        *,
        train: bool = True,
        streams: Tensor | None = None,
        weights: Tensor | None = None,
    ) -> tuple[dict[str, Tensor], Tensor]:
        """Return what `gradient` returns, with the parameters and their gradients by name."""
        leaves = {name: parameter.detach().requires_grad_() for name, parameter in parameters.items()}
        gradients, loss = self._differentiate(
            leaves, list(leaves.values()), buffers, inputs, targets, train, streams, weights
        )
        by_name = dict(zip(leaves, gradients, strict=True))
        kept = self.kept_gradients if train else None
        return by_name | {name: by_name[name] * factor for name, factor in (kept or {}).items()}, loss

    def _differentiate(
        self, parameters: Mapping[str, Tensor], leaves: Sequence[Tensor], buffers: Mapping[str, Tensor], inputs: Inputs,
        targets: Targets, train: bool, streams: Tensor | None, weights: Tensor | None,
    ) -> tuple[Sequence[Tensor], Tensor]:  # fmt: skip
        """Return the gradients with respect to the leaves that the parameters are made of, and the loss."""

        def differentiate(outputs: Any) -> tuple[Sequence[Tensor], Tensor]:
            losses = self.losses(outputs, targets)
            loss = losses.mean() if weights is None else losses @ weights
            if not loss.requires_grad:
                raise BadInput("there is no gradient: the loss does not depend on any trainable parameter")
            try:
                gradients = torch.autograd.grad(loss, leaves, materialize_grads=True)
            except RuntimeError as error:
                if "use_reentrant" in str(error):
                    raise BadInput(REENTRANT) from error
                raise
            return gradients, loss.detach()

        # cuDNN's RNNs have no backward pass in evaluation mode
        by_cudnn = torch.backends.cudnn.enabled and (train or not self._has_rnn)
        with torch.backends.cudnn.flags(enabled=by_cudnn) if self._has_rnn else contextlib.nullcontext():
            result: tuple[Sequence[Tensor], Tensor] = self.outputs_at(
                parameters, buffers, inputs, train=train, streams=streams, on_outputs=differentiate,
                autocast=self.autocasts,
            )  # fmt: skip
        return result

    def without_rounding(self, gradient: Tensor) -> Tensor:
        """Set the elements of a training gradient to zero, in place, that are zero but for rounding; a NaN stays."""
        if self.kept_gradients:
            pieces = self.layers.unflatten(gradient)
            for name, kept in self.kept_gradients.items():
                pieces[name].mul_(kept)
        return gradient

    def refuse_rate(self, lr: float) -> None:
        """Refuse a learning rate that the parameters' dtype cannot hold."""
        if lr > torch.finfo(self.dtype).max:
            raise BadInput(f"lr = {lr:g} is more than a {str(self.dtype).removeprefix('torch.')} can hold")

    def module_at(self, x: Tensor, buffers: Mapping[str, Tensor]) -> nn.Module:
        """Write parameters and buffers into the module and return it."""
        with torch.no_grad():
            for name, value in self.layers.unflatten(x).items():
                self.module.get_parameter(name).copy_(value)
            for name, value in buffers.items():
                self.module.get_buffer(name).copy_(value)
        return self.module


def copy_module(module: nn.Module) -> nn.Module:
    """Return a deep copy of a module that may have run.

    A forward pass may leave its own tensors in attributes, as the old `nn.utils.spectral_norm` leaves a weight. torch
    does not copy tensors of a graph, so the copy gets their values.
    """
    values = [value for layer in module.modules() for value in vars(layer).values()]
    visited: dict[int, Any] = {}
    while values:
        value = values.pop()
        if id(value) not in visited:  # containers may hold themselves
            visited[id(value)] = value
            values += value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    left = {key: v for key, v in visited.items() if isinstance(v, Tensor) and not v.is_leaf}
    return copy.deepcopy(module, {key: tensor.detach().clone() for key, tensor in left.items()})


class _Pass(nn.Module):
    """A function that calls a module, as a module: `functional_call` lends tensors to one while its forward runs."""

    def __init__(self, module: nn.Module, function: Callable[..., Any]) -> None:
        super().__init__()
        self.module, self.function = module, function

    def forward(self, *args: Tensor, **kwargs: Tensor) -> Any:
        return self.function(*args, **kwargs)


def _on_device(loss: Loss, like: Tensor) -> Loss:
    """Return the loss; a module with tensors (class weights) as a copy on the model's device, in its type."""
    if isinstance(loss, nn.Module) and next(iter([*loss.parameters(), *loss.buffers()]), None) is not None:
        return copy.deepcopy(loss).to(like)
    return loss


def _refuse_lazy_layers(module: nn.Module) -> None:
    """Refuse parameters that have no shape yet."""
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if nn.parameter.is_lazy(tensor):
            raise BadInput(
                f"the model's parameter '{name}' has no shape yet (a lazy layer): call the model on a sample first, "
                "model(x[:1])"
            )


def _other_names(module: nn.Module) -> dict[str, str]:
    """Return the first name of every parameter and buffer that is held in several places, by its other names.

    A module held in several places counts once. `functional_call` would tie the parameters of such a module too, and
    then put a plain tensor in their place: it restores what it replaced, but in the wrong order.
    """
    first_names: dict[int, str] = {}
    other_names = {}
    for owner, one in module.named_modules():
        for key, tensor in [*one._parameters.items(), *one._buffers.items()]:
            if tensor is not None:
                name = f"{owner}.{key}" if owner else key
                first = first_names.setdefault(id(tensor), name)
                if first != name:
                    other_names[name] = first
    return other_names


def buffer_bytes(buffers: Mapping[str, Tensor]) -> int:
    """Return the bytes of the floating buffers, which are sent with the model."""
    return sum(b.numel() * b.element_size() for b in buffers.values() if b.is_floating_point())
