"""Guides of requests with structured outputs, checked before any request of a call runs."""

import logging

import msgspec

from roseinfer.core.errors import InvalidRequestError
from roseinfer.core.guide import GuideSpec
from roseinfer.grammar.build import build_grammar, prove_grammar
from roseinfer.grammar.constraint import BuiltGrammar
from roseinfer.grammar.library import GrammarTokens
from roseinfer.grammar.structured_outputs import structured_constraint
from roseinfer.llm.structured_outputs import StructuredOutputsParams
from roseinfer.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

PARAM = "structured_outputs"
MAX_CACHED_COUNT = 256


class GuideMaker:
    """Maker of guides for one model, with a cache of verified grammars."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_ids: tuple[int, ...]) -> None:
        self._vocabulary = (tokenizer, vocab_size, eos_ids)
        self._tokens: GrammarTokens | None = None
        self._known: dict[bytes, GuideSpec] = {}

    def guide(self, outputs: StructuredOutputsParams) -> GuideSpec:
        """Return the guide of a constraint. Log what of it cannot be enforced.

        Raise `InvalidRequestError` for an invalid constraint.
        """
        constraint = structured_constraint(outputs.given(), PARAM)
        try:
            key = msgspec.msgpack.encode(constraint)
            known = self._known.get(key)
            if known is None:
                made = prove_grammar(build_grammar(constraint, self._markers()), self._grammar_tokens())
                known = self._remember(key, made)
        except (RecursionError, TypeError, UnicodeError) as error:
            raise InvalidRequestError(f"{PARAM}: {error}"[:300], PARAM) from error
        except InvalidRequestError as error:
            raise InvalidRequestError(f"{PARAM}: {error.message}", PARAM, error.code) from error
        return known

    def _remember(self, key: bytes, made: BuiltGrammar) -> GuideSpec:
        for name in made.warnings:
            log.warning("%s: %s is not enforced", PARAM, name)
        spec = GuideSpec(grammar=made.grammar, triggers=made.triggers, ends_after=made.ends_after, memory=made.memory)
        if len(self._known) >= MAX_CACHED_COUNT:
            del self._known[next(iter(self._known))]
        self._known[key] = spec
        return spec

    def _grammar_tokens(self) -> GrammarTokens:
        if self._tokens is None:
            self._tokens = GrammarTokens.of(*self._vocabulary)
        return self._tokens

    def _markers(self) -> dict[str, int]:
        added = self._vocabulary[0].backend.get_added_tokens_decoder()
        return {token.content: number for number, token in added.items()}
