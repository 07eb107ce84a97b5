"""Grammars over the embedded model's vocabulary, and what they accept."""

from functools import cache

from roseinfer.config.hub import load_tokenizer
from roseinfer.core.config.engine import ModelConfig
from roseinfer.grammar.build import build_grammar, prove_grammar
from roseinfer.grammar.constraint import BuiltGrammar, Constraint, JsonOptions, JsonSchema
from roseinfer.grammar.library import GrammarTokens, compile_grammar
from roseinfer.text.tokenizer import Tokenizer


@cache
def tiny_tokenizer() -> Tokenizer:
    return load_tokenizer(ModelConfig(model="tiny"))


@cache
def tiny_tokens() -> GrammarTokens:
    tokenizer = tiny_tokenizer()
    return GrammarTokens.of(tokenizer, tokenizer.vocab_size, [0])


def make(constraint: Constraint, leading_space: bool = False, markers: dict[str, int] | None = None) -> BuiltGrammar:
    return prove_grammar(build_grammar(constraint, markers or {}, leading_space), tiny_tokens())


def of_schema(schema: dict, strict: bool = True, **options: object) -> BuiltGrammar:
    return make(JsonSchema(schema=schema, strict=strict, options=JsonOptions(**options)))


def accepts(grammar: str, *parts: str | int) -> bool:
    """True if a grammar accepts texts and token ids, one after the other, as a whole."""
    matcher = compile_grammar(grammar, tiny_tokens()).matcher()
    ids = [id for part in parts for id in ([part] if isinstance(part, int) else tiny_tokens().spell(part.encode()))]
    return matcher.allows(ids) and (matcher.consume(ids) or matcher.raw.is_accepting())
