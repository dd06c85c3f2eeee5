"""Graphemes: where a text may be cut without breaking a character that a reader sees.

A cut never falls inside a surrogate pair, a base letter with its marks, an emoji sequence, a flag,
a Hangul syllable or CR LF. The rules are those of Unicode's UAX #29, read conservatively: every
boundary found here is a boundary there; some boundaries there are not used here.
"""

from __future__ import annotations

import unicodedata

_JOINER = "\u200d"
_EXTENDING = ("Mn", "Me", "Mc", "Cf", "Cs")


def is_boundary(text: str, at: int) -> bool:
    """Whether `text` may be cut before the character at index `at`."""
    if at <= 0 or at >= len(text):
        return True
    before, after = text[at - 1], text[at]
    if before < "\u0300" and after < "\u0300":
        # Latin: only CR LF, soft hyphens and other format characters hold together.
        return not (before == "\r" and after == "\n") and after != "\u00ad" != before
    if after == _JOINER or before == _JOINER:
        return False
    if unicodedata.category(after) in _EXTENDING or unicodedata.category(before) in ("Cf", "Cs"):
        return False
    if _is_linker(before):  # Indic conjuncts: a virama joins the next letter
        return False
    if "\U0001f3fb" <= after <= "\U0001f3ff":  # skin tones
        return False
    if _is_flag(before) and _is_flag(after):
        start = at - 1
        while start > 0 and _is_flag(text[start - 1]):
            start -= 1
        return (at - start) % 2 == 0
    return not (_is_hangul(before) and _is_hangul(after)) and not _joins_always(before, after)


def _is_flag(char: str) -> bool:
    return "\U0001f1e6" <= char <= "\U0001f1ff"


def _is_linker(char: str) -> bool:
    return unicodedata.combining(char) == 9


def _is_hangul(char: str) -> bool:
    return (
        "\u1100" <= char <= "\u11ff" or "\ua960" <= char <= "\ua97f" or "\uac00" <= char <= "\ud7ff"
    )


def _joins_always(before: str, after: str) -> bool:
    """Prepended marks and vowels that some scripts write as letters."""
    return (
        unicodedata.category(before) == "Lo" and unicodedata.name(before, "").find("REPHA") >= 0
    ) or after in "\u0e33\u0eb3\uff9e\uff9f"


def cut_before(text: str, at: int) -> int:
    """Return the last place at or before `at` where the text may be cut."""
    at = max(0, min(at, len(text)))
    while not is_boundary(text, at):
        at -= 1
    return at


def cut_after(text: str, at: int) -> int:
    """Return the first place at or after `at` where the text may be cut."""
    at = max(0, min(at, len(text)))
    while not is_boundary(text, at):
        at += 1
    return at


def shorten(text: str, limit: int, marker: str = "…", keep: str = "head") -> str:
    """Shorten a text to at most `limit` characters, marker included, between graphemes.

    Args:
        text: any text.
        limit: most characters of the result; a text that fits is returned unchanged.
        marker: what stands for the part that went.
        keep: "head", "tail" or "both" ends.

    Raises:
        ValueError: a limit too small for the marker, or an unknown `keep`.
    """
    if keep not in ("head", "tail", "both"):
        raise ValueError(f"keep={keep!r}: give head, tail or both")
    if len(text) <= limit:
        return text
    room = limit - len(marker)
    if room < 0:
        raise ValueError(f"limit={limit} is too small for the marker of {len(marker)} characters")
    head = {"head": room, "tail": 0, "both": room - room // 2}[keep]
    first = cut_before(text, head)
    last = cut_after(text, len(text) - (room - head))
    return text[:first] + marker + text[last:]


def encodable(text: str) -> bool:
    """Whether a text can be sent as UTF-8 (it has no lone surrogates)."""
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
