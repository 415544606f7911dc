"""What a node and its runners say to each other, as values. Pure."""
