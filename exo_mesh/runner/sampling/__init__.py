"""Draws tokens from logits."""
