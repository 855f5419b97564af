"""FedJAX: its federated averaging on a Haiku model with the default (jit) backend, as in its EMNIST example.

Run as `python -m peers.fedjax`: as a script this file would hide the package fedjax.
"""

from __future__ import annotations

import importlib.metadata

import contender
import fedjax
import haiku as hk
import jax
import numpy as np
import workloads
from fedjax.algorithms import fed_avg

jax.tree_map = jax.tree_util.tree_map  # removed from JAX; FedJAX 0.0.17 still calls it
a = contender.arguments()
w, stored = workloads.WORKLOADS[a.workload], workloads.load(a.workload, a.data)
images = len(w.shape) == 3


def channels_last(x: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(x.transpose(0, 2, 3, 1)) if images else x  # JAX's own layout


def forward(batch, is_train=True):
    if a.workload == "W2":
        return hk.Sequential([hk.Linear(200), jax.nn.relu, hk.Linear(10)])(batch["x"])
    xavier = hk.initializers.VarianceScaling(1.0, "fan_avg", "uniform")
    h = jax.nn.relu(hk.Conv2D(32, 3, padding="VALID", w_init=xavier)(batch["x"]))
    h = jax.nn.relu(hk.Conv2D(64, 3, padding="VALID", w_init=xavier)(h))
    h = hk.MaxPool(2, 2, "VALID")(h)
    if is_train:
        h = hk.dropout(hk.next_rng_key(), 0.25, h)
    h = jax.nn.relu(hk.Linear(128, w_init=xavier)(hk.Flatten()(h)))
    if is_train:
        h = hk.dropout(hk.next_rng_key(), 0.5, h)
    return hk.Linear(10, w_init=xavier)(h)


watch = contender.Stopwatch(a.device)
x, y = channels_last(workloads.normalised(stored[0])), stored[1].astype(np.int32)
users = {user: {"x": x[workloads.owned(w, user)], "y": y[workloads.owned(w, user)]} for user in range(w.users)}
model = fedjax.create_model_from_haiku(
    hk.transform(forward),
    {"x": x[:1], "y": y[:1]},
    lambda batch, logits: fedjax.metrics.unreduced_cross_entropy_loss(batch["y"], logits),
    train_kwargs={"is_train": True},
    eval_kwargs={"is_train": False},
)
batches = fedjax.ShuffleRepeatBatchHParams(batch_size=w.batch, num_epochs=w.epochs, seed=0)
algorithm = fed_avg.federated_averaging(
    fedjax.model_grad(model), fedjax.optimizers.sgd(w.lr), fedjax.optimizers.sgd(1.0), batches
)
state = algorithm.init(model.init(jax.random.PRNGKey(0)))
sampler = fedjax.client_samplers.UniformGetClientSampler(
    fedjax.InMemoryFederatedData(users), num_clients=w.active, seed=0
)
watch.lap()
for number in range(1, a.warmup + a.rounds + 1):
    sampler.set_round_num(number)
    state, _ = algorithm.apply(state, sampler.sample())
    jax.block_until_ready(state.params)
    watch.lap()

# FedJAX fills a short last batch with further samples, so a round may hold a little more than the others'
processed = sum(len(b["y"]) for _, own, _ in sampler.sample() for b in own.shuffle_repeat_batch(batches))
contender.report(
    a,
    watch,
    parameters=sum(leaf.size for leaf in jax.tree_util.tree_leaves(state.params)),
    samples=processed,
    accuracy=contender.accuracy(
        lambda v: np.asarray(model.apply_for_eval(state.params, {"x": channels_last(v)})).argmax(1), *stored
    ),
    version=f"fedjax {importlib.metadata.version('fedjax')}, jax {jax.__version__}",
)
