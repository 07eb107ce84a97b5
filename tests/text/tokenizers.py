"""Small tokenizers of the kinds that models use."""

import json
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers

from roseinfer.text.tokenizer import Tokenizer

CORPUS = [
    "hello world, hello the world of words",
    "naïve café, größer",
    "日本語 テキスト",
    "😀😃 emoji 👩‍👩‍👧",
    "def f(x):\n    return x",
] * 3
CONTROL = ["<|end|>", "<|user|>", "<|assistant|>", "<|system|>"]
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)

TOOL_TEMPLATE = """{{- bos_token }}
{%- if tools %}
    {{- '<|system|>tools:' }}
    {%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}
    {{- '\\n<tool_call>\\n{"name": <name>, "arguments": <object>}\\n</tool_call><|end|>' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- '<|user|><tool_response>' + message.content + '</tool_response><|end|>' }}
    {%- else %}
        {{- '<|' + message.role + '|>' }}
        {%- if message.reasoning_content %}{{- '(' + message.reasoning_content + ')' }}{%- endif %}
        {{- message.content }}
        {%- for call in message.tool_calls or [] %}
            {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}"""
THINKING = """{%- if add_generation_prompt and enable_thinking is defined and not enable_thinking %}
    {{- '<think>\\n\\n</think>\\n\\n' }}
{%- endif %}"""


# A first system message, reasoning in `thinking`, one call a message, analysis dropped before a final answer.
HARMONY_TEMPLATE = """{%- macro say(header, content, end) -%}
    {{- '<|start|>' + header + '<|message|>' + content + end }}
{%- endmacro %}
{%- macro system() -%}
    {%- if reasoning_effort is not defined %}{%- set reasoning_effort = 'medium' %}{%- endif %}
    {{- say('system', 'Reasoning: ' + reasoning_effort, '<|end|>') }}
{%- endmacro %}
{{- system() }}
{%- set said = messages %}
{%- if messages[0].role in ['developer', 'system'] %}
    {{- say('developer', messages[0].content, '<|end|>') }}
    {%- set said = messages[1:] %}
{%- endif %}
{%- if tools %}
    {{- '<|start|>developer<|message|>namespace functions' }}
    {%- for tool in tools | map(attribute='function') %}
        {{- '\\n// ' + tool.description + '\\ntype ' + tool.name }}
        {%- set parameters = (tool.parameters or {}).properties or {} %}
        {%- for name, spec in parameters.items() if spec.enum and spec.default is defined %}
            {{- '\\n' + name + ' // default: ' + spec.default }}
        {%- endfor %}
    {%- endfor %}
    {{- '<|end|>' }}
{%- endif %}
{%- set called = namespace(name=none) %}
{%- for message in said %}
    {%- if message.role == 'assistant' %}
        {%- if '<|channel|>analysis<|message|>' in message.content %}{{ raise_exception('channels') }}{% endif %}
        {%- if 'tool_calls' in message %}
            {%- if message.content and message.thinking %}{{ raise_exception('content and thinking') }}{% endif %}
            {%- set later = namespace(final=false) %}
            {%- for other in said[loop.index:] if other.role == 'assistant' and 'tool_calls' not in other %}
                {%- set later.final = true %}
            {%- endfor %}
            {%- set thought = message.content or message.thinking %}
            {%- if thought and not later.final %}
                {{- say('assistant<|channel|>analysis', thought, '<|end|>') }}
            {%- endif %}
            {%- set call = message.tool_calls[0].function %}
            {%- set called.name = call.name %}
            {%- set header = 'assistant to=functions.' + call.name + '<|channel|>commentary json' %}
            {{- say(header, call.arguments | tojson, '<|call|>') }}
        {%- else %}
            {%- if loop.last and not add_generation_prompt and 'thinking' in message %}
                {{- say('assistant<|channel|>analysis', message.thinking, '<|end|>') }}
            {%- endif %}
            {{- say('assistant<|channel|>final', message.content, '<|end|>') }}
        {%- endif %}
    {%- elif message.role == 'tool' %}
        {%- if called.name is none %}{{ raise_exception('a result without a call') }}{% endif %}
        {%- set header = 'functions.' + called.name + ' to=assistant<|channel|>commentary' %}
        {{- say(header, message.content | tojson, '<|end|>') }}
    {%- elif message.role == 'user' %}
        {{- say('user', message.content, '<|end|>') }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}"""


def byte_level() -> Tokenizer:
    """Build a tokenizer like those of GPT-2, Llama 3 and Qwen: every token is a string of bytes."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=340,
        special_tokens=["<|endoftext|>", *CONTROL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    # Tokens outside the byte alphabet, inside it, and one whose characters stand for other bytes.
    backend.add_tokens([AddedToken("tool call", special=False), AddedToken("   ", special=False), "Ŀŀ"])
    backend.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
    )
    return Tokenizer(backend, {"bos_token": "<|endoftext|>", "eos_token": "<|end|>"}, CHAT_TEMPLATE)


def tool_caller(thinks: bool = False) -> Tokenizer:
    """Add a template with tools in Hermes' format to `byte_level`; `thinks`: with reasoning first."""
    tokenizer = byte_level()
    marks = ["<tool_call>", "</tool_call>", *(["<think>", "</think>"] if thinks else [])]
    tokenizer.backend.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in marks])
    template = TOOL_TEMPLATE
    if thinks:
        template = template.replace("'('", "'<think>'").replace("')'", "'</think>'") + THINKING
    return Tokenizer(tokenizer.backend, tokenizer.config, template)


def harmony() -> Tokenizer:
    """Build a tokenizer with harmony's special tokens, and a template of the shape of gpt-oss' own."""
    backend = byte_level().backend
    backend.add_special_tokens(
        [f"<|{name}|>" for name in ("start", "channel", "message", "constrain", "return", "call")]
    )
    backend.post_processor = processors.TemplateProcessing(single="$A", special_tokens=[])
    return Tokenizer(backend, {"bos_token": "<|endoftext|>", "eos_token": "<|return|>"}, HARMONY_TEMPLATE)


def byte_fallback() -> Tokenizer:
    """Build a tokenizer like Llama 2's and Mistral's: sentencepiece BPE with normaliser, leading space
    and byte tokens.
    """
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    for token in ("▁", *"helowrdabc,.é<>|/[]INST_imn", "▁h", "he", "ll", "▁w", "or", "▁▁", "\ufffd"):
        vocab.setdefault(token, len(vocab))
    merges = [("▁", "h"), ("h", "e"), ("l", "l"), ("▁", "w"), ("o", "r"), ("▁", "▁")]
    backend = tokenizers.Tokenizer(
        models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return Tokenizer(backend, {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "unk_token": "<unk>"}, None)


def word_piece() -> Tokenizer:
    vocab = {token: id for id, token in enumerate(["[UNK]", "[CLS]", "hello", "world", "##s", "##ly", ",", "a"])}
    backend = tokenizers.Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(cleanup=False)
    backend.add_special_tokens(["[UNK]", "[CLS]"])
    return Tokenizer(backend, {}, None)


def undecorated() -> Tokenizer:
    """Build a tokenizer without a decoder: the library joins tokens with spaces."""
    backend = tokenizers.Tokenizer(models.WordLevel({"a": 0, "b": 1, "[X]": 2}, unk_token="a"))
    backend.add_special_tokens(["[X]"])
    return Tokenizer(backend, {}, None)


def write_folder(folder: Path, tokenizer: Tokenizer, config: dict[str, object]) -> Path:
    folder.mkdir(exist_ok=True)
    tokenizer.backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder
