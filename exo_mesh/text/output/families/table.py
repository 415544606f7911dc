"""The tool families by name. Pure."""

from __future__ import annotations

from exo_mesh.text.output.families.family import ToolFamily
from exo_mesh.text.output.families.hermes import HERMES

FAMILIES: dict[str, ToolFamily] = {family.name: family for family in (HERMES,)}
