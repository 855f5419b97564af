"""Run one experiment: build it from its configuration, train, and keep its records in a folder."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file

import lamina
from lamina import algorithms, models, rng
from lamina.data import partitions, sources
from lamina.data.dataset import Dataset, Splits
from lamina.data.feed import Augment
from lamina.errors import BadInput
from lamina.experiment.config import Experiment
from lamina.history import Row
from lamina.plan import make_schedule
from lamina.simulation import Simulation

THREADED_FROM = 1_000_000  # parameters; below this a second thread costs more than it brings


def load_data(experiment: Experiment) -> Splits:
    """The experiment's training and test data."""
    return sources.load(experiment.data.name, experiment.data.dir)


def build(experiment: Experiment, splits: Splits | None = None) -> Simulation:
    """Make the simulation an experiment describes."""
    data, train, run = experiment.data, experiment.train, experiment.run
    splits = splits or load_data(experiment)
    schedule = train.schedule.options()
    if train.schedule.name == "cosine":
        schedule.setdefault("rounds", train.rounds)
    return Simulation(
        build_model(experiment, splits.train),
        splits.train,
        algorithms.create(experiment.algorithm.name, experiment.algorithm.preset, **experiment.algorithm.options()),
        test=splits.test,
        clients=data.clients,
        partition=partitions.make(data.partition.name, **data.partition.options()),
        participation=train.participation,
        sampling=train.sampling,
        batch_size=train.batch_size,
        epochs=train.epochs,
        local_steps=train.local_steps,
        lr=train.lr,
        schedule=make_schedule(train.schedule.name, **schedule),
        clip=train.clip,
        weighting=train.weighting,
        loss=train.loss,
        augmentation=Augment(data.augment_pad, data.augment_flip) if data.augment else None,
        seed=train.seed,
        device=run.device,
        engine=run.engine,
        precision=run.precision,
        evaluate_every=run.evaluate_every,
        client_metrics=run.client_metrics,
        trust_ratios=run.trust_ratios,
    )


def build_model(experiment: Experiment, data: Dataset) -> torch.nn.Module:
    """The experiment's model, with initial weights that depend on the seed alone: the same for every algorithm."""
    return models.create(
        experiment.model.name,
        input_shape=tuple(data.x.shape[1:]),
        classes=data.classes or 1,
        seed=rng.torch_seed(experiment.train.seed, "weights"),
        **experiment.model.options(),
    )


def choose_threads(experiment: Experiment, parameters: int) -> int:
    """Threads for torch: one for small models, where a second one only waits."""
    if experiment.run.threads is not None:
        return experiment.run.threads
    return 1 if parameters < THREADED_FROM else max(1, (os.cpu_count() or 1))


class RunFolder:
    """The records of a run: ``config.json``, ``metrics.jsonl`` (a line per finished round), ``model.safetensors``."""

    def __init__(self, path: Path, experiment: Experiment, *, overwrite: bool = False) -> None:
        self.path = path
        if path.exists() and any(path.iterdir()):
            if not overwrite:
                raise BadInput(f"the folder '{path}' holds another run: choose another with --out, or give --overwrite")
            if not (path / "config.json").exists():
                raise BadInput(f"the folder '{path}' is not a run folder: choose another with --out")
            shutil.rmtree(path)
        try:
            path.mkdir(parents=True, exist_ok=True)
            config = {"lamina": lamina.__version__, **experiment.model_dump(mode="json")}
            (path / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
            self._metrics = (path / "metrics.jsonl").open("a", encoding="utf-8")
        except OSError as error:
            raise BadInput(f"cannot write to the folder '{path}': {error.strerror}") from error

    def record(self, row: Row) -> None:
        """Append a finished round; it is on disk when this returns."""
        self._metrics.write(json.dumps(row) + "\n")
        self._metrics.flush()

    def save_model(self, simulation: Simulation) -> Path:
        """Write the trained weights."""
        target, partial = self.path / "model.safetensors", self.path / "model.safetensors.partial"
        state = {name: t.detach().cpu().contiguous().clone() for name, t in simulation.model.state_dict().items()}
        save_file(state, partial)
        partial.replace(target)
        return target


def run(
    simulation: Simulation,
    experiment: Experiment,
    folder: RunFolder,
    on_round: Callable[[Row], None] | None = None,
) -> None:
    """Run an experiment to its end; every finished round is on disk before the next begins."""
    torch.set_num_threads(choose_threads(experiment, simulation.objective.start.numel()))

    def finished(row: Row) -> None:
        folder.record(row)
        if on_round is not None:
            on_round(row)

    simulation.run(experiment.train.rounds, finished)
    folder.save_model(simulation)
