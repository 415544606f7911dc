"""Does every architecture that mlx-lm can split over the ranks of a tensor group give what one process gives?"""
