"""Wires the parts of a node that share keys and settings with its peers, and its answers to calls of the membership."""

from __future__ import annotations

from functools import partial

import msgspec

from exo_mesh.mesh.membership import calls
from exo_mesh.mesh.membership.key_sharing import KeySharing
from exo_mesh.mesh.membership.service import Membership
from exo_mesh.mesh.membership.setting_sharing import FILE_NAME, SettingSharing
from exo_mesh.settings.config import Settings
from exo_mesh.settings.effective import EffectiveSettings
from exo_mesh.wire.call_access import CallGuard, OwnCalls, PeerAt
from exo_mesh.wire.peer_call import AnyAnswer, CallAnswer, answer


class SharingParts(msgspec.Struct, frozen=True):
    """keys: the HTTP API keys. settings: the settings in force here, of which the mesh shares some."""

    keys: KeySharing
    settings: SettingSharing

    @staticmethod
    def build(settings: Settings, effective: EffectiveSettings, membership: Membership) -> SharingParts:
        return SharingParts(
            KeySharing.build(settings, membership), SettingSharing(effective, membership, settings.home / FILE_NAME)
        )


def answers(membership: Membership, own_calls: OwnCalls) -> list[AnyAnswer]:
    """The answers to the calls of the membership, except SHARE_KEYS."""
    stops, sleeps = membership.stops, membership.sleeps
    return [
        CallAnswer(calls.HELLO, partial(calls.answer_hello, membership.admission.answer_hello)),
        answer(calls.PROBE, partial(calls.answer_probe, membership.probing.answer)),
        answer(calls.INDIRECT_PROBE, partial(calls.answer_indirect_probe, membership.probing.answer_indirect)),
        answer(calls.EXCHANGE, partial(calls.answer_exchange, membership.exchange.answer)),
        answer(calls.GOODBYE, partial(calls.answer_goodbye, membership.peer_leaves)),
        answer(calls.CONFIRM, partial(calls.answer_confirm, own_calls)),
        answer(calls.STOP_NODE, partial(calls.answer_stop_node, membership.own, stops.ask)),
        answer(calls.WAKE, partial(calls.answer_wake, sleeps.send_packets)),
    ]


def key_answers(keys: KeySharing) -> list[AnyAnswer]:
    return [answer(calls.SHARE_KEYS, partial(calls.answer_share_keys, keys.compare))]


def guard_of(membership: Membership, settings: Settings) -> CallGuard:
    """The guard of a node's control port."""
    return CallGuard(
        is_closed=bool(settings.secret),
        open_admin=settings.open_admin,
        peers=lambda: [
            PeerAt(peer.id, peer.proven_ips, partial(calls.confirm, membership.calls, peer.id))
            for peer in membership.peers
        ],
    )
