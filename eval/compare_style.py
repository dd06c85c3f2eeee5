"""compare_style: the CSS of the two panes of a comparison.

Colours are those of Okabe and Ito, which colour-blind people tell apart; every state also differs
by a line: underlined, dotted, struck through, dashed.
"""

STYLE = """
.panes { --head: 0 114 178; --recent: 0 158 115; --heavy: 230 159 0; --mask: 86 180 233;
 --sum: 204 121 167; --none: 128 128 128;
 margin: 1rem calc(50% - min(48vw, 760px)); padding: .8rem 1rem; border: 1px solid var(--line);
 border-radius: 8px; }
.panes .bar { display: flex; flex-wrap: wrap; gap: .3rem .8rem; align-items: center; }
.panes input[type=range] { flex: 1 1 240px; min-width: 0; accent-color: rgb(var(--head)); }
.panes output { font-variant-numeric: tabular-nums; }
.panes .legends { display: flex; flex-wrap: wrap; gap: .2rem 2.2rem; margin: .5rem 0; }
.panes .legend { list-style: none; margin: 0; padding: 0; display: flex; flex-wrap: wrap;
 gap: .2rem .8rem; font-size: 13px; }
.panes .legend .hint { color: var(--soft); }
.panes .legend b { font-weight: 600; color: var(--soft); }
.panes .legend .t { padding: 0 .3rem; }
.panes .both { display: grid; grid-template-columns: minmax(0, 1fr) minmax(0, 1fr); gap: 1rem; }
.panes .controls { display: grid; grid-template-columns: repeat(6, minmax(0, 1fr)); gap: .4rem; }
.panes .controls label { font-size: 12px; color: var(--soft); grid-column: span 2; }
.panes .controls label.whole { grid-column: span 6; }
.panes .controls label.half { grid-column: span 6; }
.panes select { font: inherit; font-size: 14px; width: 100%; color: var(--ink);
 background: var(--back); border: 1px solid var(--line); border-radius: 5px; padding: .2rem; }
.panes p { margin: .35rem 0; font-size: 13px; }
.panes p.summary { font-weight: 600; min-height: 2.9em; }
.panes p.setting { color: var(--soft); min-height: 1.4em; overflow-wrap: anywhere; }
.panes p.link { min-height: 1.4em; border-left: 3px solid rgb(var(--heavy)); padding-left: .5rem; }
.panes p.readout { color: var(--soft); min-height: 1.4em; white-space: nowrap; overflow: hidden;
 text-overflow: ellipsis; }
.panes .scroll { height: min(62vh, 680px); overflow-y: auto; border: 1px solid var(--line);
 border-radius: 6px; padding: .3rem; position: relative; }
.panes .block { content-visibility: auto; contain-intrinsic-size: auto 90px; margin: 0 0 .35rem;
 padding: .1rem .45rem .3rem; border: 1px solid var(--line); border-left: 5px solid var(--line);
 border-radius: 5px; }
.panes .block > button { font: 600 12px/1.5 system-ui, sans-serif; color: var(--ink); border: 0;
 background: none; padding: .15rem .1rem; width: 100%; text-align: left; display: flex; gap: .6rem;
 cursor: pointer; }
.panes .block .who { flex: 1; min-width: 0; overflow: hidden; text-overflow: ellipsis;
 white-space: nowrap; }
.panes .block .state { white-space: nowrap; }
.panes .block .share { height: 3px; background: linear-gradient(to right, rgb(var(--heavy))
 calc(100% * var(--share, 0)), var(--line) 0); }
.panes .messages .share { display: none; }
.panes .text, .panes .first { font: 12.5px/1.6 ui-monospace, monospace; white-space: pre-wrap;
 overflow-wrap: anywhere; unicode-bidi: isolate; margin: .2rem 0 0; }
.panes .first { display: none; overflow: hidden; max-height: 4.8em; }
.panes .cards .text { display: none; } .panes .cards .first { display: block; }
.panes .block.s-masked { border-left: 5px dashed rgb(var(--mask)); }
.panes .block.s-summarised { border-left: 5px double rgb(var(--sum)); }
.panes .block.s-hidden { border-left: 5px dotted rgb(var(--none)); }
.panes .block.s-kept { border-left: 5px solid rgb(var(--heavy)); }
.panes .cards .s-masked .first, .panes .cards .s-hidden .first { opacity: .7; }
.panes .cards .s-hidden .first { text-decoration: line-through; }
.panes .cards .s-masked .first { max-height: 1.6em; }
.panes .block.picked { outline: 3px solid rgb(var(--head)); outline-offset: -1px;
 background: rgb(var(--head) / .08); }
.panes :focus-visible { outline: 3px solid rgb(var(--head)); outline-offset: 1px; }
.panes .t { border-radius: 2px; }
.panes .t.later { display: none; }
.panes .s-head { background: rgb(var(--head) / var(--o));
 box-shadow: inset 0 -2px rgb(var(--head)); }
.panes .s-recent { background: rgb(var(--recent) / var(--o)); text-decoration: underline dotted
 rgb(var(--recent)) 2px; text-underline-offset: 2px; }
.panes .t.s-heavy { background: rgb(var(--heavy) / var(--o)); }
.panes .t.s-kept { background: rgb(var(--heavy) / .25); }
.panes .t.s-masked { background: rgb(var(--mask) / .3); text-decoration: underline dashed
 rgb(var(--mask)) 2px; text-underline-offset: 2px; }
.panes .t.s-summarised { background: rgb(var(--sum) / .3); text-decoration: underline double
 rgb(var(--sum)); text-underline-offset: 2px; }
.panes .t.s-evicted, .panes .t.s-hidden { color: var(--soft); text-decoration: line-through; }
.o1 { --o: .08; } .o2 { --o: .13; } .o3 { --o: .18; } .o4 { --o: .24; }
.o5 { --o: .3; } .o6 { --o: .36; } .o7 { --o: .43; } .o8 { --o: .52; }
@media (max-width: 820px) {
 .panes { margin: 1rem 0; padding: .6rem; }
 .panes .both { grid-template-columns: minmax(0, 1fr); }
 .panes .scroll { height: 44vh; }
}
"""
