"""Decides what runs next on a ring: which sequences have a place, which rows go together, how many frames are sent."""
