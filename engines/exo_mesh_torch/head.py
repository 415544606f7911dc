"""A language model from the text layers of a vision model: transformers has no class for the two without the tower."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import nn
from transformers.modeling_outputs import CausalLMOutputWithPast

from exo_mesh_torch.calls import cache_argument


@cache
def with_head(tower: Any) -> Any:
    """A model class with `model` (of the class `tower`) and `lm_head`, for tower's own config."""

    class TextWithHead(tower.__bases__[0]):  # type: ignore[misc]
        _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012 - as in transformers
        base_model_prefix = "model"

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.model = tower(config)
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
            self.post_init()

        def get_input_embeddings(self) -> Any:
            return self.model.embed_tokens

        def get_output_embeddings(self) -> Any:
            return self.lm_head

        def forward(
            self,
            input_ids: torch.Tensor,
            position_ids: torch.Tensor | None = None,
            attention_mask: torch.Tensor | None = None,
            cache: Any = None,
            use_cache: bool | None = None,
            **others: Any,
        ) -> Any:
            found = self.model(
                input_ids=input_ids,
                position_ids=position_ids,
                attention_mask=attention_mask,
                use_cache=use_cache,
                **{cache_argument(self.model): cache},
                **others,
            )
            return CausalLMOutputWithPast(logits=self.lm_head(found.last_hidden_state))

    return TextWithHead
