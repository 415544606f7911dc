"""`llm --schema`. Arguments: URL MODEL. Prints what it printed, as JSON."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from common import PERSON

base, model = sys.argv[1:]
with tempfile.TemporaryDirectory() as home:
    lines = [f"- model_id: {model}", f"  model_name: {model}", f"  api_base: {base}/v1", "  supports_schema: true"]
    (Path(home) / "extra-openai-models.yaml").write_text("\n".join(lines) + "\n")
    argv = [sys.executable, "-m", "llm", "prompt", "--no-log", "--schema", "name, age int", "-m", model, PERSON]
    argv += ["-o", "temperature", "0", "-o", "max_tokens", "200"]
    environ = {**os.environ, "LLM_USER_PATH": home, "OPENAI_API_KEY": "unused"}
    done = subprocess.run(argv, check=False, env=environ, capture_output=True, text=True, timeout=60)
    print(json.dumps({"code": done.returncode, "made": done.stdout.strip(), "errors": done.stderr[-2000:]}))
