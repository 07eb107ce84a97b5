"""Check of a chat template in a process that can be ended: `python -m roseinfer.text.template_check`.

Jinja evaluates constants while it compiles, so `{{ 'a' * 10**10 }}` takes time and memory before rendering. The process
reads special tokens and source as JSON, and writes the template's error, or nothing.
"""

import contextlib
import json
import signal
import sys
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

from roseinfer.core.errors import ConfigError, InvalidRequestError
from roseinfer.processes.launch import run_python
from roseinfer.text.chat import RENDER_ERRORS, ChatTemplate, CompiledTemplate
from roseinfer.text.tokenizer import Tokenizer

MAX_CPU_S = 3.0
MAX_WALL_S = 30.0  # for machines without a free processor
MAX_MEMORY_BYTES = 2**28
TOO_SLOW = f"chat_template: takes more than {MAX_CPU_S:g} s to compile and to render a first message"
TOO_LARGE = f"chat_template: takes more than {MAX_MEMORY_BYTES >> 20} MiB to compile and to render a first message"


def compiled(source: str, special_tokens: dict[str, str]) -> CompiledTemplate:
    """Compile the template and render it once within the limits; beyond them the system ends this process.

    Raise `ConfigError`.
    """
    with limited(MAX_CPU_S, MAX_MEMORY_BYTES):
        try:
            template = CompiledTemplate(source, special_tokens)
            first = {"messages": [{"role": "user", "content": "Hello"}], "add_generation_prompt": True}
            # A template may refuse any messages, also these; requests find that out.
            with contextlib.suppress(*RENDER_ERRORS, InvalidRequestError):
                template.render({"tools": None, "documents": None, **special_tokens, **first})
        except MemoryError:
            raise ConfigError(TOO_LARGE) from None
    return template


def trusted_template(tokenizer: Tokenizer) -> ChatTemplate | None:
    """Return a template for this process after checking it in another one; None without one. Raise `ConfigError`."""
    return None if tokenizer.chat_template is None else checked_template(tokenizer.chat_template, tokenizer)


def checked_template(source: str, tokenizer: Tokenizer) -> ChatTemplate:
    """Return the template of `source` for this process after checking it in another one. Raise `ConfigError`."""
    _try(source, json.dumps(tokenizer.special_tokens))
    return ChatTemplate(source, tokenizer)


@lru_cache(maxsize=8)
def _try(source: str, special_tokens: str) -> None:
    asked = json.dumps([json.loads(special_tokens), source])
    try:
        done = run_python(["-m", "roseinfer.text.template_check"], MAX_WALL_S, asked)
    except TimeoutError:
        raise ConfigError(TOO_SLOW) from None
    if done.returncode or done.stdout:
        raise ConfigError(done.stdout.strip() or ended_by(-done.returncode))


def ended_by(number: int) -> str:
    """Return why the process that checked a template ended. `number`: of the signal."""
    if number == signal.SIGPROF:
        return TOO_SLOW
    return TOO_LARGE if number == signal.SIGKILL else f"chat_template: checking it ended the process (signal {number})"


@contextlib.contextmanager
def limited(cpu_s: float, more_bytes: int) -> Iterator[None]:
    """Limit CPU time and memory of this context. Beyond them the system ends the process or refuses memory."""
    limit_memory(more_bytes)
    signal.setitimer(signal.ITIMER_PROF, cpu_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        limit_memory(None)


def limit_memory(more_bytes: int | None) -> None:
    """Limit the memory that this process may allocate beyond what it has; None restores the first limit."""
    with contextlib.suppress(ImportError, OSError, ValueError):  # not every system has this limit, or reports the size
        import resource

        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        soft = hard
        if more_bytes is not None:
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            soft = pages * resource.getpagesize() + more_bytes
            soft = soft if hard == resource.RLIM_INFINITY else min(soft, hard)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def main() -> None:
    special_tokens, source = json.load(sys.stdin)
    try:
        compiled(source, special_tokens)
    except ConfigError as error:
        print(error)


if __name__ == "__main__":
    main()
