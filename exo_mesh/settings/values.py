"""Parsers for the texts of settings. Every parser raises ValueError with the required form."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import msgspec

from exo_mesh.base.printable import typed


def size(text: str) -> int:
    """Parses a size to bytes: `12GB` (decimal), `512MiB` (binary) or `1000000` (bytes)."""
    if (num_bytes := size_or_zero(text)) < 1:
        raise ValueError("the size must be more than zero")
    return num_bytes


def size_or_zero(text: str) -> int:
    """Parses a size like `size`; 0 is allowed."""
    match = re.fullmatch(r"\s*(\d{1,18}(?:\.\d{1,9})?)\s*(?:([kmgt])(i?)b|b?)\s*", text, re.IGNORECASE)
    if match is None:
        raise ValueError("a size such as 12GB, 512MiB or a number of bytes is needed")
    power = " kmgt".index(match[2].lower()) if match[2] else 0
    return int(float(match[1]) * (1024 if match[3] else 1000) ** power)


MOST_CACHE_BYTES = 2**63 - 1


def cache_size(text: str) -> int:
    """Parses the limit of a cache: `auto` (MOST_CACHE_BYTES), `off` (0), or a size like `size_or_zero`."""
    word = text.strip().lower()
    if word in ("auto", "off"):
        return MOST_CACHE_BYTES if word == "auto" else 0
    try:
        return min(MOST_CACHE_BYTES, size_or_zero(text))
    except ValueError:
        raise ValueError("auto, off or a size such as 4GB is needed") from None


def cache_size_text(num_bytes: int) -> str:
    """Formats a limit as `cache_size` reads it."""
    return "auto" if num_bytes == MOST_CACHE_BYTES else str(num_bytes) if num_bytes else "off"


def whole(low: int, high: int) -> Callable[[str], int]:
    """Returns a parser of whole numbers from low to high."""

    def parse(text: str) -> int:
        if not re.fullmatch(r"\s*-?[0-9]{1,18}\s*", text) or not low <= int(text) <= high:
            raise ValueError(f"a whole number from {low} to {high} is needed")
        return int(text)

    return parse


def group_size(text: str) -> int:
    """Parses the size of a tensor group: `auto` (0), `never` (1), or a number of peers from 2 to 8."""
    word = text.strip().lower()
    if word in ("auto", "never"):
        return 0 if word == "auto" else 1
    if not re.fullmatch(r"[2-8]", word):
        raise ValueError("auto, never or a number from 2 to 8 is needed")
    return int(word)


def group_size_text(size: int) -> str:
    """Formats a size as `group_size` reads it."""
    return "auto" if size == 0 else "never" if size == 1 else str(size)


def share(text: str) -> float:
    """Parses a number from 0 to 1."""
    if not re.fullmatch(r"\s*(0|1|0?\.[0-9]{1,9}|1\.0{1,9}|0\.0?)\s*", text):
        raise ValueError("a number from 0 to 1 is needed")
    return float(text)


def seconds(low: float, high: float) -> Callable[[str], float]:
    """Returns a parser of durations in seconds from low to high."""
    return _between(low, high, f"seconds from {low:g} to {high:g} are needed")


def number(low: float, high: float) -> Callable[[str], float]:
    """Returns a parser of decimal numbers from low to high."""
    return _between(low, high, f"a number from {low:g} to {high:g} is needed")


def _between(low: float, high: float, needed: str) -> Callable[[str], float]:
    def parse(text: str) -> float:
        if not re.fullmatch(r"\s*[0-9]{1,9}(?:\.[0-9]{1,9})?\s*", text) or not low <= float(text) <= high:
            raise ValueError(needed)
        return float(text)

    return parse


class OneOf(msgspec.Struct, frozen=True):
    """A parser for one of several words, ignoring case; returns the word in lower case."""

    choices: tuple[str, ...]

    def __call__(self, text: str) -> str:
        word = text.strip().lower()
        if word not in self.choices:
            raise ValueError(f"must be one of {', '.join(self.choices)}")
        return word


class SomeOf(msgspec.Struct, frozen=True):
    """A parser for an item of a list of allowed words; "none" stands for an empty list."""

    choices: tuple[str, ...]

    def __call__(self, text: str) -> str | None:
        word = OneOf(self.choices)(text)
        return None if word == "none" else word


def one_of(*choices: str) -> OneOf:
    """Returns a parser for one of several words."""
    return OneOf(choices)


def some_of(*choices: str) -> SomeOf:
    """Returns a parser for the items of a list of allowed words; "none" stands for an empty list."""
    return SomeOf(choices)


def matching(pattern: str, what: str) -> Callable[[str], str]:
    """Returns a parser of texts that match a whole pattern. what: the expected form, for the error."""

    def parse(text: str) -> str:
        word = typed(text.strip())
        if not re.fullmatch(pattern, word) or re.search("[\ud800-\udfff]", word):
            raise ValueError(f"{what} is needed")
        return word

    return parse


def path(text: str) -> Path:
    """Parses a path and makes it absolute; `~` is the home directory."""
    return Path(text).expanduser().absolute()


def path_or_off(text: str) -> Path | None:
    """Parses a path as `path` does; None for `off`."""
    return None if text.strip().lower() == "off" else path(text)


def path_or_off_text(path: Path | None) -> str:
    """Formats a path as `path_or_off` reads it."""
    return "off" if path is None else str(path)


def endpoint(text: str) -> str:
    """Checks `host:port`, with an IPv6 address in brackets."""
    host, _, port = text.rpartition(":")
    if not host or not _is_port(port) or (":" in host and not host.startswith("[")):
        raise ValueError("host:port is needed, such as 192.168.1.20:5000 or [fe80::1]:5000")
    return text


_DEFAULT_PORTS = {"http": ":80", "https": ":443"}


def origin(text: str) -> str:
    """Parses an origin to the form that browsers and desktop programs send, in lower case; `*` stands for all.

    `SCHEME://*` stands for all of a scheme that no web site has, since editors and extensions make up new hosts. `null`
    is refused: a page of any site sends it from a sandboxed frame.
    """
    found = re.fullmatch(r"([a-z][a-z0-9+.-]*)://([a-z0-9.\[\]:_-]*|\*)/?", text.strip().lower())
    scheme, host = (found[1], found[2].removesuffix(_DEFAULT_PORTS.get(found[1], "/"))) if found else ("", "")
    if found and (host or scheme == "file") and not (host == "*" and scheme in _DEFAULT_PORTS):
        return f"{scheme}://{host}"
    if text.strip() == "*":
        return "*"
    example = "an origin such as https://chat.example.org, http://localhost:3000 or app://obsidian.md is needed"
    if text.strip().lower() == "null":
        raise ValueError(f"{example}, or * for all pages; every site can send null, so it cannot be allowed alone")
    raise ValueError(f"{example}, SCHEME://* for all of a scheme but http and https, or * for all")


TRACES_PATH = "/v1/traces"


def collector(text: str) -> str:
    """Parses the traces URL of an OpenTelemetry collector, adding /v1/traces if missing; "" for `none`."""
    url = text.strip()
    if url.lower() == "none":
        return ""
    if not re.fullmatch(r"https?://[^\s/?#]+(/[^\s?#]*)?", url):
        raise ValueError("a URL such as http://127.0.0.1:4318 is needed, or none")
    return url if url.endswith(TRACES_PATH) else url.rstrip("/") + TRACES_PATH


def host_name(text: str) -> str:
    """Parses a host name to lower case, or `*`."""
    name = text.strip().lower().rstrip(".")
    if name != "*" and not re.fullmatch(r"[a-z0-9_]([a-z0-9._-]{0,252})", name):
        raise ValueError("a host name such as mesh.example.org is needed, without a port, or *")
    return name


def port_range(text: str) -> tuple[int, int]:
    """Parses `A-B`, both ends included."""
    first, _, last = text.partition("-")
    if not _is_port(first) or not _is_port(last) or int(first) > int(last):
        raise ValueError("a range of ports such as 7000-7015 is needed")
    return int(first), int(last)


def port_range_text(ports: tuple[int, int]) -> str:
    """Formats a range as `port_range` reads it."""
    return f"{ports[0]}-{ports[1]}"


def option(text: str) -> tuple[str, str]:
    """Parses `key=value`."""
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise ValueError("key=value is needed")
    return key.strip(), value.strip()


def switched_on(text: str) -> bool:
    """Parses a switch: true for 1, true, yes, on."""
    return one_of("1", "true", "yes", "on", "0", "false", "no", "off")(text) in ("1", "true", "yes", "on")


def switched_off(text: str) -> bool:
    """Parses a switch named `no_…`: returns the value of the positive field."""
    return not switched_on(text)


def _is_port(text: str) -> bool:
    return re.fullmatch(r"[0-9]{1,5}", text) is not None and 0 < int(text) < 65536
