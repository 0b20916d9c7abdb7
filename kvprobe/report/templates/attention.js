// Attention of chosen layer and head: its pattern by CircuitsVis, and the text as one of its tokens attends to it.
"use strict";

// A pattern's cell is blank below the one and of full colour from the other.
const [LEAST_SHOWN, MOST_SHOWN] = [0.002, 0.5];
// Weights come as the square root's share of 255: see kvprobe/report/views/attention.py.
const weightOf = (level) => Number(((level / 255) ** 2).toPrecision(3));
const PALETTE = Array.from({ length: 256 }, (_, level) => colour(level / 255).map(Math.round));

function attentionView({ tokens, layers, heads, queries, masked, damaged, index, indexName }, packed, words, name) {
  const [isMasked, isDamaged] = [new Set(masked), new Set(damaged)];
  const starts = [0];
  for (const query of queries) starts.push(starts.at(-1) + query + 1);
  const perHead = starts.pop();
  const shown = tokens.map((token) => token.replaceAll("\t", "⇥").replaceAll("\n", "↵\n"));
  const named = (slot) => `${slot} '${tokens[slot].replaceAll("\n", "↵")}'`;
  // For labels on a canvas or an axis, which know no style.
  const labels = shown.map((token, slot) => `${isDamaged.has(slot) ? "▲" : ""}${isMasked.has(slot) ? struckThrough(token) : token}`);

  const view = make("div", "heads");
  const bar = make("div", "heads-bar", view);
  const layerChoice = make("select", "", bar);
  layerChoice.setAttribute("aria-label", "Layer");
  for (const label of layers) make("option", "", layerChoice, label);
  const choice = make("div", "heads-choice", bar);
  choice.setAttribute("role", "radiogroup");
  choice.setAttribute("aria-label", "Head");
  const buttons = heads.map((label, head) => headButton(choice, `${name}-head`, label, tokens.length, queries.length, () => pick(layerChoice.selectedIndex, head)));
  const text = make("div", "heads-text", view);
  const spans = shown.map((token, slot) => {
    const parts = `${isMasked.has(slot) ? "masked " : ""}${isDamaged.has(slot) ? "damaged " : ""}${queries.includes(slot) ? "query" : ""}`;
    return make("span", parts.trim(), text, token);
  });
  text.tabIndex = 0;
  text.setAttribute("role", "application");
  text.setAttribute("aria-label", words);
  const status = make("p", "heads-status", view);
  status.setAttribute("role", "status");
  legend(make("div", "map-legend", view), masked.length, damaged.length, index && indexName, queries.length === tokens.length);
  const place = make("div", "heads-pattern", view);
  const pattern = queries.length === tokens.length ? circuitsVisPattern(place, name) : null;

  let [levels, unpackedLayer] = [null, null]; // [heads][queries][slots up to the query], and of which layer
  let [head, row] = [0, queries.length - 1];
  const rowOf = (which, at) => levels.subarray(which * perHead + starts[at], which * perHead + starts[at] + queries[at] + 1);

  async function choose(layer, which) {
    head = which;
    layerChoice.selectedIndex = layer;
    buttons[head].input.checked = true;
    if (layer !== unpackedLayer) {
      const bytes = await unpacked(packed[layer].textContent);
      if (layerChoice.selectedIndex !== layer) return; // another layer was chosen in the meantime
      [levels, unpackedLayer] = [bytes, layer];
      for (const [at, button] of buttons.entries()) tell(button, at, index?.[layer][at] ?? null);
    }
    draw();
  }

  // Views of the same layers and heads, as before and after a mask, go together.
  function pick(layer, which) {
    choose(layer, which);
    document.dispatchEvent(new CustomEvent("head", { detail: { by: view, layer: layers[layer], head: heads[which] } }));
  }
  document.addEventListener("head", ({ detail }) => {
    const [layer, which] = [layers.indexOf(detail.layer), heads.indexOf(detail.head)];
    if (detail.by !== view && layer >= 0 && which >= 0) choose(layer, which);
  });

  function tell({ thumbnail, number }, which, value) {
    paint(thumbnail, queries, (at) => rowOf(which, at));
    number.textContent = value === null ? "" : signed(Number(value.toFixed(2)));
    number.className = value > 0 ? "above" : "below";
  }

  function draw() {
    view.dataset.shown = `${layers[unpackedLayer]}, ${heads[head]}`;
    const rows = queries.map((_, at) => Array.from(rowOf(head, at), weightOf));
    if (pattern) {
      // A hole in a row is a cell that the component does not draw: Chart.js takes seconds for 65,536 cells.
      for (const cells of rows) cells.forEach((weight, slot) => weight < LEAST_SHOWN && delete cells[slot]);
      pattern({ attention: rows, tokens: labels, minValue: 0, maxValue: MOST_SHOWN, positiveColor: "#053061", zoomed: true });
    } else if (rows.length > 1) {
      const values = rows.map((weights) => tokens.map((_, slot) => weights[slot] ?? null));
      const columns = labels.map((label, slot) => `${slot} ${label}`);
      const props = { rows: queries.map((slot) => columns[slot]), columns, values, unit: "", rowAxis: "from", columnAxis: "to" };
      place.replaceChildren(heatMap(props, `Attention of ${view.dataset.shown}`));
    }
    attend(row);
  }

  // Colours the text by what one query pays to each of its slots.
  function attend(at) {
    if (!levels) return;
    const paid = rowOf(head, at);
    for (const [slot, span] of spans.entries()) {
      const [red, green, blue] = PALETTE[paid[slot] ?? 0];
      span.style.background = slot < paid.length ? `rgb(${red}, ${green}, ${blue})` : "";
      span.style.color = paid[slot] > 150 ? "#ffffff" : "";
      span.classList.toggle("asked", slot === queries[at]);
    }
    const most = Array.from(paid, (level, slot) => [level, slot]).filter(([level]) => level).sort(([a], [b]) => b - a).slice(0, 4);
    const largest = most.map(([level, slot]) => `${weightOf(level)} on ${named(slot)}`).join(", ");
    status.textContent = `${view.dataset.shown}: slot ${named(queries[at])} spends ${largest}.`;
  }

  const slotAt = ({ target }) => spans.indexOf(target);
  text.addEventListener("pointerover", (event) => {
    const slot = slotAt(event);
    if (slot < 0 || !levels) return;
    if (queries.includes(slot)) return attend(queries.indexOf(slot));
    attend(row);
    const level = slot <= queries[row] ? rowOf(head, row)[slot] : 0;
    status.textContent = `${view.dataset.shown}: slot ${named(queries[row])} spends ${weightOf(level)} on ${named(slot)}.`;
  });
  text.addEventListener("pointerleave", () => attend(row));
  text.addEventListener("click", (event) => {
    const at = queries.indexOf(slotAt(event));
    if (at >= 0) attend((row = at));
  });
  text.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!step) return;
    event.preventDefault();
    row = Math.max(0, Math.min(queries.length - 1, row + step));
    attend(row);
    see(spans[queries[row]]);
  });
  // Scrolls the text alone, and not the page.
  const see = ({ offsetTop, offsetHeight }) => {
    const [above, below] = [offsetTop + offsetHeight + 8 - text.clientHeight, offsetTop - 8];
    text.scrollTop = Math.min(Math.max(text.scrollTop, above), below);
  };
  layerChoice.addEventListener("change", () => pick(layerChoice.selectedIndex, head));

  const sizes = (index ?? []).flat().map((value) => Math.abs(value ?? 0));
  const first = Math.max(0, sizes.indexOf(sizes.reduce((most, size) => Math.max(most, size), 0)));
  choose(Math.floor(first / heads.length), first % heads.length).then(() => see(spans[queries[row]]));
  return view;
}

function headButton(parent, group, label, width, height, pick) {
  const button = make("label", "", parent);
  const input = make("input", "", button);
  Object.assign(input, { type: "radio", name: group });
  input.addEventListener("change", pick);
  const thumbnail = make("canvas", "", button);
  Object.assign(thumbnail, { width, height });
  make("span", "", button, label);
  return { input, thumbnail, number: make("b", "", button) };
}

function paint(canvas, queries, rowAt) {
  const image = new ImageData(canvas.width, canvas.height);
  for (let at = 0; at < queries.length; at += 1) {
    for (const [slot, level] of rowAt(at).entries()) image.data.set([...PALETTE[level], 255], 4 * (at * canvas.width + slot));
  }
  canvas.getContext("2d").putImageData(image, 0, 0);
}

async function unpacked(text) {
  const bytes = Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

// Returns what draws a pattern in place of the one before. CircuitsVis has no way to take a pattern down, and Chart.js keeps
// every chart that is not: so one component of ours stays, and React takes down what it held when the key changes.
function circuitsVisPattern(place, name) {
  let [held, props, key] = [null, null, 0];
  class Held {
    constructor() { held = this; }
    render() {
      return { $$typeof: Symbol.for("react.element"), type: CircuitsVis.AttentionPattern, key: `${key}`, ref: null, props, _owner: null };
    }
  }
  Held.prototype.isReactComponent = {};
  place.id = `${name}-pattern`;
  return (next) => {
    props = next;
    key += 1;
    if (key === 1) CircuitsVis.render(place.id, Held);
    else held?.updater.enqueueForceUpdate(held);
  };
}

function legend(parent, anyMasked, anyDamaged, indexName, square) {
  const ticks = Array.from({ length: 21 }, (_, tick) => `rgb(${PALETTE[Math.round(255 * tick / 20)]}) ${5 * tick}%`);
  make("span", "", parent, "weight 0");
  make("i", "", parent).style.background = `linear-gradient(to right, ${ticks})`;
  make("span", "", parent, "1 in text and small patterns (by the square root)");
  if (square) make("span", "", parent, `large pattern: blank below ${LEAST_SHOWN}, full colour from ${MOST_SHOWN}`);
  if (anyMasked) make("span", "masked", parent, "masked");
  if (anyDamaged) make("span", "damaged", parent, "▲ damaged");
  if (indexName) make("span", "", parent, `beside each head: ${indexName}`);
}

// A long stroke over each character.
function struckThrough(token) {
  return [...token.replace(/\s/g, "")].map((character) => `${character}\u0336`).join("");
}
