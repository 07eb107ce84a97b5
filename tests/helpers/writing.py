"""A vocabulary whose tokens can be read, the guides over it, and an output written by hand under one."""

from array import array
from collections.abc import Iterable
from concurrent.futures import Future
from functools import cache

from roseinfer.core.guide import Framing, GuideSpec
from roseinfer.core.plan import TokenMasks
from roseinfer.engine.guided.constraints import grammars_of, make_guide
from roseinfer.engine.guided.grammar_cache import GrammarGuideFactory
from roseinfer.engine.guided.vocabulary import Vocabulary
from roseinfer.grammar.library import Grammar, GrammarTokens, compile_grammar
from roseinfer.text.tokenizer import Tokenizer
from tests.helpers.tokenizers import EOS_ID, byte_tokenizer

# Behind the bytes and the end: tokens that mark something, and one of ordinary text.
THINK, THOUGHT, CALL, PAIR = 257, 258, 259, 260
VOCAB = 300  # more than the tokenizer has, as models have


def marked_tokenizer() -> Tokenizer:
    """Ids 0-255 are bytes, then <eos>, <think>, </think>, <call>, and `>{`, which no encoding gives."""
    tokenizer = byte_tokenizer()
    tokenizer.backend.add_special_tokens(["<think>", "</think>", "<call>"])
    tokenizer.backend.add_tokens([">{"])
    return Tokenizer(tokenizer.backend, tokenizer.config, None)


TOKENIZER = marked_tokenizer()
TOKENS = GrammarTokens.of(TOKENIZER, VOCAB, (EOS_ID,))


def framing(begun: str | None = "a", must_answer: bool = False, budget: int | None = None) -> Framing:
    """Messages `<think>a#CHANNEL<call>CONTENT</think>`: channels t (reasoning), o (other), f (answer), c with `{..}`.

    `begun`: the header that the prompt leaves open.
    """
    opening = (THINK, *b"a")
    free = ("f",) if must_answer else ("f", "o")
    headers = []
    for channels in (("t", *free), free):
        choices = " | ".join(f'"#{name}" <[{CALL}]>' for name in channels)
        call = f'"#c" <[{CALL}]> "{{" /[a-z]{{1,3}}/ "}}"'
        headers.append(f'start: <[{THINK}]> "a" ({choices} | {call})')
    return Framing(
        begun=() if begun is None else (THINK, *begun.encode()),
        opening=opening,
        channel=ord("#"),
        content=CALL,
        end=THOUGHT,
        stops=(EOS_ID,),
        thinking="t",
        answer="f",
        headers=tuple(headers[: 1 if budget is None else 2]),
        must_answer=must_answer,
        budget=budget,
        last_words=(*b"so", THOUGHT),
    )


@cache
def _compiled(text: str) -> Grammar:
    return compile_grammar(text, TOKENS)


def grammar_guides() -> GrammarGuideFactory:
    return GrammarGuideFactory(lambda: TOKENS, VOCAB)


def text_of(token_ids: Iterable[int]) -> str:
    """Return an output's text without its end."""
    return b"".join(TOKENIZER.token_bytes(token) for token in token_ids if token != EOS_ID).decode("utf-8", "replace")


class Writing:
    """An output under a guide, token by token, as the engine core would drive it."""

    def __init__(self, **spec: object) -> None:
        future: Future[GrammarTokens] = Future()
        future.set_result(TOKENS)
        self.spec = GuideSpec(**spec)
        grammars = [_compiled(text) for text in grammars_of(self.spec)]
        self.guide = make_guide(self.spec, grammars, Vocabulary(VOCAB, future))
        self.ended = False

    def allowed(self) -> set[int] | None:
        """The tokens that may come next, None if every one may."""
        mask = self.guide.mask()
        if mask is None:
            return None
        words = mask
        if not isinstance(mask, memoryview):
            words = memoryview(array("I", bytes(4 * TokenMasks.words_per_row(VOCAB))))
            mask.fill(words)
            if mask.halted or self.guide.edits_mask:
                self.ended = self.guide.finish_mask(words)
        return {token for token in range(VOCAB) if words[token // 32] >> token % 32 & 1}

    def say(self, text: str | Iterable[int]) -> "Writing":
        """Each token must be allowed."""
        for token in text.encode() if isinstance(text, str) else text:
            allowed = self.allowed()
            assert allowed is None or token in allowed, (chr(token), allowed)
            assert not self.ended, "the output was complete"
            self.ended = self.guide.advance((token,))
        return self
