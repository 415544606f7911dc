"""Turns text into token ids and back, at the entry peer: tokenizer, chat template, detokenizer, stop strings."""
