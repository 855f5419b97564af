"""pfl's clients and server optimizers, in float64; pfl itself takes differences of models in float32."""

from types import SimpleNamespace

import torch
from pfl.algorithm.fedprox import FedProx, FedProxParams
from pfl.algorithm.scaffold import SCAFFOLD, SCAFFOLDParams
from pfl.data.dataset import Dataset
from pfl.data.user_state import InMemoryUserStateStorage
from pfl.hyperparam import NNTrainHyperParams
from pfl.model.pytorch import PyTorchModel
from pfl.stats import MappedVectorStatistics

import lamina


class Module(torch.nn.Module):
    """A module with the functions that pfl asks for."""

    def __init__(self, model, mean_loss):
        super().__init__()
        self.model, self.mean_loss = model, mean_loss

    def forward(self, inputs):
        return self.model(inputs)

    def loss(self, inputs, labels):
        return self.mean_loss(self(inputs), labels)

    def metrics(self, inputs, labels):
        return {}


def as_pfl(model, batches, lr, loss):
    """Return a client's model, data and settings as pfl has them; the batches are passed in their order."""
    parameters = [torch.nn.Parameter(torch.zeros(1))]  # the server's optimizer plays no role here
    wrapped = PyTorchModel(Module(model, loss), torch.optim.SGD, torch.optim.SGD(parameters, lr=1.0))
    inputs, labels = (torch.cat(parts) for parts in zip(*batches, strict=True))
    settings = NNTrainHyperParams(
        local_num_epochs=1, local_learning_rate=lr, local_batch_size=len(batches[0][0]), local_max_grad_norm=None
    )
    return wrapped, Dataset((inputs, labels), user_id="0"), settings


def fedprox(model, batches, lr, loss, mu):
    """Train a client with pfl's FedProx."""
    wrapped, data, settings = as_pfl(model, batches, lr, loss)
    params = FedProxParams(
        central_num_iterations=1, evaluation_frequency=1, train_cohort_size=1, val_cohort_size=None, mu=mu
    )
    context = SimpleNamespace(algorithm_params=params, model_train_params=settings)
    FedProx().train_one_user(wrapped.get_parameters(), wrapped, data, context)
    return model


def scaffold(model, batches, lr, loss, state, c):
    """Train a client with pfl's SCAFFOLD, option II; `c` is our server's control variate."""
    wrapped, data, settings = as_pfl(model, batches, lr, loss)
    storage = state.setdefault("storage", InMemoryUserStateStorage())
    params = SCAFFOLDParams(
        central_num_iterations=1, evaluation_frequency=1, train_cohort_size=1, val_cohort_size=None, population=1,
        use_gradient_as_control_variate=False, user_state_storage=storage,
    )  # fmt: skip
    context = SimpleNamespace(algorithm_params=params, model_train_params=settings)
    algorithm, start, at = SCAFFOLD(), wrapped.get_parameters(), 0
    control = {}
    for name, value in start.items():
        control[name] = c[at : at + value.numel()].reshape(value.shape)
        at += value.numel()
    algorithm._server_c = MappedVectorStatistics(control)
    payload, _ = algorithm.train_one_user(start, wrapped, data, context)
    local_c = storage.load_state("0", "local_c")
    return {
        "y": model,
        "c": {name.removeprefix("model."): local_c[name] for name in start},
        "delta_c": {name.removeprefix("model."): payload[f"c/{name}"] for name in start},
    }


def server(name="Adam", **options):
    """Return a server half: pfl's model applies the mean update with an optimizer of torch."""

    def step(x, delta, state, server_lr):
        if "pfl" not in state:
            module = Module(torch.nn.ParameterList([torch.nn.Parameter(x.clone())]), None)
            optimizer = getattr(torch.optim, name)(module.parameters(), lr=server_lr, **options)
            state["pfl"] = PyTorchModel(module, torch.optim.SGD, optimizer)
        ((parameter, value),) = state["pfl"].variable_map.items()
        state["pfl"].apply_model_update(MappedVectorStatistics({parameter: delta}))
        return value.detach().clone()

    return step


@lamina.algorithm("pfl_scaffold", title="SCAFFOLD with pfl's sign", lr=0.1)
class PflScaffold(lamina.Scaffold):
    """SCAFFOLD whose new control variate is c_i - c + (y_K - x) / (K eta)."""

    def finish(self, local, down, client, info):
        """Return the upload and the new control variate."""
        delta = local.y - down.x
        change = delta / (info.steps * info.lr) - down.c
        up, _ = super().finish(local, down, client, info)
        return up._replace(delta_c=change), client._replace(c=client.c + change)
