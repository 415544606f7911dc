from exo_mesh.wire.proto import plan_pb2 as _plan_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class LogitBias(_message.Message):
    __slots__ = ("token_id", "bias")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    BIAS_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    bias: float
    def __init__(self, token_id: _Optional[int] = ..., bias: _Optional[float] = ...) -> None: ...

class Sampling(_message.Message):
    __slots__ = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "seed", "logprobs", "repetition_window")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    REPETITION_WINDOW_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: _containers.RepeatedCompositeFieldContainer[LogitBias]
    seed: int
    logprobs: int
    repetition_window: int
    def __init__(self, temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., logit_bias: _Optional[_Iterable[_Union[LogitBias, _Mapping]]] = ..., seed: _Optional[int] = ..., logprobs: _Optional[int] = ..., repetition_window: _Optional[int] = ...) -> None: ...

class Grammar(_message.Message):
    __slots__ = ("kind", "text")
    KIND_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    kind: str
    text: bytes
    def __init__(self, kind: _Optional[str] = ..., text: _Optional[bytes] = ...) -> None: ...

class ThinkingBudget(_message.Message):
    __slots__ = ("end_ids", "tokens", "start_ids")
    END_IDS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    START_IDS_FIELD_NUMBER: _ClassVar[int]
    end_ids: _containers.RepeatedScalarFieldContainer[int]
    tokens: int
    start_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, end_ids: _Optional[_Iterable[int]] = ..., tokens: _Optional[int] = ..., start_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class TextPiece(_message.Message):
    __slots__ = ("kind", "text", "call", "call_id", "name")
    KIND_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    CALL_FIELD_NUMBER: _ClassVar[int]
    CALL_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    kind: str
    text: bytes
    call: int
    call_id: str
    name: bytes
    def __init__(self, kind: _Optional[str] = ..., text: _Optional[bytes] = ..., call: _Optional[int] = ..., call_id: _Optional[str] = ..., name: _Optional[bytes] = ...) -> None: ...

class Respelling(_message.Message):
    __slots__ = ("ids", "spelling", "known")
    IDS_FIELD_NUMBER: _ClassVar[int]
    SPELLING_FIELD_NUMBER: _ClassVar[int]
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    spelling: bytes
    known: bytes
    def __init__(self, ids: _Optional[_Iterable[int]] = ..., spelling: _Optional[bytes] = ..., known: _Optional[bytes] = ...) -> None: ...

class TextInput(_message.Message):
    __slots__ = ("body", "stops", "begun", "thinking_budget")
    BODY_FIELD_NUMBER: _ClassVar[int]
    STOPS_FIELD_NUMBER: _ClassVar[int]
    BEGUN_FIELD_NUMBER: _ClassVar[int]
    THINKING_BUDGET_FIELD_NUMBER: _ClassVar[int]
    body: bytes
    stops: _containers.RepeatedScalarFieldContainer[bytes]
    begun: _containers.RepeatedCompositeFieldContainer[TextPiece]
    thinking_budget: int
    def __init__(self, body: _Optional[bytes] = ..., stops: _Optional[_Iterable[bytes]] = ..., begun: _Optional[_Iterable[_Union[TextPiece, _Mapping]]] = ..., thinking_budget: _Optional[int] = ...) -> None: ...

class Embed(_message.Message):
    __slots__ = ("pooling", "normalise", "dimensions", "whole", "second", "choice")
    POOLING_FIELD_NUMBER: _ClassVar[int]
    NORMALISE_FIELD_NUMBER: _ClassVar[int]
    DIMENSIONS_FIELD_NUMBER: _ClassVar[int]
    WHOLE_FIELD_NUMBER: _ClassVar[int]
    SECOND_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    pooling: str
    normalise: bool
    dimensions: int
    whole: bool
    second: int
    choice: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, pooling: _Optional[str] = ..., normalise: bool = ..., dimensions: _Optional[int] = ..., whole: bool = ..., second: _Optional[int] = ..., choice: _Optional[_Iterable[int]] = ...) -> None: ...

class Image(_message.Message):
    __slots__ = ("start", "num_tokens", "rows", "columns", "height", "width", "mean", "std", "digest", "is_whole")
    START_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    COLUMNS_FIELD_NUMBER: _ClassVar[int]
    HEIGHT_FIELD_NUMBER: _ClassVar[int]
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    MEAN_FIELD_NUMBER: _ClassVar[int]
    STD_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    IS_WHOLE_FIELD_NUMBER: _ClassVar[int]
    start: int
    num_tokens: int
    rows: int
    columns: int
    height: int
    width: int
    mean: _containers.RepeatedScalarFieldContainer[float]
    std: _containers.RepeatedScalarFieldContainer[float]
    digest: str
    is_whole: bool
    def __init__(self, start: _Optional[int] = ..., num_tokens: _Optional[int] = ..., rows: _Optional[int] = ..., columns: _Optional[int] = ..., height: _Optional[int] = ..., width: _Optional[int] = ..., mean: _Optional[_Iterable[float]] = ..., std: _Optional[_Iterable[float]] = ..., digest: _Optional[str] = ..., is_whole: bool = ...) -> None: ...

class ImagePiece(_message.Message):
    __slots__ = ("digest", "num_bytes", "pixels")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    PIXELS_FIELD_NUMBER: _ClassVar[int]
    digest: str
    num_bytes: int
    pixels: bytes
    def __init__(self, digest: _Optional[str] = ..., num_bytes: _Optional[int] = ..., pixels: _Optional[bytes] = ...) -> None: ...

class PutImageReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GenerateRequest(_message.Message):
    __slots__ = ("instance_id", "ballot", "request_id", "prompt_ids", "resume_ids", "max_tokens", "min_tokens", "stop_ids", "ignore_eos", "sampling", "client", "priority", "resumed", "trace_id", "key_hash", "fingerprint", "share_id", "prompt_logprobs", "grammar", "thinking", "text", "embed", "images", "begins_with", "no_store", "cache_scope", "no_drafts", "expected_ids")
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    BALLOT_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_IDS_FIELD_NUMBER: _ClassVar[int]
    RESUME_IDS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_IDS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    RESUMED_FIELD_NUMBER: _ClassVar[int]
    TRACE_ID_FIELD_NUMBER: _ClassVar[int]
    KEY_HASH_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    SHARE_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    THINKING_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    EMBED_FIELD_NUMBER: _ClassVar[int]
    IMAGES_FIELD_NUMBER: _ClassVar[int]
    BEGINS_WITH_FIELD_NUMBER: _ClassVar[int]
    NO_STORE_FIELD_NUMBER: _ClassVar[int]
    CACHE_SCOPE_FIELD_NUMBER: _ClassVar[int]
    NO_DRAFTS_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_IDS_FIELD_NUMBER: _ClassVar[int]
    instance_id: str
    ballot: _plan_pb2.Ballot
    request_id: str
    prompt_ids: _containers.RepeatedScalarFieldContainer[int]
    resume_ids: _containers.RepeatedScalarFieldContainer[int]
    max_tokens: int
    min_tokens: int
    stop_ids: _containers.RepeatedScalarFieldContainer[int]
    ignore_eos: bool
    sampling: Sampling
    client: str
    priority: int
    resumed: bool
    trace_id: str
    key_hash: bytes
    fingerprint: bytes
    share_id: str
    prompt_logprobs: int
    grammar: Grammar
    thinking: ThinkingBudget
    text: TextInput
    embed: Embed
    images: _containers.RepeatedCompositeFieldContainer[Image]
    begins_with: bytes
    no_store: bool
    cache_scope: bytes
    no_drafts: bool
    expected_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, instance_id: _Optional[str] = ..., ballot: _Optional[_Union[_plan_pb2.Ballot, _Mapping]] = ..., request_id: _Optional[str] = ..., prompt_ids: _Optional[_Iterable[int]] = ..., resume_ids: _Optional[_Iterable[int]] = ..., max_tokens: _Optional[int] = ..., min_tokens: _Optional[int] = ..., stop_ids: _Optional[_Iterable[int]] = ..., ignore_eos: bool = ..., sampling: _Optional[_Union[Sampling, _Mapping]] = ..., client: _Optional[str] = ..., priority: _Optional[int] = ..., resumed: bool = ..., trace_id: _Optional[str] = ..., key_hash: _Optional[bytes] = ..., fingerprint: _Optional[bytes] = ..., share_id: _Optional[str] = ..., prompt_logprobs: _Optional[int] = ..., grammar: _Optional[_Union[Grammar, _Mapping]] = ..., thinking: _Optional[_Union[ThinkingBudget, _Mapping]] = ..., text: _Optional[_Union[TextInput, _Mapping]] = ..., embed: _Optional[_Union[Embed, _Mapping]] = ..., images: _Optional[_Iterable[_Union[Image, _Mapping]]] = ..., begins_with: _Optional[bytes] = ..., no_store: bool = ..., cache_scope: _Optional[bytes] = ..., no_drafts: bool = ..., expected_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class TokenLogprob(_message.Message):
    __slots__ = ("token_id", "logprob")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    logprob: float
    def __init__(self, token_id: _Optional[int] = ..., logprob: _Optional[float] = ...) -> None: ...

class TokenEvent(_message.Message):
    __slots__ = ("index", "token_id", "logprob", "top", "finish", "piece", "prompt_tokens", "output_tokens", "stop_string", "respelling", "cached", "vector", "accepted", "rejected")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOP_FIELD_NUMBER: _ClassVar[int]
    FINISH_FIELD_NUMBER: _ClassVar[int]
    PIECE_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_STRING_FIELD_NUMBER: _ClassVar[int]
    RESPELLING_FIELD_NUMBER: _ClassVar[int]
    CACHED_FIELD_NUMBER: _ClassVar[int]
    VECTOR_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    REJECTED_FIELD_NUMBER: _ClassVar[int]
    index: int
    token_id: int
    logprob: float
    top: _containers.RepeatedCompositeFieldContainer[TokenLogprob]
    finish: str
    piece: TextPiece
    prompt_tokens: int
    output_tokens: int
    stop_string: bytes
    respelling: Respelling
    cached: int
    vector: bytes
    accepted: int
    rejected: int
    def __init__(self, index: _Optional[int] = ..., token_id: _Optional[int] = ..., logprob: _Optional[float] = ..., top: _Optional[_Iterable[_Union[TokenLogprob, _Mapping]]] = ..., finish: _Optional[str] = ..., piece: _Optional[_Union[TextPiece, _Mapping]] = ..., prompt_tokens: _Optional[int] = ..., output_tokens: _Optional[int] = ..., stop_string: _Optional[bytes] = ..., respelling: _Optional[_Union[Respelling, _Mapping]] = ..., cached: _Optional[int] = ..., vector: _Optional[bytes] = ..., accepted: _Optional[int] = ..., rejected: _Optional[int] = ...) -> None: ...

class PromptLogprob(_message.Message):
    __slots__ = ("index", "logprob", "top")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOP_FIELD_NUMBER: _ClassVar[int]
    index: int
    logprob: float
    top: _containers.RepeatedCompositeFieldContainer[TokenLogprob]
    def __init__(self, index: _Optional[int] = ..., logprob: _Optional[float] = ..., top: _Optional[_Iterable[_Union[TokenLogprob, _Mapping]]] = ...) -> None: ...

class StageSpan(_message.Message):
    __slots__ = ("waited_s", "compute_s")
    WAITED_S_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_S_FIELD_NUMBER: _ClassVar[int]
    waited_s: float
    compute_s: float
    def __init__(self, waited_s: _Optional[float] = ..., compute_s: _Optional[float] = ...) -> None: ...

class FrameTrace(_message.Message):
    __slots__ = ("step", "is_prefill", "rows", "tokens", "sent_s", "lap_s", "stages")
    STEP_FIELD_NUMBER: _ClassVar[int]
    IS_PREFILL_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    SENT_S_FIELD_NUMBER: _ClassVar[int]
    LAP_S_FIELD_NUMBER: _ClassVar[int]
    STAGES_FIELD_NUMBER: _ClassVar[int]
    step: int
    is_prefill: bool
    rows: int
    tokens: int
    sent_s: float
    lap_s: float
    stages: _containers.RepeatedCompositeFieldContainer[StageSpan]
    def __init__(self, step: _Optional[int] = ..., is_prefill: bool = ..., rows: _Optional[int] = ..., tokens: _Optional[int] = ..., sent_s: _Optional[float] = ..., lap_s: _Optional[float] = ..., stages: _Optional[_Iterable[_Union[StageSpan, _Mapping]]] = ...) -> None: ...

class GenerateEvents(_message.Message):
    __slots__ = ("ballot", "events", "error_code", "error_message", "prefilled", "trace", "queued", "prompt", "queue_length", "wait_s", "prefix")
    BALLOT_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    ERROR_CODE_FIELD_NUMBER: _ClassVar[int]
    ERROR_MESSAGE_FIELD_NUMBER: _ClassVar[int]
    PREFILLED_FIELD_NUMBER: _ClassVar[int]
    TRACE_FIELD_NUMBER: _ClassVar[int]
    QUEUED_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    QUEUE_LENGTH_FIELD_NUMBER: _ClassVar[int]
    WAIT_S_FIELD_NUMBER: _ClassVar[int]
    PREFIX_FIELD_NUMBER: _ClassVar[int]
    ballot: _plan_pb2.Ballot
    events: _containers.RepeatedCompositeFieldContainer[TokenEvent]
    error_code: str
    error_message: str
    prefilled: int
    trace: _containers.RepeatedCompositeFieldContainer[FrameTrace]
    queued: int
    prompt: _containers.RepeatedCompositeFieldContainer[PromptLogprob]
    queue_length: int
    wait_s: float
    prefix: PrefixReport
    def __init__(self, ballot: _Optional[_Union[_plan_pb2.Ballot, _Mapping]] = ..., events: _Optional[_Iterable[_Union[TokenEvent, _Mapping]]] = ..., error_code: _Optional[str] = ..., error_message: _Optional[str] = ..., prefilled: _Optional[int] = ..., trace: _Optional[_Iterable[_Union[FrameTrace, _Mapping]]] = ..., queued: _Optional[int] = ..., prompt: _Optional[_Iterable[_Union[PromptLogprob, _Mapping]]] = ..., queue_length: _Optional[int] = ..., wait_s: _Optional[float] = ..., prefix: _Optional[_Union[PrefixReport, _Mapping]] = ...) -> None: ...

class PrefixReport(_message.Message):
    __slots__ = ("common", "theirs", "is_own")
    COMMON_FIELD_NUMBER: _ClassVar[int]
    THEIRS_FIELD_NUMBER: _ClassVar[int]
    IS_OWN_FIELD_NUMBER: _ClassVar[int]
    common: int
    theirs: _containers.RepeatedScalarFieldContainer[int]
    is_own: bool
    def __init__(self, common: _Optional[int] = ..., theirs: _Optional[_Iterable[int]] = ..., is_own: bool = ...) -> None: ...

class RecallRequest(_message.Message):
    __slots__ = ("key_hash",)
    KEY_HASH_FIELD_NUMBER: _ClassVar[int]
    key_hash: bytes
    def __init__(self, key_hash: _Optional[bytes] = ...) -> None: ...

class RecallReply(_message.Message):
    __slots__ = ("found", "num_tokens")
    FOUND_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    found: bool
    num_tokens: int
    def __init__(self, found: bool = ..., num_tokens: _Optional[int] = ...) -> None: ...
