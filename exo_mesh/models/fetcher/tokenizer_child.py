"""`python -m exo_mesh.models.fetcher.tokenizer_child DIR OUT`: writes tokenizer.json with transformers.

The older files that it reads come from a stranger and transformers is large, so this runs in a separate process, with
limits, offline and without code of the model.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from exo_mesh.base.process_limits import limit_work

MEMORY_BYTES = 4 * 2**30
CPU_S = 120
WRITTEN_BYTES = 256 * 2**20
_HEAVY = ("torch", "tensorflow", "jax", "flax")
"""Libraries that tokenizers do not need; importing one would take seconds and gigabytes."""


def main(argv: list[str]) -> int:
    """Prints {}, {"missing": package} or {"failed": reason}."""
    model_dir, out = map(Path, argv)
    limit_work(CPU_S, MEMORY_BYTES, WRITTEN_BYTES)
    sys.modules.update(dict.fromkeys(_HEAVY))  # type: ignore[arg-type]
    sys.stdout.write(json.dumps(_convert(model_dir, out)))
    return 0


def _convert(model_dir: Path, out: Path) -> dict[str, str]:
    try:
        from transformers import AutoTokenizer
    except ImportError:
        return {"missing": "transformers"}
    try:
        if (model_dir / "tekken.json").exists():
            from transformers.integrations.mistral import convert_tekken_tokenizer

            tokenizer = convert_tekken_tokenizer(str(model_dir / "tekken.json"))
        else:
            tokenizer = AutoTokenizer.from_pretrained(str(model_dir), local_files_only=True, trust_remote_code=False)
        tokenizer.save_pretrained(str(out))
    except ImportError as exc:
        return {"missing": str(exc.name or _first_line(exc))}
    except Exception as exc:  # noqa: BLE001 - the library's error about a stranger's files is the answer
        return {"failed": _first_line(exc)}
    return {}


def _first_line(exc: Exception) -> str:
    words = " ".join(str(exc).split())
    return f"{type(exc).__name__}: {words}"[:300]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
