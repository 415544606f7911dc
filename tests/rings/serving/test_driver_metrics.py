"""What the stages of a real ring count reaches the metrics of their nodes."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from tests.rings.serving.dispatchers import MODEL, Ring
from tests.support.peers import Peer
from tests.support.processes import eventually


def samples(peer: Peer) -> dict[str, float]:
    """Value by name, of the long model; of several with one name, the last."""
    families = text_string_to_metric_families(peer.api.text("/metrics"))
    found = [sample for family in families for sample in family.samples]
    return {sample.name: sample.value for sample in found if sample.labels.get("instance_id", "").startswith(MODEL)}


def test_laps_hops_waits_and_shares_of_time_are_counted(ring: Ring) -> None:
    driving = ring.peers[1]
    before = samples(driving)
    for number in range(3):
        ring.peers[0].api.post("/v1/completions", {"model": MODEL, "prompt": f"q{number}", "max_tokens": 25}, 30)

    def counted() -> bool:
        now = samples(driving)
        waits, laps = "exo_mesh_queue_wait_seconds_count", "exo_mesh_lap_seconds_count"
        is_done = now.get(laps, 0) >= before.get(laps, 0) + 3 * 25  # the last heartbeat comes after the answer
        return is_done and now.get(waits, 0) == before.get(waits, 0) + 3

    assert eventually(counted), samples(driving)
    now = samples(driving)
    assert 0 < now["exo_mesh_lap_hop_seconds_count"] <= now["exo_mesh_lap_seconds_count"]
    assert now["exo_mesh_lap_hop_seconds_sum"] < now["exo_mesh_lap_seconds_sum"]
    for peer in ring.peers:
        assert eventually(lambda peer=peer: "exo_mesh_stage_busy_ratio" in samples(peer))  # type: ignore[misc]
        shown = samples(peer)
        assert 0 <= shown["exo_mesh_stage_busy_ratio"] <= 1 and 0 <= shown["exo_mesh_stage_bubble_ratio"] <= 1
        assert eventually(lambda peer=peer: samples(peer).get("exo_mesh_hop_seconds_count"))  # type: ignore[misc]
        assert 0 < samples(peer)["exo_mesh_hop_seconds_sum"] < now["exo_mesh_lap_seconds_sum"]
        other = ring.peers[1 - ring.peers.index(peer)]
        assert f'peer="{other.ready["name"]}"' in peer.api.text("/metrics"), "each link has its own"
    assert "exo_mesh_lap_seconds_count" not in samples(ring.peers[0]), "a ring has one driver"
