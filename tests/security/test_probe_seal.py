"""Probe datagrams of a closed mesh: only a holder of the secret can make one, and each is accepted once."""

from __future__ import annotations

import random
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exo_mesh.errors import TransportError
from exo_mesh.security.probe_seal import MAX_SALTS, OVERHEAD_BYTES, SEALED, WINDOW, ProbeSeal, seal_with

KEY, OTHER_KEY = b"k" * 32, b"o" * 32


def opens(seal: ProbeSeal, datagram: bytes) -> bool:
    with suppress(TransportError):
        seal.open(datagram)
        return True
    return False


def test_a_sealed_datagram_is_opened_once_and_not_by_its_sender() -> None:
    here, there = ProbeSeal(KEY), ProbeSeal(KEY)
    datagram = here.close(b"hello")
    assert len(datagram) == 5 + OVERHEAD_BYTES
    assert b"hello" not in datagram
    assert not opens(here, datagram)
    assert there.open(datagram) == b"hello"
    assert not opens(there, datagram)
    assert there.open(here.close(b"hello")) == b"hello"


def test_no_bit_of_a_sealed_datagram_can_be_changed() -> None:
    datagram, there = ProbeSeal(KEY).close(b"hello"), ProbeSeal(KEY)
    for index in range(len(datagram)):
        for bit in range(8):
            altered = bytearray(datagram)
            altered[index] ^= 1 << bit
            assert not opens(there, bytes(altered))
    assert opens(there, datagram)


def test_another_secret_no_secret_and_short_datagrams_are_refused() -> None:
    sealed, plain = ProbeSeal(OTHER_KEY).close(b"hello"), ProbeSeal(None).close(b"hello")
    for datagram in (sealed, plain, b"", b"hello", SEALED, *(sealed[:length] for length in range(len(sealed)))):
        assert not opens(ProbeSeal(KEY), datagram)
    assert not opens(ProbeSeal(None), sealed)
    assert ProbeSeal(None).open(plain) == b"hello"


def test_one_secret_gives_one_key() -> None:
    assert seal_with("a secret of the mesh").open(seal_with("a secret of the mesh").close(b"hello")) == b"hello"
    assert not opens(seal_with("a secret of the mesh"), seal_with("another secret").close(b"hello"))
    assert seal_with("").open(seal_with("").close(b"hello")) == b"hello"


def test_memory_stays_flat_under_floods_with_and_without_the_secret() -> None:
    there, rng = ProbeSeal(KEY), random.Random(1)
    for _ in range(1000):
        assert not opens(there, SEALED + rng.randbytes(100))
    assert len(there._senders) == 0
    for _ in range(MAX_SALTS + 10):
        there.open(ProbeSeal(KEY).close(b""))
    assert len(there._senders) == MAX_SALTS


def arrivals() -> st.SearchStrategy[list[int]]:
    """Numbers of datagrams in the order of their arrival: lost, repeated and overtaken ones among them."""
    return st.lists(st.integers(0, 3 * WINDOW), max_size=80)


def check_arrivals(order: list[int]) -> None:
    here, there = ProbeSeal(KEY), ProbeSeal(KEY)
    sent = [here.close(str(number).encode()) for number in range(3 * WINDOW + 1)]
    accepted: list[int] = []
    for number in order:
        is_due = number not in accepted and number > max(accepted, default=-1) - WINDOW
        assert opens(there, sent[number]) is is_due
        accepted += [number] * is_due


@settings(max_examples=30, deadline=None)
@given(arrivals())
def test_a_datagram_is_accepted_once_if_fewer_than_a_window_have_overtaken_it(order: list[int]) -> None:
    check_arrivals(order)


@pytest.mark.extended
@settings(max_examples=1500, deadline=None)
@given(arrivals())
def test_a_datagram_is_accepted_once_in_any_order_of_arrival(order: list[int]) -> None:
    check_arrivals(order)
