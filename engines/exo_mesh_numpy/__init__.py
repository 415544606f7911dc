"""An engine that needs nothing but NumPy: a way for any machine to be part of a ring, and the oracle of exactness."""

from exo_mesh_numpy.provider import NumpyProvider

provider = NumpyProvider()
