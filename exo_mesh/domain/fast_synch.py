"""Decides whether a runner uses MLX's fast fences (`MLX_METAL_FAST_SYNCH`). Pure.

Fast fences avoid a wait between CPU and GPU at each step, which matters for collectives over RDMA. MLX's maintainers
found that the spin-wait behind them has no guaranteed coherence and can wedge the GPU until the Mac restarts
(ml-explore/mlx #3142, #3830, and #4005, which removed the flag from their own examples). So they are off unless asked
for.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

VARIABLE = "MLX_METAL_FAST_SYNCH"


class FastSynch(msgspec.Struct, frozen=True):
    """The decision. value: of the variable for a runner, None to leave it unset. why: the reason, for people."""

    value: str | None
    why: str


def runner_environment(setting: str, environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment of a runner, with the variable set as `resolve` decides."""
    value = resolve(setting, environ).value
    return dict(environ) if value is None else {**environ, VARIABLE: value}


def resolve(setting: str, environ: Mapping[str, str]) -> FastSynch:
    """Decides the variable's value. A setting "on" or "off" overrides the variable that the node was started with; with
    "auto" that variable stays in force."""
    if setting in ("on", "off"):
        return FastSynch("1" if setting == "on" else "0", f"--fast-synch {setting}")
    if environ.get(VARIABLE):
        return FastSynch(environ[VARIABLE], f"{VARIABLE} was set when the node was started")
    return FastSynch(None, "auto: off, since it can wedge the GPU until a restart (ml-explore/mlx #3142)")
