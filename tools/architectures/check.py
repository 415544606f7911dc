"""Judges one architecture: writes a tiny model, finds its legal cuts, and compares split rings with the library."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Protocol, cast

import numpy as np

from exo_mesh.errors import MeshError, ModelError
from tools.architectures.outcome import Outcome, compare
from tools.architectures.trials import require_information, splits_of
from tools.stages import Stages
from tools.workers import check_all


class Adapter(Protocol):
    """What a module `{engine}_models` has. Its functions run in a process of their own, which may crash."""

    TOLERANCE: float
    """Largest difference of float32 logits."""
    MOST_TRIPLES: int
    """Splits in three, see `splits_of`."""
    RUNS_ALL: bool
    """Whether the engine must run every model that the library runs, and refuse every other."""
    CRASHED: str
    """The state of an architecture that ends the process: absent if that is how the library says no."""

    def names(self) -> list[str]: ...
    def refusal(self, name: str) -> str:
        """Returns why the engine refuses an architecture whatever its settings are; "" if it does not."""

    def variant(self, outcome: Outcome) -> str:
        """Returns another name under which to try an architecture again; "" if this is the result."""

    def verdict(self, outcome: Outcome) -> None:
        """Has the last word on an outcome."""

    def write(self, directory: Path, name: str) -> int:
        """Writes a random model of which no two layers are alike; returns how many it has."""

    def reference(self, directory: Path) -> Mapping[str, np.ndarray]:
        """Returns the logits of each part of the trials by the library alone."""

    def survey(self, directory: Path, name: str) -> tuple[tuple[int, ...], str]:
        """Returns the legal cuts, and why there are not more. Raises ModelError if the engine refuses the model."""

    def stages(self, directory: Path, outcome: Outcome) -> Stages: ...
    def conclude(self, directory: Path, outcome: Outcome, stages: Stages, want: Mapping[str, np.ndarray]) -> None:
        """Notes the traits of the model, and compares what only this engine has."""


def adapter_of(engine: str) -> Adapter:
    return cast(Adapter, import_module(f"tools.architectures.{engine}_models"))


def check_apart(
    engine: str, names: Sequence[str], report: Callable[[Outcome], None] = lambda _: None, *, few: bool, jobs: int = 1
) -> list[Outcome]:
    """Checks architectures in other processes, so that a crash ends no other check. Returns them in the given order."""
    adapter = adapter_of(engine)

    def check_them(names: Sequence[str], report: Callable[[Outcome], None]) -> list[Outcome]:
        def failed(name: str, reason: str) -> Outcome:
            return Outcome(name, adapter.CRASHED, reason)

        return check_all(names, jobs, report, partial(check, engine, few=few), failed)

    def conclude(outcome: Outcome) -> None:
        if not adapter.variant(outcome):
            adapter.verdict(outcome)
            report(outcome)

    first = check_them(names, conclude)
    variants = {outcome.name: name for outcome in first if (name := adapter.variant(outcome))}
    second = dict(zip(variants, check_them([*variants.values()], lambda _: None), strict=True))
    better = [replace(second[one.name], name=one.name) if one.name in second else one for one in first]
    better = [one if new.state == "absent" else new for one, new in zip(first, better, strict=True)]
    for outcome in better:
        if outcome.name in variants:
            adapter.verdict(outcome)
            report(outcome)
    return better


def check(engine: str, name: str, *, few: bool = False) -> Outcome:
    """Checks an architecture in this process. Never raises: an error is part of the outcome. few: only some splits."""
    adapter, outcome = adapter_of(engine), Outcome(name)
    if why := adapter.refusal(name):
        outcome.state, outcome.reason = "refused", why
        return outcome
    with tempfile.TemporaryDirectory() as directory:
        try:
            _check(adapter, Path(directory), outcome, few)
        except (Exception, SystemExit) as exc:  # noqa: BLE001 - code of models may do anything, exit included
            outcome.reason = _sentence(exc, directory)
    return outcome


def _check(adapter: Adapter, directory: Path, outcome: Outcome, few: bool) -> None:
    want, why_not, refusal = None, "", ""
    try:
        outcome.layers = adapter.write(directory, outcome.name)
        want = adapter.reference(directory)
        require_information(want)
    except (Exception, SystemExit) as exc:  # noqa: BLE001 - as above
        why_not = _sentence(exc, str(directory))
    if why_not and not outcome.layers:
        outcome.state, outcome.reason = "absent", why_not
        return
    try:
        outcome.cuts, outcome.reason = adapter.survey(directory, outcome.name)
        if why_not and adapter.RUNS_ALL:
            adapter.stages(directory, outcome).ring(())
    except ModelError as exc:
        refusal = _sentence(exc, str(directory))
    if refusal and not adapter.RUNS_ALL:
        outcome.state, outcome.reason = "refused", refusal
    elif why_not:
        refuses = bool(refusal) or not adapter.RUNS_ALL
        outcome.state = "absent" if refuses else "failed"
        outcome.reason = why_not if refuses else f"the engine does not refuse it: {why_not}"
    elif refusal or want is None:
        outcome.reason = refusal
    else:
        _compare(adapter, directory, outcome, want, few)


def _compare(adapter: Adapter, directory: Path, outcome: Outcome, want: Mapping[str, np.ndarray], few: bool) -> None:
    stages = adapter.stages(directory, outcome)
    splits = splits_of(outcome.cuts, few=few, most=adapter.MOST_TRIPLES)
    try:
        for split in splits:
            compare(outcome, split, stages, want, adapter.TOLERANCE)
            outcome.splits += 1
        adapter.conclude(directory, outcome, stages, want)
    finally:
        stages.close()
    if outcome.different:
        outcome.state, outcome.reason = "failed", f"other logits than the library: {json.dumps(outcome.different)}"
    else:
        outcome.state = "exact" if outcome.cuts else "whole"


def _sentence(exc: BaseException, directory: str) -> str:
    """Says what happened, without the names of temporary folders."""
    if isinstance(exc, SystemExit):
        return "its model file ends the process, as a library that it needs is not installed"
    text = " ".join(str(exc).replace(f"{directory}/", "").split()) or type(exc).__name__
    text = re.sub(rf"{re.escape(Path(directory).name)}:? ?|(/[\w.\-]+)+/tmp\w+/?", "", text)
    return text if isinstance(exc, MeshError) else f"{type(exc).__name__}: {text}"
