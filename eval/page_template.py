"""page_template: the HTML of every page; self-contained, nothing is fetched.

The only script is that of the panes of a comparison, allowed by its hash where a page has them.
"""

TEMPLATE = """{% macro drawn(part) %}
{% for figure in part.figures %}<h3>{{ figure.title }}</h3>{{ figure.svg }}
{% endfor %}
{% endmacro %}
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; style-src 'unsafe-inline'; img-src data:
{%- if script %}; script-src {{ script_source }}{% endif %}">
<title>{{ title }}</title>
<style>
:root { color-scheme: light dark; --ink: #1d2530; --soft: #5c6773; --line: #d9dee5; --back: #fff; }
@media (prefers-color-scheme: dark) {
 :root { --ink: #e4e8ee; --soft: #a3adba; --line: #3a434e; --back: #14181d; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--back);
 max-width: 1080px; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; margin-bottom: .2rem; }
h2 { font-size: 1.15rem; margin-top: 2.4rem; border-top: 1px solid var(--line); padding-top: 1rem; }
h3 { font-size: .95rem; margin: 1.4rem 0 .3rem; }
p.note { color: var(--soft); margin: .2rem 0 1rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums; }
th, td { padding: .28rem .6rem; border-bottom: 1px solid var(--line); text-align: right;
 white-space: nowrap; }
th { color: var(--soft); font-weight: 600; }
th.words, td.words { text-align: left; }
svg { width: 100%; max-width: 760px; height: auto; display: block; }
svg.small { max-width: 330px; }
svg text { font: 11px system-ui, sans-serif; fill: var(--soft); }
svg text.tag { font-size: 9px; }
svg .grid { stroke: var(--line); } svg .axis { stroke: #99a2ad; }
.maps { display: flex; flex-wrap: wrap; gap: .4rem 1rem; } .maps figure { margin: 0; width: 320px; }
figcaption { font-size: 12px; color: var(--soft); }
details { margin: .8rem 0; } summary { cursor: pointer; color: var(--soft); }
code { font-size: 12px; }
{{ style }}</style>
</head>
<body>
<h1>{{ title }}</h1>
<p class="note">{{ lead }}</p>
{% for part in parts %}
<section>
<h2>{{ part.title }}</h2>
<p class="note">{{ part.note }}. In brackets: 95% bootstrap intervals.</p>
{% if part.panes %}<h3>The same history under two policies: {{ part.panes_title }}</h3>
<div class="panes"><noscript><p>The two panes need JavaScript.</p></noscript>
<script type="application/json">{{ part.panes }}</script></div>
{% endif %}
{% if part.figures_first %}{{ drawn(part) }}{% endif %}
{% for table in part.tables %}
{% if table.title %}<h3>{{ table.title }}</h3>{% endif %}
{% if table.rows | length > 24 %}<details><summary>{{ table.rows | length }} rows</summary>
{% endif %}<div class="wide"><table>
<tr>{% for column in table.columns %}<th class="{{ column.kind }}">{{ column.title }}</th>
{% endfor %}</tr>
{% for row in table.rows %}<tr>{% for cell in row %}
<td class="{{ table.columns[loop.index0].kind }}">{{ cell }}</td>{% endfor %}</tr>
{% endfor %}</table></div>
{% if table.rows | length > 24 %}</details>{% endif %}
{% endfor %}
{% if not part.figures_first %}{{ drawn(part) }}{% endif %}
{% if part.maps %}<h3>What is kept: layer by position over time</h3><div class="maps">
{% for figure in part.maps %}<figure>{{ figure.svg }}<figcaption>{{ figure.title }}</figcaption>
</figure>{% endfor %}</div>{% endif %}
<details><summary>Settings and versions</summary><div class="wide"><table>
{% for name, value in part.facts %}<tr><th class="words">{{ name }}</th>
<td class="words"><code>{{ value }}</code></td></tr>
{% endfor %}</table></div></details>
</section>
{% endfor %}
{% if script %}<script>{{ script }}</script>{% endif %}
</body>
</html>
"""
