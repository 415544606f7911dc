"""Which models there are, where their files come from, and what engines say of them."""
