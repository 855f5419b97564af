"""The keys and certificates of a federation."""

import datetime
import os
import socket
import ssl
import threading

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from helpers import mode
from lamina import BadInput
from lamina.flower import keys


def handshake(authority, trusted, host):
    """Connect to a TLS server that shows the authority's server certificate."""
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(authority.server_certificate, authority.server_key)
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve():
            connection, _ = listener.accept()
            try:
                tls.wrap_socket(connection, server_side=True).close()
            except (ssl.SSLError, OSError):
                connection.close()

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            client = ssl.create_default_context(cafile=str(trusted))
            with socket.create_connection(listener.getsockname()) as raw, client.wrap_socket(raw, server_hostname=host):
                pass
        finally:
            thread.join()


def test_the_certificate_is_good_for_its_hosts_and_no_other(tmp_path):
    made = keys.make_server_keys(tmp_path / "keys", ["server.example.org", "10.0.0.7"])
    for host in ("127.0.0.1", "localhost", "server.example.org", "10.0.0.7"):
        handshake(made, made.certificate, host)
    with pytest.raises(ssl.SSLCertVerificationError, match=r"10\.0\.0\.8"):
        handshake(made, made.certificate, "10.0.0.8")
    other = keys.make_server_keys(tmp_path / "other")
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(made, other.certificate, "127.0.0.1")


def test_secrets_are_the_owners_alone(tmp_path):
    before = os.umask(0)
    try:
        made = keys.make_server_keys(tmp_path / "keys")
        private, public = keys.make_node_key(tmp_path / "keys" / "node-0")
    finally:
        os.umask(before)
    assert {mode(path) for path in (made.key, made.server_key, private)} == {0o600}
    assert mode(tmp_path / "keys") == 0o700
    assert {mode(path) for path in (made.certificate, made.server_certificate, public)} == {0o644}


def test_a_node_key_is_what_flower_takes(tmp_path):
    private, public = keys.make_node_key(tmp_path / "node-0")
    key = serialization.load_ssh_private_key(private.read_bytes(), None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    assert key.curve.name == "secp384r1"
    assert serialization.load_ssh_public_key(public.read_bytes()) == key.public_key()
    assert private.read_text().startswith("-----BEGIN OPENSSH PRIVATE KEY-----")


def test_no_key_is_ever_replaced(tmp_path):
    made = keys.make_server_keys(tmp_path)
    before = {path: path.read_bytes() for path in vars(made).values()}
    with pytest.raises(BadInput, match=r"ca\.crt' exists: a key is never replaced"):
        keys.make_server_keys(tmp_path)
    keys.make_node_key(tmp_path / "node-0")
    (tmp_path / "node-0").unlink()
    with pytest.raises(BadInput, match=r"node-0\.pub' exists"):
        keys.make_node_key(tmp_path / "node-0")
    assert {path: path.read_bytes() for path in vars(made).values()} == before


@pytest.mark.parametrize("host", ["https://server", "server:8000", "a b", "", ".", "x" * 64])
def test_a_host_that_is_none(tmp_path, host):
    with pytest.raises(BadInput, match="neither a host's name nor an IP address"):
        keys.make_server_keys(tmp_path / "keys", [host])
    assert not (tmp_path / "keys").exists()


def days_left(path):
    end = x509.load_pem_x509_certificate(path.read_bytes()).not_valid_after_utc
    return (end - datetime.datetime.now(datetime.UTC)) / datetime.timedelta(days=1)


def test_how_long_certificates_last(tmp_path):
    made = keys.make_server_keys(tmp_path)
    assert 364 < days_left(made.server_certificate) <= 365
    assert 3649 < days_left(made.certificate) <= 3650
    assert keys.ending_soon(tmp_path) == []
    assert [path.name for path in keys.ends(tmp_path)] == ["ca.crt", "server.pem"]


def test_a_renewed_certificate_is_trusted_with_what_nodes_have(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(keys, "VALID_FOR", datetime.timedelta(days=12, minutes=1))
        made = keys.make_server_keys(tmp_path, ["server.example.org", "10.0.0.7"])
    (line,) = keys.ending_soon(tmp_path)
    assert f"the certificate '{tmp_path}/server.pem' ends on " in line
    assert "in 12 days: renew it on the server with `lamina flower renew`" in line
    before = {path: path.read_bytes() for path in vars(made).values()}
    assert keys.renew(tmp_path) == [made.server_certificate]
    assert [path for path, data in before.items() if path.read_bytes() != data] == [made.server_certificate]
    assert 364 < days_left(made.server_certificate) <= 365
    assert keys.ending_soon(tmp_path) == []
    for host in ("127.0.0.1", "server.example.org", "10.0.0.7"):
        handshake(made, made.certificate, host)


def test_an_authority_that_ends_first_is_renewed_too_and_nodes_may_have_either(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(keys, "AUTHORITY_VALID_FOR", datetime.timedelta(days=40))
        made = keys.make_server_keys(tmp_path / "keys")
    old = tmp_path / "of-a-node.crt"
    old.write_bytes(made.certificate.read_bytes())
    assert keys.renew(tmp_path / "keys") == [made.certificate, made.server_certificate]
    assert days_left(made.certificate) > 3649
    for trusted in (old, made.certificate):
        handshake(made, trusted, "localhost")


def test_a_certificate_that_has_ended_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(keys, "VALID_FOR", -datetime.timedelta(minutes=5))
    keys.make_server_keys(tmp_path)
    (line,) = keys.ending_soon(tmp_path)
    assert "server.pem' ended on " in line


def test_a_renewal_without_the_right_keys_changes_nothing(tmp_path):
    made = keys.make_server_keys(tmp_path / "keys")
    other = keys.make_server_keys(tmp_path / "other")
    before = made.server_certificate.read_bytes()
    ca_key = made.key.read_bytes()
    for content, why in (
        (other.key.read_bytes(), "nodes would not trust the new certificate"),
        (made.signing_key.read_bytes(), "are not those of"),
        (b"none", "are damaged"),
        (None, "a renewal needs ca.key"),
    ):
        made.key.unlink() if content is None else made.key.write_bytes(content)
        with pytest.raises(BadInput, match=why):
            keys.renew(tmp_path / "keys")
        assert made.server_certificate.read_bytes() == before
    made.key.write_bytes(ca_key)
    assert keys.renew(tmp_path / "keys")
