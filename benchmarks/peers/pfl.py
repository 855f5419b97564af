"""apple/pfl-research, as its own CIFAR-10 benchmark does it; evaluation and metric callbacks are left out.

Run as `python -m peers.pfl`: as a script this file would hide the package pfl, which is told its device by
PFL_PYTORCH_DEVICE.
"""

from __future__ import annotations

import importlib.metadata
import types

import contender
import numpy as np
import torch
import workloads
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByUser
from pfl.algorithm import FederatedAveraging, NNAlgorithmParams
from pfl.callback.base import TrainingProcessCallback
from pfl.data import FederatedDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
from pfl.metrics import Metrics
from pfl.model.pytorch import PyTorchModel
from torch.nn import functional as F  # noqa: N812

from peers import torch_models

a = contender.arguments()
torch.set_num_threads(a.threads)
torch.manual_seed(0)
np.random.seed(0)  # noqa: NPY002  # pfl samples users from the global generator
w, stored = workloads.WORKLOADS[a.workload], workloads.load(a.workload, a.data)
processed = 0


def loss(self, inputs, targets, eval=False):
    """What pfl calls for every batch of a user."""
    global processed
    processed += len(inputs)
    self.eval() if eval else self.train()
    return F.cross_entropy(self(inputs), targets)


def metrics(self, inputs, targets, eval=True):
    """Required by pfl; nothing is evaluated here."""
    return {}


class Laps(TrainingProcessCallback):
    def on_train_begin(self, *, model):
        watch.lap()
        return Metrics()

    def after_central_iteration(self, aggregate_metrics, model, *, central_iteration):
        watch.lap()
        return False, Metrics()


watch = contender.Stopwatch(a.device)
# the whole training set on the device and cut into users, as pfl's make_iid_federated_dataset does;
# channels last, as its benchmark keeps its images
images = len(w.shape) == 3
x = torch.from_numpy(workloads.normalised(stored[0]))
x = (x.permute(0, 2, 3, 1).contiguous() if images else x).to(a.device)
y = torch.from_numpy(stored[1]).to(a.device)
users = {user: (x[workloads.owned(w, user)], y[workloads.owned(w, user)]) for user in range(w.users)}
train = FederatedDataset.from_slices(users, get_user_sampler("random", range(w.users)))

network = torch_models.create(a.workload, channels_last=images).to(a.device)
network.loss, network.metrics = types.MethodType(loss, network), types.MethodType(metrics, network)
central_optimiser = torch.optim.SGD(network.parameters(), 1.0)
model = PyTorchModel(model=network, local_optimizer_create=torch.optim.SGD, central_optimizer=central_optimiser)
FederatedAveraging().run(
    algorithm_params=NNAlgorithmParams(
        central_num_iterations=a.warmup + a.rounds,
        evaluation_frequency=10**9,
        train_cohort_size=w.active,
        val_cohort_size=0,
    ),
    backend=SimulatedBackend(training_data=train, val_data=train, postprocessors=[WeightByUser()]),
    model=model,
    model_train_params=NNTrainHyperParams(
        local_learning_rate=w.lr, local_num_epochs=w.epochs, local_batch_size=w.batch
    ),
    model_eval_params=NNEvalHyperParams(local_batch_size=w.batch),
    callbacks=[Laps()],
)

predict = contender.torch_predict(network)
contender.report(
    a,
    watch,
    parameters=sum(p.numel() for p in network.parameters()),
    samples=processed / (a.warmup + a.rounds),
    accuracy=contender.accuracy(lambda v: predict(v.transpose(0, 2, 3, 1).copy() if images else v), *stored),
    version=f"pfl {importlib.metadata.version('pfl')}, torch {torch.__version__}",
)
