"""The torch engine: transformers' own model code over a layer range. Importing this package imports no torch."""

from exo_mesh_torch.provider import TorchProvider

provider = TorchProvider()
