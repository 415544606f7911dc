"""The board for one or a few nodes: versions, memory, disk, runners, downloads, accelerators, and the machine."""

from __future__ import annotations

from tools.dashboards.boards import Board, Panel, Query, Row, events, quantiles, rate, series, total

_WHAT = (
    Panel(
        "Versions",
        "Version of exo-mesh, of its protocol and of Python on each node.",
        "none",
        (Query(f"max by (node, instance, version, protocol, python) ({series('exo_mesh_build_info')})", ""),),
        kind="table",
        width=12,
    ),
    Panel(
        "Engines",
        "Engines that can run on each node, their versions and what they compute on.",
        "none",
        (Query(f"max by (node, engine, version, compute, device) ({series('exo_mesh_engine_info')})", ""),),
        kind="table",
        width=12,
    ),
    Panel(
        "Ready",
        "1 while /readyz of the node answers 200.",
        "bool_yes_no",
        (Query(series("exo_mesh_node_ready"), "{{node}}"),),
        kind="state-timeline",
        height=6,
    ),
    Panel(
        "Draining",
        "1 while the node accepts no new requests.",
        "bool_yes_no",
        (Query(series("exo_mesh_node_draining"), "{{node}}"),),
        kind="state-timeline",
        height=6,
    ),
    Panel(
        "Time since the start",
        "It falls to 0 when the node restarts.",
        "s",
        (Query(f"time() - {series('process_start_time_seconds')}", "{{node}} {{job}}"),),
        height=6,
    ),
    Panel(
        "What is wrong",
        "Reasons of the health of each node, by code and level. docs/reference/health.md has the remedy for each code.",
        "short",
        (Query(series("exo_mesh_health_reasons"), "{{node}}: {{code}} ({{level}})"),),
        width=24,
    ),
)

_MEMORY = (
    Panel(
        "Memory in use",
        "Share of the machine's memory that is in use, and the highest share of the last minute and a half.",
        "percentunit",
        (
            Query(
                f"""1 - {total(series("exo_mesh_node_memory_bytes", 'kind="available"'), "node")}"""
                f""" / {total(series("exo_mesh_node_memory_bytes", 'kind="total"'), "node")}""",
                "{{node}}",
            ),
            Query(series("exo_mesh_node_memory_peak_ratio"), "{{node}} highest"),
        ),
        maximum=1,
    ),
    Panel(
        "Memory for plans",
        "Memory that plans hold on each node, and that a new reservation could get.",
        "bytes",
        (
            Query(series("exo_mesh_reserved_memory_bytes"), "{{node}} held"),
            Query(series("exo_mesh_usable_memory_bytes"), "{{node}} usable"),
        ),
    ),
    Panel(
        "Memory pressure",
        "0: there is room. 1: no new requests beside those that run. 2: running requests are paused.",
        "short",
        (Query(series("exo_mesh_memory_pressure_level"), "{{node}}"),),
        thresholds=((None, "green"), (1, "orange"), (2, "red")),
    ),
    Panel(
        "Free disk space",
        "On the volumes that the node writes to.",
        "bytes",
        (Query(series("exo_mesh_disk_free_bytes"), "{{node}} {{volume}}"),),
    ),
    Panel(
        "Files that were not written",
        "Files that were not written for lack of space or permission, in each interval of the chart.",
        "short",
        (Query(total(events("exo_mesh_disk_writes_refused_total"), "node"), "{{node}}"),),
        events=True,
    ),
    Panel(
        "Memory of stages",
        "Weights and KV of the stages on each node.",
        "bytes",
        (Query(total(series("exo_mesh_stage_memory_bytes"), "node", "model"), "{{node}} {{model}}"),),
        stacked=True,
    ),
)

_PROCESS = (
    Panel(
        "CPU of the node process",
        "In cores. An idle node uses about 0.005. Runners are separate processes and not included.",
        "short",
        (Query(rate("process_cpu_seconds_total"), "{{node}} {{job}}"),),
    ),
    Panel(
        "Memory of the node process",
        "Resident memory without the runners.",
        "bytes",
        (Query(series("process_resident_memory_bytes"), "{{node}} {{job}}"),),
    ),
    Panel(
        "Open files",
        "Share of the files and connections that the process may have open.",
        "percentunit",
        (Query(f"{series('process_open_fds')} / {series('process_max_fds')}", "{{node}} {{job}}"),),
        maximum=1,
    ),
    Panel(
        "Runners started and restarted",
        "In each interval. A restart is the start of a runner for an instance that had one on this node before.",
        "short",
        (
            Query(total(events("exo_mesh_runner_starts_total"), "node"), "{{node}} started"),
            Query(total(events("exo_mesh_runner_restarts_total"), "node"), "{{node}} restarted"),
        ),
        events=True,
    ),
    Panel(
        "HTTP answers by route",
        "Answers of the API of each node, for the ten busiest routes.",
        "reqps",
        (Query(f"topk(10, {total(rate('exo_mesh_http_responses_total'), 'node', 'method', 'route')})",
               "{{node}} {{method}} {{route}}"),),
    ),
    Panel(
        "Round trips to other nodes",
        "Smoothed round trip of a control call.",
        "s",
        (Query(series("exo_mesh_peer_rtt_seconds"), "{{node}} to {{peer}}"),),
    ),
)  # fmt: skip

_DOWNLOADS = (
    Panel(
        "Downloads in progress",
        "Downloads of models that run or wait.",
        "short",
        (Query(series("exo_mesh_downloads_in_progress"), "{{node}}"),),
        width=6,
    ),
    Panel(
        "Bytes received",
        "Bytes of models by source: a hub, other nodes of the mesh, or the cache of Hugging Face on the machine.",
        "Bps",
        (Query(total(rate("exo_mesh_download_bytes_total"), "node", "source"), "{{node}} from {{source}}"),),
        width=6,
    ),
    Panel(
        "Files completed",
        "Files of models that were completed, in each interval of the chart.",
        "short",
        (Query(total(events("exo_mesh_download_files_total"), "node"), "{{node}}"),),
        width=6,
        events=True,
    ),
    Panel(
        "Downloads that ended",
        "In each interval, by outcome, and the error codes of failed downloads.",
        "short",
        (
            Query(total(events("exo_mesh_downloads_total"), "node", "outcome"), "{{node}} {{outcome}}"),
            Query(
                total(events("exo_mesh_download_failures_total"), "node", "type"),
                "{{node}} {{type}}",
            ),
        ),
        width=6,
        events=True,
    ),
)

_POWER = (
    Panel(
        "Power of the machine",
        "Power of the machine, as far as it is measured, and of its parts. docs/reference/power.md has the sources.",
        "watt",
        (
            Query(series("exo_mesh_power_watts"), "{{node}}"),
            Query(series("exo_mesh_power_part_watts"), "{{node}} {{part}}"),
        ),
    ),
    Panel(
        "Energy",
        "Energy that the machine has used, in each interval of the chart.",
        "joule",
        (Query(total(events("exo_mesh_energy_joules_total"), "node"), "{{node}}"),),
        events=True,
    ),
    Panel(
        "Temperature",
        "The hottest sensor of the machine, and each accelerator.",
        "celsius",
        (
            Query(series("exo_mesh_temperature_celsius"), "{{node}}"),
            Query(series("exo_mesh_accelerator_temperature_celsius"), "{{node}} {{accelerator}}"),
        ),
    ),
    Panel(
        "Busy processors and accelerators",
        "Share of the time in which they compute, for exo-mesh or other programs.",
        "percentunit",
        (
            Query(series("exo_mesh_cpu_utilization_ratio"), "{{node}} processors"),
            Query(series("exo_mesh_accelerator_utilization_ratio"), "{{node}} {{accelerator}}"),
        ),
        maximum=1,
    ),
    Panel(
        "Power of accelerators",
        "Power of each accelerator.",
        "watt",
        (Query(series("exo_mesh_accelerator_power_watts"), "{{node}} {{accelerator}}"),),
        stacked=True,
    ),
    Panel(
        "Memory of accelerators",
        "Share of the memory of each accelerator that is in use, by exo-mesh or other programs.",
        "percentunit",
        (
            Query(
                f"{series('exo_mesh_accelerator_memory_used_bytes')}"
                f" / {series('exo_mesh_accelerator_memory_size_bytes')}",
                "{{node}} {{accelerator}}",
            ),
        ),
        maximum=1,
    ),
)

_BOARDS = (
    Panel(
        "RKLLAMA answers",
        "1 while RKLLAMA beside the node answers. Without it the node serves none of the board's models.",
        "bool_yes_no",
        (Query(series("exo_mesh_rkllm_server_up"), "{{node}} {{server}}"),),
        kind="state-timeline",
        height=6,
    ),
    Panel(
        "Time of an answer",
        "From a request to RKLLAMA to the end of its answer. A board computes one request at a time.",
        "s",
        quantiles("exo_mesh_rkllm_inference_duration_seconds"),
    ),
    Panel(
        "Time to load a model",
        "Until RKLLAMA has a model ready. It is short if the model was loaded already.",
        "s",
        quantiles("exo_mesh_rkllm_model_load_duration_seconds"),
    ),
)

_MACHINE = (
    Panel(
        "CPU of the machine",
        "Share of all cores in use. From node_exporter.",
        "percentunit",
        (
            Query(
                f"""1 - avg by (node) ({rate("node_cpu_seconds_total", 'mode="idle"')})""",
                "{{node}}",
            ),
        ),
        maximum=1,
    ),
    Panel(
        "Network",
        "Bytes that the machine receives and sends, without the loopback. From node_exporter.",
        "Bps",
        (
            Query(
                total(rate("node_network_receive_bytes_total", 'device!="lo"'), "node"),
                "{{node}} receives",
            ),
            Query(
                total(rate("node_network_transmit_bytes_total", 'device!="lo"'), "node"),
                "{{node}} sends",
            ),
        ),
    ),
    Panel(
        "Swap",
        "Pages that the machine swaps in and out each second. exo-mesh never plans to swap. From node_exporter.",
        "ops",
        (
            Query(total(rate("node_vmstat_pswpin"), "node"), "{{node}} in"),
            Query(total(rate("node_vmstat_pswpout"), "node"), "{{node}} out"),
        ),
    ),
)

NODE = Board(
    "node",
    "exo-mesh: node",
    "Each node's versions, memory, disk, process, downloads, boards and machine.",
    (
        Row("What it is", _WHAT),
        Row("Memory and disk", _MEMORY),
        Row("Process", _PROCESS),
        Row("Downloads", _DOWNLOADS),
        Row("RKLLM boards", _BOARDS),
        Row("Power and accelerators", _POWER),
        Row("Machine", _MACHINE),
    ),
)
