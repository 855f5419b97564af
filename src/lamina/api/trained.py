"""Trained models out of run folders: `load`, predictions for raw inputs, and evaluation on other data."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from lamina.base import rng
from lamina.base.errors import BadInput, LaminaError, describe_error
from lamina.base.text import plural
from lamina.data.convert import is_frame
from lamina.data.dataset import Dataset
from lamina.data.preprocessing import TablePreprocessing
from lamina.data.readers.new import NewData, read_inputs, read_labelled
from lamina.data.samples import in_form_of, new_inputs, sample_like
from lamina.engines.devices import arithmetic, choose_device, usable_precision
from lamina.experiment.runs.client_state import client_module
from lamina.experiment.runs.model_file import MissingCode, build_loss, build_model
from lamina.experiment.runs.records import Record, read_json, read_record
from lamina.models.registry import Factory
from lamina.objective import losses
from lamina.objective.batch import arguments
from lamina.objective.losses import Loss
from lamina.objective.objective import Objective
from lamina.objective.outputs import elements_of, join_outputs, main_element, map_outputs, outputs_of, sample_axes
from lamina.storage.checkpoint import read_model
from lamina.training.evaluation import EVALUATION_BATCH, Evaluation
from lamina.training.history import History, data_frame
from lamina.training.inputs import as_splits
from lamina.training.masks import with_mask
from lamina.training.metrics import METRICS, find_all

log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False, repr=False)
class Predictions:
    """What a trained model says about some samples, in their order."""

    outputs: Any
    """What the model returns: a tensor, or a tuple, a dict or an object of them."""
    class_names: tuple[str, ...] | None
    _like: Dataset
    _loss: Loss | None
    _count: int

    def __len__(self) -> int:
        return self._count

    @property
    def _main(self) -> Tensor:
        """The outputs that the loss is about."""
        return outputs_of(self.outputs)

    @cached_property
    def _class_axis(self) -> int | None:
        """The axis of the outputs that holds the classes; None for one output per target."""
        targets, classes = self._like.y.dim(), self._like.classes or 1
        axis = None if self._loss is None else losses.class_axis(self._loss)
        if axis is None and self._main.dim() == targets + 1 and self._main.shape[1] >= max(2, classes):
            axis = 1
        return None if self._is_binary else axis

    @property
    def _is_binary(self) -> bool:
        is_single = losses.shape(self._main) == losses.shape(self._main)[:1] and (self._like.classes or 3) <= 2
        return is_single if self._loss is None else losses.is_binary(self._loss) or is_single

    @cached_property
    def labels(self) -> Tensor | None:
        """The number of the most likely class of every sample (token, pixel).

        None for a regression, and for a dict or an object of which no element is the logits.
        """
        is_regression = self._loss is not None and losses.is_regression(self._loss)
        if self._like.classes is None or is_regression or main_element(self.outputs) is None:
            return None
        if self._is_binary:
            return (self._main.reshape(self._main.shape[: self._like.y.dim()]) > 0).long()
        return None if self._class_axis is None else self._main.argmax(self._class_axis)

    @property
    def classes(self) -> NDArray[Any] | None:
        """The most likely class of every sample: its name, or its number if the classes have no names."""
        if self.labels is None:
            return None
        numbers = np.asarray(self.labels)
        return numbers if self.class_names is None else np.array(self.class_names)[numbers]

    @cached_property
    def probabilities(self) -> Tensor | None:
        """The probability of every class, or of the class 1 where there is one output for two.

        None for a regression, and with a loss of your own, of which lamina does not know what the outputs mean.
        """
        loss = self._loss
        if loss is None or losses.is_user_defined(loss):
            return None
        outputs = self._main.float()
        if losses.is_binary(loss):
            return outputs.sigmoid()
        if self._class_axis is None or self._like.classes is None:
            return None
        return outputs.exp() if loss is losses.nll else outputs.softmax(self._class_axis)

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield the prediction for every sample, with the probabilities of its classes, as cells of a table."""
        columns = self._columns()
        for cells in zip(*columns.values(), strict=True):
            yield dict(zip(columns, cells, strict=True))

    def to_pandas(self) -> Any:
        """Return a DataFrame: the column ``prediction``, and ``probability_<class>`` for every class.

        A dict or an object without logits has ``prediction_<element>`` for every number of every element instead.
        """
        return data_frame(list(self.rows()), "predictions.to_pandas()")

    def _columns(self) -> dict[str, list[Any]]:
        """Return the columns of the table; refuse predictions that are none, as for every pixel of an image."""
        if main_element(self.outputs) is None:
            return self._columns_of_elements()
        outputs, classes, probabilities = self._main, self.classes, self.probabilities
        several = outputs if classes is None else self.labels
        assert several is not None
        if several.dim() > 2 or (classes is not None and several.dim() > 1):
            raise BadInput(
                f"a sample has predictions of shape {list(several.shape[1:])}, which are no row of a table: use "
                "predictions.outputs or predictions.classes"
            )
        if classes is None:
            values = outputs if probabilities is None else probabilities
            values = values.reshape(len(values), -1)
            names = self._like.column_names.get("y", range(values.shape[1]))
            ends = [f"_{name}" for name in names] if values.shape[1] > 1 else [""]
            return {f"prediction{end}": column for end, column in zip(ends, values.T.tolist(), strict=True)}
        table = {"prediction": classes.tolist()}
        if probabilities is None:
            return table
        probabilities = probabilities.reshape(len(probabilities), -1)
        if probabilities.shape[1] == 1:
            probabilities = torch.cat([1 - probabilities, probabilities], 1)
        names = self.class_names or range(probabilities.shape[1])
        return table | {f"probability_{n}": p for n, p in zip(names, probabilities.T.tolist(), strict=False)}

    def _columns_of_elements(self) -> dict[str, list[Any]]:
        """Return the columns of outputs of which no element is the main one: those of all elements."""
        columns: dict[str, list[Any]] = {}
        for name, values in elements_of(self.outputs).items():
            if not isinstance(values, Tensor) or values.dim() not in (1, 2) or len(values) != len(self):
                shape = f" of shape {list(values.shape)}" if isinstance(values, Tensor) else ""
                raise BadInput(
                    f"the model's output {name} ({type(values).__name__}{shape}) is no number or row of numbers for "
                    f"each of {plural(len(self), 'sample')}: use predictions.outputs"
                )
            parts = values.reshape(len(values), -1).T.tolist()
            ends = [f"_{number}" for number in range(len(parts))] if len(parts) > 1 else [""]
            plain = name.strip("[].'")  # as code has it: ['mean'], .mean
            columns |= {f"prediction_{plain}{end}": column for end, column in zip(ends, parts, strict=True)}
        return columns

    def __repr__(self) -> str:
        kind = "outputs" if self._like.classes is None else "classes"
        return f"Predictions({kind} for {plural(len(self), 'sample')})"


class TrainedRun:
    """A run as read from its folder, with its trained model; `lamina.load` returns it."""

    folder: Path
    model: nn.Module
    """The trained module, in evaluation mode."""
    history: History
    """The metrics of every round."""
    config: dict[str, Any]
    """All settings of the run, as in its config.json."""
    class_names: tuple[str, ...] | None
    """The names of the classes, by number."""
    preprocessing: TablePreprocessing | None = None
    """How the features of the training table were made; `predict` prepares new tables with it."""
    client_name: int | str | None = None
    """The client whose own model this is; None: the shared model."""

    def __init__(
        self, record: Record, model: nn.Module, facts: Mapping[str, Any], device: torch.device, is_best: bool = False
    ) -> None:
        self._record, self._is_best = record, is_best
        self.folder, self.config, self.history = record.folder, record.config, record.history
        self.model = model.to(device).eval()
        self._has_warned = False
        self._facts, self._device, self._like = facts, device, sample_like(facts["samples"])
        self.class_names = None if self._like.class_names is None else tuple(self._like.class_names)
        stored = self.folder / "preprocessing.json"
        if stored.exists():
            self.preprocessing = TablePreprocessing.from_json(stored.read_text())
        precision = self.config["run"].get("precision", "fp32")
        self._precision = usable_precision(precision, device)
        kinds = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
        self._dtype = next(iter(kinds)) if len(kinds) == 1 else torch.float32

    def client(self, client: int | str) -> TrainedRun:
        """Return the run with the model that a client uses for itself: with its private parts, or the algorithm's.

        Args:
            client: its key in a dict of data, its value in the client column, or else its number, from 0.
        """
        if self._is_best:
            raise BadInput("the best model is the shared one: for a client's, load the run without best")
        module = client_module(self.folder, self.config, self._facts, self.model, client)
        personal = TrainedRun(self._record, module, self._facts, self._device)
        personal.client_name = client
        return personal

    def predict(self, x: Any) -> Predictions:
        """Return the model's predictions for raw inputs.

        Args:
            x: inputs in any form that training data may have, without targets: arrays, tensors, lists, PIL images,
                token ids, a table, a tuple or a dict of them, or the path of a file or folder; of a table also one row,
                a dict of its values or a list of such dicts. They are prepared as the training data were: normalised,
                padded, columns found by name.
        """
        self._warn_of_private_parts()
        if isinstance(x, str | Path):
            x = self.read(x).x
        columns = self._like.column_names.get("x", ())
        if self.preprocessing is not None:
            columns = tuple(column.name for column in self.preprocessing.columns)
        x = _as_table(x, columns) if columns else x
        is_array = isinstance(x, list) or (getattr(x, "ndim", 0) > 1 and not is_frame(x))
        if self.preprocessing is not None and is_array:
            log.warning("an array is taken as features that are prepared already: for raw values, give a table")
        if self.preprocessing is not None and is_frame(x):
            x = self.preprocessing.transform(x)
        data = with_mask(new_inputs(x, self._like), self.model)

        def outputs(rows: NDArray[Any]) -> Any:
            args, kwargs = arguments(data.subset(rows).to(self._device).inputs(slice(None), self._dtype))
            try:
                return map_outputs(Tensor.cpu, self.model(*args, **kwargs))
            except LaminaError:
                raise
            except Exception as error:  # whatever a user's forward raises
                raise BadInput(f"the model fails for {data!r}: {describe_error(error)}") from error

        batches = [np.arange(i, min(i + EVALUATION_BATCH, len(data))) for i in range(0, len(data), EVALUATION_BATCH)]
        with torch.no_grad(), rng.forked(self._device, seed=0), arithmetic(self._precision):
            results = [outputs(rows) for rows in batches]
            whole = results[0]
            if len(results) > 1:
                axes = sample_axes(lambda samples: outputs(np.arange(samples)))
                whole = join_outputs(results, [len(rows) for rows in batches], axes)
        try:
            loss = build_loss(self._facts["loss"])
        except BadInput:  # predictions do not need it
            loss = None
        return Predictions(whole, self.class_names, self._like, loss, len(data))

    def read(self, path: str | Path) -> NewData:
        """Return the raw inputs in a file, for `predict`, and the columns that tell its rows apart."""
        return read_inputs(Path(path), self.config["data"], self._like, self.preprocessing)

    def evaluate(self, data: Any, *, metrics: Any = None, loss: Any = None) -> dict[str, float]:
        """Return the loss and the metrics of the model on data with targets.

        Args:
            data: as the test data of a `Simulation`: a pair (x, y), a `Dataset`, a torch or `datasets` data set; of
                training and test data, the test data count. If the run's data were ``table``, also a pandas table or a
                file with the label column.
            metrics: as for `Simulation`; the run's metrics unless given.
            loss: the run's loss, if it is your own function and cannot be imported.
        """
        self._warn_of_private_parts()
        if self.preprocessing is not None and (isinstance(data, str | Path) or is_frame(data)):
            data = read_labelled(data, self.config["data"], self._like, self.preprocessing)
        whole, test = as_splits(data)
        new = in_form_of(whole if test is None else test, self._like)
        if (new.classes or 0) > (self._like.classes or 0):
            raise BadInput(f"the data have {new.classes} classes, and the model was trained on {self._like.classes}")
        objective = Objective(self.model, build_loss(self._facts["loss"]) if loss is None else loss)
        evaluation = Evaluation(self._metrics(metrics), with_mask(new, self.model).to(self._device))
        with arithmetic(self._precision):
            return evaluation.run(objective, objective.start, objective.buffers)

    def _warn_of_private_parts(self) -> None:
        """Warn once if the shared model is used and some of its parts are not trained."""
        private = self.config["train"].get("private")
        if private and self.client_name is None and not self._has_warned:
            self._has_warned = True
            clients = self._facts.get("clients")
            first = clients[0] if isinstance(clients, list) else 0
            way = f"for the model of a client, use run.client({first!r}) (lamina predict --client {first})"
            way = "those of the clients never leave their nodes" if "federation" in self.config else way
            log.warning(
                "the private parts of the shared model (%s) have the values from before round 1: %s",
                ", ".join(map(str, private)), way,
            )  # fmt: skip

    def _metrics(self, given: Any) -> Any:
        """Return the metrics to compute: the given ones, or those of the run."""
        names = self.config["train"].get("metrics") if given is None else None
        for name in names or ():
            if ":" not in name and name not in METRICS:
                code = self._facts["own_metrics"].get(name, name)
                raise MissingCode(f"the run's metric '{name}' is your own function '{code}': give metrics=[…] with it")
        try:
            return find_all(names if given is None else given)
        except BadInput as error:
            if given is not None:
                raise
            raise MissingCode(f"the run's metric is your own: {error}; give metrics=[…] with it") from error

    def __repr__(self) -> str:
        data, algorithm = self.config["data"]["name"], self.config["algorithm"]["name"]
        rounds = plural(len(self.history), "round")
        whose = "" if self.client_name is None else f" of client {self.client_name!r}"
        return f"TrainedRun('{self.folder}', {type(self.model).__name__}{whose}, {algorithm} on {data}, {rounds})"


def _as_table(x: Any, columns: Sequence[str]) -> Any:
    """Return rows as a table: a row of one, a dict of values or of columns, a list of dicts; other data as they are."""
    if isinstance(x, Mapping):
        has_several = any(isinstance(value, list | tuple) or getattr(value, "ndim", 0) for value in x.values())
        return data_frame(dict(x) if has_several else [x], "run.predict(a dict)")
    if isinstance(x, list) and x and all(isinstance(row, Mapping) for row in x):
        return data_frame(x, "run.predict(a list of dicts)")
    is_row = hasattr(x, "to_dict") and getattr(x, "ndim", 0) == 1 and any(str(name) in columns for name in x.index)
    return data_frame([x.to_dict()], "run.predict(a row)") if is_row else x


def load(
    folder: str | Path,
    *,
    model: nn.Module | Factory | None = None,
    best: bool = False,
    device: str | torch.device = "auto",
) -> TrainedRun:
    """Return a trained run from its folder, which `lamina run` or ``Simulation(out=…)`` wrote.

    >>> import tempfile, torch, lamina
    >>> x, y = torch.randn(60, 5), ["left", "right"] * 30
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = lamina.Simulation(torch.nn.Linear(5, 2), (x, y), "fedavg", clients=4, out=folder).run(1)
    ...     run = lamina.load(folder)
    >>> run.predict(x[:3]).probabilities.shape, run.class_names
    (torch.Size([3, 2]), ('left', 'right'))

    The folder holds all that this needs except for code of your own, which is imported; nothing is unpickled.

    Args:
        folder: the run's folder.
        model: the module, or the function or class that makes it, if the model is your own and cannot be imported.
        best: take the model of the best round on the test data, not that of the last round.
        device: where predictions are computed: "auto" takes a GPU if there is one.
    """
    folder = Path(folder)
    record = read_record(folder)
    weights_file = folder / ("best.safetensors" if best else "model.safetensors")
    if not weights_file.exists():
        advice = "it is written when the run ends" + "; best=True takes the best model so far" * (not best)
        raise BadInput(f"'{folder}' has no {weights_file.name} ({advice})")
    if not (folder / "model.json").exists():
        raise BadInput(
            f"'{folder}' has no model.json, which says how its model is used (a federation whose server evaluates "
            "nothing writes none, nor did lamina 0.2): load the weights with read_model of lamina.storage.checkpoint"
        )
    facts = read_json(folder / "model.json")
    try:
        module = build_model(facts["model"], sample_like(facts["samples"]), model)
        frozen = set(facts["model"]["frozen"])
    except LaminaError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise BadInput(f"'{folder / 'model.json'}' does not describe a model ({error!r}): restore it") from error
    weights = read_model(weights_file)
    kinds = {name: tensor.dtype for name, tensor in module.state_dict().items()}
    try:
        module.load_state_dict(weights, assign=any(kinds.get(name) != t.dtype for name, t in weights.items()))
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        raise BadInput(f"the weights of '{folder}' do not fit the model: {reason}") from error
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(name not in frozen)
    return TrainedRun(record, module, facts, choose_device(device), is_best=best)
