"""needle_tasks: retrieval tasks in the manner of RULER, generated here, deterministic, offline.

Source: Hsieh et al. 2024 (arXiv:2404.06654), section 3: needles in a haystack (single, multi-key,
multi-value), variable tracking, common and frequent words; passkey is Mohtashami and Jaggi 2023
(arXiv:2305.16300). Differs: words and haystacks are our own, and answers are short, since a small
model is to be measured by the loss of the answer.

Every task is a function from a seeded generator, a depth and a filler count to an `Item`.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

NOISE = (
    "The grass is green.",
    "The sky is blue.",
    "The sun is yellow.",
    "Here we go.",
    "There and back again.",
)
_WORDS = """
amber anchor apple arrow basket beacon blanket bottle branch breeze bridge button camera canal
candle carpet castle cedar chapel cherry circle clover coffee copper corner cotton cradle
crystal daisy desert dragon eagle engine falcon feather fiddle flower forest garden ginger
glacier goblet hammer harbor hazel helmet honey hunter island ivory jacket jasper jungle kettle
kitten ladder lantern lemon lily linen lizard magnet maple marble meadow mirror monkey mountain
needle nickel ocean olive orange orchid oyster paddle palace panther pebble pepper pillow planet
pocket poplar quartz rabbit raven ribbon river rocket saddle sailor salmon silver spider spoon
spruce stable statue summer sunset temple thistle ticket timber tulip turtle valley velvet
violin walnut willow window winter wizard yellow zebra
"""
WORDS = tuple(_WORDS.split())


@dataclass(frozen=True)
class Item:
    """One question about one context; the rows of kvpress's data sets have the same parts.

    Attributes:
        context: what is read and compressed.
        question: asked after it (and before it, when the cache may know the question).
        answer_prefix: opening of the answer.
        answer: scored teacher-forced, in this form.
        answers: parts that a generated answer must contain.
        max_new_tokens: for generation.
        relevant: the context without what the question does not need, or "".
        task: name.
    """

    context: str
    question: str
    answer_prefix: str
    answer: str
    answers: tuple[str, ...]
    max_new_tokens: int = 16
    relevant: str = ""
    task: str = ""


Filler = Callable[[int], list[str]]
Maker = Callable[[random.Random, float, list[str]], Item]


def noise(count: int) -> list[str]:
    """Return `count` sentences of noise."""
    return [NOISE[i % len(NOISE)] for i in range(count)]


def prose(sentences: list[str]) -> Filler:
    """Return a filler that takes sentences from a text, round and round."""
    return lambda count: [sentences[i % len(sentences)] for i in range(count)]


def _hide(filler: list[str], needles: list[str], places: list[float]) -> str:
    """Put needles between the sentences of a haystack, at shares of its length."""
    at = sorted(
        (
            (round(p * len(filler)), i, n)
            for i, (p, n) in enumerate(zip(places, needles, strict=True))
        ),
        reverse=True,
    )
    lines = list(filler)
    for place, _, text in at:
        lines.insert(place, text)
    return " ".join(lines)


def _number(rng: random.Random) -> str:
    return str(rng.randrange(10_000, 100_000))


def passkey(rng: random.Random, depth: float, filler: list[str]) -> Item:
    """One pass key of five digits."""
    key = _number(rng)
    needle = f"The pass key is {key}. Remember it. {key} is the pass key."
    head = "There is an important fact hidden inside a lot of irrelevant text. Find it. "
    return Item(
        head + _hide(filler, [needle], [depth]),
        "\nWhat is the pass key?",
        "\nThe pass key is ",
        key,
        (key,),
        relevant=head + needle,
    )


def single(rng: random.Random, depth: float, filler: list[str]) -> Item:
    """One needle with a key."""
    return _keyed(rng, depth, filler, others=0)


def multikey(rng: random.Random, depth: float, filler: list[str]) -> Item:
    """One needle asked for among three others with other keys."""
    return _keyed(rng, depth, filler, others=3)


def distractor(rng: random.Random, depth: float, filler: list[str]) -> Item:
    """One needle among eight near-identical ones: the same noun, other colours."""
    noun = rng.choice(WORDS)
    colours = ["red", "blue", "green", "black", "white", "brown", "pink", "grey", "purple"]
    rng.shuffle(colours)
    return _keyed(rng, depth, filler, others=8, keys=[f"{c} {noun}" for c in colours])


def _keyed(
    rng: random.Random,
    depth: float,
    filler: list[str],
    others: int,
    keys: list[str] | None = None,
) -> Item:
    keys = keys or rng.sample(WORDS, others + 1)
    values = [_number(rng) for _ in keys]
    needles = [f"The special number of {k} is {v}." for k, v in zip(keys, values, strict=True)]
    places = [depth, *(rng.random() for _ in range(others))]
    head = "Some special numbers are hidden in the following text. Remember them. "
    return Item(
        head + _hide(filler, needles, places),
        f"\nWhat is the special number of {keys[0]}?",
        f"\nThe special number of {keys[0]} is ",
        values[0],
        (values[0],),
        relevant=head + needles[0],
    )


def multivalue(rng: random.Random, depth: float, filler: list[str]) -> Item:
    """Three numbers of one key, all asked for."""
    key = rng.choice(WORDS)
    values = [_number(rng) for _ in range(3)]
    needles = [f"One of the special numbers of {key} is {v}." for v in values]
    spread = [depth, (depth + 1 / 3) % 1, (depth + 2 / 3) % 1]
    order = sorted(range(3), key=lambda i: spread[i])
    said = [values[i] for i in order]
    head = "Some special numbers are hidden in the following text. Remember them. "
    return Item(
        head + _hide(filler, needles, spread),
        f"\nWhat are all the special numbers of {key}?",
        f"\nThe special numbers of {key} are ",
        ", ".join(said),
        tuple(said),
        max_new_tokens=32,
        relevant=" ".join([head.strip(), *(needles[i] for i in order)]),
    )


def variable_tracking(rng: random.Random, depth: float, filler: list[str]) -> Item:
    """A chain of assignments; all names that hold the value are asked for."""
    names = ["".join(rng.choice("ABCDEFGHJKLMNPQRSTUVWXYZ") for _ in range(3)) for _ in range(3)]
    value = _number(rng)
    lines = [f"VAR {names[0]} = {value}."]
    lines += [f"VAR {b} = VAR {a}." for a, b in pairwise(names)]
    step = (1 - depth) / (len(lines) + 1)
    head = "Follow the variables that are assigned in the following text. "
    return Item(
        head + _hide(filler, lines, [depth + step * i for i in range(len(lines))]),
        f"\nWhich variables have the value {value}?",
        f"\nThe variables with the value {value} are ",
        ", ".join(names),
        tuple(names),
        max_new_tokens=32,
        relevant=" ".join([head.strip(), *lines]),
    )


def common_words(rng: random.Random, depth: float, filler: list[str]) -> Item:
    """A long list of words; three of them come thirty times as often as the others."""
    return _words(rng, depth, filler, often=30, seldom=3)


def frequent_words(rng: random.Random, depth: float, filler: list[str]) -> Item:
    """A list of words with falling frequencies; the three most frequent are asked for."""
    return _words(rng, depth, filler, often=20, seldom=6)


def _words(rng: random.Random, depth: float, filler: list[str], often: int, seldom: int) -> Item:
    """Depth is where in the list the frequent words gather."""
    chosen = rng.sample(WORDS, 40)
    top, rest = sorted(chosen[:3]), chosen[3:]
    count = max(len(filler) * 2, 60)
    share = often * 3 / (often * 3 + seldom * len(rest))
    frequent = [top[i % 3] for i in range(max(3, round(count * share)))]
    others = [rng.choice(rest) for _ in range(count - len(frequent))]
    for word in frequent:
        spot = min(max(rng.gauss(depth, 0.25), 0.0), 1.0)
        others.insert(round(spot * len(others)), word)
    return Item(
        "Read this list of words. " + " ".join(others),
        "\nWhich three words are the most frequent in the list, in alphabetical order?",
        "\nThe three most frequent words are ",
        ", ".join(top),
        tuple(top),
        max_new_tokens=24,
    )


TASKS: dict[str, Maker] = {
    "passkey": passkey,
    "single": single,
    "multikey": multikey,
    "multivalue": multivalue,
    "variable_tracking": variable_tracking,
    "common_words": common_words,
    "frequent_words": frequent_words,
    "distractor": distractor,
}
