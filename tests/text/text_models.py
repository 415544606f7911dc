"""Small tokenizers of the three families, and a model directory without weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from exo_mesh.text.rendering import CompiledTemplate
from exo_mesh.text.tokenizer import TextModel

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CORPUS = ["Hello, world! How are you today? The quick brown fox. user assistant system \n", "grüße €uro 日本語 🙂"] * 4


def byte_level() -> Tokenizer:
    """As GPT-2, Llama 3 and Qwen: any text, in bytes; the rarer characters take several tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIALS])
    return tokenizer


def byte_fallback() -> Tokenizer:
    """As Llama 2 and Gemma: pieces with ▁ for spaces, bytes where there is no piece, a leading space stripped."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcdeHlorw,!.", "▁w", "lo", "▁wor"]
    merges = [("▁", "w"), ("l", "o")]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken("<s>", special=True, normalized=False)])
    return tokenizer


def word_piece() -> Tokenizer:
    """As BERT: words, and pieces of words that begin with ##."""
    vocab = {
        piece: i for i, piece in enumerate(["[UNK]", "hello", "world", "##ly", "##s", ",", "!", "do", "n", "'", "t"])
    }
    tokenizer = Tokenizer(models.WordPiece(vocab=vocab, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(prefix="##", cleanup=True)
    return tokenizer


def write_text_model(directory: Path, template: Any = TEMPLATE, **generation: Any) -> Path:
    """tokenizer.json, tokenizer_config.json and generation_config.json of a model that has nothing else."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = byte_level()
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"eos_token": "<|im_end|>", "pad_token": {"content": "<|endoftext|>"}, "chat_template": template}
    (directory / "tokenizer_config.json").write_text(json.dumps(config), "utf-8")
    eos_ids = [tokenizer.token_to_id("<|endoftext|>")]
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": eos_ids, **generation}), "utf-8")
    return directory


def encode_chat(text: TextModel, messages: list[dict[str, Any]], **options: Any) -> list[int]:
    """Ids of a conversation, with the template rendered in this process."""
    assert text.template is not None
    compiled = CompiledTemplate.compile(text.template.source, text.template.where)
    return text.encode_prompt(compiled.render(messages, variables=text.special_tokens, **options))
