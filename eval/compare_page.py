"""compare_page: the history of one turn under two policies side by side, as part of a report page.

`kvevict compare` leaves view.json beside its result: the text of every token, what each token
policy kept by step, layer and head, and what each message policy did with every message.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import math
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup

from kvevict.errors import KvevictError
from kvevict.eval.compare_script import SCRIPT
from kvevict.eval.results import read_json

SCHEMA = 1
VIEW = "view.json"
STATES = ("kept", "masked", "summarised", "hidden")
_SHAPE: dict[str, Any] = {
    "title": str,
    "tokens": [str],
    "spans": [[int]],
    "messages": [{"role": str, "kind": str, "text": str, "tokens": int}],
    "layers": int,
    "heads": int,
    "steps": [{"tokens": int, "messages": int}],
    "token_rows": [
        {
            "policy": str,
            "budget": float,
            "setting": str,
            "budget_tokens": int,
            "head": int,
            "recent": [int],
            "maps": str,
        }
    ],
    "message_rows": [{"policy": str, "budget": float, "setting": str, "states": [[str]]}],
}
# Inside a script element only these can end it, open a comment or, in old parsers, end a line.
_UNSAFE = {ord(c): f"\\u{ord(c):04x}" for c in "<>&\u2028\u2029"}


def pack(maps: Sequence[np.ndarray]) -> str:
    """Return what is kept at every step as text for view.json.

    Args:
        maps: bool `[layers, heads, tokens]` for each step.
    """
    bits = [np.packbits(np.asarray(m, dtype=bool), axis=-1).tobytes() for m in maps]
    return base64.b64encode(zlib.compress(b"".join(bits))).decode()


def unpack(text: str, layers: int, heads: int, tokens: Sequence[int]) -> list[np.ndarray]:
    """Return the maps that `pack` was given.

    Args:
        text: packed.
        layers: of the model.
        heads: KV heads of a layer.
        tokens: length of each step.

    Raises:
        ValueError: text that does not hold maps of these sizes.
    """
    shapes = [(layers, heads, -(-n // 8)) for n in tokens]
    sizes = [math.prod(s) for s in shapes]
    try:
        # One byte more than wanted shows that there is more, without unpacking all of it.
        packed = base64.b64decode(text, validate=True)
        bits = zlib.decompressobj().decompress(packed, sum(sizes) + 1)
    except (binascii.Error, zlib.error) as error:
        raise ValueError(f"maps cannot be unpacked: {error}") from error
    if len(bits) != sum(sizes):
        raise ValueError(f"maps do not hold the {sum(sizes)} bytes that the steps need")
    flat = np.split(np.frombuffer(bits, dtype=np.uint8), np.cumsum(sizes)[:-1])
    return [
        np.unpackbits(part.reshape(shape), axis=-1, count=n).astype(bool)
        for part, shape, n in zip(flat, shapes, tokens, strict=True)
    ]


def load_view(folder: Path) -> dict[str, Any] | None:
    """Return the view beside a result, or None where there is none.

    Raises:
        KvevictError: a view that is damaged or of another schema.
    """
    path = folder / VIEW
    if not path.is_file():
        return None
    view = read_json(path)
    remedy = "run `kvevict compare` again, or move the file away for a page without the two panes"
    schema = view.get("schema") if isinstance(view, dict) else None
    if type(schema) is not int or schema != SCHEMA:
        raise KvevictError(
            f"{path} has schema {schema!r} and this kvevict reads schema {SCHEMA}: {remedy}"
        )
    try:
        _check(view)
    except ValueError as error:
        raise KvevictError(f"{path} is damaged: {error}; {remedy}") from error
    return view  # type: ignore[no-any-return]


def embedded(view: dict[str, Any]) -> Markup:
    """Return a view as JSON that may stand inside a script element."""
    text = json.dumps(view, allow_nan=False, separators=(",", ":"))
    return Markup(text.translate(_UNSAFE))


def script_source() -> str:
    """Return the source that a Content-Security-Policy names to allow the script of the panes."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()}'"


def _check(view: dict[str, Any]) -> None:
    """Check shape and sizes, so that the script can rely on them.

    Raises:
        ValueError: saying what is wrong where.
    """
    _fit(view, _SHAPE, "view")
    if not view["token_rows"] and not view["message_rows"]:
        raise ValueError("there is no row to show")
    _check_spans(view["spans"], len(view["tokens"]), len(view["messages"]))
    lengths = [s["tokens"] for s in view["steps"]]
    counts = [s["messages"] for s in view["steps"]]
    for name, values, most in (
        ("tokens", lengths, len(view["tokens"])),
        ("messages", counts, len(view["messages"])),
    ):
        if not values or sorted(values) != values or values[0] < 0 or values[-1] > most:
            raise ValueError(f"the steps' {name} do not ascend to at most {most}")
    if lengths[-1] != len(view["tokens"]):
        raise ValueError(f"the last step has {lengths[-1]} of {len(view['tokens'])} tokens")
    if view["token_rows"] and min(view["layers"], view["heads"]) < 1:
        raise ValueError("token rows need layers and heads")
    for row in view["token_rows"]:
        if len(row["recent"]) != len(lengths):
            raise ValueError(f"{row['policy']!r} has {len(row['recent'])} values of recent")
        unpack(row["maps"], view["layers"], view["heads"], lengths)
    for row in view["message_rows"]:
        if [len(s) for s in row["states"]] != counts:
            raise ValueError(f"{row['policy']!r} has not one state for each message of each step")
        unknown = {s for states in row["states"] for s in states} - set(STATES)
        if unknown:
            raise ValueError(f"{row['policy']!r} has the unknown state {sorted(unknown)[0]!r}")


def _check_spans(spans: list[list[int]], tokens: int, messages: int) -> None:
    at, last = 0, 0
    for span in spans:
        if len(span) != 3:
            raise ValueError(f"span {span} is not start, stop, message")
        start, stop, message = span
        if not (at <= start <= stop <= tokens and last <= message < messages):
            raise ValueError(f"span {span} is out of order or out of range")
        at, last = stop, message


def _fit(value: Any, shape: Any, where: str) -> None:
    """Check that JSON has the types of a shape.

    Raises:
        ValueError: naming the place that does not.
    """
    if isinstance(shape, dict):
        if not isinstance(value, dict):
            raise ValueError(f"{where} is no object")
        for key, inner in shape.items():
            if key not in value:
                raise ValueError(f"{where} has no {key!r}")
            _fit(value[key], inner, f"{where}.{key}")
    elif isinstance(shape, list):
        if not isinstance(value, list):
            raise ValueError(f"{where} is no list")
        for index, item in enumerate(value):
            _fit(item, shape[0], f"{where}[{index}]")
    else:
        kinds = (int, float) if shape is float else (shape,)
        if type(value) not in kinds or (shape is float and not math.isfinite(value)):
            raise ValueError(f"{where} is no {shape.__name__}")
