"""Routes with the paths of other programs: lists of models in older forms, and what exo-mesh does not have."""
