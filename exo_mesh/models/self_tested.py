"""The outputs of a self-test, as the child process prints them."""

from __future__ import annotations

import msgspec


class SelfTestResult(msgspec.Struct, frozen=True):
    """One range as the child process prints it; values are float32 in base64."""

    range: tuple[int, int]
    outputs: dict[str, bytes]
    inputs: list[tuple[str, str, tuple[int, ...]]]
    given: list[tuple[str, str, tuple[int, ...]]]


class SelfTested(msgspec.Struct, frozen=True):
    """What the child process prints."""

    version: str
    native_dtype: str
    results: list[SelfTestResult]
