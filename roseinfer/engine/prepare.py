"""Resolution of sampling parameters that need the tokenizer or the prompt's length, before a request is sent."""

from dataclasses import replace

from roseinfer.core.errors import InvalidRequestError
from roseinfer.core.request import Prompt, kept_prompt_tokens
from roseinfer.core.sampling import SamplingParams
from roseinfer.text.tokenizer import Tokenizer


def prepare(prompt: Prompt, tokenizer: Tokenizer, max_model_len: int) -> Prompt:
    """Apply `truncate_prompt_tokens`, and replace `bad_words` by token ids. Both fields are empty in the result.

    Raise `InvalidRequestError`. The result may be prepared again without effect.
    """
    params = prompt.params
    if params.truncate_prompt_tokens is not None:
        keep = kept_prompt_tokens(params.truncate_prompt_tokens, params.max_tokens, max_model_len)
        ids = prompt.ids if keep is None else prompt.ids[-keep:]
        prompt = replace(prompt, ids=ids, params=replace(params, truncate_prompt_tokens=None))
    if params.bad_words:
        prompt = replace(prompt, params=resolve_bad_words(prompt.params, tokenizer))
    return prompt


def resolve_bad_words(params: SamplingParams, tokenizer: Tokenizer) -> SamplingParams:
    """Move `bad_words` to `bad_token_ids`. Raise `InvalidRequestError` for a word that has no tokens."""
    found = list(params.bad_token_ids)
    for word in params.bad_words:
        try:
            spellings = tokenizer.spellings(word)
        except InvalidRequestError as error:
            raise InvalidRequestError(f"bad_words: {error.message}", "bad_words") from error
        if not spellings:
            raise InvalidRequestError("bad_words contains a word without tokens", "bad_words")
        found += spellings
    return replace(params, bad_words=(), bad_token_ids=tuple(found))
