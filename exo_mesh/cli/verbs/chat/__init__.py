"""`exo-mesh run`: asks questions, holds conversations, and shows the answers in a terminal."""
