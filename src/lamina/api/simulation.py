"""`Simulation`: a federation on one machine. The Python API in one class.

`__init__` turns the user's arguments into objects. The base class in training.py builds the parts of a run from them,
and its `run_round` trains one round. This file adds progress bars, run folders (`out`) and checkpoints.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import torch
from torch import nn

from lamina.algorithms.contract import Algorithm
from lamina.base.errors import BadInput
from lamina.base.limits import check_count
from lamina.base.registry import field_values
from lamina.base.text import html_table, plural
from lamina.data.partitions import as_partition
from lamina.engines.choice import EngineName
from lamina.engines.devices import Precision, choose_device
from lamina.engines.ranks import Ranks
from lamina.engines.stacked.engine import Stacked
from lamina.models.registry import Factory
from lamina.objective.objective import copy_module
from lamina.rounds.clients import Heldout, client_number
from lamina.rounds.settings import TrainArguments, TrainSettings
from lamina.storage.identity import of_run
from lamina.training.history import History, Row
from lamina.training.inputs import as_algorithm, as_splits
from lamina.training.metrics import find_all
from lamina.training.progress import python_bars
from lamina.training.training import RunOptions, Training, check_on_round

if TYPE_CHECKING:
    from lamina.api.describe import Recorder
    from lamina.storage.checkpoint import Checkpoints


class Simulation(Training):
    """Train a module with a federated algorithm over simulated clients.

    Every random choice follows from `seed`: two simulations with the same arguments give the same history (on a GPU to
    rounding, or bit for bit with `deterministic`), and two algorithms with the same seed see the same clients and
    batches.

    >>> import torch, lamina
    >>> x, y = torch.randn(200, 5), torch.randint(0, 3, (200,))
    >>> simulation = lamina.Simulation(torch.nn.Linear(5, 3), (x, y), "fedlamb", clients=10, seed=0)
    >>> history = simulation.run(2)
    >>> len(history), sorted(history[0])[:3]
    (2, ['bytes_down', 'bytes_up', 'clients'])

    Args:
        model: any module; it is copied, and its trainable parameters are the start. Or a function that returns a new
            module, or a model's name: their weights depend on the seed. A function with arguments `input_shape` and
            `classes` receives them from the data. It may return a tensor, or a tuple, a dict or an object of tensors,
            of which losses and metrics by name take `.logits`, ["logits"] or the first element.
        train: the training data: a `Dataset`, a pair (x, y), a torch or a `datasets` data set; x may be a tensor (or
            array, list, table), a tuple or a dict of them: the model is called as ``model(x)``, ``model(*x)`` or
            ``model(**x)``. y may be a tuple or a dict as well, for a loss of yours. Or training and test data: the
            result of `lamina.data.load` or `Dataset.holdout`, or the name of a data set. Or a list with the data set of
            every client, or a dict with their names: then `clients` and `partition` are left out, and `test` may be by
            client as well.
        algorithm: an algorithm, the name of one (its defaults), or a table {"name": "fedlamb", "decay": 0.01}.
        test: data to evaluate on; without it, metrics and loss are not reported. A dict names several test sets: runs
            are judged by the first, and the columns of the others end with their name, as in ``accuracy@noisy``.
            Without it, runs are judged by the mean of `local_test` over clients, if it is given.
        metrics: what to report besides the loss, by names, functions of (outputs, targets) or `lamina.Metric` objects;
            the first is the one that runs are judged by. Unless given: the accuracy where there is one (class labels
            and one output per class, or one logit for labels 0 and 1; never with loss="mse"), else the loss.
        clients: number of clients (10 unless the partition names them), or a list of sample indices for each; no
            sample may be given out twice.
        partition: how samples are dealt to a number of clients: a partition object, the name of one (default "iid"), or
            a table as in an experiment file, {"name": "dirichlet", "alpha": 0.3}.
        heldout_clients: clients that never train, to evaluate on: a fraction of the clients, a list of their numbers
            or, as text, of their values in the column of `ByColumn`.
        local_test: fraction of every client's samples that it does not train on, to evaluate on.
        participation: fraction of the clients that take part in a round; default 1 (in an experiment file, 0.5).
        sampling: "exact" (the default): exactly that fraction; "bernoulli": an independent coin per client.
        cohort_cap: the most clients of a "bernoulli" cohort; of a larger one, a random subset takes part.
        min_separation: the least number of rounds between two rounds of a client, counted as their difference: with 10,
            a client of round 3 is not in rounds 4 to 12. Every round draws from another group of clients.
        batch_size: samples per local step; default 32. None: all of the client's.
        epochs: passes of a client over its data in a round; default 1.
        local_steps: a fixed number of local steps instead of epochs.
        lr: the local learning rate; default: the algorithm's card.
        schedule: the learning rate over rounds: a schedule object or the name of one.
        clip: largest norm of a mini-batch gradient. An algorithm with the option `clip_direction` set clips the
            direction of its step instead.
        weighting: "clients" (the default): all clients count the same; "examples": by their number of samples.
        aggregation: how the server combines what the clients send: "mean", "median", "trimmed_mean",
            "centred_clipping", or an object such as `lamina.aggregation.TrimmedMean(0.1)`. All but the mean keep the
            uploads of the whole cohort in memory.
        channel: what an upload passes on its way to the mean, to send fewer bytes: a codec ("bf16", "fp16", "qsgd",
            "sign", "topk", "randk", "sketch", or a table with a name and options), a list of codecs, or a table as the
            section ``[channel]`` of an experiment file, such as {"codec": "sign", "feedback": True, "down": "bf16"}.
        privacy: differential privacy for every client: a table as the section ``[privacy]`` of an experiment file, such
            as {"bound": 1.0, "epsilon": 8, "rounds": 100, "delta": 1e-5}, or a `lamina.channel.privacy.Privacy`, which
            explains each key. Uploads are clipped, their mean gets noise, and the history has the column ``epsilon``.
        loss: a name in `lamina.losses.LOSSES` (default "cross_entropy"), "module:function", or a function of (outputs,
            targets), all that the model returns and the targets, that returns one loss per sample [n];
            `lamina.losses.per_batch(function)` for one that returns a single number for a batch.
        augmentation: random crop and flip of training images, such as `lamina.data.Augment(pad=4)`, or a function of
            (batch, generator) that returns the changed batch, by itself or as "module:function": the batch is one
            client's inputs of one local step as the model gets them, images normalised; the generator, on the batch's
            device, follows from the seed, the round, the client and the step. On a GPU the loop calls such a function.
        private: patterns of names, such as ["head.*"] or ["*.bn*"]: parameters and buffers that are never sent. Each
            client trains and keeps its own, from the initial values on. The metrics of `local_test` and
            `client_metrics` are then those of the clients' own models, and columns that begin with `shared_` are
            those of the shared model; the test data see the shared model with the initial private values. Runs are
            judged by the mean of `local_test` over clients.
        clock: how fast clients compute and send, by name ("lan", "fibre", "home", "4g", "mixed"), as a table such as
            {"name": "4g", "step_seconds": 0.2} or as a `lamina.Clock`: adds the column ``clock_seconds``, the time
            that the rounds would take on such a network. With `deadline` or `over_select` in it, rounds do not wait
            for slow clients.
        seed: the source of all randomness; default 0.
        device: "auto" (a GPU if there is one), or any torch device.
        engine: "stacked" (clients as one model), "captured" (the model as it is, replayed on a GPU) or "loop";
            "auto" takes the fastest that fits the model.
        precision: the model's arithmetic: "fp32", "tf32", or "bf16" (weights and optimiser state stay float32).
        deterministic: on a GPU, the same bits in every run on the same machine, at some cost; a CPU gives them anyway.
        evaluate_every: evaluate on the test data after every n-th round, and at the end of `run`.
        patience: stop when the first metric on the test data has not improved in so many evaluations, not counting
            those that only the end of `run` asked for.
        client_metrics: also report the metrics on every client's own training data (mean, worst 10 % and spread).
        trust_ratios: also report the trust ratios of the layer-wise methods, of every client's last local step.
        diagnostics: quantities of the papers' theory to report in the rounds that are evaluated, by name: "gradient",
            "pseudo_gradient" (each one pass over the training data), "drift" (trains the round again, client by
            client), "amendment" and "second_moment" (free).
        out: a folder for the records, checkpoints and the trained model, as `lamina run` writes it. A simulation with
            the same arguments and folder resumes there: `run` does not train the rounds again that the folder holds.
            With other arguments, the folder is refused.
        overwrite: replace what the folder holds, whatever it is.
        accept_changed_code: resume in the folder, or `restore`, although your code has changed since; the folder's
            environment.json and log record that.
    """

    def __init__(
        self,
        model: nn.Module | Factory | str,
        train: Any,
        algorithm: Algorithm | str = "fedlamb",
        *,
        test: Any = None,
        metrics: Any = None,
        clients: int | Sequence[Any] | None = None,
        partition: Any = None,
        heldout_clients: Heldout | None = None,
        local_test: float | None = None,
        device: str | torch.device = "auto",
        engine: EngineName = "auto",
        precision: Precision = "fp32",
        deterministic: bool = False,
        evaluate_every: int = 1,
        patience: int | None = None,
        client_metrics: bool = False,
        trust_ratios: bool = False,
        diagnostics: Sequence[str] = (),
        out: str | Path | None = None,
        overwrite: bool = False,
        accept_changed_code: bool = False,
        **settings: Unpack[TrainArguments],
    ) -> None:
        # the checks that need no data come first: a mistake costs no time
        if partition is not None:
            as_partition(partition)
        if out is not None and not overwrite:
            from lamina.experiment.runs.records import kept_engine

            engine = kept_engine(Path(out), engine)
        options = RunOptions(
            engine=engine,
            precision=precision,
            deterministic=deterministic,
            evaluate_every=evaluate_every,
            client_metrics=client_metrics,
            trust_ratios=trust_ratios,
            diagnostics=diagnostics,
        )
        chosen_metrics = find_all(metrics)
        algorithm = as_algorithm(algorithm)
        arguments = inspect.signature(Simulation).parameters
        for_run = {
            name: f": give it to run, simulation.run({name}=…)" for name in inspect.signature(self.run).parameters
        }
        protocol = TrainSettings.of(algorithm, settings, arguments, for_run)  # validated, with the defaults filled in
        chosen_device = choose_device(device)
        train_data, test_data = as_splits(train, test)
        super().__init__(
            model,
            train_data,
            test_data,
            algorithm,
            protocol,
            options,
            device=chosen_device,
            clients=clients,
            partition=partition,
            heldout_clients=heldout_clients,
            local_test=local_test,
            metrics=chosen_metrics,
            patience=patience,
        )
        self._accept_changed_code = accept_changed_code
        self._checkpoints: Checkpoints | None = None  # of the folder that `save` or `restore` used last

        # with a folder, the recorder trains in place of `Training.run`
        self._requested = 0  # rounds, by all calls of `run`; those that the folder already holds count
        self._recorder: Recorder | None = None
        self.out = None if out is None else Path(out)
        if self.out is not None:
            from lamina.api.describe import Recorder

            self._recorder = Recorder(
                self.out,
                overwrite=overwrite,
                model=model,
                data=train if isinstance(train, str) else train_data,  # converted only once
                test=test if isinstance(train, str) else test_data,
                algorithm=algorithm,
                clients=clients,
                partition=partition,
                settings={
                    **settings,
                    **field_values(options),
                    "diagnostics": list(diagnostics or ()) or None,
                    "accept_changed_code": accept_changed_code,
                    "device": self.device,
                    "metrics": metrics,
                    "heldout_clients": heldout_clients,
                    "local_test": local_test,
                    "patience": patience,
                },
            )
            self._recorder.restore(self)

    def run(
        self, rounds: int, on_round: Callable[[Row], None] | None = None, *, progress: bool | None = None
    ) -> History:
        """Train for `rounds` more rounds, or until `patience` stops the run, and return the history.

        With a folder (`out`), rounds that it held when the simulation was created count: the same script, started
        again, trains only what is left.

        Args:
            rounds: how many.
            on_round: called with every finished round's metrics; it may raise StopIteration to end the run after it.
            progress: show a progress bar; by default only in a terminal or a notebook.
        """
        check_on_round(on_round, "row")
        requested = self._requested + check_count("run: rounds", rounds, least=0)
        last = requested if self._recorder is not None else self.state.round + rounds
        if last > self.state.round:
            self.protocol.rate(last)  # refuses a schedule that ends before
        self._requested = requested
        name = self.algorithm.card.title
        with python_bars([name], progress, state="", total=last, completed=self.state.round) as bars:

            def show(row: Row) -> None:
                bars.update(name, row, completed=row["round"])
                if on_round is not None:
                    on_round(row)

            try:
                if self._recorder is not None:
                    self._recorder.run(self, last, show)
                else:
                    super().run(rounds, show)
                if self.state.round < last:
                    self._requested = self.state.round  # `on_round` ended the run
            except BaseException:  # interrupted, say: count the rounds of the next call from those that are trained
                self._requested = self.state.round
                raise
        return self.history

    def client_model(self, client: int | str) -> nn.Module:
        """Return a copy of the model that a client uses, in evaluation mode: with its private parts, if there are any.

        A client that has not taken part yet has their initial values.

        Args:
            client: its key in a dict of data, its value in the client column, or else its number, from 0.
        """
        number = client_number(client, self.reserved.names)
        if not Ranks.current().owns(number):
            raise BadInput(
                f"another process of torchrun keeps what client {client!r} has: ask process "
                f"{number % Ranks.current().world}, or lamina.load the run's folder"
            )
        return copy_module(self.objective.module_at(*self.client_parameters(number))).eval()

    def save(self, folder: str | Path) -> None:
        """Write a checkpoint (safetensors). Later calls with the same folder write only the client states that changed.

        A folder with the checkpoints of another simulation is refused.
        """
        if self._checkpoints is None or self._checkpoints.folder != Path(folder):
            self._checkpoints = self._checkpoints_in(folder)
        self._checkpoints.save(self.state, self.history)

    def restore(self, folder: str | Path) -> None:
        """Restore the newest checkpoint, with its history, of a simulation with the same arguments.

        A checkpoint of other settings is refused. Device, engine, precision, test data and evaluation may differ.
        """
        from lamina.storage.checkpoint import load_newest

        checkpoints = self._checkpoints_in(folder)
        # the stacked engine moves the client states that it needs to its device
        home = torch.device("cpu") if isinstance(self.engine, Stacked) else None
        loaded = load_newest([checkpoints], [self.start()], checkpoints.rounds(), home=home)
        if loaded is None:
            is_run_folder = Path(folder, "config.json").exists()
            hint = f": to resume a run folder, create the simulation with out='{folder}'" if is_run_folder else ""
            raise BadInput(f"no checkpoint of this simulation in '{folder}'{hint}")
        ((self.state, rows),) = loaded
        self.history = History(rows, metric=self.metric)
        self._checkpoints = checkpoints

    def _checkpoints_in(self, folder: str | Path) -> Checkpoints:
        from lamina.storage.checkpoint import Checkpoints  # here: safetensors is not needed to simulate

        identity = of_run(self.algorithm, self.objective, self.plan, self.train_data)
        return Checkpoints(Path(folder), identity, accept_changed_code=self._accept_changed_code)

    def __repr__(self) -> str:
        return f"Simulation({', '.join(f'{name}: {value}' for name, value in self._facts().items())})"

    def _repr_html_(self) -> str:
        facts = html_table(list(self._facts()), [list(self._facts().values())])
        return facts + (self.history._repr_html_() if len(self.history) else "")

    def _facts(self) -> dict[str, str]:
        """Return what a reader wants to know about the simulation, in words."""
        parameters = plural(self.objective.layers.size, "parameter")
        parameters += " trained, the others frozen" if self.objective.frozen else ""
        facts = {
            "algorithm": self.algorithm.card.title,
            "model": f"{type(self.objective.module).__name__}, {parameters}",
            "data": f"{self.train_data.name}, {plural(len(self.train_data), 'sample')}",
            "clients": str(self.plan.clients.count),
            "lr": f"{self.protocol.lr:g}",
            "engine": f"{self.engine.name} on {self.device}",
            "rounds": str(self.state.round),
        }
        if len(self.history) and self.history.metric in self.history.columns:
            facts[f"best {self.history.metric}"] = f"{self.history.best():.4f}"
        return facts
