"""Whether MLX's fast fences are used in a runner (`MLX_METAL_FAST_SYNCH`), and why. Pure.

They spare a wait between CPU and GPU at each step, which counts with collectives over RDMA. MLX's maintainers found
that the spin-wait behind them has no guaranteed coherence and can leave the GPU wedged until the Mac is started again
(ml-explore/mlx #3142, #3830, and #4005 which took the flag out of their own examples), so nobody gets them unasked.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

VARIABLE = "MLX_METAL_FAST_SYNCH"


class FastSynch(NamedTuple):
    """value: of the variable for a runner, None to leave it unset. why: for people."""

    value: str | None
    why: str


def runner_environment(setting: str, environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of a runner, with the variable as resolved."""
    value = resolve(setting, environ).value
    return dict(environ) if value is None else {**environ, VARIABLE: value}


def resolve(setting: str, environ: Mapping[str, str]) -> FastSynch:
    """setting: "auto", "on" or "off", which wins over a variable that whoever started the node has set."""
    if setting in ("on", "off"):
        return FastSynch("1" if setting == "on" else "0", f"--fast-synch {setting}")
    if environ.get(VARIABLE):
        return FastSynch(environ[VARIABLE], f"{VARIABLE} was set when the node was started")
    return FastSynch(None, "auto: off, since it can wedge the GPU until a restart (ml-explore/mlx #3142)")
