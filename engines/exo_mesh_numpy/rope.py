"""Rotary position embedding: the frequencies of a config, and a table of their cosines and sines.

Formulas: RoFormer (arXiv 2104.09864), position interpolation (2306.15595), YaRN (2309.00071), and the formula of Llama
3.1; constants and defaults as in transformers 5.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from exo_mesh.errors import ModelError

BLOCK = 256
"""Positions by which the table grows."""


class RopeSettings(msgspec.Struct, frozen=True):
    """The frequencies of a model. inv_freq: float32 `[head_dim / 2]`, radians per position. scale: of cosines and sines
    (YaRN's factor)."""

    inv_freq: np.ndarray
    scale: float = 1.0


def read_rope(file: Path, config: Mapping[str, Any], head_dim: int, default_theta: float) -> RopeSettings:
    """Read `rope_parameters`, or the older `rope_scaling` and `rope_theta`. Raises ModelError naming the key."""
    key = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
    given = config.get(key) or {}
    if not isinstance(given, dict) or any(isinstance(value, dict) for value in given.values()):
        raise ModelError(f"{file}: {key}: the numpy engine needs one set of settings for all layers")
    settings = _Settings(file, key, {**_outer(config), **given})
    kind = settings.given.get("rope_type") or settings.given.get("type") or "default"
    if kind not in _KINDS:
        raise ModelError(f"{file}: {key}: rope type {json.dumps(kind)} is not supported; known: {', '.join(_KINDS)}")
    for name, plain in (("partial_rotary_factor", 1.0), ("rope_traditional", False)):
        if settings.given.get(name, plain) != plain:
            raise ModelError(f"{file}: {name}={json.dumps(settings.given[name])} is not supported by the numpy engine")
    theta = settings.number("rope_theta", default_theta)
    # in float64, rounded once: the float32 power of a library may be one bit off, which grows with the position
    frequencies = theta ** -(np.arange(0, head_dim, 2) / head_dim)
    return _KINDS[kind](settings, frequencies, theta)


def _outer(config: Mapping[str, Any]) -> dict[str, Any]:
    """Settings that may be beside rope_parameters instead of in it."""
    names = ("rope_theta", "partial_rotary_factor", "rope_traditional", "max_position_embeddings")
    return {name: config[name] for name in (*names, "original_max_position_embeddings") if config.get(name) is not None}


class _Settings(msgspec.Struct, frozen=True):
    file: Path
    key: str
    given: Mapping[str, Any]

    def number(self, name: str, default: float | None = None) -> float:
        """A positive number, or the default. Raises ModelError if there is neither."""
        value = self.given.get(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise ModelError(f"{self.file}: {self.key}: {name} is {json.dumps(value)}, not a positive number")
        return float(value)

    def original_length(self) -> float:
        """Context length of pre-training; transformers falls back to max_position_embeddings."""
        longest = self.given.get("max_position_embeddings")
        return self.number("original_max_position_embeddings", longest)


def _default(settings: _Settings, frequencies: np.ndarray, theta: float) -> RopeSettings:
    return RopeSettings(frequencies.astype(np.float32))


def _linear(settings: _Settings, frequencies: np.ndarray, theta: float) -> RopeSettings:
    return RopeSettings((frequencies / settings.number("factor")).astype(np.float32))


def _llama3(settings: _Settings, frequencies: np.ndarray, theta: float) -> RopeSettings:
    """Stretches long waves by `factor`, keeps short ones, and blends those between."""
    factor, length = settings.number("factor"), settings.original_length()
    low, high = settings.number("low_freq_factor", 1.0), settings.number("high_freq_factor", 4.0)
    if low >= high:
        raise ModelError(f"{settings.file}: {settings.key}: low_freq_factor {low} is not below high_freq_factor {high}")
    blend = np.clip((length * frequencies / (2 * math.pi) - low) / (high - low), 0, 1)
    return RopeSettings(((1 - blend) * frequencies / factor + blend * frequencies).astype(np.float32))


def _yarn(settings: _Settings, frequencies: np.ndarray, theta: float) -> RopeSettings:
    """Interpolates the slow dimensions, extrapolates the fast ones, with a ramp between, and scales attention."""
    factor, length = settings.number("factor"), settings.original_length()
    half = len(frequencies)
    if theta == 1:
        raise ModelError(f"{settings.file}: {settings.key}: yarn cannot work with a rope_theta of 1")

    def dimension(turns: float) -> float:
        return 2 * half * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first, last = dimension(settings.number("beta_fast", 32)), dimension(settings.number("beta_slow", 1))
    if settings.given.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * half - 1)
    width = last - first or 0.001
    ramp = np.clip((np.arange(half) - first) / width, 0, 1)
    blended = frequencies / factor * ramp + frequencies * (1 - ramp)
    return RopeSettings(blended.astype(np.float32), _yarn_scale(settings, factor))


def _yarn_scale(settings: _Settings, factor: float) -> float:
    def magnitude(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1 if factor > 1 else 1.0

    if settings.given.get("attention_factor") is not None:
        return settings.number("attention_factor")
    weights = settings.given.get("mscale"), settings.given.get("mscale_all_dim")
    if all(weights):
        return magnitude(settings.number("mscale")) / magnitude(settings.number("mscale_all_dim"))
    return magnitude(1.0)


_KINDS: dict[str, Callable[[_Settings, np.ndarray, float], RopeSettings]] = {
    "default": _default,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
}


class RopeTable:
    """Cosines and sines by position. Grows by whole blocks, as far as positions are needed.

    The sines of the first half of a head come negated, as `rotate` needs them.
    """

    def __init__(self, settings: RopeSettings) -> None:
        self._settings = settings
        half = len(settings.inv_freq)
        self._cos = np.zeros((0, 1, 1, half), np.float32)
        self._sin = np.zeros((0, 1, 2, half), np.float32)

    def at(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The values of each position (integers `[n]`): float32 `[n, 1, 1, head_dim / 2]` and
        `[n, 1, 2, head_dim / 2]`."""
        self._grow(int(positions.max()) + 1)
        return self._cos[positions], self._sin[positions]

    def _grow(self, num_positions: int) -> None:
        begin = len(self._cos)
        if num_positions <= begin:
            return
        end = -(-num_positions // BLOCK) * BLOCK
        # the angle is rounded to float32 as in transformers and mlx; only then is its cosine computed
        angles = (np.arange(begin, end, dtype=np.float32)[:, None] * self._settings.inv_freq).astype(np.float64)
        cos, sin = (wave * self._settings.scale for wave in (np.cos(angles), np.sin(angles)))
        self._cos = np.concatenate([self._cos, cos[:, None, None].astype(np.float32)])
        self._sin = np.concatenate([self._sin, np.stack([-sin, sin], axis=1)[:, None].astype(np.float32)])


def rotate(heads: np.ndarray, cos: np.ndarray, sin: np.ndarray, spare: np.ndarray) -> None:
    """Rotate float32 heads `[n, num_heads, head_dim]` in place by the values of `RopeTable.at` for their positions.

    Dimension i is paired with i + head_dim / 2. spare: scratch of the size of heads.
    """
    halves = heads.reshape(*heads.shape[:2], 2, -1)
    crossed = spare.reshape(halves.shape)
    np.multiply(halves[:, :, ::-1], sin, out=crossed)
    halves *= cos
    halves += crossed
