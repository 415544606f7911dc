"""Models that programs beside the nodes serve whole: what they are, and requests and answers as text. Pure."""
