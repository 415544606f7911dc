"""Whole models of OpenAI-style servers (llama-server, vLLM, SGLang, Ollama, LM Studio), and a supervised
llama-server."""

from exo_mesh_openai.provider import OpenAiProvider

provider = OpenAiProvider()
"""The provider of this engine, for the node."""
