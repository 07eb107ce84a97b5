"""Tokenizer of a model with the interface that users of transformers know."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from roseinfer.core.errors import InvalidRequestError
from roseinfer.llm.prompts import as_conversations, as_tools
from roseinfer.llm.templates import Templates
from roseinfer.text.tokenizer import Tokenizer


class LLMTokenizer:
    """Tokenizer of the model: the methods of transformers' tokenizers that ordinary programs use.

    Results are lists; tensors, padding and truncation are not supported.
    """

    def __init__(self, tokenizer: Tokenizer, templates: Templates) -> None:
        self._tokenizer = tokenizer
        self._templates = templates

    # --- text and token ids ---------------------------------------------------------------------------------------
    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text, in which special tokens are recognised."""
        if not isinstance(text, str):
            raise InvalidRequestError(f"text must be text, got {type(text).__name__}", "text")
        return self._tokenizer.encode(text, add_special_tokens)

    def decode(self, token_ids: int | Iterable[int], skip_special_tokens: bool = False) -> str:
        """Return the text of token ids."""
        ids = [token_ids] if isinstance(token_ids, int) else [int(token) for token in token_ids]
        return self._tokenizer.decode(ids, skip_special_tokens)

    def batch_decode(self, sequences: Iterable[Iterable[int]], skip_special_tokens: bool = False) -> list[str]:
        return [self.decode(ids, skip_special_tokens) for ids in sequences]

    def tokenize(self, text: str, add_special_tokens: bool = False) -> list[str]:
        """Return the tokens of a text as the vocabulary writes them."""
        return self.convert_ids_to_tokens(self.encode(text, add_special_tokens))

    def __call__(self, text: str | Sequence[str], add_special_tokens: bool = True) -> dict[str, Any]:
        """Return `input_ids` and `attention_mask` of a text, or lists of them for several texts."""
        if isinstance(text, str):
            ids = self.encode(text, add_special_tokens)
            return {"input_ids": ids, "attention_mask": [1] * len(ids)}
        each = [self(one, add_special_tokens) for one in text]
        return {name: [found[name] for found in each] for name in ("input_ids", "attention_mask")}

    # --- chats ----------------------------------------------------------------------------------------------------
    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        tokenize: bool = True,
        **kwargs: Any,
    ) -> Any:
        """Return the prompt of a conversation, or a list for several: token ids, or text unless `tokenize`.

        `kwargs`: further variables of the template. Special tokens that messages contain become control tokens if the
        text is tokenised later, but not in the token ids that this returns.
        """
        template = self._templates.get(chat_template)
        options: dict[str, Any] = {"add_generation_prompt": add_generation_prompt, **kwargs}
        options["continue_final_message"] = continue_final_message
        if tools is not None:
            options["tools"] = as_tools(tools)
        conversations = as_conversations(conversation)
        make = template.encode if tokenize else template.render
        found: list[Any] = [make(messages, **options) for messages in conversations]
        several = bool(conversation) and not isinstance(conversation[0], Mapping)
        return found if several else found[0]

    @property
    def chat_template(self) -> str | None:
        return self._tokenizer.chat_template

    # --- vocabulary -----------------------------------------------------------------------------------------------
    def convert_ids_to_tokens(self, ids: int | Iterable[int]) -> Any:
        """Return the token of an id, or a list for several; "" for an id outside the vocabulary."""
        if isinstance(ids, int):
            return self._tokenizer.backend.id_to_token(ids) or ""
        return [self.convert_ids_to_tokens(int(token)) for token in ids]

    def convert_tokens_to_ids(self, tokens: str | Iterable[str]) -> Any:
        """Return the id of a token, or a list for several; None for an unknown token."""
        if isinstance(tokens, str):
            return self._tokenizer.backend.token_to_id(tokens)
        return [self.convert_tokens_to_ids(token) for token in tokens]

    def get_vocab(self) -> dict[str, int]:
        return self._tokenizer.backend.get_vocab(with_added_tokens=True)

    def __len__(self) -> int:
        return self._tokenizer.vocab_size

    @property
    def vocab_size(self) -> int:
        return self._tokenizer.vocab_size

    @property
    def all_special_ids(self) -> list[int]:
        return sorted(self._tokenizer.special_ids)

    @property
    def all_special_tokens(self) -> list[str]:
        return self.convert_ids_to_tokens(self.all_special_ids)

    @property
    def bos_token(self) -> str | None:
        return self._tokenizer.special_tokens.get("bos_token")

    @property
    def bos_token_id(self) -> int | None:
        return self._tokenizer.bos_token_id

    @property
    def eos_token(self) -> str | None:
        return self._tokenizer.special_tokens.get("eos_token")

    @property
    def eos_token_id(self) -> int | None:
        return self._tokenizer.eos_token_id

    @property
    def pad_token(self) -> str | None:
        return self._tokenizer.special_tokens.get("pad_token")

    @property
    def pad_token_id(self) -> int | None:
        return None if self.pad_token is None else self._tokenizer.backend.token_to_id(self.pad_token)
