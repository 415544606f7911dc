"""The options of the dummy engine, without NumPy."""

from __future__ import annotations

import json
from collections.abc import Mapping

import msgspec

from exo_mesh.errors import InputError


class DummyOptions(msgspec.Struct, frozen=True):
    """Options of the dummy engine. cost_ms of each forward and row_cost_ms of each of its rows are waited for, as if a
    device computed. payload_bytes: size of one token's activations, default 4 * hidden size. load_ms: wait while
    loading. fail_at: this forward (the first is 1) raises EngineError; 0 is never. fail_group: if not 0, the check of a
    tensor group fails. token_cost_ms: of each token of a row behind its first, in rows whose logits are wanted.
    layer_cost_ms: of each layer of the stage, in every forward. draft_right: the share of right guesses of its drafter;
    0: it has none. reduce_ms: reported duration of an all-reduce of a tensor group."""

    cost_ms: float = 0.0
    row_cost_ms: float = 0.0
    payload_bytes: int = 0
    load_ms: float = 0.0
    fail_at: int = 0
    fail_group: int = 0
    token_cost_ms: float = 0.0
    layer_cost_ms: float = 0.0
    draft_right: float = 0.0
    reduce_ms: float = 0.0


def parse_options(options: Mapping[str, str]) -> DummyOptions:
    """Parse the engine options. Raises InputError for an unknown option, or a value that is not a number >= 0."""
    known = {
        "cost_ms": float,
        "row_cost_ms": float,
        "payload_bytes": int,
        "load_ms": float,
        "fail_at": int,
        "fail_group": int,
        "token_cost_ms": float,
        "layer_cost_ms": float,
        "draft_right": float,
        "reduce_ms": float,
    }
    values: dict[str, float] = {}
    for name, text in options.items():
        if name not in known:
            raise InputError(
                f"the dummy engine has no option {json.dumps(name)}; it has {', '.join(known)}", param=name
            )
        try:
            values[name] = known[name](text)
        except ValueError as exc:
            raise InputError(f"{name}={text} is not a number", param=name) from exc
        if not 0 <= values[name] < 1e12:
            raise InputError(f"{name}={text} is out of range", param=name)
    return DummyOptions(**values)  # type: ignore[arg-type]
