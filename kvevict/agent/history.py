"""History: the normal form of a message list, the same for every wire format.

How to use it (policies, manager, verbs):

* `kvevict.agent.formats.to_normal(obj, format)` reads a message list or a whole request (system,
  tools, messages) into a `History`; `from_normal(history, format)` writes it back. Whatever was not
  edited is emitted as the very object that was read, so a history without edits comes back byte for
  byte. Everything here is immutable: an edit returns a new `History` that shares the rest.
* `history.messages[m].blocks[b]` is addressed by `(m, b)`; `history.find("tool_result")` lists the
  addresses of a kind in order, `history.pairs.results` maps a call's address to its result's.
* `history.groups` are the atoms: an assistant message with its calls and ALL their results, or one
  message alone. Only cut at `history.cuts` (the first message of each group); `history.group_index`
  is the `group` array for `kvevict.slots.Slots`.
* `history.prefix` counts the system/developer messages at the front (never edited), `history.turns`
  are the user's turns, `history.first_user` and `history.last_user` index typed user messages,
  `history.open_groups` the groups with an unanswered call.
* `Message.index` is the message's place in the FULL history that was read (-1 for inserted ones):
  it survives every edit, so an edit log can name messages by it.
* Edits live in `kvevict.agent.edit`: drop_groups, mask, empty_input, truncate, drop_blocks,
  replace_span, insert, move_breakpoints; all take and return a `History`.
* Token sizes come from `kvevict.agent.tokens`; `Block.text` never holds base64. Images, documents
  and opaque data are in `Block.media` and `Block.opaque`, wherever they stand.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, Literal

import numpy as np

from kvevict.agent.pairing import Address as Address  # re-exported
from kvevict.agent.pairing import Pairs, atoms, match
from kvevict.slots import Slots

Role = Literal["system", "developer", "user", "assistant", "tool"]
Kind = Literal[
    "text",
    "image",
    "document",  # PDFs and other files that a provider renders itself
    "audio",
    "file",  # text of a file that the client pasted (Cline)
    "shell",  # a command that the user ran, with its output (pi)
    "thinking",  # readable or encrypted reasoning; signed where the provider signs it
    "redacted_thinking",
    "refusal",
    "tool_use",
    "tool_result",
    "server_tool_use",  # tools that the provider runs: call and result in one assistant message
    "server_tool_result",
    "compaction",  # the provider's own summary, often encrypted
    "reference",  # a pointer to an item that the provider stores
]

MEDIA_KINDS = frozenset({"image", "document", "audio"})
TYPED_KINDS = frozenset({"text", "image", "document", "audio", "file"})
THINKING_KINDS = frozenset({"thinking", "redacted_thinking"})

# Tools whose result can be had again by calling them once more (names as the known systems use
# them, lower case, without separators).
_RECOMPUTABLE = """
read readfile view viewfile cat open openfile grep search searchfiles searchfile searchdir findfile
glob find ls list listdir listfiles listdirectory webfetch websearch fetch bash shell terminal
execute executecommand runcommand runshellcommand exec localshell readmanyfiles codesearch
strreplaceeditor
"""
RECOMPUTABLE_TOOLS = frozenset(_RECOMPUTABLE.split())


@cache
def recoverability(kind: str, tool: str | None) -> float:
    """Return how cheaply a block can be had again, 0 (never) to 1 (call the tool once more)."""
    if kind in ("tool_result", "server_tool_result", "shell"):
        name = (tool or "bash").lower().replace("_", "").replace("-", "").replace(".", "")
        return 1.0 if name in RECOMPUTABLE_TOOLS else 0.5
    if kind in ("file", "reference"):
        return 1.0
    return 0.5 if kind == "tool_use" else 0.0


@dataclass(frozen=True)
class Block:
    """One part of a message.

    Attributes:
        kind: what it is, one of `Kind`.
        text: what the model reads as text: prose, a tool result's text, a call's arguments as JSON
            text. Never base64.
        tokens: tokens where they are known exactly, else None (a counter estimates).
        call_id: the tool call this block is, or answers; None where a format has none.
        tool: name of the tool, of a result too where its call is known.
        raw: the part as it was read; None for a block made here. Never mutated.
        media: "image", "document", "audio", once per medium inside the block at any depth.
        opaque: characters of encrypted or otherwise unreadable data.
        protected: never edited or dropped (pinned by the caller).
        recoverable: 0..1, how cheaply the content can be had again.
        cache_control: the provider's cache breakpoint on this block, where there is one.
        is_error: whether a tool result reports a failure.
        edits: what was changed here since it was read: "mask", "empty", "truncate", "replace"
            (text), "rename" (call_id), "cache" (cache_control).
    """

    kind: str
    text: str = ""
    tokens: int | None = None
    call_id: str | None = None
    tool: str | None = None
    raw: Any = None
    media: tuple[str, ...] = ()
    opaque: int = 0
    protected: bool = False
    recoverable: float = 0.0
    cache_control: Any = None
    is_error: bool = False
    edits: tuple[str, ...] = ()


@dataclass(frozen=True)
class Message:
    """One message, or one item where a format splits a message into items.

    Attributes:
        role: normalised role; "tool" where a format has a role of its own for results.
        blocks: the parts in order.
        index: place in the history that was read, -1 for a message inserted here.
        raw: the message (or log entry) as it was read; None for a message made here.
        source: the blocks as they were read; the message is unedited while `blocks is source`.
        usage: the provider's own usage object of the call that produced this message.
        status: the provider's stop reason, such as "aborted"; "" where there is none.
        batch: identity of the model response this is part of, where the format has one.
        note: "summary", "placeholder", ... for messages that a policy inserted; "" else.
    """

    role: str
    blocks: tuple[Block, ...]
    index: int = -1
    raw: Any = None
    source: tuple[Block, ...] | None = None
    usage: Mapping[str, Any] | None = None
    status: str = ""
    batch: str | None = None
    note: str = ""

    @property
    def pristine(self) -> bool:
        """Whether the message is exactly as it was read."""
        return self.source is not None and self.blocks is self.source

    @property
    def calls(self) -> tuple[Block, ...]:
        """The tool calls that expect a result."""
        return tuple(b for b in self.blocks if b.kind == "tool_use")

    @property
    def answers(self) -> tuple[Block, ...]:
        """The tool results."""
        return tuple(b for b in self.blocks if b.kind == "tool_result")

    @property
    def typed(self) -> bool:
        """Whether a user wrote (part of) this message: not a tool result, not inserted here."""
        if self.role != "user" or self.note:
            return False
        return any(b.kind in TYPED_KINDS for b in self.blocks)

    @property
    def text(self) -> str:
        """The readable text of all blocks, joined by newlines."""
        return "\n".join(b.text for b in self.blocks if b.text)

    @property
    def protected(self) -> bool:
        """Whether any block is pinned."""
        for block in self.blocks:  # noqa: SIM110  (a generator each costs 0.3 ms a call)
            if block.protected:
                return True
        return False


@dataclass(frozen=True)
class Event:
    """An entry of a log that is no message: a compaction, a change of model, ...

    Attributes:
        before: index (in the history as read) of the message that follows.
        kind: the log's own word; "compaction" for every log's compaction.
        raw: the entry as it was read.
        text: the summary of a compaction.
        tokens_before: context before a compaction, in tokens, where the log tells.
        first_kept: index of the first message that a compaction kept, where the log tells.
        usage: the provider's usage object of a call that the log keeps outside the messages.
    """

    before: int
    kind: str
    raw: Any
    text: str = ""
    tokens_before: int | None = None
    first_kept: int | None = None
    usage: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Group:
    """An atom of the history: messages `start` to `stop - 1` leave or stay together.

    Attributes:
        start: first message.
        stop: one past the last message.
        role: role of the first message.
        complete: whether every call inside has its result.
    """

    start: int
    stop: int
    role: str
    complete: bool


@dataclass(frozen=True)
class Turn:
    """A typed user message and all that followed it: messages `start` to `stop - 1`.

    The first turn also holds what stands before the first typed user message.
    """

    start: int
    stop: int


@dataclass(frozen=True)
class History:
    """A conversation: its messages, and the system prompt and tools of a whole request.

    Attributes:
        messages: the messages in order.
        format: name of the format it was read from.
        system: system prompt where a format keeps it apart from the messages.
        tools: tool declarations, as they were read.
        shell: the container as it was read (a request, a log); None for a plain message list.
        events: entries of a log that are no messages.
    """

    messages: tuple[Message, ...] = ()
    format: str = "anthropic"
    system: tuple[Block, ...] = ()
    tools: tuple[Any, ...] = ()
    shell: Any = None
    events: tuple[Event, ...] = ()

    def __len__(self) -> int:
        return len(self.messages)

    def __iter__(self) -> Iterator[Message]:
        return iter(self.messages)

    # -- structure --------------------------------------------------------------------------------

    @cached_property
    def groups(self) -> tuple[Group, ...]:
        """The atoms in order; together they cover every message."""
        starts = atoms(self.messages, self.pairs)
        waiting = {m for m, _ in self.pairs.unanswered}
        stops = [*starts[1:], len(self.messages)] if starts else []
        return tuple(
            Group(a, b, self.messages[a].role, not any(i in waiting for i in range(a, b)))
            for a, b in zip(starts, stops, strict=True)
        )

    @cached_property
    def cuts(self) -> tuple[int, ...]:
        """Message indices before which the history may be cut, in order; `len(self)` is the last.

        The idea is `manipulation_indices` of the OpenHands condenser's view.
        """
        return (*(g.start for g in self.groups), len(self.messages))

    @cached_property
    def group_index(self) -> np.ndarray:
        """Index of each message's group, int64 `[messages]`."""
        lengths = [g.stop - g.start for g in self.groups]
        return np.repeat(np.arange(len(lengths), dtype=np.int64), lengths)

    def group_of(self, message: int) -> Group:
        """Return the group that holds a message."""
        return self.groups[int(self.group_index[message])]

    @cached_property
    def pairs(self) -> Pairs:
        """Calls and their results: `.results`, `.unanswered`, `.orphans`, by address."""
        return match(self.messages)

    @property
    def open_groups(self) -> tuple[Group, ...]:
        """Groups in which a call waits for its result."""
        return tuple(g for g in self.groups if not g.complete)

    def find(self, *kinds: str) -> list[Address]:
        """Return the addresses of all blocks of these kinds, in order."""
        if len(kinds) == 1:
            return list(self.by_kind.get(kinds[0], ()))
        return sorted(at for kind in {*kinds} for at in self.by_kind.get(kind, ()))

    @cached_property
    def by_kind(self) -> dict[str, list[Address]]:
        """Addresses by kind; every policy and the validator ask for several kinds."""
        found: dict[str, list[Address]] = {}
        for m, message in enumerate(self.messages):
            for b, block in enumerate(message.blocks):
                at = (m, b)
                if block.kind in found:
                    found[block.kind].append(at)
                else:
                    found[block.kind] = [at]
        return found

    def block(self, at: Address) -> Block:
        """Return the block at an address."""
        return self.messages[at[0]].blocks[at[1]]

    # -- roots ------------------------------------------------------------------------------------

    @cached_property
    def prefix(self) -> int:
        """Number of system and developer messages at the front."""
        for i, message in enumerate(self.messages):
            if message.role not in ("system", "developer"):
                return i
        return len(self.messages)

    @cached_property
    def users(self) -> tuple[int, ...]:
        """Indices of the typed user messages."""
        return tuple(i for i, m in enumerate(self.messages) if m.typed)

    @property
    def first_user(self) -> int | None:
        """Index of the first typed user message."""
        return self.users[0] if self.users else None

    @property
    def last_user(self) -> int | None:
        """Index of the last typed user message."""
        return self.users[-1] if self.users else None

    @cached_property
    def turns(self) -> tuple[Turn, ...]:
        """The user's turns in order; a turn begins at a group's first message."""
        starts = sorted({self.group_of(i).start for i in self.users})
        if not self.messages:
            return ()
        starts = [0, *starts[1:]] if starts else [0]
        return tuple(
            Turn(a, b) for a, b in zip(starts, [*starts[1:], len(self.messages)], strict=True)
        )

    @cached_property
    def pinned(self) -> frozenset[int]:
        """Messages with a protected block."""
        return frozenset(i for i, m in enumerate(self.messages) if m.protected)

    @cached_property
    def instructions(self) -> frozenset[int]:
        """System and developer messages, wherever they stand."""
        return frozenset(
            i for i, m in enumerate(self.messages) if m.role in ("system", "developer")
        )

    @cached_property
    def roots(self) -> frozenset[int]:
        """Messages that no policy may drop: system prefix, first and last user message, pins.

        Of open groups only the last counts, and only while nothing follows it.
        """
        keep = set(range(self.prefix))
        keep.update(i for i in (self.first_user, self.last_user) if i is not None)
        keep |= self.pinned
        if self.groups and not self.groups[-1].complete:
            keep.update(range(self.groups[-1].start, self.groups[-1].stop))
        return frozenset(keep)

    def slots(
        self,
        sizes: np.ndarray,
        protected: np.ndarray | None = None,
        score: np.ndarray | None = None,
        lifetime: np.ndarray | None = None,
    ) -> Slots:
        """Return the history as slots, one a message, for `Policy.keep`.

        Args:
            sizes: int `[messages]`, tokens of each message.
            protected: bool `[messages]`; None means `roots`.
            score: float `[messages]`, importance; None means 0.
            lifetime: int `[messages]`, 0 turn, 1 session, 2 for ever; None means 1.
        """
        count = len(self.messages)
        if protected is None:
            protected = np.zeros(count, dtype=bool)
            protected[sorted(self.roots)] = True
        recoverable = [min((b.recoverable for b in m.blocks), default=0.0) for m in self.messages]
        return Slots(
            position=np.arange(count, dtype=np.int64),
            size=np.asarray(sizes, dtype=np.int64),
            group=self.group_index,
            protected=protected,
            score=score,
            recoverable=np.asarray(recoverable, dtype=np.float32),
            lifetime=lifetime,
        )
