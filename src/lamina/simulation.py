"""`Simulation`: a federation on one machine. The Python API in one class."""

from __future__ import annotations

import contextlib
import copy
import logging
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lamina import algorithms
from lamina.aggregation import Aggregation, as_aggregation
from lamina.algorithms.contract import Algorithm
from lamina.algorithms.rehearsal import rehearse
from lamina.data.dataset import Dataset, as_dataset
from lamina.data.feed import Augment, prepare
from lamina.data.partitions import ByColumn, Reallocate, split_dataset
from lamina.data.partitions import make as make_partition
from lamina.engines.loop import Loop
from lamina.engines.stacked.engine import Stacked
from lamina.engines.stacked.forward import Precision, arithmetic, choose_forward, is_random
from lamina.engines.stacked.memory import keep_freed_memory
from lamina.engines.stacked.probe import probe_samples
from lamina.engines.stacked.steps import works_by_row
from lamina.engines.state import RoundReport, State
from lamina.errors import BadInput, Diverged, is_number, is_whole, unknown
from lamina.history import History, Row
from lamina.limits import MODEL_COPIES, MOST_CLIENTS, check_count, check_memory, check_seed, in_bytes
from lamina.models.allocation import LargestActivation
from lamina.objective import Buffers, Loss, Objective
from lamina.plan import Clients, Plan, Round, Schedule, make_schedule
from lamina.vocabulary import check_vocabulary

if TYPE_CHECKING:
    from lamina.experiment.checkpoint import Checkpoints

EVALUATION_BATCH = 1000  # samples at a time
# input numbers at a time on a GPU, if that is more: small images come in large batches
EVALUATION_NUMBERS_GPU = 8 << 20
MOST_EVALUATED = 16_384  # but not more samples than this: tokens are small, what is made of them is not
DEFAULT_CLIENTS = 10
UNCONTROLLED = "the module's forward draws random numbers itself (F.dropout, torch.rand): use layers such as nn.Dropout"
log = logging.getLogger(__name__)


class Simulation:
    """Train a module with a federated algorithm over simulated clients.

    Every random choice follows from `seed`: two simulations with the same arguments give the same history, and
    two algorithms with the same seed see the same clients and batches.

    >>> import torch, lamina
    >>> x, y = torch.randn(200, 5), torch.randint(0, 3, (200,))
    >>> simulation = lamina.Simulation(torch.nn.Linear(5, 3), (x, y), "fedlamb", clients=10, seed=0)
    >>> history = simulation.run(2)
    >>> len(history), sorted(history[0])[:3]
    (2, ['bytes_down', 'bytes_up', 'clients'])

    Args:
        model: any module; it is copied, and its trainable parameters are the start.
        train: the training data: a `Dataset`, a pair of arrays or tensors, or a `datasets.Dataset`.
        algorithm: an algorithm, or the name of one (its defaults).
        test: data to evaluate on; without it, accuracy and loss are not reported. There is an accuracy for class labels
            and one output per class, or one logit for labels 0 and 1; never with loss="mse".
        clients: number of clients (10 unless the partition names them), or a list of sample indices for each; no
            sample may be given out twice.
        partition: how samples are dealt to a number of clients: a partition object or the name of one; default "iid".
        participation: fraction of the clients that take part in a round.
        sampling: exactly that fraction, or an independent coin per client ("bernoulli").
        batch_size: samples per local step; None: all of the client's.
        epochs: passes of a client over its data in a round; default 1.
        local_steps: a fixed number of local steps instead of epochs.
        lr: the local learning rate; default: the algorithm's card.
        schedule: the learning rate over rounds: a schedule object or the name of one.
        clip: largest norm of a mini-batch gradient.
        weighting: mean over clients, or weighted by their number of examples.
        aggregation: how the server combines what the clients send: "mean", "median", "trimmed_mean", "norm_clipping",
            "centred_clipping", or an object such as `lamina.aggregation.TrimmedMean(0.1)`. All but the mean keep the
            uploads of the whole cohort in memory.
        loss: "cross_entropy", "mse", or a function of (outputs, targets) to one loss per sample.
        augmentation: random crop and flip of training images.
        seed: the source of all randomness.
        device: "auto" (a GPU if there is one), or any torch device.
        engine: "auto" takes the fastest that fits the model; any other name forces that one. A simulation of the
            same model lends its choice: to test what fits takes longer than a small round.
        precision: the model's arithmetic: "fp32", "tf32", or "bf16" (weights and optimiser state stay float32).
        deterministic: on a GPU, the same bits in every run on the same machine, at some cost; a CPU gives them anyway.
        evaluate_every: evaluate on the test data after every n-th round, and at the end of `run`.
        client_metrics: also report the accuracy on every client's own data (mean and worst 10 %).
        trust_ratios: also report the trust ratios of the layer-wise methods, of every client's last local step.
    """

    def __init__(
        self,
        model: nn.Module,
        train: Any,
        algorithm: Algorithm | str = "fedlamb",
        *,
        test: Any = None,
        clients: int | Sequence[Any] | None = None,
        partition: Any = None,
        participation: float = 1.0,
        sampling: Literal["exact", "bernoulli"] = "exact",
        batch_size: int | None = 32,
        epochs: int | None = None,
        local_steps: int | None = None,
        lr: float | None = None,
        schedule: Schedule | str = "constant",
        clip: float | None = None,
        weighting: Literal["clients", "examples"] = "clients",
        aggregation: Aggregation | str = "mean",
        loss: str | Loss = "cross_entropy",
        augmentation: Augment | None = None,
        seed: int = 0,
        device: str | torch.device = "auto",
        engine: Literal["auto", "stacked", "vmap", "loop"] | Simulation = "auto",
        precision: Precision = "fp32",
        deterministic: bool = False,
        evaluate_every: int = 1,
        client_metrics: bool = False,
        trust_ratios: bool = False,
    ) -> None:
        _check_kind("model", model, nn.Module, "an nn.Module (an instance, not a class)")
        _check_kind("algorithm", algorithm, (str, Algorithm), "a name or an instance such as lamina.FedLamb()")
        if not isinstance(schedule, str) and not callable(getattr(schedule, "factor", None)):
            raise BadInput(f"schedule = {schedule!r} is neither a name nor a schedule such as lamina.plan.Cosine(100)")
        if not (partition is None or isinstance(partition, str) or callable(getattr(partition, "split", None))):
            raise BadInput(f"partition = {partition!r} is neither a name nor a partition such as Dirichlet(0.3)")
        if not isinstance(loss, str) and not callable(loss):
            raise BadInput(f"loss = {loss!r} is neither a name nor a function of (outputs, targets)")
        check_seed(seed)
        if weighting not in ("clients", "examples"):
            raise unknown("weighting", weighting, ("clients", "examples"))
        if clip is not None and not (is_number(clip) and clip > 0):
            raise BadInput(f"clip = {clip} is not a positive number")
        check_count("evaluate_every", evaluate_every)
        self.algorithm = algorithms.create(algorithm) if isinstance(algorithm, str) else algorithm
        rehearse(self.algorithm)
        self.device = choose_device(device)
        check_model_fits(model, self.device)
        self.objective = Objective(copy.deepcopy(model).to(self.device), loss)
        self.train_data = as_dataset(train).to(self.device)
        self.test_data = None if test is None else as_dataset(test).to(self.device)
        if loss == "cross_entropy" and self.train_data.classes is None:
            raise BadInput("cross_entropy needs integer class labels; for float targets use loss='mse'")
        self.plan = Plan(
            clients=deal(self.train_data, clients, partition, seed),
            lr=self.algorithm.card.lr if lr is None else lr,
            schedule=make_schedule(schedule) if isinstance(schedule, str) else schedule,
            participation=participation,
            sampling=sampling,
            batch_size=batch_size,
            epochs=epochs,
            local_steps=local_steps,
            seed=seed,
        )
        self.objective.refuse_rate(self.plan.lr)
        if precision not in get_args(Precision):
            raise unknown("precision", precision, get_args(Precision))
        self.precision, self.deterministic = precision, deterministic
        if deterministic:  # cuBLAS reads it when it starts
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        self.engine_name: str = engine.engine_name if isinstance(engine, Simulation) else engine
        self.metric = "loss"  # what tells how good the model is: "accuracy" where the model and data have one
        self._check_fit(loss)
        known = isinstance(engine, Simulation) and engine.plan.same_rounds(self.plan)
        self._check_protocol(client_metrics, known)
        self.engine = choose_engine(
            engine,
            precision,
            algorithm=self.algorithm,
            objective=self.objective,
            data=self.train_data,
            clip=clip,
            by_examples=weighting == "examples",
            aggregation=as_aggregation(aggregation),
            augmentation=augmentation,
            record_trust_ratios=trust_ratios,
        )
        self.evaluate_every = evaluate_every
        self.client_metrics = client_metrics
        self.state, _ = self.start()
        self.history = History()
        self._checkpoints: Checkpoints | None = None
        self._planned: Round | None = None  # the next round's plan, if it was made ahead

    def run(self, rounds: int, on_round: Callable[[Row], None] | None = None) -> History:
        """Train for `rounds` more rounds; `on_round` is called with every finished round's metrics."""
        last = self.state.round + check_count("run: rounds", rounds, least=0)
        while self.state.round < last:
            row = self.run_round(evaluate=self.state.round + 1 == last)
            if on_round is not None:
                on_round(row)
            self.refuse_nonfinite(row)
        return self.history

    def run_round(self, *, evaluate: bool = False) -> Row:
        """Train one round; it is evaluated if it is its turn or asked for."""
        started = time.perf_counter()
        plan = self.next_plan()
        if isinstance(self.engine, Stacked):
            self.engine.meanwhile = self.plan_ahead
        with arithmetic(self.precision, self.deterministic):
            self.state, report = self.engine.run_round(self.state, plan)
        seconds = time.perf_counter() - started
        (metrics,) = evaluate_together([self], always=evaluate)
        return self.record(plan, report, seconds, metrics)

    def next_plan(self) -> Round:
        """The plan of the round to come."""
        number = self.state.round + 1
        planned, self._planned = self._planned, None
        if planned is None or planned.number != number:
            planned = self.plan.round(number)
        self.objective.refuse_rate(planned.lr)
        return planned

    def plan_ahead(self) -> None:
        """Plan the round after the one that runs now: the host has time while a GPU works."""
        if self._planned is None:
            with contextlib.suppress(BadInput):  # if there is no such round, it is not the time to say so
                self._planned = self.plan.round(self.state.round + 2)

    def save(self, folder: str | Path) -> None:
        """Write a checkpoint, as safetensors; again into the same folder, client by client only what changed."""
        from lamina.experiment.checkpoint import Checkpoints  # here: safetensors is not needed to simulate
        from lamina.experiment.identity import of_simulation

        if self._checkpoints is None or self._checkpoints.folder != Path(folder):
            self._checkpoints = Checkpoints(Path(folder), of_simulation(self))
        self._checkpoints.save(self.state, self.history)

    def restore(self, folder: str | Path) -> None:
        """Go back to the newest checkpoint of a simulation made with the same arguments, and its history.

        A checkpoint of other settings is refused. Device, engine, precision, test data and evaluation may differ.
        """
        from lamina.experiment.checkpoint import Checkpoints, load_newest
        from lamina.experiment.identity import of_simulation

        checkpoints = Checkpoints(Path(folder), of_simulation(self))
        home = torch.device("cpu") if isinstance(self.engine, Stacked) else None  # it takes the records it needs
        loaded = load_newest([checkpoints], [self.start()], checkpoints.rounds(), home=home)
        if loaded is None:
            raise BadInput(f"no checkpoint of this simulation in '{folder}'")
        ((self.state, rows),) = loaded
        self.history = History(rows)
        self._checkpoints = checkpoints

    def start(self) -> tuple[State, Any]:
        """The state before round 1, and the record of a client that has not taken part."""
        state = State.start(self.algorithm, self.objective, self.plan.clients.count)
        return state, self.algorithm.client_init(self.objective.start, self.objective.layers)

    def record(self, plan: Round, report: RoundReport, seconds: float, metrics: Mapping[str, float]) -> Row:
        """Add the row of a round that has just finished, with its evaluation if there was one."""
        row = round_row(self.algorithm, self.objective.start, plan, report, seconds) | dict(metrics)
        self.history.append(row)
        return row

    def refuse_nonfinite(self, row: Row) -> None:
        """Stop a run whose weights are still finite but whose test loss is not; its row is kept."""
        refuse_nonfinite(row)

    @property
    def model(self) -> nn.Module:
        """The trained module: a copy of its own, in evaluation mode, that later rounds do not change."""
        return copy.deepcopy(self.objective.module_at(self.state.server.x, self.state.buffers)).eval()

    def evaluate(self) -> dict[str, float]:
        """Accuracy and loss of the current model on the test data, and on the clients' own data if asked for."""
        return self.metrics(self.measure())

    def measure(self) -> Tensor | None:
        """Begin to evaluate the current model on the test data: a GPU is not waited for."""
        if self.test_data is None:
            return None
        with arithmetic(self.precision, self.deterministic):
            return measure(self.objective, self.state.server.x, self.state.buffers, self.test_data)

    def metrics(self, measured: Tensor | None) -> dict[str, float]:
        """What was measured, by name, with the metrics of clients if asked for."""
        metrics = {} if measured is None else named(measured)
        return metrics | self._client_metrics() if self.client_metrics else metrics

    def _client_metrics(self) -> dict[str, float]:
        """The model's accuracy on every client's own training data: how evenly it serves them."""
        with arithmetic(self.precision, self.deterministic):
            _, correct = predict(self.objective, self.state.server.x, self.state.buffers, self.train_data)
        assert correct is not None  # checked when the simulation was made
        hits = correct.cpu().numpy()
        accuracies = np.sort([hits[part].mean() for part in self.plan.clients.parts])
        worst = max(1, round(0.1 * len(accuracies)))
        return {
            "client_accuracy": float(accuracies.mean()),
            "client_accuracy_worst10": float(accuracies[:worst].mean()),
            "client_accuracy_std": float(accuracies.std()),
        }

    def _check_fit(self, loss: str | Loss) -> None:
        """Run one sample through the model: a model that does not fit the data is said here, not in round 1."""
        for name, other in (("train", self.train_data), ("test", self.test_data)):
            if other is None:
                continue
            check_vocabulary(self.objective, other, name)
            inputs = prepare(other.x[:2], other.mean, other.std, self.objective.dtype)
            written = self.objective.written_parameter(inputs) if name == "train" else None
            if written is not None:
                raise BadInput(
                    f"the model's forward pass writes into the parameter '{written}', outside of the algorithm's step: "
                    "compute a new tensor instead"
                )
            try:
                with torch.no_grad(), LargestActivation(len(inputs)) as activation:
                    outputs = self.objective.outputs(self.objective.start, self.objective.buffers, inputs, train=False)
            except Exception as error:  # whatever a user's forward raises
                shape, reason = tuple(other.x.shape[1:]), " ".join(str(error).split())
                if not (other.x.is_floating_point() or other.x.dtype == torch.uint8):
                    reason += "; integers reach the model as they are: give features as floats, x.astype('float32')"
                raise BadInput(f"the model cannot take the {name} data, samples of shape {shape}: {reason}") from error
            rows = min(len(other), EVALUATION_BATCH)
            if other is self.train_data:  # a step keeps at least the activation and its gradient
                largest = max(map(len, self.plan.clients.parts), default=1)
                rows = 2 * min(self.plan.batch_size or largest, largest)
            check_memory(
                f"an activation of {in_bytes(activation.bytes)} per sample, for {rows} samples of the {name} data,",
                activation.bytes * rows,
                "take a smaller model or smaller batches",
                self.device,
            )
            if not isinstance(outputs, Tensor):
                raise BadInput(f"the model returns a {type(outputs).__name__}; it must return one tensor, its outputs")
            classes = other.classes if loss == "cross_entropy" else None
            if classes is not None and (outputs.dim() < 2 or outputs.shape[1] < classes):
                raise BadInput(
                    f"the model's outputs have shape {tuple(outputs.shape[1:])} a sample, but the {name} labels go up "
                    f"to {classes - 1}: it needs {classes}"
                )
            try:
                losses = self.objective.loss(outputs, other.y[:2])
            except Exception as error:
                reason = " ".join(str(error).split())
                raise BadInput(
                    f"the loss cannot compare the model's outputs with the {name} targets: {reason}"
                ) from error
            if not isinstance(losses, Tensor) or losses.shape != (len(inputs),):
                raise BadInput("the loss must return one value per sample, a tensor of shape [n]: use reduction='none'")
            if name == "train" and self.objective.correct(outputs, other.y[:2], other.classes) is not None:
                self.metric = "accuracy"

    def _check_protocol(self, client_metrics: bool, known: bool) -> None:
        """Find what would only fail in some later round; `known`: a simulation with the same rounds has been made."""
        clients = self.plan.clients
        if not known:
            self.plan.round(1)
        if client_metrics and (not clients.parts or self.metric != "accuracy"):
            raise BadInput(
                "client_metrics needs an accuracy (class labels, one output per class or one logit for two, a loss "
                "other than 'mse') and clients that keep their data"
            )
        if clients.moving is not None and any(
            value is not None for value in self.algorithm.client_init(self.objective.start, self.objective.layers)
        ):
            log.warning("clients keep state between rounds, but 'reallocate' gives them other data in every round")
        batch_norm = any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in self.objective.module.modules())
        batch = self.plan.batch_size
        if batch_norm and any((len(part) if batch is None else len(part) % batch) == 1 for part in clients.parts):
            one = prepare(self.train_data.x[:1], self.train_data.mean, self.train_data.std, self.objective.dtype)
            buffers = {n: b.clone() for n, b in self.objective.buffers.items()}
            with torch.no_grad():
                self.objective.outputs(self.objective.start, buffers, one, train=True)  # refuses one sample, or copes


def evaluate_together(simulations: Sequence[Simulation], *, always: bool = False) -> list[dict[str, float]]:
    """Evaluate the simulations whose turn it is, or all; every one is under way before a GPU is waited for."""
    started = time.perf_counter()
    due = [always or simulation.state.round % simulation.evaluate_every == 0 for simulation in simulations]
    measured = [one.measure() if turn else None for one, turn in zip(simulations, due, strict=True)]
    metrics = [one.metrics(m) if turn else {} for one, m, turn in zip(simulations, measured, due, strict=True)]
    share = {"evaluation_seconds": (time.perf_counter() - started) / max(1, sum(due))}
    return [found | share if turn else {} for found, turn in zip(metrics, due, strict=True)]


def evaluate(objective: Objective, x: Tensor, buffers: Buffers, data: Dataset) -> dict[str, float]:
    """The mean loss of a model on data and its accuracy where that has a meaning, see `Objective.correct`."""
    return named(measure(objective, x, buffers, data))


def measure(objective: Objective, x: Tensor, buffers: Buffers, data: Dataset) -> Tensor:
    """The mean loss and, where there is one, the accuracy, still on the device."""
    losses, correct = predict(objective, x, buffers, data)
    return torch.stack([values.double().mean() for values in (losses, correct) if values is not None])


def named(measured: Tensor) -> dict[str, float]:
    """What `measure` found, by name; one wait for a GPU."""
    return dict(zip(("loss", "accuracy"), measured.tolist(), strict=False))


def predict(objective: Objective, x: Tensor, buffers: Buffers, data: Dataset) -> tuple[Tensor, Tensor | None]:
    """Per-sample losses and, where there is an accuracy, whether each prediction is right (as 0 or 1)."""
    losses, correct = [], []
    batch = EVALUATION_BATCH
    if objective.device.type != "cpu":
        batch = min(max(batch, EVALUATION_NUMBERS_GPU // data.x[0].numel()), MOST_EVALUATED)
    with torch.no_grad():
        for start in range(0, len(data), batch):
            part = slice(start, start + batch)
            inputs = prepare(data.x[part], data.mean, data.std, objective.dtype)
            outputs = objective.outputs(x, buffers, inputs, train=False)
            targets = data.y[part]
            losses.append(objective.loss(outputs, targets))
            hits = objective.correct(outputs, targets, data.classes)
            if hits is not None:
                correct.append(hits)
    return torch.cat(losses), torch.cat(correct) if correct else None


def round_row(
    algorithm: Algorithm, x: Tensor, plan: Round, report: RoundReport, seconds: float
) -> dict[str, float | int]:
    """The metrics of a round, but for its evaluation."""
    models = algorithm.paper_models(plan.number)
    row: dict[str, float | int] = {
        "round": plan.number,
        "lr": plan.lr,
        "clients": len(plan.cohort),
        "steps": int(plan.steps.sum()),
        "train_loss": report.train_loss,
        "consistency": report.consistency,
        "update_norm": report.update_norm,
        "bytes_down": report.bytes_down,
        "bytes_up": report.bytes_up,
        "seconds": seconds,
    }
    if models is not None:  # the papers' own counting, beside what really travels
        row["paper_bytes"] = models * x.numel() * x.element_size() * len(plan.cohort)
    return row | {f"trust_ratio/{layer}": value for layer, value in report.trust_ratios.items()}


def refuse_nonfinite(row: Row) -> None:
    """Raise `Diverged` for a round whose weights are finite but whose test loss is not."""
    if not math.isfinite(row.get("loss", 0.0)):
        raise Diverged(
            f"round {row['round']}: the test loss of the new model is {row['loss']}; "
            f"lower the learning rate (now {row['lr']:g}) or clip the gradients. All rounds are kept",
            round=int(row["round"]),
            client=None,
            layer="loss",
        )


def _check_kind(name: str, value: Any, kind: Any, wanted: str) -> None:
    if not isinstance(value, kind):
        shown = f"the class {value.__name__}" if isinstance(value, type) else repr(value)
        raise BadInput(f"{name} is {shown}: give {wanted}")


def choose_device(device: str | torch.device) -> torch.device:
    """The device to run on: "auto" takes a GPU if there is one."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
        torch.empty(0, device=chosen)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise BadInput(f"device '{device}' cannot be used here: {reason}") from error
    return chosen


def check_model_fits(model: nn.Module, device: torch.device) -> None:
    """Refuse a model whose training cannot fit the memory: before it is copied, in words that help."""
    tensors = [*model.parameters(), *model.buffers()]
    if any(map(is_lazy, tensors)):
        return  # a lazy layer: its size is not known yet
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    count = sum(tensor.numel() for tensor in model.parameters())
    # one copy is the caller's own, which lies in the host's memory already
    copies = MODEL_COPIES - 1 if device.type == "cpu" else MODEL_COPIES
    check_memory(f"training a model of {count:,} parameters", copies * size, "take a smaller model", device)


def deal(data: Dataset, clients: int | Sequence[Any] | None, partition: Any, seed: int) -> Clients:
    """Deal the samples of a data set to clients."""
    if isinstance(clients, str | bool | float | dict):
        raise BadInput(f"clients = {clients!r} is neither a whole number nor one list of samples per client")
    if clients is not None and not is_whole(clients):
        if partition is not None:
            raise BadInput("partition deals samples to a number of clients, and clients are lists: give one of them")
        return Clients(cast(Sequence[Any], clients), samples=len(data))
    partition = "iid" if partition is None else partition
    chosen = make_partition(partition) if isinstance(partition, str) else partition
    if clients is None and not isinstance(chosen, ByColumn):
        clients = DEFAULT_CLIENTS
    clients = None if clients is None else check_count("clients", clients, MOST_CLIENTS)
    if isinstance(chosen, Reallocate):
        return Clients.reallocated(chosen, data.labels, clients or 0, seed, samples=len(data))
    return Clients(split_dataset(chosen, data, clients, seed), samples=len(data))


def choose_engine(wanted: str | Simulation, precision: Precision, **settings: Any) -> Loop | Stacked:
    """The engine to run on; "auto" takes the fastest the model allows, and logs why if that is not the stacked one."""
    if isinstance(wanted, Simulation):
        lent = _lent_engine(wanted, precision, **settings)
        if lent is not None:
            return lent
    name = wanted.engine_name if isinstance(wanted, Simulation) else wanted
    if name not in ("auto", "stacked", "vmap", "loop"):
        raise unknown("engine", name, ("auto", "stacked", "vmap", "loop"))
    if name in ("loop", "vmap") and precision == "bf16":
        raise BadInput(f"precision='bf16' needs stacked layers: engine='{name}' computes in the model's own precision")
    engine = _fastest_engine(name, precision, **settings)
    if precision == "bf16" and not (isinstance(engine, Stacked) and engine.forward.name == "stacked"):
        log.warning("precision='bf16' needs stacked layers: this run computes in the model's own precision")
    return engine


def _lent_engine(lender: Simulation, precision: Precision, **settings: Any) -> Loop | Stacked | None:
    """The engine that a simulation of the same model found to fit; None if there is something to find out."""
    objective, engine = settings["objective"], lender.engine
    here = (lender.objective.device, lender.precision) == (objective.device, precision)
    kinds = [(d.x.shape[1:], d.x.dtype, d.y.shape[1:], d.y.dtype) for d in (lender.train_data, settings["data"])]
    if not here or kinds[0] != kinds[1] or lender.objective.difference(objective):
        return None
    if isinstance(engine, Loop):
        return Loop(**settings, why=engine.why)
    algorithm = settings["algorithm"]
    if type(algorithm) is not type(lender.algorithm):
        return None  # see _fastest_engine
    return Stacked(forward=engine.forward, **settings)


def _fastest_engine(name: str, precision: Precision, **settings: Any) -> Loop | Stacked:
    if name == "loop":
        return Loop(**settings)
    data, objective = settings["data"], settings["objective"]
    chosen = probe_samples(data.x)
    sample = prepare(data.x[chosen], data.mean, data.std, objective.dtype), data.y[chosen]
    if is_random(objective, sample[0]):
        forward, why = None, UNCONTROLLED
    else:
        forward, why = choose_forward(objective, sample, precision, name)
    if forward is not None and not works_by_row(settings["algorithm"]):
        forward, why = None, "several clients' step is not each one's own step (a branch on a tensor's value?)"
    if forward is None:
        if name != "auto":
            raise BadInput(f"engine='{name}' is not possible here: {why}; engine='auto' falls back by itself")
        log.info("running client by client: %s", why)
        return Loop(**settings, why=why)
    if why and name == "auto":
        log.info("using torch.func.vmap instead of stacked layers: %s", why)
    if objective.device.type == "cpu":
        keep_freed_memory()
    return Stacked(forward=forward, **settings)
