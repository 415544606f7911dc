"""The HTTP API over HTTPS with the operator's certificate."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import ipaddress
import logging
import os
import ssl
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from exo_mesh.api.connections import ConnectionBounds
from exo_mesh.api.context import ApiOptions
from exo_mesh.cli.client.api_client import ApiClient
from exo_mesh.cli.client.child_node import ChildNode
from exo_mesh.cli.client.trust import trust
from exo_mesh.errors import TransportError
from exo_mesh.security import api_tls
from exo_mesh.security.api_tls import ApiTls
from exo_mesh.settings.config import ConfigError
from tests.api.scripted_mesh import ScriptedMesh, served
from tests.support.processes import QUIET_FLAGS, clean_environ, run
from tests.text.text_models import write_text_model

PEM = serialization.Encoding.PEM


@pytest.fixture
def mesh(tmp_path: Path) -> ScriptedMesh:
    return ScriptedMesh(write_text_model(tmp_path / "model"))


def write_pair(folder: Path, name: str = "studio.example.org", passphrase: bytes = b"") -> tuple[Path, Path]:
    """A self-signed certificate and its key, written over those in the folder."""
    key, subject = ec.generate_private_key(ec.SECP256R1()), x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    names = [x509.DNSName(name), x509.IPAddress(ipaddress.ip_address("192.0.2.1"))]
    certificate = (
        x509.CertificateBuilder(subject, subject, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=2))
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .sign(key, hashes.SHA256())
    )
    locked = serialization.BestAvailableEncryption(passphrase) if passphrase else serialization.NoEncryption()
    folder.mkdir(exist_ok=True)
    (folder / "cert.pem").write_bytes(certificate.public_bytes(PEM))
    (folder / "key.pem").write_bytes(key.private_bytes(PEM, serialization.PrivateFormat.PKCS8, locked))
    (folder / "key.pem").chmod(0o600)
    return folder / "cert.pem", folder / "key.pem"


async def served_certificate(url: str) -> bytes:
    """What the server shows in a handshake."""
    anybody = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    anybody.check_hostname, anybody.verify_mode = False, ssl.CERT_NONE
    _, writer = await asyncio.open_connection("127.0.0.1", port_of(url), ssl=anybody)
    shown: bytes = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.close()
    return shown


def port_of(url: str) -> int:
    return int(url.rpartition(":")[2])


def der(certificate: Path) -> bytes:
    return ssl.PEM_cert_to_DER_cert(certificate.read_text())


async def test_the_api_is_served_over_https(mesh: ScriptedMesh, tmp_path: Path) -> None:
    cert, key = write_pair(tmp_path / "tls")
    async with served(mesh, ApiOptions(), tls=ApiTls(cert, key)) as api:
        url = f"https://127.0.0.1:{port_of(api.url)}"
        connector = aiohttp.TCPConnector(ssl=trust("127.0.0.1", cert))
        async with aiohttp.ClientSession(url, connector=connector) as http:
            async with http.get("/") as reply:
                assert (await reply.json())["openai_base_url"] == f"{url}/v1"
            body = {"messages": [{"role": "user", "content": "Hi"}], "stream": True}
            async with http.post("/v1/chat/completions", json=body) as reply:
                assert (await reply.text()).endswith("data: [DONE]\n\n")
        other, _ = write_pair(tmp_path / "other")
        connector = aiohttp.TCPConnector(ssl=trust("127.0.0.1", other))
        async with aiohttp.ClientSession(url, connector=connector) as http:
            with pytest.raises(aiohttp.ClientConnectorCertificateError):
                await http.get("/")
        with pytest.raises(aiohttp.ClientError):
            await api.http.get("/healthz")


async def test_a_new_certificate_is_used_once_both_files_are_there(
    mesh: ScriptedMesh, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cert, key = write_pair(tmp_path / "tls")
    first = der(cert)
    tls = ApiTls(cert, key)
    async with served(mesh, ApiOptions(), tls=tls) as api:
        assert await served_certificate(api.url) == first
        assert not tls.reload_if_changed()
        new_cert, new_key = write_pair(tmp_path / "new")
        new_cert.replace(cert)
        with caplog.at_level(logging.WARNING):
            assert not tls.reload_if_changed() and not tls.reload_if_changed()
        assert [record.getMessage() for record in caplog.records] == [
            f"the API keeps its old certificate: the key in {key} does not belong to the certificate in {cert}"
        ]
        assert await served_certificate(api.url) == first
        new_key.replace(key)
        assert tls.reload_if_changed()
        assert await served_certificate(api.url) == der(cert) != first


@pytest.mark.parametrize("sent", [b"", b"\x16\x03\x01\x02\x00\x01\x00", b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"])
async def test_a_handshake_has_a_deadline_and_counts(mesh: ScriptedMesh, tmp_path: Path, sent: bytes) -> None:
    tls = ApiTls(*write_pair(tmp_path / "tls"))
    async with served(mesh, ApiOptions(), ConnectionBounds(head_s=0.3, total=5), tls) as api:
        many = [await asyncio.open_connection("127.0.0.1", port_of(api.url)) for _ in range(12)]
        for _, writer in many:
            writer.write(sent)
        assert await served_certificate(api.url), "the oldest were closed for it"
        async with asyncio.timeout(10):
            for reader, writer in many:
                with contextlib.suppress(ConnectionError):
                    await reader.read()
                writer.close()


def spoil(folder: Path, how: str) -> tuple[Path, Path]:
    cert, key = write_pair(folder, passphrase=b"x" if how == "locked" else b"")
    if how == "other key":
        write_pair(folder / "other")[1].replace(key)
    elif how == "no key":
        key.write_text("hello")
    elif how == "no certificate":
        cert.write_bytes(b"\xff" * 40)
    elif how == "missing":
        key.unlink()
    return cert, key


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("other key", "key.pem does not belong to the certificate in"),
        ("no key", "key.pem has no private key in PEM form"),
        ("locked", "without a passphrase"),
        ("no certificate", "cert.pem has no certificate in PEM form"),
        ("missing", "key.pem cannot be read: No such file or directory"),
    ],
)
def test_files_that_are_no_pair_are_refused_in_one_sentence(tmp_path: Path, how: str, words: str) -> None:
    cert, key = spoil(tmp_path / "tls", how)
    with pytest.raises(ValueError, match=words):
        ApiTls(cert, key)


@pytest.mark.parametrize("how", ["device", "pipe", "directory", "large"])
@pytest.mark.parametrize("spoilt", ["cert.pem", "key.pem"])
def test_a_file_that_is_no_regular_file_or_has_no_end_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, spoilt: str
) -> None:
    cert, key = write_pair(tmp_path)
    path = tmp_path / spoilt
    path.unlink()
    if how == "device":
        path.symlink_to("/dev/zero")
    elif how == "pipe":
        os.mkfifo(path)
    elif how == "directory":
        path.mkdir()
    else:
        path.write_bytes(b"x" * 100)
        (tmp_path / ("key.pem" if spoilt == "cert.pem" else "cert.pem")).write_bytes(b"")
        monkeypatch.setattr(api_tls, "MAX_PEM_BYTES", 99)
    with pytest.raises(ValueError, match=rf"{spoilt} (is not a regular file|cannot be read|has more than 99 bytes)"):
        ApiTls(cert, key)
    monkeypatch.setenv("EXO_MESH_API_CA", str(path))
    with pytest.raises(ConfigError, match=r"EXO_MESH_API_CA=.* cannot be read as a certificate"):
        trust("studio.example.org", None)
    with pytest.raises(ConfigError, match=r"--tls-cert: .* holds no readable certificate"):
        trust("127.0.0.1", path)


def test_nothing_older_than_tls_1_2_is_spoken(tmp_path: Path) -> None:
    assert ApiTls(*write_pair(tmp_path / "tls")).context.minimum_version is ssl.TLSVersion.TLSv1_2


@pytest.fixture
def node(tmp_path: Path) -> Iterator[ChildNode]:
    cert, key = write_pair(tmp_path / "tls")
    (tmp_path / "config.toml").write_text(f'tls_cert = "{cert}"\ntls_key = "{key}"\n')
    child = ChildNode([*QUIET_FLAGS, "--api-port", "0"], tmp_path / "log", clean_environ(tmp_path))
    yield child
    child.stop()


@pytest.mark.extended
def test_a_node_says_https_and_its_own_verbs_trust_it(
    node: ChildNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = node.wait_ready(60)["api_url"]
    assert url.startswith("https://127.0.0.1:")
    for name, text in clean_environ(tmp_path).items():
        monkeypatch.setenv(name, text)
    state = ApiClient(url).get("/state")
    assert [peer["api_url"] for peer in state["view"]["peers"]] == [url]
    shown = run(["status", "--api-url", url], tmp_path)
    assert shown.returncode == 0, shown.stderr
    monkeypatch.setenv("EXO_MESH_HOME", str(tmp_path / "elsewhere"))
    assert ApiClient(url).get("/drain") == {"draining": False, "drained": False, "requests": 0, "sequences": 0}
    assert ApiClient(url).local_token(), "its home and certificate are found by its address"
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "another-user"))
    with pytest.raises(TransportError, match=r"not trusted .*self.signed.*EXO_MESH_API_CA"):
        ApiClient(url).get("/healthz")
    monkeypatch.setenv("EXO_MESH_API_CA", str(tmp_path / "tls" / "cert.pem"))
    with pytest.raises(TransportError, match="not trusted"):  # the file is right, but has another name than 127.0.0.1
        ApiClient(url).get("/healthz")
    with pytest.raises(TransportError, match="https://"):
        ApiClient(url.replace("https", "http")).get("/healthz")


@pytest.mark.extended
def test_a_node_with_files_that_are_no_pair_does_not_start(tmp_path: Path) -> None:
    cert, key = spoil(tmp_path / "tls", "other key")
    refused = run(["serve", *QUIET_FLAGS, "--tls-cert", str(cert), "--tls-key", str(key)], tmp_path)
    assert (refused.returncode, refused.stdout, refused.stderr.count("\n")) == (2, "", 1), refused.stderr
    assert "does not belong" in refused.stderr
