"""Checks of the model: its parameters, whether it runs on the data and its batches, and what its passes change."""

from __future__ import annotations

import logging
import re

import torch
from torch import nn

from lamina.base import limits
from lamina.base.errors import BadInput, where_it_failed
from lamina.base.limits import in_bytes
from lamina.data.dataset import Dataset
from lamina.objective.batch import map_batch, tensors
from lamina.objective.objective import Objective
from lamina.objective.outputs import tensors_in
from lamina.rounds.plan import Plan
from lamina.training.preflight.dry_run import DryRun

log = logging.getLogger(__name__)

INTEGER_REFUSED = re.compile(r"\bLong(Tensor)?\b|\blong (long|int)\b|int64")  # in torch's messages


def check_max_norm(objective: Objective) -> None:
    """Refuse embeddings that rescale a trained weight in the forward pass."""
    for name, layer in objective.module.named_modules():
        rescales = isinstance(layer, nn.Embedding | nn.EmbeddingBag) and layer.max_norm is not None
        if rescales and layer.weight.requires_grad:
            raise BadInput(
                f"layer '{name}' ({type(layer).__name__}) has max_norm={layer.max_norm:g}, which rescales its weight "
                "in the forward pass, outside of the algorithm's step: set max_norm=None, or freeze the weight"
            )


def check_precision(objective: Objective) -> None:
    """Refuse trainable parameters in half precision."""
    if torch.finfo(objective.dtype).bits < 32:
        raise BadInput(
            f"the trainable parameters are {str(objective.dtype).removeprefix('torch.')}, in which small steps and "
            "second moments are lost: use model.float(), and precision='bf16' for speed; frozen parameters may stay"
        )


def check_finite(objective: Objective) -> None:
    """Refuse parameters that start with a NaN or an infinity."""
    bad = objective.layers.first_nonfinite(objective.start)
    if bad is not None:
        raise BadInput(f"the model's parameter '{bad}' holds a NaN or an infinity before training")


def check_forward(run: DryRun) -> None:
    """Refuse data that the model's forward pass cannot take."""
    error, module, x = run.evaluation.error, run.objective.module, run.data.x
    if error is None:
        return
    if isinstance(error, BadInput):
        raise error
    reason = " ".join(str(error).split())
    if isinstance(error, KeyError):
        reason = f"it looks for {reason}, which they do not have"
    elif tensors(run.inputs)[0].dtype == torch.int64 and INTEGER_REFUSED.search(reason):
        reason += "; integers reach the model as they are: give features as floats, x.astype('float32')"
    config = getattr(module, "config", None)
    decoder_inputs = ("decoder_input_ids", "decoder_inputs_embeds", "labels")
    if getattr(config, "is_encoder_decoder", False) and not (isinstance(x, dict) and set(decoder_inputs) & set(x)):
        inputs = getattr(module, "main_input_name", "input_ids")  # of Whisper, input_features
        reason += f"; the model has a decoder: give x as {{'{inputs}': …, 'decoder_input_ids': …}}, which "
        reason += "model.prepare_decoder_input_ids_from_labels(y) makes of the targets"
    positions = getattr(config, "max_position_embeddings", None)
    if positions is not None and any(v.dim() > 1 and v.shape[1] > positions for v in tensors(x)):
        reason += f"; its config has max_position_embeddings = {positions}: enlarge it or shorten the sequences"
    shape = map_batch(lambda values: tuple(values.shape[1:]), x)
    where = f" ({line})" if (line := where_it_failed(error)) else ""
    raise BadInput(f"the model cannot take the {run.name} data, samples of shape {shape}: {reason}{where}") from error


def check_memory(run: DryRun) -> None:
    """Refuse activations that do not fit into memory."""
    size = run.evaluation.bytes_per_sample
    what = f"an activation of {in_bytes(size)} per sample, for {run.rows} samples of the {run.name} data,"
    advice = "take a smaller model or smaller batches"
    limits.check_memory(what, size * run.rows, advice, run.objective.device)


def check_parameters(run: DryRun) -> None:
    """Refuse a forward pass that writes into parameters."""
    for one in (run.evaluation, run.training) if run.name == "train" else (run.evaluation,):
        if one.written_parameter is not None:
            raise BadInput(
                f"the model's forward pass writes into the parameter '{one.written_parameter}', outside of the "
                "algorithm's step: compute a new tensor instead"
            )


def check_buffers(run: DryRun) -> None:
    """Refuse a forward pass that replaces a buffer by another tensor."""
    name = run.training.replaced_buffer
    if name is not None:
        what = f"the model's forward pass assigns a new tensor to the buffer '{name}', which would be lost"
        raise BadInput(f"{what}: write into it: self.{name.rpartition('.')[2]}.copy_(…)")


def warn_of_state(run: DryRun) -> None:
    """Warn of a model whose passes depend on earlier ones, other than by its buffers."""
    for first, second in run.repetitions:
        pairs = zip(tensors_in(first.outputs), tensors_in(second.outputs), strict=True)
        if any(a.shape != b.shape or not torch.allclose(a, b, rtol=1e-3, equal_nan=True) for a, b in pairs):
            log.warning(
                "the model's outputs for one batch differ from call to call: clients share this state, and no "
                "checkpoint holds it; keep it in a buffer, written in place"
            )
            return


def check_lone_samples(objective: Objective, data: Dataset, plan: Plan) -> None:
    """Refuse a batch of one sample if a BatchNorm cannot train on it."""
    has_batch_norm = any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in objective.module.modules())
    batch, sizes = plan.protocol.batch_size, plan.clients.parts.sizes
    if has_batch_norm and bool(((sizes if batch is None else sizes % batch) == 1).any()):
        buffers = {n: b.clone() for n, b in objective.buffers.items()}
        with torch.no_grad():  # raises BadInput, unless the layer is frozen or has several values per channel
            objective.outputs(objective.start, buffers, data.inputs(slice(1), objective.dtype), train=True)
