"""Places, owns, watches, adopts, recovers and ends the instances that the mesh runs."""
