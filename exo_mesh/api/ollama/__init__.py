"""Ollama's dialect: /api and /ollama/api, with lines of JSON instead of events."""
