"""A failed call, independent of the API dialect: each dialect has its own form of errors. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec


class Failure(msgspec.Struct, frozen=True):
    """Why a call failed. code: a stable word of exo-mesh. kind: OpenAI's type of the error. param: the field at fault.
    details: numbers of a refused placement, or the remedy after a failed download."""

    status: int
    code: str
    kind: str
    message: str
    param: str | None = None
    details: Mapping[str, Any] | None = None

    def openai_body(self) -> dict[str, Any]:
        """OpenAI's error object, always with all four fields."""
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return {"error": error if not self.details else {**error, "details": self.details}}
