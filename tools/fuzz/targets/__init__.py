"""One module per target: FLAGS of its node, COUNT messages by default, and `attack(rig, rng, count)`."""
