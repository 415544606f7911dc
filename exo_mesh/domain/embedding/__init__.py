"""Vectors of texts: how hidden states become one vector, and which models make vectors. Pure."""
