"""Tries every architecture of the llama.cpp library with random weights: which ones stages compute exactly."""
