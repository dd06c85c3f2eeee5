"""spans: a history as its model reads it, with the exact tokens of every message and block.

Private marks are put around every content before the chat template runs, found again in what it
renders, and taken out; the text without them must equal the template's own, or nothing is returned.
So folding (a system prompt inside the first instruction), trimming and tool rendering need no
knowledge of the template.
"""

from __future__ import annotations

import copy
import json
import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any

from jinja2 import TemplateError

from kvevict.agent.formats import from_normal
from kvevict.agent.history import History
from kvevict.errors import HistoryError

_OPEN, _CLOSE, _FIRST = 0xE000, 0xE001, 0xE010  # marks: open, number in base 16, close
_TAKEN = re.compile(r"[\ue000\ue001\ue010-\ue01f\ud800-\udfff]")
Turn = dict[str, Any]


@dataclass(frozen=True)
class Span:
    """Tokens `start` to `stop - 1` of a rendering.

    Attributes:
        start: first token.
        stop: one past the last.
        message: place of the message in what was rendered.
        block: place of the block in its message's rendering; -1 for the whole message.
        kind: "message", "text", "tool_use" or "tool_result".
        role: of the message.
    """

    start: int
    stop: int
    message: int
    block: int = -1
    kind: str = "message"
    role: str = ""

    @property
    def size(self) -> int:
        """Tokens."""
        return self.stop - self.start


@dataclass(frozen=True)
class Rendered:
    """A rendered history.

    Attributes:
        text: what the template gave.
        ids: its tokens.
        spans: a span a message, in order of place; together with `tail` they cover all tokens. A
            message without a token of its own has an empty one.
        blocks: spans of the contents alone, without the template's frame.
        tail: tokens of the generation prompt at the end.
        straddling: tokens that begin in one message and end in the next; they count to the first.
        style: "native", "calls as text", or "folded" (results as user text, equal roles joined),
            the first that the template can render whole.
    """

    text: str
    ids: tuple[int, ...]
    spans: tuple[Span, ...]
    blocks: tuple[Span, ...]
    tail: int = 0
    straddling: int = 0
    style: str = "native"

    def parts(self) -> list[tuple[int, ...]]:
        """Return the tokens of every message, and those of the generation prompt last."""
        found = [self.ids[s.start : s.stop] for s in self.spans]
        return [*found, self.ids[len(self.ids) - self.tail :]] if self.tail else found


@dataclass
class _Marks:
    """What was marked: (message, block, kind) by number."""

    owners: list[tuple[int, int, str]] = field(default_factory=list)

    def around(self, text: str, message: int, block: int, kind: str) -> str:
        """Return the text with its marks inside the blanks that a template may trim."""
        inner = text.strip()
        lead, trail = text[: len(text) - len(text.lstrip())], text[len(text.rstrip()) :]
        if not inner:
            lead, trail = text, ""
        number = len(self.owners)
        self.owners.append((message, block, kind))
        digits = "".join(chr(_FIRST + int(d, 16)) for d in f"{number:x}")
        opening, closing = (f"{chr(c)}{digits}{chr(c)}" for c in (_OPEN, _CLOSE))
        return f"{lead}{opening}{inner}{closing}{trail}"

    def around_text(self, text: str, message: int, block: int, kind: str) -> str:
        """Return the text with its marks, or as it is where it is blank."""
        return self.around(text, message, block, kind) if text.strip() else text


def _check_characters(messages: Sequence[Turn], tools: Sequence[Any]) -> None:
    """Refuse the characters that mark messages here, and those that no tokenizer can read."""
    for place, part in enumerate([*messages, *tools]):
        try:
            found = _TAKEN.search(json.dumps(part, ensure_ascii=False, default=str))
        except (TypeError, ValueError):
            continue  # no JSON: the template will say so
        if found is not None:
            why = "of the private use area, which marks where messages end here: replace it"
            if found[0] >= "\ud800" and found[0] <= "\udfff":
                why = "half of a surrogate pair, which no tokenizer reads: repair the history"
            name = f"message {place}" if place < len(messages) else "a tool"
            raise HistoryError(f"{name} holds U+{ord(found[0]):04X}, {why}")


def render(
    history: History | Sequence[Mapping[str, Any]],
    tokenizer: Any,
    *,
    tools: Sequence[Any] | None = None,
    generation_prompt: bool = False,
    style: str | None = None,
) -> Rendered:
    """Render a history by the tokenizer's chat template and say which tokens are whose.

    Args:
        history: a `History`, or chat-template messages.
        tokenizer: of transformers, with a chat template.
        tools: declarations for the template; a history's own where None.
        generation_prompt: whether the template's opening of an answer is added.
        style: the style to render in; None takes the first that renders every content.

    Raises:
        HistoryError: no template, one that renders no style of this history, or one that changes
            contents so that they cannot be found again.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise HistoryError("the tokenizer has no chat template: set tokenizer.chat_template")
    messages, declared = chat_messages(history)
    given = list(tools) if tools is not None else declared
    _check_characters(messages, given)
    reasons: list[str] = []
    # A template may show a mark where it shows nothing for an empty content: then those have none.
    blank = any(not m["content"].strip() for m in messages)
    markings = (_Marks.around, _Marks.around_text) if blank else (_Marks.around,)
    for name, shape in _STYLES.items():
        if style is not None and name != style:
            continue
        for mark in markings:
            try:
                return _rendered(messages, given, tokenizer, generation_prompt, name, shape, mark)
            except (TemplateError, TypeError, HistoryError) as error:
                reasons.append(f"{name}: {error}")
    raise HistoryError(
        f"the chat template cannot render this history ({'; '.join(dict.fromkeys(reasons))})"
    )


def chat_messages(history: History | Sequence[Mapping[str, Any]]) -> tuple[list[Turn], list[Any]]:
    """Return a history as chat-template messages with text contents, and its tools."""
    found: Any = from_normal(history, "hf") if isinstance(history, History) else list(history)
    tools: list[Any] = []
    if isinstance(found, Mapping):
        tools, found = list(found.get("tools") or ()), found["messages"]
    return [{**m, "content": _text(m.get("content"))} for m in found], tools


def _text(content: Any) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if isinstance(content, list):
        parts = [p if isinstance(p, Mapping) else {"text": p} for p in content]
        return "\n".join(str(p.get("text", f"[{p.get('type')}]")) for p in parts)
    return json.dumps(content, ensure_ascii=False)


# -- styles ---------------------------------------------------------------------------------------
# A style turns messages into the template's turns twice, with and without marks, by one function.

_Mark = Any  # (text, message, block, kind) -> text


def _native(messages: list[Turn], mark: _Mark) -> list[Turn]:
    turns = []
    for m, message in enumerate(messages):
        kind = "tool_result" if message["role"] in ("tool", "ipython") else "text"
        text = message["content"]
        if text.strip() or not message.get("tool_calls"):
            text = mark(text, m, 0, kind)  # a mark would make a template show what is empty
        turn = {**message, "content": text}
        calls = []
        for b, call in enumerate(message.get("tool_calls") or (), 1):
            call = copy.deepcopy(dict(call))
            inner = call.get("function", call)
            inner["name"] = mark(str(inner["name"]), m, b, "tool_use")
            inner["arguments"] = _marked(inner.get("arguments", {}), m, b, mark)
            calls.append(call)
        turn.pop("tool_calls", None)
        turns.append({**turn, "tool_calls": calls} if calls else turn)
    return turns


def _marked(value: Any, m: int, b: int, mark: _Mark) -> Any:
    if isinstance(value, str):
        return mark(value, m, b, "tool_use")
    if isinstance(value, Mapping):
        return {k: _marked(v, m, b, mark) for k, v in value.items()}
    return [_marked(v, m, b, mark) for v in value] if isinstance(value, list) else value


def _call_text(call: Mapping[str, Any]) -> str:
    inner = call.get("function", call)
    shown = {"name": inner["name"], "arguments": inner.get("arguments", {})}
    return f"<tool_call>\n{json.dumps(shown, ensure_ascii=False)}\n</tool_call>"


def _as_text(messages: list[Turn], mark: _Mark) -> list[Turn]:
    turns = []
    for m, message in enumerate(messages):
        kind = "tool_result" if message["role"] in ("tool", "ipython") else "text"
        parts = [mark(message["content"], m, 0, kind)] if message["content"] else []
        calls = enumerate(message.get("tool_calls") or (), 1)
        parts += [mark(_call_text(call), m, b, "tool_use") for b, call in calls]
        content = "\n".join(parts) if parts else mark("", m, 0, kind)
        turns.append({"role": message["role"], "content": content})
    return turns


def _folded(messages: list[Turn], mark: _Mark) -> list[Turn]:
    joined: list[Turn] = []
    for turn in _as_text(messages, mark):
        role = turn["role"] if turn["role"] in ("system", "assistant") else "user"
        if joined and joined[-1]["role"] == role:
            joined[-1]["content"] += "\n\n" + turn["content"]
        else:
            joined.append({"role": role, "content": turn["content"]})
    return joined


_STYLES = {"native": _native, "calls as text": _as_text, "folded": _folded}


# -- rendering ------------------------------------------------------------------------------------


def _rendered(
    messages: list[Turn],
    tools: list[Any],
    tokenizer: Any,
    prompt: bool,
    name: str,
    shape: Any,
    mark: Any,
) -> Rendered:
    marks = _Marks()
    marked = _apply(tokenizer, shape(messages, partial(mark, marks)), tools, prompt)
    plain = _apply(tokenizer, shape(messages, lambda text, *_: text), tools, prompt)
    try:
        text, places = _unmark(marked)
    except (ValueError, KeyError) as error:
        raise HistoryError("it cuts contents, so that they cannot be found again") from error
    if text != plain:
        raise HistoryError("it changes contents, so that they cannot be found again")
    missing = [marks.owners[n] for n in range(len(marks.owners)) if n not in places]
    shown = {owner for n, owner in enumerate(marks.owners) if n in places}
    lost = [o for o in missing if o not in shown]
    if any(kind != "text" or messages[m]["content"] for m, _, kind in lost):
        raise HistoryError(f"it leaves out contents (message {missing[0][0]}, {missing[0][2]})")
    contents: dict[tuple[int, int, str], tuple[int, int]] = {}
    for number, (start, stop) in places.items():
        owner = marks.owners[number]
        low, high = contents.get(owner, (start, stop))
        contents[owner] = (min(low, start), max(high, stop))
    bounds = _bounds(len(messages), contents)

    def unmarked(part: list[Turn]) -> str:
        return _apply(tokenizer, shape(part, lambda t, *_: t), tools, False)

    bare = unmarked(messages) if prompt else text
    closed = len(bare) if text.startswith(bare) else len(text)
    cuts = _cuts(messages, bounds, text, closed, unmarked)
    return _tokenised(text, cuts, closed, contents, messages, tokenizer, name)


def _apply(tokenizer: Any, turns: list[Turn], tools: list[Any], prompt: bool) -> str:
    return str(
        tokenizer.apply_chat_template(
            turns, tools=tools or None, tokenize=False, add_generation_prompt=prompt
        )
    )


def _unmark(marked: str) -> tuple[str, dict[int, tuple[int, int]]]:
    """Take the marks out; return the text, and where each number's content lies."""
    out: list[str] = []
    length, i = 0, 0
    opened: dict[int, int] = {}
    places: dict[int, tuple[int, int]] = {}
    while i < len(marked):
        code = ord(marked[i])
        if code not in (_OPEN, _CLOSE):
            step = i
            while i < len(marked) and ord(marked[i]) not in (_OPEN, _CLOSE):
                i += 1
            out.append(marked[step:i])
            length += i - step
            continue
        end = marked.index(marked[i], i + 1)
        number = int("".join(f"{ord(c) - _FIRST:x}" for c in marked[i + 1 : end]), 16)
        if code == _OPEN:
            opened[number] = length
        else:
            places[number] = (opened[number], length)
        i = end + 1
    return "".join(out), places


def _bounds(
    count: int, contents: dict[tuple[int, int, str], tuple[int, int]]
) -> list[tuple[int, int] | None]:
    """Return where each message's contents begin and end in the text."""
    found: list[tuple[int, int] | None] = [None] * count
    for (m, _, _), (start, stop) in contents.items():
        old = found[m]
        found[m] = (start, stop) if old is None else (min(old[0], start), max(old[1], stop))
    return found


def _cuts(
    messages: list[Turn], bounds: list[Any], text: str, closed: int, shown: Any
) -> list[tuple[int, int]]:
    """Return (first character, message) of every message in order of place.

    Between two contents lie the end of one frame and the beginning of the next. The cut is where
    the rendering of all messages before the second departs from the whole one.
    """
    order = sorted((b[0], b[1], m) for m, b in enumerate(bounds) if b is not None)
    cuts = [(0, order[0][2])] if order else []
    for (_, stop, m), (start, _, after) in pairwise(order):
        if start < stop:
            raise HistoryError(f"it interleaves messages {m} and {after}")
        try:
            part = shown(messages[:after]) if after > m else ""
        except (TemplateError, TypeError):
            part = ""
        common = stop
        if part[:stop] == text[:stop]:
            while common < min(len(part), start) and part[common] == text[common]:
                common += 1
        cuts.append((common, after))
    if order and order[-1][1] > closed:
        raise HistoryError("its generation prompt changes the last message")
    return cuts


def _tokenised(
    text: str,
    cuts: list[tuple[int, int]],
    closed: int,
    contents: dict[tuple[int, int, str], tuple[int, int]],
    messages: list[Turn],
    tokenizer: Any,
    style: str,
) -> Rendered:
    whole = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    ids, offsets = list(whole["input_ids"]), list(whole["offset_mapping"])
    if tokenizer.decode(ids, clean_up_tokenization_spaces=False) != text:
        raise HistoryError("its tokens do not decode to the text that they were made of")
    starts = [a for a, _ in offsets]

    def token_at(character: int) -> int:
        return bisect_left(starts, character)

    edges = [token_at(c) for c, _ in cuts] + [token_at(closed)]
    straddling = sum(
        1 for e, (c, _) in zip(edges[1:-1], cuts[1:], strict=True) if e and offsets[e - 1][1] > c
    )
    spans: list[Span] = [Span(0, 0, m, role=x["role"]) for m, x in enumerate(messages)]
    for (_, m), start, stop in zip(cuts, edges, edges[1:], strict=False):
        spans[m] = replace(spans[m], start=start, stop=stop)
    blocks = []
    for (m, b, kind), (low, high) in sorted(contents.items()):
        first, last = token_at(low), token_at(high)
        if first and offsets[first - 1][1] > low:
            first -= 1  # a token that begins in the frame
        if last > first:
            blocks.append(Span(first, last, m, b, kind, messages[m]["role"]))
    return Rendered(
        text, tuple(ids), tuple(spans), tuple(blocks), len(ids) - edges[-1], straddling, style
    )
