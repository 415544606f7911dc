"""The board for rings: laps, stages, hops between nodes, tensor groups, and recoveries."""

from __future__ import annotations

from tools.dashboards.boards import (
    Board,
    Panel,
    Query,
    Row,
    Variable,
    events,
    mean,
    quantile,
    quantiles,
    rate,
    series,
    total,
)

_RING = 'instance_id=~"$instance_id"'
_STAGE = "stage {{stage}} on {{node}}"
_HOP = "{{node}} to {{peer}}"
_ENGINES = f"max by (instance_id, stage, rank, engine, model, node) ({series('exo_mesh_stage_info', _RING)})"

_LAPS = (
    Panel(
        "Time of a lap",
        "The time of a frame's lap round the ring: computing and links of all stages. Each output token takes one lap.",
        "s",
        quantiles("exo_mesh_lap_seconds", _RING),
    ),
    Panel(
        "Where a lap goes, mean",
        "The whole lap, and the part of it that is spent on each link. The rest is computing.",
        "s",
        (
            Query(mean("exo_mesh_lap_seconds", _RING, by=("instance_id",)), "{{instance_id}} lap"),
            Query(mean("exo_mesh_lap_hop_seconds", _RING, by=("instance_id",)), "{{instance_id}} one link"),
        ),
    ),
    Panel(
        "Sequences that run and wait",
        "Requests in the driver of each ring. More running sequences fill the ring better.",
        "short",
        (
            Query(total(series("exo_mesh_running_sequences", _RING), "instance_id"), "{{instance_id}} run"),
            Query(total(series("exo_mesh_queue_depth", _RING), "instance_id"), "{{instance_id}} wait"),
        ),
    ),
)

_STAGES = (
    Panel(
        "Busy stages",
        "Share of the last 10 s that each stage spent in its engine. The busiest stage limits the ring.",
        "percentunit",
        (Query(series("exo_mesh_stage_busy_ratio", _RING), _STAGE),),
        maximum=1,
    ),
    Panel(
        "Stages that wait for frames",
        "Share of the last 10 s in which a stage had sequences and no frame: the bubble of the pipeline.",
        "percentunit",
        (Query(series("exo_mesh_stage_bubble_ratio", _RING), _STAGE),),
        maximum=1,
    ),
    Panel(
        "Time in the engine for one frame",
        "Busy time divided by frames. It shows which stage is slow.",
        "s",
        (
            Query(
                f"{total(rate('exo_mesh_stage_busy_seconds_total', _RING), 'instance_id', 'stage', 'node')}"
                f" / {total(rate('exo_mesh_stage_frames_total', _RING), 'instance_id', 'stage', 'node')}",
                _STAGE,
            ),
        ),
    ),
    Panel(
        "Layers",
        "Number of layers of each stage.",
        "short",
        (Query(series("exo_mesh_stage_layers", _RING), _STAGE),),
        stacked=True,
    ),
    Panel(
        "Memory of stages",
        "Weights and KV of each stage, or of each rank of its tensor group.",
        "bytes",
        (Query(series("exo_mesh_stage_memory_bytes", _RING), _STAGE + " rank {{rank}}"),),
        stacked=True,
    ),
    Panel(
        "Sequences with KV",
        "Sequences that each stage keeps KV for. The stages of one ring agree, except for frames in transit.",
        "short",
        (Query(series("exo_mesh_stage_sequences", _RING), _STAGE),),
    ),
    Panel(
        "Speed of prefill",
        "Prompt tokens divided by the time that a stage spent on them.",
        "short",
        (
            Query(
                f"{total(rate('exo_mesh_prefill_tokens_total', _RING), 'instance_id', 'stage', 'node')}"
                f" / {total(rate('exo_mesh_prefill_seconds_total', _RING), 'instance_id', 'stage', 'node')}",
                _STAGE,
            ),
        ),
    ),
    Panel(
        "Speed of prefill, as each stage reports it",
        "The stage's own figure over its last 10 s. 0 without prefill.",
        "short",
        (Query(series("exo_mesh_prefill_tokens_per_second", _RING), _STAGE),),
    ),
    Panel(
        "Stages and engines",
        "Which engine runs each stage, and each rank of a tensor group, on which node.",
        "none",
        (
            Query(
                f"max by (instance_id, stage, rank, engine, model, node) ({series('exo_mesh_stage_info', _RING)})", ""
            ),
        ),
        kind="table",
    ),
)

_HOPS = (
    Panel(
        "Time of a hop, p95",
        "From sending a frame to its arrival at the next node of the ring.",
        "s",
        (Query(quantile(0.95, "exo_mesh_hop_seconds", _RING, by=("node", "peer")), _HOP),),
    ),
    Panel(
        "Time of a hop, mean",
        "From sending a frame to its arrival at the next node of the ring.",
        "s",
        (Query(mean("exo_mesh_hop_seconds", _RING, by=("node", "peer")), _HOP),),
    ),
    Panel(
        "Bytes sent",
        "Bytes that each stage sends to the next. Prompts send most.",
        "Bps",
        (Query(total(rate("exo_mesh_hop_sent_bytes_total", _RING), "node", "peer"), _HOP),),
    ),
    Panel(
        "Frames sent",
        "Frames that each stage sends to the next.",
        "ops",
        (Query(total(rate("exo_mesh_hop_frames_total", _RING), "node", "peer"), _HOP),),
    ),
    Panel(
        "Bytes of a frame, mean",
        "Bytes divided by frames of each hop.",
        "bytes",
        (
            Query(
                f"{total(rate('exo_mesh_hop_sent_bytes_total', _RING), 'node', 'peer')}"
                f" / {total(rate('exo_mesh_hop_frames_total', _RING), 'node', 'peer')}",
                _HOP,
            ),
        ),
    ),
    Panel(
        "Round trips between nodes",
        "Smoothed round trip of a control call. Compare it with the hops: hops of a busy ring are longer.",
        "s",
        (Query(series("exo_mesh_peer_rtt_seconds"), _HOP),),
    ),
)

_GROUPS = (
    Panel(
        "All-reduce of tensor groups",
        "One all-reduce, as each rank last measured it. RDMA over Thunderbolt takes microseconds, TCP far longer.",
        "s",
        (Query(series("exo_mesh_group_all_reduce_seconds", _RING), _STAGE + " rank {{rank}}"),),
        width=12,
    ),
    Panel(
        "All-reduces of one decode step",
        "The time of an all-reduce multiplied by the number of them in one step: what a tensor group adds to a token.",
        "s",
        (Query(series("exo_mesh_step_all_reduce_seconds", _RING), _STAGE + " rank {{rank}}"),),
        width=12,
    ),
)

_LOSSES = (
    Panel(
        "Ballot counter of the plan",
        "It rises when a ring is rebuilt after a loss.",
        "short",
        (Query(f"max by (instance_id) ({series('exo_mesh_plan_epoch', _RING)})", "{{instance_id}}"),),
    ),
    Panel(
        "Recoveries by cause",
        "In each interval, by the lost part. An outcome other than ready is the code of an error.",
        "short",
        (
            Query(
                total(events("exo_mesh_recoveries_total"), "cause", "outcome"),
                "{{cause}}: {{outcome}}",
            ),
        ),
        events=True,
    ),
    Panel(
        "Ends of runners",
        "In each interval, by how they ended. stopped, lost and refused are not failures of a runner.",
        "short",
        (
            Query(
                total(events("exo_mesh_runner_ends_total"), "node", "end"),
                "{{node}}: {{end}}",
            ),
        ),
        events=True,
    ),
    Panel(
        "Time to notice a loss",
        "From the first sign of a loss to the verdict.",
        "s",
        quantiles("exo_mesh_recovery_detection_seconds"),
    ),
    Panel(
        "Time to recover",
        "From the verdict to a ring that is ready.",
        "s",
        quantiles("exo_mesh_recovery_seconds"),
    ),
    Panel(
        "Bytes that recoveries loaded",
        "Weights that peers read because of recoveries, in each interval of the chart.",
        "bytes",
        (
            Query(
                total(events("exo_mesh_recovery_loaded_bytes_total"), "node"),
                "{{node}}",
            ),
        ),
        events=True,
    ),
)

RING = Board(
    "ring",
    "exo-mesh: rings and hops",
    "Laps, stages, links between nodes, tensor groups and recoveries.",
    (
        Row("Laps", _LAPS),
        Row("Stages", _STAGES),
        Row("Hops", _HOPS),
        Row("Tensor groups", _GROUPS),
        Row("Losses and recoveries", _LOSSES),
    ),
    (Variable("instance_id", "Placed model", "exo_mesh_stage_layers"),),
)
