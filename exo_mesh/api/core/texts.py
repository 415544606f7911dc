"""Caches the text models in use. Templates and long texts run in child processes, and short texts in threads."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from msgspec.structs import replace

from exo_mesh.api.core.image_trail import ImageTrail
from exo_mesh.api.core.opening_pace import OpeningPace
from exo_mesh.api.core.request import ImageInput
from exo_mesh.api.core.templates import TemplateRenderer
from exo_mesh.api.core.tokenizers import FarTokenizers
from exo_mesh.base.tasks import SharedCalls, TaskOwner
from exo_mesh.domain.request import GrammarSpec
from exo_mesh.errors import DeadlineError, InputError, ModelError
from exo_mesh.models.entry import ModelEntry
from exo_mesh.node.model_service import ModelService
from exo_mesh.text.image_wire import ImageDecoded, ImageRecipe
from exo_mesh.text.template import ChatTemplate, Message
from exo_mesh.text.text_files import TextFiles
from exo_mesh.text.tokenizer import TextModel
from exo_mesh.weights.model_files import named

T = TypeVar("T")

MAX_OPEN = 8  # most text models in memory; a model with a large vocabulary takes about 50 MB

MAX_OPEN_BYTES = 64 << 20
"""Most bytes of their tokenizer.json files together; the one used last is kept in any case. The largest known has 33
MB. A tokenizer takes some ten times as much memory as its file."""

LARGE_BYTES = 256 << 10
"""From this size on, a process reads a tokenizer: the library holds the interpreter for 20 ms to read this much."""

NUM_WORKERS = 8
"""Threads for text work. Those with long texts only wait for a process, and must not keep short texts waiting."""

WORK_LIMIT_S = 30.0  # enough to tokenize megabytes of text

_Version = tuple[Path, int, int]
"""A directory, and the modification time in ns and the size of its tokenizer.json."""


class TextModels:
    """A small cache of TextModel by directory, and the threads and processes that open and use them."""

    def __init__(
        self,
        templates: TemplateRenderer,
        image_trail: ImageTrail | None = None,
        tokenizers: FarTokenizers | None = None,
    ) -> None:
        """templates, tokenizers: owned and closed by this object."""
        self._templates = templates
        self._tokenizers = tokenizers or FarTokenizers()
        self._image_trail = image_trail
        self._open: OrderedDict[_Version, TextModel] = OrderedDict()
        self._opening: dict[_Version, asyncio.Task[TextModel]] = {}
        self._workers = ThreadPoolExecutor(NUM_WORKERS, thread_name_prefix="exo-mesh-text")
        self._tasks = TaskOwner()
        self._lookups: SharedCalls[tuple[int, int]] = SharedCalls()
        self._pace = OpeningPace()

    async def get(self, directory: Path) -> TextModel:
        """The text model of a directory; it is read again if its tokenizer.json has changed. Raises ModelError, and
        OverloadError if too many models are opened."""
        version = (directory, *await self._lookups.get(directory, lambda: self.work(lambda: _modified(directory))))
        if version in self._open:
            self._open.move_to_end(version)
            return self._open[version]
        if version not in self._opening:
            self._opening[version] = self._tasks.start(self._read(version), f"read the text files of {directory.name}")
        return await asyncio.shield(self._opening[version])

    async def of(self, models: ModelService, entry: ModelEntry) -> TextModel:
        """The text model of a model of the mesh. Empty for a model that only a model server has. Raises ModelError and
        the errors of ModelService.text_files."""
        if entry.served is not None:
            return TextModel.without_vocabulary(entry.name)
        text = await self.get(await models.text_files(entry.name))
        if text.template is not None:
            models.note_template(entry.name, text.template)
        return text

    async def render(
        self,
        text: TextModel,
        template: ChatTemplate,
        messages: Sequence[Message],
        *,
        variables: Mapping[str, Any],
        **options: bool,
    ) -> str:
        """Render the prompt of a conversation with one of the model's templates. options: as in
        TemplateRenderer.render. Raises InputError."""
        names = {**text.special_tokens, **variables}
        return await self._templates.render(template, messages, variables=names, **options)

    async def check_grammar(self, spec: GrammarSpec, param: str) -> None:
        """Raises InputError, naming the keyword, if a grammar cannot be enforced. param: the client's field."""
        try:
            await self._templates.check_grammar(spec, param)
        except InputError as exc:
            raise InputError(f"{param}: {exc}", param=param) from exc

    async def decode_image(self, image: ImageInput, recipe: ImageRecipe) -> ImageDecoded:
        """Decode and resize an image in a child process. Raises InputError that names its place."""
        found = await self._templates.decode_image(image.data, recipe, image.where)
        if (trail := self._image_trail) is not None:
            await self.work(lambda: trail.note(image.where, len(image.data), found))
        return found

    async def work(self, job: Callable[[], T]) -> T:
        """Run blocking text work in a thread. Raises the errors of the work, or DeadlineError."""
        future = asyncio.get_running_loop().run_in_executor(self._workers, job)
        try:
            async with asyncio.timeout(WORK_LIMIT_S):
                return await future
        except TimeoutError as exc:
            raise DeadlineError(f"preparing the text of this request took more than {WORK_LIMIT_S:.0f} s") from exc

    async def close(self) -> None:
        """End the processes and release the threads; work that has not started is dropped."""
        self._workers.shutdown(wait=False, cancel_futures=True)
        await self._tasks.close()
        await self._templates.close()
        await self._tokenizers.close()

    async def _read(self, version: _Version) -> TextModel:
        """Open a model for all requests that wait for it; it continues even if the first of them is cancelled."""
        directory, modified_ns, _ = version
        try:
            async with self._pace.turn():
                text = await self._opened(directory, modified_ns)
            if text.template is not None:
                text = await self._tried(text, text.template)
            text = self._tokenizers.attached(text, directory, modified_ns)
            if text.template is None or text.template.is_tried:  # else the next request tries again
                self._open[version] = text
            while len(self._open) > (MAX_OPEN if sum(size for _, _, size in self._open) <= MAX_OPEN_BYTES else 1):
                self._open.popitem(last=False)
            return text
        finally:
            del self._opening[version]

    async def _opened(self, directory: Path, modified_ns: int) -> TextModel:
        """The model; a process reads its tokenizer if it is large. Raises ModelError."""
        if await self.work(lambda: _vocabulary_bytes(directory)) < LARGE_BYTES:
            return await self.work(lambda: self._pace.timed(lambda: TextModel.open(directory)))

        def read() -> TextModel:
            files = TextFiles.read(directory)
            return TextModel.of(directory, files, *self._tokenizers.read(directory, modified_ns, self._pace.note))

        return await self.work(read)

    async def _tried(self, text: TextModel, template: ChatTemplate) -> TextModel:
        """The text model with its templates compiled and tried. Raises ModelError if one cannot be compiled."""
        found = []
        for one in (template, template.tool_use):
            if one is not None:
                compiled = await self._templates.compile(one)
                found.append(await self._templates.try_out(compiled, text.special_tokens))
        tool_use = found[1] if len(found) > 1 else None
        whole = replace(found[0], tool_use=tool_use, is_tried=all(one.is_tried for one in found))
        return await self.work(lambda: text.with_template(whole))


def _modified(directory: Path) -> tuple[int, int]:
    try:
        found = (directory / "tokenizer.json").stat()
    except OSError as exc:
        raise ModelError(f"{named(directory / 'tokenizer.json')}: cannot be read: {exc.strerror}") from exc
    return found.st_mtime_ns, found.st_size


def _vocabulary_bytes(directory: Path) -> int:
    """Bytes of the files that have tokens."""
    sizes = 0
    for name in ("tokenizer.json", "tokenizer_config.json", "added_tokens.json"):
        with suppress(OSError):
            sizes += (directory / name).stat().st_size
    return sizes
