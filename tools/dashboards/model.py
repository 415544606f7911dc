"""One model, or a few: its requests, its speed, and what limits it."""

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

_MODEL = 'model=~"$model"'


def _per_model(expr: str, *more: str) -> Query:
    """Returns the sum of an expression per model and further labels."""
    legend = "{{model}}" + "".join(f" {{{{{label}}}}}" for label in more)
    return Query(total(expr, "model", *more), legend)


def _joules(kind: str) -> str:
    """Returns the energy per token. kind: of the tokens, prompt or output."""
    matchers = (_MODEL, f'kind="{kind}"')
    energy = total(rate("exo_mesh_ring_energy_joules_total", *matchers), "model")
    return f"{energy} / {total(rate('exo_mesh_ring_energy_tokens_total', *matchers), 'model')}"


_REQUESTS = (
    Panel(
        "Requests by end",
        "Requests for the model that end each second: stop, length, cancelled by the client, or error.",
        "reqps",
        (_per_model(rate("exo_mesh_requests_total", _MODEL), "status"),),
        stacked=True,
    ),
    Panel(
        "In progress, running and waiting",
        "In progress: entered and not ended. Running and waiting: requests at a driver.",
        "short",
        (
            Query(total(series("exo_mesh_requests_in_progress", _MODEL)), "in progress"),
            Query(total(series("exo_mesh_running_sequences", _MODEL)), "running"),
            Query(total(series("exo_mesh_queue_depth", _MODEL)), "waiting"),
        ),
    ),
    Panel(
        "Errors by type",
        "Requests for the model that end in an error each second, by the code of the error.",
        "reqps",
        (_per_model(rate("exo_mesh_errors_total", _MODEL), "type"),),
        stacked=True,
    ),
    Panel(
        "Tokens of a prompt, mean",
        "Prompt tokens divided by the requests that ended. Long prompts delay the first token.",
        "short",
        (
            Query(
                f"{total(rate('exo_mesh_prompt_tokens_total', _MODEL), 'model')}"
                f" / {total(rate('exo_mesh_requests_total', _MODEL), 'model')}",
                "{{model}}",
            ),
        ),
    ),
    Panel(
        "Tokens of an answer, mean",
        "Output tokens divided by the requests that ended.",
        "short",
        (
            Query(
                f"{total(rate('exo_mesh_tokens_generated_total', _MODEL), 'model')}"
                f" / {total(rate('exo_mesh_requests_total', _MODEL), 'model')}",
                "{{model}}",
            ),
        ),
    ),
    Panel(
        "Instances by state",
        "Placed instances of the model. The next request places a failed one again.",
        "short",
        (Query(f"max by (model, state) ({series('exo_mesh_instances', _MODEL)})", "{{model}} {{state}}"),),
    ),
)

_SPEED = (
    Panel(
        "Time to first token",
        "From a request's entry to its first token.",
        "s",
        quantiles("exo_mesh_first_token_latency_seconds", _MODEL),
    ),
    Panel(
        "Time between tokens",
        "The gap between two tokens of a request.",
        "s",
        quantiles("exo_mesh_inter_token_latency_seconds", _MODEL),
    ),
    Panel(
        "Time of whole requests",
        "From a request's entry to its end.",
        "s",
        quantiles("exo_mesh_request_latency_seconds", _MODEL),
    ),
    Panel(
        "Output tokens per second",
        "What clients receive, and what the drivers draw. Drivers draw more when a request is computed again.",
        "short",
        (
            Query(total(rate("exo_mesh_tokens_generated_total", _MODEL), "model"), "{{model}} to clients"),
            Query(total(rate("exo_mesh_driver_tokens_total", _MODEL), "model"), "{{model}} drawn"),
        ),
    ),
    Panel(
        "Prompt tokens per second",
        "Prompt tokens that first stages compute.",
        "short",
        (
            Query(
                f"sum by (model) (max by (model, instance_id) ({rate('exo_mesh_prefill_tokens_total', _MODEL)}))",
                "{{model}}",
            ),
        ),
    ),
    Panel(
        "Output tokens per second, as each node reports it",
        "The node's own figure over its last 10 s, for the requests that entered there.",
        "short",
        (Query(series("exo_mesh_tokens_per_second", _MODEL), "{{node}} {{model}}"),),
        stacked=True,
    ),
)

_LIMITS = (
    Panel(
        "Time in the queue, p95",
        "From a request's arrival at the driver to its start.",
        "s",
        (Query(quantile(0.95, "exo_mesh_queue_wait_seconds", _MODEL, by=("model",)), "{{model}}"),),
    ),
    Panel(
        "Oldest waiting request",
        "How long the oldest request in a queue has waited. At --queue-timeout it gets a 429.",
        "s",
        (Query(f"max by (model) ({series('exo_mesh_queue_oldest_wait_seconds', _MODEL)})", "{{model}}"),),
    ),
    Panel(
        "KV in use",
        "Share of the KV positions in use. Near 100 % new requests wait and running ones may have to.",
        "percentunit",
        (
            Query(
                f"""{total(series("exo_mesh_kv_tokens", _MODEL, 'state="used"'), "model", "instance_id")}"""
                f""" / {total(series("exo_mesh_kv_tokens", _MODEL), "model", "instance_id")}""",
                "{{model}} {{instance_id}}",
            ),
        ),
        maximum=1,
    ),
    Panel(
        "Running requests that were paused",
        "Running requests that were paused each second because KV or memory was short.",
        "reqps",
        (_per_model(rate("exo_mesh_evictions_total", _MODEL)),),
    ),
    Panel(
        "Requests whose client does not read",
        "Running requests that are parked: they cost no computing, and keep their place until other requests need it.",
        "short",
        (_per_model(series("exo_mesh_requests_parked", _MODEL)),),
    ),
    Panel(
        "Tokens without computing",
        "Prompt tokens that were copied from another choice, and output tokens that a grammar forced.",
        "short",
        (
            Query(total(rate("exo_mesh_prefill_shared_tokens_total", _MODEL), "model"), "{{model}} prompt, copied"),
            Query(total(rate("exo_mesh_laps_saved_total", _MODEL), "model"), "{{model}} output, forced"),
        ),
    ),
    Panel(
        "Drafted tokens",
        "Tokens that were computed ahead because a drafter expected them: those that became output, and those that did "
        "not. Drafts are sent only while they make the ring faster.",
        "short",
        (Query(total(rate("exo_mesh_draft_tokens_total", _MODEL), "model", "result"), "{{model}} {{result}}"),),
    ),
)

_ENERGY = (
    Panel(
        "Energy of an output token",
        "Joules that the machines of the rings use for one generated token. Only where their power is measured.",
        "joule",
        (Query(_joules("output"), "{{model}}"),),
        width=12,
    ),
    Panel(
        "Energy of a prompt token",
        "Joules that the machines of the rings use to compute one token of a prompt.",
        "joule",
        (Query(_joules("prompt"), "{{model}}"),),
        width=12,
    ),
)

_WHERE = (
    Panel(
        "Time of a lap, mean",
        "The time of a frame's lap round the ring of each instance. Each output token takes one lap.",
        "s",
        (Query(mean("exo_mesh_lap_seconds", _MODEL, by=("model", "instance_id")), "{{model}} {{instance_id}}"),),
    ),
    Panel(
        "Layers by node",
        "Which layers of the model each node holds.",
        "short",
        (Query(series("exo_mesh_stage_layers", _MODEL), "{{node}} stage {{stage}}"),),
        stacked=True,
    ),
    Panel(
        "Memory by node",
        "Weights and KV of the model on each node.",
        "bytes",
        (Query(total(series("exo_mesh_stage_memory_bytes", _MODEL), "node", "stage"), "{{node}} stage {{stage}}"),),
        stacked=True,
    ),
    Panel(
        "Placements",
        "Placements of the model in each interval: ready, or the code of the error that ended one.",
        "short",
        (
            Query(
                total(events("exo_mesh_placements_total", _MODEL), "model", "outcome"),
                "{{model}}: {{outcome}}",
            ),
        ),
        events=True,
    ),
    Panel(
        "Resumed requests and reconnected streams",
        "Requests that continued after their ring was lost, and streams from a driver that were reopened.",
        "ops",
        (
            Query(total(rate("exo_mesh_requests_resumed_total", _MODEL), "model"), "{{model}} resumed"),
            Query(total(rate("exo_mesh_driver_redials_total", _MODEL), "model"), "{{model}} reconnected"),
        ),
    ),
    Panel(
        "Models that are loaded",
        "Architecture, number type and number of layers of each model of which a stage runs.",
        "none",
        (Query(f"max by (model, architecture, dtype, layers) ({series('exo_mesh_model_info', _MODEL)})", ""),),
        kind="table",
    ),
)

MODEL = Board(
    "model",
    "exo-mesh: model",
    "Requests, speed and limits of one model or a few.",
    (
        Row("Requests", _REQUESTS),
        Row("Speed", _SPEED),
        Row("What limits it", _LIMITS),
        Row("Where it runs", _WHERE),
        Row("Energy", _ENERGY),
    ),
    (Variable("model", "Model", "exo_mesh_requests_total"),),
)
