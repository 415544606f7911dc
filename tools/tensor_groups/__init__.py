"""Checks that every architecture that mlx-lm can split over ranks gives the same result as one process."""
