"""Arguments of calls of `LLM`, and the sentences that wrong ones get."""

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy
import pytest

from roseinfer import LLM, LoRARequest, RequestOutput, SamplingParams, Slo, StructuredOutputsParams
from roseinfer.core.errors import InvalidRequestError

SHORT = SamplingParams(max_tokens=2, temperature=0.0)
CHAT = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("tiny", num_kv_blocks=256, max_num_seqs=8, threads=1, scheduling_policy="fifo") as made:
        yield made


# --- sampling parameters ------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"n": 0}, "n must be a positive integer, got 0"),
        ({"n": True}, "n must be a positive integer"),
        ({"n": 10**9}, "n must be at most 16384, got 1000000000"),
        ({"temperature": -1.0}, r"temperature must be within \[0.0, 2.0\], got -1.0"),
        ({"temperature": "hot"}, "temperature must be a finite number"),
        ({"top_p": 0.0}, "top_p must be above 0"),
        ({"top_k": -2}, "top_k must be at least -1, got -2"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens must be -1 or at least 1, got 0"),
        ({"max_tokens": -1}, "max_tokens must be at least 0, got -1"),
        ({"max_tokens": "many"}, "max_tokens must be an integer"),
        ({"stop": [""]}, "stop must not hold an empty string"),
        ({"stop": 5}, "stop must be a text or a list of texts, got int"),
        ({"stop_token_ids": 5}, "stop_token_ids must be a list, got int"),
        ({"bad_token_ids": [5]}, "bad_token_ids must be a list, got int"),
        ({"bad_words": "word"}, "bad_words must be a list, got str"),
        ({"logit_bias": [1]}, "logit_bias must be a dictionary"),
        ({"ignore_eos": 1}, "ignore_eos must be True or False, got 1"),
        ({"structured_outputs": {"choice": ["a"]}}, "structured_outputs must be StructuredOutputsParams, got dict"),
        ({"detokenize": False, "stop": "x"}, "stop needs detokenize"),
        ({"best_of": 4}, "best_of is not supported: use n; see docs/reference/python.md"),
        ({"guided_decoding": object()}, "guided_decoding is not supported: use structured_outputs"),
        ({"logits_processors": [print]}, "logits_processors is not supported: use logit_bias or allowed_token_ids"),
    ],
)
def test_wrong_sampling_parameters(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message) as caught:
        SamplingParams(**fields)
    assert isinstance(caught.value, ValueError) and caught.value.param in fields


def test_fields_that_ask_for_nothing_special_are_accepted() -> None:
    params = SamplingParams(n=2, best_of=2, top_k=-1, stop=None, logit_bias={}, output_kind=2, flat_logprobs=True)
    assert params.for_sequence(max_tokens=8).top_k == 0


def test_fields_set_later_are_checked_when_they_are_used(llm: LLM) -> None:
    params = llm.get_default_sampling_params()
    params.temperature = 5.0
    with pytest.raises(InvalidRequestError, match="temperature must be within"):
        llm.generate("x", params)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"choice": "yes"}, "choice must be a list of texts, got str"),
        ({"choice": 5}, "choice must be a list of texts, got int"),
        ({"json": 5}, "json must be a dictionary or text, got int"),
        ({"regex": ["a"]}, "regex must be text, got list"),
    ],
)
def test_wrong_fields_of_structured_outputs(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=rf"structured_outputs\.{message}"):
        StructuredOutputsParams(**fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "takes exactly one of json, .*; got none"),
        ({"regex": "a", "choice": ["b"]}, "got regex, choice"),
        ({"regex": "a", "disable_any_whitespace": True}, "disable_any_whitespace is for JSON only"),
        ({"json": "{"}, "json is invalid JSON"),
        ({"regex": "("}, "structured_outputs: "),
        ({"json": {"type": "nothing"}}, "structured_outputs: "),
        ({"choice": []}, "structured_outputs: "),
        ({"choice": ["\ud800"]}, "structured_outputs: .*surrogates"),
    ],
)
def test_constraints_that_cannot_be_met_are_refused_before_anything_runs(
    llm: LLM, fields: dict[str, Any], message: str
) -> None:
    wrong = SamplingParams(max_tokens=4, structured_outputs=StructuredOutputsParams(**fields))
    with pytest.raises(InvalidRequestError, match=message) as caught:
        llm.generate(["fine", "x"], [SHORT, wrong])
    assert caught.value.param == "structured_outputs" and str(caught.value).startswith("prompts[1]: ")
    assert not llm.engine.core.busy


# --- prompts ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        (5, "prompts must be text, a list of token ids, .*; got int"),
        (None, "prompts must be text.*; got None"),
        (b"x", "prompts must be text.*; got bytes"),
        ([[]], "the prompt is empty"),
        (["fine", 5], r"prompts\[1\]: a prompt must be text.*; got int"),
        (["fine", None], r"prompts\[1\]: a prompt must be text.*; got None"),
        (["fine", ["a"]], r"prompts\[1\]: a prompt must be text.*; got a list with str"),
        (["fine", [1, 2.5]], r"prompts\[1\]: a prompt must be text.*; got a list with float"),
        (["fine", {}], r"prompts\[1\]: a prompt must be text.*; got a dictionary without both keys"),
        ({"prompt": 5}, "prompt must be text, got int"),
        ({"prompt_token_ids": "abc"}, "prompt_token_ids must be a list of integers; got str"),
        ({"prompt_token_ids": [1, "a"]}, "prompt_token_ids must be a list of integers; got a list with str"),
        ({"text": "x"}, "unknown key 'text' in a prompt; known: prompt, prompt_token_ids, cache_salt"),
        ({"prompt": "x", "multi_modal_data": {"image": 1}}, "multi_modal_data is not supported"),
    ],
)
def test_wrong_prompts(llm: LLM, prompts: Any, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        llm.generate(prompts, SHORT)
    assert not llm.engine.core.busy


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sampling_params": {"temperature": 0}}, "sampling_params must be SamplingParams, or a list .*; got dict"),
        ({"sampling_params": [SHORT, "x"]}, "sampling_params must be .*; got a list with str"),
        ({"sampling_params": [SHORT, None]}, "sampling_params must be .*; got a list with None"),
        ({"sampling_params": [SHORT]}, "sampling_params has 1 entries for 2 prompts"),
        ({"slo": [Slo(ttft_s=1.0)]}, "slo has 1 entries for 2 prompts"),
        ({"lora_request": object()}, "lora_request must be LoRARequest, or a list of them; got object"),
        ({"lora_request": [None]}, "lora_request has 1 entries for 2 prompts"),
        ({"lora_request": LoRARequest("x")}, "the LLM takes no LoRA adapters"),
        ({"lora_request": LoRARequest("x", 1, "y")}, "the LLM takes no LoRA adapters: create it with enable_lora=True"),
        ({"priority": [0, 1]}, "priority is not supported by the scheduling policy fifo"),
        ({"tokenization_kwargs": {"truncation": True}}, "tokenization_kwargs: truncation is not supported"),
        ({"tokenization_kwargs": "fast"}, "tokenization_kwargs must be a dictionary with texts as keys, got str"),
    ],
)
def test_wrong_arguments(llm: LLM, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        llm.generate(["a", "b"], **{"sampling_params": SHORT} | arguments)


def test_prompts_of_other_sequences_of_integers(llm: LLM) -> None:
    ids = llm.get_tokenizer().encode("import os")
    for prompts in (tuple(ids), numpy.array(ids), [numpy.array(ids)], iter(["import os"])):
        assert llm.generate(prompts, SHORT)[0].prompt_token_ids == ids
    assert llm.generate([], SHORT) == []
    plain = llm.generate("import os", SHORT, tokenization_kwargs={"add_special_tokens": False})
    assert plain[0].prompt_token_ids == ids[1:]


def test_prompts_with_different_salts_share_no_cached_prefix(llm: LLM) -> None:
    text = "salted = 1\n" * 12
    cached = [
        llm.generate({"prompt": text, "cache_salt": salt}, SHORT)[0].num_cached_tokens for salt in ("a", "a", "b")
    ]
    assert cached[0] == cached[2] == 0 < cached[1]


# --- chats --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ("hello", "messages must be a list of dictionaries .*; got str"),
        ({"role": "user", "content": "x"}, "messages must be a list .*; got dict"),
        (["hello"], "messages must be a list .*; got a list with str"),
        ([], "a conversation must have at least one message"),
        ([CHAT, []], "a conversation must have at least one message"),
        ([CHAT, ["hello"]], r"prompts\[1\]: messages\[0\] must be an object"),
        ([{"role": "robot", "content": "x"}], r"messages\[0\].role is not known: 'robot'"),
    ],
)
def test_wrong_conversations(llm: LLM, messages: Any, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        llm.chat(messages, SHORT)
    assert not llm.engine.core.busy


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"chat_template_kwargs": [1]}, "chat_template_kwargs must be a dictionary with texts as keys, got list"),
        ({"chat_template_kwargs": {1: 2}}, "chat_template_kwargs must be a dictionary with texts as keys, got dict"),
        ({"chat_template": 5}, "chat_template must be text or a path, got int"),
        ({"tools": 5}, "tools must be a list of dictionaries, got int"),
        ({"tools": {"type": "function"}}, "tools must be a list of dictionaries, got dict"),
        ({"tools": ["search"]}, "tools must be a list of dictionaries, got list"),
    ],
)
def test_wrong_arguments_of_chats(llm: LLM, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message) as caught:
        llm.chat(CHAT, SHORT, **arguments)
    assert caught.value.param in arguments


def test_arguments_of_chats(llm: LLM) -> None:
    said = [*CHAT, {"role": "assistant", "content": "def add("}]
    (continued,) = llm.chat(said, SHORT, add_generation_prompt=False, continue_final_message=True)
    assert continued.prompt is not None and continued.prompt.endswith("def add(")
    with pytest.raises(InvalidRequestError, match="does not take 'mood'"):
        llm.chat(CHAT, SHORT, chat_template_kwargs={"mood": "good"})
    with pytest.raises(InvalidRequestError, match="chat_template_content_format 'openai' is not supported"):
        llm.chat(CHAT, SHORT, chat_template_content_format="openai")
    template = "{% for tool in tools %}{{ tool.function.name }} {% endfor %}{{ messages[0].content }}"
    tools = [{"type": "function", "function": {"name": "search", "parameters": {}}}]
    (told,) = llm.chat(CHAT, SHORT, chat_template=template, tools=tools)
    assert told.prompt == "search hi"


@pytest.mark.parametrize("absent", [{"content": None}, {}, {"content": None, "refusal": None, "audio": None}])
@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ('{"city": "Bonn"}', '{"city": "Bonn"}'),
        ({"city": "Bonn"}, '{"city": "Bonn"}'),
        ("", "{}"),
        ("{cut", '"{cut"'),
    ],
)
def test_calls_of_earlier_turns_as_openai_writes_them(
    llm: LLM, absent: dict[str, Any], arguments: Any, shown: str
) -> None:
    """Their message has no content, and arguments are a text that contains JSON."""
    call = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    called = {"role": "assistant", "tool_calls": [call]} | absent
    template = (
        "{% for message in messages %}{{ message.content }}|{% for call in message.tool_calls or [] %}"
        "{{ call.function.name }} {{ call.function.arguments | tojson }}|{% endfor %}{% endfor %}"
    )
    messages = [*CHAT, called, {"role": "tool", "tool_call_id": "c", "content": "sun"}]
    (answered,) = llm.chat(messages, SHORT, chat_template=template)
    assert answered.prompt == f"hi||weather {shown}|sun|"
    assert called["tool_calls"] == [call] and call["function"]["arguments"] == arguments


@pytest.mark.parametrize("calls", [None, []])
def test_an_answer_without_text_may_be_sent_back(llm: LLM, calls: list[Any] | None) -> None:
    said = {"role": "assistant", "content": None, "tool_calls": calls}
    template = "{% for message in messages %}{{ 'tool_calls' in message }}{% endfor %}"
    assert llm.chat([*CHAT, said, *CHAT], SHORT, chat_template=template)[0].prompt == "FalseFalseFalse"
    (continued,) = llm.chat([*CHAT, said, *CHAT], SHORT)
    assert continued.prompt == llm.chat([*CHAT, {"role": "assistant", "content": ""}, *CHAT], SHORT)[0].prompt


# --- outputs ------------------------------------------------------------------------------------------------------
def test_an_output_ends_with_its_context(llm: LLM) -> None:
    context = llm.engine.info.facts.max_model_len
    for max_tokens in (10**6, None):
        (answer,) = llm.generate([[5] * (context - 3)], SamplingParams(max_tokens=max_tokens, ignore_eos=True))
        assert len(answer.outputs[0].token_ids) == 3 and answer.outputs[0].finish_reason == "length"


def test_banned_token_ids_do_not_appear(llm: LLM) -> None:
    params = SamplingParams(max_tokens=8, temperature=0.0)
    free = llm.generate("def f(", params)[0].outputs[0].token_ids
    params.bad_token_ids = [free[2:4]]
    bound = llm.generate("def f(", params)[0].outputs[0].token_ids
    assert bound[:3] == free[:3] and bound[3] != free[3]


def test_outputs_without_text(llm: LLM) -> None:
    (answer,) = llm.generate("def f(", SamplingParams(max_tokens=4, detokenize=False))
    assert answer.outputs[0].text == "" and answer.outputs[0].token_ids


def test_all_log_probabilities_of_a_token(llm: LLM) -> None:
    params = SamplingParams(max_tokens=1, temperature=1.0, seed=1, logprobs=-1)
    (entry,) = llm.generate("def f(", params)[0].outputs[0].logprobs or []
    assert len(entry) == llm.engine.info.facts.vocab_size
    ranks = sorted((found.rank or 0, -found.logprob) for found in entry.values())
    assert [rank for rank, _ in ranks] == [*range(1, len(entry) + 1)]
    assert [loss for _, loss in ranks] == sorted(loss for _, loss in ranks)


def test_a_stream_gives_what_generate_gives(llm: LLM) -> None:
    params = SamplingParams(n=2, max_tokens=6, seed=1)
    texts = ["", ""]
    for chunk in llm.stream({"prompt": "class A:"}, params):
        texts[chunk.index] += chunk.text
    assert texts == [output.text for output in llm.generate("class A:", params)[0].outputs]


class Bar:
    """Progress bar that records its calls."""

    def __init__(self, total: int, desc: str, **kwargs: Any) -> None:
        self.total, self.desc, self.done, self.closed, self.postfix = total, desc, 0, False, ""

    def update(self, count: int) -> None:
        self.done += count

    def set_postfix_str(self, text: str, refresh: bool) -> None:
        self.postfix = text

    def close(self) -> None:
        self.closed = True


def test_a_progress_bar_counts_prompts(llm: LLM) -> None:
    made: list[Bar] = []

    def make(**kwargs: Any) -> Bar:
        made.append(Bar(**kwargs))
        return made[-1]

    answers: list[RequestOutput] = llm.generate(["a", "b", "c"], SHORT, use_tqdm=make)
    (bar,) = made
    assert (bar.total, bar.done, bar.closed, bar.desc) == (len(answers), 3, True, "Processed prompts")
    assert "tokens/s" in bar.postfix


BAR = """
import fcntl, struct, sys, termios
from roseinfer.llm.progress import progress_bar
if sys.stderr.isatty():
    fcntl.ioctl(2, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 99, 0, 0))
with progress_bar(True, 2) as ended:
    ended(5, 7)
"""


def test_the_bar_is_shown_on_terminals_only() -> None:
    hidden = subprocess.run([sys.executable, "-c", BAR], capture_output=True, text=True, timeout=60)
    assert hidden.returncode == 0 and hidden.stderr == ""
    on_terminal = f"import pty; pty.spawn([{sys.executable!r}, '-c', {BAR!r}])"
    shown = subprocess.run([sys.executable, "-c", on_terminal], capture_output=True, text=True, timeout=60)
    assert "Processed prompts" in shown.stdout and "1/2" in shown.stdout


# --- the tokenizer ------------------------------------------------------------------------------------------------
def test_the_tokenizer_has_the_methods_that_programs_use(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    ids = tokenizer.encode("import os")
    assert tokenizer("import os") == {"input_ids": ids, "attention_mask": [1] * len(ids)}
    assert tokenizer(["import os", "x"])["input_ids"][0] == ids
    assert tokenizer.decode(ids, skip_special_tokens=True) == "import os"
    assert tokenizer.decode(ids[0]) == tokenizer.convert_ids_to_tokens(ids[0]) == tokenizer.bos_token
    assert tokenizer.batch_decode([ids, ids], skip_special_tokens=True) == ["import os"] * 2
    assert tokenizer.convert_tokens_to_ids(tokenizer.tokenize("import os")) == ids[1:]
    assert len(tokenizer) == tokenizer.vocab_size == len(tokenizer.get_vocab())
    assert tokenizer.eos_token_id in tokenizer.all_special_ids and tokenizer.eos_token in tokenizer.all_special_tokens
    texts = tokenizer.apply_chat_template([CHAT, CHAT], tokenize=False)
    assert len(texts) == 2 and texts[0] == texts[1] and "hi" in texts[0]
    assert tokenizer.chat_template
    with pytest.raises(InvalidRequestError, match="text must be text, got int"):
        tokenizer.encode(5)  # type: ignore[arg-type]
