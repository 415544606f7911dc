"""How this node, its peers and the instances are, and why: levels, and reasons with what to do about them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from statistics import median
from typing import Any

from exo_mesh.clock import Clock
from exo_mesh.discovery.choose import is_loopback
from exo_mesh.domain.device import PeerInfo, Telemetry
from exo_mesh.domain.download import DownloadInfo
from exo_mesh.domain.footprint import gigabytes
from exo_mesh.domain.health import HealthLevel, Reason, worst
from exo_mesh.domain.rdma_links import bridge_cycle
from exo_mesh.domain.view import InstanceInfo, InstanceState
from exo_mesh.hosting.guard import Guard
from exo_mesh.machine.disk import Disk
from exo_mesh.machine.pressure import MemoryMonitor, PressureLevel
from exo_mesh.membership.service import Membership
from exo_mesh.settings.config import Settings

MAX_SKEW_S = 5.0
"""As in `exo-mesh doctor`: logs of several machines that are further apart mislead people."""

ALONE_S = 30.0
"""Discovery finds a peer of the same LAN within a few seconds."""

SLOW_RTT_MS, SLOW_MB_PER_S = 20.0, 11.0
"""A hop that is slower is what a ring waits for: 11 MB/s is what 100 Mbit/s carry; a LAN answers within 1 ms, Wi-Fi
within 10."""

BUSY = 1.5
"""Processes that want a core, for each core. Above it, measured ways say more about the machines than about the
links."""

FRESH_S = 0.5
"""The reasons travel with every probe; they need not be found anew for each."""

MAX_NAMED = 8

_log = logging.getLogger(__name__)


class Health:
    """Looks at what the parts of a node say. note: problems found at its start."""

    def __init__(
        self,
        settings: Settings,
        membership: Membership,
        disk: Disk,
        guard: Guard,
        monitor: MemoryMonitor,
        instances: Callable[[], Iterable[InstanceInfo]],
        clock: Clock,
        ended_tasks: Callable[[], Mapping[str, str]] = dict,
        failed_downloads: Callable[[], Iterable[DownloadInfo]] = tuple,
    ) -> None:
        self._settings = settings
        self._membership = membership
        self._disk = disk
        self._guard = guard
        self._monitor = monitor
        self._instances = instances
        self._clock = clock
        self._ended_tasks = ended_tasks
        self._failed_downloads = failed_downloads
        self._started_at = clock()
        self._noted: list[Reason] = []
        self._had_peers = False
        self._num_missed = 0
        self._kept: tuple[float, list[Reason]] = (float("-inf"), [])

    def note(self, code: str, message: str, remedy: str) -> None:
        """Something that was found once, and stays so until the next start."""
        self._noted.append(Reason(code, HealthLevel.DEGRADED, message, remedy))

    def missed_peers(self, found: int) -> None:
        """The wait for peers has ended without all of them."""
        self._num_missed = self._settings.wait_for_peers - found
        _log.warning("%s", self._missed_text())

    def _missed(self) -> Reason | None:
        if not self._num_missed or self._membership.num_peers >= self._settings.wait_for_peers:
            return None
        remedy = "start the others, or see exo-mesh doctor if they run; --discovery-timeout 0 waits without end"
        return Reason("peers_missing", HealthLevel.DEGRADED, self._missed_text(), remedy)

    def _missed_text(self) -> str:
        settings = self._settings
        found = settings.wait_for_peers - self._num_missed
        return (
            f"{found} of {settings.wait_for_peers} other peers were found within {settings.discovery_timeout} s, "
            "so this node is ready without the rest"
        )

    def reasons(self) -> list[Reason]:
        """What is wrong with this node, or worth knowing of it."""
        now = self._clock()
        if now - self._kept[0] > FRESH_S:
            found = [*self._noted, *self._guard.reasons(), self._disk.problem(), self._memory(), self._skew()]
            found.append(self._leaked())
            found += [self._copied(), self._missed()]
            found += [self._alone(now), self._versions(), self._bridges(), *self._slow_links(), *self._ended()]
            found += self._downloads()
            self._kept = now, [reason for reason in found if reason is not None]
        return self._kept[1]

    def problems(self) -> tuple[Reason, ...]:
        """What the other peers are told: whatever is worse than ok."""
        return tuple(reason for reason in self.reasons() if reason.level is not HealthLevel.OK)

    def describe(self, phase: str) -> dict[str, Any]:
        """phase: "starting", "waiting_for_peers", "ok", "draining" or "stopping"."""
        num_others, readings = self._membership.num_peers, self._membership.telemetry
        found = [*self._waiting(phase, num_others), *self.reasons(), *self._refused()]
        status = "degraded" if phase == "ok" and worst(found) is not HealthLevel.OK else phase
        return {
            "status": status,
            "level": str(worst(found)),
            "reasons": [reason.describe() for reason in found],
            "peers": num_others + 1,
            "mesh": "closed" if self._settings.secret else "open",
            "peer_health": self._peer_health(found, readings),
            "instance_health": [self._describe_instance(instance, readings) for instance in self._instances()],
        }

    # this node

    def _memory(self) -> Reason | None:
        monitor = self._monitor
        if monitor.level is PressureLevel.OK:
            return None
        last, needs_bytes = monitor.last, monitor.loading_bytes
        effect = (
            "running requests give way to each other, and new ones are refused or go to other peers"
            if monitor.level is PressureLevel.CRITICAL
            else "rings with a stage here take nobody new beside those that run"
        )
        return Reason(
            "memory_pressure",
            HealthLevel.DEGRADED,
            f"{gigabytes(last.available_bytes)} of {gigabytes(last.total_bytes)} memory are free on this machine, "
            f"{gigabytes(monitor.floors.critical_bytes)} must stay free for the system, and "
            f"{gigabytes(needs_bytes)} of weights are still to be loaded: {effect}",
            "end other programs on it, or lower --max-memory and place the model again",
        )

    def _leaked(self) -> Reason | None:
        if not (num_bytes := self._monitor.leaked_bytes):
            return None
        return Reason(
            "leaked_wired",
            HealthLevel.DEGRADED,
            f"{gigabytes(num_bytes)} of memory are wired, though no model runs here: a runner that got stuck in "
            "the driver of the GPU may have left them, unless another program uses the GPU",
            "restart this Mac: only that frees them",
        )

    def _skew(self) -> Reason | None:
        """Of two clocks it is not known which is wrong; of more, it is the one that most others differ from."""
        known = {peer.info.name: off for peer in self._membership.peers if (off := peer.clock_offset_s) is not None}
        wrong = {name: off for name, off in known.items() if abs(off) > MAX_SKEW_S}
        if not wrong:
            return None
        is_own = len(known) > 1 and abs(median(known.values())) > MAX_SKEW_S and len(wrong) > len(known) / 2
        named = sorted(wrong.items())[:MAX_NAMED]
        if is_own:
            said = "this node's clock is " + ", ".join(f"{-off:+.0f} s off from {name}" for name, off in named)
        else:
            said = "; ".join(f"the clock of {name} is {off:+.0f} s off from this node's" for name, off in named)
        is_ours_to_tell = is_own or len(known) == 1
        return Reason(
            "clock_skew",
            HealthLevel.DEGRADED if self._settings.secret and is_ours_to_tell else HealthLevel.OK,
            f"{said}: certificates of a closed mesh and times in logs depend on the clocks",
            "let NTP set the clock there: timedatectl set-ntp true",
        )

    def _copied(self) -> Reason | None:
        if not (name := self._membership.id_taken_by):
            return None
        return Reason(
            "id_in_use",
            HealthLevel.DEGRADED,
            f"this node's id {self._membership.own.id[:8]} is in use by {name}, so it cannot join the mesh",
            "its home was copied: give this machine its own --home, or delete node_id in its home, then restart",
        )

    def _alone(self, now: float) -> Reason | None:
        self._had_peers = self._had_peers or self._membership.num_peers > 0
        settings = self._settings
        named = bool(settings.bootstrap_peers or settings.peers_file)
        if self._membership.num_peers or now - self._started_at < ALONE_S or not (named or settings.discovery):
            return None
        if named:
            remedy = "check that they run, their addresses and firewalls; exo-mesh doctor on both helps"
            return Reason("no_peers", HealthLevel.DEGRADED, "none of the peers that were named can be reached", remedy)
        message = "its peers are gone" if self._had_peers else f"no peer was found by {', '.join(settings.discovery)}"
        remedy = "start exo-mesh on another machine; if it runs there, exo-mesh doctor, or name it: --bootstrap-peers"
        return Reason("alone", HealthLevel.OK, message, remedy)

    def _versions(self) -> Reason | None:
        own = self._membership.own.version
        others = [
            f"{peer.info.name} {peer.info.version}" for peer in self._membership.peers if peer.info.version != own
        ]
        if not others:
            return None
        text = f"this node is exo-mesh {own}, others are not: {', '.join(others[:MAX_NAMED])}"
        return Reason("version_mix", HealthLevel.DEGRADED, text, "install one version on all machines")

    def _bridges(self) -> Reason | None:
        peers = [self._membership.own, *(peer.info for peer in self._membership.peers)]
        if not (looped := set(bridge_cycle(peers))):
            return None
        names = sorted(peer.name for peer in peers if peer.id in looped)
        return Reason(
            "thunderbolt_bridge_cycle",
            HealthLevel.DEGRADED,
            f"cables and Thunderbolt Bridges join {', '.join(names[:MAX_NAMED])} in a loop: packets can go round for "
            "ever and drown the network",
            "remove the Thunderbolt Bridge in System Settings > Network on these Macs; RDMA needs none",
        )

    def _slow_links(self) -> Iterable[Reason]:
        """Ways to peers with which this one shares a ring."""
        own_id = self._membership.own.id
        rings = [one.plan.member_ids for one in self._instances() if own_id in one.plan.member_ids]
        partners = {peer_id for ring in rings for peer_id in ring} - {own_id}
        for peer in self._membership.peers:
            used = peer.paths.get(peer.client.address)
            if (
                peer.id not in partners
                or used is None
                or not used.works
                or is_loopback(used.address.rpartition(":")[0])
            ):
                continue
            if max(self._membership.busy(own_id), self._membership.busy(peer.id)) > BUSY:
                continue  # the answer may have waited for a core, and not for the link
            figures = []
            if used.rtt_ms is not None and used.rtt_ms > SLOW_RTT_MS:
                figures.append(f"takes {used.rtt_ms:.0f} ms there and back")
            if used.mb_per_s is not None and used.mb_per_s < SLOW_MB_PER_S:
                figures.append(f"carries {used.mb_per_s:.1f} MB/s")
            if figures:
                yield Reason(
                    "slow_link",
                    HealthLevel.DEGRADED,
                    f"the way to {peer.info.name} by {used.address} {' and '.join(figures)}, and a ring goes over it",
                    "use a cable instead of Wi-Fi or a VPN; exo-mesh topology shows all ways that were measured",
                )

    def _downloads(self) -> Iterable[Reason]:
        for info in self._failed_downloads():
            text = f"fetching {info.model} failed: {info.reason}"
            remedy = info.remedy or f"try again: exo-mesh pull {info.model}"
            yield Reason("download_failed", HealthLevel.DEGRADED, text, remedy)

    def _ended(self) -> Iterable[Reason]:
        for name, exception in self._ended_tasks().items():
            text = f"the task {name!r} of this node ended with {exception}, which is a bug of exo-mesh"
            yield Reason("task_ended", HealthLevel.DEGRADED, text, "restart the node; its log says where it ended")

    def _refused(self) -> list[Reason]:
        remedy = "give both one --namespace, secret and version; each its --home"
        return [Reason("peer_refused", HealthLevel.OK, text, remedy) for text in self._membership.refusals]

    def _waiting(self, phase: str, num_others: int) -> list[Reason]:
        if phase != "waiting_for_peers":
            return []
        text = f"{num_others} of {self._settings.wait_for_peers} other peers seen"
        return [Reason("waiting_for_peers", HealthLevel.OK, text, "start them, or see exo-mesh doctor if they run")]

    # the others

    def _peer_health(self, own: list[Reason], readings: Mapping[str, Telemetry]) -> list[dict[str, Any]]:
        membership = self._membership
        found = [_described(membership.own.id, membership.own.name, own)]
        for peer in membership.peers:
            told = readings[peer.id].reasons if peer.id in readings else ()
            found.append(_described(peer.id, peer.info.name, told))
        found += [_described(info.id, info.name, [_unreachable(info, gone_s)]) for info, gone_s in membership.lost]
        found += [
            _described(one.id, one.name, [_asleep(one.name, slept_s)]) for one, slept_s in membership.sleeps.asleep
        ]
        return found

    def _describe_instance(self, instance: InstanceInfo, readings: Mapping[str, Telemetry]) -> dict[str, Any]:
        reasons = list(self._of_instance(instance, readings))
        name = instance.plan.instance_id
        return {"id": name, "level": str(worst(reasons)), "reasons": [reason.describe() for reason in reasons]}

    def _of_instance(self, instance: InstanceInfo, readings: Mapping[str, Telemetry]) -> Iterable[Reason]:
        if instance.state is InstanceState.FAILED:
            remedy = "the next request places it anew; the log of the peer that is named says more"
            yield Reason("failed", HealthLevel.FAILED, instance.reason or "it has failed", remedy)
        elif instance.state is InstanceState.LOADING:
            yield Reason("loading", HealthLevel.OK, "its stages are being loaded", "")
        for index, _, peer_id in instance.plan.seats:
            own = peer_id == self._membership.own.id
            told = self.problems() if own else readings[peer_id].reasons if peer_id in readings else ()
            for reason in told:
                if reason.code in ("memory_pressure", "slow_link"):
                    text = f"stage {index} is on a peer where {reason.message}"
                    yield Reason(reason.code, HealthLevel.DEGRADED, text, reason.remedy)


def _described(peer_id: str, name: str, reasons: Iterable[Reason]) -> dict[str, Any]:
    reasons = list(reasons)
    return {
        "id": peer_id,
        "name": name,
        "level": str(worst(reasons)),
        "reasons": [reason.describe() for reason in reasons],
    }


def _unreachable(info: PeerInfo, gone_s: float) -> Reason:
    remedy = "see whether it runs and is connected; it joins again by itself, and is forgotten after ten minutes"
    return Reason("unreachable", HealthLevel.FAILED, f"it has not answered for {gone_s:.0f} s", remedy)


def _asleep(name: str, slept_s: float) -> Reason:
    span = f"{slept_s / 3600:.1f} h" if slept_s >= 3600 else f"{slept_s / 60:.0f} min"
    remedy = f"exo-mesh wake {name}: a peer of its network sends it a Wake-on-LAN packet"
    return Reason("asleep", HealthLevel.OK, f"its machine went to sleep {span} ago", remedy)
