"""Keys of a federation: an authority, the server's certificate, a key pair that signs tasks, a key pair for every node.

Who keeps what: the authority's key, the server's key and ``tasks.key`` stay with the SuperLink's operator; a node's
private key never leaves the node. Every node gets ``ca.crt`` and ``tasks.pub``; the server gets every node's ``.pub``.
"""

from __future__ import annotations

import contextlib
import datetime
import ipaddress
import os
import re
from collections.abc import Sequence
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from lamina.base.atomic import write_file
from lamina.base.errors import BadInput
from lamina.base.text import plural
from lamina.storage.files import writing_to

AUTHORITY = "lamina federation authority"
LOOPBACK = ("localhost", "127.0.0.1", "::1")  # always in the server's certificate
VALID_FOR = datetime.timedelta(days=365)  # the server's certificate
AUTHORITY_VALID_FOR = datetime.timedelta(days=3650)  # longer: a new one has to reach every node
WARNED_BEFORE = datetime.timedelta(days=30)
CLOCK_DIFFERENCE = datetime.timedelta(hours=1)
CURVE = ec.SECP384R1()
HOST_LABEL = re.compile(r"(?=.*[a-zA-Z0-9])[a-zA-Z0-9_-]{1,63}")
USES = (
    *("digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement"),
    *("key_cert_sign", "crl_sign", "encipher_only", "decipher_only"),
)


class ServerKeys:
    """The files of a federation's authority, of the server it vouches for, and of the key that signs tasks."""

    def __init__(self, folder: Path) -> None:
        self.certificate = folder / "ca.crt"  # what nodes and the flwr command trust
        self.key = folder / "ca.key"  # secret, and needed only to make the next server certificate
        self.server_certificate = folder / "server.pem"  # what the SuperLink shows
        self.server_key = folder / "server.key"  # secret
        self.signing_key = folder / "tasks.key"  # secret
        self.verifying_key = folder / "tasks.pub"  # what nodes verify tasks with


def make_server_keys(folder: Path, hosts: Sequence[str] = ()) -> ServerKeys:
    """Make the server's keys, with a certificate for these hosts (names or addresses) and for this machine itself."""
    files = ServerKeys(folder)
    refuse_existing(*vars(files).values())
    alternatives = [_general_name(host) for host in dict.fromkeys((*LOOPBACK, *hosts))]
    ca_key, server_key = ec.generate_private_key(CURVE), ec.generate_private_key(CURVE)
    certificate = _authority_certificate(ca_key)
    name = _name(hosts[0] if hosts else LOOPBACK[0])
    server_certificate = _server_certificate(ca_key, name, server_key, alternatives)
    signing_key = Ed25519PrivateKey.generate()
    verifying_key = signing_key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    _write_pair((files.key, _pem(ca_key)), (files.certificate, certificate))
    _write_pair((files.server_key, _pem(server_key)), (files.server_certificate, server_certificate))
    _write_pair((files.signing_key, _pem(signing_key)), (files.verifying_key, verifying_key))
    return files


def renew(folder: Path) -> list[Path]:
    """Replace the server's certificate by a new one for the same key and hosts; return the files that are new.

    The authority's certificate is replaced as well if it would end before. Its key stays the same, so nodes trust the
    new server certificate with either, until the old one ends.
    """
    files = ServerKeys(folder)
    try:
        ca_key, server_key = (load_pem_private_key(path.read_bytes(), None) for path in (files.key, files.server_key))
        old = x509.load_pem_x509_certificate(files.server_certificate.read_bytes())
        authority = x509.load_pem_x509_certificate(files.certificate.read_bytes())
        alternatives = list(old.extensions.get_extension_for_class(x509.SubjectAlternativeName).value)
    except OSError as error:
        raise BadInput(
            f"cannot read '{error.filename}': {error.strerror}; a renewal needs ca.key, ca.crt, server.key and "
            f"server.pem in '{folder}', as `lamina flower keys` made them"
        ) from error
    except (ValueError, TypeError, x509.ExtensionNotFound) as error:
        raise BadInput(f"the keys in '{folder}' are damaged, or not those of `lamina flower keys`") from error
    if not (isinstance(ca_key, ec.EllipticCurvePrivateKey) and isinstance(server_key, ec.EllipticCurvePrivateKey)):
        raise BadInput(f"the keys in '{folder}' are not those of `lamina flower keys`")
    if authority.public_key() != ca_key.public_key():
        raise BadInput(
            f"'{files.key}' does not belong to '{files.certificate}': nodes would not trust the new certificate"
        )
    new = []
    with writing_to(folder):
        if authority.not_valid_after_utc < datetime.datetime.now(datetime.UTC) + VALID_FOR:
            write_file(files.certificate, _authority_certificate(ca_key))
            new.append(files.certificate)
        write_file(files.server_certificate, _server_certificate(ca_key, old.subject, server_key, alternatives))
    return [*new, files.server_certificate]


def ends(folder: Path) -> dict[Path, datetime.datetime]:
    """Return when the certificates in a folder end: those that are there and can be read."""
    ends = {}
    for path in (ServerKeys(folder).certificate, ServerKeys(folder).server_certificate):
        with contextlib.suppress(OSError, ValueError):
            ends[path] = x509.load_pem_x509_certificate(path.read_bytes()).not_valid_after_utc
    return ends


def ending_soon(folder: Path) -> list[str]:
    """Return a warning for each certificate in a folder that has ended or ends within 30 days."""
    lines = []
    for path, end in ends(folder).items():
        left = end - datetime.datetime.now(datetime.UTC)
        if left < WARNED_BEFORE:
            when = f"ends on {end:%Y-%m-%d}, in {plural(left.days, 'day')}"
            if left.days < 0:
                when = f"ended on {end:%Y-%m-%d}"
            lines.append(f"the certificate '{path}' {when}: renew it on the server with `lamina flower renew`")
    return lines


def make_node_key(path: Path) -> tuple[Path, Path]:
    """Make a node's key pair: the private key at this path, in OpenSSH's format, the public one at ``<path>.pub``."""
    key = ec.generate_private_key(CURVE)
    line = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    public = path.with_name(path.name + ".pub")
    return _write_pair(
        (path, key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())),
        (public, line + b" " + path.name.encode() + b"\n"),
    )


def private_folder(folder: Path) -> Path:
    """Make a folder that only its owner can look into; one that exists is left as it is."""
    with writing_to(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def refuse_existing(*paths: Path) -> None:
    """Refuse to replace a key: nodes that trust the old one would trust no server afterwards."""
    for path in paths:
        if path.exists() or path.is_symlink():
            raise BadInput(f"'{path}' exists: a key is never replaced; choose another folder, or delete it yourself")


def _write_pair(private: tuple[Path, bytes], public: tuple[Path, bytes]) -> tuple[Path, Path]:
    """Write a secret file, which is never, not even for a moment, readable by others, and its public counterpart."""
    refuse_existing(private[0], public[0])
    folder = private_folder(private[0].parent)
    for (path, data), mode in ((private, 0o600), (public, 0o644)):
        with writing_to(folder), os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            file.write(data)
    return private[0], public[0]


def _authority_certificate(ca_key: ec.EllipticCurvePrivateKey) -> bytes:
    return _certificate(
        ca_key, _name(AUTHORITY), ca_key, AUTHORITY_VALID_FOR,
        (x509.BasicConstraints(ca=True, path_length=0), True),
        (_usage("key_cert_sign", "crl_sign"), True),
    )  # fmt: skip


def _server_certificate(
    ca_key: ec.EllipticCurvePrivateKey,
    name: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    alternatives: Sequence[x509.GeneralName],
) -> bytes:
    return _certificate(
        ca_key, name, key, VALID_FOR,
        (x509.BasicConstraints(ca=False, path_length=None), True),
        (x509.SubjectAlternativeName(alternatives), False),
        (_usage("digital_signature"), True),
        (x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), False),
        (x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), False),
    )  # fmt: skip


def _certificate(
    ca_key: ec.EllipticCurvePrivateKey,
    name: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    valid_for: datetime.timedelta,
    *extensions: tuple[x509.ExtensionType, bool],
) -> bytes:
    """Return the authority's certificate for a key; every extension says whether it is critical."""
    now = datetime.datetime.now(datetime.UTC)
    builder = x509.CertificateBuilder(
        _name(AUTHORITY), name, key.public_key(), x509.random_serial_number(), now - CLOCK_DIFFERENCE, now + valid_for
    )
    for extension, critical in (*extensions, (x509.SubjectKeyIdentifier.from_public_key(key.public_key()), False)):
        builder = builder.add_extension(extension, critical)
    return builder.sign(ca_key, hashes.SHA384()).public_bytes(Encoding.PEM)


def _general_name(host: str) -> x509.GeneralName:
    """Return a host as a certificate names it."""
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass
    if len(host) > 253 or not all(HOST_LABEL.fullmatch(label) for label in host.split(".")):
        raise BadInput(f"'{host}' is neither a host's name nor an IP address (no port, no https://)")
    return x509.DNSName(host)


def _name(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common[:64])])


def _usage(*allowed: str) -> x509.KeyUsage:
    return x509.KeyUsage(**{name: name in allowed for name in USES})


def _pem(key: ec.EllipticCurvePrivateKey | Ed25519PrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
