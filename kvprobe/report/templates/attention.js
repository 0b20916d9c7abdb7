// Attention in a chosen layer and head, of one reading of a text or of two: maps, and the text coloured by one query's attention.
"use strict";

const squared = (level) => (level / 255) ** 2; // how packed numbers are stored; see kvprobe/report/views/packing.py
const [PLAIN, WEIGHTED] = ["attention", "value-weighted"];

function attentionView({ tokens, segments, layers, heads, queries, masked, damaged, index, indexName, readings }, packed, words, name) {
  const [isMasked, isDamaged, rowOf] = [new Set(masked), new Set(damaged), new Map(queries.map((slot, row) => [slot, row]))];
  const kinds = readings.includes("after") ? ["before", "after", "difference"] : ["attention"];
  const views = kinds.length > 1 ? ["all three", ...kinds] : kinds;
  const starts = [0];
  for (const query of queries) starts.push(starts.at(-1) + query + 1);
  const perHead = starts.pop();
  const named = (slot) => `${slot} '${tokens[slot].replaceAll("\n", "↵")}'`;
  const labels = tokens.map((token, slot) => `${slot} ${isDamaged.has(slot) ? "▲" : ""}${token.replaceAll("\n", "↵").replaceAll("\t", "⇥")}`);
  const bands = [];
  for (const [slot, label] of segments.entries()) {
    if (bands.at(-1)?.label === label) bands.at(-1).to = slot + 1;
    else bands.push({ label, from: slot, to: slot + 1 });
  }
  const rowBreaks = queries.flatMap((slot, row) => (row && segments[slot] !== segments[queries[row - 1]] ? [row] : []));

  const view = make("div", "heads");
  const bar = make("div", "heads-bar", view);
  const chooser = (label, options, pick) => {
    const select = make("select", "", make("label", "", bar, label));
    for (const option of options) make("option", "", select, option);
    select.addEventListener("change", () => pick(select.selectedIndex));
    select.parentElement.hidden = options.length < 2;
    return select;
  };
  const layerChoice = chooser("layer ", layers.map(ordinal), (layer) => pick({ layer }));
  const viewChoice = chooser("show ", views, (at) => pick({ view: views[at] }));
  const weights = readings.includes("values") ? [PLAIN, WEIGHTED] : [PLAIN];
  const weightChoice = chooser("weights ", weights, (at) => pick({ by: weights[at] }));
  for (const kind of ["SVG", "PNG"]) {
    const button = make("button", "", bar, `save ${kind}`);
    button.addEventListener("click", () => save(drawn.svg, `attention ${stated()} ${state.view} ${state.by}`.replace(/\W+/g, "-"), kind));
  }
  const places = make("div", "heads-places", view);
  const overview = index && make("div", "heads-all", places);
  const choice = make("div", "heads-choice", places);
  choice.setAttribute("role", "radiogroup");
  choice.setAttribute("aria-label", "Head");
  const buttons = heads.map((label, head) => headButton(choice, `${name}-head`, label, tokens.length, queries.length, () => pick({ head })));
  const text = make("div", "heads-text", view);
  text.tabIndex = 0;
  text.setAttribute("role", "application");
  text.setAttribute("aria-label", words);
  const spans = writeTokens(text, tokens, bands, (slot) => `${isMasked.has(slot) ? "masked " : ""}${isDamaged.has(slot) ? "damaged " : ""}${rowOf.has(slot) ? "query" : ""}`);
  const status = make("p", "heads-status", view);
  status.setAttribute("role", "status");
  const place = make("div", "heads-pattern", view);
  place.tabIndex = 0;
  place.setAttribute("role", "application");
  place.setAttribute("aria-label", "Map of attention: the arrow keys move the cell.");
  explain(make("p", "heads-legend", view));

  const numbers = (index ?? []).flat().map((value) => value ?? 0);
  const [sizes, lowest] = [numbers.map(Math.abs), numbers.reduce((least, value) => Math.min(least, value), 0)];
  const first = Math.max(0, sizes.indexOf(sizes.reduce((most, size) => Math.max(most, size), 0)));
  const state = { layer: Math.floor(first / heads.length), head: first % heads.length, view: views[0], by: PLAIN, row: queries.length - 1 };
  let [data, loaded] = [null, null]; // the chosen layer's packed numbers by reading, and which layer that is
  let [shown, drawn] = [{}, null]; // the chosen head's rows by kind, and their picture
  const stated = () => `${layers[state.layer]}, ${heads[state.head]}`;
  const coloured = () => (state.view === "all three" ? "difference" : state.view);

  // Changes what is shown; views of the same page, such as those of a report, follow, and so does the page's address.
  function pick(change) {
    show(change);
    const chosen = { layer: ordinal(layers[state.layer]), head: ordinal(heads[state.head]), show: state.view, weights: state.by, slot: `${queries[state.row]}` };
    const others = Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
    try { history.replaceState(null, "", `#${new URLSearchParams({ ...others, ...chosen })}`); } catch { /* a page without an address */ }
    document.dispatchEvent(new CustomEvent("attention", { detail: { by: view, chosen } }));
  }
  function follow(chosen) {
    const given = { layer: layers.findIndex((label) => ordinal(label) === chosen.layer), head: heads.findIndex((label) => ordinal(label) === chosen.head), row: rowOf.get(Number(chosen.slot)) ?? -1 };
    const change = Object.fromEntries(Object.entries(given).filter(([, at]) => at >= 0));
    if (views.includes(chosen.show)) change.view = chosen.show;
    if (weights.includes(chosen.weights)) change.by = chosen.weights;
    return show(change);
  }
  const fromAddress = () => follow(Object.fromEntries(new URLSearchParams(location.hash.slice(1))));
  document.addEventListener("attention", ({ detail }) => detail.by !== view && follow(detail.chosen));
  addEventListener("hashchange", fromAddress);

  async function show(change) {
    Object.assign(state, change);
    const { layer } = state;
    if (layer !== loaded) {
      const arrays = await Promise.all(readings.map((_, at) => unpacked(packed[at * layers.length + layer].textContent)));
      if (layer !== state.layer) return; // another layer was chosen in the meantime
      [data, loaded] = [Object.fromEntries(readings.map((reading, at) => [reading, arrays[at]])), layer];
    }
    layerChoice.selectedIndex = layer;
    viewChoice.selectedIndex = views.indexOf(state.view);
    weightChoice.selectedIndex = weights.indexOf(state.by);
    buttons[state.head].input.checked = true;
    for (const [head, { thumbnail, number }] of buttons.entries()) {
      paint(thumbnail, rowsOf(coloured(), head));
      const value = index?.[layer][head] ?? null;
      number.textContent = value === null ? "" : lowest < 0 ? signed(Number(value.toFixed(2))) : value.toFixed(2);
      number.className = value > 0 ? "above" : "below";
    }
    shown = Object.fromEntries(kinds.map((kind) => [kind, rowsOf(kind, state.head)]));
    view.dataset.shown = `${stated()}, ${state.view}, ${state.by}`;
    overview?.querySelector(".map-chosen")?.remove();
    if (overview) Object.assign(make("div", "map-chosen", overview.querySelector(".map-cells")).style, box(state.head, heads.length, layers.length - 1 - layer, layers.length));
    redraw();
  }

  // One reading's weights, [queries][slots up to the query]; null where the head may not see the slot.
  function reading(kind, head) {
    const [levels, values] = kind === "after" ? [data.after, data.valuesAfter] : [data.weights, data.values];
    const norm = (slot) => (values ? values[head * tokens.length + slot] : isMasked.has(slot) ? 0 : 255);
    return queries.map((query, row) => {
      const start = head * perHead + starts[row];
      const plain = Array.from(levels.subarray(start, start + query + 1), (level, slot) => (level || norm(slot) ? squared(level) : null));
      if (state.by === PLAIN) return plain;
      const read = plain.map((weight, slot) => weight * squared(norm(slot)));
      const sum = read.reduce((total, share) => total + share, 0) || 1;
      return plain.map((weight, slot) => weight === null ? null : read[slot] / sum);
    });
  }
  function rowsOf(kind, head) {
    if (kind !== "difference") return reading(kind, head);
    const before = reading("before", head);
    return reading("after", head).map((row, at) => row.map((weight, slot) => (weight === null && before[at][slot] === null ? null : weight - before[at][slot])));
  }
  // Slots that no query of the head may see: before or after, if the kind is the difference.
  function gone(kind) {
    if (kind === "difference") return new Set([...gone("before"), ...gone("after")]);
    return new Set([...tokens.keys()].filter((slot) => shown[kind].at(-1)[slot] === null && shown[kind].every((row) => (row[slot] ?? null) === null)));
  }

  function redraw() {
    const width = place.clientWidth;
    if (!data || !width) return; // in a section that is closed
    const titled = { attention: "", before: "before: ", after: "after: ", difference: "after − before: " };
    const panels = (state.view === "all three" ? kinds : [state.view]).map((kind) => ({ title: `${titled[kind]}${stated()}${state.by === WEIGHTED ? ", value-weighted" : ""}`, rows: shown[kind], gone: gone(kind) }));
    const axes = { rows: queries.map((slot) => labels[slot]), columns: labels, bands, rowBreaks };
    drawn = picture({ panels, ...axes, signed: coloured() === "difference", name }, width - 28);
    place.replaceChildren(drawn.svg);
    attend();
  }
  let drawnWidth = 0;
  new ResizeObserver(() => {
    if (place.clientWidth === drawnWidth) return;
    drawnWidth = place.clientWidth;
    redraw();
  }).observe(place);

  // Marks a query, and a slot if there is one, in maps and text; colours the text by the attention of the query.
  function attend(row = state.row, slot = null) {
    const paid = shown[coloured()]?.[row];
    if (!paid) return;
    drawn?.mark(row, slot);
    for (const [at, span] of spans.entries()) {
      span.style.background = at < paid.length ? (paid[at] === null ? "" : `rgb(${shade(paid[at])})`) : "";
      span.style.color = Math.abs(paid[at]) > 0.35 ? "#ffffff" : "";
      span.classList.toggle("asked", at === queries[row]);
      span.classList.toggle("seen", at === slot);
    }
    const from = `${stated()}: slot ${named(queries[row])}`;
    const [before, after] = [shown.before?.[row], shown.after?.[row]];
    const said = (weight) => (weight === null ? "hidden" : `${rounded(weight)}`);
    if (slot !== null) {
      const spent = slot > queries[row] ? "nothing" : before ? `${said(before[slot])} before, ${said(after[slot])} after (${signed(rounded(paid[slot] === null ? 0 : after[slot] - before[slot]))})` : said(paid[slot]);
      status.textContent = `${from} spends ${spent} on ${named(slot)}${slot > queries[row] ? ", which is later" : ""}.`;
      return;
    }
    const most = paid.map((weight, at) => [weight, at]).filter(([weight]) => Math.abs(weight) >= 5e-4).sort(([a], [b]) => Math.abs(b) - Math.abs(a)).slice(0, 4);
    const largest = most.map(([weight, at]) => `${coloured() === "difference" ? signed(rounded(weight)) : rounded(weight)} on ${named(at)}`).join(", ");
    status.textContent = coloured() === "difference" ? `${from} changes most by ${largest || "nothing"}.` : `${from} spends ${largest}.`;
  }

  const slotAt = ({ target }) => spans.indexOf(target);
  text.addEventListener("pointerover", (event) => {
    const slot = slotAt(event);
    if (slot >= 0) attend(state.row, slot);
  });
  text.addEventListener("click", (event) => {
    const row = rowOf.get(slotAt(event));
    if (row !== undefined) pick({ row });
  });
  text.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!step) return;
    event.preventDefault();
    pick({ row: Math.max(0, Math.min(queries.length - 1, state.row + step)) });
    see(spans[queries[state.row]]);
  });
  for (const part of [text, place]) part.addEventListener("pointerleave", () => attend());
  let cell = null; // that the arrow keys left
  place.addEventListener("pointermove", (event) => {
    const under = drawn?.at(event);
    if (under) attend(...under);
    else attend();
  });
  place.addEventListener("click", (event) => {
    const under = drawn?.at(event);
    if (under) pick({ row: under[0] });
  });
  place.addEventListener("keydown", (event) => {
    const [down, right] = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key] ?? [];
    if (down === undefined) return;
    event.preventDefault();
    const [row, slot] = cell ?? [state.row, queries[state.row]];
    cell = [Math.max(0, Math.min(queries.length - 1, row + down)), Math.max(0, Math.min(tokens.length - 1, slot + right))];
    attend(...cell);
  });
  // Scrolls the text, not the page.
  const see = ({ offsetTop, offsetHeight }) => {
    const [above, below] = [offsetTop + offsetHeight + 8 - text.clientHeight, offsetTop - 8];
    text.scrollTop = Math.min(Math.max(text.scrollTop, above), below);
  };

  if (overview) {
    const map = heatMap({ rows: layers.map(ordinal), columns: heads.map(ordinal), values: index, unit: "", rowAxis: "layer", columnAxis: "head", upward: true, tallest: 200 }, `Every layer and head: ${indexName}`);
    map.addEventListener("pick", ({ detail: [layer, head] }) => pick({ layer, head }));
    make("p", "heads-legend", overview, `Colour of each layer and head: ${indexName}. Click to choose.`);
    overview.prepend(map);
  }
  fromAddress().then(() => see(spans[queries[state.row]]));
  return view;

  function explain(line) {
    line.textContent = "Colours of maps and text are on one scale for all heads, by the square root of the weight. ";
    if (kinds.length > 1) line.append("The difference is after less before: blue is gained, red lost. ");
    if (weights.length > 1) line.append("Value-weighted: each weight times the norm of its slot's value, as a share of the row's sum. ");
    if (masked.length) make("span", "masked", line, "masked or evicted").after(" ");
    if (damaged.length) make("span", "damaged", line, "▲ damaged").after(" ");
    if (indexName) line.append(`Beside each head: ${indexName}. `);
    line.append("The address of this page, after #, holds what is shown.");
  }
}

// The number in "layer 12"; other labels whole.
function ordinal(label) {
  return label.replace(/^(layer|head) /, "");
}

function box(column, columns, row, rows) {
  return { left: `${(100 * column) / columns}%`, top: `${(100 * row) / rows}%`, width: `${100 / columns}%`, height: `${100 / rows}%` };
}

// The tokens as text, segment by segment if they have labels; returns an element for each.
function writeTokens(parent, tokens, bands, marks) {
  const spans = [];
  for (const { label, from, to } of bands.length > 0 ? bands : [{ label: "", from: 0, to: tokens.length }]) {
    if (label) make("b", "", parent, label);
    const turn = make("div", "", parent);
    for (let slot = from; slot < to; slot += 1) spans.push(make("span", marks(slot).trim(), turn, tokens[slot].replaceAll("\t", "⇥").replaceAll("\n", "↵\n")));
  }
  return spans;
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

async function unpacked(text) {
  const bytes = Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}
