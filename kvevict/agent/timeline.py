"""Timeline: one self-contained HTML page of what was kept, masked, summarised and hidden.

A row for every model call, a column for every message of the full history, all policies on one
page. Everything that comes from a session is escaped; the page loads nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from jinja2 import Environment

from kvevict.agent.history import History
from kvevict.agent.replay import STATES, ReplayResult

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{{ title }}</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>
:root { color-scheme: light dark; --kept: #3b7dd8; --masked: #e0a030; --summarised: #8e5bd0;
  --hidden: #c7ccd4; --ink: #1c2330; --paper: #ffffff; --line: #d9dde4 }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ef; --paper: #14181f; --line: #333b48;
  --hidden: #3a4250 } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper);
  margin: 2rem auto; max-width: 76rem; padding: 0 1rem }
table { border-collapse: collapse; margin: 1rem 0 } td, th { padding: .2rem .7rem;
  border-bottom: 1px solid var(--line); text-align: right } td:first-child, th:first-child {
  text-align: left } figure { margin: 1.5rem 0; overflow-x: auto } svg { width: 100%; height: auto;
  min-width: 40rem } text { font: 11px system-ui, sans-serif; fill: var(--ink) }
.key span { display: inline-block; margin-right: 1.2rem } .key i { display: inline-block;
  width: .8rem; height: .8rem; margin-right: .35rem; vertical-align: -1px }
{% for state in states %}.{{ state }} { fill: var(--{{ state }}); background: var(--{{ state }}) }
{% endfor %}.context { fill: none; stroke: var(--ink); stroke-width: 1 }
.window { stroke: #c33; stroke-dasharray: 4 3 } .broke { stroke: #c33; stroke-width: 1.5 }
</style></head><body>
<h1>{{ title }}</h1>
<p>{{ messages }} messages, {{ results[0].calls }} model calls. Each row of a picture is a call,
each
column a message of the full history (neighbours share one where there are many); a red mark at the
left is a prefix break (the prompt cache is written anew behind it), a red row end a request beyond
the window.</p>
<p class="key">{% for state in states %}<span><i class="{{ state }}"></i>{{ state }}</span>
{% endfor %}</p>
<table><tr><th>policy</th><th>calls</th><th>mean context</th><th>peak</th><th>prefix breaks</th>
<th>beyond window</th><th>cost, cached</th><th>cost, uncached</th></tr>
{% for r in results %}<tr><td>{{ r.policy }}</td><td>{{ r.calls }}</td>
<td>{{ "{:,.0f}".format(r.mean_context) }}</td><td>{{ "{:,}".format(r.peak_context) }}</td>
<td>{{ r.prefix_breaks }}</td><td>{{ r.overflows }}</td><td>${{ "%.2f"|format(r.cost_cached) }}</td>
<td>${{ "%.2f"|format(r.cost_uncached) }}</td></tr>
{% endfor %}</table>
{% for p in pictures %}<figure><figcaption><strong>{{ p.policy }}</strong>
{% if p.acted %}({{ p.acted }}){% endif %}</figcaption>
<svg viewBox="0 0 {{ width + 130 }} {{ p.height + 18 }}" role="img"
 aria-label="What became of each message at each call under {{ p.policy }}">
{% for row in p.rows %}<g><title>call {{ row.call }}: {{ row.counts }}{% if row.stages %}
; {{ row.stages }}{% endif %}</title>
{% for run in row.runs %}<rect class="{{ run.state }}" x="{{ run.x }}" y="{{ row.y }}"
 width="{{ run.width }}" height="{{ p.step }}"/>
{% endfor %}</g>{% if row.broke %}<path class="broke" d="M0 {{ row.mid }}h6"/>{% endif %}
{% if row.over %}<path class="broke" d="M{{ width + 8 }} {{ row.mid }}h6"/>{% endif %}
{% endfor %}<polyline class="context" points="{{ p.line }}"/>
<path class="window" d="M{{ p.window_x }} 0v{{ p.height }}"/>
<text x="10" y="{{ p.height + 13 }}">message 0 to {{ messages - 1 }}</text>
<text x="{{ width + 22 }}" y="{{ p.height + 13 }}">context; window {{ p.window }}</text>
</svg></figure>
{% endfor %}</body></html>
"""
_WIDTH = 800
_ROWS = 200  # rows of a picture; longer sessions show every n-th call
_COLUMNS = 250  # columns of a picture; in longer sessions neighbours share one


def timeline(history: History, results: Sequence[ReplayResult], title: str = "Replay") -> str:
    """Return an HTML page of replays of one session.

    Args:
        history: the session.
        results: its replays, one a policy.
        title: title of the page.
    """
    if not results:
        raise ValueError("a timeline needs at least one replay")
    page = Environment(autoescape=True, trim_blocks=True).from_string(_PAGE)
    total = max(1, len(history))
    top = max(max(r.peak_context, r.window) for r in results)
    text = page.render(
        title=title,
        states=STATES,
        messages=len(history),
        results=results,
        width=_WIDTH + 10,
        pictures=[_picture(r, total, top) for r in results],
    )
    return text.encode("utf-8", "replace").decode("utf-8")


def _picture(result: ReplayResult, total: int, top: int) -> dict[str, Any]:
    every = -(-len(result.steps) // _ROWS)
    shown = [s for s in result.steps if s.call % every == 0 or s is result.steps[-1]]
    step = max(1.0, min(14.0, 420 / max(1, len(shown))))
    rows, line = [], []
    for n, s in enumerate(shown):
        y = round(n * step, 2)
        runs = _runs(s.marks, total)
        counts: Counter[str] = Counter()
        for state, count in s.marks:
            counts[state] += count
        rows.append(
            {
                "call": s.call,
                "y": y,
                "mid": round(y + step / 2, 2),
                "runs": runs,
                "counts": ", ".join(f"{count} {state}" for state, count in counts.items()),
                "broke": s.broke,
                "over": s.over,
                "stages": ", ".join(s.stages),
            }
        )
        line.append(f"{_WIDTH + 30 + s.context / top * 90:.1f},{y + step / 2:.1f}")
    return {
        "policy": result.policy,
        "acted": ", ".join(f"{name} {count}x" for name, count in result.acted.items()),
        "rows": rows,
        "step": round(step, 2),
        "height": round(len(shown) * step, 1),
        "line": " ".join(line),
        "window": f"{result.window:,}",
        "window_x": round(_WIDTH + 30 + result.window / top * 90, 1),
    }


def _runs(marks: Sequence[tuple[str, int]], total: int) -> list[dict[str, Any]]:
    """Return a row's rectangles: each column shows the state that most of its messages have."""
    states = [state for state, count in marks for _ in range(count)]
    columns = min(total, _COLUMNS)
    runs: list[dict[str, Any]] = []
    last = ""
    for c in range(columns):
        inside = states[c * total // columns : (c + 1) * total // columns]
        state = max(STATES, key=inside.count) if inside else ""
        width = _WIDTH / columns
        if state and state == last:
            runs[-1]["width"] = round(runs[-1]["width"] + width, 2)
        elif state:
            runs.append({"state": state, "x": round(10 + c * width, 2), "width": round(width, 2)})
        last = state
    return runs
