"""Random histories under message policies: every pair must hold I1 to I14.

    python benchmarks/agent_product.py --histories 10000            # all policies, hours
    python benchmarks/agent_product.py --histories 10000 --draw 2   # two policies each, drawn
    python benchmarks/agent_product.py --histories 100 --seed 7     # a sample, minutes

A pair is one history handed over as it grows, call by call, to one manager. `--draw N` deals the
policies like cards: N different ones to each history, all policies equally often. Checked on every
call: the validator finds nothing (I1, I2, I4, I5, I7 to I9), atoms are whole (I3), signed thinking,
system and last user message are there (I4, I6, I7), nothing changes without an action (I10), the
same call again and the same state from JSON give the same bytes (I11), a request beyond the window
only where the floor fits (I12), nothing is inflated (I13), a summariser that fails changes nothing
(I14), and what was handed over is untouched. Prints one JSON line per policy and one for all, and
exits with 1 where an invariant broke.
"""

from __future__ import annotations

import argparse
import collections
import copy
import json
import random
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

from kvevict.agent.examples import random_history
from kvevict.agent.formats import get_format, to_normal
from kvevict.agent.history import THINKING_KINDS
from kvevict.agent.manager import HistoryManager
from kvevict.agent.message_policy import message_policies
from kvevict.agent.validate import check_history, common_prefix
from kvevict.errors import BudgetError

FORMATS = ("anthropic", "openai-chat", "openai-responses", "hf")

# Settings under which small random histories reach every stage.
EAGER = {
    "acon": "acon:history=600,observation=150",
    "anthropic_clear_tool_uses": "anthropic_clear_tool_uses:trigger=500,keep=2,clear_at_least=50",
    "claude_code": "claude_code:buffer=200,hot_tail=1",
    "complexity_trap_hybrid": "complexity_trap_hybrid:n=4,m=2",
    "complexity_trap_mask": "complexity_trap_mask:m=2,polling=2",
    "complexity_trap_summary": "complexity_trap_summary:n=3,m=2",
    "gemini_compress": "gemini_compress:responses=300,excerpt=60",
    "gemini_mask": "gemini_mask:protect=200,minimum=100,preview=20",
    "langchain_clear": "langchain_clear:trigger=500,keep=1,clear_tool_inputs=true",
    "letta_sliding": "letta_sliding:trigger_share=0.5",
    "memgpt": "memgpt:warn=0.3,flush=0.5",
    "opencode_compact": "opencode_compact:tail_least=50",
    "opencode_prune": "opencode_prune:protect=200,minimum=100,turns=1",
    "openhands": "openhands:max_size=12",
    "pi": "pi:reserve=1000,tail=300",
    "shape": "shape:results=2,recent=200,min_gain=50,buffer=300",
    "swe_agent_last_n": "swe_agent_last_n:n=2,polling=2",
}


def failing(messages: Any, budget: int) -> str:
    """Fail like a model server that is down."""
    raise ConnectionError("no server")


def check_pair(
    history: Any, policy: str, format: str, window: int = 2_000, seed: int = 0
) -> Iterator[str]:
    """Hand a history over as it grows and yield what breaks, in words."""
    rng = random.Random(seed)
    output = window // 8
    kwargs: dict[str, Any] = {"format": format, "window": window, "max_output": output}
    fails = rng.random() < 0.15
    if fails:
        kwargs["summarizer"] = rng.choice((failing, lambda m, b: "", lambda m, b: ("cut", False)))
    manager = HistoryManager(policy, **kwargs)
    original = copy.deepcopy(history)
    previous: Any = None
    ends = [i for i in _ends(history, format) if rng.random() < 0.5] or [len(history)]
    for end in ends:
        state = manager.state
        try:
            prepared = manager.prepare(history[:end])
        except BudgetError as error:
            if not error.floor_tokens or error.floor_tokens <= 0:
                yield f"{end}: BudgetError without a floor"
            continue
        report = prepared.report
        if report.violations:
            yield f"{end}: {report.violations[0]}"
        after = to_normal(prepared.messages, format)
        found = check_history(after)
        if found:
            yield f"{end}: the request breaks {found[0]}"
        acted = previous is None or any(a.done for a in report.actions)
        if not acted and common_prefix(previous, prepared.messages) != len(previous):
            yield f"{end}: I10, no action but another prefix"
        roots = sum(manager.counter.message(after.messages[i]) for i in manager.policy.roots(after))
        if report.tokens > window and roots > window:
            yield f"{end}: I12, the floor {roots} does not fit"
        if not 0 < report.floor_tokens <= report.tokens:
            yield f"{end}: I12, a floor of {report.floor_tokens} in {report.tokens} tokens"
        summaries = [a.stage for a in report.actions if a.done and a.verb == "summarise"]
        if fails and summaries:
            yield f"{end}: I14, {summaries[0]} acted although every summary failed"
        added = ("memory_warning", "warning")
        if report.freed_tokens < 0 and not set(added) & set(report.stages):
            yield f"{end}: I13, {report.freed_tokens} tokens freed"
        before = to_normal(history[:end], format)
        yield from _roots(before, after, end)
        yield from _atoms(before, after, end)
        again = manager.prepare(history[:end])
        if _text(again.messages) != _text(prepared.messages):
            yield f"{end}: I11, a second prepare differs"
        reloaded = HistoryManager(policy, **kwargs, state=json.loads(json.dumps(state)))
        if kwargs.get("summarizer") is None and _text(
            reloaded.prepare(history[:end]).messages
        ) != _text(prepared.messages):
            yield f"{end}: the same state gives other bytes"
        previous = prepared.messages
    if history != original:
        yield "the history that was handed over was changed"


def _ends(history: Any, format: str) -> list[int]:
    """Return the places where a model would be called: behind user and tool messages."""
    normal = to_normal(history, format)
    ends = {g.stop for g in normal.groups if normal.messages[g.stop - 1].role in ("user", "tool")}
    return sorted(ends)


def _roots(before: Any, after: Any, end: int) -> Iterator[str]:
    """I4, I6 and I7: what must still be there."""
    texts = collections.Counter(m.text for m in after.messages)
    for message in before.messages:
        if message.role in ("system", "developer") and not texts[message.text]:
            yield f"{end}: I6, a system message went"
    said = [b.text for m in before.messages if m.typed for b in m.blocks if b.kind == "text"]
    if said and not any(said[-1] in m.text for m in after.messages):
        yield f"{end}: I7, the last user message went"
    if not get_format(before.format).rules.signed or not before.groups:
        return
    last = before.groups[-1]
    kept = {b.text for m in after.messages for b in m.blocks if b.kind in THINKING_KINDS}
    for message in before.messages[last.start : last.stop]:
        for block in message.blocks:
            if block.kind in THINKING_KINDS and block.text not in kept:
                yield f"{end}: I4, thinking of the last response went"


def _atoms(before: Any, after: Any, end: int) -> Iterator[str]:
    """I3: of the calls of one response all are there or none."""
    kept = {b.call_id for m in after.messages for b in m.calls}
    for group in before.groups:
        names = [b.call_id for m in before.messages[group.start : group.stop] for b in m.calls]
        there = [name in kept for name in names if name is not None]
        if any(there) and not all(there):
            yield f"{end}: I3, the calls {names} were split"


def _text(messages: Any) -> str:
    return json.dumps(messages, ensure_ascii=True)


def deal(policies: Sequence[str], draw: int, seed: int) -> Iterator[list[str]]:
    """Return the policies of one history after the other: `draw` different ones, all in turn."""
    rng = random.Random(seed)
    deck: list[str] = []
    while True:
        hand: list[str] = []
        while len(hand) < draw:
            if not deck:
                deck = rng.sample(policies, len(policies))
            hand.append(deck.pop(next(i for i, p in enumerate(deck) if p not in hand)))
        yield hand


def run_pair(history: Any, name: str, format: str, seed: int) -> list[str]:
    """Check one pair and return what broke."""
    policy = EAGER.get(name, name) if seed % 3 else name
    window = (1_000, 2_000, 4_000)[seed // 4 % 3]
    try:
        found = list(check_pair(history, policy, format, window, seed))
    except Exception as error:  # any crash is a finding of this script
        found = [f"{type(error).__name__}: {error}"]
    return [f"seed {seed} {format} {policy} window {window}: {f}" for f in found]


def main() -> int:
    """Run the product, or a sample of it, and print one line per policy."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--histories", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--messages", type=int, default=24)
    parser.add_argument("--policy", action="append")
    parser.add_argument("--draw", type=int, help="policies a history; all of them by default")
    parser.add_argument("--minutes", type=float, help="stop after so long, with what was done")
    args = parser.parse_args()
    names = args.policy or list(message_policies())
    started = time.perf_counter()
    pairs: collections.Counter[str] = collections.Counter()
    failures: dict[str, list[str]] = collections.defaultdict(list)
    hands = deal(names, min(args.draw or len(names), len(names)), args.seed)
    done = 0
    for seed in range(args.seed, args.seed + args.histories):
        if args.minutes and time.perf_counter() - started > 60 * args.minutes:
            break
        format = FORMATS[seed % len(FORMATS)]
        history = random_history(seed, format, args.messages)
        for name in next(hands):
            pairs[name] += 1
            failures[name] += run_pair(history, name, format, seed)
            for line in failures[name][-1:] if len(failures[name]) == 1 else ():
                print(line, file=sys.stderr, flush=True)
        done += 1
    for name in names:
        row = {"policy": name, "pairs": pairs[name], "broken": len(failures[name])}
        print(json.dumps({**row, "examples": failures[name][:5]}), flush=True)
    broken = sum(map(len, failures.values()))
    seconds = round(time.perf_counter() - started, 1)
    row = {"histories": done, "pairs": pairs.total(), "policies": len(pairs), "broken": broken}
    print(json.dumps({**row, "seconds": seconds, "cpu": round(time.process_time(), 1)}))
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
