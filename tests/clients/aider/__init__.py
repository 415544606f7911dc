"""aider's one-shot edit, with a tiny model that is trained on what aider really sends."""
