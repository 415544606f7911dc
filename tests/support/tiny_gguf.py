"""Writes a tiny GGUF model with random weights for llama.cpp, and runs llama.cpp's HTTP server on it in a process.

Needs the packages `gguf` and `xllamacpp`: `python -m tests.support.tiny_gguf serve --model FILE --port N`.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import numpy as np

from tools.llama_server import serve

EMBED, LAYERS, HEADS, FEED_FORWARD = 64, 4, 4, 128
CONTEXT = 1 << 16
"""So many tokens take this model longer than a test waits for the end of a cancelled answer."""

TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
THINKING_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' }}"
    "{% if message.reasoning_content %}{{ '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}{% endif %}"
    "{{ message['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|><think>\\n' }}"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '\\n</think>\\n\\n' }}{% endif %}{% endif %}"
)
"""Begins every answer with a thought, as the templates of many models do."""

SPECIAL = ("<|end|>", "<|user|>", "<|assistant|>", "<|system|>")


def write_tiny_gguf(path: Path, template: str = TEMPLATE, seed: int = 7) -> Path:
    """A Llama of four layers with a byte-level vocabulary. Its text means nothing; greedy text is reproducible."""
    import gguf

    random = np.random.default_rng(seed)
    tokens = [*_byte_letters(), *SPECIAL]
    types = [gguf.TokenType.NORMAL] * 256 + [gguf.TokenType.CONTROL] * len(SPECIAL)
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_name("tiny")
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(EMBED)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(EMBED // HEADS)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([int(kind) for kind in types])
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(256)
    writer.add_bos_token_id(256)
    writer.add_add_bos_token(False)
    writer.add_chat_template(template)

    def add(name: str, *shape: int) -> None:
        writer.add_tensor(name, (random.standard_normal(shape) / np.sqrt(shape[-1])).astype(np.float32))

    add("token_embd.weight", len(tokens), EMBED)
    for layer in range(LAYERS):
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            add(f"blk.{layer}.{name}.weight", EMBED, EMBED)
        add(f"blk.{layer}.ffn_gate.weight", FEED_FORWARD, EMBED)
        add(f"blk.{layer}.ffn_up.weight", FEED_FORWARD, EMBED)
        add(f"blk.{layer}.ffn_down.weight", EMBED, FEED_FORWARD)
        for name in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{name}.weight", np.ones(EMBED, np.float32))
    writer.add_tensor("output_norm.weight", np.ones(EMBED, np.float32))
    head = random.standard_normal((len(tokens), EMBED)) / np.sqrt(EMBED)
    # no chance against the best letter: control tokens, which would end a greedy answer, and parts of characters
    head[[token for token in range(len(tokens)) if not 32 <= token < 127]] = 0.0
    writer.add_tensor("output.weight", head.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _byte_letters() -> list[str]:
    """The letters by which byte-level vocabularies write the 256 bytes."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    shown = {byte: chr(byte) for byte in plain}
    others = (byte for byte in range(256) if byte not in shown)
    shown |= {byte: chr(256 + number) for number, byte in enumerate(others)}
    return [shown[byte] for byte in range(256)]


class RealLlamaServer:
    """llama.cpp's server in a process, which can be killed and started again at the same port."""

    def __init__(self, model: Path, port: int, slots: int = 2, context: int = CONTEXT, *, flash: bool = True) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self._argv = ["serve", "--model", str(model), "--port", str(port), "--parallel", str(slots)]
        self._argv += ["--context", str(context), *([] if flash else ["--no-flash"])]
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        if self._process is not None and self._process.poll() is None:
            return
        command = [sys.executable, "-m", "tests.support.tiny_gguf", *self._argv]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("ready"):
                return
        raise AssertionError(f"llama-server ended with exit code {self._process.wait()}")

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def num_running(self) -> int | None:
        import json

        with urllib.request.urlopen(f"{self.url}/slots", timeout=10) as reply:
            return sum(bool(slot["is_processing"]) for slot in json.load(reply))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("verb", choices=["serve", "write"])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--parallel", type=int, default=1)
    parser.add_argument("--context", type=int, default=CONTEXT)
    parser.add_argument("--no-flash", action="store_true")
    args, _ = parser.parse_known_args()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if args.verb == "write":
        write_tiny_gguf(args.model)
    else:
        key = os.environ.get("LLAMA_API_KEY", "")
        serve(args.model, args.port, args.parallel, key, args.context, flash=not args.no_flash)


if __name__ == "__main__":
    main()
