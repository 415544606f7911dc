"""`exo-mesh run`: questions, conversations, and what they look like in a terminal."""
