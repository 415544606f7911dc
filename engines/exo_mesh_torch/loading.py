"""Fills a skeleton with the parameters of one stage, layer by layer, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from exo_mesh.engine.contract import LoadProgress
from exo_mesh.errors import ModelError
from exo_mesh.weights.safetensors import INDEX_FILE
from exo_mesh_torch import disk_tables
from exo_mesh_torch.names import NameMap, Recipe, refuse_surplus
from exo_mesh_torch.skeleton import TorchCheckpoint
from exo_mesh_torch.small_weights import SmallWeights, coded_source, small_bytes
from exo_mesh_torch.sources import materialise
from exo_mesh_torch.trace import TorchTrace


class ParameterLoader:
    """Loads parameters of a checkpoint into a skeleton in place."""

    def __init__(
        self,
        checkpoint: TorchCheckpoint,
        model: Any,
        device: torch.device,
        names: NameMap,
        pack: Callable[[nn.Module], bool] | None = None,
        small: SmallWeights | None = None,
        tables: frozenset[str] = frozenset(),
    ) -> None:
        """pack: see PackedLinears. small: where quantised weights are kept as codes; None makes them plain. tables:
        the weights that stay in the files, see tables_on_disk."""
        self._pack = pack
        self._small = small
        self._tables = tables
        self._is_first = True
        self._packed: list[nn.Module] = []
        self._checkpoint, self._model, self._device, self._names = checkpoint, model, device, names
        self._aliases = shared_names(model)
        self._loaded: set[str] = set()

    def load_names(self, names: set[str]) -> None:
        """Load all of `names`, whichever name of a shared parameter is in the files."""
        for name in sorted(names):
            if name not in self._loaded:
                self._load_recipe(self._recipe_for(name))
        missing = sorted(names - self._loaded)
        if missing:
            raise ModelError(f"{self._where()} has no tensor for {missing[0]}")

    def _recipe_for(self, name: str) -> Recipe:
        for alias in self._aliases.get(name, (name,)):
            if alias in self._names.recipes:
                return self._names.recipes[alias]
        # a converter may make several parameters at once: its recipe is under the first
        return next((r for r in self._names.recipes.values() if _makes(r, name)), Recipe(name))

    def _load_recipe(self, recipe: Recipe) -> None:
        if not recipe.sources:
            raise ModelError(f"{self._where()} has no tensor for {recipe.target}")
        if recipe.target in self._tables:
            self._check_shape(recipe.target, disk_tables.num_rows(recipe), recipe.sources[0][0].name)
            self._packed.append(disk_tables.put(self._model, recipe.target, recipe, self._device))
            self._loaded.add(recipe.target)
        elif recipe.converter is None:
            source = recipe.sources[-1][0]
            self._check_shape(recipe.target, source.shape, source.name)
            if self._keep_small(recipe):
                return
            self._set(recipe.target, materialise(source, self._dtype(recipe.target), self._device))
        else:
            for target, tensor in self._convert(recipe).items():
                self._check_shape(target, tuple(tensor.shape), recipe.sources[0][0].name)
                self._set(target, tensor)

    def _keep_small(self, recipe: Recipe) -> bool:
        """Keep a quantised weight as codes, if that is wanted and possible."""
        source = coded_source(recipe)
        if self._small is None or source is None:
            return False
        targets = self._aliases.get(recipe.target, (recipe.target,))
        modules = self._small.put(self._model, targets, source, is_first=self._is_first)
        self._packed += modules
        self._loaded |= set(targets) if modules else set()
        return bool(modules)

    def _convert(self, recipe: Recipe) -> dict[str, torch.Tensor]:
        """Let transformers' own rule make parameters from several tensors."""
        rule, dtype = deepcopy(recipe.converter), self._dtype(recipe.target)
        assert rule is not None, "called for recipes with a converter"
        for source, pattern in recipe.sources:
            read = partial(materialise, source, dtype, self._device)
            rule.add_tensor(recipe.target, source.name, pattern or "", read)
        try:
            made = rule.convert(recipe.target, model=self._model, config=self._model.config)
        except ModelError:
            raise
        except Exception as exc:  # stacking or splitting tensors that do not fit
            raise ModelError(f"{self._where()}: {recipe.sources[0][0].name} cannot be converted: {exc}") from exc
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}

    def _dtype(self, name: str) -> torch.dtype:
        dtype: torch.dtype = _get(self._model, name).dtype
        return dtype

    def _check_shape(self, target: str, shape: tuple[int, ...], source: str) -> None:
        expected = tuple(_get(self._model, target).shape)
        if shape != expected:
            info = self._checkpoint.table.get(source)
            file = info.file if info is not None else self._where()
            raise ModelError(f"{file}: {source} has shape {list(shape)}, but config.json requires {list(expected)}")

    def _set(self, target: str, tensor: torch.Tensor) -> None:
        """Put a tensor in place, under every name of a shared parameter."""
        old = _get(self._model, target)
        tensor = tensor.to(old.dtype)
        value = nn.Parameter(tensor, requires_grad=False) if isinstance(old, nn.Parameter) else tensor
        value._is_hf_initialized = True
        for alias in self._aliases.get(target, (target,)):
            _put(self._model, alias, value)
            self._loaded.add(alias)
        if self._pack is not None and target.endswith(".weight") and target not in self._aliases:
            module = self._model.get_submodule(target.removesuffix(".weight"))
            del old, tensor, value  # otherwise the plain weights would stay in memory until the next ones
            if self._pack(module):
                self._packed.append(module)

    def rebuild_buffers(self, modules: Iterable[nn.Module]) -> None:
        """Compute buffers that are in no file (such as inverse frequencies) again, as after any load by transformers.

        transformers initialises every module that is not marked as loaded; on the meta device that changes nothing.
        """
        for module in modules:
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.is_meta:
                    module._buffers[name] = torch.zeros_like(buffer, device=self._device)
        for module in self._model.modules():
            module._is_hf_initialized = False
        for module in self._packed:
            module._is_hf_initialized = True  # it has no weight to initialise
        self._model.initialize_weights()

    def _where(self) -> str:
        files = {info.file for info in self._checkpoint.table.values()}
        if len(files) == 1:
            return str(files.pop())
        index = self._checkpoint.model_dir / INDEX_FILE
        return str(index if index.is_file() else self._checkpoint.model_dir)


class StageLoader(ParameterLoader):
    """Loads a stage's share of a checkpoint into a skeleton in place."""

    def __init__(
        self,
        checkpoint: TorchCheckpoint,
        model: Any,
        trace: TorchTrace,
        device: torch.device,
        pack: Callable[[nn.Module], bool] | None = None,
        small: SmallWeights | None = None,
        options: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Checks all names and shapes. pack, small: see ParameterLoader. options: of the engine, for tables. Raises
        ModelError naming file and tensor for a tensor that does not fit."""
        names = NameMap(checkpoint, model)
        tables = disk_tables.tables_on_disk(names, model, trace.prefix, options)
        super().__init__(checkpoint, model, device, names, pack, small, tables)
        self._trace = trace
        tied = any(len(names) > 1 for names in self._aliases.values())
        ignored = list(model._keys_to_ignore_on_load_unexpected or ())
        refuse_surplus(self._names, checkpoint.table, trace.num_layers, tied, ignored)

    def wanted(self, start: int, stop: int) -> list[set[str]]:
        """Names of parameters and saved buffers by step: those outside the layers, then each layer of the stage."""
        trace, state = self._trace, self._model.state_dict()
        beside = set(trace.everywhere)
        beside |= trace.first if start == 0 else set()
        beside |= trace.last if stop == trace.num_layers else set()
        layers = f"{trace.prefix}."
        buffers = {name for name, _ in self._model.named_buffers() if name in state and not name.startswith(layers)}
        steps = [{name for name in state if name.startswith(f"{layers}{i}.")} for i in range(start, stop)]
        return [beside | buffers, *steps]

    def load(self, start: int, stop: int, progress: LoadProgress) -> None:
        """Read the weights; progress is in bytes of the layers as they will be held. Raises ModelError."""
        beside, *layers = self.wanted(start, stop)
        state = self._model.state_dict()
        self._is_first = start == 0
        small = {} if self._small is None else small_bytes(self._names, self._model, self._aliases)
        small |= dict.fromkeys(self._tables, 0)
        sizes = [sum(small.get(name, state[name].nbytes) for name in layer) for layer in layers]
        total, done = sum(sizes), 0
        progress(0, total)
        for names, size in zip(layers, sizes, strict=True):
            self.load_names(names)
            done += size
            progress(done, total)
        self.load_names(beside)
        self.rebuild_buffers(self._stage_modules(start, stop))

    def _stage_modules(self, start: int, stop: int) -> Iterable[nn.Module]:
        """All modules except the modules of other stages' layers."""
        layers = f"{self._trace.prefix}."
        mine = tuple(f"{layers}{i}" for i in range(start, stop))
        for name, module in self._model.named_modules():
            if not name.startswith(layers) or name in mine or name.startswith(tuple(f"{n}." for n in mine)):
                yield module


def num_bytes(model: nn.Module) -> int:
    """Bytes of memory under all parameters and buffers that are not on the meta device, shared memory once."""
    storages = [t.untyped_storage() for t in (*model.parameters(), *model.buffers()) if not t.is_meta]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def _makes(recipe: Recipe, name: str) -> bool:
    """Whether a recipe makes `name` besides its first target."""
    rule = recipe.converter
    if rule is None or len(rule.target_patterns) < 2:
        return False
    first, *others = rule.target_patterns
    return any(recipe.target.replace(first, other) == name for other in others)


def shared_names(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """All names of each parameter that has several."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return {name: tuple(group) for group in names.values() if len(group) > 1 for name in group}


def _get(model: nn.Module, name: str) -> Any:
    path, _, leaf = name.rpartition(".")
    return getattr(model.get_submodule(path), leaf)


def _put(model: nn.Module, name: str, value: Any) -> None:
    path, _, leaf = name.rpartition(".")
    module = model.get_submodule(path)
    if leaf in module._buffers:
        module._buffers[leaf] = value
    else:
        setattr(module, leaf, value)
