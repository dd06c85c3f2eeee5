"""compare_script: the JavaScript that links the two panes of a comparison."""

from kvevict.eval.compare_pane import PANE

_PANES = r"""
class Panes {
  constructor(root, view) {
    this.root = root;
    this.view = view;
    this.step = view.steps.length - 1;
    this.picked = -1;
    this.maps = new Maps(view);
    this.rows = [...view.token_rows.map((row) => ({kind: "token", row})),
      ...view.message_rows.map((row) => ({kind: "message", row}))];
    const budget = this.rows[0].row.budget;
    const match = this.rows.findIndex((r) => r.kind === "message" && r.row.budget === budget);
    const second = match > 0 ? match : Math.min(1, this.rows.length - 1);
    this.panes = [new Pane(this, "Left", 0), new Pane(this, "Right", second)];
    this.redraws = 0;
    this.redrawMs = this.paintMs = null;
    this.error = null;
    this.toolbar();
    this.ready = this.open();
  }
  toolbar() {
    this.slider = el("input", {type: "range", min: 0, max: this.view.steps.length - 1, step: 1,
      value: this.step, "aria-label": "Step of the history, for both panes"});
    this.slider.disabled = this.view.steps.length < 2;
    this.output = el("output");
    this.slider.addEventListener("input", () => {
      this.step = Number(this.slider.value);
      this.redraw(this.panes);
    });
    const swatch = (name) => el("li", {}, el("span", {class: `t s-${name} o8`}, name));
    const word = (text) => el("li", {}, el("b", {}, text));
    const legend = (name, ...items) =>
      el("ul", {class: "legend", "aria-label": `Legend: ${name}`}, word(`${name}:`), ...items);
    const legends = el("div", {class: "legends"},
      legend("Tokens", ...NAMES.slice(0, 4).map(swatch),
        el("li", {class: "hint"}, "paler: fewer heads keep it")),
      legend("Messages", ...NAMES.slice(4).map(swatch)));
    this.link = el("p", {class: "link", role: "status", "aria-live": "polite"});
    this.root.append(el("div", {class: "bar"}, el("label", {}, "Step"), this.slider, this.output),
      legends, this.link, el("div", {class: "both"}, ...this.panes.map((p) => p.element)));
    this.root.addEventListener("keydown", (event) => {
      if (event.key === "Escape" && this.picked >= 0) this.pick(this.picked, this.panes[0]);
    });
  }
  async open() {
    this.told();
    this.link.textContent = "Making the page ...";
    this.built = Promise.all(this.panes.map((pane) => pane.build()));
    await this.redraw(this.panes);
  }
  redraw(panes) {
    this.idle = Promise.all([this.idle, this.drawn(panes)]);
    return this.idle;
  }
  async drawn(panes) {
    await this.built;
    const began = performance.now();
    this.told();
    try {
      await Promise.all(panes.map((pane) => pane.draw()));
      this.linked();
      this.redrawMs = performance.now() - began;
      // The frame's own callback comes before layout and paint; the task after it comes behind.
      await new Promise((done) => requestAnimationFrame(() => setTimeout(done, 0)));
      this.paintMs = performance.now() - began;
      this.redraws += 1;
    } catch (error) {
      this.error = String(error);
      this.link.textContent = `This browser cannot show the panes: ${error}`;
    }
  }
  told() {
    const {tokens, messages} = this.view.steps[this.step];
    const text = `${this.step + 1} of ${this.view.steps.length}: ` +
      `${number(tokens)} tokens, ${number(messages)} messages`;
    this.output.textContent = text;
    this.slider.setAttribute("aria-valuetext", text);
  }
  pick(index, from) {
    this.picked = this.picked === index ? -1 : index;
    for (const pane of this.panes) {
      for (const block of pane.blocks) {
        if (block.message < 0) continue;
        block.classList.toggle("picked", block.message === this.picked);
        block.button.setAttribute("aria-pressed", String(block.message === this.picked));
      }
      if (pane !== from && this.picked >= 0) pane.scrollTo(this.picked);
    }
    this.linked();
  }
  linked() {
    const {picked} = this;
    if (picked < 0 || picked >= this.view.steps[this.step].messages) {
      this.link.textContent = "Choose a message in one pane to find it in the other.";
      return;
    }
    const parts = this.panes.map((p) =>
      `${p.side.toLowerCase()}, ${title(p.row.row)}: ${p.labelOf(picked)}`);
    this.link.textContent = `${said(this.view, picked)} | ${parts.join(" | ")}`;
  }
}

window.kvevictPanes = [...document.querySelectorAll(".panes")].map((root) =>
  new Panes(root, JSON.parse(root.querySelector("script").textContent)));
"""
SCRIPT = f'\n(() => {{\n"use strict";{PANE}{_PANES}}})();\n'
