"""What `exo-mesh drain` says of layers that stay."""

from __future__ import annotations

from exo_mesh.cli.verbs.drain import staying


def test_layers_that_stay_until_the_node_stops_are_named() -> None:
    ring = {"model": "m", "stages": [{"peer": "a", "layers": [0, 4]}, {"peer": "b", "layers": [4, 8]}]}
    alone = {"model": "whole", "stages": [{"peer": "a", "layers": [0, 8]}]}
    group = {"model": "g", "stages": [{"peer": "b", "layers": [0, 1], "group": {"peers": ["b", "a"]}}]}
    elsewhere = {"model": "other", "stages": [{"peer": "c", "layers": [0, 8]}]}
    pause = "answers that use it then pause until other peers have loaded these layers"
    state = {
        "node_id": "a",
        "view": {"peers": [{"id": "a"}, {"id": "b"}], "instances": [ring, alone, group, elsewhere]},
    }
    assert staying(state) == [
        f"m 0-3 stays here until the node stops; {pause}",
        "whole 0-7 stays here until the node stops; then another peer loads it for the next request",
        f"g 0 stays here until the node stops; {pause}",
    ]
    assert staying({"node_id": "d", "view": {"peers": [], "instances": [ring]}}) == []


def test_a_node_without_others_promises_nothing_for_its_layers() -> None:
    alone = {"model": "whole", "stages": [{"peer": "a", "layers": [0, 8]}]}
    assert staying({"node_id": "a", "view": {"peers": [{"id": "a"}], "instances": [alone]}}) == [
        "whole 0-7 stays here until the node stops; no other peer is there to load it then"
    ]
