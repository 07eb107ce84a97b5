"""The byte-level BPE tokenizer, trained on the training split, and its files in Hugging Face format."""

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

VOCAB_SIZE = 4096
CONTEXT_TOKENS = 2048
END_OF_TEXT = "<|endoftext|>"
END_OF_TURN = "<|end|>"
SPECIAL_TOKENS = (END_OF_TEXT, END_OF_TURN, "<|system|>", "<|user|>", "<|assistant|>")

# A run of spaces is one piece of its own, so an indentation is one token and the word after it is the same as
# at the start of a line; so is a run of newlines, so a prompt that ends a line is cut as training text is.
PATTERN = r" {2,}|\n+| ?[\p{L}_]+| ?\p{N}{1,3}| ?[^\s\p{L}\p{N}_]+|[^\S\n ]+| "

CHAT_TEMPLATE = """{{- bos_token }}
{%- if tools %}
    {{- '<|system|>Functions that can be called:' }}
    {%- for tool in tools %}
        {{- '\\n' + tool | tojson }}
    {%- endfor %}
    {{- '\\nA call is written\\n<tool_call>\\n{"name": <name>, "arguments": <object>}\\n</tool_call><|end|>' }}
{%- endif %}
{%- for message in messages %}
    {%- if message['role'] == 'tool' %}
        {{- '<|user|><tool_response>\\n' + message['content'] + '\\n</tool_response><|end|>' }}
    {%- elif message['role'] not in ['system', 'user', 'assistant'] %}
        {{- raise_exception('unknown role: ' + message['role']) }}
    {%- else %}
        {{- '<|' + message['role'] + '|>' + message['content'] }}
        {%- for call in message['tool_calls'] or [] %}
            {{- '\\n' if message['content'] or not loop.first }}
            {{- '<tool_call>\\n{"name": ' + call['function']['name'] | tojson }}
            {{- ', "arguments": ' + call['function']['arguments'] | tojson + '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}"""


def train(texts: Iterable[str]) -> Tokenizer:
    """A tokenizer of VOCAB_SIZE entries, the special tokens first. Encoding puts the BOS in front."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{END_OF_TEXT} $A", special_tokens=[(END_OF_TEXT, 0)]
    )
    return tokenizer


def save(tokenizer: Tokenizer, folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json."""
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END_OF_TEXT,
        "eos_token": END_OF_TEXT,
        "pad_token": END_OF_TEXT,
        "additional_special_tokens": list(SPECIAL_TOKENS[1:]),
        "clean_up_tokenization_spaces": False,
        "model_max_length": CONTEXT_TOKENS,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
