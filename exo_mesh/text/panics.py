"""Recognises panics of libraries that are written in Rust: a hostile tokenizer.json or grammar can cause them."""

from __future__ import annotations


def is_panic(error: BaseException) -> bool:
    """Whether a Rust library panicked. Its exception derives from BaseException only, so `except Exception` does not
    catch it, and its class cannot be imported."""
    return type(error).__name__ == "PanicException" and type(error).__module__ == "pyo3_runtime"
