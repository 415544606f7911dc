"""The vision tower of a checkpoint: makes the rows of an image's tokens from its pixels, by transformers' own code.

Only the first stage loads it. The rest of the whole model, around the tower, stays on the meta device.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import msgspec
import torch
from torch import nn
from transformers import AutoModelForImageTextToText, initialization

from exo_mesh.domain.images import PictureSpec
from exo_mesh.domain.tensor import Tensor
from exo_mesh.errors import EngineError, ModelError
from exo_mesh_torch.errors import one_line
from exo_mesh_torch.families import GRID_POSITIONS, VISION_FAMILIES
from exo_mesh_torch.loading import ParameterLoader
from exo_mesh_torch.names import NameMap, is_vision
from exo_mesh_torch.skeleton import TorchCheckpoint, library_config

_log = logging.getLogger(__name__)

_PARTS = ("vision_tower", "multi_modal_projector", "visual")
"""Names of the modules that make image tokens, in the models of all families."""


def has_tower(checkpoint: TorchCheckpoint) -> bool:
    """Whether this engine takes images for a checkpoint."""
    described = checkpoint.model_type in VISION_FAMILIES and checkpoint.has_vision
    return described and any(map(is_vision, checkpoint.table))


class ImageRows(msgspec.Struct, frozen=True):
    """The tokens of one image. embeds: `[num_tokens, hidden]`, in place of the placeholders' embeddings. deep: added
    behind each of the first layers, `[num_tokens, hidden]` each."""

    embeds: torch.Tensor
    deep: tuple[torch.Tensor, ...] = ()

    def part(self, start: int, stop: int) -> ImageRows:
        """The rows of some of its tokens."""
        return ImageRows(self.embeds[start:stop], tuple(one[start:stop] for one in self.deep))


class VisionTower:
    """The tower and projector of a checkpoint; on the meta device until `load`."""

    def __init__(self, checkpoint: TorchCheckpoint, config: Any, model: Any) -> None:
        self._checkpoint, self._config, self._model = checkpoint, config, model

    @classmethod
    def open(cls, checkpoint: TorchCheckpoint, dtype: torch.dtype) -> VisionTower | None:
        """The tower of a checkpoint, without weights; None if the checkpoint has none that this engine runs. Raises
        ModelError."""
        if not has_tower(checkpoint):
            return None
        try:
            config = library_config(checkpoint)
            if getattr(config, "quantization_config", None) is not None:
                del config.quantization_config
            with initialization.no_init_weights(), torch.device("meta"):
                model: Any = AutoModelForImageTextToText.from_config(config, dtype=dtype, trust_remote_code=False)
        except Exception as exc:  # configs and models may raise anything
            raise ModelError(f"{checkpoint.config_file}: {one_line(exc)}") from exc
        model.eval()
        return cls(checkpoint, config, model)

    @property
    def num_bytes(self) -> int:
        """Bytes of its parameters and buffers as they will be held."""
        state = self._model.state_dict()
        return sum(state[name].nbytes for name in self._names())

    @property
    def counts_in_grids(self) -> bool:
        """Whether the model counts the positions of image tokens by row and column."""
        return self._config.model_type in GRID_POSITIONS

    @classmethod
    def load_or_explain(
        cls, checkpoint: TorchCheckpoint, dtype: torch.dtype, device: torch.device
    ) -> tuple[VisionTower | None, str]:
        """The loaded tower of a checkpoint, or the reason why there is none: the model then answers text all the
        same."""
        try:
            tower = cls.open(checkpoint, dtype)
            if tower is not None:
                tower.load(device)
        except ModelError as exc:
            _log.warning("the model takes no images here, because its vision tower cannot be loaded: %s", exc)
            return None, f"its vision tower cannot be loaded: {exc}"
        return tower, "" if tower is not None else "it has no vision tower that the torch engine runs"

    def load(self, device: torch.device) -> None:
        """Read the weights. Raises ModelError naming file and tensor."""
        names = NameMap(self._checkpoint, self._model, of_vision=True)
        if names.unused:
            name, info = names.unused[0]
            raise ModelError(f"{info.file}: {name} {list(info.shape)} has no place in the model of config.json")
        loader = ParameterLoader(self._checkpoint, self._model, device, names)
        loader.load_names(self._names())
        loader.rebuild_buffers(module for part in self._parts() for module in part.modules())
        self._device = device

    def rows(self, spec: PictureSpec, pixels: Tensor) -> ImageRows:
        """Compute the tokens of an image. pixels: uint8 `[height, width, 3]`. Raises EngineError if they are not as
        many as the prompt has placeholders."""
        try:
            with torch.inference_mode():
                found = self._features(self._normalised(spec, pixels))
        except Exception as exc:  # model code and torch may raise anything
            raise EngineError(
                f"the vision tower failed on an image of {spec.width} x {spec.height} pixels: {exc}"
            ) from exc
        if len(found.embeds) != spec.num_tokens:
            raise EngineError(
                f"the vision tower makes {len(found.embeds)} tokens of an image of {spec.width} x {spec.height} "
                f"pixels, but the prompt has {spec.num_tokens} placeholders for it"
            )
        return found

    def _features(self, image: torch.Tensor) -> ImageRows:
        model = self._model.model
        if not self.counts_in_grids:
            found = model.get_image_features(pixel_values=image[None].to(self._dtype()), return_dict=True)
            return ImageRows(_joined(found.pooler_output))
        patches, grid = _patches(image, self._config.vision_config)
        found = model.get_image_features(patches, torch.tensor([grid], device=self._device), return_dict=True)
        deep = getattr(found, "deepstack_features", None) or ()
        return ImageRows(_joined(found.pooler_output), tuple(map(_joined, deep)))

    def _normalised(self, spec: PictureSpec, pixels: Tensor) -> torch.Tensor:
        """float32 `[3, height, width]`."""
        raw = torch.frombuffer(bytearray(pixels.data), dtype=torch.uint8).reshape(spec.height, spec.width, 3)
        image = raw.to(self._device).permute(2, 0, 1).float() * (1 / 255)
        mean, std = (torch.tensor(value, device=self._device)[:, None, None] for value in (spec.mean, spec.std))
        return (image - mean) / std

    def _dtype(self) -> torch.dtype:
        dtype: torch.dtype = next(self._parts()).dtype
        return dtype

    def _parts(self) -> Iterator[nn.Module]:
        for name in _PARTS:
            if (part := getattr(self._model.model, name, None)) is not None:
                yield part

    def _names(self) -> set[str]:
        """Names of the parameters and saved buffers of the tower."""
        prefixes = tuple(f"model.{name}." for name in _PARTS)
        return {name for name in self._model.state_dict() if name.startswith(prefixes)}


def _joined(features: Any) -> torch.Tensor:
    """`[tokens, hidden]` of the only image, in whatever way the model code returns it."""
    if isinstance(features, tuple | list):
        features = torch.cat(list(features), dim=0)
    return features.reshape(-1, features.shape[-1])


def _patches(image: torch.Tensor, vision: Any) -> tuple[torch.Tensor, tuple[int, int, int]]:
    """Qwen's input: one row per patch, the patches of a merged token side by side, and the grid (time, rows, columns)
    in patches. image: `[3, height, width]`."""
    size, merge, frames = vision.patch_size, vision.spatial_merge_size, vision.temporal_patch_size
    channels, height, width = image.shape
    rows, columns = height // size, width // size
    blocks = image.reshape(channels, rows // merge, merge, size, columns // merge, merge, size)
    blocks = blocks.permute(1, 4, 2, 5, 0, 3, 6).unsqueeze(5)
    blocks = blocks.expand(*blocks.shape[:5], frames, size, size)
    return blocks.reshape(rows * columns, -1), (1, rows, columns)
