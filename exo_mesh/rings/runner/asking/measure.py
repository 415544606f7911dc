"""`python -m exo_mesh.rings.runner.asking.measure ENGINE MODEL_DIR`: measures how fast an engine is here.

It writes lines of JSON. A node or `exo-mesh bench` starts it in a process of its own, because it imports the engine's
library and loads weights.

    --what slice     one line: seconds of a few layers for 1 to 16 rows, of a prefill, and the memory's bandwidth
    --what engine    loads the whole model and prints a line; then, for every line `PROMPT STEPS` on standard input,
                     prints a line with the seconds for a prompt of PROMPT tokens and for STEPS decode steps
    --what library   the same with the generate loop of the engine's own library
    --what peak      one line: the most memory that loading layers A to B took

If it fails, it prints {"error": …}. It ends with its standard input, or after --deadline seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import threading
from collections.abc import Mapping, Sequence
from importlib import import_module, util
from pathlib import Path
from typing import Any, TextIO, cast

import msgspec

from exo_mesh.domain.shard import Shard
from exo_mesh.engine.bandwidth import bandwidth_of
from exo_mesh.engine.contract import EngineProvider, LoadRequest
from exo_mesh.engine.measure import Loop, measure_slice, open_loop, share_bytes
from exo_mesh.engine.registry import provider as find_provider
from exo_mesh.errors import EngineError, InputError, MeshError
from exo_mesh.weights.card import read_card

EXIT_LATE = 3
MAX_PROMPT, MAX_STEPS = 32768, 4096


def main(argv: Sequence[str]) -> int:
    """Run the measurement; 0, or 1 after an {"error": …} line."""
    parser = argparse.ArgumentParser(prog="exo_mesh.rings.runner.asking.measure", description=__doc__.split("\n")[0])
    parser.add_argument("engine")
    parser.add_argument("model_dir", type=Path)
    parser.add_argument("--what", choices=("slice", "engine", "library", "peak"), default="slice")
    parser.add_argument("--option", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--layers", default="", metavar="A:B")
    parser.add_argument("--deadline", type=float, default=120.0)
    args = parser.parse_args(argv)
    out = _own_output()
    _end_at(args.deadline)
    try:
        options = _options(args.option)
        provider = find_provider(args.engine)
        match args.what:
            case "slice":
                _say(out, msgspec.to_builtins(measure_slice(provider, args.model_dir, options)))
            case "peak":
                _say(out, _peak(provider, args.model_dir, options, args.layers))
            case what:
                _serve(out, provider, args.model_dir, options, what)
    except MeshError as exc:
        _say(out, {"error": str(exc)})
        return 1
    except Exception as exc:  # noqa: BLE001 - last handler of the process: the caller must get every error
        _say(out, {"error": f"{type(exc).__name__}: {exc}"})
        return 1
    return 0


def library_loop(provider: EngineProvider, model_dir: Path, options: Mapping[str, str]) -> Loop:
    """The generate loop of the engine's own library, to compare with.

    The loop is what `open_loop(model_dir, options)` returns, in the module `library_loop` of the provider's package.
    Raises EngineError if there is no such module.
    """
    name = f"{type(provider).__module__.partition('.')[0]}.library_loop"
    if util.find_spec(name) is None:
        raise EngineError(f"engine {provider.name} has no library loop to compare with")
    return cast(Loop, import_module(name).open_loop(model_dir, options))


def _serve(out: TextIO, provider: EngineProvider, model_dir: Path, options: Mapping[str, str], what: str) -> None:
    """Load the model, print a line, then measure what each line of standard input asks for."""
    ready: dict[str, Any] = {"ready": True}
    if what == "engine":
        loop, engine = open_loop(provider, model_dir, options)
        ready["held_bytes"] = engine.memory_bytes()
        ready["bandwidth"] = msgspec.to_builtins(bandwidth_of(engine))
    else:
        loop = library_loop(provider, model_dir, options)
    vocab_size = read_card(model_dir, model_dir.name).vocab_size
    _say(out, ready)
    for line in sys.stdin:
        found = re.fullmatch(r"(\d{1,6}) (\d{1,6})\s*", line)
        if found is None or not 0 < int(found[1]) <= MAX_PROMPT or not 0 < int(found[2]) <= MAX_STEPS:
            raise InputError(f"not `PROMPT STEPS`: {line[:80]!r}")
        prompt = [(7919 * index + 13) % (vocab_size - 1) for index in range(int(found[1]))]
        _say(out, loop(prompt, int(found[2]))._asdict())


def _peak(provider: EngineProvider, model_dir: Path, options: Mapping[str, str], layers: str) -> dict[str, int]:
    """Measure the memory of loading some layers. peak_bytes: the most that was resident until the stage was loaded.
    share_bytes: the stage's tensors as the engine holds them."""
    start, stop = (int(number) for number in layers.split(":"))
    engine = provider.create()
    shard = Shard(model_dir.name, start, stop, read_card(model_dir, model_dir.name).num_layers)
    engine.load(LoadRequest(shard, model_dir, 512, options), lambda done, total: None)
    figures = {"peak_bytes": _peak_rss_bytes(), "held_bytes": engine.memory_bytes()}
    # last, because a survey takes memory as well
    return {**figures, "share_bytes": share_bytes(provider, model_dir, shard, options)}


def _peak_rss_bytes() -> int:
    """The most memory that this process ever had resident."""
    status = Path("/proc/self/status")
    if status.is_file():  # ru_maxrss would include the parent's memory before exec
        found = re.search(r"VmHWM:\s+(\d+)", status.read_text())
        return 1024 * int(found[1]) if found else 0
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes on macOS


def _options(pairs: Sequence[str]) -> dict[str, str]:
    for pair in pairs:
        if "=" not in pair:
            raise InputError(f"--option {pair} is not KEY=VALUE")
    return dict(pair.split("=", 1) for pair in pairs)


def _own_output() -> TextIO:
    """A standard output for our lines alone: everything that a library prints goes to standard error."""
    own = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return own


def _say(out: TextIO, value: Mapping[str, Any]) -> None:
    out.write(json.dumps(value) + "\n")
    out.flush()


def _end_at(deadline_s: float) -> None:
    """End this process at the deadline, even if a library hangs."""
    timer = threading.Timer(deadline_s, lambda: os._exit(EXIT_LATE))
    timer.daemon = True
    timer.start()


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stderr.flush()
    os._exit(code)  # threads of foreign libraries must not delay the exit
