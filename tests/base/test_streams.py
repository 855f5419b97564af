"""Random streams of a run: they do not coincide, and a seed gives the same run in every version.

If a value below must change, say so in the changelog: no run of an earlier version can be repeated or resumed then.
"""

import numpy as np
import pytest
import torch
from torch import nn

import lamina
from lamina import models
from lamina.base import rng
from lamina.data import IID, Classes, Dirichlet, Reallocate
from lamina.data.dataset import Dataset
from lamina.data.feed import Augment
from lamina.data.partitions import Shards
from lamina.data.readers.labels import mark_test_rows
from lamina.objective.dropout import set_streams, with_streams
from lamina.rounds.clients import Clients, reserve
from lamina.rounds.plan import Plan, dropout_streams, sample_counters
from lamina.rounds.settings import TrainSettings

CLIENTS = Clients([np.arange(4 * i, 4 * i + 4) for i in range(20)], samples=80)
LABELS = np.arange(24) % 3


def plan(**more):
    return Plan(CLIENTS, TrainSettings(0.1, participation=0.2, batch_size=3, epochs=1, seed=7, **more))


# --- no two streams coincide ------------------------------------------------------------------------------------------


def test_dropout_and_augmentation_draw_from_different_streams():
    """The stream of a client's masks is none of the words that its samples are augmented with."""
    streams, steps, width = np.asarray(plan().round(1).streams), 5, 40
    counters = np.unique([*sample_counters(steps, width).ravel(), *range(1000)])
    of_samples = rng.fork(streams[:, None], counters)
    of_masks = dropout_streams(streams, steps)
    below = rng.fork(of_samples[..., None], np.arange(steps))  # streams that would be theirs if they had any
    assert not np.isin(of_masks, np.concatenate([streams, of_samples.ravel(), below.ravel()])).any()
    assert len(np.unique(of_masks)) == of_masks.size


def test_every_call_of_every_dropout_layer_has_masks_of_its_own():
    masks = dropout_masks(nn.Sequential(*(nn.Dropout(0.5) for _ in range(5))), calls=5, width=64)
    assert len(set(map(tuple, masks))) == len(masks)


# --- the same seed, the same run --------------------------------------------------------------------------------------


def dropout_masks(module, calls, width):
    module, layers = with_streams(module.train())
    set_streams(layers, torch.tensor([5]))
    return [(layer(torch.ones(1, width)) > 0).int().flatten().tolist() for _ in range(calls) for layer in layers]


def words():
    return {
        "key": rng.key(0, "cohort", 1),
        "seed": rng.key(-3, "cohort", 1),
        "torch_seed": rng.torch_seed(0, "weights"),
        "fork": rng.fork(np.array([1]), 2).tolist(),
        "words": rng.words(np.array([1]), 2).tolist(),
        "sample": rng.sample(rng.key(3, "doc"), 50, 5).tolist(),
        "coins": rng.coins(rng.key(3, "doc"), 50, 0.1).tolist(),
        "permutation": rng.permutation(rng.key(3, "doc"), 6).tolist(),
        "generator": rng.generator(3, "doc").integers(0, 100, 5).tolist(),
    }


def rounds():
    second = plan().round(2)
    return {
        "cohorts": [plan().cohort(number).tolist() for number in (1, 2)],
        "bernoulli": [plan(sampling="bernoulli").cohort(number).tolist() for number in (1, 2)],
        "batches": [second.batch(c, k).tolist() for c in (0, 1) for k in (0, 1)],
        "streams": second.streams[:2].tolist(),
        "augmentation": [second.augment_keys(0, k).tolist() for k in (0, 1)],
        "dropout": [second.dropout_stream(0, k).tolist() for k in (0, 1)],
    }


def layers():
    model = models.create("mlp", input_shape=(1, 4, 4), classes=3, hidden=5, seed=rng.torch_seed(7, "weights"))
    images = torch.arange(18).reshape(2, 1, 3, 3)
    keys = torch.from_numpy(plan().round(2).augment_keys(0, 0)[:2])
    return {
        "masks": dropout_masks(nn.Sequential(nn.Dropout(0.5), nn.Dropout(0.3)), calls=2, width=8),
        "weights": [pytest.approx(p[0].flatten()[0].item(), abs=1e-6) for p in model.parameters()],
        "augmented": Augment(pad=1)(images, keys).flatten().tolist(),
    }


def splits():
    kinds = {"iid": IID(), "dirichlet": Dirichlet(0.5), "classes": Classes(2), "shards": Shards(8, 2)}
    kinds |= {"natural": Dirichlet(0.5, sizes="natural"), "refill": Dirichlet(0.5, refill=True)}
    data = Dataset(torch.zeros(24, 1), torch.from_numpy(LABELS))
    kept = reserve(CLIENTS, heldout=0.1, local_test=0.25, seed=7)
    moving = lamina.Simulation(nn.Linear(1, 3), data, "fedavg", clients=4, partition=Reallocate(IID()), seed=7)
    return {
        **{name: [part.tolist() for part in kind.split(LABELS, 4, 7)] for name, kind in kinds.items()},
        "reallocate": [part.tolist() for part in moving.plan.round(2).samples],
        "holdout": data.holdout(0.2, seed=7)[1].y.tolist(),
        "heldout_clients": [part.tolist() for part in kept.heldout],
        "local_test": [part.tolist() for part in kept.local_tests][:4],
        "own_test_data": np.flatnonzero(mark_test_rows("file", 20, None)).tolist(),
        "digits": lamina.data.load("digits").test.y[:12].tolist(),
    }


WORDS = {
    "key": 7867630150396171782,
    "seed": -744057637410986829,
    "torch_seed": 6272463293305712260,
    "fork": [7282798541263072716],
    "words": [2185194620014831856],
    "sample": [5, 7, 11, 12, 30],
    "coins": [3, 8, 9, 15, 18, 23, 24, 30, 38, 40, 44, 45],
    "permutation": [2, 4, 0, 1, 5, 3],
    "generator": [42, 25, 21, 49, 73],
}
ROUNDS = {
    "cohorts": [[1, 4, 17, 19], [4, 5, 11, 15]],
    "bernoulli": [[0, 2, 3, 4, 15], [1, 6, 16]],
    "batches": [[19, 18, 16], [17], [21, 23, 20], [22]],
    "streams": [4806716111342401196, -69771792353056286],
    "augmentation": [[4879749080898317, 8321722264643154, 3617985096342431], [6294359610319329]],
    "dropout": [[1146494668010003045], [-4022611313857313035]],
}
LAYERS = {
    "masks": [[1, 0, 1, 0, 1, 1, 0, 1], [1, 1, 1, 0, 0, 1, 1, 1], [1, 1, 1, 1, 0, 1, 0, 1], [1, 1, 1, 1, 0, 1, 1, 1]],
    "weights": [-0.1761383, 0.0511822, 0.0344157, -0.1006883],
    "augmented": [4, 3, 0, 7, 6, 0, 0, 0, 0, 0, 0, 0, 10, 11, 0, 13, 14, 0],
}
SPLITS = {
    "iid": [[2, 6, 12, 19, 20, 22], [4, 5, 7, 8, 10, 17], [11, 14, 15, 16, 21, 23], [0, 1, 3, 9, 13, 18]],
    "dirichlet": [[3, 11, 12, 15, 16, 20], [1, 2, 14, 17, 22, 23], [0, 6, 8, 9, 18, 21], [4, 5, 7, 10, 13, 19]],
    "classes": [[1, 2, 11, 16, 20, 22, 23], [3, 7, 10, 15], [0, 4, 6, 12, 13, 19], [5, 8, 9, 14, 17, 18, 21]],
    "shards": [[3, 6, 9, 12, 15, 18], [0, 1, 2, 7, 17, 21], [5, 8, 11, 14, 20, 23], [4, 10, 13, 16, 19, 22]],
    "natural": [[1, 16, 22], [0, 2, 3, 4, 6, 7, 10, 11, 12, 13, 14, 15, 19, 20, 23], [5, 8, 9, 17], [18, 21]],
    "refill": [[4, 7, 10, 13, 16, 19], [1, 2, 11, 14, 15, 23], [5, 8, 17, 18, 20, 22], [0, 3, 6, 9, 12, 21]],
    "reallocate": [[1, 2, 6, 8, 15, 20], [4, 5, 10, 12, 14, 17], [0, 3, 11, 19, 22, 23], [7, 9, 13, 16, 18, 21]],
    "holdout": [1, 2, 2, 1, 0],
    "heldout_clients": [[24, 25, 26, 27], [32, 33, 34, 35]],
    "local_test": [[3], [6], [9], [14]],
    "own_test_data": [2, 10, 14, 18],
    "digits": [0, 8, 1, 3, 9, 5, 0, 8, 9, 4, 5, 3],
}

RUN_LOSSES = [1.0726342951757264, 0.9314245791558765, 1.1546745169460826]


@pytest.mark.parametrize(("draw", "expected"), [(words, WORDS), (rounds, ROUNDS), (layers, LAYERS), (splits, SPLITS)])
def test_a_seed_gives_the_same_draws_in_every_version(draw, expected):
    drawn = draw()
    assert drawn.keys() == expected.keys()
    for name, value in drawn.items():
        assert value == expected[name], name


@pytest.mark.parametrize("engine", ["loop", "stacked"])
def test_a_seed_gives_the_same_run_in_every_version(engine):
    """Initial weights, partition, cohorts, batches, augmentation and dropout together."""

    def network(input_shape, classes):
        return nn.Sequential(nn.Flatten(), nn.Linear(36, 8), nn.Dropout(0.3), nn.Linear(8, classes)).double()

    images = (torch.arange(60 * 36) * 37 % 251).to(torch.uint8).reshape(60, 1, 6, 6)
    settings = {"clients": 6, "partition": "dirichlet", "participation": 0.5, "batch_size": 4, "lr": 0.1, "seed": 7}
    run = lamina.Simulation(network, (images, torch.arange(60) % 3), "fedlamb", engine=engine, device="cpu",
                            augmentation=Augment(pad=1), **settings)  # fmt: skip
    run.run(3)
    assert run.history.column("train_loss") == pytest.approx(RUN_LOSSES, rel=1e-6)
