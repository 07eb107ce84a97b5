"""Chat examples made from docstrings: asked for a function, answer code; asked about code, its docstring."""

import ast
import random
from collections.abc import Iterator

from training.corpus import Module, cut, first_line

MAX_ANSWER_BYTES = 2000
MIN_DOC_CHARS = 12
MAX_DOC_CHARS = 400
SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are a helpful assistant that writes Python.",
    "You write short Python functions.",
)
QUESTIONS = ("What does this function do?", "Explain this function.", "Write a docstring for this.")
WORDS_THAT_ARE_NO_VERBS = """
a an the this that these self other true false internal private special if as in on with for when whether like just same
equivalent recursively called given used default error dummy simple common base helper hook class function method
decorator wrapper factory constructor replacement convenience
"""
NOT_VERBS = frozenset(WORDS_THAT_ARE_NO_VERBS.split())

Conversation = list[dict[str, str]]
Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions(module: Module) -> Iterator[Function]:
    for node in ast.walk(module.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def summary(node: Function) -> str:
    """The docstring's first paragraph on one line, without its full stop ('' if it does not read as one)."""
    text = " ".join((ast.get_docstring(node) or "").split("\n\n")[0].split()).rstrip(".")
    fits = MIN_DOC_CHARS <= len(text) <= MAX_DOC_CHARS and " " in text
    return text if fits and text[0].isalpha() and text.isascii() else ""


def lowered(text: str) -> str:
    """'Return the' -> 'return the', but 'URL of' stays."""
    return text[0].lower() + text[1:] if text[1:2].islower() or text[1:2] == " " else text


def third_person(text: str) -> str:
    """'Return the' -> 'returns the': the first word of a docstring is nearly always a verb."""
    verb, rest = lowered(text).split(" ", 1)
    if not verb.isalpha() or verb.endswith("s"):
        return f"{verb} {rest}"
    if verb.endswith("y") and verb[-2:-1] not in "aeiou":
        return f"{verb[:-1]}ies {rest}"
    return f"{verb}{'es' if verb.endswith(('sh', 'ch', 'x', 'z', 'o')) else 's'} {rest}"


def request(rng: random.Random, name: str, text: str) -> str:
    """A user's words for a function that does what its docstring says."""
    plain = f"Implement `{name}` in Python. {text}."
    if lowered(text).split()[0].strip(":,'") in NOT_VERBS:
        return plain
    forms = (
        f"Write a Python function that {third_person(text)}.",
        f"Write a Python function that {third_person(text)}",
        f"Write a function `{name}` that {third_person(text)}.",
        f"Write a Python function to {lowered(text)}.",
        f"Write the Python function `{name}`: {lowered(text)}.",
        plain,
    )
    return rng.choice(forms)


def without_docstring(lines: list[str], node: Function) -> str:
    """The function's code with its docstring's lines left out ('' if nothing but the docstring would go)."""
    doc = node.body[0]
    if len(node.body) < 2 or doc.lineno == node.lineno:
        return ""
    kept = lines[: doc.lineno - 1] + lines[doc.end_lineno :]
    removed = (doc.end_lineno or doc.lineno) - doc.lineno + 1
    return cut(kept, first_line(node), (node.end_lineno or node.lineno) - removed)


def turns(rng: random.Random, lines: list[str], node: Function) -> Conversation:
    """One question and its answer about one function, or nothing."""
    text = summary(node)
    code = cut(lines, first_line(node), node.end_lineno or node.lineno)
    if not text or len(code.encode()) > MAX_ANSWER_BYTES:
        return []
    bare = without_docstring(lines, node)
    if bare and rng.random() < 0.25:
        question = rng.choice(QUESTIONS)
        return [
            {"role": "user", "content": f"{question}\n\n{bare}".rstrip("\n")},
            {"role": "assistant", "content": f"{text}."},
        ]
    return [
        {"role": "user", "content": request(rng, node.name, text)},
        {"role": "assistant", "content": code.rstrip("\n")},
    ]


def conversations(modules: list[Module], seed: int) -> list[Conversation]:
    """Conversations of one turn (some of two, some with a system prompt), in the order of the modules."""
    rng = random.Random(seed)
    result: list[Conversation] = []
    for module in modules:
        if module.is_test:
            continue  # their docstrings tell of issues and cases, not of what the function does
        lines = module.source.expandtabs(8).split("\n")
        pairs = [t for node in functions(module) if (t := turns(rng, lines, node))]
        while pairs:
            count = 2 if rng.random() < 0.15 else 1
            taken, pairs = pairs[:count], pairs[count:]
            system = [{"role": "system", "content": rng.choice(SYSTEM_PROMPTS)}] if rng.random() < 0.2 else []
            result.append(system + [message for pair in taken for message in pair])
    return result
