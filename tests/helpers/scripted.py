"""The real engine over a runner that says what a script has for it, where what a model says has to make sense."""

import random
from collections.abc import Callable

from roseinfer.core.clock import MonotonicClock
from roseinfer.core.plan import StepLimits
from roseinfer.core.request import Request
from roseinfer.engine.api import EngineInfo
from roseinfer.engine.core import EngineCore
from roseinfer.engine.guided.grammar_cache import GrammarGuideFactory
from roseinfer.grammar.library import GrammarTokens
from roseinfer.sched.drafting.drafting import Drafting
from roseinfer.sched.drafting.proposer import Proposal
from roseinfer.sched.registry import entry_of, make_policy, scheduler_config
from roseinfer.sched.scheduler import Scheduler
from roseinfer.text.tokenizer import Tokenizer
from tests.helpers.drafters import every_draft_of
from tests.helpers.engine_info import engine_info
from tests.helpers.fake_runner import FakeRunner, Seat
from tests.helpers.kv_managers import kv_manager

BLOCKS, BLOCK_SIZE, CONTEXT = 512, 16, 4096
# The prompt, special tokens included -> the answer.
Script = Callable[[str], str]


class ScriptedRunner(FakeRunner):
    """Runner that outputs a given answer, then `eos`. A mask that forbids the next token fails the test."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos: int, script: Script) -> None:
        super().__init__(BLOCKS, BLOCK_SIZE, vocab_size)
        self._tokenizer, self._eos, self._script = tokenizer, eos, script
        self._answers: dict[tuple[int, ...], list[int]] = {}
        self.forbidden: list[str] = []

    def answer(self, prompt: tuple[int, ...]) -> list[int]:
        """The tokens that the script has for a prompt, with `eos`."""
        if prompt not in self._answers:
            text = self._script(self._tokenizer.decode(list(prompt), skip_special_tokens=False))
            self._answers[prompt] = [*self._tokenizer.encode(text, add_special_tokens=False), self._eos]
        return self._answers[prompt]

    def _choose(self, seat: Seat, value: int, allowed: list[int] | None) -> int:
        prompt_len = seat.admission.prompt_len
        answer = self.answer(tuple(seat.tokens[:prompt_len]))
        token = answer[min(len(seat.tokens) - prompt_len, len(answer) - 1)]
        if allowed is not None and token not in allowed:
            said = self._tokenizer.decode(seat.tokens[prompt_len:], skip_special_tokens=False)
            self.forbidden.append(f"{self._tokenizer.token_str(token)!r} behind {said!r}")
            return allowed[0]
        return token


class ScriptReader:
    """Proposer that drafts the script's answer, and any token in place of every `wrong_every`-th one."""

    def __init__(self, runner: ScriptedRunner, wrong_every: int, most: int = 5) -> None:
        self._runner, self._wrong_every, self._most = runner, wrong_every, most
        self._rng = random.Random(0)

    def propose(self, request: Request, limit: int, after: tuple[int, ...] = ()) -> Proposal | None:
        answer = self._runner.answer(tuple(request.tokens[: request.prompt_len]))
        first = request.num_outputs + len(after)
        drafts = list(answer[first : first + self._rng.randint(0, min(limit, self._most))])
        for i in range(len(drafts)):
            if self._rng.randrange(self._wrong_every) == 0:
                drafts[i] = self._rng.randrange(self._runner.vocab_size)
        return Proposal("script", tuple(drafts)) if drafts else None

    def ended(self, request: Request) -> None:
        pass


def scripted_engine(
    tokenizer: Tokenizer, script: Script, wrong_every: int | None = None, drafting: Drafting | None = None
) -> tuple[EngineCore, EngineInfo, ScriptedRunner]:
    """`wrong_every`: drafts are the script's, and one in so many is wrong; None = those of `drafting`, if any."""
    eos = tokenizer.backend.token_to_id(tokenizer.special_tokens["eos_token"])
    vocab_size = tokenizer.backend.get_vocab_size()
    runner = ScriptedRunner(tokenizer, vocab_size, eos, script)
    config = scheduler_config(max_num_seqs=8, max_num_batched_tokens=1024)
    if wrong_every is not None:
        drafting = every_draft_of(ScriptReader(runner, wrong_every))
    limits = StepLimits.of(config, CONTEXT, 0 if drafting is None else config.max_num_batched_tokens)
    scheduler = Scheduler(config, kv_manager(BLOCKS, BLOCK_SIZE), make_policy(config), CONTEXT, limits, drafting)
    guides = GrammarGuideFactory(lambda: GrammarTokens.of(tokenizer, vocab_size, (eos,)), vocab_size)
    core = EngineCore(
        scheduler, runner, MonotonicClock(), depth=1, eos_ids=(eos,), vocab_size=vocab_size, guides=guides
    )
    info = engine_info(
        model="scripted",
        model_type="llama",
        max_model_len=CONTEXT,
        limits=limits,
        vocab_size=vocab_size,
        block_size=BLOCK_SIZE,
        num_blocks=BLOCKS,
        eos_token_ids=(eos,),
        policy=entry_of(config.policy_name).traits,
    )
    return core, info, runner
