"""compare_pane: the JavaScript of one pane of a comparison; it makes text nodes, never markup.

Every token is an element made once; a redraw changes class names of those that differ.
"""

PANE = r"""
const NAMES = ["head", "recent", "heavy", "evicted", "kept", "masked", "summarised", "hidden"];
const CODE = Object.fromEntries(NAMES.map((name, index) => [name, index]));
const LEVELS = 8;  // steps of opacity; the style has a class for each
const LATER = 254, PLAIN = 255;
const SLICE = 4096;  // tokens between two looks at the clock
const PATIENCE = 20;  // milliseconds of work before the browser gets its turn
const classOf = (code) => {
  if (code === LATER) return "t later";
  if (code === PLAIN) return "t";
  return `t s-${NAMES[code >> 4]} o${code & 15}`;
};
const CLASSES = Array.from({length: 256}, (_, code) => classOf(code));
const number = (value) => value.toLocaleString("en-US", {maximumFractionDigits: 1});
const percent = (share) => `${Math.round(100 * share)}%`;
const el = (tag, attributes = {}, ...children) => {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);  // strings become text nodes
  return node;
};
const pause = () => new Promise((done) => setTimeout(done, 0));
const title = (row) => `${row.policy}, ${percent(row.budget)}`;
const said = (view, index) => {
  const message = view.messages[index];
  const kind = message.kind && message.kind !== message.role ? ` (${message.kind})` : "";
  return `${index + 1}. ${message.role}${kind}, ${number(message.tokens)} tokens`;
};

// Maps are unpacked when they are first looked at, and the latest few are held.
class Maps {
  constructor(view) {
    this.view = view;
    this.held = new Map();
    this.offsets = [];
    let at = 0;
    for (const step of view.steps) {
      this.offsets.push(at);
      at += view.layers * view.heads * ((step.tokens + 7) >> 3);
    }
  }
  bits(row) {
    const known = this.held.get(row) ?? this.unpack(row.maps);
    this.held.delete(row);
    this.held.set(row, known);
    if (this.held.size > 12) this.held.delete(this.held.keys().next().value);
    return known;
  }
  async unpack(text) {
    const packed = atob(text);
    const bytes = new Uint8Array(packed.length);
    for (let i = 0; i < packed.length; i++) bytes[i] = packed.charCodeAt(i);
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
    return new Uint8Array(await new Response(stream).arrayBuffer());
  }
  // How many of the chosen layers and heads keep each token at a step.
  counts(bits, step, layers, heads) {
    const width = (this.view.steps[step].tokens + 7) >> 3;
    const found = new Uint16Array(8 * width);
    for (const layer of layers) for (const head of heads) {
      const start = this.offsets[step] + (layer * this.view.heads + head) * width;
      for (let byte = 0; byte < width; byte++) {
        const value = bits[start + byte];
        if (value === 0) continue;
        for (let bit = 0; bit < 8; bit++) found[8 * byte + bit] += (value >> (7 - bit)) & 1;
      }
    }
    return found;
  }
}

class Pane {
  constructor(shared, side, first) {
    this.shared = shared;
    this.view = shared.view;
    this.side = side;
    this.serial = 0;
    this.codes = new Uint8Array(this.view.tokens.length).fill(PLAIN);
    this.spans = new Array(this.view.tokens.length);
    this.blocks = [];
    this.controls(first);
  }
  controls(first) {
    const group = (name, kind) => {
      const part = el("optgroup", {label: name});
      this.shared.rows.forEach((row, index) => {
        if (row.kind === kind) part.append(el("option", {value: index}, title(row.row)));
      });
      return part.children.length ? [part] : [];
    };
    const pick = (name, label, kind, ...options) => {
      const select = el("select", {"aria-label": `${this.side}: ${label}`}, ...options);
      select.addEventListener("change", () => this.changed(name));
      this[name] = select;
      return el("label", {class: kind}, label, select);
    };
    const listed = (count, all) => [
      el("option", {value: "all"}, all),
      ...Array.from({length: count}, (_, i) => el("option", {value: i}, String(i))),
    ];
    const policy = pick("policy", "Policy", "whole",
      ...group("Token policies", "token"), ...group("Message policies", "message"));
    this.policy.value = first;
    this.layerLabel = pick("layer", "Layer", "", ...listed(this.view.layers, "all layers"));
    this.headLabel = pick("head", "KV head", "", ...listed(this.view.heads, "all heads"));
    this.asLabel = pick("as", "Show", "",
      el("option", {value: "text"}, "text"), el("option", {value: "cards"}, "cards"));
    this.setting = el("p", {class: "setting"});
    this.summary = el("p", {class: "summary", role: "status", "aria-live": "polite"});
    this.list = el("div", {class: "scroll", tabindex: 0, role: "region",
      "aria-label": `${this.side} pane: the history`});
    this.readout = el("p", {class: "readout"}, "Point at a token to see where it is kept.");
    this.element = el("section", {class: "pane", "aria-label": `${this.side} pane`},
      el("div", {class: "controls"}, policy, this.layerLabel, this.headLabel, this.asLabel),
      this.setting, this.summary, this.list, this.readout);
    this.list.addEventListener("click", (event) => {
      const block = event.target.closest(".block");
      const marked = getSelection().toString() !== "";
      if (block && block.message >= 0 && !marked) this.shared.pick(block.message, this);
    });
    this.list.addEventListener("mouseover", (event) => {
      if (event.target.token !== undefined) this.read(event.target.token);
    });
    this.chosen();
  }
  get row() { return this.shared.rows[this.policy.value]; }
  chosen() {
    const {kind, row} = this.row;
    this.as.value = kind === "token" ? "text" : "cards";
    this.layerLabel.hidden = this.headLabel.hidden = kind !== "token";
    this.asLabel.className = kind === "token" ? "" : "half";
    const budget = row.budget_tokens ? `; budget ${number(row.budget_tokens)} tokens` : "";
    this.setting.textContent = (row.setting || row.policy) + budget;
  }
  changed(name) {
    if (name === "policy") this.chosen();
    this.shared.redraw([this]);
  }

  // Elements are made once, a slice at a time.
  async build() {
    const {view} = this;
    let at = 0, message = 0, last = performance.now();
    const add = async (index, start, stop) => {
      const block = this.block(index);
      block.start = start;
      for (let i = start; i < stop; i++) {
        const span = el("span", {class: "t"}, view.tokens[i]);
        span.token = i;
        this.spans[i] = span;
        block.body.append(span);
        if (i % SLICE === 0 && performance.now() - last > PATIENCE) {
          await pause();
          last = performance.now();
        }
      }
    };
    for (const [start, stop, index] of view.spans) {
      while (message < index) await add(message++, start, start);  // messages without a token
      if (at < start) await add(-1, at, start);
      await add(index, start, stop);
      message = index + 1;
      at = stop;
    }
    while (message < view.messages.length) await add(message++, at, at);
    if (at < view.tokens.length) await add(-1, at, view.tokens.length);
  }
  block(index) {
    const block = el("div", {class: "block"});
    block.message = index;
    block.body = el("div", {class: "text"});
    if (index < 0) {
      block.append(block.body);
    } else {
      block.label = el("span", {class: "state"});
      block.button = el("button", {type: "button", "aria-pressed": "false"},
        el("span", {class: "who"}, said(this.view, index)), block.label);
      block.bar = el("div", {class: "share"});
      const first = this.view.messages[index].text.slice(0, 320).trim().replace(/\n\s*\n/g, "\n");
      block.append(block.button, block.bar, el("p", {class: "first"}, first), block.body);
    }
    this.blocks.push(block);
    this.list.append(block);
    return block;
  }

  async draw() {
    const serial = ++this.serial;
    const began = performance.now();
    const {kind, row} = this.row, step = this.shared.step;
    let drawn;
    if (kind === "token") {
      const bits = await this.shared.maps.bits(row);
      if (serial !== this.serial) return;
      drawn = this.tokens(row, bits, step);
    } else {
      drawn = this.messages(row, step);
    }
    this.counts = drawn.counts;
    this.summary.textContent = drawn.summary;
    const shape = `scroll ${this.as.value} ${kind}s`, changed = this.list.className !== shape;
    this.list.className = shape;
    for (const block of this.blocks) this.mark(block, drawn);
    if (changed) this.scrollTo(this.shared.picked);
    if (await this.colour(drawn.codes, serial)) this.took = performance.now() - began;
  }
  tokens(row, bits, step) {
    const {view} = this, {tokens} = view.steps[step];
    const range = (select, count) =>
      select.value === "all" ? Array.from({length: count}, (_, i) => i) : [Number(select.value)];
    const layers = range(this.layer, view.layers), heads = range(this.head, view.heads);
    const counts = this.shared.maps.counts(bits, step, layers, heads);
    const chosen = layers.length * heads.length;
    const codes = new Uint8Array(view.tokens.length).fill(LATER);
    const parts = [0, 0, 0, 0];
    const recent = tokens - row.recent[step];
    let total = 0, everywhere = 0;
    for (let i = 0; i < tokens; i++) {
      const place = i < row.head ? CODE.head : i >= recent ? CODE.recent : CODE.heavy;
      const part = counts[i] ? place : CODE.evicted;
      codes[i] = 16 * part + (counts[i] ? Math.ceil(LEVELS * counts[i] / chosen) : LEVELS);
      parts[part] += counts[i] ? counts[i] / chosen : 1;
      total += counts[i];
      everywhere += counts[i] === chosen;
    }
    const where = chosen === 1 ? `in layer ${layers[0]}, head ${heads[0]}`
      : `on average over ${number(chosen)} ${layers.length > 1 ? "layers and heads" : "heads"}`;
    const spread = chosen === 1 ? ""
      : `; ${number(everywhere)} by all, ${number(parts[3])} by none`;
    const summary = `kept ${number(total / chosen)} of ${number(tokens)} tokens ${where}: ` +
      `${number(parts[0])} head, ${number(parts[1])} recent, ${number(parts[2])} heavy${spread}`;
    return {codes, summary, counts, chosen, step};
  }
  messages(row, step) {
    const {view} = this, {tokens, messages} = view.steps[step], states = row.states[step];
    const codes = new Uint8Array(view.tokens.length).fill(LATER).fill(PLAIN, 0, tokens);
    for (const [start, stop, index] of view.spans) {
      if (index >= messages) break;
      codes.fill(16 * CODE[states[index]] + LEVELS, start, Math.min(stop, tokens));
    }
    const seen = {kept: 0, masked: 0, summarised: 0, hidden: 0};
    let left = 0, all = 0;
    states.forEach((state, index) => {
      seen[state] += 1;
      all += view.messages[index].tokens;
      if (state === "kept") left += view.messages[index].tokens;
    });
    const summary = `kept ${number(seen.kept)} of ${number(messages)} messages, ` +
      `${number(left)} of ${number(all)} tokens, as they were: ${number(seen.masked)} masked, ` +
      `${number(seen.summarised)} summarised, ${number(seen.hidden)} hidden`;
    return {codes, summary, states, step};
  }
  mark(block, {counts, chosen, states, step}) {
    const {view} = this, index = block.message;
    const {tokens, messages} = view.steps[step];
    block.hidden = index < 0 ? block.start >= tokens : index >= messages;
    if (block.hidden || index < 0) return;
    let label = states ? states[index] : "";
    if (counts) {
      let kept = 0;
      const first = block.start, size = block.body.childNodes.length;
      for (let i = first; i < first + size && i < counts.length; i++) kept += counts[i];
      const share = size ? kept / chosen / size : 0;
      label = size ? `${percent(share)} kept` : "no token";
      block.bar.style.setProperty("--share", share);
    }
    const picked = this.shared.picked === index;
    block.className = `block${states ? ` s-${label}` : ""}${picked ? " picked" : ""}`;
    block.button.setAttribute("aria-pressed", String(picked));
    if (block.label.textContent !== label) block.label.textContent = label;
  }
  async colour(codes, serial) {
    let last = performance.now();
    for (let i = 0; i < codes.length; i++) {
      if (codes[i] !== this.codes[i]) {
        this.codes[i] = codes[i];
        this.spans[i].className = CLASSES[codes[i]];
      }
      if (i % SLICE === 0 && performance.now() - last > PATIENCE) {
        await pause();
        if (serial !== this.serial) return false;  // a newer drawing is under way
        last = performance.now();
      }
    }
    return true;
  }
  read(token) {
    const text = JSON.stringify(this.view.tokens[token]);
    const kind = NAMES[this.codes[token] >> 4] ?? "template";
    const count = this.counts ? `, kept by ${this.counts[token]} of the chosen heads` : "";
    this.readout.textContent = `token ${number(token)} ${text}: ${kind}${count}`;
  }
  scrollTo(index) {
    const block = this.blocks.find((b) => b.message === index);
    if (!block || block.hidden) return;
    let frames = 4;
    const move = () => {  // blocks out of sight have guessed heights: look again once laid out
      const gap = block.getBoundingClientRect().top - this.list.getBoundingClientRect().top;
      this.list.scrollTop += gap - 8;
      if (frames-- > 0) requestAnimationFrame(move);
    };
    move();
  }
  labelOf(index) { return this.blocks.find((b) => b.message === index)?.label.textContent; }
}
"""
