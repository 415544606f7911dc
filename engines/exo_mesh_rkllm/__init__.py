"""An engine for boards with Rockchip's NPU: whole models through a RKLLAMA server beside the node."""

from exo_mesh_rkllm.provider import RkllmProvider

provider = RkllmProvider()
"""The provider of the RKLLM engine, for the node."""
