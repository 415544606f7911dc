"""Authorities are read when a client needs them, and not while aiohttp is imported."""

from __future__ import annotations

import os
import ssl

import pytest

from exo_mesh.base.authorities import authorities_unread, trusted


@pytest.mark.parametrize("before", [None, "/somewhere/authorities.pem"])
def test_a_context_that_is_made_meanwhile_reads_no_authorities(
    before: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    if before is not None:
        monkeypatch.setenv("SSL_CERT_FILE", before)
    with pytest.raises(RuntimeError, match="half"), authorities_unread():
        assert ssl.create_default_context().cert_store_stats()["x509"] == 0
        raise RuntimeError("half imported")
    assert os.environ.get("SSL_CERT_FILE") == before


async def test_clients_trust_what_the_machine_trusts_and_verify_names() -> None:
    context = await trusted()
    assert context is await trusted(), "they are read once"
    assert context.cert_store_stats() == ssl.create_default_context().cert_store_stats()
    assert context.check_hostname and context.verify_mode is ssl.CERT_REQUIRED
