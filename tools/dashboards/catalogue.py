"""The dashboards that are checked in, in the order of their files."""

from __future__ import annotations

from tools.dashboards.boards import Board
from tools.dashboards.model import MODEL
from tools.dashboards.node import NODE
from tools.dashboards.overview import OVERVIEW
from tools.dashboards.ring import RING

BOARDS: tuple[Board, ...] = (MODEL, NODE, OVERVIEW, RING)
