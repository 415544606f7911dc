"""Decides which instance of a model serves a request, and how many instances the model gets. Pure."""
