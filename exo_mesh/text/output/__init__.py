"""Splits a model's output into answer, reasoning and tool calls, by the markers of the model's family. Pure."""
