"""Rockchip's chips with an NPU, as device trees name them. Pure."""

from __future__ import annotations

NPU_CHIPS = ("rk3562", "rk3566", "rk3568", "rk3576", "rk3588", "rk3588s")
"""Chips that have an NPU with a driver in Linux."""

NPU_TOPS = {"rk3576": 6, "rk3588": 6}
"""The NPU's peak in 10^12 operations per second on 8-bit integers, by Rockchip's data sheets. RKLLM runs on these
chips."""

DEVICE_TREE = "/proc/device-tree"
"""Where Linux shows the device tree of the machine. `compatible` there lists the board and its chip."""


def chip_of(compatible: bytes) -> str:
    """Returns the chip from the device tree's `compatible`, strings that end with a zero byte; "" for other machines.

    A variant counts as its chip: "rk3588s" is "rk3588".
    """
    names = [part.decode(errors="replace") for part in compatible.split(b"\0") if part]
    chips = [name.partition(",")[2] for name in names if name.startswith("rockchip,rk35")]
    return next((chip.removesuffix("s") for chip in reversed(chips) if chip in NPU_CHIPS), "")


def npu_words(chip: str) -> str:
    """Describes the chip's NPU for people: "NPU of the RK3588, 6 TOPS INT8"."""
    tops = NPU_TOPS.get(chip)
    return f"NPU of the {chip.upper()}" + (f", {tops} TOPS INT8" if tops else "")
