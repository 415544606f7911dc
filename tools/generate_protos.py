"""Regenerates the messages in exo_mesh/wire/proto from protos/. No stubs or servicers: calls are served and made by
their rows (exo_mesh/wire/peer_call.py). Needs grpcio-tools 1.76.0, whose code runs on protobuf 6 and 7.

python -m tools.generate_protos          write
python -m tools.generate_protos --check  exit 1 if what is checked in differs
"""

from __future__ import annotations

import filecmp
import sys
import tempfile
from importlib import resources
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ROOT / "protos"
TARGET = ROOT / "exo_mesh" / "wire" / "proto"


def generate(target: Path) -> list[Path]:
    """Writes the Python modules of all protos under `target` (as target/exo_mesh/wire/proto) and returns them."""
    from grpc_tools import protoc

    includes = resources.files("grpc_tools") / "_proto"
    protos = sorted(str(path.relative_to(SOURCES)) for path in SOURCES.rglob("*.proto"))
    outputs = [f"--{kind}_out={target}" for kind in ("python", "pyi")]
    if protoc.main(["protoc", f"-I{SOURCES}", f"-I{includes}", *outputs, *protos]) != 0:
        raise SystemExit("protoc failed")
    return sorted((target / "exo_mesh" / "wire" / "proto").glob("*_pb2*"))


def main() -> int:
    """Writes, or with --check compares."""
    with tempfile.TemporaryDirectory() as scratch:
        generated = generate(Path(scratch))
        if "--check" in sys.argv:
            checked_in = {path.name for path in TARGET.glob("*_pb2*")}
            drift = [path.name for path in generated if not filecmp.cmp(path, TARGET / path.name, shallow=False)]
            drift += sorted(checked_in - {path.name for path in generated})
            print(f"generated code differs: {', '.join(drift)}" if drift else "generated code is up to date")
            return 1 if drift else 0
        for path in generated:
            (TARGET / path.name).write_bytes(path.read_bytes())
    return 0


if __name__ == "__main__":
    sys.exit(main())
