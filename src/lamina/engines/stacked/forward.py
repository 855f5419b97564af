"""Compute the losses of clients: of many in one pass with stacked layers, or of one with the module itself."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_map

from lamina.base import rng
from lamina.engines.devices import Precision, arithmetic
from lamina.engines.stacked.folding import CannotStack, unfold_clients
from lamina.engines.stacked.layers.attention_masks import unread_masks
from lamina.engines.stacked.layers.convolution import kernels_for
from lamina.engines.stacked.layers.fusion import fuse
from lamina.engines.stacked.layers.modules import (
    frozen_per_client,
    is_batch_norm,
    stack,
    to_be_watched,
    use_kernels,
    used_directly,
)
from lamina.engines.stacked.layers.per_client import PerClient, Samples, StackedLayer
from lamina.engines.stacked.probe import FULL, PADDED, PROBE_CLIENTS, ProbeCase, odd_samples, reads_values, value_read
from lamina.objective.batch import Inputs, Targets, arguments, map_batch, take, tensors
from lamina.objective.dropout import dropping_half, set_streams, stream_layers
from lamina.objective.layers import ChannelsLast
from lamina.objective.losses import takes_tensors
from lamina.objective.objective import Buffers, Objective
from lamina.objective.outputs import outputs_of, tensors_in

Parameters = Mapping[str, Tensor]  # by name, each [C, ...]


class StackedForward:
    """The forward pass of C clients with their own parameters, each on its own batch of B samples, as one batch."""

    name = "stacked"

    def __init__(self, objective: Objective) -> None:
        self.objective = objective
        self.samples = Samples()
        self.module = stack(objective.seeded)
        for layer in self.module.modules():
            if isinstance(layer, StackedLayer):
                layer.samples = self.samples
        self.used_directly = used_directly(self.module)
        if objective.device.type == "cuda":
            self.module = fuse(self.module)
        self.dropouts = [*stream_layers(self.module), objective.functional]
        self.frozen_per_client = frozen_per_client(self.module)
        self._frozen: dict[Precision, Parameters] = {}
        self.precision: Precision = "fp32"
        self.layout: ChannelsLast | None = None
        self.batch_norms = [layer for layer in self.module.modules() if is_batch_norm(layer)]
        statistics = {f"{n}.{b}" for n, m in self.module.named_modules() if is_batch_norm(m) for b in m._buffers}
        self.per_client_buffers = statistics & set(objective.buffers)

    def compute_in(self, precision: Precision) -> None:
        """Set the precision of the pass, once."""
        self.precision = precision
        if precision != "bf16":
            return
        # A CPU that has no bf16 products is not an error, but torch warns with its C++ stack.
        warnings.filterwarnings("ignore", message=r"mkldnn_\w+ failed, switching to BLAS gemm")
        for layer in self.module.modules():  # a float32 buffer makes activations float32
            if isinstance(layer, (*ROUNDED_BY_AUTOCAST, nn.modules.conv._ConvTransposeNd, nn.RNNBase)):
                layer.register_forward_pre_hook(_rounded_inputs, with_kwargs=True)

    def suit_a_gpu(self) -> None:
        """Use the channels-last order of vectors, and our own kernels where they apply."""
        self.layout = self.objective.layers.channels_last(self.objective.device)
        kernels = kernels_for(self.objective.device, self.objective.dtype)
        if kernels is not None:
            use_kernels(self.module, kernels, "tf32x3" if self.precision == "fp32" else "tf32")

    def announce(self, lone_sample: bool) -> None:
        """Set whether some client's next batch holds a single sample, which BatchNorm refuses."""
        for layer in self.batch_norms:
            layer.lone_sample = lone_sample  # type: ignore[assignment]

    def rounds(self, name: str, parameter: Tensor) -> bool:
        """Return whether the pass uses a parameter [C, ...] in bfloat16, as it does matrices and kernels in bf16.

        The rows keep all parameters in float32. Those that the module uses directly are rounded when they meet samples.
        """
        is_matrix = parameter.dim() > 2 and parameter.is_floating_point()
        return self.precision == "bf16" and is_matrix and name not in self.used_directly

    def losses(
        self, parameters: Parameters, buffers: Buffers, inputs: Inputs, targets: Targets, mask: Tensor | None,
        *, train: bool, streams: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Return the losses of all samples [C, B].

        `buffers` ([C, ...] each) are updated in place in training mode. `streams` [C] are the random streams of the
        dropout masks; the default is stream 0.
        """
        clients, batch = tensors(targets)[0].shape[:2]
        args, kwargs = arguments(map_batch(self._folded, inputs))
        self.objective.set_mode(self.module, train)
        for layer in self.batch_norms:
            layer.sample_mask = mask  # type: ignore[assignment]
        shared = {n: b if n in self.per_client_buffers else b[0] for n, b in buffers.items()}
        state = self.objective.under_all_names({**parameters, **self.frozen(), **shared})
        state |= {n: state[n].expand(clients, *state[n].shape) for n in self.frozen_per_client}
        state |= {n: PerClient.of(state[n], self.samples) for n in self.used_directly}
        set_streams(self.dropouts, self.objective.streams_or_zeros(streams, clients))
        dtype = torch.bfloat16 if self.precision == "bf16" else self.objective.dtype
        of_pass = self.samples.of_pass(clients, batch, dtype, train)
        with of_pass, unread_masks(), self.objective.functional.in_training(train):
            outputs = functional_call(self.module, state, args, kwargs, tie_weights=False)
        outputs = outputs_of(outputs) if takes_tensors(self.objective.loss) else outputs
        if any(isinstance(values, PerClient) for values in tensors_in(outputs)):
            raise CannotStack("the module's outputs do not have the samples on one axis")
        together = map_batch(lambda values: values.flatten(0, 1), targets)
        return self.objective.losses(self.objective.in_own_type(outputs), together).reshape(clients, batch)

    def frozen(self) -> Parameters:
        """Return the frozen parameters in the type that the pass uses; rounded once, not in every step."""
        if self.precision not in self._frozen:
            rounded = {
                n: p.is_floating_point() and (p.dim() > 1 or n not in self.frozen_per_client)
                for n, p in self.objective.frozen.items()
                if self.precision == "bf16"
            }
            self._frozen[self.precision] = {
                n: p.bfloat16() if rounded.get(n) else p for n, p in self.objective.frozen.items()
            }
        return self._frozen[self.precision]

    def _folded(self, values: Tensor) -> Tensor:
        """Return inputs [C, B, ...] as one batch [C * B, ...] in the precision of the pass."""
        values = values.flatten(0, 1)
        return values.bfloat16() if self.precision == "bf16" and values.is_floating_point() else values


class CapturedForward:
    """The forward pass of the module itself, for one client at a time (C = 1); see apart.py."""

    name = "captured"
    layout: ChannelsLast | None = None

    def __init__(self, objective: Objective, precision: Precision) -> None:
        self.objective, self.precision = objective, precision
        is_rounded = precision == "bf16" and objective.dtype == torch.float32
        layers = objective.module.named_modules() if is_rounded else ()
        of_layers = ((layer, name) for name, layer in layers if type(layer) in ROUNDED_BY_AUTOCAST)
        self._rounded = {f"{name}.{own}" if name else own for layer, name in of_layers for own in layer._parameters}
        self._rounded -= objective.tied  # other layers may use them in another way

    def rounds(self, name: str, parameter: Tensor) -> bool:
        """Return whether autocast rounds this parameter whenever it is used, so that it can be done once a step."""
        return name in self._rounded

    def gradients(
        self, parameters: Parameters, buffers: Buffers, inputs: Inputs, targets: Targets,
        *, train: bool, streams: Tensor | None = None,
    ) -> tuple[dict[str, Tensor], Tensor]:  # fmt: skip
        """Return the gradient of the mean loss by name [1, ...], or of the sum unless `train`, and that loss [1].

        The backward pass runs while the module holds the parameters: it may run parts of the module again.
        """
        (own, own_buffers), own_inputs = _only_client(parameters, buffers), map_batch(_squeezed, inputs)
        own_targets = map_batch(_squeezed, targets)
        count = len(tensors(own_targets)[0])
        weights = None if train else torch.ones(count, dtype=self.objective.dtype, device=self.objective.device)
        with unread_masks():
            gradients, loss = self.objective.gradient_at(
                own, own_buffers, own_inputs, own_targets, train=train, streams=streams, weights=weights
            )
        return {name: gradient.unsqueeze(0) for name, gradient in gradients.items()}, loss.unsqueeze(0)


# layers that do nothing with their parameters but multiply inputs by them
ROUNDED_BY_AUTOCAST = (
    nn.Linear, nn.modules.linear.NonDynamicallyQuantizableLinear, nn.MultiheadAttention,
    nn.Conv1d, nn.Conv2d, nn.Conv3d,
)  # fmt: skip


Forward = StackedForward | CapturedForward


def rounded(forward: Forward, parameters: Parameters) -> dict[str, Tensor]:
    """Return the parameters in the types that a forward pass uses."""
    return {n: p.bfloat16() if forward.rounds(n, p) else p for n, p in parameters.items()}


def _rounded_inputs(layer: nn.Module, args: Any, kwargs: Any) -> Any:
    def rounded(value: Any) -> Any:
        return value.bfloat16() if isinstance(value, Tensor) and value.is_floating_point() else value

    return tree_map(rounded, (args, kwargs))


def _only_client(*records: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    return [{name: tensor.squeeze(0) for name, tensor in record.items()} for record in records]


def _squeezed(values: Tensor) -> Tensor:
    return values.squeeze(0)


def stacked_forward(
    objective: Objective, sample: tuple[Inputs, Targets], precision: Precision
) -> tuple[StackedForward | None, str]:
    """Return the stacked forward pass, which `why_not_stacked` must check, or None and why the module has none.

    `sample` holds the inputs and targets of several clients' batches, one after the other (see `probe_samples`).
    """
    reading = value_read(objective, to_be_watched(objective.seeded), *sample)
    if reading:
        return None, reading
    try:
        forward = StackedForward(objective)
        with _exact():
            _find_samples(forward, objective, *sample)
    except Exception as error:  # whatever a user's module raises when it is stacked
        return None, _reason(error)
    if objective.device.type == "cuda":
        forward.compute_in(precision)
        forward.suit_a_gpu()
    return forward, ""


def why_not_stacked(forward: StackedForward, sample: tuple[Inputs, Targets], precision: Precision) -> str:
    """Return why a forward pass does not give the gradients of the module itself, or an empty string.

    Whether a form is right depends neither on the precision it will run in nor on the fastest algorithm, so the check
    is one in full precision and without kernels for a GPU: there, of another stacked form of the module.
    """
    objective, checked = forward.objective, forward
    try:
        if objective.device.type == "cuda":
            checked = StackedForward(objective)
            checked.samples.learn_from(forward.samples)
        with _exact():
            _compare(checked, objective, *sample)
        checked.compute_in(precision)
        if objective.device.type == "cuda":
            if reads_values(lambda: _try_types(checked, objective, *sample)):
                return "the model or the loss reads tensors' values, which a captured step cannot"
        elif precision == "bf16":
            _try_types(checked, objective, *sample)
    except Exception as error:  # whatever a user's module raises when it is stacked
        return _reason(error)
    return ""


def _reason(error: Exception) -> str:
    """Return why a module cannot be stacked."""
    if isinstance(error, CannotStack):
        return str(error)
    return f"stacked: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


@contextlib.contextmanager
def _exact() -> Iterator[None]:
    """Compute in full precision, and let layers of dropout keep half of the values."""
    with arithmetic("fp32", benchmark=False), dropping_half():
        yield


def _compare(forward: StackedForward, objective: Objective, inputs: Inputs, targets: Targets) -> None:
    """Raise `CannotStack` if a forward pass does not give the gradients of the module itself."""
    try:
        _probe(forward, objective, inputs, targets, tolerance=1e-9 if objective.dtype == torch.float64 else 1e-3)
    except CannotStack as mismatch:
        if objective.dtype == torch.float64:
            raise
        try:  # rounding may flip a ReLU in float32, which float64 tells from a real mismatch
            exact = objective.in_type(torch.float64)
            twin, inputs, targets = StackedForward(exact), map_batch(_doubled, inputs), map_batch(_doubled, targets)
            _find_samples(twin, exact, inputs, targets)
            _probe(twin, exact, inputs, targets, tolerance=1e-9)
        except Exception:  # it is one, or the module cannot compute in float64
            raise mismatch from None


def _doubled(values: Tensor) -> Tensor:
    return values.double() if values.is_floating_point() else values


def _probe(forward: StackedForward, objective: Objective, inputs: Inputs, targets: Targets, tolerance: float) -> None:
    """Compare clients trained together with clients trained alone, to find layers that mix the samples of a batch."""
    x, own_batches = objective.start, functools.partial(unfold_clients, clients=PROBE_CLIENTS)
    stacked_inputs, stacked_targets = map_batch(own_batches, inputs), map_batch(own_batches, targets)
    scale = 1 + 0.1 * torch.arange(PROBE_CLIENTS, dtype=x.dtype, device=x.device).unsqueeze(1)
    flat = (x * scale).requires_grad_()
    buffers = {n: torch.stack([b] * PROBE_CLIENTS) for n, b in objective.buffers.items()}
    for train, case in ((False, PADDED), (True, FULL), (True, PADDED)):  # rounds evaluate with a mask only
        clients = case.clients
        padded = functools.partial(_with_padding, case=case)
        xs, ys = map_batch(padded, stacked_inputs), map_batch(padded, stacked_targets)
        mask = (torch.arange(case.batch, device=x.device) < case.real).expand(clients, -1)
        trial_buffers = {n: b[:clients].clone() for n, b in buffers.items()}
        views = objective.layers.unflatten(flat[:clients])
        losses = forward.losses(views, trial_buffers, xs, ys, mask if case.real < case.batch else None, train=train)
        means = torch.where(mask, losses, 0.0).sum(1) / case.real
        (gradient,) = torch.autograd.grad(means.sum(), flat)
        for i in range(clients):
            alone_buffers = {n: b.clone() for n, b in objective.buffers.items()}
            own_inputs, own_targets = (take(part, (i, slice(case.real))) for part in (stacked_inputs, stacked_targets))
            alone, _ = objective.gradient(flat[i].detach(), alone_buffers, own_inputs, own_targets, train=train)
            # a NaN or an infinity at the start is for the run to report
            odd = ~alone.isfinite() & ~gradient[i].isfinite()
            error = torch.linalg.vector_norm(torch.where(odd, 0.0, gradient[i] - alone))
            size = torch.linalg.vector_norm(torch.where(odd, 0.0, alone))
            if not bool(error <= tolerance * size + 1e-12):
                raise CannotStack("the module mixes samples of a batch, or uses parameters in an unknown way")


def _try_types(forward: StackedForward, objective: Objective, inputs: Inputs, targets: Targets) -> None:
    """Differentiate in the types of the run; torch raises an error if an operation does not take them."""
    flat = objective.start.expand(PROBE_CLIENTS, -1).detach().requires_grad_()
    parameters = rounded(forward, objective.layers.unflatten(flat))
    buffers = {n: torch.stack([b] * PROBE_CLIENTS) for n, b in objective.buffers.items()}
    own_batches = functools.partial(unfold_clients, clients=PROBE_CLIENTS)
    xs, ys = map_batch(own_batches, inputs), map_batch(own_batches, targets)
    torch.autograd.grad(forward.losses(parameters, buffers, xs, ys, None, train=True).sum(), flat)


def _with_padding(values: Tensor, case: ProbeCase) -> Tensor:
    """Return batches with as many real samples as the case has, and padding from the client that differs most."""
    others = values.flip(0)[: case.clients, : case.batch - case.real]
    return torch.cat([values[: case.clients, : case.real], others], 1)


def _find_samples(forward: StackedForward, objective: Objective, inputs: Inputs, targets: Targets) -> None:
    """Let a forward pass find the axes of the samples; refuse buffers that change, except those stored per client."""
    chosen = odd_samples(objective, inputs, targets)
    xs, ys = (map_batch(lambda values: values[chosen].unsqueeze(0), part) for part in (inputs, targets))
    parameters = objective.layers.unflatten(objective.start.unsqueeze(0).requires_grad_())
    for train in (False, True):
        buffers = {n: b.unsqueeze(0).clone() for n, b in objective.buffers.items()}
        with rng.forked(objective.device):
            forward.losses(parameters, buffers, xs, ys, None, train=train)
        for name, buffer in buffers.items():
            if name not in forward.per_client_buffers and not torch.equal(buffer[0], objective.buffers[name]):
                raise CannotStack(f"training changes the buffer '{name}', which has no stacked form")
