"""Joining by a one-time code: who has the code gets the secret, once and in time, and nobody else learns anything."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable

import pytest
from msgspec.structs import replace

from exo_mesh.cli.wiring import api_addresses
from exo_mesh.domain.device import PeerInfo
from exo_mesh.errors import InputError, NoInvitationError, OverloadError, TransportError, WrongCodeError
from exo_mesh.security.invitations import (
    EXCHANGE_S,
    MAX_EXCHANGES,
    MAX_WRONG,
    VALID_S,
    Invitation,
    Invitations,
    InvitationState,
)
from exo_mesh.security.joining import (
    ALPHABET,
    Gift,
    Side,
    Transcript,
    new_password,
    parse_password,
    proof,
    shown_name,
    unseal,
)
from exo_mesh.security.secret import new_secret

GIFT = Gift(new_secret(), "default", "studio", "192.168.1.5:5000")
WRONG = "aaaa-bbbb-cccc"


class FakeClock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def invitation(clock: FakeClock) -> Invitation:
    return Invitation(GIFT, clock)


class JoinerSide:
    """A joiner, and every message that it and the inviter have said to each other."""

    def __init__(self, invitation: Invitation, password: str, name: str = "laptop") -> None:
        self.invitation = invitation
        self.side = Side("A", password)
        inviter = Side("B", invitation.password)
        invitation.reserve()
        self.told = invitation.begin(inviter, inviter.finish(self.side.hello), self.side.hello, name)
        self.key = self.side.finish(self.told.inviter_hello)
        self.proof = proof(self.key, self.told)
        self.said: list[bytes] = [self.side.hello, name.encode(), self.told.inviter_hello, self.told.exchange.encode()]

    def prove(self, change: Callable[[bytes], bytes] = lambda given: given) -> bytes:
        given = change(self.proof)
        self.said.append(given)
        sealed = self.invitation.prove(self.told.exchange, given, "10.0.0.9")
        self.said.append(sealed)
        return sealed

    def join(self) -> Gift:
        return unseal(self.prove(), self.key, self.told)


def test_who_has_the_code_gets_the_secret_and_the_code_works_once(invitation: Invitation) -> None:
    assert JoinerSide(invitation, invitation.password.upper()).join() == GIFT
    assert (invitation.state, invitation.joined, invitation.num_wrong) == (InvitationState.JOINED, "laptop", 0)
    with pytest.raises(NoInvitationError):
        JoinerSide(invitation, invitation.password)


def test_a_reader_of_the_line_sees_neither_secret_nor_code(invitation: Invitation) -> None:
    joiner = JoinerSide(invitation, invitation.password)
    joiner.join()
    line = b"".join(joiner.said)
    for hidden in (GIFT.secret, invitation.password, parse_password(invitation.password), GIFT.node):
        assert hidden.encode() not in line
    assert joiner.key not in line and joiner.side.hello in line
    assert GIFT.secret not in repr(GIFT)


def test_the_fifth_wrong_code_ends_the_invitation(invitation: Invitation, caplog: pytest.LogCaptureFixture) -> None:
    late = JoinerSide(invitation, invitation.password)
    for left in range(MAX_WRONG - 1, -1, -1):
        with pytest.raises(WrongCodeError, match=f"{left} tr" if left else "the invitation has ended"):
            JoinerSide(invitation, WRONG).prove()
        assert invitation.tries_left == left
    assert invitation.state is InvitationState.WRONG_CODES
    with pytest.raises(NoInvitationError):
        late.join()
    assert caplog.text.count("wrong invitation code from 10.0.0.9") == MAX_WRONG
    assert invitation.password not in caplog.text


def test_each_exchange_is_good_for_one_proof(invitation: Invitation) -> None:
    joiner = JoinerSide(invitation, invitation.password)
    with pytest.raises(WrongCodeError):
        joiner.prove(lambda given: bytes(len(given)))
    with pytest.raises(NoInvitationError):
        joiner.join()
    assert invitation.num_wrong == 1, "a proof without an exchange is no try"


def test_recorded_messages_are_worth_nothing_in_another_exchange(invitation: Invitation, clock: FakeClock) -> None:
    recorded = JoinerSide(invitation, invitation.password)
    again = JoinerSide(invitation, invitation.password)
    with pytest.raises(WrongCodeError):
        invitation.prove(again.told.exchange, recorded.proof, "10.0.0.9")
    sealed = recorded.prove()
    assert unseal(sealed, recorded.key, recorded.told) == GIFT
    with pytest.raises(NoInvitationError):
        invitation.prove(recorded.told.exchange, recorded.proof, "10.0.0.9")


@pytest.mark.parametrize("place", range(0, 100, 9))
def test_an_altered_answer_is_refused(invitation: Invitation, place: int) -> None:
    joiner = JoinerSide(invitation, invitation.password)
    sealed = bytearray(joiner.prove())
    sealed[place] ^= 1
    for altered in (bytes(sealed), bytes(sealed[:place]), b""):
        with pytest.raises(TransportError, match="does not come from the node that made the code"):
            unseal(altered, joiner.key, joiner.told)


@pytest.mark.parametrize("field", ["joiner_hello", "inviter_hello", "exchange", "joiner_name"])
def test_what_is_altered_on_the_way_makes_the_proof_wrong(invitation: Invitation, field: str) -> None:
    joiner = JoinerSide(invitation, invitation.password)
    value = getattr(joiner.told, field)
    joiner.proof = proof(joiner.key, replace(joiner.told, **{field: value[:-1]}))
    with pytest.raises(WrongCodeError):
        joiner.prove()


def test_who_answers_without_the_code_cannot_hand_over_a_secret(invitation: Invitation) -> None:
    """A stranger that takes the place of the inviting node."""
    stranger = Invitation(dataclasses.replace(GIFT, secret=new_secret()))
    with pytest.raises(WrongCodeError):  # it does not know the code, so it sees no proof of it
        JoinerSide(stranger, invitation.password).prove()
    joiner, other = JoinerSide(invitation, invitation.password), JoinerSide(stranger, stranger.password)
    with pytest.raises(TransportError):
        unseal(other.prove(), joiner.key, joiner.told)


def test_it_ends_after_ten_minutes(invitation: Invitation, clock: FakeClock) -> None:
    clock.now += VALID_S - 1
    in_time = JoinerSide(invitation, invitation.password)
    assert invitation.left_s == 1
    clock.now += 1
    assert invitation.state is InvitationState.EXPIRED and invitation.left_s == 0
    with pytest.raises(NoInvitationError, match="older than 10 minutes"):
        in_time.join()


def test_of_two_joiners_at_once_one_wins(invitation: Invitation) -> None:
    one, two = (JoinerSide(invitation, invitation.password, name) for name in ("one", "two"))
    assert two.join() == GIFT
    with pytest.raises(NoInvitationError):
        one.join()
    assert invitation.joined == "two"


def test_strangers_can_begin_only_so_many_exchanges_at_a_time(clock: FakeClock) -> None:
    invitation = Invitation(GIFT, clock)
    for number in range(MAX_EXCHANGES):
        invitation.reserve()
        if number % 2:
            invitation.begin(Side("B", invitation.password), b"", b"", "")
    with pytest.raises(OverloadError):
        invitation.reserve()
    clock.now += EXCHANGE_S
    invitation.reserve()
    for _ in range(MAX_EXCHANGES // 2):
        invitation.give_up()
    assert JoinerSide(invitation, invitation.password).join() == GIFT


def test_an_exchange_that_takes_too_long_is_over(invitation: Invitation, clock: FakeClock) -> None:
    joiner = JoinerSide(invitation, invitation.password)
    clock.now += EXCHANGE_S
    with pytest.raises(NoInvitationError, match="start again"):
        joiner.join()
    assert JoinerSide(invitation, invitation.password).join() == GIFT


def test_a_new_invitation_ends_the_one_before() -> None:
    invitations = Invitations(GIFT)
    with pytest.raises(NoInvitationError):
        invitations.current()
    first, second = invitations.open(), invitations.open()
    assert first.state is InvitationState.WITHDRAWN and invitations.current() is second
    assert first.password != second.password
    second.withdraw()
    with pytest.raises(NoInvitationError):
        invitations.current()


def test_an_open_mesh_has_nothing_to_give() -> None:
    with pytest.raises(InputError, match="exo-mesh secret new"):
        Invitations().open()


def test_codes_are_random_and_forgive_how_they_are_typed() -> None:
    drawn = {new_password() for _ in range(100)}
    assert len(drawn) == 100 and all(re.fullmatch(f"([{ALPHABET}]{{4}}-?){{3}}", one) for one in drawn)
    assert len(ALPHABET) ** 12 > 2**58
    assert parse_password(" ABCD efgh-jkmn\n") == parse_password("abcd-efgh-jkmn")
    for wrong in ("", "abcd-efgh", "abcd-efgh-jkm1", "abcd-efgh-jkmnp", "abcd_efgh_jkmn"):
        with pytest.raises(InputError, match="not a code"):
            parse_password(wrong)


@pytest.mark.parametrize(
    "hello", [b"", b"A", b"A" + bytes(32), b"A" + b"\xff" * 32, b"A\x01" + bytes(31), b"B" + bytes(32), b"A" * 34],
    ids=repr,
)  # fmt: skip
def test_what_is_no_hello_is_refused(hello: bytes) -> None:
    with pytest.raises(InputError):
        Side("B", WRONG).finish(hello)


def test_a_hello_sent_back_is_refused() -> None:
    side = Side("A", WRONG)
    with pytest.raises(InputError):
        side.finish(side.hello)
    with pytest.raises(InputError):
        side.finish(b"B" + side.hello[1:])


def test_names_of_joiners_do_no_harm_in_a_log() -> None:
    assert shown_name("lap\ntop\x1b[31m") == "lap\ufffdtop\ufffd[31m" and len(shown_name("x" * 999)) == 64


def test_a_transcript_does_not_mix_up_its_parts() -> None:
    assert Transcript(b"ab", b"c", "d", "e").digest != Transcript(b"a", b"bc", "d", "e").digest


def test_an_invitation_names_addresses_that_a_person_can_type() -> None:
    addresses = ("10.0.0.5:5000", "[fe80::2]:5000", "[fd00::5]:5000", "10.0.0.5:5001")
    own = PeerInfo("a" * 32, 1, "n", "0.1", 1, "default", addresses, api_url="https://10.0.0.5:52415")
    assert api_addresses(own) == ("https://10.0.0.5:52415", "https://[fd00::5]:52415")
    cable = replace(own, addresses=("[fe80::2]:5000",), api_url="http://[fe80::2]:52415")
    assert api_addresses(cable) == ("[fe80::2]:52415",), "better than none"
