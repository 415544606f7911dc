"""Health of this node, its peers and the instances: levels, and reasons with remedies."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median

from exo_mesh.base.clock import Clock
from exo_mesh.base.printable import counted
from exo_mesh.domain.device import PeerInfo, Telemetry
from exo_mesh.domain.download import DownloadInfo
from exo_mesh.domain.footprint import gigabytes
from exo_mesh.domain.health import HealthLevel, Reason, worst
from exo_mesh.domain.rdma_links import bridge_cycle
from exo_mesh.domain.reports import HealthReport, InstanceHealth, PeerHealth, ReasonReport
from exo_mesh.domain.view import InstanceInfo, InstanceState
from exo_mesh.machine.disk import Disk
from exo_mesh.machine.pressure import MemoryMonitor, PressureLevel
from exo_mesh.mesh.discovery.choose import is_loopback
from exo_mesh.mesh.membership.service import Membership
from exo_mesh.rings.hosting.guard import Guard
from exo_mesh.settings.config import Settings

MAX_SKEW_S = 5.0
"""Largest difference between clocks without a reason, as in `exo-mesh doctor`: more makes logs misleading."""

ALONE_S = 30.0
"""Time after which a node without peers reports that; discovery in a LAN takes a few seconds."""

SLOW_RTT_MS, SLOW_MB_PER_S = 20.0, 11.0
"""Limits beyond which a hop slows a ring down: 11 MB/s is a 100 Mbit/s link; a LAN answers within 1 ms, Wi-Fi within
10 ms."""

BUSY = 1.5
"""Load per core above which measurements of links are ignored: they then depend on the machine, not the link."""

FRESH_S = 0.5
"""Time for which reasons are cached, because every probe carries them."""

MAX_NAMED = 8

_log = logging.getLogger(__name__)


class Health:
    """Derives the health of a node from its parts."""

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
        """Adds a problem that was found at the start and lasts until the next start."""
        self._noted.append(Reason(code, HealthLevel.DEGRADED, message, remedy))

    def missed_peers(self, found: int) -> None:
        """Records and logs that the wait for peers ended before all were found."""
        self._num_missed = self._settings.wait_for_peers - found
        _log.warning("%s", self._missed_text())

    def _missed(self) -> Reason | None:
        if not self._num_missed or self._membership.num_peers >= self._settings.wait_for_peers:
            return None
        remedy = (
            "start the other peers, or run exo-mesh doctor if they run already; --discovery-timeout 0 waits forever"
        )
        return Reason("peers_missing", HealthLevel.DEGRADED, self._missed_text(), remedy)

    def _missed_text(self) -> str:
        settings = self._settings
        found = settings.wait_for_peers - self._num_missed
        return (
            f"{found} of {counted(settings.wait_for_peers, 'other peer')} were found within "
            f"{settings.discovery_timeout} s, so this node is ready without the rest"
        )

    def reasons(self) -> list[Reason]:
        """Problems and notes of this node, cached for FRESH_S."""
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
        """The reasons that are reported to other peers: those worse than ok."""
        return tuple(reason for reason in self.reasons() if reason.level is not HealthLevel.OK)

    def describe(self, phase: str) -> HealthReport:
        """The health for GET /health. phase: "starting", "waiting_for_peers", "ok", "draining" or "stopping"."""
        num_others, readings = self._membership.num_peers, self._membership.telemetry
        found = [*self._waiting(phase, num_others), *self.reasons(), *self._refused()]
        status = "degraded" if phase == "ok" and worst(found) is not HealthLevel.OK else phase
        return HealthReport(
            status=status,
            level=worst(found),
            reasons=_reports(found),
            peers=num_others + 1,
            mesh="closed" if self._settings.secret else "open",
            peer_health=self._peer_health(found, readings),
            instance_health=[self._describe_instance(instance, readings) for instance in self._instances()],
        )

    # this node

    def _memory(self) -> Reason | None:
        monitor = self._monitor
        if monitor.level is PressureLevel.OK:
            return None
        last, needs_bytes = monitor.last, monitor.loading_bytes
        effect = (
            "running requests are suspended in turn, and new ones are refused or go to other peers"
            if monitor.level is PressureLevel.CRITICAL
            else "rings with a stage here accept no further requests while others run"
        )
        return Reason(
            "memory_pressure",
            HealthLevel.DEGRADED,
            f"{gigabytes(last.available_bytes)} of {gigabytes(last.total_bytes)} memory are free on this machine, "
            f"{gigabytes(monitor.floors.critical_bytes)} must stay free for the system, and "
            f"{gigabytes(needs_bytes)} of weights are still to be loaded: {effect}",
            "close other programs on the machine, or lower --max-memory and place the model again",
        )

    def _leaked(self) -> Reason | None:
        if not (num_bytes := self._monitor.leaked_bytes):
            return None
        return Reason(
            "leaked_wired",
            HealthLevel.DEGRADED,
            f"{gigabytes(num_bytes)} of memory are wired although no model runs here: another program uses the GPU, or "
            "a runner that got stuck in the GPU driver has leaked the memory",
            "if no other program uses the GPU, restart this Mac: only that frees the memory",
        )

    def _skew(self) -> Reason | None:
        """Clocks that differ. With two clocks it is unknown which is off; with more, the clock that differs from most
        others."""
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
        is_ours_to_report = is_own or len(known) == 1
        return Reason(
            "clock_skew",
            HealthLevel.DEGRADED if self._settings.secret and is_ours_to_report else HealthLevel.OK,
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
            "the home was copied from that machine: set another --home, or delete node_id in the home, then restart",
        )

    def _alone(self, now: float) -> Reason | None:
        self._had_peers = self._had_peers or self._membership.num_peers > 0
        settings = self._settings
        named = bool(settings.bootstrap_peers or settings.peers_file)
        if self._membership.num_peers or now - self._started_at < ALONE_S or not (named or settings.discovery):
            return None
        if named:
            remedy = "check that they run, and their addresses and firewalls; run exo-mesh doctor on both machines"
            return Reason("no_peers", HealthLevel.DEGRADED, "none of the named peers can be reached", remedy)
        message = "all peers are gone" if self._had_peers else f"{', '.join(settings.discovery)} found no peer"
        remedy = "start exo-mesh on another machine; if it runs there, run exo-mesh doctor, or use --bootstrap-peers"
        return Reason("alone", HealthLevel.OK, message, remedy)

    def _versions(self) -> Reason | None:
        own = self._membership.own.version
        others = [
            f"{peer.info.name} {peer.info.version}" for peer in self._membership.peers if peer.info.version != own
        ]
        if not others:
            return None
        text = f"this node runs exo-mesh {own}, other peers differ: {', '.join(others[:MAX_NAMED])}"
        return Reason("version_mix", HealthLevel.DEGRADED, text, "install the same version on all machines")

    def _bridges(self) -> Reason | None:
        peers = [self._membership.own, *(peer.info for peer in self._membership.peers)]
        if not (looped := set(bridge_cycle(peers))):
            return None
        names = sorted(peer.name for peer in peers if peer.id in looped)
        return Reason(
            "thunderbolt_bridge_cycle",
            HealthLevel.DEGRADED,
            f"cables and Thunderbolt Bridges connect {', '.join(names[:MAX_NAMED])} in a loop: packets can circulate "
            "without end and overload the network",
            "remove the Thunderbolt Bridge in System Settings > Network on these Macs; RDMA does not need it",
        )

    def _slow_links(self) -> Iterable[Reason]:
        """Slow links to peers that share a ring with this node."""
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
                continue  # the delay may come from a busy processor, not from the link
            figures = []
            if used.rtt_ms is not None and used.rtt_ms > SLOW_RTT_MS:
                figures.append(f"has a round trip of {used.rtt_ms:.0f} ms")
            if used.mb_per_s is not None and used.mb_per_s < SLOW_MB_PER_S:
                figures.append(f"carries {used.mb_per_s:.1f} MB/s")
            if figures:
                yield Reason(
                    "slow_link",
                    HealthLevel.DEGRADED,
                    f"the link to {peer.info.name} at {used.address} {' and '.join(figures)}, and a ring uses it",
                    "use a cable instead of Wi-Fi or a VPN; exo-mesh topology shows all measured links",
                )

    def _downloads(self) -> Iterable[Reason]:
        for info in self._failed_downloads():
            text = f"the download of {info.model} failed: {info.reason}"
            remedy = info.remedy or f"try again: exo-mesh pull {info.model}"
            yield Reason("download_failed", HealthLevel.DEGRADED, text, remedy)

    def _ended(self) -> Iterable[Reason]:
        for name, exception in self._ended_tasks().items():
            text = f'the task "{name}" of this node ended with {exception}, which is a bug in exo-mesh'
            yield Reason(
                "task_ended", HealthLevel.DEGRADED, text, "restart the node; its log shows where the task ended"
            )

    def _refused(self) -> list[Reason]:
        remedy = "use the same --namespace, secret and version on both peers, and a separate --home for each"
        return [Reason("peer_refused", HealthLevel.OK, text, remedy) for text in self._membership.refusals]

    def _waiting(self, phase: str, num_others: int) -> list[Reason]:
        if phase != "waiting_for_peers":
            return []
        text = f"{num_others} of {counted(self._settings.wait_for_peers, 'other peer')} seen"
        remedy = "start the other peers, or run exo-mesh doctor if they run already"
        return [Reason("waiting_for_peers", HealthLevel.OK, text, remedy)]

    # other peers, and the instances

    def _peer_health(self, own: list[Reason], readings: Mapping[str, Telemetry]) -> list[PeerHealth]:
        membership = self._membership
        found = [_described(membership.own.id, membership.own.name, own)]
        for peer in membership.peers:
            reported = readings[peer.id].reasons if peer.id in readings else ()
            found.append(_described(peer.id, peer.info.name, reported))
        found += [_described(info.id, info.name, [_unreachable(info, gone_s)]) for info, gone_s in membership.lost]
        found += [
            _described(one.id, one.name, [_asleep(one.name, slept_s)]) for one, slept_s in membership.sleeps.asleep
        ]
        return found

    def _describe_instance(self, instance: InstanceInfo, readings: Mapping[str, Telemetry]) -> InstanceHealth:
        reasons = list(self._of_instance(instance, readings))
        return InstanceHealth(instance.plan.instance_id, worst(reasons), _reports(reasons))

    def _of_instance(self, instance: InstanceInfo, readings: Mapping[str, Telemetry]) -> Iterable[Reason]:
        if instance.state is InstanceState.FAILED:
            remedy = "the next request places the model again; the log of the named peer has details"
            yield Reason("failed", HealthLevel.FAILED, instance.reason or "the instance has failed", remedy)
        elif instance.state is InstanceState.LOADING:
            yield Reason("loading", HealthLevel.OK, "the instance is loading", "")
        if names := self._unverified(instance):
            text = f"the weights at {', '.join(names[:MAX_NAMED])} are not compared with the digests of the files yet"
            remedy = "nothing to do while the check runs; it needs the rest of the files, at other peers or the hub"
            yield Reason("unverified", HealthLevel.OK, text, remedy)
        for index, _, peer_id in instance.plan.seats:
            own = peer_id == self._membership.own.id
            reported = self.problems() if own else readings[peer_id].reasons if peer_id in readings else ()
            for reason in reported:
                if reason.code in ("memory_pressure", "slow_link"):
                    text = f"stage {index} is on a peer where {reason.message}"
                    yield Reason(reason.code, HealthLevel.DEGRADED, text, reason.remedy)

    def _unverified(self, instance: InstanceInfo) -> list[str]:
        """The names of peers that compute an instance from files that they have not checked."""
        members, model = set(instance.plan.member_ids), instance.plan.model
        peers = [self._membership.own, *(peer.info for peer in self._membership.peers)]
        return sorted(peer.name for peer in peers if peer.id in members and model in peer.unverified)


def _described(peer_id: str, name: str, reasons: Sequence[Reason]) -> PeerHealth:
    return PeerHealth(peer_id, name, worst(reasons), _reports(reasons))


def _reports(reasons: Iterable[Reason]) -> list[ReasonReport]:
    return [ReasonReport(one.code, one.level, one.message, one.remedy) for one in reasons]


def _unreachable(info: PeerInfo, gone_s: float) -> Reason:
    remedy = "check that it runs and is connected; it rejoins by itself, and is forgotten after ten minutes"
    return Reason("unreachable", HealthLevel.FAILED, f"no answer for {gone_s:.0f} s", remedy)


def _asleep(name: str, slept_s: float) -> Reason:
    span = f"{slept_s / 3600:.1f} h" if slept_s >= 3600 else f"{slept_s / 60:.0f} min"
    remedy = f"wake it with a Wake-on-LAN packet: exo-mesh wake {name}"
    return Reason("asleep", HealthLevel.OK, f"the machine went to sleep {span} ago", remedy)
