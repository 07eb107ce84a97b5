"""What is left to do to a request before the engine takes it: what needs the tokenizer, or the length of the prompt."""

from dataclasses import dataclass, replace

from roseinfer.core.errors import InvalidRequestError
from roseinfer.core.request import kept_prompt_tokens
from roseinfer.core.sampling import SamplingParams
from roseinfer.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Prepared:
    prompt_ids: list[int]
    params: SamplingParams


def prepare(prompt_ids: list[int], params: SamplingParams, tokenizer: Tokenizer, max_model_len: int) -> Prepared:
    """The prompt as far as `truncate_prompt_tokens` keeps it, and `bad_words` as token ids; both fields are then empty.

    Raises `InvalidRequestError`. Doing it twice changes nothing, so the server may do it where it does not block.
    """
    if params.truncate_prompt_tokens is not None:
        keep = kept_prompt_tokens(params.truncate_prompt_tokens, params.max_tokens, max_model_len)
        prompt_ids = prompt_ids if keep is None else prompt_ids[-keep:]
        params = replace(params, truncate_prompt_tokens=None)
    return Prepared(prompt_ids, spell_out(params, tokenizer) if params.bad_words else params)


def spell_out(params: SamplingParams, tokenizer: Tokenizer) -> SamplingParams:
    """`bad_words` as `bad_token_ids`. Raises `InvalidRequestError` for a word that the tokenizer cannot write."""
    found = list(params.bad_token_ids)
    for word in params.bad_words:
        try:
            spellings = tokenizer.spellings(word)
        except InvalidRequestError as error:
            raise InvalidRequestError(f"bad_words: {error.message}", "bad_words") from error
        if not spellings:
            raise InvalidRequestError("bad_words holds a word that has no tokens", "bad_words")
        found += spellings
    return replace(params, bad_words=(), bad_token_ids=tuple(found))
