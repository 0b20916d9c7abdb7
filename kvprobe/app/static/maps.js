// Layer × slot maps, attention and memory, drawn as reports draw them.

import { mapPicture, saving } from "./pictures.js";

const MIB = 2 ** 20;

function mapOf(place, state, values, caption, title) {
  const { text, segment } = state.slots;
  const columns = text.map((token, slot) => `${slot} ${token.replaceAll("\n", "↵")} (${segment[slot]})`);
  const rows = values.map((_, layer) => `${layer}`);
  const map = heatMap({ rows, columns, values, unit: "of its size", rowAxis: "layer", columnAxis: "slot", upward: true, tallest: 240 }, caption);
  const view = make("div", "view drawn");
  view.append(map);
  place.replaceChildren(make("p", "soft", null, caption), view);
  saving(place, title.replaceAll(" ", "-"), () => mapPicture(state, values, title));
}

export function drawRemembered(place, state) {
  if (!state.contamination) {
    const none = "Nothing: what is left was computed again, or stands before what is hidden.";
    place.replaceChildren(make("p", "soft", null, state.contamination_left_out || (state.hidden.length ? none : "Nothing is hidden.")));
    return;
  }
  const caption = [
    "Slots that were computed while the hidden ones were in view: how far each is, layer by layer, from what it holds",
    "when it is read without them (‖difference‖ / ‖value‖, mean of parts and heads). Grey: hidden, or before it.",
  ];
  mapOf(place, state, state.contamination, caption.join(" "), "what later slots hold of what is hidden");
}

export function drawChange(place, state) {
  const values = state.change.flat().filter((value) => value !== null);
  if (!values.some((value) => value > 0)) {
    const none = state.edits.length ? "No slot that is left holds other numbers." : "Nothing was done yet.";
    place.replaceChildren(make("p", "soft", null, none));
    return;
  }
  const caption = [
    "How far what each slot holds is from what it held with everything in view (‖difference‖ / ‖before‖, mean of parts",
    "and heads). Keys do not count where they were computed at other positions. Grey: evicted.",
  ];
  mapOf(place, state, state.change, caption.join(" "), "what changed in the cache");
}

export function drawMemory(place, { memory: { full, held, live, note, slots, of } }) {
  const list = make("dl", "memory");
  const bar = (name, bytes, total) => {
    make("dt", "", list, name);
    const value = make("dd", "", list, `${(bytes / MIB).toFixed(2)} MiB`);
    value.style.setProperty("--share", Math.min(1, bytes / total));
  };
  const total = Math.max(full.slots + full.state, held.slots + held.state);
  bar("with everything", full.slots + full.state, total);
  bar("held now", held.slots + held.state, total);
  if (live !== null) bar("what later queries may read", live, total);
  if (full.state) {
    bar("slots", held.slots, total);
    bar("states of recurrent layers", held.state, total);
  }
  place.replaceChildren(list, make("p", "soft", null, `${slots} of ${of} slots in view. ${note}`));
}

// What is measured on request: gives whether there is something to draw; else says why there is not, or offers to ask.
export function offered(place, found, leftOut, ask, words, id) {
  if (found) return true;
  if (leftOut || !ask) {
    place.replaceChildren(make("p", "soft", null, leftOut || "This was not measured for this state."));
    return false;
  }
  const button = make("button", "", null, words);
  Object.assign(button, { type: "button", id });
  button.addEventListener("click", ask);
  place.replaceChildren(button);
  return false;
}

export function drawAttention(place, state, ask) {
  if (offered(place, state.attention, state.attention_left_out, ask, "Show attention", "show-attention")) {
    const { caption, layers, heads, tokens, segments, queries, masked, damaged, index, index_name: indexName, weights, values, after, values_after: valuesAfter } = state.attention;
    const given = { weights, values, after, valuesAfter };
    const readings = Object.keys(given).filter((name) => name === "weights" || given[name].length);
    const packed = readings.flatMap((name) => given[name].map((textContent) => ({ textContent })));
    const view = make("div", "view drawn");
    place.replaceChildren(make("p", "soft", null, caption), view);
    view.append(attentionView({ tokens, segments, layers, heads, queries, masked, damaged, index, indexName, readings }, packed, caption, "attention"));
  }
}
