"""The scenarios of `exo-mesh bench serve`: which mesh gets which load, from flags and from a file."""

from __future__ import annotations

import argparse
import json
import re
import tomllib
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from exo_mesh.domain.placement import POLICIES
from exo_mesh.settings.config import ConfigError

MODEL = "exo-mesh-demo"
MAX_CELLS = 64
MAX_BYTES = 64 << 10
DEFAULT_STREAMS = (1, 2, 4, 8)
SUFFIXES = (".toml", ".json")

Count = Annotated[int, msgspec.Meta(ge=1, le=100_000)]
Streams = Annotated[int, msgspec.Meta(ge=1, le=1024)]
Lengths = Annotated[int, msgspec.Meta(ge=1, le=999_999)]
Rate = Annotated[float, msgspec.Meta(gt=0, le=9999)]
Cell = Annotated[str, msgspec.Meta(pattern=r"^[1-9][0-9]{0,5}x[1-9][0-9]{0,5}$")]


class ServeLoad(msgspec.Struct, frozen=True):
    """The load of one run: `amount` streams, or requests per second if is_rate. prompt, tokens: tokens per request."""

    amount: float
    is_rate: bool
    prompt: int
    tokens: int
    requests: int

    def describe(self) -> dict[str, Any]:
        amount = {"rate": self.amount} if self.is_rate else {"streams": int(self.amount)}
        return {**amount, "prompt": self.prompt, "tokens": self.tokens}


class Scenario(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A scenario, with the fields of its file. docs/tasks/benchmarking.md says what they mean."""

    about: str = ""
    peers: Annotated[int, msgspec.Meta(ge=1, le=64)] = 2
    engine: str = "auto"
    engine_options: dict[str, str | int | float] = {}
    model: str = ""
    random: str = ""
    policy: str = "throughput"
    pin: bool = False
    compare: tuple[Literal["single", "group", "ring"], ...] = ("ring",)
    arrival: Literal["closed", "poisson"] = "closed"
    streams: tuple[Streams, ...] = ()
    rates: tuple[Rate, ...] = ()
    prompts: tuple[Lengths, ...] = (32,)
    tokens: tuple[Lengths, ...] = (128,)
    cells: tuple[Cell, ...] = ()
    requests: Count | None = None
    rounds: Annotated[int, msgspec.Meta(ge=1, le=100)] = 1
    breakdown: bool = False
    repeat: bool = False

    @property
    def model_name(self) -> str:
        return self.model or MODEL

    def loads(self) -> Iterator[ServeLoad]:
        """Every amount with every cell of the grid."""
        is_rate = self.arrival == "poisson"
        for prompt, tokens in self.grid():
            for amount in self.rates if is_rate else self.streams or DEFAULT_STREAMS:
                requests = self.requests or (32 if is_rate else 2 * int(amount))
                yield ServeLoad(float(amount), is_rate, prompt, tokens, requests)

    def grid(self) -> list[tuple[int, int]]:
        """(prompt tokens, answer tokens) of each cell."""
        if self.cells:
            return parse_cells(",".join(self.cells))
        return [(prompt, tokens) for prompt in self.prompts for tokens in self.tokens]


def read_scenario(named: str) -> Scenario:
    """The scenario in a file, or the shipped one of this name. Raises ConfigError."""
    path = Path(named).expanduser()
    if path.suffix in SUFFIXES:
        try:
            with path.open("rb") as file:
                data = file.read(MAX_BYTES + 1)
        except OSError as exc:
            raise ConfigError(f"--scenario {named}: cannot be read: {exc.strerror}") from exc
        return parse_scenario(data, path.suffix, f"--scenario {named}")
    if named not in shipped():
        raise ConfigError(
            f"--scenario {named}: must be a .toml or .json file, or one of the shipped scenarios: "
            + ", ".join(sorted(shipped()))
        )
    return parse_scenario(shipped()[named], ".toml", f"--scenario {named}")


def shipped() -> dict[str, bytes]:
    """The shipped scenarios: their files by name."""
    folder = resources.files("exo_mesh.cli.bench") / "scenarios"
    return {
        file.name.removesuffix(".toml"): file.read_bytes() for file in folder.iterdir() if file.name[-5:] == ".toml"
    }


def parse_scenario(data: bytes, suffix: str, where: str) -> Scenario:
    """Parses and checks the bytes of a scenario. where: begins the errors. Raises ConfigError."""
    if len(data) > MAX_BYTES:
        raise ConfigError(f"{where}: is larger than {MAX_BYTES} bytes")
    try:
        values = json.loads(data) if suffix == ".json" else tomllib.loads(data.decode("utf-8-sig"))
    except (ValueError, RecursionError) as exc:
        raise ConfigError(f"{where}: is not {suffix.removeprefix('.').upper()}: {exc}") from exc
    return make_scenario(values, where)


def make_scenario(values: Any, where: str) -> Scenario:
    """A scenario of these values by field. Raises ConfigError that names the wrong field."""
    try:
        scenario = msgspec.convert(values, Scenario)
    except msgspec.ValidationError as exc:
        raise ConfigError(f"{where}: {_readable(str(exc))}") from exc
    if problem := _problem(scenario):
        raise ConfigError(f"{where}: {problem}")
    return scenario


def _readable(message: str) -> str:
    """msgspec's message with the field first: `streams[0]: Expected `int` >= 1`."""
    said, _, path = message.rpartition(" - at `$.")
    return f"{path.rstrip('`')}: {said}" if said else message


def _problem(scenario: Scenario) -> str:
    """Says which field has a wrong value or excludes another; "" if none does."""
    if scenario.model and scenario.random:
        return "model and random exclude each other"
    if scenario.policy not in POLICIES:
        return f"policy: must be one of {', '.join(POLICIES)}, not {json.dumps(scenario.policy)}"
    if scenario.arrival == "poisson" and not scenario.rates:
        return 'rates: arrival "poisson" needs them, in requests per second'
    if scenario.arrival == "poisson" and scenario.streams:
        return 'streams: arrival "poisson" has rates instead'
    if scenario.arrival == "closed" and scenario.rates:
        return 'rates: they need arrival = "poisson"'
    if "group" in scenario.compare and scenario.peers < 2:
        return f"compare: a group needs at least 2 peers, not {scenario.peers}"
    if not scenario.compare:
        return "compare: must name at least one system"
    if not scenario.grid():
        return "prompts and tokens: must not be empty"
    if len(scenario.grid()) > MAX_CELLS:
        return f"prompts x tokens: {len(scenario.grid())} cells; at most {MAX_CELLS} are measured"
    return ""


def scenario_of(args: argparse.Namespace) -> Scenario:
    """The scenario of the flags: each replaces the field of the file of --scenario. Raises ConfigError."""
    base = read_scenario(args.scenario) if args.scenario else Scenario()
    changed = msgspec.structs.asdict(base) | _of_flags(args, base)
    return make_scenario(changed, "bench serve")


def _of_flags(args: argparse.Namespace, base: Scenario) -> dict[str, Any]:
    """The fields that the given flags set."""
    found: dict[str, Any] = {
        name: getattr(args, name)
        for name in ("peers", "engine", "policy", "requests", "rounds")
        if getattr(args, name) is not None
    }
    found |= {name: True for name in ("pin", "breakdown", "repeat") if getattr(args, name)}
    if args.model or args.random:
        found |= {"model": args.model or "", "random": args.random or ""}
    if args.engine_option:
        found["engine_options"] = dict(base.engine_options) | dict(map(_option, args.engine_option))
    if args.rate:
        found |= {"arrival": "poisson", "rates": _rates(args.rate), "streams": []}
    elif args.streams:
        found |= {"arrival": "closed", "streams": _counts(args.streams), "rates": []}
    if args.grid:
        found["cells"] = [f"{prompt}x{tokens}" for prompt, tokens in parse_cells(args.grid)]
    elif args.prompt is not None or args.tokens is not None:
        found["cells"] = []
        found |= {"prompts": [args.prompt]} if args.prompt is not None else {}
        found |= {"tokens": [args.tokens]} if args.tokens is not None else {}
    return found | _compared(args, base)


def _compared(args: argparse.Namespace, base: Scenario) -> dict[str, Any]:
    named = args.compare.split(",") if args.compare else list(base.compare)
    known = ("single", "group", "ring")
    if not set(named) <= set(known):
        raise ConfigError(f"--compare {args.compare}: must be some of {', '.join(known)}")
    if args.against_one and "single" not in named:
        named.append("single")
    return {"compare": named}


def _option(text: str) -> tuple[str, str]:
    name, sign, value = text.partition("=")
    if not sign:
        raise ConfigError(f"--engine-option {text}: must be K=V")
    return name, value


def _counts(text: str) -> list[int]:
    parts = text.split(",")
    if not all(re.fullmatch(r"[0-9]{1,4}", part) and 1 <= int(part) <= 1024 for part in parts):
        raise ConfigError(f"--streams {text}: must be whole numbers from 1 to 1024, separated by commas")
    return [int(part) for part in parts]


def _rates(text: str) -> list[float]:
    parts = text.split(",")
    if not all(re.fullmatch(r"[0-9]{1,4}(\.[0-9]{1,4})?", part) and float(part) > 0 for part in parts):
        raise ConfigError(f"--rate {text}: must be requests per second, separated by commas, such as 0.5,2")
    return [float(part) for part in parts]


def parse_cells(text: str) -> list[tuple[int, int]]:
    """Parses a grid: (prompt tokens, answer tokens) of each cell. Raises ConfigError."""
    parts = text.lower().split(",")
    if len(parts) > MAX_CELLS or not all(re.fullmatch(r"[1-9][0-9]{0,5}x[1-9][0-9]{0,5}", part) for part in parts):
        raise ConfigError(f"--grid {text}: must be up to {MAX_CELLS} pairs PROMPTxANSWER, such as 32x128,512x64")
    return [(int(prompt), int(tokens)) for prompt, _, tokens in (part.partition("x") for part in parts)]
