"""Sign the server's messages and verify them on the nodes (Ed25519).

Flower's SuperLink does not check who sends a message: any registered node can address one to another node in the
server's name. So the server signs every message with a private key, and every node verifies it with the public key it
was given at set-up, before it reads anything else. A signature covers the whole content, the receiving node, Flower's
run, the message type and the round: a message to one node cannot be passed on to another one.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import load_pem_private_key, load_pem_public_key
from flwr.app import Array, ConfigRecord, Context, Message

from lamina.base.errors import BadInput
from lamina.flower.wire import entries_of

SIGNATURE = "signature"  # the record that holds it
CONTEXT = b"lamina federation message 1\n"  # so that a signature means nothing elsewhere
SERVER_OPTION, NODE_OPTION = "signing-key", "server-key"  # in Flower's run configuration, and in a node's
HOW = "`lamina flower keys` makes both, tasks.key for the server and tasks.pub for the nodes"


def load_key(path: Path, *, secret: bool = False) -> Any:
    """Return the server's signing key (secret), or its public key."""
    what = "signing key" if secret else "server's public key"
    try:
        data = path.read_bytes()
        key = load_pem_private_key(data, None) if secret else load_pem_public_key(data)
    except OSError as error:
        raise BadInput(f"cannot read the {what} '{path}': {error.strerror}; {HOW}") from error
    except (ValueError, TypeError) as error:
        raise BadInput(f"'{path}' is not a {what}; {HOW}") from error
    if not isinstance(key, Ed25519PrivateKey | Ed25519PublicKey):
        raise BadInput(f"'{path}' is not an Ed25519 key; {HOW}")
    if secret and os.name == "posix" and path.stat().st_mode & 0o077:
        raise BadInput(f"the signing key '{path}' can be read by others: chmod 600 '{path}'")
    return key


def sign(message: Message, key: Ed25519PrivateKey) -> None:
    """Add the server's signature to a message."""
    statement = _statement(message, message.metadata.dst_node_id, message.metadata.run_id)
    message.content[SIGNATURE] = ConfigRecord({"ed25519": key.sign(statement)})


def read_signing_key(path: Any) -> Ed25519PrivateKey:
    """Return the server's private key."""
    if not path:
        raise BadInput(
            "the server has no key to sign tasks with, and nodes refuse tasks without a signature: give its path as "
            f"{SERVER_OPTION} in the run configuration, or as Federation(signing_key=...); {HOW}"
        )
    key: Ed25519PrivateKey = load_key(Path(str(path)).expanduser(), secret=True)
    return key


def authenticate(message: Message, context: Context) -> None:
    """Raise `BadInput` unless the server signed this message for this node and this run."""
    path = context.node_config.get(NODE_OPTION)
    if not path:
        raise BadInput(
            "this node has no public key of its server, so it cannot tell whether a task is the server's: start it "
            f"with --node-config '{NODE_OPTION}=\"/path/to/tasks.pub\"'; {HOW}"
        )
    key = load_key(Path(str(path)).expanduser())
    given = entries_of(message.content, SIGNATURE).get("ed25519")
    signature = given if isinstance(given, bytes) else b""
    try:
        key.verify(signature, _statement(message, context.node_id, context.run_id))
    except InvalidSignature:
        raise BadInput(
            "refused a message that the server has not signed for this node and this run: it is forged, or this node's "
            f"{NODE_OPTION} does not belong to the server's {SERVER_OPTION}"
        ) from None


def _statement(message: Message, node: int, run: int) -> bytes:
    """Return what a signature for this node and run of Flower's covers, in one canonical form on both sides.

    The form is our own: Flower's ids of records may be cached, and may change with its version.
    """
    content: dict[str, Any] = {}
    for name, record in message.content.items():
        if name != SIGNATURE:
            entries: dict[str, Any] = dict(record)
            content[name] = [type(record).__name__, {key: _value(value) for key, value in entries.items()}]
    facts = {
        "node": node,
        "run": run,
        "type": message.metadata.message_type,
        "group": message.metadata.group_id,
        "content": content,
    }
    return CONTEXT + json.dumps(facts, sort_keys=True).encode()


def _value(value: Any) -> list[Any]:
    """Return a value with its type, so that 1, 1.0, True and "1" are different statements."""
    if isinstance(value, Array):
        return [value.dtype, list(value.shape), value.stype, hashlib.sha256(value.data).hexdigest()]
    if isinstance(value, list):
        return ["list", [_value(entry) for entry in value]]
    if isinstance(value, float):
        return ["float", float(value).hex()]
    if isinstance(value, bytes):
        return ["bytes", value.hex()]
    return [type(value).__name__, str(value)]
