"""Panics of the tokenizers library, which is written in Rust: a hostile tokenizer.json can cause them."""

from __future__ import annotations


def is_panic(error: BaseException) -> bool:
    """Whether the library panicked. Its exception is no Exception, so that `except Exception` lets it pass, and its
    class cannot be imported."""
    return type(error).__name__ == "PanicException" and type(error).__module__ == "pyo3_runtime"
