"""Spans: every token of a rendering belongs to the message whose text it is, in any template."""

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from kvevict.agent.examples import random_history
from kvevict.agent.formats import to_normal
from kvevict.errors import HistoryError
from kvevict.models.spans import render

CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for message in messages %}{% if message.tool_calls %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}"
    "{% for c in message.tool_calls %}"
    '{{ \'{"name": "\' + c.function.name + \'", "parameters": \' }}'
    "{{ c.function.arguments | tojson }}{{ '}' }}{% endfor %}{{ '<|eot_id|>' }}"
    "{% elif message.role == 'tool' %}"
    "{{ '<|start_header_id|>ipython<|end_header_id|>\n\n' + message.content + '<|eot_id|>' }}"
    "{% else %}{{ '<|start_header_id|>' + message.role + '<|end_header_id|>\n\n' }}"
    "{{ message.content | trim + '<|eot_id|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
QWEN = (
    "{% for message in messages %}{% if message.role == 'assistant' %}"
    "{{ '<|im_start|>assistant' }}{% if message.content %}{{ '\n' + message.content }}{% endif %}"
    '{% for c in message.tool_calls or [] %}{{ \'\n<tool_call>\n{"name": "\' + c.function.name }}'
    "{{ '\", \"arguments\": ' }}{{ c.function.arguments | tojson }}{{ '}\n</tool_call>' }}"
    "{% endfor %}{{ '<|im_end|>\n' }}{% elif message.role == 'tool' %}"
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}"
    "{% endif %}{{ '\n<tool_response>\n' + message.content + '\n</tool_response>' }}"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}"
    "{% else %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MISTRAL = (  # the system prompt inside the first instruction, strict alternation, no tools
    "{% if messages[0].role == 'system' %}{% set sys = messages[0].content %}"
    "{% set loop_messages = messages[1:] %}{% else %}{% set loop_messages = messages %}{% endif %}"
    "{{ bos_token }}{% for message in loop_messages %}"
    "{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% if message.role == 'user' %}{% if loop.first and sys is defined %}"
    "{{ '[INST] ' + sys + '\n\n' + message.content + '[/INST]' }}"
    "{% else %}{{ '[INST] ' + message.content + '[/INST]' }}{% endif %}"
    "{% else %}{{ ' ' + message.content | trim + eos_token }}{% endif %}{% endfor %}"
)
TEMPLATES = {"chatml": CHATML, "llama3": LLAMA3, "qwen": QWEN, "mistral": MISTRAL}
SPECIAL = ("<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")


def tokenizer_of(template: str, special: tuple[str, ...] = SPECIAL, merge: str = "") -> Any:
    """Return a tokenizer with one token a byte, and one merge across a boundary where wanted."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {c: i for i, c in enumerate(alphabet)}
    merges = []
    if merge:
        vocab[merge] = len(vocab)
        merges = [(merge[0], merge[1])]
    raw = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens([AddedToken(t, normalized=False) for t in (*special, "<s>", "</s>")])
    made = PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<s>", eos_token="</s>")
    made.chat_template = template
    return made


MESSAGES = [
    {"role": "system", "content": "You fix bugs."},
    {"role": "user", "content": "  Fix the clock.  "},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"type": "function", "function": {"name": "read", "arguments": {"path": "clock.py"}}},
            {"type": "function", "function": {"name": "ls", "arguments": {"path": "naïve dir"}}},
        ],
    },
    {"role": "tool", "name": "read", "content": "def tick(): pass"},
    {"role": "tool", "name": "ls", "content": "clock.py"},
    {"role": "assistant", "content": "It never ticks."},
    {"role": "user", "content": "Go on."},
]


@pytest.mark.parametrize("name", TEMPLATES)
def test_spans_cover_every_token_once_and_hold_their_text(name: str) -> None:
    tokenizer = tokenizer_of(TEMPLATES[name])
    found = render(MESSAGES, tokenizer, generation_prompt=True)
    assert tokenizer.decode(found.ids) == found.text
    in_place = sorted((s for s in found.spans), key=lambda s: s.start)
    assert in_place[0].start == 0
    assert in_place[-1].stop + found.tail == len(found.ids)
    assert all(a.stop == b.start for a, b in pairwise(in_place))
    for span, message in zip(found.spans, MESSAGES, strict=True):
        text = tokenizer.decode(found.ids[span.start : span.stop])
        assert str(message["content"]).strip() in text
        others = [m["content"] for m in MESSAGES if m is not message and len(m["content"]) > 9]
        assert not any(str(other).strip() in text for other in others)
        for call in message.get("tool_calls", ()):
            assert call["function"]["arguments"]["path"] in text


def test_styles_are_the_first_that_shows_everything() -> None:
    styles = {n: render(MESSAGES, tokenizer_of(t)).style for n, t in TEMPLATES.items()}
    assert styles["qwen"] == styles["llama3"] == "native"
    assert styles["chatml"] == "calls as text"
    assert styles["mistral"] == "folded"


def test_blocks_hold_contents_without_the_frame() -> None:
    tokenizer = tokenizer_of(QWEN)
    found = render(MESSAGES, tokenizer)
    texts = {
        (b.message, b.block): tokenizer.decode(found.ids[b.start : b.stop]) for b in found.blocks
    }
    assert texts[0, 0] == "You fix bugs."
    assert texts[3, 0] == "def tick(): pass"
    assert texts[2, 1].startswith("read")
    assert texts[2, 1].endswith("clock.py")


def test_a_folded_system_prompt_keeps_its_own_span() -> None:
    tokenizer = tokenizer_of(MISTRAL)
    found = render(MESSAGES[:2], tokenizer)
    assert tokenizer.decode(found.ids[slice(found.spans[0].start, found.spans[0].stop)]).endswith(
        "You fix bugs."
    )
    assert found.spans[1].start == found.spans[0].stop


def test_a_merge_across_a_boundary_counts_to_the_earlier_message() -> None:
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    tokenizer = tokenizer_of(template, (), merge="ab")
    found = render(
        [{"role": "user", "content": "xa"}, {"role": "user", "content": "by"}], tokenizer
    )
    assert found.straddling == 1
    assert [s.size for s in found.spans] == [2, 1]
    assert tokenizer.decode(found.ids) == "xaby"


@pytest.mark.parametrize("name", TEMPLATES)
@settings(max_examples=15)
@given(seed=st.integers(0, 10_000))
def test_any_history_round_trips(name: str, seed: int) -> None:
    history = to_normal(random_history(seed, "hf", 12), "hf")
    tokenizer = tokenizer_of(TEMPLATES[name])
    found = render(history, tokenizer, generation_prompt=True)
    assert tokenizer.decode([i for part in _in_place(found) for i in part]) == found.text


def _in_place(found: Any) -> list[tuple[int, ...]]:
    spans = sorted(found.spans, key=lambda s: (s.start, s.stop))
    parts = [found.ids[s.start : s.stop] for s in spans]
    return [*parts, found.ids[len(found.ids) - found.tail :] if found.tail else ()]


def test_earlier_spans_stay_as_the_history_grows() -> None:
    tokenizer = tokenizer_of(CHATML)
    whole = render(MESSAGES, tokenizer)
    for count in range(1, len(MESSAGES)):
        part = render(MESSAGES[:count], tokenizer)
        assert part.ids == whole.ids[: len(part.ids)]
        assert part.spans == whole.spans[:count]


def test_a_template_that_changes_contents_is_refused() -> None:
    cutting = "{% for m in messages %}{{ m.content[:7] }}{% endfor %}"
    hiding = "{% for m in messages if m.role != 'tool' %}{{ m.content }}{% endfor %}"
    for template in (cutting, hiding):
        with pytest.raises(HistoryError, match="cannot render"):
            render(MESSAGES[3:5], tokenizer_of(template), style="native")


@pytest.mark.parametrize("style", ["native", "calls as text", "folded"])
@pytest.mark.parametrize("text", ["", "  "])
def test_what_a_template_shows_nothing_of_is_no_reason_to_refuse(style: str, text: str) -> None:
    """An answer that ended at once: its frame counts to the message before."""
    tokenizer = tokenizer_of(QWEN)
    empty = {"role": "assistant", "content": text}
    found = render([MESSAGES[0], MESSAGES[1], empty, MESSAGES[6]], tokenizer, style=style)
    assert tokenizer.decode([i for part in _in_place(found) for i in part]) == found.text
    last = found.spans[3]
    assert tokenizer.decode(found.ids[last.start : last.stop]).count("<|im_start|>") <= 1


def test_no_template_is_refused() -> None:
    tokenizer = tokenizer_of(CHATML)
    tokenizer.chat_template = None
    with pytest.raises(HistoryError, match="no chat template"):
        render(MESSAGES, tokenizer)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("a \ue000 mark", r"message 1 holds U\+E000, of the private use"),
        ("\ue01f", r"U\+E01F"),
        ("half \ud83d a pair", r"U\+D83D, half of a surrogate pair"),
    ],
)
def test_characters_that_cannot_be_rendered_are_named(
    chat_tokenizer: Any, text: str, named: str
) -> None:
    turns = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": text}]
    with pytest.raises(HistoryError, match=named):
        render(turns, chat_tokenizer)
    tool = {"type": "function", "function": {"name": "f", "description": text}}
    with pytest.raises(HistoryError, match=named.replace("message 1", "a tool")):
        render(turns[:1], chat_tokenizer, tools=[tool])
    turns[1]["content"] = "\ue002 \U0001f600"  # neither of them
    assert render(turns, chat_tokenizer).text.count("\ue002") == 1
