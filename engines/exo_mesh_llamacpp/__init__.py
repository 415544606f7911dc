"""Runs ranges of layers with llama.cpp's kernels, from a prebuilt library and without patches to it."""

from exo_mesh_llamacpp.provider import LlamaCppProvider

provider = LlamaCppProvider()
