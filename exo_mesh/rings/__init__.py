"""A model over machines: places rings, runs their stages, and serves requests with them."""
