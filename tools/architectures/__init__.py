"""Tries every architecture that an engine's library has: its stages must compute what the library itself computes.

`check` judges one architecture, `trials` has what is computed, `table` writes the pages. An adapter per engine
(`mlx_models`, `torch_models`, `llamacpp_models`) writes tiny random models and runs them with the library alone.
"""
