"""texts: what evaluations read, as tokens; results say which text, how many, BOS or not."""

import hashlib
import pydoc_data.topics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvevict.console import read_text
from kvevict.errors import KvevictError

BUILTIN = "pydoc_data.topics"


@dataclass(frozen=True)
class Text:
    """A text and how a result names it.

    Attributes:
        name: file name without its folder, or `pydoc_data.topics`.
        text: the text itself.
    """

    name: str
    text: str

    def facts(self) -> dict[str, Any]:
        """Return name, length and hash, so that two results can be told to be of one text."""
        digest = hashlib.sha256(self.text.encode()).hexdigest()
        return {"name": self.name, "characters": len(self.text), "sha256": digest}


@dataclass(frozen=True)
class Tokens:
    """A text's tokens.

    Attributes:
        ids: int64 `[N]`, on the CPU.
        bos: whether the first is a BOS token, which is fed and never scored.
        source: which text.
    """

    ids: Tensor
    bos: bool
    source: dict[str, Any]


def builtin_text() -> str:
    """Return CPython's own help topics: English, some 700 kB, in every Python."""
    topics = pydoc_data.topics.topics
    return "\n\n".join(topics[name] for name in sorted(topics))


def read(path: Path | None) -> Text:
    """Read a text file, or the embedded text for None.

    Raises:
        KvevictError: a file that is missing, empty or not UTF-8.
    """
    if path is None:
        return Text(BUILTIN, builtin_text())
    return Text(path.name, read_text(path, "text"))


def encode(
    tokenizer: Any, text: Text, max_tokens: int | None = None, bos: bool | None = None
) -> Tokens:
    """Turn a text into tokens.

    Args:
        tokenizer: of the model.
        text: what to read.
        max_tokens: cut after so many, BOS included.
        bos: whether to put the tokenizer's BOS first; None does as the tokenizer itself would.

    Raises:
        KvevictError: BOS is wanted and the tokenizer has none, or the text has too few tokens.
    """
    wanted = adds_bos(tokenizer) if bos is None else bos
    if wanted and tokenizer.bos_token_id is None:
        raise KvevictError("the tokenizer has no BOS token: leave --bos out")
    first = [tokenizer.bos_token_id] if wanted else []
    limit = None if max_tokens is None else max_tokens - len(first)
    ids = first + plain_ids(tokenizer, text.text)[:limit]
    if len(ids) < 2:
        raise KvevictError(f"text {text.name} gives {len(ids)} tokens: at least 2 are needed")
    return Tokens(torch.tensor(ids), wanted, text.facts())


def plain_ids(tokenizer: Any, text: str) -> list[int]:
    """Return a text's token ids, nothing added."""
    ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
    return ids


def adds_bos(tokenizer: Any) -> bool:
    """Whether the tokenizer by itself puts a BOS token before a text."""
    if tokenizer.bos_token_id is None:
        return False
    ids = tokenizer("a", verbose=False).input_ids
    return bool(ids) and ids[0] == tokenizer.bos_token_id


def split_ids(tokenizer: Any, before: str, after: str) -> tuple[Tensor, Tensor]:
    """Return the tokens of two texts that follow each other, as the two together are cut.

    A token that spans the border belongs to the second, so `before` may end in a space.

    Returns:
        int64 `[N]` and `[M]`.
    """
    head, whole = plain_ids(tokenizer, before), plain_ids(tokenizer, before + after)
    same = 0
    while same < min(len(head), len(whole)) and head[same] == whole[same]:
        same += 1
    return torch.tensor(whole[:same], dtype=torch.int64), torch.tensor(
        whole[same:], dtype=torch.int64
    )


def joined(
    tokenizer: Any,
    texts: list[Text],
    max_tokens: int | None = None,
    bos: bool | None = None,
    repeat: bool = False,
) -> Tokens:
    """Return several texts as one stream.

    Args:
        tokenizer: of the model.
        texts: at least one; a blank line between two.
        max_tokens: length wanted, BOS included.
        bos: see `encode`.
        repeat: start over at the end until `max_tokens` are there.

    Raises:
        KvevictError: the texts are shorter than `max_tokens` and may not repeat.
    """
    whole = Text(" + ".join(t.name for t in texts), "\n\n".join(t.text for t in texts))
    found = encode(tokenizer, whole, max_tokens, bos)
    if max_tokens is None or len(found.ids) >= max_tokens:
        return found
    if not repeat:
        raise KvevictError(
            f"text {whole.name} has {len(found.ids):,} tokens and {max_tokens:,} are wanted: give "
            f"more texts, --repeat, or --max-tokens {len(found.ids)}"
        )
    body = found.ids[int(found.bos) :]
    times = -(-(max_tokens - int(found.bos)) // len(body))
    ids = torch.cat([found.ids[: int(found.bos)], body.repeat(times)])[:max_tokens]
    return Tokens(ids, found.bos, {**found.source, "repeated": times})
