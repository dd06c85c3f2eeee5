"""Token counting: the provider's last count as an anchor, an estimate for what came after it.

Three layers. `usage_of` reads any provider's own usage object. A `TokenCounter` estimates blocks
and messages without any provider: characters (3.0 a token, measured on two real coding sessions at
2.9 to 3.05; the usual 4.0 counts a quarter too little and so triggers too late) or a Hugging Face
tokenizer. `Anchored` joins them: the size of the next request is the provider's count of the last
call plus the estimate of the messages behind it; an edit makes the anchor stale.

Media are counted by a configured charge wherever they stand, never as base64 text.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Protocol, runtime_checkable

import numpy as np

from kvevict.agent.history import Block, History, Message
from kvevict.errors import HistoryError

CHARS_PER_TOKEN = 3.0
MEDIA_TOKENS = {"image": 1_500, "document": 3_000, "audio": 1_000}


@runtime_checkable
class TokenCounter(Protocol):
    """Estimates tokens without a provider; deterministic, the same object the same number."""

    def message(self, message: Message) -> int:
        """Return the tokens of one message."""

    def text(self, text: str) -> int:
        """Return the tokens of a text alone."""


@dataclass(frozen=True)
class Charges:
    """What is charged for content that is no text, in tokens.

    Args:
        image: tokens of one image (Anthropic: width x height / 750, up to about 1,600).
        document: tokens of one document.
        audio: tokens of one recording.
        opaque_chars: characters of encrypted data a token.
        message: tokens of overhead per message.
        block: tokens of overhead per call or result.
    """

    image: int = MEDIA_TOKENS["image"]
    document: int = MEDIA_TOKENS["document"]
    audio: int = MEDIA_TOKENS["audio"]
    opaque_chars: float = 4.0
    message: int = 0
    block: int = 0

    def of(self, block: Block) -> int:
        """Return the charge of a block for everything but its text."""
        tokens = self.block if block.call_id is not None else 0
        for kind in block.media:
            tokens += getattr(self, kind, self.document)
        return tokens + math.ceil(block.opaque / self.opaque_chars)


@dataclass(frozen=True)
class CharCounter:
    """Counts characters; the default.

    Args:
        chars_per_token: characters a token.
        charges: what is charged for media, opaque data and overheads.
    """

    chars_per_token: float = CHARS_PER_TOKEN
    charges: Charges = field(default_factory=Charges)

    def __post_init__(self) -> None:
        if not self.chars_per_token > 0:
            raise ValueError(f"chars_per_token={self.chars_per_token}: give more than 0")

    def text(self, text: str) -> int:
        """Return the tokens of a text, rounded up."""
        return math.ceil(len(text) / self.chars_per_token)

    def message(self, message: Message) -> int:
        """Return the tokens of one message: exact ones where blocks have them, else estimated."""
        chars, tokens = 0, self.charges.message
        for block in message.blocks:
            if block.tokens is not None:
                tokens += block.tokens
                continue
            chars += len(block.text)
            if block.kind == "tool_use":
                chars += len(block.tool or "")
            if block.media or block.opaque or self.charges.block:
                tokens += self.charges.of(block)
        return tokens + math.ceil(chars / self.chars_per_token)


class TokenizerCounter:
    """Counts with a tokenizer: a `tokenizers.Tokenizer`, a transformers one, or any `encode`.

    Args:
        tokenizer: an object with `encode(text)` that returns ids, or an object with `.ids`.
        charges: what is charged for media, opaque data and overheads; 4 tokens a message stand
            for the chat template's role markers.
    """

    def __init__(self, tokenizer: Any, charges: Charges | None = None) -> None:
        self.charges = charges or Charges(message=4)
        self._tokenizer = tokenizer
        self._count = lru_cache(maxsize=65_536)(self._encode)

    @classmethod
    def from_path(cls, path: str) -> TokenizerCounter:
        """Load a `tokenizer.json` (or a folder that holds one); torch is not needed.

        Raises:
            HistoryError: no such file.
        """
        from pathlib import Path

        from tokenizers import Tokenizer

        file = Path(path) / "tokenizer.json" if Path(path).is_dir() else Path(path)
        if not file.is_file():
            raise HistoryError(f"no tokenizer at {file}: give a tokenizer.json or its folder")
        return cls(Tokenizer.from_file(str(file)))

    def _encode(self, text: str) -> int:
        try:
            ids = self._tokenizer.encode(text)
        except UnicodeEncodeError:  # lone surrogates
            ids = self._tokenizer.encode(text.encode("utf-8", "replace").decode())
        return len(getattr(ids, "ids", ids))

    def text(self, text: str) -> int:
        """Return the tokens of a text."""
        return self._count(text) if text else 0

    def message(self, message: Message) -> int:
        """Return the tokens of one message."""
        tokens = self.charges.message
        for block in message.blocks:
            if block.tokens is not None:
                tokens += block.tokens
                continue
            tokens += self.text(block.text) + self.charges.of(block)
            if block.kind == "tool_use":
                tokens += self.text(block.tool or "")
        return tokens


def make_counter(spec: str | float | TokenCounter | None = None) -> TokenCounter:
    """Return a counter: None or "chars", "chars:3.5", "hf:PATH", a number, or a counter as it is.

    Raises:
        ValueError: a spec of another kind.
    """
    if spec is None or spec == "chars":
        return CharCounter()
    if isinstance(spec, int | float) and not isinstance(spec, bool):
        return CharCounter(float(spec))
    if isinstance(spec, str):
        kind, _, value = spec.partition(":")
        if kind == "chars":
            return CharCounter(float(value))
        if kind == "hf" and value:
            return TokenizerCounter.from_path(value)
        raise ValueError(f"counter {spec!r}: give chars, chars:3.0 or hf:PATH")
    if isinstance(spec, TokenCounter):
        return spec
    raise ValueError(f"counter {spec!r} has no message() and text()")


def sizes(history: History, counter: TokenCounter) -> np.ndarray:
    """Return the estimated tokens of each message, int64 `[messages]`."""
    return np.fromiter(
        (counter.message(m) for m in history.messages), dtype=np.int64, count=len(history)
    )


def overhead(history: History, counter: TokenCounter) -> int:
    """Return the estimated tokens of a request's own system prompt and tool declarations."""
    system = counter.message(Message("system", history.system)) if history.system else 0
    return system + sum(
        counter.text(json.dumps(tool, ensure_ascii=False, separators=(",", ":")))
        for tool in history.tools
    )


# -- the provider's own count ---------------------------------------------------------------------


@dataclass(frozen=True)
class Usage:
    """Tokens of one call, as the provider counted them.

    Attributes:
        fresh: input tokens that were neither read from nor written to a prompt cache.
        cache_read: input tokens read from the cache.
        cache_write: input tokens written to the cache.
        output: tokens of the answer.
    """

    fresh: int
    cache_read: int
    cache_write: int
    output: int

    @property
    def input(self) -> int:
        """All input tokens: the size of the request."""
        return self.fresh + self.cache_read + self.cache_write

    @property
    def total(self) -> int:
        """Request and answer: the size of the context after the call."""
        return self.input + self.output


def usage_of(usage: Mapping[str, Any] | Usage | None) -> Usage | None:
    """Read a provider's usage object; None where it counts nothing (aborted calls).

    Anthropic (input + cache read + cache creation), OpenAI Chat and Responses (their totals
    already include cached tokens), Gemini, and the logs of pi and Cline.

    Raises:
        HistoryError: an object of another shape, or one with negative or non-integer counts.
    """
    if usage is None or isinstance(usage, Usage):
        return usage
    if not isinstance(usage, Mapping):
        raise HistoryError(f"usage: expected an object, got {type(usage).__name__}", path="usage")

    def count(*path: str) -> int:
        value: Any = usage
        for key in path:
            value = value.get(key) if isinstance(value, Mapping) else None
        if value is None:
            return 0
        if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
            raise HistoryError(f"usage.{'.'.join(path)}: {value!r} is no count", path="usage")
        return int(value)

    def inclusive(total: str, cached: int, output: str) -> Usage:
        cached = min(cached, count(total))
        return Usage(count(total) - cached, cached, 0, count(output))

    if "prompt_tokens" in usage:  # Chat Completions and what speaks it
        cached = count("prompt_tokens_details", "cached_tokens")
        found = inclusive("prompt_tokens", cached, "completion_tokens")
    elif "input_tokens_details" in usage:  # Responses
        cached = count("input_tokens_details", "cached_tokens")
        found = inclusive("input_tokens", cached, "output_tokens")
    elif "input_tokens" in usage:  # Anthropic
        found = Usage(
            count("input_tokens"),
            count("cache_read_input_tokens"),
            count("cache_creation_input_tokens"),
            count("output_tokens"),
        )
    elif "promptTokenCount" in usage:  # Gemini
        found = inclusive(
            "promptTokenCount", count("cachedContentTokenCount"), "candidatesTokenCount"
        )
    elif "inputTokens" in usage:  # Cline: its input already includes what was cached
        cached = count("cacheReadTokens")
        found = inclusive("inputTokens", cached, "outputTokens")
    elif "input" in usage:  # pi
        found = Usage(count("input"), count("cacheRead"), count("cacheWrite"), count("output"))
    else:
        raise HistoryError(
            f"usage: no known counts among {', '.join(map(str, usage)) or 'no keys'}", path="usage"
        )
    return found if found.input else None


# -- anchored -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Anchor:
    """The provider's count of a request and its answer, and what they were.

    Attributes:
        tokens: the provider's count, less what edits freed since (estimated).
        messages: messages that it covers, from the first.
        estimate: this counter's own estimate of the same (overhead included).
        stale: whether an edit changed what it covers.
    """

    tokens: int
    messages: int
    estimate: int
    stale: bool = False


class Anchored:
    """Predicts the size of the next request from the last call's usage; calibrates itself.

    The estimate behind an anchor is multiplied by `ratio`, tokens counted per token estimated. It
    starts at 1 and moves with the evidence of many calls (weight `prior` tokens for 1): single
    calls mislead, their overheads are large against their text.

    Args:
        counter: estimates without a provider.
        prior: tokens of evidence that the starting ratio of 1 counts for; None never calibrates.
    """

    def __init__(self, counter: TokenCounter | None = None, prior: int | None = 50_000) -> None:
        self.counter = make_counter(counter)
        self.anchor: Anchor | None = None
        self._prior = prior
        self._true = 0
        self._estimated = 0

    @property
    def ratio(self) -> float:
        """Tokens counted by the provider per token estimated, 0.5 to 2."""
        if self._prior is None:
            return 1.0
        return min(2.0, max(0.5, (self._prior + self._true) / (self._prior + self._estimated)))

    def observe(self, history: History, usage: Mapping[str, Any] | Usage | None) -> None:
        """Learn the usage of the call that wrote the last assistant message of a history.

        Args:
            history: what was sent, its answer included (messages may follow the answer).
            usage: the provider's own object; None or an empty count changes nothing.
        """
        found = usage_of(usage)
        last = max((i for i, m in enumerate(history.messages) if m.role == "assistant"), default=-1)
        if found is None or last < 0:
            return
        self.observe_at(history.messages, last + 1, found, overhead(history, self.counter))

    def observe_at(
        self, messages: Sequence[Message], stop: int, usage: Usage, fixed: int = 0
    ) -> None:
        """Learn the usage of the call whose request and answer are `messages[:stop]`."""
        old = self.anchor
        if old is not None and not old.stale and 0 < old.messages <= stop:
            behind = self._estimate(messages[old.messages : stop])
            estimate = old.estimate + behind
            if usage.total > old.tokens and behind:
                self._true += usage.total - old.tokens
                self._estimated += behind
        else:
            estimate = fixed + self._estimate(messages[:stop])
        self.anchor = Anchor(usage.total, stop, estimate)

    def predict(self, messages: Sequence[Message], fixed: int = 0) -> int:
        """Return the predicted tokens of a request of these messages.

        Args:
            messages: the request; where an anchor stands, its first messages are those it covers.
            fixed: estimated tokens of system prompt and tools, used where there is no anchor.
        """
        anchor = self.anchor
        if anchor is None or anchor.messages > len(messages):
            return round((fixed + self._estimate(messages)) * self.ratio)
        return anchor.tokens + round(self._estimate(messages[anchor.messages :]) * self.ratio)

    def edited(self, before: Sequence[Message], after: Sequence[Message]) -> None:
        """Learn that a history was edited: the anchor is stale and loses what was freed."""
        anchor = self.anchor
        if anchor is None:
            return
        freed = self._estimate(before) - self._estimate(after)
        covered = len(after) - max(0, len(before) - anchor.messages)
        self.anchor = Anchor(
            max(0, anchor.tokens - round(freed * self.ratio)),
            max(0, covered),
            max(0, anchor.estimate - freed),
            stale=True,
        )

    def reset(self) -> None:
        """Forget the anchor (a compaction elsewhere, another model); the ratio stays."""
        self.anchor = None

    def _estimate(self, messages: Sequence[Message]) -> int:
        many = getattr(self.counter, "messages", None)
        return int(many(messages)) if many else sum(map(self.counter.message, messages))
