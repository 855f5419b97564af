"""Checkpoints: the state between two rounds as safetensors, so that a run can be continued bit for bit.

A checkpoint of round r is a manifest, ``round-<r>.json``, with the run's identity, that names with their checksums

- one ``state-<r>-….safetensors``: the server's record, the model's buffers, the ledger;
- the segments, ``clients-<r>-….safetensors``, that hold the clients' records, and which client is in which.

A checkpoint writes one segment with the records that changed since the one before. A record written again is dead in
its old segment; when less than half of a segment is alive, what is alive moves to the new one. So a checkpoint costs
what changed, at most about twice, and the folder holds at most about twice what the clients keep. The last two
checkpoints stay, and what no manifest of theirs names is deleted.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from lamina.base.atomic import write_file
from lamina.base.errors import BadInput
from lamina.engines.state import State
from lamina.rounds.ledger import Ledger
from lamina.storage.files import writing_to
from lamina.storage.identity import ACCEPT, Identity, code_changes, differences

FORMAT = 3
log = logging.getLogger(__name__)
MANIFEST = re.compile(r"round-([0-9]{6,})\.json")
OURS = re.compile(r"(round-[0-9]{6,}\.json|(state|clients)-[0-9]{6,}-\w+\.safetensors)(\.partial)?")
# what every version of safetensors knows; anything else is stored as bytes
PLAIN = {torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
         torch.uint8, torch.bool}  # fmt: skip


class Damaged(Exception):
    """A checkpoint that cannot be used; the text says what is wrong with it."""


Segment = dict[str, Any]  # of the manifest: "sha256", "written" records, and the "clients" whose newest are there


class Checkpoints:
    """The checkpoints of one run in a folder of their own; with the run's identity, those of others are refused."""

    def __init__(self, folder: Path, identity: Identity | None = None, *, accept_changed_code: bool = False) -> None:
        self.folder = folder
        self.identity = identity
        self._accept_changed_code = accept_changed_code
        self.forget()

    def forget(self) -> None:
        """Forget what is on disk: the next checkpoint writes everything and replaces all others."""
        self._segments: dict[str, Segment] = {}
        self._on_disk: dict[int, Any] = {}  # the clients' records as last saved; a record is never changed in place
        self._newest: set[str] = set()  # the files of the checkpoint last saved or loaded

    def rounds(self) -> list[int]:
        """Return the rounds that have a checkpoint, sound or damaged."""
        if not self.folder.is_dir():
            return []
        names = (MANIFEST.fullmatch(path.name) for path in self.folder.iterdir() if path.is_file())
        return sorted(int(name[1]) for name in names if name)

    def save(self, state: State, history: Iterable[Any] = ()) -> None:
        """Write a checkpoint; until that is done the one before stays the newest."""
        with writing_to(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            if not all((self.folder / name).exists() for name in self._newest):
                self.forget()  # they were deleted during the run
            if not self._newest:  # refuse another run's checkpoints in this folder: this one would replace them
                for number in self.rounds():
                    with contextlib.suppress(Damaged):
                        self._read_manifest(number)
            segments = self._save_clients(state)
            tensors = {f"server/{name}": value for name, value in _tensors(state.server).items()}
            tensors |= {f"buffer/{name}": value for name, value in state.buffers.items()}
            tensors |= {} if state.private_start is None else {"private/start": state.private_start}
            if state.clip_bound is not None:
                tensors["privacy/clip_bound"] = torch.tensor(state.clip_bound, dtype=torch.float64)
            tensors |= {f"ledger/{name}": torch.from_numpy(held) for name, held in state.ledger.held.items()}
            file, sha256 = self._write(f"state-{state.round:06}", tensors)
            content = {
                "format": FORMAT,
                "round": state.round,
                "identity": self.identity,
                "state": {"file": file, "sha256": sha256},
                "segments": segments,
                "history": list(history),
            }
            manifest = self._manifest(state.round)
            sealed = {"sha256": _manifest_sum(content), "content": content}
            write_file(manifest, (json.dumps(sealed) + "\n").encode())
            before, self._newest = self._newest, {manifest.name, file, *segments}
            self._segments, self._on_disk = segments, dict(state.clients)
            for path in self.folder.iterdir():
                if path.name not in self._newest | before and OURS.fullmatch(path.name) and path.is_file():
                    path.unlink(missing_ok=True)

    def _save_clients(self, state: State) -> dict[str, Segment]:
        """Write the records that changed, with what is left of old segments that are mostly dead."""
        wanted = {i for i, record in state.clients.items() if record is not self._on_disk.get(i) and _tensors(record)}
        segments = {}
        for name, old in self._segments.items():
            alive = [i for i in old["clients"] if i not in wanted]
            if 2 * len(alive) < old["written"]:
                wanted |= set(alive)
            else:
                segments[name] = {**old, "clients": alive}
        if wanted:
            records = {f"{i}/{field}": t for i in sorted(wanted) for field, t in _tensors(state.clients[i]).items()}
            name, sha256 = self._write(f"clients-{state.round:06}", records)
            segments[name] = {"sha256": sha256, "written": len(wanted), "clients": sorted(wanted)}
        return segments

    def _write(self, stem: str, tensors: Mapping[str, Tensor]) -> tuple[str, str]:
        """Write tensors to a file whose name tells its content: two different ones never share a name."""
        data = pack(tensors)
        sha256 = read_facts(data)["sha256"]
        name = f"{stem}-{sha256[:12]}.safetensors"
        write_file(self.folder / name, data)
        return name, sha256

    def load(self, number: int, like: State, client: Any, home: torch.device | None = None) -> tuple[State, list[Any]]:
        """Return the state after a round and its history; raise `Damaged`, or `BadInput` for another run's checkpoint.

        Args:
            number: the round.
            like: the state before round 1 of the same experiment.
            client: a client's first record.
            home: the device for the clients' records; by default the model's.
        """
        home = home or like.server.x.device
        content = self._read_manifest(number)
        stored = self._read(content["state"]["file"], content["state"]["sha256"])
        segments, records = content["segments"], {}
        try:
            state = _state_from(stored, like, number)
            for name, segment in segments.items():
                tensors = self._read(name, segment["sha256"])
                for i in segment["clients"]:
                    values = [_copy(tensors.get(f"{i}/{field}"), home) for field in client._fields]
                    if all(value is None for value in values):
                        raise Damaged(f"{self.folder / name} has no record of client {i}")
                    records[i] = type(client)(*values)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise Damaged(f"{self._manifest(number)} does not fit this experiment ({error})") from error
        state.clients = records
        self._segments, self._on_disk = segments, dict(records)
        self._newest = {self._manifest(number).name, content["state"]["file"], *segments}
        return state, content["history"]

    def _read_manifest(self, number: int) -> dict[str, Any]:
        """Return the content of a manifest; refuse another run's."""
        path = self._manifest(number)
        try:
            manifest = json.loads(path.read_bytes())
            content = manifest["content"]
            is_sound = manifest["sha256"] == _manifest_sum(content) and content["round"] == number
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise Damaged(f"{path} cannot be read ({error})") from error
        if not is_sound:
            raise Damaged(f"{path} has a wrong checksum")
        if content["format"] != FORMAT:
            raise BadInput(
                f"{path} has format {content['format']}; this version of lamina reads {FORMAT}: "
                "resume with the version that wrote it, or start again in another folder"
            )
        stored = content["identity"] or {}
        identity = self.identity or stored
        # a federation's server does not know the data
        known = {key: value for key, value in stored.items() if key in identity or key.startswith("algorithm.")}
        if differing := differences(known, {key: identity[key] for key in known if key in identity}):
            raise BadInput(
                f"the checkpoint of round {number} in '{self.folder}' is of another run: {differing}; use the settings "
                "it was written with, or another folder"
            )
        changes = code_changes(stored, identity) if stored else ""
        if changes and not self._accept_changed_code:
            raise BadInput(
                f"cannot resume from the checkpoint of round {number} in '{self.folder}': {changes}; {ACCEPT}, or "
                "use another folder"
            )
        return cast(dict[str, Any], content)

    def _read(self, name: str, expected: str) -> dict[str, Tensor]:
        path = self.folder / name
        try:
            data = path.read_bytes()
            if read_facts(data).get("sha256") != expected:
                raise ValueError("checksum")
            return unpack(data)
        except OSError as error:
            raise Damaged(f"{path} cannot be read ({error.strerror or error})") from error
        except UNREADABLE as error:
            raise Damaged(f"{path} is damaged ({error})") from error

    def _manifest(self, number: int) -> Path:
        return self.folder / f"round-{number:06}.json"


def load_newest(
    stores: Sequence[Checkpoints],
    starts: Sequence[tuple[State, Any]],
    rounds: Iterable[int],
    everywhere: Callable[[bool], bool] = bool,
    home: torch.device | None = None,
) -> list[tuple[State, list[Any]]] | None:
    """Load the newest of the given rounds whose checkpoint is sound in every store; log a damaged one.

    Args:
        stores: the checkpoints of runs that continue together, from the same round.
        starts: every run's state before round 1 and a client's first record.
        rounds: the rounds to try.
        everywhere: whether something is true in all processes that run together.
        home: the device for the clients' records; by default the model's.
    """
    for number in sorted(set(rounds), reverse=True):
        try:
            loaded = [store.load(number, *start, home) for store, start in zip(stores, starts, strict=True)]
        except Damaged as error:
            loaded = []
            log.warning("the checkpoint of round %d is damaged and not used: %s", number, error)
        if everywhere(bool(loaded)):
            return loaded
    for store in stores:
        store.forget()
    return None


def _state_from(tensors: Mapping[str, Tensor], like: State, number: int) -> State:
    """Return a state without clients from its tensors, whose names begin with their part of it."""
    parts: dict[str, dict[str, Tensor]] = {"server": {}, "buffer": {}, "ledger": {}, "private": {}, "privacy": {}}
    for name, value in tensors.items():
        part, _, rest = name.partition("/")
        parts[part][rest] = value
    device = like.server.x.device
    server = type(like.server)(**dict.fromkeys(like.server._fields) | parts["server"])
    server = type(server)(*(_copy(value, device) for value in server))
    buffers = {name: value.to(device).clone() for name, value in parts["buffer"].items()}
    ledger = Ledger(like.ledger.clients)
    ledger.held = {name: held.clone().numpy() for name, held in parts["ledger"].items()}
    bound = parts["privacy"].get("clip_bound")
    start = _copy(parts["private"].get("start"), device)
    return State(number, server, buffers, {}, ledger, start, None if bound is None else float(bound))


def _tensors(record: Any) -> dict[str, Tensor]:
    """Return the fields of a record that are not None."""
    return {name: value for name, value in zip(record._fields, record, strict=True) if value is not None}


def _copy(value: Tensor | None, device: torch.device) -> Tensor | None:
    """Return a copy with its own memory, because arithmetic may depend on how a tensor is aligned."""
    return None if value is None else value.to(device).clone()


def _manifest_sum(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


# what reading a damaged safetensors file may raise
UNREADABLE = (SafetensorError, ValueError, KeyError, TypeError, AttributeError, RuntimeError)


def pack(tensors: Mapping[str, Tensor], **facts: str) -> bytes:
    """Return tensors of any dtype, and facts about them, as the bytes of a safetensors file with a checksum in it."""
    plain, odd = {}, {}
    for name, tensor in tensors.items():
        value = tensor.detach().cpu().contiguous()
        if value.dtype not in PLAIN:
            odd[name] = [str(value.dtype).removeprefix("torch."), list(value.shape)]
            value = value.reshape(-1).view(torch.uint8)
        plain[name] = value.clone()  # safetensors refuses tensors that share memory
    metadata = {**facts, **({"as_bytes": json.dumps(odd)} if odd else {})}
    data = save(plain, metadata={**metadata, "sha256": _checksum(plain, metadata)})
    if not metadata:
        return data
    # The library writes several facts in a random order: sort them.
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the numbers that follow are aligned
    return len(text).to_bytes(8, "little") + text + data[end:]


def unpack(data: bytes) -> dict[str, Tensor]:
    """Return the tensors of `pack`, or of a safetensors file without a checksum; raises one of `UNREADABLE`."""
    tensors, facts = load(data), read_facts(data)
    expected = facts.pop("sha256", None)
    if expected is not None and expected != _checksum(tensors, facts):
        raise ValueError("checksum")
    for name, (dtype, shape) in json.loads(facts.get("as_bytes", "{}")).items():
        tensors[name] = tensors[name].clone().view(getattr(torch, dtype)).reshape(shape)
    return tensors


def _checksum(tensors: Mapping[str, Tensor], facts: Mapping[str, str]) -> str:
    """Return the SHA-256 of names, types, shapes and values, and of the facts: all a reader sees of the file."""
    total = hashlib.sha256(json.dumps(sorted(facts.items())).encode())
    for name in sorted(tensors):
        value = tensors[name]
        total.update(json.dumps([name, str(value.dtype), list(value.shape)]).encode())
        if value.numel():
            total.update(value.reshape(-1).view(torch.uint8).numpy().data)
    return total.hexdigest()


def read_facts(data: bytes) -> dict[str, str]:
    """Return the metadata in the header of a safetensors file: eight bytes of length, then JSON."""
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    return dict(header.get("__metadata__", {}))


def read_model(path: str | Path) -> dict[str, Tensor]:
    """Return the weights in a run's ``model.safetensors`` or ``best.safetensors``, for `load_state_dict`.

    A file whose checksum is wrong is refused. One without a checksum, made by another program, is taken as it is.
    """
    try:
        return {name: value.clone() for name, value in unpack(Path(path).read_bytes()).items()}
    except OSError as error:
        raise BadInput(f"cannot read the model '{path}': {error.strerror or error}") from error
    except UNREADABLE as error:
        raise BadInput(
            f"'{path}' is damaged ({error}): restore it from a copy; if it is a run's model.safetensors, the run's own "
            "command writes it again"
        ) from error
