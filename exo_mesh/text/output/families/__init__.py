"""How each family of models writes tool calls: one reader per format."""
