// The conversation as turns and slots, coloured by segment, of which messages or a run of slots can be chosen.

const HUES = [215, 28, 150, 290, 50, 185, 335, 95];
const visible = (text) => text.replaceAll("\t", "⇥").replaceAll("\n", "↵\n");
const mean = (values) => (values.length ? values.reduce((sum, value) => sum + value, 0) / values.length : 0);

// What is chosen: segments, or the first slot and the one after the last.
export const choice = { segments: [], slots: [] };

export function drawStrip(place, state, changed) {
  const { text, segment, seen, position, recomputed, damaged, patched, quantised } = state.slots;
  const roles = Object.fromEntries([
    ...state.address.messages.map(({ role, segment: name }, at) => [name || `m${at}`, role]),
    ...Object.keys(state.written).map((name) => [name, "the model’s own"]),
  ]);
  const turns = [];
  for (const [slot, name] of segment.entries()) {
    if (turns.at(-1)?.name === name) turns.at(-1).to = slot + 1;
    else turns.push({ name, from: slot, to: slot + 1 });
  }
  const list = make("div", "turns");
  const spans = [];
  const boxes = turns.map((turn, number) => {
    const box = make("div", "turn", list);
    box.style.setProperty("--hue", HUES[number % HUES.length]);
    const inView = Array.from({ length: turn.to - turn.from }, (_, at) => seen[turn.from + at]).filter((share) => share > 0).length;
    const button = make("button", "turn-name", box);
    button.type = "button";
    button.append(turn.name, make("small", "", null, ` ${roles[turn.name] ?? "template"} · ${inView === turn.to - turn.from ? inView : `${inView} of ${turn.to - turn.from}`} slots in view`));
    button.disabled = !(turn.name in roles);
    button.addEventListener("click", () => {
      choice.slots = [];
      choice.segments = choice.segments.includes(turn.name) ? choice.segments.filter((name) => name !== turn.name) : [...choice.segments, turn.name];
      mark();
    });
    const slots = make("div", "slots", box);
    Object.assign(slots, { tabIndex: 0, id: `turn-${number}` });
    slots.setAttribute("role", "listbox");
    slots.setAttribute("aria-multiselectable", "true");
    slots.setAttribute("aria-label", `Slots of ${turn.name}`);
    for (let slot = turn.from; slot < turn.to; slot += 1) {
      const span = make("span", "slot", slots, visible(text[slot] ?? ""));
      span.id = `slot-${slot}`;
      span.setAttribute("role", "option");
      const said = {
        gone: position[slot] === null,
        hidden: seen[slot] === 0,
        partly: seen[slot] > 0 && seen[slot] < 1,
        recomputed: recomputed[slot],
        damaged: damaged[slot],
        patched: patched[slot],
        quantised: quantised[slot],
      };
      const marks = Object.keys(said).filter((mark) => said[mark]);
      span.classList.add(...marks);
      span.title = `slot ${slot}, ${position[slot] === null ? "evicted" : `position ${position[slot]}`}${marks.length ? `: ${marks.join(", ")}` : ""}`;
      spans.push(span);
    }
    keys(slots, turn);
    return { ...turn, box, button };
  });
  const arcs = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  arcs.setAttribute("class", "arcs");
  arcs.setAttribute("aria-hidden", "true");
  list.prepend(arcs);
  place.replaceChildren(list);

  let anchor = null;
  const slotAt = ({ clientX, clientY }) => spans.indexOf(document.elementFromPoint(clientX, clientY)?.closest(".slot"));
  list.addEventListener("pointerdown", (event) => {
    const slot = slotAt(event);
    if (slot < 0 || event.button) return;
    anchor = slot;
    run(slot, slot);
  });
  list.addEventListener("pointermove", (event) => {
    const slot = anchor === null ? -1 : slotAt(event);
    if (slot >= 0) run(anchor, slot);
  });
  for (const end of ["pointerup", "pointercancel", "pointerleave"]) list.addEventListener(end, () => { anchor = null; });

  function run(from, to) {
    choice.segments = [];
    choice.slots = [Math.min(from, to), Math.max(from, to) + 1];
    mark();
  }

  function keys(slots, turn) {
    let [from, at] = [turn.from, turn.from];
    const active = () => {
      slots.setAttribute("aria-activedescendant", `slot-${at}`);
      for (const span of spans) span.classList.toggle("active", span.id === `slot-${at}`);
    };
    slots.addEventListener("focus", active);
    slots.addEventListener("blur", () => spans[at].classList.remove("active"));
    slots.addEventListener("keydown", (event) => {
      const next = { ArrowLeft: at - 1, ArrowRight: at + 1, ArrowUp: at - 1, ArrowDown: at + 1, Home: turn.from, End: turn.to - 1 }[event.key];
      if (event.key === "Escape") { choice.slots = []; choice.segments = []; mark(); }
      if (event.key === " " || event.key === "Enter") { event.preventDefault(); from = at; run(at, at); }
      if (next === undefined) return;
      event.preventDefault();
      at = Math.max(turn.from, Math.min(turn.to - 1, next));
      if (event.shiftKey) run(from, at);
      else from = at;
      active();
      spans[at].scrollIntoView({ block: "nearest" });
    });
  }

  function mark() {
    for (const [slot, span] of spans.entries()) {
      const on = choice.segments.includes(segment[slot]) || (choice.slots.length > 0 && slot >= choice.slots[0] && slot < choice.slots[1]);
      span.setAttribute("aria-selected", `${on}`);
    }
    for (const { name, button } of boxes) button.setAttribute("aria-pressed", `${choice.segments.includes(name)}`);
    changed();
  }

  // What each later slot holds of what is hidden, in one layer or the mean of all: a bar under it, and an arrow to its turn.
  function remembered(layer) {
    const rows = state.contamination;
    if (!rows) return;
    const of = (slot) => {
      const values = (layer < 0 ? rows : [rows[layer]]).map((row) => row[slot]).filter((value) => value !== null);
      return values.length ? mean(values) : null;
    };
    const shares = spans.map((_, slot) => of(slot));
    for (const [slot, span] of spans.entries()) span.style.setProperty("--held", shares[slot] === null ? 0 : Math.min(1, shares[slot]));
    const hidden = new Set(state.hidden);
    const sourcesOf = (turn) => {
      const unseen = new Set(state.written[turn.name]);
      const gone = (slot) => hidden.has(slot) && !unseen.has(slot);
      return boxes.filter(({ from, to }) => from < turn.from && Array.from({ length: to - from }, (_, at) => from + at).some(gone));
    };
    const middle = ({ box }) => box.offsetTop + box.offsetHeight / 2;
    arcs.replaceChildren();
    arcs.setAttribute("height", list.offsetHeight);
    for (const turn of boxes) {
      const share = mean(shares.slice(turn.from, turn.to).filter((value) => value !== null));
      for (const source of share > 0.001 ? sourcesOf(turn) : []) {
        const path = document.createElementNS("http://www.w3.org/2000/svg", "path");
        const [start, end] = [middle(source), middle(turn)];
        path.setAttribute("d", `M22 ${start}C2 ${start} 2 ${end} 20 ${end}m-5 -4l5 4l-5 4`);
        path.setAttribute("stroke-width", `${1 + 5 * Math.min(1, share)}`);
        path.setAttribute("opacity", `${Math.min(1, 0.25 + share)}`);
        const title = document.createElementNS("http://www.w3.org/2000/svg", "title");
        title.textContent = `${turn.name} was computed with ${source.name} in view: ${(100 * share).toFixed(1)} % of its size`;
        path.append(title);
        arcs.append(path);
      }
    }
  }
  const known = new Set(boxes.map(({ name }) => name));
  choice.segments = choice.segments.filter((name) => known.has(name));
  mark();
  return { remembered };
}
