"""`python -m exo_mesh_engine_example DIRECTORY`: write a random model there."""

import sys
from pathlib import Path

from exo_mesh_engine_example.model import write_random_model

if len(sys.argv) != 2:
    sys.exit("usage: python -m exo_mesh_engine_example DIRECTORY")
write_random_model(Path(sys.argv[1]))
