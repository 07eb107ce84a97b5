"""Text, embeddings and scores in this process, without a server: `LLM("tiny").generate("def fibonacci(")`."""

import itertools
import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

from roseinfer.core.errors import ConfigError, InvalidRequestError
from roseinfer.core.observer import StepObserver
from roseinfer.core.request import Prompt, RequestMeta, kept_prompt_tokens
from roseinfer.core.slo import Slo
from roseinfer.core.support import system_error
from roseinfer.engine.api import GenerateRequest, SequenceChunk
from roseinfer.engine.live import fit_context
from roseinfer.engine.local import LocalEngine, naming_prompt
from roseinfer.engine.options import make_engine_config
from roseinfer.llm.answers import AnswerBuilder
from roseinfer.llm.guides import GuideMaker
from roseinfer.llm.lora import LocalAdapters, LoraRequests
from roseinfer.llm.options import engine_options
from roseinfer.llm.outputs import EmbeddingOutput, RequestOutput, ScoreOutput
from roseinfer.llm.pooling import VectorCalls
from roseinfer.llm.progress import MakeBar, progress_bar
from roseinfer.llm.prompts import (
    Conversation,
    PromptInput,
    PromptType,
    as_batch,
    as_conversations,
    as_keywords,
    as_tools,
    kind_of,
    read_prompt,
)
from roseinfer.llm.sampling_params import SamplingParams
from roseinfer.llm.templates import Templates
from roseinfer.llm.tokenizer import LLMTokenizer

log = logging.getLogger(__name__)

Value = TypeVar("Value")
# Methods of vLLM's LLM that have no counterpart.
_UNSUPPORTED = (
    "apply_model",
    "beam_search",
    "classify",
    "collective_rpc",
    "encode",
    "reward",
    "sleep",
)


class LLM:
    """Model with an engine in this process. Not usable in a fork of it. Not thread safe; one call at a time.

    It frees its memory when it is closed or garbage collected, and is a context manager that closes it.

    Args:
        model: `tiny` (embedded), a folder, a GGUF file, or a Hugging Face id.
        observer: called for every step of the engine.
        chat_template: source or file of a template that replaces the model's own.
        options: options of the engine, as `roseinfer serve --help=all` lists them, with underscores: `dtype`,
            `max_model_len`, `gpu_memory_utilization`, `tensor_parallel_size`, `quantization`, `seed`, ... Arguments of
            vLLM's `LLM` have vLLM's meaning. Those without effect are logged, and unsupported ones are rejected.

    Raise `ConfigError` for an invalid or unsupported option, and `ModelNotFoundError` or `UnsupportedModelError` for a
    model that cannot be loaded.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] = "tiny",
        *,
        observer: StepObserver | None = None,
        chat_template: str | Path | None = None,
        **options: Any,
    ) -> None:
        error = system_error(sys.platform)
        if error is not None:
            raise ConfigError(error)
        if not isinstance(model, str | os.PathLike):
            raise ConfigError(f"model must be text or a path, got {kind_of(model)}")
        known, notes = engine_options(options)
        if notes:
            log.warning("%s", "; ".join(notes))
        self.engine = LocalEngine(make_engine_config(model=os.fspath(model), **known), observer)
        self._templates = Templates(self.engine.tokenizer, chat_template)
        facts = self.engine.info.facts
        self._guides = GuideMaker(self.engine.tokenizer, facts.vocab_size, facts.eos_token_ids)
        self._numbers = itertools.count()
        self._vectors = VectorCalls(self.engine, self._numbers)
        self._adapters = LocalAdapters(self.engine)

    def generate(
        self,
        prompts: PromptType | Sequence[PromptType],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | MakeBar = True,
        lora_request: LoraRequests = None,
        priority: int | Sequence[int] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        slo: Slo | Sequence[Slo | None] | None = None,
    ) -> list[RequestOutput]:
        """Complete one prompt or many in a batch. Return results in the order of the prompts.

        Args:
            prompts: one prompt or a list. A prompt is text, a list of token ids, or a dictionary with `prompt` or
                `prompt_token_ids`, and perhaps `cache_salt`.
            sampling_params: for all prompts, or one for each; default: `get_default_sampling_params()`.
            use_tqdm: show a progress bar, if standard error is a terminal; or a function that makes the bar.
            lora_request: LoRA adapter of all prompts, or one for each, None = the model itself.
            priority: for all prompts, or one for each; lower runs sooner. Only with policies that use priorities.
            tokenization_kwargs: `add_special_tokens` only.
            slo: objectives of all requests, or of each, counted from now. The scheduler may reject a request that
                cannot meet them.

        Raise `InvalidRequestError` for an invalid prompt or parameter, before any of them runs. The message names the
        number of the prompt.
        """
        special = _special_tokens_wanted(tokenization_kwargs)
        inputs = as_batch(prompts)
        answers = self._answers(
            inputs,
            lambda given, keep: self._tokenised(read_prompt(given), special, keep),
            sampling_params,
            priority,
            slo,
            lora_request,
        )
        return self._run(answers, use_tqdm)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | MakeBar = True,
        lora_request: LoraRequests = None,
        chat_template: str | None = None,
        chat_template_content_format: str = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        *,
        priority: int | Sequence[int] | None = None,
        slo: Slo | Sequence[Slo | None] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or several through the model's chat template. Return a list in either case.

        Args:
            messages: a list of dictionaries with `role` and `content`, or a list of such lists.
            sampling_params: as in `generate`.
            use_tqdm: as in `generate`.
            lora_request: as in `generate`.
            chat_template: source or file of another template.
            chat_template_content_format: `auto` or `string`: templates receive the text of a message.
            add_generation_prompt: end the prompt with the opening of an assistant's turn.
            continue_final_message: leave the last message open, so that the model continues it.
            tools: tools that the template describes to the model. Calls are part of the output's text.
            chat_template_kwargs: further variables of the template.
            priority: as in `generate`.
            slo: as in `generate`.

        Raise the errors of `generate`, and `InvalidRequestError` if the template rejects the messages.
        """
        if chat_template_content_format not in ("auto", "string"):
            message = f"chat_template_content_format {chat_template_content_format!r} is not supported (expected auto)"
            raise InvalidRequestError(message, "chat_template_content_format")
        conversations = as_conversations(messages)
        template = self._templates.get(chat_template)
        variables = as_keywords(chat_template_kwargs, "chat_template_kwargs")
        options: dict[str, Any] = {
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            **variables,
        }
        if tools is not None:
            options["tools"] = as_tools(tools)

        def tokenised(given: Any, keep: int | None) -> PromptInput:
            ids = template.encode(given, keep_last=keep, **options)
            opening = template.generation_prompt_len(ids, variables) if add_generation_prompt else 0
            return PromptInput(template.render(given, **options), ids, generation_prompt_len=opening)

        return self._run(
            self._answers(conversations, tokenised, sampling_params, priority, slo, lora_request), use_tqdm
        )

    def stream(
        self, prompt: PromptType, sampling_params: SamplingParams | None = None, *, slo: Slo | None = None
    ) -> Iterator[SequenceChunk]:
        """Yield the output of one prompt as it is generated. Leaving the loop early aborts the request.

        Arguments are those of `generate`. The first step of the loop raises its errors.
        """
        (answer,) = self._answers(
            [prompt], lambda given, keep: self._tokenised(read_prompt(given), True, keep), sampling_params, None, slo
        )
        with closing(self.engine.run([answer.request])) as steps:
            for chunks in steps:
                for _, chunk in chunks:
                    yield chunk

    def embed(
        self,
        prompts: PromptType | Sequence[PromptType],
        *,
        dimensions: int | None = None,
        prompt_name: str | None = None,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool | MakeBar = True,
        lora_request: object = None,
    ) -> list[EmbeddingOutput]:
        """Return the embedding of one input or of each of many, in their order. Needs an embedding model.

        Args:
            prompts: one input or a list, in the forms that `generate` takes.
            dimensions: leading numbers to keep of each embedding, which are then normalised again; None = all. Only
                for models that were trained for it.
            prompt_name: name of the model's prompt to put before each text, such as `query`; None = its default.
            truncate_prompt_tokens: tokens to keep of longer inputs, -1 = as many as the context; None = a longer
                input is an error. The end of a text is cut; what the tokenizer adds stays.
            use_tqdm: as in `generate`.
            lora_request: not supported.

        Raise `InvalidRequestError` for an invalid input, before any of them runs, and for a model with another task.
        Raise `RequestFailedError` naming the first input that failed.
        """
        _refuse_lora(lora_request)
        return self._vectors.embed(prompts, dimensions, prompt_name, truncate_prompt_tokens, use_tqdm)

    def score(
        self,
        query: str | Sequence[str],
        documents: str | Sequence[str],
        *,
        instruction: str | None = None,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool | MakeBar = True,
        lora_request: object = None,
    ) -> list[ScoreOutput]:
        """Return how well each document answers its query, in the order of the documents.

        Args:
            query: one text for all documents, or one for each.
            documents: one text or a list.
            instruction: task in words, for models that take one (Qwen3-Reranker); None = web search.
            truncate_prompt_tokens: tokens to keep of longer pairs, -1 = as many as the context; None = a longer pair
                is an error. The end of the document is cut.
            use_tqdm: as in `generate`.
            lora_request: not supported.

        A reranker scores both texts together. With an embedding model, the score is the cosine of their embeddings.

        Raise the errors of `embed`.
        """
        _refuse_lora(lora_request)
        return self._vectors.score(query, documents, instruction, truncate_prompt_tokens, use_tqdm)

    def get_tokenizer(self) -> LLMTokenizer:
        """Return the model's tokenizer, with the interface of transformers' tokenizers."""
        return LLMTokenizer(self.engine.tokenizer, self._templates)

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the parameters that apply if a call gives none: the model's own and, beyond these, the defaults."""
        defaults: dict[str, Any] = dict(self.engine.info.facts.default_sampling)
        return SamplingParams(**defaults)

    def close(self) -> None:
        """Stop the engine and free its memory. Later calls raise `EngineClosedError`."""
        self.engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    if not TYPE_CHECKING:  # a type checker knows that other attributes do not exist

        def __getattr__(self, name: str) -> Any:
            hint = " is not supported; see docs/reference/python.md" if name in _UNSUPPORTED else " does not exist"
            raise AttributeError(f"LLM.{name}{hint}", name=name, obj=self)

    # --- internals ------------------------------------------------------------------------------------------------
    def _answers(
        self,
        inputs: Sequence[Any],
        tokenised: Callable[[Any, int | None], PromptInput],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        priority: int | Sequence[int] | None,
        slo: Slo | Sequence[Slo | None] | None,
        lora_request: LoraRequests = None,
    ) -> list[AnswerBuilder]:
        """Make the requests of a call. `tokenised`: makes a prompt, of its last tokens only if a number is given."""
        if (pooling := self.engine.info.facts.pooling) is not None:
            raise InvalidRequestError(f"the model does not generate text: call {pooling.task}", "model")
        count = len(inputs)
        default = self.get_default_sampling_params() if sampling_params is None else None
        all_params = _each(default or sampling_params, SamplingParams, count, "sampling_params")
        priorities = _each(priority or 0, int, count, "priority")
        slos = _each(slo, Slo, count, "slo", optional=True)
        adapters = self._adapters.of(lora_request, count)
        if any(priorities) and not self.engine.info.policy.priorities:
            message = f"priority is not supported by the scheduling policy {self.engine.info.policy.name}"
            raise InvalidRequestError(message, "priority", "unsupported_field")
        answers = []
        for number, (given, params) in enumerate(zip(inputs, all_params, strict=True)):
            with naming_prompt(number, count):
                meta = RequestMeta(slo=slos[number], priority=priorities[number], adapter=adapters[number])
                answers.append(self._answer(given, tokenised, params, meta))
        return answers

    def _answer(
        self,
        given: Any,
        tokenised: Callable[[Any, int | None], PromptInput],
        params: SamplingParams,
        meta: RequestMeta,
    ) -> AnswerBuilder:
        context = self.engine.info.facts.max_model_len
        fields = params.for_sequence(max_tokens=context)
        # "The rest of the context" is at least one token of output.
        wanted = 1 if params.max_tokens is None else fields.max_tokens
        prompt = tokenised(given, kept_prompt_tokens(fields.truncate_prompt_tokens, wanted, context))
        assert prompt.ids is not None
        guide = None if params.structured_outputs is None else self._guides.guide(params.structured_outputs)
        meta = replace(meta, cache_salt=prompt.cache_salt)
        fitted = fit_context(fields, len(prompt.ids), context)
        request = GenerateRequest(
            request_id=str(next(self._numbers)),
            prompt=Prompt(prompt.ids, fitted, meta, guide, generation_prompt_len=prompt.generation_prompt_len),
            n=params.n,
        )
        return AnswerBuilder(request, prompt.text, self.engine.tokenizer, params.detokenize)

    def _tokenised(self, prompt: PromptInput, add_special_tokens: bool, keep: int | None) -> PromptInput:
        ids = prompt.ids
        if ids is None:
            assert prompt.text is not None
            ids = self.engine.tokenizer.encode(prompt.text, add_special_tokens, keep)
        elif keep is not None:
            ids = ids[-keep:]
        return PromptInput(prompt.text, ids, prompt.cache_salt)

    def _run(self, answers: list[AnswerBuilder], use_tqdm: bool | MakeBar) -> list[RequestOutput]:
        requests = [answer.request for answer in answers]
        with progress_bar(use_tqdm, len(answers)) as ended, closing(self.engine.run(requests)) as steps:
            for chunks in steps:
                for number, chunk in chunks:
                    answer = answers[number]
                    answer.take(chunk)
                    if answer.open == 0:
                        ended(len(answer.request.prompt.ids), answer.output_tokens)
        return [answer.output() for answer in answers]


def _each(given: Any, kind: type[Value], count: int, name: str, optional: bool = False) -> list[Any]:
    """Return one value for each of `count` prompts. Raise `InvalidRequestError` for other types or another number."""
    if isinstance(given, kind) or (optional and given is None):
        return [given] * count
    expected = f"{name} must be {kind.__name__}, or a list with one for each prompt"
    if isinstance(given, str | bytes | Mapping) or not isinstance(given, Iterable):
        raise InvalidRequestError(f"{expected}; got {kind_of(given)}", name)
    values = list(given)
    wrong = [value for value in values if not isinstance(value, kind) and not (optional and value is None)]
    if wrong:
        raise InvalidRequestError(f"{expected}; got a list with {kind_of(wrong[0])}", name)
    if len(values) != count:
        raise InvalidRequestError(f"{name} has {len(values)} entries for {count} prompts", name)
    return values


def _refuse_lora(lora_request: object) -> None:
    if lora_request:
        raise InvalidRequestError("lora_request is not supported for embeddings and scores", "lora_request")


def _special_tokens_wanted(kwargs: Mapping[str, Any] | None) -> bool:
    given = as_keywords(kwargs, "tokenization_kwargs")
    wanted = given.pop("add_special_tokens", True)
    if given:
        message = f"tokenization_kwargs: {min(given)} is not supported (expected add_special_tokens)"
        raise InvalidRequestError(message, "tokenization_kwargs")
    return bool(wanted)
