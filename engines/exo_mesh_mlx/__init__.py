"""The MLX engine: mlx-lm's own model code over a layer range. Importing this package imports no mlx."""

from exo_mesh_mlx.provider import MlxProvider

provider = MlxProvider()
