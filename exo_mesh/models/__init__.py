"""The models of the mesh, the sources of their files, and what engines know about them."""
