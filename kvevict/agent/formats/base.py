"""Format: what every wire format answers, and the parts they share."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from kvevict.agent.history import Block, History, Message, recoverability
from kvevict.errors import HistoryError

FORMATS: dict[str, Format] = {}

_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


@dataclass(frozen=True)
class Rules:
    """What a format's API demands of a request, read by the validator.

    Attributes:
        adjacent: results stand directly behind the assistant message with their calls (I1); False
            means anywhere after the call.
        one_message: all results of one response stand in one user message (I2, I3).
        first_user: the first message is a user message (I5).
        system_first: system messages stand at the front only (I5).
        alternate: user and assistant alternate (I5, strict chat templates).
        ids: calls and results carry ids.
        breakpoints: most cache breakpoints (I9); None where the format has none.
        last: roles that the last message may have (I7).
        signed: thinking is signed and must stay as it is in the latest turn (I4).
        nonempty: text must not be empty (I8).
        log: a recording rather than a request: aborted turns and open ends are normal in it.
    """

    adjacent: bool = True
    one_message: bool = False
    first_user: bool = False
    alternate: bool = False
    ids: bool = True
    breakpoints: int | None = None
    last: tuple[str, ...] = ("user", "tool")
    signed: bool = False
    nonempty: bool = False
    system_first: bool = False
    log: bool = False


class Format(ABC):
    """A wire format: reads objects into histories and writes histories back.

    A subclass registers one instance of itself by name (`class Pi(Format, name="pi")`).
    """

    name: ClassVar[str]
    rules: ClassVar[Rules] = Rules()
    containers: ClassVar[tuple[str, ...]] = ("messages",)

    def __init_subclass__(cls, *, name: str, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.name = name
        FORMATS[name] = cls()

    def key(self, obj: Any) -> str:
        """Return the key of a request or log that holds the messages, "" for a plain list."""
        if not isinstance(obj, Mapping):
            return ""
        return next((key for key in self.containers if isinstance(obj.get(key), list)), "")

    @abstractmethod
    def detect(self, obj: Any) -> float:
        """Return how likely an object is in this format, 0 (impossible) to 1."""

    @abstractmethod
    def read(self, obj: Any, reuse: Sequence[Message] = ()) -> History:
        """Read an object into a history.

        Args:
            obj: what `json.loads` gives.
            reuse: messages of an earlier read; one whose `raw` is the very object at its place
                is taken over.
        """

    @abstractmethod
    def write(self, history: History) -> Any:
        """Write a history as an object of this format."""


# -- reading ------------------------------------------------------------------------------------


def need(condition: bool, message: str, index: int | None, path: str) -> None:
    """Raise `HistoryError` with the place unless the condition holds."""
    if not condition:
        raise HistoryError(f"{path}: {message}" if path else message, index, path)


def read_all(
    items: Sequence[Any],
    reuse: Sequence[Message],
    read: Callable[[Any, int, str, dict[str, str]], Message],
    where: str,
    names: dict[str, str],
) -> tuple[Message, ...]:
    """Read every message of a list, taking over those that were read before."""
    messages: list[Message] = []
    for old, raw in zip(reuse, items, strict=False):
        if old.raw is not raw:
            break
        messages.append(old)
    learn_names(messages, names)
    for i in range(len(messages), len(items)):
        old_one = taken_over(reuse, i, items[i], names)
        messages.append(old_one or read(items[i], i, f"{where}[{i}]", names))
    return tuple(messages)


def taken_over(reuse: Sequence[Message], i: int, raw: Any, names: dict[str, str]) -> Message | None:
    """Return message i of an earlier read if it was made from this very object."""
    if i >= len(reuse) or reuse[i].raw is not raw:
        return None
    learn_names((reuse[i],), names)
    return reuse[i]


def learn_names(messages: Sequence[Message], names: dict[str, str]) -> None:
    """Add the tool of every call id to `names`, so that later results know theirs."""
    for message in messages:
        if message.role == "assistant":
            for block in message.blocks:
                if block.kind in ("tool_use", "server_tool_use") and block.call_id and block.tool:
                    names[block.call_id] = block.tool


def need_mapping(value: Any, index: int | None, path: str) -> Mapping[str, Any]:
    """Return a value that must be an object."""
    if isinstance(value, dict):
        return value
    need(isinstance(value, Mapping), f"expected an object, got {_kind(value)}", index, path)
    return value  # type: ignore[no-any-return]


def need_list(value: Any, index: int | None, path: str) -> Sequence[Any]:
    """Return a value that must be a list."""
    if isinstance(value, list):
        return value
    need(isinstance(value, tuple), f"expected a list, got {_kind(value)}", index, path)
    return value  # type: ignore[no-any-return]


def need_text(value: Any, index: int | None, path: str) -> str:
    """Return a value that must be a string."""
    if isinstance(value, str):
        return value
    raise HistoryError(f"{path}: expected a string, got {_kind(value)}", index, path)


def optional_text(value: Any, index: int | None, path: str) -> str | None:
    """Return a value that must be a string where there is one."""
    return None if value is None else need_text(value, index, path)


def unknown(
    what: str, value: Any, known: Sequence[str], index: int | None, path: str
) -> HistoryError:
    """Return the error for an unknown role or block kind, with the known ones."""
    return HistoryError(f"{path}: unknown {what} {value!r}; known: {', '.join(known)}", index, path)


def json_text(value: Any, index: int | None, path: str) -> str:
    """Return a value as compact JSON text; strings are returned as they are.

    Raises:
        HistoryError: a value that JSON cannot hold, or one nested too deeply.
    """
    if isinstance(value, str):
        return value
    try:
        return _encode(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise HistoryError(f"{path}: cannot be written as JSON: {error}", index, path) from error


def json_object(text: str) -> Any:
    """Return call arguments as an object; text that is no JSON object is kept under "input"."""
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return {"input": text}
    return value if isinstance(value, dict) else {"input": value}


def make(kind: str, text: str = "", **fields: Any) -> Block:
    """Return a block as read, its recoverability filled in."""
    return Block(kind, text, recoverable=recoverability(kind, fields.get("tool")), **fields)


def media_of(value: Any) -> tuple[str, ...]:
    """Return the media inside a part at any depth: "image", "document" or "audio" for each."""
    if value is None or isinstance(value, str):
        return ()
    if isinstance(value, list | tuple):
        return tuple(m for part in value for m in media_of(part))
    if not isinstance(value, Mapping):
        return ()
    kind = value.get("type")
    if kind in ("image", "image_url", "input_image", "computer_screenshot"):
        return ("image",)
    if kind in ("input_audio", "audio"):
        return ("audio",)
    if kind in ("file", "input_file"):
        return ("document",)
    if kind == "document":
        source = value.get("source")
        inner = source.get("type") if isinstance(source, Mapping) else None
        if inner == "text":
            return ()
        return media_of(source.get("content")) if inner == "content" else ("document",)  # type: ignore[union-attr]
    return media_of(value.get("content"))


def text_of(value: Any) -> str:
    """Return the readable text inside a part at any depth; media and data are left out."""
    if isinstance(value, str):
        return value
    if isinstance(value, list | tuple):
        return "\n".join(filter(None, map(text_of, value)))
    if not isinstance(value, dict | Mapping):
        return ""
    kind = value.get("type")
    if kind == "text" and isinstance(value.get("text"), str):
        return value["text"]  # type: ignore[no-any-return]
    if kind == "document":
        source = value.get("source")
        inner = source if isinstance(source, Mapping) else {}
        body = inner.get("data") if inner.get("type") == "text" else text_of(inner.get("content"))
        return "\n".join(filter(None, (value.get("title"), value.get("context"), body)))
    if isinstance(value.get("text"), str):
        return value["text"]  # type: ignore[no-any-return]
    return text_of(value.get("content"))


def picture(raw: Any) -> tuple[str, str, str] | None:
    """Return media type, base64 data and URL of an image part of any format, for conversions."""
    if not isinstance(raw, Mapping):
        return None
    source = raw.get("source")
    if isinstance(source, Mapping):  # Anthropic
        mime = str(source.get("media_type", "image/png"))
        return mime, str(source.get("data", "")), str(source.get("url", ""))
    if isinstance(raw.get("data"), str):  # pi
        return str(raw.get("mimeType", "image/png")), raw["data"], ""
    url = raw.get("image_url", raw.get("url"))
    url = url.get("url") if isinstance(url, Mapping) else url
    if not isinstance(url, str):
        return None
    if url.startswith("data:") and ";base64," in url:
        mime, _, data = url[5:].partition(";base64,")
        return mime, data, ""
    return "image/png", "", url


# -- writing ------------------------------------------------------------------------------------


def with_ids(history: History) -> History:
    """Return a history whose calls and results all carry ids, for formats that need them.

    Calls without an id get a stable one; a result that answers no named call (text actions of
    SWE-agent) becomes text of a user message.
    """
    results = history.pairs.results
    names = {at: f"call_{at[0]}_{at[1]}" for at in (*results, *history.pairs.unanswered)}
    names.update({result: names[call] for call, result in results.items()})
    messages = []
    for m, message in enumerate(history.messages):
        blocks = list(message.blocks)
        role = message.role
        for b, block in enumerate(blocks):
            if block.kind not in ("tool_use", "tool_result") or block.call_id is not None:
                continue
            if (m, b) in names:
                blocks[b] = replace(block, call_id=names[(m, b)])
            else:
                blocks[b] = replace(block, kind="text", raw=None)
                role = "user"
        changed = any(x is not y for x, y in zip(blocks, message.blocks, strict=True))
        messages.append(replace(message, role=role, blocks=tuple(blocks)) if changed else message)
    return replace(history, messages=tuple(messages))


def text_changed(block: Block) -> bool:
    """Whether the content of a block differs from what was read."""
    if not block.edits:
        return False
    return any(edit in ("mask", "empty", "truncate", "replace") for edit in block.edits)


def with_cache(part: dict[str, Any], block: Block) -> dict[str, Any]:
    """Set or remove a part's cache breakpoint as the block says; the part is changed in place."""
    if block.cache_control is not None:
        part["cache_control"] = block.cache_control
    else:
        part.pop("cache_control", None)
    return part


def fill_container(history: History, key: str, messages: list[Any]) -> Any:
    """Return the messages in the container that they were read from, its key order kept."""
    if history.shell is None:
        return messages
    return {k: (messages if k == key else v) for k, v in history.shell.items()}


def interleave(history: History, written: Sequence[tuple[Message, Any]]) -> list[Any]:
    """Return the messages of a log with its other entries where they were."""
    entries: list[Any] = []
    events = list(history.events)
    for message, raw in written:
        while events and 0 <= events[0].before <= message.index:
            entries.append(events.pop(0).raw)
        entries.append(raw)
    return entries + [event.raw for event in events]


def tool_parts(raw: Any) -> tuple[str, str, Any]:
    """Return name, description and JSON schema of a tool declaration of any format."""
    if not isinstance(raw, Mapping):
        return "", "", {}
    inner = raw.get("function") if isinstance(raw.get("function"), Mapping) else raw
    assert isinstance(inner, Mapping)
    schema = inner.get("input_schema", inner.get("parameters", {"type": "object"}))
    return str(inner.get("name", "")), str(inner.get("description", "")), schema


def _kind(value: Any) -> str:
    return "nothing" if value is None else type(value).__name__
