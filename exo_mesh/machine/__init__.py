"""This computer, without a mesh: memory, accelerators, disk, cables."""
