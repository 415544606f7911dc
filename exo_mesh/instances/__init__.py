"""What the mesh runs: place, own, watch, adopt, recover, end."""
