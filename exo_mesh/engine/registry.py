"""Finds engines: packages under the entry-point group `exo_mesh.engines`, those shipped with exo-mesh included."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping
from functools import cache
from importlib import metadata

import msgspec

from exo_mesh.engine.contract import Availability, Configurable, EngineProvider
from exo_mesh.errors import EngineError, InputError

GROUP = "exo_mesh.engines"

logger = logging.getLogger(__name__)


class Registry(msgspec.Struct, frozen=True):
    """The engines found. `broken` has the engines whose plugin failed to import, with the reason."""

    providers: Mapping[str, EngineProvider]
    broken: Mapping[str, str]

    def provider(self, name: str) -> EngineProvider:
        """The engine called `name`. Raises InputError that lists the installed engines."""
        if name in self.providers:
            return self.providers[name]
        if name in self.broken:
            raise EngineError(f"engine {name} is installed but does not import: {self.broken[name]}")
        installed = ", ".join(sorted(self.providers)) or "none"
        raise InputError(f"no engine {json.dumps(name)}; installed: {installed}", param="engine")

    def supporting(self, architecture: str) -> tuple[str, ...]:
        """The names of the stage engines that run an architecture, whether or not this machine can use them."""
        stages = (one for one in self.providers.values() if one.kind == "stage")
        return tuple(sorted(one.name for one in stages if one.supports(architecture)))

    def configured(self, engine: str, options: Mapping[str, str]) -> Registry:
        """The same engines with the operator's engine options: for the engine named, or with "auto" for all."""
        if not options:
            return self
        found = {
            name: provider.configured(options)
            if engine in ("auto", name) and isinstance(provider, Configurable)
            else provider
            for name, provider in self.providers.items()
        }
        return Registry(found, self.broken)

    def choose(self, preference: str = "auto") -> EngineProvider:
        """The engine named, which must be available; or with "auto" the available one with the highest preference.

        Engines with a negative preference and whole-model engines are never chosen automatically. Raises InputError for
        an unknown name, and EngineError with every engine's reason and remedy if none can run.
        """
        if preference != "auto":
            found = self.provider(preference)
            if found.kind != "stage":
                raise EngineError(
                    f"engine {preference} serves whole models of a model server; it is used for those by itself, and "
                    "cannot be the engine of a node"
                )
            availability = found.availability()
            if not availability.available:
                raise EngineError(f"engine {preference} cannot run here: {_explain(availability)}")
            return found
        stage_engines = {name: found for name, found in sorted(self.providers.items()) if found.kind == "stage"}
        looks = {name: found.availability() for name, found in stage_engines.items()}
        able = [name for name, look in looks.items() if look.available and look.preference >= 0]
        if not able:
            reasons = [f"{name}: {_explain(look)}" for name, look in looks.items()]
            reasons += [f"{name}: does not import: {why}" for name, why in sorted(self.broken.items())]
            raise EngineError(f"no engine can run here ({'; '.join(reasons) or 'none is installed'})")
        return self.providers[max(able, key=lambda name: looks[name].preference)]


def load_registry(entry_points: Iterable[metadata.EntryPoint] | None = None) -> Registry:
    """Import every engine plugin (cheap by contract). A plugin that fails is logged and reported, never fatal."""
    found: dict[str, EngineProvider] = {}
    broken: dict[str, str] = {}
    for entry_point in metadata.entry_points(group=GROUP) if entry_points is None else entry_points:
        try:
            loaded = entry_point.load()
            found[loaded.name] = loaded
        except Exception as exc:  # noqa: BLE001 - a foreign plugin may raise anything; the others must still be found
            logger.warning("engine plugin %s does not import: %s", entry_point.name, exc)
            broken[entry_point.name] = f"{type(exc).__name__}: {exc}"
    return Registry(found, broken)


@cache
def installed_names() -> frozenset[str]:
    """The names of all engines installed, whether they can run here or not. Imports none of them."""
    return frozenset(entry_point.name for entry_point in metadata.entry_points(group=GROUP))


def providers() -> dict[str, EngineProvider]:
    """All engines installed, by name."""
    return dict(load_registry().providers)


def provider(name: str) -> EngineProvider:
    """See Registry.provider. Imports only this engine, if its entry point has its name."""
    own = load_registry(metadata.entry_points(group=GROUP, name=name))
    return own.providers[name] if name in own.providers else load_registry().provider(name)


def choose(preference: str = "auto") -> EngineProvider:
    """See Registry.choose."""
    return load_registry().choose(preference)


def _explain(availability: Availability) -> str:
    return availability.reason + (f" ({availability.remedy})" if availability.remedy else "")
