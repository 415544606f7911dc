"""Text to token ids and back, at the entry peer: tokenizer, chat template, streaming detokenizer, stop strings."""
