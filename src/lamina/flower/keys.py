"""Keys of a federation: an authority, the server's certificate, a key pair for every node.

Who keeps what: the authority's key and the server's key stay with whoever runs the SuperLink; a node's private key
never leaves the node. Everybody gets ``ca.crt``; the server gets every node's ``.pub``. The key pair that signs the
server's tasks is in `lamina.flower.signing`.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
from collections.abc import Sequence
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from lamina.errors import BadInput
from lamina.storage.files import cannot_write

LOOPBACK = ("localhost", "127.0.0.1", "::1")  # always in the server's certificate
DAYS = 365  # that certificates are valid
HOUR = datetime.timedelta(hours=1)
CURVE = ec.SECP384R1()
USES = (
    *("digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement"),
    *("key_cert_sign", "crl_sign", "encipher_only", "decipher_only"),
)


class Authority:
    """The files of a federation's own certificate authority and of the server it vouches for, in one folder."""

    def __init__(self, folder: Path) -> None:
        self.certificate = folder / "ca.crt"  # what nodes and the flwr command trust
        self.key = folder / "ca.key"  # secret, and needed only to make the next server certificate
        self.server_certificate = folder / "server.pem"  # what the SuperLink shows
        self.server_key = folder / "server.key"  # secret
        self.files = self.certificate, self.key, self.server_certificate, self.server_key


def make_authority(folder: Path, hosts: Sequence[str] = (), *, days: int = DAYS) -> Authority:
    """Make an authority and a server certificate for these hosts (names or addresses) and for this machine itself.

    Refuses to replace keys: whoever trusts the old ones would trust nobody afterwards.
    """
    made = Authority(folder)
    refuse_existing(*made.files)
    names = list(dict.fromkeys((*LOOPBACK, *hosts)))
    alternatives = [_general_name(host) for host in names]
    ca_key, server_key = ec.generate_private_key(CURVE), ec.generate_private_key(CURVE)
    issuer = _name("lamina federation authority")
    authority = (
        _certificate(issuer, issuer, ca_key.public_key(), days)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage("key_cert_sign", "crl_sign"), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(ca_key.public_key()), critical=False)
        .sign(ca_key, hashes.SHA384())
    )
    server = (
        _certificate(_name(hosts[0] if hosts else names[0]), issuer, server_key.public_key(), days)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
        .add_extension(_usage("digital_signature"), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(server_key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), critical=False)
        .sign(ca_key, hashes.SHA384())
    )
    private_folder(folder)
    write_key(made.key, _pem(ca_key), secret=True)
    write_key(made.certificate, authority.public_bytes(serialization.Encoding.PEM))
    write_key(made.server_key, _pem(server_key), secret=True)
    write_key(made.server_certificate, server.public_bytes(serialization.Encoding.PEM))
    return made


def make_node_key(path: Path) -> tuple[Path, Path]:
    """Make a node's key pair: the private key at this path, in OpenSSH's format, the public one at ``<path>.pub``."""
    public = path.with_name(path.name + ".pub")
    refuse_existing(path, public)
    key = ec.generate_private_key(CURVE)
    openssh = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
    )
    line = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    private_folder(path.parent)
    write_key(path, openssh, secret=True)
    write_key(public, line + b" " + path.name.encode() + b"\n")
    return path, public


def usable(authority: Authority, hosts: Sequence[str] = ()) -> bool:
    """Return whether all files of an authority exist, belong together, name these hosts and are valid for a day."""
    try:
        ca = x509.load_pem_x509_certificate(authority.certificate.read_bytes())
        server = x509.load_pem_x509_certificate(authority.server_certificate.read_bytes())
        key = serialization.load_pem_private_key(authority.server_key.read_bytes(), None)
        server.verify_directly_issued_by(ca)
        named = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (OSError, ValueError, TypeError, InvalidSignature, x509.ExtensionNotFound):
        return False
    soon = datetime.datetime.now(datetime.UTC) + 24 * HOUR
    return (
        key.public_key() == server.public_key()
        and all(_general_name(host) in named for host in (*LOOPBACK, *hosts))
        and min(ca.not_valid_after_utc, server.not_valid_after_utc) > soon
    )


def private_folder(folder: Path) -> Path:
    """Make a folder that only its owner can look into; one that exists is left as it is."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise cannot_write(folder, error) from error
    return folder


def write_key(path: Path, data: bytes, *, secret: bool = False) -> None:
    """Write a new file; a secret one is never, not even for a moment, readable by others."""
    try:
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if secret else 0o644), "wb") as file:
            file.write(data)
    except OSError as error:
        raise cannot_write(path.parent, error) from error


def refuse_existing(*paths: Path) -> None:
    """Refuse to replace a key."""
    for path in paths:
        if path.exists() or path.is_symlink():
            raise BadInput(f"'{path}' exists: a key is never replaced; choose another folder, or delete it yourself")


def _general_name(host: str) -> x509.GeneralName:
    """Return a host as a certificate names it."""
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass
    labels = host.split(".")
    if len(host) > 253 or not all(
        0 < len(label) <= 63 and label.isascii() and label.replace("-", "").replace("_", "").isalnum()
        for label in labels
    ):
        raise BadInput(f"'{host}' is neither a host's name nor an IP address (no port, no https://)")
    return x509.DNSName(host)


def _name(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common[:64])])


def _certificate(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, days: int
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - HOUR)  # clocks differ
        .not_valid_after(now + datetime.timedelta(days=days))
    )


def _usage(*allowed: str) -> x509.KeyUsage:
    return x509.KeyUsage(**{name: name in allowed for name in USES})


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
