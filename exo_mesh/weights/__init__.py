"""Model files on disk: where they are, what is in them, without loading a weight and without a tensor library."""
