"""The node's side: train one client as the reference engine does, on data that never leave the node."""

from __future__ import annotations

import dataclasses
import functools
import logging
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MessageType, RecordDict
from flwr.clientapp import ClientApp
from torch import Tensor

from lamina.algorithms.contract import ClientInfo, ServerInfo
from lamina.base.errors import BadInput, Diverged, LaminaError
from lamina.base.finite import all_finite
from lamina.base.text import printable
from lamina.channel.channel import OPEN, Channel, Link
from lamina.data.dataset import Dataset
from lamina.engines.divergence import diverged
from lamina.engines.loop import Loop
from lamina.engines.personal import client_broadcast, client_result, first_record, pass_channel, personal_model, unpack
from lamina.engines.state import copy_buffers
from lamina.experiment.build import THREADED_FROM
from lamina.flower import signing, wire
from lamina.flower.setup import Setup
from lamina.flower.store import Store
from lamina.flower.wire import Task
from lamina.objective.objective import Buffers, Objective
from lamina.rounds.clients import Clients
from lamina.rounds.plan import Plan, RoundPlan
from lamina.rounds.settings import TrainSettings, is_own_augmentation, own_name
from lamina.storage.files import state_folder
from lamina.training.evaluation import sample_means
from lamina.training.preflight import check_evaluation, check_training
from lamina.training.preflight.inputs import check_augmentation

log = logging.getLogger(__name__)
MAX_SAMPLES_PER_ROUND = 10**8  # that a task may have a node train on


class Missing(Exception):
    """The server relies on files that this node does not hold."""

    def __init__(self, names: list[str]) -> None:
        super().__init__(f"does not hold {', '.join(names)}")
        self.names = names


class Node(ClientApp):
    """Flower's app of a node: answers the server's messages."""

    def __init__(self, setup: Setup) -> None:
        super().__init__()
        self.setup, self.algorithm = setup, setup.algorithm
        self.training_seconds = 0.0  # of the last local training

    def __call__(self, message: Message, context: Context) -> Message:
        """Answer a message; a problem is reported in one line, and no exception is raised.

        An exception's own text stays on the node: it may quote the node's data.
        """
        token, content, problem = "", RecordDict(), {}
        answers = {
            MessageType.TRAIN: self.send_update,
            MessageType.EVALUATE: self.send_evaluation,
            wire.GRADIENT: self.send_gradient,
        }
        try:
            token = wire.token_of(message.content)
            signing.authenticate(message, context)
            if message.metadata.message_type not in answers:
                raise BadInput(f"refused a message of an unknown type: {wire.SAME_VERSION}")
            content = answers[message.metadata.message_type](message.content, context)
        except Missing as error:
            problem = {"text": str(error), "missing": error.names}
        except Diverged as error:
            problem = {"text": str(error), "diverged": error.layer}
        except LaminaError as error:
            text = own_words(error)
            log.warning("round %s: %s", message.metadata.group_id or "-", text)
            problem = {"text": wire.shorten(text, 1000)}
        except Exception as error:
            log.exception("this node cannot answer a message of the server")
            problem = {"text": f"its app raised {type(error).__name__}; the node's own log says more"}
        if problem:
            content = wire.content_of({"problem": problem})
        content[wire.ANSWER] = ConfigRecord({"to": token})
        return Message(content, reply_to=message)

    def send_update(self, content: RecordDict, context: Context) -> RecordDict:
        """Train locally for one round; the client's new state is on disk before the update is sent."""
        task, store, data = self._begin(content, context)
        objective, sent_down, record = self.objective, *self._given(content, task, store)
        loop, plan = Loop(self.algorithm, objective, data, self._protocol(task)), self._plan(task, data)
        needs = self.algorithm.needs(task.round)
        info = ClientInfo(task.round, task.protocol.lr, objective.layers, steps=float(plan.steps[0]))
        kept = unpack(record)
        x, start_buffers = personal_model(objective, sent_down.x, self._buffers(content), record)
        gradient, is_own = None, needs.control_variate and kept.server is not None
        if needs.full_gradient or is_own:
            held = store.load_held("own-gradient", task.gradient) if task.gradient else None
            gradient = loop.full_gradient(x, start_buffers, plan, 0) if held is None else held.to(x.device)
        if needs.full_gradient:
            info = info._replace(full_gradient=gradient)
        buffers = copy_buffers(start_buffers)
        down = client_broadcast(self.algorithm, objective, sent_down, kept, info, gradient if is_own else None)
        started = time.monotonic()
        local, losses = loop.train_client(down, kept.client, buffers, info, plan, 0)
        self.training_seconds = time.monotonic() - started
        whole_up, client = self.algorithm.finish(local, down, kept.client, info)
        up, new_record = client_result(self.algorithm, objective, kept, (local, whole_up, client), buffers, info)
        if not all_finite(losses, *whole_up, *new_record):
            loop.explain(down, kept.client, start_buffers, info, plan, 0, whole_up)  # raises Diverged
        link = Link.of(objective.shared_layers, plan.streams[0], plan.cohort_stream, objective.device)
        sent, new_record = pass_channel(task.protocol.channel, self.algorithm, up, sent_down, new_record, link)
        store.save_state(task.round, task.token, new_record)
        store.forget_all_but([task.token, task.base, *task.keep])
        figures = {"examples": len(data), "steps": int(plan.steps[0]), "loss": float(losses.mean())}
        moved = {name: wire.encode(value) for name, value in self._sent_buffers(buffers).items()}
        return wire.content_of({"up": wire.pack_upload(up, sent.parts), "buffers": moved, "figures": figures})

    def send_gradient(self, content: RecordDict, context: Context) -> RecordDict:
        """Return the gradient over all local data at x (Mime's first exchange); keep both for the second exchange."""
        task, store, data = self._begin(content, context)
        sent_x = self._sent_model(content, task.protocol.channel)
        record = self._record(sent_x, task, store)
        x, buffers = personal_model(self.objective, sent_x, self._buffers(content), record)
        loop = Loop(self.algorithm, self.objective, data, self._protocol(task))
        gradient = loop.full_gradient(x, buffers, self._plan(task, data), 0)
        if not all_finite(gradient):
            raise diverged(
                self.objective.layers, gradient, task.round, task.protocol.lr, task.client, " (full gradient)"
            )
        store.save_held("x", wire.digest(sent_x), sent_x)
        store.save_held("own-gradient", task.token, gradient)
        up = {"gradient": wire.encode(self.objective.shared_part(gradient))}
        return wire.content_of({"up": up, "figures": {"examples": len(data)}})

    def send_evaluation(self, content: RecordDict, context: Context) -> RecordDict:
        """Evaluate the server's model, with this node's private parts, on its data."""
        task, store = self._accept(content, context)
        data = self.setup.dataset(self.setup.data(context), self.objective)
        if self.setup.node_test is not None:
            data = self.setup.dataset(self.setup.node_test(context), self.objective, data)
        metrics = self.setup.node_metrics
        check_evaluation(self.objective, data, metrics)
        sent_x = self._sent_model(content, OPEN)
        record = self._record(sent_x, task, store)
        x, buffers = personal_model(self.objective, sent_x, self._buffers(content), record)
        x = self.algorithm.client_model(x, unpack(record).client)
        figures = sample_means(self.objective, x, buffers, data, metrics)
        return wire.content_of({"figures": {"examples": len(data), **figures}})

    @functools.cached_property
    def objective(self) -> Objective:
        """The model; its trainable weights are not used, because the server sends its own."""
        objective = self.setup.objective()
        if objective.start.numel() < THREADED_FROM:
            torch.set_num_threads(1)
        return objective

    def state_folder(self, context: Context) -> Path:
        """Return the folder for what this node keeps between rounds."""
        root = context.node_config.get("state-dir") or self.setup.state_dir or state_folder()
        return Path(str(root)).expanduser()

    def _begin(self, content: RecordDict, context: Context) -> tuple[Task, Store, Dataset]:
        task, store = self._accept(content, context)
        self.objective.refuse_rate(task.protocol.lr)
        data = self.setup.dataset(self.setup.data(context), self.objective)
        dry_run = check_training(self.objective, data, min(task.protocol.batch_size or len(data), len(data)))
        check_augmentation(dry_run, self._protocol(task).augmentation)
        return task, store, data

    def _protocol(self, task: Task) -> TrainSettings:
        """Return the settings of a task; the server can only name the augmentation that this node's own app has."""
        named, augmentation = task.protocol.augmentation, self.setup.protocol.augmentation
        if not isinstance(named, str):
            return task.protocol
        if not is_own_augmentation(augmentation) or own_name(augmentation) != named:
            raise BadInput(
                "the server's augmentation is a function that this node's app does not have: run the same app on both "
                "sides"
            )
        return dataclasses.replace(task.protocol, augmentation=augmentation)

    def _accept(self, content: RecordDict, context: Context) -> tuple[Task, Store]:
        """Return the task in a message and the client's store; refuse a task for another node, or a replay."""
        task = Task.read(content)
        if task.app != wire.fingerprint(self.algorithm, self.objective):
            raise BadInput(
                "the server's algorithm, its options, the model's layers, its frozen weights or the initial values of "
                "its private parts are not this node's: run the same app on both sides, and seed the model's weights"
            )
        partition = context.node_config.get("partition-id")  # this node's data follow it
        if partition is not None and str(partition) != str(task.client):
            raise BadInput(
                f"this node is client {task.client} for the server, and its own partition-id is {partition}: "
                "correct the server's list of nodes, or restart the node with the other number"
            )
        store = Store(self.state_folder(context), task.run, task.client)
        store.refuse_replay(task.number)
        return task, store

    def _given(self, content: RecordDict, task: Task, store: Store) -> tuple[Any, Any]:
        """Return the round's Down, from the message and from disk, and what the client kept at its base."""
        start, layers, algorithm = self.objective.shared_start, self.objective.shared_layers, self.algorithm
        mean_gradient = start if algorithm.needs(task.round).control_variate else None
        like_down = algorithm.broadcast(
            algorithm.init(start, layers), ServerInfo(task.round, task.protocol.lr, layers, mean_gradient=mean_gradient)
        )
        wanted = {name for name, value in like_down._asdict().items() if value is not None}
        arrays = wire.entries_of(content, "down", ArrayRecord)
        if {*arrays, *task.held} != wanted:
            names = wire.shorten(", ".join(sorted({*arrays, *task.held} ^ wanted)), 80)
            raise BadInput(
                f"the server's message lacks, or has beside those it needs, the fields {names}: {wire.SAME_VERSION}"
            )
        channel = task.protocol.channel
        likes = channel.narrow(like_down, layers)
        sent = {name: _decode(name, a, getattr(likes, name)).to(self.objective.dtype) for name, a in arrays.items()}
        digests = dict(zip(task.held, task.held_digests, strict=True))
        held: dict[str, Any] = {n: store.load_held(n, digest) for n, digest in digests.items() if n not in sent}
        missing = [name for name, value in held.items() if value is None]
        record, like = None, first_record(algorithm, self.objective, start, channel=channel)
        if task.base and any(value is not None for value in like):
            record = store.load_state(task.base, like)
            missing += ["state"] if record is None else []
        if missing:
            raise Missing(missing)
        for name in algorithm.down_versions(task.round):  # kept from now on, and not sent again
            if name in sent:
                store.save_held(name, wire.digest(sent[name]), sent[name])
        down = like_down._replace(**sent, **{name: value.to(start.device) for name, value in held.items()})
        return down, first_record(algorithm, self.objective, down.x, channel=channel) if record is None else record

    def _sent_model(self, content: RecordDict, channel: Channel) -> Tensor:
        """Return the server's model from a message."""
        like = channel.narrow_vector(self.objective.shared_start, self.objective.shared_layers)
        sent = _decode("x", wire.entries_of(content, "down", ArrayRecord).get("x"), like)
        return sent.to(self.objective.dtype)

    def _record(self, x: Tensor, task: Task, store: Store) -> Any:
        """Return what the client kept at the task's base; its first record if that is lost."""
        like = first_record(self.algorithm, self.objective, x, channel=task.protocol.channel)
        kept = store.load_state(task.base, like) if task.base else None
        return like if kept is None else kept

    def _sent_buffers(self, buffers: Buffers) -> Buffers:
        """Return the buffers that are sent: floating ones that are not private."""
        return wire.floating(self.objective.shared_buffers(buffers))

    def _buffers(self, content: RecordDict) -> Buffers:
        """Return buffers to train with: the server's floating ones, and this node's others."""
        buffers = {name: value.clone() for name, value in self.objective.buffers.items()}
        arrays = wire.entries_of(content, "buffers", ArrayRecord)
        sent = {name: _decode(name, arrays.get(name), value) for name, value in self._sent_buffers(buffers).items()}
        return buffers | sent

    def _plan(self, task: Task, data: Dataset) -> RoundPlan:
        """Return this client's part of the round plan: the same batches as if all clients were simulated together."""
        protocol = task.protocol
        steps, batch = int(protocol.steps(np.array([len(data)]))[0]), min(len(data), protocol.batch_size or len(data))
        if steps * batch > MAX_SAMPLES_PER_ROUND:
            raise BadInput(
                f"the server asks for {steps} local steps of {batch} samples in one round, and this node trains on at "
                f"most {MAX_SAMPLES_PER_ROUND}: lower epochs or local_steps"
            )
        plan = Plan(Clients.elsewhere(task.clients), protocol).round_of(
            task.round, np.array([task.client]), [np.arange(len(data))]
        )
        return dataclasses.replace(plan, participation=task.participation)


def _decode(name: str, array: Array | None, like: Tensor) -> Tensor:
    """Return a tensor of the server's message, which must have this dtype and shape."""
    if array is None:
        raise BadInput(f"the server's message lacks '{name}': {wire.SAME_VERSION}")
    try:
        return wire.decode(array, like)
    except wire.Unreadable as error:
        raise BadInput(f"the server's message: '{name}' {error}: {wire.SAME_VERSION}") from None


def own_words(error: LaminaError) -> str:
    """Return an error's text, with the words of the exceptions behind it, which may quote data, as their types alone.

    >>> try:
    ...     try:
    ...         float("J. Smith")
    ...     except ValueError as cause:
    ...         raise BadInput(f"x is not an array ({cause})") from cause
    ... except BadInput as error:
    ...     print(own_words(error))
    x is not an array (ValueError)
    """
    text, cause, depth = _one_line(error.without_data or str(error)), error.__cause__ or error.__context__, 0
    while cause is not None and depth < 10:
        if type(cause).__module__.partition(".")[0] != "lamina":
            quoted = {str(cause), *str(cause).splitlines(), *(arg for arg in cause.args if isinstance(arg, str))}
            shown = {_one_line(form) for words in quoted for form in (words, " ".join(words.split()))}
            for words in sorted(shown, key=len, reverse=True):
                text = text.replace(words, type(cause).__name__) if len(words) > 2 else text
        cause, depth = cause.__cause__ or cause.__context__, depth + 1
    return text


def _one_line(text: str) -> str:
    """Return a text as an error shows it: printable, in one line."""
    return " ".join(printable(text).split())


def client_number(context: Context) -> int:
    """Return the client number in a node's own configuration."""
    given = context.node_config.get("partition-id")
    if isinstance(given, bool) or not isinstance(given, int):
        raise BadInput(
            "this node has no number: start it with --node-config 'partition-id=0' (1, 2, ... for the others)"
        )
    return given
