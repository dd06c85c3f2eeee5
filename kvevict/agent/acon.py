"""ACON: the compression guideline as an object that is optimised from failures."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from kvevict.errors import HistoryError

LLM = Callable[[str], str]

DEFAULT_GUIDELINE = """\
Compress the interaction history of an agent so that it can go on without the original.
Keep: the task and every constraint the user gave, word for word where it matters; the variables,
identifiers, paths, credentials names and values that later steps read; decisions with their
reasons; what was tried and failed; what remains to be done; guard rails.
Drop: raw outputs that can be had again, repeated views, small talk, superseded states.
Write short factual lines below the headings REASONING, VARIABLES, PROGRESS, NEXT STEPS."""

_ANALYSE = """\
An agent solved a task with its full history and failed the same task when the history had been
compressed by this guideline.

GUIDELINE:
{guideline}

TASK:
{task}

FULL HISTORY (succeeded):
{full}

COMPRESSED HISTORY (failed):
{compressed}

Which information that the agent needed is missing or distorted in the compressed history, and
which rule would have kept it? Answer in at most five lines."""

_REVISE = """\
Revise the guideline below, by which an LLM compresses the history of an agent, so that the
information named in the feedback is kept in such cases. Keep what works, stay general, at most
{limit} words. Answer with the new guideline only.

GUIDELINE:
{guideline}

FEEDBACK from failures:
{feedback}"""

_SHORTEN = """\
The agent succeeded with histories compressed by this guideline. Make the guideline produce
shorter histories without losing what was used. Answer with the new guideline only, at most
{limit} words.

GUIDELINE:
{guideline}

COMPRESSED HISTORIES that sufficed:
{used}"""


@dataclass(frozen=True)
class PairedRun:
    """One task run twice: with its full and with its compressed history.

    Attributes:
        task: what was to be done.
        full: the full history as text.
        compressed: the compressed history as text.
        full_success: whether the run with the full history succeeded.
        compressed_success: whether the run with the compressed history did.
    """

    task: str
    full: str
    compressed: str
    full_success: bool
    compressed_success: bool

    @property
    def contrastive(self) -> bool:
        """Whether compression alone made the difference: succeeded full, failed compressed."""
        return self.full_success and not self.compressed_success


@dataclass(frozen=True)
class Guideline:
    """One version of a guideline.

    Attributes:
        text: what the summariser is told.
        version: 0 for the first.
        parent: version that it was revised from, -1 for the first.
        score: mean of the held-out check, higher is better; None before it.
        feedback: what the revision answered.
        accepted: whether the held-out check let it in.
    """

    text: str = DEFAULT_GUIDELINE
    version: int = 0
    parent: int = -1
    score: float | None = None
    feedback: tuple[str, ...] = ()
    accepted: bool = True


def _rank(guideline: Guideline) -> tuple[float, int, int]:
    score = -1.0 if guideline.score is None else guideline.score
    return score, -len(guideline.text), -guideline.version


@dataclass(frozen=True)
class Guidelines:
    """All versions of a guideline, tried and rejected ones too.

    Attributes:
        versions: in the order they were made; `versions[i].version == i`.
    """

    versions: tuple[Guideline, ...] = field(default_factory=lambda: (Guideline(),))

    @property
    def best(self) -> Guideline:
        """The accepted version of the highest score; of equal ones the shorter, the older."""
        accepted = [g for g in self.versions if g.accepted]
        return max(accepted, key=_rank)

    def save(self, path: str | Path) -> None:
        """Write all versions as JSON."""
        rows = [asdict(g) for g in self.versions]
        Path(path).write_text(json.dumps({"guidelines": rows}, indent=2, ensure_ascii=False) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Guidelines:
        """Read versions that `save` wrote.

        Raises:
            HistoryError: a file of another form.
        """
        try:
            rows = json.loads(Path(path).read_text())["guidelines"]
            made = tuple(Guideline(**{**row, "feedback": tuple(row["feedback"])}) for row in rows)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise HistoryError(f"{path} holds no guidelines: {error}") from None
        if not made:
            raise HistoryError(f"{path} holds no guidelines")
        return cls(made)


def optimise(
    guidelines: Guidelines,
    runs: Sequence[PairedRun],
    llm: LLM,
    evaluate: Callable[[str, PairedRun], float],
    *,
    rounds: int = 3,
    holdout: float = 0.5,
    batch: int = 5,
    shorten: bool = False,
    max_words: int = 400,
    max_chars: int = 12_000,
    seed: int = 0,
) -> Guidelines:
    """Revise a guideline from failures; a revision stays only if it is better on held-out runs.

    Source: ACON (arXiv:2510.00615): contrastive feedback from runs that succeeded with the full
    and failed with the compressed history, an LLM revises the guideline in natural language (no
    weights change), then optionally a step that shortens what sufficed. Differs: one candidate a
    round and a held-out check on every one, as the paper's code is not public here.

    Args:
        guidelines: versions so far; the best is revised.
        runs: paired runs; the contrastive ones teach, a share of all is held out.
        llm: any callable from a prompt to a text.
        evaluate: `(guideline text, run) -> score`, higher is better, such as 1.0 when the task
            succeeds after compressing by that guideline.
        rounds: revisions tried at most.
        holdout: share of the runs held out for the check, at least one run.
        batch: failures shown a round.
        shorten: whether a last round asks for shorter histories (the paper's second step).
        max_words: bound on a guideline's words.
        max_chars: characters of a history shown to the LLM; longer ones lose their middle.
        seed: of the split.

    Returns:
        The old versions and the new ones, accepted or not. Unchanged when no failure teaches.

    Raises:
        ValueError: settings out of range, or fewer than two runs (none could be held out).
    """
    if rounds < 0 or not 0 < holdout < 1 or batch < 1:
        raise ValueError(f"rounds={rounds}, holdout={holdout}, batch={batch}: out of range")
    if len(runs) < 2:
        raise ValueError(f"{len(runs)} paired runs: give at least two, one is held out")
    order = list(runs)
    random.Random(seed).shuffle(order)
    held = order[: max(1, min(len(order) - 1, round(len(order) * holdout)))]
    lessons = [run for run in order[len(held) :] if run.contrastive]
    sufficed = [run for run in order[len(held) :] if run.compressed_success]
    versions = list(guidelines.versions)

    def check(text: str) -> float:
        return sum(float(evaluate(text, run)) for run in held) / len(held)

    best = guidelines.best
    if lessons or (shorten and sufficed):
        best = replace(best, score=check(best.text))
        versions[best.version] = best
    steps = ["revise"] * (rounds if lessons else 0) + ["shorten"] * bool(shorten and sufficed)
    for step, what in enumerate(steps):
        if what == "revise":
            shown = [
                lessons[(step * batch + i) % len(lessons)] for i in range(min(batch, len(lessons)))
            ]
            feedback = tuple(
                llm(
                    _ANALYSE.format(
                        guideline=best.text,
                        task=run.task,
                        full=_middle_out(run.full, max_chars),
                        compressed=_middle_out(run.compressed, max_chars),
                    )
                ).strip()
                for run in shown
            )
            prompt = _REVISE.format(
                guideline=best.text, feedback="\n".join(f"- {f}" for f in feedback), limit=max_words
            )
        else:
            feedback = ("shorten",)
            used = "\n---\n".join(_middle_out(r.compressed, max_chars) for r in sufficed[:batch])
            prompt = _SHORTEN.format(guideline=best.text, used=used, limit=max_words)
        text = llm(prompt).strip()
        usable = bool(text) and len(text.split()) <= 2 * max_words
        usable = usable and text not in {g.text for g in versions}
        score = check(text) if usable else None
        better = score is not None and (
            score > (best.score or 0.0)
            if what == "revise"
            else score >= (best.score or 0.0) and len(text) < len(best.text)
        )
        new = Guideline(text, len(versions), best.version, score, feedback, better)
        versions.append(new)
        best = new if better else best
    return Guidelines(tuple(versions))


def _middle_out(text: str, room: int) -> str:
    if len(text) <= room:
        return text
    half = room // 2
    return f"{text[:half]}\n... {len(text) - 2 * half} characters left out ...\n{text[-half:]}"
