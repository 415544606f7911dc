"""The colours of the stages of a ring in a terminal: those of the page in its dark theme, see api/web/stages.css."""

from __future__ import annotations

STAGE_COLOURS = ("#57c2a6", "#7fb0f5", "#c39be8", "#ef8fc4", "#c8c352", "#5cc8dd", "#d6a877", "#a9b7c4")
"""By the place of a stage in its ring; further stages begin again with the first."""


def stage_colour(index: int) -> str:
    """The colour of a stage, as a style of rich. A terminal with fewer colours shows the nearest one."""
    return STAGE_COLOURS[index % len(STAGE_COLOURS)]
