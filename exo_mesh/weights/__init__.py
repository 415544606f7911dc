"""Reads model files on disk: where they are and what they hold, without loading a weight and without a tensor
library."""
