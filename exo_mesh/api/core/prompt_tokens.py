"""Makes the prompts and tokens of requests without running a model."""

from __future__ import annotations

from aiohttp import web

from exo_mesh.api.access import CALLER
from exo_mesh.api.context import ApiContext
from exo_mesh.api.core.defaults import with_system_prompt
from exo_mesh.api.core.images import decoded_images
from exo_mesh.api.core.preparing import choose_model
from exo_mesh.api.core.prompts import conversation_prompt, prompt_options
from exo_mesh.api.core.request import Conversation, FieldNames
from exo_mesh.api.model_names import find_model, model_of_request
from exo_mesh.errors import InputError
from exo_mesh.text.control_text import ChatPrompt
from exo_mesh.text.tokenizer import TextModel

MAX_TOKENS = 1 << 17
"""Most tokens of one text, or the model's context if that is longer. The tokenizer needs about 400 bytes for each."""


class PromptTokens:
    """Prompts and tokens as a chat on this node would have them."""

    def __init__(self, context: ApiContext) -> None:
        self._context = context
        self._models = context.services.models
        self._texts = context.texts

    async def model(self, request: web.Request, name: str | None) -> tuple[str, TextModel]:
        """(name, text model) of the model that a body names, or else of the model that a chat would use. Raises
        InputError for a model of a model server."""
        name = await model_of_request(request, self._models, name, self._context.options.defaults().model)
        chosen = choose_model(name, self._models.all())
        entry = await find_model(self._models, chosen, may_download=request[CALLER].may_download)
        if entry.served is not None:
            raise InputError(f"the tokenizer of {entry.name} is in its model server, not in the mesh", param="model")
        return entry.name, await self._texts.of(self._models, entry)

    async def prompt(self, conversation: Conversation, text: TextModel, names: FieldNames) -> ChatPrompt:
        """The prompt of a conversation, with a mark for every token of an image."""
        defaults = self._context.options.defaults()
        conversation = with_system_prompt(conversation, defaults.system_prompt)
        options = prompt_options(defaults)
        images = await decoded_images(conversation, text.name, text, self._texts)
        prompt = await conversation_prompt(conversation, text, self._texts, names, options)
        return prompt if images is None else images.written_out(prompt, text)

    async def encode(
        self, text: TextModel, source: str | ChatPrompt, limit: int, param: str, *, with_special: bool = False
    ) -> list[int]:
        """The tokens of a text. limit: the model's context. param: the field of the text, for errors. with_special:
        adds special tokens around it."""

        def encode() -> list[int]:
            if isinstance(source, ChatPrompt):
                text.check_length(source.text, max(limit, MAX_TOKENS), param)
                return text.encode_text(source.text) if with_special else text.encode_chat(source)
            text.check_length(source, max(limit, MAX_TOKENS), param)
            return text.encode_text(source) if with_special else text.encode_prompt(source)

        return await self._texts.work(encode)
