"""All routes of the API, by the class that handles them. This module imports no handlers.

If two rows match the same path, the first one answers.
"""

from __future__ import annotations

from exo_mesh.api.compat.absent import ABSENT, OLLAMA_ABSENT
from exo_mesh.api.context import SECRET_HEADER
from exo_mesh.api.routes import ADMIN, NDJSON, OPEN, USE, Route, RouteGroup
from exo_mesh.api.web.assets import PREFIX
from exo_mesh.base.telemetry.log_ring import MAX_RECORDS
from exo_mesh.node.inspection.diagnostics import MAX_TIMELINE

GENERATION_ERRORS = (400, 404, 408, 409, 413, 422, 429, 499, 500, 503, 504)
"""Error statuses of a request that runs on the mesh, besides the statuses that every route has."""
TEXT_ERRORS = (400, 403, 404, 408, 413, 503, 504)
WEB_ERRORS = (400, 403, 413, 429, 503, 504)
PLACING_ERRORS = (400, 403, 404, 408, 409, 413, 429, 500, 503, 504)

HEALTH = ".ops:OpsRoutes"
"""The handlers of health checks, which answer whatever the node and its threads wait for."""
CHAT = ".openai.handlers:OpenAIRoutes"
"""The handlers of what most clients ask for."""

ANTHROPIC_ERROR, OLLAMA_ERROR = ".anthropic.objects:AnthropicError", ".ollama.objects:OllamaError"

STATUSES = "downloaded, partial, loaded, served, known or unusable"
"""The statuses by which models can be listed."""

PEER = {"node_id": "name or id of a peer, or at least 4 digits of its id; this node by default"}
PEERS = {"peers": "names or ids of peers, separated by commas"}
SECRET = {"secret": f"the {SECRET_HEADER} of the answer, for an answer that was requested without a key"}
PLACEMENT = {
    "model_id": "the name of the model",
    "sharding": "Pipeline or Tensor",
    "instance_meta": "MlxRing or MlxJaccl",
    "min_nodes": "use at least this many peers",
    "excluded_nodes": "names or ids of peers not to use, separated by commas",
}
READING = {
    "stream": '"true": the events of the response',
    "starting_after": "the sequence number of the last event that the client has",
    "include": "accepted; the response has what its request asked for",
    "include_obfuscation": 'only "false" is supported',
}
PAGING = {
    "after": "the id of the item before the page",
    "before": "the id of the item after the page",
    "limit": "most items of the page: 1 to 100, 20 by default",
    "order": '"desc", the default: the newest first; or "asc"',
    "include": "accepted; the items stay as the request sent them",
}
LISTING = {
    "status": STATUSES,
    "limit": "for Anthropic's clients: most models, 1 to 1000",
    "after_id": "for Anthropic's clients: the model before the list",
    "before_id": "for Anthropic's clients: the model after the list",
}


def _both(path: str) -> tuple[str, str]:
    """A path at the root, and below /ollama."""
    return path, "/ollama" + path


# fmt: off
TABLE: tuple[RouteGroup, ...] = (
    # before /v1/models/{id}, which would read their paths as names of models
    RouteGroup(".model_routes:ModelRoutes", (
        Route("GET", ("/models/search",), "search", USE, "Search the hub for models", errors=(400, 503),
              query={"query": "words to look for", "limit": "most results, 1 to 100"}),
        Route("POST", ("/models/add",), "add_card", ADMIN, "Make a card from a repository's headers",
              body=".model_routes:CardBody", status=201, errors=(400, 404, 408, 409, 413, 503, 504)),
        Route("DELETE", ("/models/custom/{id:.+}",), "delete_card", ADMIN, "Delete a custom card", errors=(400, 404)),
        Route("DELETE", ("/v1/models/{id:.+}", "/models/{id:.+}"), "delete", ADMIN,
              "Delete a model's files at all peers, or at the named ones", errors=(400, 404, 503, 504), query=PEERS),
        Route("GET", ("/store/storage",), "storage", USE, "The disk space of this node's models"),
        Route("GET", ("/store/health",), "store_health", USE, "The host of the model store", errors=(503,)),
        Route("GET", ("/store/registry",), "store_registry", USE, "The models of the store", errors=(503,)),
        Route("GET", ("/store/downloads",), "store_downloads", USE, "Downloads of the store", errors=(503,)),
        Route("GET", ("/store/models/{id:.+}/download/status",), "store_status", USE,
              "The progress of the store's download of a model", errors=(404, 503)),
        Route("POST", ("/store/models/{id:.+}/download",), "store_download", ADMIN,
              "Let the store download all files of a model", status=202, errors=(400, 404, 503, 504)),
        Route("POST", ("/store/purge-staging",), "purge_staging", ADMIN, "Delete unused staged copies",
              errors=(400, 503, 504), query=PEERS),
        Route("DELETE", ("/store/models/{id:.+}",), "store_delete", ADMIN,
              "Delete a model of the store and all its copies", errors=(400, 404, 503, 504)),
    )),
    RouteGroup(".download_routes:DownloadRoutes", (
        Route("POST", ("/download/start", "/download"), "start", ADMIN, "Start the download of a model",
              body=".download_routes:DownloadBody", status=202, errors=(400, 404, 408, 409, 413, 503, 504)),
        Route("DELETE", ("/download/{node}/{model:.+}",), "cancel", ADMIN, "Cancel the download of one peer",
              errors=(404, 503, 504)),
        Route("GET", ("/v1/download/progress",), "progress", USE, "All downloads of the mesh",
              query={"stream": "1: send server-sent events"}, events=True),
    )),
    RouteGroup(".model_lists:ModelListRoutes", (
        Route("GET", ("/v1/models", "/models"), "models", USE, "The models of the mesh", errors=(400,),
              query=LISTING),
        Route("GET", ("/v1/models/{id:.+}", "/models/{id:.+}"), "model", USE, "One model", errors=(404,)),
    )),
    RouteGroup(CHAT, (
        Route("POST", ("/v1/chat/completions", "/chat/completions"), "chat_completions", USE, "Answer a conversation",
              body=".openai.schema:ChatBody", reply=".openai.objects:ChatCompletion", errors=GENERATION_ERRORS,
              events=True),
        Route("POST", ("/v1/completions", "/completions"), "completions", USE, "Continue a prompt",
              body=".openai.schema:CompletionBody", reply=".openai.objects:TextCompletion", errors=GENERATION_ERRORS,
              events=True),
        Route("POST", ("/bench/chat/completions",), "timed_chat", USE,
              "Answer a conversation, and say what each part of it took", body=".openai.schema:ChatBody",
              reply=".openai.timed:TimedChatCompletion", errors=GENERATION_ERRORS),
        Route("POST", ("/bench/completions",), "timed_completion", USE,
              "Continue a prompt, and say what each part of it took", body=".openai.schema:CompletionBody",
              reply=".openai.timed:TimedTextCompletion", errors=GENERATION_ERRORS),
        Route("POST", ("/v1/cancel/{id}",), "cancel", USE, "Cancel a running request", errors=(404,)),
    )),
    RouteGroup(".responses.handlers:ResponsesRoutes", (
        Route("POST", ("/v1/responses", "/responses"), "create", USE,
              "Answer a conversation of items, as OpenAI's Responses API does",
              body=".responses.schema:ResponsesBody", reply=".responses.objects:ResponseObject",
              errors=GENERATION_ERRORS, events=True),
        Route("POST", ("/v1/responses/input_tokens",), "input_tokens", USE,
              "The number of tokens of a response's input", body=".responses.schema:InputTokensBody",
              reply=".responses.objects:InputTokens", errors=(400, 403, 404, 408, 413, 503, 504)),
        Route("GET", ("/v1/responses/{id}",), "read", USE, "A stored or running response",
              reply=".responses.objects:ResponseObject", errors=(400, 404, 429, 499, 500, 503, 504), query=READING,
              events=True),
        Route("DELETE", ("/v1/responses/{id}",), "delete", USE, "Delete a stored response",
              reply=".responses.objects:DeletedResponse", errors=(404, 503, 504)),
        Route("POST", ("/v1/responses/{id}/cancel",), "cancel", USE, "Cancel a running response",
              reply=".responses.objects:ResponseObject", errors=(404,)),
        Route("GET", ("/v1/responses/{id}/input_items",), "input_items", USE, "The input of a stored response",
              reply=".responses.objects:ItemList", errors=(400, 404, 503, 504), query=PAGING),
    )),
    RouteGroup(".anthropic.handlers:AnthropicRoutes", (
        Route("POST", ("/v1/messages",), "messages", USE, "Answer a conversation, as Anthropic's API does",
              body=".anthropic.schema:MessagesBody", reply=".anthropic.objects:MessageObject",
              errors=GENERATION_ERRORS, events=True, error=ANTHROPIC_ERROR),
        Route("POST", ("/v1/messages/count_tokens",), "count_tokens", USE, "The number of tokens of a conversation",
              body=".anthropic.schema:CountTokensBody", reply=".anthropic.objects:TokenCount",
              errors=(400, 403, 404, 408, 413, 503, 504), error=ANTHROPIC_ERROR),
    )),
    RouteGroup(".streams.routes:StreamRoutes", (
        Route("GET", ("/v1/streams",), "streams", USE, "The caller's running answers", query=SECRET),
        Route("GET", ("/v1/streams/{id}",), "attach", USE, "Stream a running answer from its beginning",
              errors=(400, 404, 429, 499, 500, 503, 504), query=SECRET, events=True),
        Route("DELETE", ("/v1/streams/{id}",), "stop", USE, "Stop a running answer", errors=(404,), query=SECRET),
    )),
    RouteGroup(".prefix_routes:PrefixRoutes", (
        Route("GET", ("/v1/requests/{id}/prefix",), "explain", USE,
              "Where the prompt of a request parted from what was kept", errors=(404,)),
        Route("GET", ("/v1/requests/{id}/stages",), "stages", USE,
              "Which stages computed an answer, and which took over", errors=(404,)),
    )),
    RouteGroup(".ollama.generation:OllamaGenerationRoutes", (
        Route("POST", ("/api/chat", "/ollama/api/chat"), "chat", USE, "Answer a conversation (Ollama)",
              body=".ollama.schema:OllamaChatBody", reply=".ollama.objects:OllamaChat", errors=GENERATION_ERRORS,
              error=OLLAMA_ERROR, lines=True),
        Route("POST", ("/api/generate", "/ollama/api/generate"), "generate", USE, "Answer a prompt (Ollama)",
              body=".ollama.schema:OllamaGenerateBody", reply=".ollama.objects:OllamaGenerated",
              errors=GENERATION_ERRORS, error=OLLAMA_ERROR, lines=True),
    )),
    RouteGroup(".ollama.models:OllamaModelRoutes", (
        Route("GET", ("/ollama",), "root", OPEN, "A sign of life", content_type="text/plain"),
        Route("GET", _both("/api/version"), "version", OPEN, "The version of the API of Ollama",
              reply=".ollama.objects:OllamaVersion", error=OLLAMA_ERROR),
        Route("GET", _both("/api/tags"), "tags", USE, "The models of the mesh (Ollama)",
              reply=".ollama.objects:OllamaModels", error=OLLAMA_ERROR),
        Route("GET", _both("/api/ps"), "loaded", USE, "The loaded models (Ollama)",
              reply=".ollama.objects:OllamaModels", error=OLLAMA_ERROR),
        Route("POST", _both("/api/show"), "show", USE, "One model (Ollama)", body=".ollama.schema:OllamaShowBody",
              reply=".ollama.objects:OllamaShown", errors=(404, 500, 503), error=OLLAMA_ERROR),
        Route("POST", _both("/api/pull"), "pull", ADMIN, "Download a model (Ollama)",
              body=".ollama.schema:OllamaPullBody", reply=".ollama.objects:OllamaProgress",
              errors=(404, 409, 503, 504), error=OLLAMA_ERROR, lines=True),
        Route("DELETE", _both("/api/delete"), "delete", ADMIN, "Delete a model's files at all peers (Ollama)",
              body=".ollama.schema:OllamaNamedBody", errors=(404, 503, 504), error=OLLAMA_ERROR),
    )),
    RouteGroup(".embedding.embeddings:EmbeddingRoutes", (
        Route("POST", ("/v1/embeddings", "/embeddings"), "embeddings", USE, "Vectors of texts",
              body=".embedding.schema:EmbeddingsBody", reply=".embedding.schema:EmbeddingsReply",
              errors=GENERATION_ERRORS),
    )),
    RouteGroup(".embedding.rerank:RerankRoutes", (
        Route("POST", ("/v1/rerank", "/rerank", "/v2/rerank"), "rerank", USE,
              "Scores of documents for a query, the best first", body=".embedding.schema:RerankBody",
              reply=".embedding.schema:RerankReply", errors=GENERATION_ERRORS),
    )),
    RouteGroup(".ollama.embedding:OllamaEmbeddingRoutes", (
        Route("POST", ("/api/embed", "/ollama/api/embed"), "embed", USE, "Vectors of texts (Ollama)",
              body=".ollama.schema:OllamaEmbedBody", reply=".ollama.objects:OllamaEmbedded", errors=GENERATION_ERRORS,
              error=OLLAMA_ERROR),
        Route("POST", ("/api/embeddings", "/ollama/api/embeddings"), "embeddings", USE,
              "The vector of one text, not scaled to length 1 (Ollama)", body=".ollama.schema:OllamaEmbeddingsBody",
              reply=".ollama.objects:OllamaEmbedding", errors=GENERATION_ERRORS, error=OLLAMA_ERROR),
    )),
    RouteGroup(".text_routes:TextRoutes", (
        Route("POST", ("/tokenize", "/v1/tokenize"), "tokenize", USE, "Tokens of a text or a conversation",
              body=".text_routes:TokenizeBody", reply=".text_routes:TokenizeReply", errors=TEXT_ERRORS),
        Route("POST", ("/detokenize", "/v1/detokenize"), "detokenize", USE, "Text of tokens",
              body=".text_routes:DetokenizeBody", reply=".text_routes:DetokenizeReply", errors=TEXT_ERRORS),
        Route("POST", ("/v1/chat/token/encode", "/chat/token/encode"), "encode_chat", USE,
              "The prompt of a conversation, its tokens and their number", body=".openai.schema:ChatBody",
              reply=".text_routes:EncodedChat", errors=TEXT_ERRORS),
        Route("POST", ("/apply-template",), "apply_template", USE, "The prompt of a conversation",
              body=".openai.schema:ChatBody", reply=".text_routes:PromptReply", errors=TEXT_ERRORS),
    )),
    # a caller also needs a key or local rights, because each call leaves the mesh
    RouteGroup(".webtools.handlers:WebToolRoutes", (
        Route("POST", ("/v1/tools/web_search",), "search", USE, "Search the web",
              body=".webtools.handlers:SearchBody", reply=".webtools.handlers:SearchReply", errors=WEB_ERRORS),
        Route("POST", ("/v1/tools/open_url",), "open", USE, "Title, status and type of a page of the web",
              body=".webtools.handlers:OpenBody", reply=".webtools.handlers:OpenReply", errors=WEB_ERRORS),
        Route("POST", ("/v1/tools/extract_page",), "extract", USE, "The text of a page of the web",
              body=".webtools.handlers:ExtractBody", reply=".webtools.handlers:ExtractReply", errors=WEB_ERRORS),
    )),
    RouteGroup(".webtools.pdf_text:PdfRoutes", (
        Route("POST", ("/v1/tools/pdf_text",), "pdf_text", USE, "The text of a PDF, which is the body",
              reply=".webtools.pdf_text:PdfReply", errors=(400, 408, 413, 429, 503)),
    )),
    # before /instance/{id}, which would read `placement` as an id
    RouteGroup(".compat.seed:SeedRoutes", (
        Route("POST", ("/place_instance",), "place", ADMIN, "Place a model and wait until it is ready",
              body=".compat.seed:PlaceBody", reply="exo_mesh.domain.reports:InstanceReport", status=201,
              errors=PLACING_ERRORS),
        Route("GET", ("/instance/placement",), "placement", USE, "Preview of /place_instance; changes nothing",
              errors=(400, 403, 404, 503, 504), query=PLACEMENT),
        Route("POST", ("/model/load",), "load", ADMIN, "Wait until a model has an instance",
              body=".compat.seed:ModelBody", reply="exo_mesh.domain.reports:InstanceReport", errors=PLACING_ERRORS),
        Route("POST", ("/model/unload",), "unload", ADMIN, "Stop all instances of a model",
              body=".compat.seed:ModelBody", errors=(400, 404, 503, 504)),
        Route("POST", ("/model/gc",), "collect", ADMIN, "Stop instances that failed or are not in use",
              errors=(503, 504)),
        Route("GET", ("/node_id",), "node_id", USE, "The id of this node, as a JSON string"),
        Route("GET", ("/node/identity",), "identity", USE, "Id, name, start time and versions of this node"),
    )),
    RouteGroup(HEALTH, (
        Route("GET", ("/version",), "version", OPEN, "Versions of the package and of the protocol"),
        Route("GET", ("/health", "/healthcheck"), "health", OPEN, "The health of the node, 503 unless it can serve",
              reply="exo_mesh.domain.reports:NodeHealth", errors=(503,)),
        Route("GET", ("/healthz",), "alive", OPEN, "200 if the process is alive"),
        Route("GET", ("/readyz",), "ready", OPEN, "200 if it can serve, else 503 with reasons",
              reply="exo_mesh.domain.reports:Readiness", errors=(503,)),
        Route("GET", ("/metrics",), "metrics", OPEN, "Metrics for Prometheus", content_type="text/plain"),
        Route("GET", ("/state",), "state", USE, "The shared view of the mesh, and telemetry of each peer",
              reply="exo_mesh.domain.reports:StateReport"),
        Route("GET", ("/v1/topology", "/topology"), "topology", USE, "Peers, links, cables and rings",
              reply="exo_mesh.domain.reports:TopologyReport"),
        Route("GET", ("/drain",), "drain_state", USE, "Whether the node drains, and the requests that are left"),
        Route("POST", ("/drain",), "drain", ADMIN, "Finish running requests and accept no new ones"),
        Route("DELETE", ("/drain",), "undo_drain", ADMIN, "Accept requests again"),
        Route("GET", ("/queue",), "queue", USE, "Waiting and running requests of the drivers on this node",
              reply="exo_mesh.domain.reports:QueueReport"),
        Route("GET", ("/requests/recent",), "recent_requests", USE, "The outcomes of this node's last requests",
              errors=(400,), query={"n": "most requests, 1 to 9999"}),
        Route("GET", ("/requests/stats",), "request_stats", USE, "Totals over this node's requests"),
        Route("GET", ("/memory",), "memory", USE, "Memory of this machine, or of all machines", errors=(400,),
              query={"scope": "node or cluster"}),
        Route("GET", ("/memory/live",), "memory_live", USE, "Memory readings of the last 90 s"),
    )),
    RouteGroup(".instance_routes:InstanceRoutes", (
        Route("POST", ("/instance",), "create_instance", ADMIN, "Place a model and wait until it is ready",
              body=".placement_options:InstanceBody", status=201, errors=(400, 404, 408, 409, 413, 429, 500, 503, 504)),
        Route("GET", ("/instance/previews",), "previews", USE, "The possible ways to place a model now",
              errors=(400, 404, 503, 504), query={"model": "the name of the model", "model_id": "same as model"}),
        Route("GET", ("/instance/{id}",), "instance", USE, "One instance",
              reply="exo_mesh.domain.reports:InstanceReport", errors=(404,)),
        Route("DELETE", ("/instance/{id}",), "delete_instance", ADMIN, "Stop an instance at all peers",
              errors=(404, 503, 504)),
    )),
    RouteGroup(".scrape_targets:ScrapeTargetRoutes", (
        Route("GET", ("/v1/prometheus/targets",), "targets", USE,
              "The API addresses of all nodes, for Prometheus' http_sd_configs",
              reply=".scrape_targets:ScrapeTargets"),
    )),
    # every peer finds each trace of the mesh, so the `cluster` names of single traces are aliases
    RouteGroup(".trace_routes:TraceRoutes", (
        Route("GET", ("/v1/tracing",), "tracing", USE, "The share of new requests that is traced"),
        Route("PUT", ("/v1/tracing",), "switch", ADMIN, "Turn tracing of new requests on or off for the mesh",
              body=".trace_routes:TracingBody", errors=(400, 408, 413)),
        Route("GET", ("/v1/traces",), "here", USE, "Traced requests of this node"),
        Route("GET", ("/v1/traces/cluster",), "everywhere", USE, "Traced requests of all peers that answer"),
        Route("POST", ("/v1/traces/delete",), "delete", ADMIN, "Delete traces at all peers",
              body=".trace_routes:DeleteTracesBody", errors=(400, 408, 413)),
        Route("GET", ("/v1/traces/{id}", "/v1/traces/cluster/{id}"), "one", USE, "One traced request of any peer",
              errors=(404,)),
        Route("GET", ("/v1/traces/{id}/stats", "/v1/traces/cluster/{id}/stats"), "stats", USE,
              "The time of one traced request by stage and phase", errors=(404,)),
        Route("GET", ("/v1/traces/{id}/raw", "/v1/traces/cluster/{id}/raw"), "raw", USE,
              "One traced request as a file for Perfetto", errors=(404,)),
    )),
    RouteGroup(".diagnostics:DiagnosticRoutes", (
        Route("GET", ("/v1/diagnostics/node",), "node", USE, "Diagnostics of this node"),
        Route("DELETE", ("/v1/diagnostics/node/quarantine",), "lift_quarantine", ADMIN,
              "Allow models and engines again that got stuck or crashed on this node"),
        Route("GET", ("/v1/diagnostics/cluster",), "cluster", USE, "Diagnostics of every node that answers"),
        Route("GET", ("/v1/diagnostics/cluster/timeline",), "timeline", USE, "The phases of all runners, by time"),
        Route("GET", ("/v1/diagnostics/cluster/{id}",), "one", USE, "Diagnostics of one node", errors=(404,)),
        Route("POST", ("/v1/diagnostics/node/capture", "/v1/diagnostics/cluster/{id}/capture"), "capture", ADMIN,
              "Stacks and memory maps of a node and its runners, taken now", errors=(404, 429, 503, 504),
              query={"runner": "only this runner, by its pid, instance or label"}),
        Route("POST",
              ("/v1/diagnostics/node/runners/{runner}/cancel", "/v1/diagnostics/cluster/{id}/runners/{runner}/cancel"),
              "cancel_runner", ADMIN, "Cancel the requests that run on a runner", errors=(404,),
              query={"request_id": "only the requests with this id"}),
        Route("GET", ("/events",), "events", USE, "The recorded phases of the runners, one JSON object per line",
              errors=(400,), content_type=NDJSON,
              query={"since": "only phases that last beyond this Unix time", "n": f"most lines, 1 to {MAX_TIMELINE}",
                     "scope": "node or cluster"}),
    )),
    # `join` is for machines that have the code of an invitation and no key yet
    RouteGroup(".joining:JoinRoutes", (
        Route("POST", ("/v1/invite",), "invite", ADMIN, "Open an invitation", status=201, errors=(400,)),
        Route("GET", ("/v1/invite",), "invitation", USE, "The state of the last invitation"),
        Route("DELETE", ("/v1/invite",), "withdraw", ADMIN, "Withdraw the invitation"),
        Route("POST", ("/v1/join",), "join", OPEN, "The calls of a machine that joins with a code",
              body=".joining:JoinBody", errors=(400, 403, 404, 429)),
    )),
    RouteGroup(".key_routes:KeyRoutes", (
        Route("GET", ("/v1/keys",), "keys", ADMIN, "The valid API keys, without their texts"),
        Route("POST", ("/v1/keys",), "add", ADMIN, "Make an API key; its text is in this reply only",
              body=".key_routes:KeyBody", status=201, errors=(400,)),
        Route("DELETE", ("/v1/keys/{id}",), "remove", ADMIN, "Revoke an API key or session", errors=(400, 404)),
        Route("POST", ("/v1/session",), "session", ADMIN, "Exchange the local token for a session of the mesh",
              body=".key_routes:SessionBody", errors=(400,)),
    )),
    RouteGroup(".config_routes:ConfigRoutes", (
        Route("GET", ("/config",), "config", USE, "The current settings of this node and the origin of each"),
        Route("PUT", ("/config",), "change", ADMIN, "Change settings that the whole mesh shares",
              body=".config_routes:SharedSettingsBody", errors=(400,)),
        Route("GET", ("/v1/logging",), "logging", USE, "The log level of this node and where its log goes"),
        Route("PUT", ("/v1/logging",), "set_level", ADMIN, "Change the log level of this node until it restarts",
              body=".config_routes:LoggingBody", errors=(400,)),
    )),
    RouteGroup(".peer_routes:PeerRoutes", (
        Route("POST", ("/quit",), "quit", ADMIN, "Stop this node; from this machine only", status=202),
        Route("POST", ("/admin/stop",), "stop", ADMIN, "Stop a node", status=202, errors=(400, 404, 503), query=PEER),
        Route("POST", ("/admin/restart",), "restart", ADMIN, "Restart a node", status=202, errors=(400, 404, 503),
              query=PEER),
        Route("POST", ("/admin/drain",), "drain", ADMIN, "Let a node accept no new requests", errors=(400, 404, 503),
              query=PEER),
        Route("DELETE", ("/admin/drain",), "undo_drain", ADMIN, "Let a node accept requests again",
              errors=(400, 404, 503), query=PEER),
        Route("GET", ("/admin/log",), "log", ADMIN, "The last log records of a node", errors=(400, 404, 503),
              query={**PEER, "n": f"most records, 1 to {MAX_RECORDS}; 100 by default"}),
        Route("POST", ("/admin/sleep",), "sleep", ADMIN, "Announce that this machine goes to sleep"),
        Route("POST", ("/admin/awake",), "awake", ADMIN, "Rejoin the mesh after /admin/sleep"),
        Route("POST", ("/admin/wake",), "wake", ADMIN, "Wake the machine of a peer by Wake-on-LAN", errors=(400, 404),
              query={"node_id": "name or id of a peer that this node has met"}),
    )),
    # open, because the document is the same for every node of a version
    RouteGroup(".document_routes:DocumentRoutes", (
        Route("GET", ("/api/openapi.json", "/openapi.json"), "document", OPEN, "This document: OpenAPI 3.1"),
        Route("GET", ("/docs",), "page", OPEN, "A page that shows the document", content_type="text/html"),
    )),
    RouteGroup(".compat.model_pool:ModelPoolRoutes", (
        Route("GET", ("/initial_models",), "initial", USE, "The models, by name, in the form of exo 1"),
        Route("GET", ("/modelpool",), "pool", USE, "The same, one event per model", events=True),
    )),
    # they read no body
    RouteGroup(".compat.absent:AbsentRoutes", (
        *(Route(method, (path,), "refuse", USE, "Not part of exo-mesh: 501 with the reason", status=501)
          for method, path in ABSENT),
        *(Route("POST", _both(path), "refuse", USE, f"Not supported: {why}", errors=(501,), error=OLLAMA_ERROR)
          for path, why in OLLAMA_ABSENT.items()),
    )),
    # open, because the files are the same for every node of a version and contain no data
    RouteGroup(".web.page_routes:PageRoutes", (
        Route("GET", ("/",), "root", OPEN, "The page for browsers, else a JSON overview", errors=(404,)),
        Route("GET", ("/dashboard",), "dashboard", OPEN, "The page", content_type="text/html", errors=(404,)),
        Route("GET", ("/service-worker.js",), "worker", OPEN, "Keeps the files of the page in the browser",
              content_type="text/javascript", errors=(404,)),
        Route("GET", (PREFIX + "/languages",), "languages", OPEN, "The languages of the page", errors=(404,)),
        Route("GET", (PREFIX + "/languages/{tag}",), "language", OPEN, "The texts of a language", errors=(404,)),
        Route("GET", (PREFIX + "/{version}/{file:.+}",), "file", OPEN, "A file of the page",
              content_type="application/octet-stream", errors=(404,)),
    )),
    RouteGroup(".web.live_routes:LiveRoutes", (
        Route("GET", ("/metrics/snapshot",), "snapshot", USE, "Peers, instances, health, queue and memory"),
        Route("GET", ("/metrics/stream", "/dashboard/metrics"), "stream", USE,
              "The snapshot as server-sent events: first all data, then changes", errors=(429,), events=True),
    )),
)
# fmt: on
