"""Draws values of dataclasses by the types and marks of their fields, and messages that no peer would send."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from enum import Enum
from functools import cache
from typing import Any, Literal, get_args, get_origin

from google.protobuf.descriptor import FieldDescriptor
from msgspec.structs import replace

from exo_mesh.domain import fields as marks
from exo_mesh.domain.device import PeerInfo, Telemetry
from exo_mesh.domain.download import DownloadInfo, DownloadState
from exo_mesh.domain.embedding import EmbedSpec
from exo_mesh.domain.engine_speed import EngineSpeed, ForwardCost
from exo_mesh.domain.images import PictureSpec
from exo_mesh.domain.plan import Ballot, Plan, PlanInputs, StagePlan
from exo_mesh.domain.power import VALUES, DeviceValues
from exo_mesh.domain.request import GenerateRequest, SamplingParams, ThinkingBudget, TokenEvent, TokenLogprob
from exo_mesh.domain.shard import KeptLayers, Shard
from exo_mesh.domain.shared_settings import SharedSetting, SharedSettings
from exo_mesh.domain.tensor_group import RankWiring, TensorGroup
from exo_mesh.domain.view import Record, RecordKey
from exo_mesh.wire.control_codec import encoded, record_from_proto, record_to_proto
from exo_mesh.wire.field_forms import is_optional, one_mark, peeled
from exo_mesh.wire.message_codec import hints_of
from exo_mesh.wire.readings import Reading
from tests.wire.hostile import HOSTILE

TEXTS = ("a", "b-1", "é", "org/name", "127.0.0.1:5000")
NUMBERS = (1, 2, 7, 255, 2**31 - 1)


def drawn(hint: Any, rng: random.Random) -> Any:
    """A value of a type that a peer may send. It differs from its default wherever the draw can make it differ."""
    inner, found = peeled(hint)
    if is_optional(hint) and rng.random() < 0.2:
        return None
    if inner in MADE:
        return MADE[inner](rng)
    origin, items = get_origin(inner), get_args(inner)
    if origin is Literal:
        return rng.choice(items)
    if origin in (tuple, frozenset):
        if origin is tuple and items[-1] is not Ellipsis:
            return tuple(drawn(item, rng) for item in items)
        made = [drawn(items[0], rng) for _ in range(_length(found, rng))]
        only = one_mark(found, marks.Only)
        return origin(filter(only.accepts, made) if only else made)
    if origin is not None:
        return {drawn(items[0], rng): drawn(items[1], rng) for _ in range(_length(found, rng))}
    if isinstance(inner, type) and issubclass(inner, Enum):
        return rng.choice(list(inner))
    if (otherwise := one_mark(found, marks.Else)) is not None:
        return rng.choice(list(otherwise.known))
    if inner in (str, bytes):
        return _text(inner, found, rng)
    if inner in (bool, int, float):
        return _number(inner, found, rng)
    return of_class(inner, rng)


@cache
def _hints(cls: Any) -> dict[str, Any]:
    return hints_of(cls)


def of_class(cls: Any, rng: random.Random, **given: Any) -> Any:
    for name, hint in _hints(cls).items():
        if name not in given and one_mark(peeled(hint)[1], marks.NotSent) is None:
            given[name] = drawn(hint, rng)
    return cls(**given)


def _length(found: tuple[Any, ...], rng: random.Random) -> int:
    size, cut = one_mark(found, marks.Size), one_mark(found, marks.Cut)
    return rng.randint(0, min(3, size.most if size else 3, cut.most if cut else 3))


def _text(cls: type, found: tuple[Any, ...], rng: random.Random) -> Any:
    size = one_mark(found, marks.Size)
    if size is not None and size.sizes:
        return rng.randbytes(max(size.sizes))
    text = "\ud83d\n" if one_mark(found, marks.AnyText) and rng.random() < 0.5 else rng.choice(TEXTS)
    return text if cls is str else 4 * text.encode()


def _number(cls: type, found: tuple[Any, ...], rng: random.Random) -> Any:
    if cls is bool:
        return rng.random() < 0.7
    bounds = one_mark(found, marks.Range) or one_mark(found, marks.Clamped)
    least, most = (0, 2**31 - 1) if bounds is None else (bounds.least, bounds.most)
    numbers = [one for one in (*NUMBERS, 0.25, 0.5) if least <= one <= most and isinstance(one, cls)]
    return rng.choice(numbers)


def _layers(rng: random.Random, of: int) -> tuple[int, int]:
    start = rng.randrange(of)
    return start, rng.randint(start + 1, of)


def _plan(rng: random.Random) -> Plan:
    cuts = sorted({0, 9, *(rng.randint(1, 8) for _ in range(rng.randint(0, 3)))})
    stages = []
    for start, stop in itertools.pairwise(cuts):
        group = _group(rng) if rng.random() < 0.5 else None
        leader = "a" if group is None else group.peers[0]
        stages.append(StagePlan(leader, "mlx", Shard("m", start, stop, 9), rng.choice(NUMBERS), group))
    return of_class(Plan, rng, stages=tuple(stages))


def _inputs(rng: random.Random) -> PlanInputs:
    kept = tuple((peer, tuple(_kept(rng) for _ in range(2))) for peer in ("a", "c"))
    return PlanInputs((("a", 9), ("b", 2**40), ("c", 1)), "memory", 2, kept)


def _kept(rng: random.Random) -> KeptLayers:
    tokens = rng.choice((0, 512))
    keys = tuple(sorted({rng.getrandbits(64), 5})) if tokens else ()
    size = rng.choice((1, 2))
    return KeptLayers(rng.choice(TEXTS), *_layers(rng, 9), tokens, "bfloat16", size - 1, size, keys)


def _group(rng: random.Random) -> TensorGroup:
    backend = rng.choice(("ring", "jaccl"))
    return TensorGroup(backend, ("a", "b"), () if backend == "ring" else ((None, "rdma_en5"), ("rdma_en4", None)))


def _rank(rng: random.Random) -> RankWiring:
    group = _group(rng)
    return RankWiring(group.backend, rng.choice((0, 1)), ("a:1", "b:2"), group.rdma)


def _values(rng: random.Random) -> DeviceValues:
    known = {name: 5 if name.endswith("_bytes") else 0.5 for name in VALUES if rng.random() < 0.5}
    return DeviceValues(**known, sources={name: rng.choice(("nvml", "rapl")) for name in known})


def _setting(rng: random.Random) -> SharedSetting:
    return SharedSetting(rng.choice(TEXTS), rng.choice((None, "", "x\ny")), rng.choice(NUMBERS), "p")


def _request(rng: random.Random) -> GenerateRequest:
    asked = rng.random() < 0.5
    more = {"embed": EmbedSpec("last", second=1), "max_tokens": 0, "resume_ids": (), "prompt_logprobs": None}
    return of_class(GenerateRequest, rng, prompt_ids=(1, 2, 3), **(more if asked else {"embed": None}))


def _event(rng: random.Random) -> TokenEvent:
    logprob = rng.choice((None, -0.5))
    event: TokenEvent = of_class(TokenEvent, rng, logprob=logprob, top=(TokenLogprob(3, -0.25),) if logprob else ())
    return event if event.finish else replace(event, usage=None)


def _picture(rng: random.Random) -> PictureSpec:
    std = (0.5, 0.25, 0.125)
    return PictureSpec(rng.choice((0, 7)), 4, 2, 2, 28, 56, (0.5, 0.0, 1.0), std, "d" * 64, rng.random() < 0.5)


def _record(rng: random.Random) -> Record:
    download = DownloadInfo("m", DownloadState.ONGOING, rng.choice(NUMBERS), 10)
    key = RecordKey("download", rng.choice(TEXTS), "p")
    record = encoded(Record(key, rng.choice(NUMBERS), download if rng.random() < 0.7 else None, 2.5))
    return record_from_proto(record_to_proto(record))


MADE: dict[Any, Callable[[random.Random], Any]] = {
    Plan: _plan, PlanInputs: _inputs, KeptLayers: _kept, TensorGroup: _group, DeviceValues: _values,
    SharedSetting: _setting, GenerateRequest: _request, TokenEvent: _event, PictureSpec: _picture,
    Ballot: lambda rng: Ballot(rng.choice(NUMBERS), "a"),
    Shard: lambda rng: Shard("m", *_layers(rng, 9), 9),
    StagePlan: lambda rng: _plan(rng).stages[0],
    RankWiring: _rank,
    SharedSettings: lambda rng: SharedSettings.of(_setting(rng) for _ in range(3)),
    ForwardCost: lambda rng: ForwardCost(0.5, rng.choice((0.25, 0.125)), 0.0),
    EngineSpeed: lambda rng: EngineSpeed(*(MADE[ForwardCost](rng) for _ in range(3)), 128),
    SamplingParams: lambda rng: of_class(SamplingParams, rng, temperature=0.5),
    ThinkingBudget: lambda rng: ThinkingBudget((1, 2), 9, (3,)),
    EmbedSpec: lambda rng: EmbedSpec("score", False, 7, True, 2, (1, 2)),
    PeerInfo: lambda rng: of_class(PeerInfo, rng, macs=("0a:1b:2c:3d:4e:5f",), files_port=rng.choice((0, 7000))),
    Record: _record,
    Reading: lambda rng: Reading.of(Telemetry(rng.choice(TEXTS), rng.choice(NUMBERS), 1, 2, 3, keys_digest=7)),
    range: lambda rng: range(*_layers(rng, 9)),
}  # fmt: skip
"""Classes whose fields must fit together, and how to draw them."""


def spoiled(message: Any, rng: random.Random) -> None:
    """Put what no peer would send into some fields of a message, at any depth."""
    for field in message.DESCRIPTOR.fields:
        if rng.random() < 0.3:
            _spoil(message, field, rng)
        elif field.message_type is not None and field.is_repeated and not field.message_type.GetOptions().map_entry:
            for part in getattr(message, field.name):
                spoiled(part, rng)
        elif field.message_type is not None and not field.is_repeated and message.HasField(field.name):
            spoiled(getattr(message, field.name), rng)


def _spoil(message: Any, field: FieldDescriptor, rng: random.Random) -> None:
    if not field.is_repeated and rng.random() < 0.3:
        message.ClearField(field.name)
        return
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        kind = field.message_type.fields_by_name["value"]
        if kind.message_type is None:
            many = {f"{HOSTILE[:9]}{n}": _hostile(kind, rng) for n in range(rng.choice((0, 3, 2000)))}
            getattr(message, field.name).update(many)
        return
    if field.is_repeated:
        held = getattr(message, field.name)
        if field.message_type is None:
            held.extend(_hostile(field, rng) for _ in range(rng.choice((1, 40, 1500))))
        elif len(held):
            held.extend([held[rng.randrange(len(held))]] * rng.choice((1, 40)))
        else:
            held.add()
        return
    if field.message_type is not None:
        getattr(message, field.name).SetInParent()
    else:
        setattr(message, field.name, _hostile(field, rng))


def _hostile(field: FieldDescriptor, rng: random.Random) -> Any:
    kinds = FieldDescriptor
    if field.type == kinds.TYPE_STRING:
        return rng.choice(("", HOSTILE, HOSTILE * 70, "text", "a" * 65))
    if field.type == kinds.TYPE_BYTES:
        return rng.choice(
            (b"", b"\xff\xfe", b"x" * 5000, b"x" * 32, b"y" * 70_000, "\ud83d".encode("utf-8", "surrogatepass"))
        )
    if field.type == kinds.TYPE_BOOL:
        return rng.random() < 0.5
    if field.type in (kinds.TYPE_DOUBLE, kinds.TYPE_FLOAT):
        return rng.choice((math.nan, math.inf, -math.inf, -1.0, 0.0, 2.0))
    if field.type == kinds.TYPE_ENUM:
        return rng.choice((0, 1, 99))
    if field.type in (kinds.TYPE_SINT32, kinds.TYPE_SINT64, kinds.TYPE_INT64):
        return rng.choice((-100, 0, 99))
    most = 2**32 - 1 if field.type == kinds.TYPE_UINT32 else 2**64 - 1
    return rng.choice((0, 1, 70_000, most))
