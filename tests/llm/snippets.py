"""Programs in the style of vLLM's quickstart and offline examples, with the import line changed.

Each is written as its users write it: classes and functions come from `roseinfer`, the model is the embedded one. The
assertions at the end are the test's.
"""

SNIPPETS = {
    "quickstart": """
from roseinfer import LLM, SamplingParams

prompts = ["Hello, my name is", "The president of the United States is", "The capital of France is", "import os"]
sampling_params = SamplingParams(temperature=0.8, top_p=0.95)

llm = LLM(model=MODEL)
outputs = llm.generate(prompts, sampling_params)
for output in outputs:
    prompt = output.prompt
    generated_text = output.outputs[0].text
    print(f"Prompt: {prompt!r}, Generated text: {generated_text!r}")

assert [output.prompt for output in outputs] == prompts
assert all(output.finished and len(output.outputs) == 1 for output in outputs)
assert [output.request_id for output in outputs] == ["0", "1", "2", "3"]
assert all(output.outputs[0].finish_reason in ("stop", "length") for output in outputs)
""",
    "constructor arguments": """
from roseinfer import LLM

llm = LLM(
    model=MODEL,
    dtype="float32",
    gpu_memory_utilization=0.8,
    max_model_len=256,
    tensor_parallel_size=1,
    seed=0,
    enforce_eager=True,
    enable_prefix_caching=True,
    max_num_seqs=4,
    max_num_batched_tokens=512,
    kv_cache_dtype="auto",
    tokenizer=None,
    quantization=None,
)
output = llm.generate("x = ", use_tqdm=False)[0]
assert output.outputs[0].token_ids and llm.engine.info.facts.max_model_len == 256
""",
    "default sampling parameters": """
from roseinfer import LLM

llm = LLM(model=MODEL)
sampling_params = llm.get_default_sampling_params()
sampling_params.max_tokens = 5
sampling_params.temperature = 0.0
outputs = llm.generate(["def add(a, b):"], sampling_params, use_tqdm=False)
assert len(outputs[0].outputs[0].token_ids) == 5
""",
    "chat": """
from roseinfer import LLM, SamplingParams

llm = LLM(model=MODEL)
conversation = [
    {"role": "system", "content": "You write Python."},
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Hello! What shall I write?"},
    {"role": "user", "content": [{"type": "text", "text": "A function that adds two numbers."}]},
]
outputs = llm.chat(conversation, sampling_params=SamplingParams(max_tokens=12), use_tqdm=False)
for output in outputs:
    print(output.prompt, output.outputs[0].text)

assert len(outputs) == 1 and "adds two numbers" in outputs[0].prompt
""",
    "batch of chats": """
from roseinfer import LLM, SamplingParams

llm = LLM(model=MODEL)
conversations = [[{"role": "user", "content": f"Write function number {i}."}] for i in range(10)]
outputs = llm.chat(conversations, SamplingParams(temperature=0.0, max_tokens=6), use_tqdm=False)
assert len(outputs) == 10
assert all(f"number {i}." in output.prompt for i, output in enumerate(outputs))
alone = llm.chat(conversations[3], SamplingParams(temperature=0.0, max_tokens=6), use_tqdm=False)
assert alone[0].outputs[0].token_ids == outputs[3].outputs[0].token_ids
""",
    "another chat template": """
from roseinfer import LLM, SamplingParams

llm = LLM(model=MODEL)
template = "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\\n{% endfor %}"
(output,) = llm.chat(
    [{"role": "user", "content": "import"}],
    SamplingParams(max_tokens=4),
    use_tqdm=False,
    chat_template=template,
    add_generation_prompt=False,
    continue_final_message=False,
)
assert output.prompt == "user: import\\n"
""",
    "several samples": """
from roseinfer import LLM, SamplingParams

llm = LLM(model=MODEL)
params = SamplingParams(n=3, temperature=1.0, max_tokens=8, seed=7)
(request_output,) = llm.generate("class Queue:", params, use_tqdm=False)
for sample in request_output.outputs:
    print(sample.index, sample.text)

assert [sample.index for sample in request_output.outputs] == [0, 1, 2]
assert len({sample.text for sample in request_output.outputs}) == 3
""",
    "log probabilities": """
import math

from roseinfer import LLM, SamplingParams

llm = LLM(model=MODEL)
params = SamplingParams(temperature=0.0, max_tokens=5, logprobs=3, prompt_logprobs=2)
(output,) = llm.generate(["import os, "], params, use_tqdm=False)
completion = output.outputs[0]
for token_id, candidates in zip(completion.token_ids, completion.logprobs):
    chosen = candidates[token_id]
    print(chosen.decoded_token, chosen.rank, math.exp(chosen.logprob))

assert all(len(candidates) == 3 for candidates in completion.logprobs)
total = sum(entry[token].logprob for token, entry in zip(completion.token_ids, completion.logprobs))
assert math.isclose(completion.cumulative_logprob, total)
assert "".join(entry[token].decoded_token for token, entry in zip(completion.token_ids, completion.logprobs)) == (
    completion.text
)
assert len(output.prompt_logprobs) == len(output.prompt_token_ids) and output.prompt_logprobs[0] is None
for token_id, candidates in zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:]):
    assert 2 <= len(candidates) <= 3 and candidates[token_id].rank >= 1
""",
    "structured outputs": """
import json
import re

from roseinfer import LLM, SamplingParams, StructuredOutputsParams

llm = LLM(model=MODEL)
schema = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
grammar = 'root ::= "SELECT " [a-z]{1,9} " FROM " [a-z]{1,9}'


def ask(prompt, constraint):
    params = SamplingParams(structured_outputs=constraint, max_tokens=200, seed=1)
    return llm.generate(prompts=prompt, sampling_params=params, use_tqdm=False)[0].outputs[0].text


choice = ask("The library is ", StructuredOutputsParams(choice=["Positive", "Negative"]))
regex = ask("The address is ", StructuredOutputsParams(regex=r"\\w{1,9}@\\w{1,9}\\.com"))
document = ask("A person: ", StructuredOutputsParams(json=schema))
text = ask("A person: ", StructuredOutputsParams(json=json.dumps(schema), disable_any_whitespace=True))
query = ask("The query is ", StructuredOutputsParams(grammar=grammar))

assert choice in ("Positive", "Negative")
assert re.fullmatch(r"\\w{1,9}@\\w{1,9}\\.com", regex)
assert set(json.loads(document)) == set(json.loads(text)) == {"name", "age"}
assert query.startswith("SELECT ")
""",
    "stop strings and token ids": """
from roseinfer import LLM, SamplingParams

llm = LLM(model=MODEL)
free = llm.generate("def f(", SamplingParams(temperature=0.0, max_tokens=20), use_tqdm=False)[0].outputs[0]
stop = free.text[5:8]
params = SamplingParams(temperature=0.0, max_tokens=20, stop=stop)
stopped = llm.generate("def f(", params, use_tqdm=False)[0].outputs[0]
assert stopped.finish_reason == "stop" and stopped.stop_reason == stop
assert stopped.text == free.text[: free.text.index(stop)]
params = SamplingParams(temperature=0.0, max_tokens=20, stop=[stop, "never"], include_stop_str_in_output=True)
assert llm.generate("def f(", params, use_tqdm=False)[0].outputs[0].text.endswith(stop)
params = SamplingParams(temperature=0.0, max_tokens=20, stop_token_ids=[free.token_ids[3]])
stopped = llm.generate("def f(", params, use_tqdm=False)[0].outputs[0]
assert stopped.stop_reason == free.token_ids[3] and stopped.token_ids == free.token_ids[:4]
""",
    "token ids as prompts": """
from roseinfer import LLM, SamplingParams, TextPrompt, TokensPrompt

llm = LLM(model=MODEL)
tokenizer = llm.get_tokenizer()
ids = tokenizer.encode("import os")
params = SamplingParams(temperature=0.0, max_tokens=4)
outputs = llm.generate(
    [
        "import os",
        {"prompt": "import os"},
        TextPrompt(prompt="import os"),
        ids,
        {"prompt_token_ids": ids},
        TokensPrompt(prompt_token_ids=ids),
    ],
    params,
    use_tqdm=False,
)
assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == 1
assert all(output.prompt_token_ids == ids for output in outputs)
assert [output.prompt for output in outputs] == ["import os"] * 3 + [None] * 3
assert llm.generate(ids, params, use_tqdm=False)[0].prompt_token_ids == ids
""",
    "parameters of each prompt": """
from roseinfer import LLM, SamplingParams

llm = LLM(model=MODEL)
params = [SamplingParams(temperature=0.0, max_tokens=2), SamplingParams(temperature=0.7, seed=5, max_tokens=4)]
outputs = llm.generate(["def a(", "def b("], params, use_tqdm=False)
assert [len(output.outputs[0].token_ids) for output in outputs] == [2, 4]
""",
    "seeds": """
from roseinfer import LLM, SamplingParams

llm = LLM(model=MODEL, seed=3)
params = SamplingParams(temperature=1.0, seed=42, max_tokens=10)
first, second = llm.generate(["import ", "import "], params, use_tqdm=False)
assert first.outputs[0].token_ids == second.outputs[0].token_ids
other = llm.generate("import ", SamplingParams(temperature=1.0, seed=43, max_tokens=10), use_tqdm=False)[0]
assert other.outputs[0].token_ids != first.outputs[0].token_ids
""",
    "what a request may ask of the vocabulary": """
from roseinfer import LLM, SamplingParams

llm = LLM(model=MODEL)
tokenizer = llm.get_tokenizer()
(return_id,) = tokenizer.encode("return", add_special_tokens=False)
only = SamplingParams(max_tokens=3, allowed_token_ids=[return_id])
biased = SamplingParams(max_tokens=3, temperature=0.0, logit_bias={return_id: 100.0})
for params in (only, biased):
    assert llm.generate("def f(", params, use_tqdm=False)[0].outputs[0].text == "returnreturnreturn"
params = SamplingParams(max_tokens=30, min_tokens=30, temperature=0.0, ignore_eos=True, bad_words=["self"])
output = llm.generate("class A:", params, use_tqdm=False)[0].outputs[0]
assert len(output.token_ids) == 30 and " self " not in output.text
""",
    "the tokenizer's chat template": """
from roseinfer import LLM, SamplingParams

llm = LLM(model=MODEL)
tokenizer = llm.get_tokenizer()
messages = [{"role": "user", "content": "Write a sort function."}]
text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
params = SamplingParams(temperature=0.0, max_tokens=6)
(chat,) = llm.chat(messages, params, use_tqdm=False)
assert text == chat.prompt and ids == chat.prompt_token_ids
(same,) = llm.generate({"prompt_token_ids": ids}, params, use_tqdm=False)
assert same.outputs[0].token_ids == chat.outputs[0].token_ids
assert tokenizer.decode(same.outputs[0].token_ids, skip_special_tokens=True) == same.outputs[0].text
""",
    "metrics and the prefix cache": """
import time

from roseinfer import LLM, SamplingParams

llm = LLM(model=MODEL, enable_prefix_caching=True)
prompt = "value = 1\\n" * 30
began = time.time()
params = SamplingParams(max_tokens=4, ignore_eos=True)
first = llm.generate(prompt, params, use_tqdm=False)[0]
second = llm.generate(prompt, params, use_tqdm=False)[0]
assert first.num_cached_tokens == 0 < second.num_cached_tokens
metrics = first.metrics
assert began - 1 < metrics.arrival_time <= metrics.first_scheduled_time <= metrics.first_token_time
assert metrics.first_token_time <= metrics.last_token_time <= metrics.finished_time <= time.time() + 1
assert metrics.first_token_latency > 0 and metrics.num_generation_tokens == 4
assert metrics.queued_ts <= metrics.scheduled_ts <= metrics.first_token_ts <= metrics.last_token_ts
""",
    "objectives, which vLLM does not have": """
from roseinfer import LLM, SamplingParams, Slo

llm = LLM(model=MODEL)
params = SamplingParams(max_tokens=4)
kept, rejected = llm.generate(
    ["a = ", "b = "], params, use_tqdm=False, slo=[Slo(ttft_s=100.0, tpot_s=10.0), Slo(ttft_s=1e-6)]
)
assert kept.outputs[0].rejection is None and kept.outputs[0].why is not None
assert rejected.outputs[0].finish_reason == "rejected" and rejected.outputs[0].rejection.reason == "ttft"
assert rejected.metrics.first_token_time is None
""",
}
