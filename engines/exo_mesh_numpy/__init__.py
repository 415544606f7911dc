"""An engine that needs only NumPy: it lets any machine join a ring, and is the reference for exact results."""

from exo_mesh_numpy.provider import NumpyProvider

provider = NumpyProvider()
