"""The command line of a supervised llama-server."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from exo_mesh.engine.contract import Compute

SPEC_TYPES: Mapping[str, str] = {
    "draft_eagle3": "draft-eagle3",
    "draft_mtp": "draft-mtp",
    "draft_simple": "draft-simple",
    "ngram": "ngram-simple",
}
"""By the name of the option, llama-server's name of a way to draft tokens."""

_NEED_DRAFT = frozenset({"draft_eagle3", "draft_simple"})

BACKENDS: Mapping[str, Compute] = {
    "cpu": "cpu",
    "cuda": "cuda",
    "hip": "rocm",
    "metal": "metal",
    "rocm": "rocm",
    "sycl": "xpu",
    "vulkan": "cpu",
}
"""Backends of llama.cpp, with what a node reports that it computes on; Vulkan says nothing about the kind of card."""

_CPU = ("cpu",)


class LlamaServerFlags(msgspec.Struct, frozen=True):
    """What a llama-server is started with besides its model and its port.

    backends: keys of BACKENDS that the program may use, the best first; () leaves the choice to it. context: tokens of
    one request; 0: as many as the model allows. slots: requests at once; 0: its own default. spec_type: a key of
    SPEC_TYPES, "" for no drafts; draft_mtp may have a draft model, see needs_draft for those that must. no_spec: no
    drafts, whatever spec_type says.
    """

    backends: tuple[str, ...] = ()
    context: int = 0
    slots: int = 0
    spec_type: str = ""
    spec_n_max: int = 0
    draft_model: Path | None = None
    no_spec: bool = False

    @property
    def compute(self) -> Compute:
        """The kind of device that the program computes on, as far as its backends say."""
        return BACKENDS[self.backends[0]] if self.backends else "cpu"

    @property
    def drafts(self) -> bool:
        """Whether tokens are drafted."""
        return bool(self.spec_type) and not self.no_spec


def needs_draft(spec_type: str) -> bool:
    """Whether this way to draft needs a model of its own in a GGUF file."""
    return spec_type in _NEED_DRAFT


def command_line(binary: Path, model: Path, port: int, flags: LlamaServerFlags) -> list[str]:
    """The arguments that start a llama-server for one model on a port of this machine, the program first."""
    argv = [str(binary), "--host", "127.0.0.1", "--port", str(port), "--model", str(model), "--jinja"]
    if flags.context:
        # llama-server divides its context among its slots
        argv += ["--ctx-size", str(flags.context * max(1, flags.slots))]
    if flags.slots:
        argv += ["--parallel", str(flags.slots)]
    if flags.backends == _CPU:
        argv += ["--device", "none"]
    if flags.drafts:
        argv += ["--spec-type", SPEC_TYPES[flags.spec_type]]
        if flags.spec_n_max:
            argv += ["--spec-draft-n-max", str(flags.spec_n_max)]
        if flags.draft_model is not None:
            argv += ["--model-draft", str(flags.draft_model)]
    return argv
