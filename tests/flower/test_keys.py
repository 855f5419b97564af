"""The keys and certificates of a federation."""

import datetime
import os
import socket
import ssl
import threading

import pytest
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


def test_how_long_certificates_last(tmp_path):
    from cryptography import x509

    made = keys.make_server_keys(tmp_path)
    server = x509.load_pem_x509_certificate(made.server_certificate.read_bytes())
    left = server.not_valid_after_utc - datetime.datetime.now(datetime.UTC)
    assert datetime.timedelta(days=364) < left <= datetime.timedelta(days=365)
