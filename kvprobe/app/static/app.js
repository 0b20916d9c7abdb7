// The page: it draws the state at its address, and asks the server for those that are not known yet.
import { addressOf, fragmentOf, keyOf, known, parentOf, remember, tidy } from "./state.js";
import { compute, opened, shared } from "./server.js";
import { choice, drawStrip } from "./strip.js";
import { saving, stripPicture } from "./pictures.js";
import { drawReplies } from "./replies.js";
import { drawReadings } from "./readings.js";
import { drawAttention, drawChange, drawMemory, drawRemembered } from "./maps.js";

const at = (id) => document.getElementById(id);
const LEGEND = {
  hidden: "hidden or evicted",
  partly: "hidden from some heads",
  damaged: "damaged",
  patched: "of another conversation",
  recomputed: "computed again",
  quantised: "quantised",
};
const NEED_SLOTS = ["mask", "evict", "re-index", "restart", "compact", "patch"];
const page = { live: false, address: null, state: null, strip: null, stop: null, framed: location.protocol === "about:", fragment: "" };

function say(text, wrong = false) {
  at("status").textContent = text;
  at("status").classList.toggle("wrong", wrong);
}

// A notebook's frame has no address of its own.
const fragment = () => (page.framed ? page.fragment : location.hash);

// Goes to an address, as a link would.
function go(address) {
  const to = fragmentOf(address);
  if (page.framed) page.fragment = to;
  else if (to !== fragment()) { location.hash = to; return; }
  show();
}

// `more` is what to measure beside: `attention`, or what probes `read`.
async function show(more = {}) {
  page.stop?.abort();
  let address = null;
  try { address = addressOf(fragment()); } catch (error) { say(error.message, true); return; }
  page.address = address;
  const found = known.states.get(keyOf(address));
  const measured = { attention: found?.attention || found?.attention_left_out, read: found?.readings || found?.readings_left_out };
  const asked = Object.fromEntries(Object.entries(measured).map(([name, had]) => [name, Boolean(more[name] || had)]));
  if (found && !Object.keys(more).some((name) => !measured[name])) { drawState(found); return; }
  if (!page.live) { say("This state is not in this file.", true); return; }
  const stop = new AbortController();
  page.stop = stop;
  document.body.setAttribute("aria-busy", "true");
  at("cancel").hidden = false;
  try {
    const state = await compute(address, asked, (step) => page.stop === stop && say(`${step} …`), stop.signal);
    if (state) remember(state);
    if (page.stop !== stop) return;
    if (state) drawState(state);
    else say("Cancelled.");
  } catch (error) {
    if (page.stop === stop) say(error.message, true);
  } finally {
    if (page.stop === stop) {
      page.stop = null;
      at("cancel").hidden = true;
      document.body.removeAttribute("aria-busy");
    }
  }
}

function drawState(state) {
  page.state = state;
  at("model").textContent = `${state.model.name} · ${state.model.layers} layers · ${state.model.dtype}`;
  at("ask").value = state.address.ask;
  at("undo").disabled = !state.edits.length;
  page.strip = drawStrip(at("strip"), state, chosen);
  const [names, of] = [state.address.messages.map(({ segment }, number) => segment || `m${number}`), at("of").value];
  at("of").replaceChildren(...names.map((name) => make("option", "", null, name)));
  at("of").value = names.includes(of) ? of : names[0];
  offer();
  const layer = at("layer");
  layer.max = `${state.model.layers - 1}`;
  at("layer-choice").hidden = !state.contamination;
  ofLayer();
  drawReplies(at("replies"), state);
  at("notes").replaceChildren(...state.notes.map((note) => make("p", "note", null, note)));
  drawMemory(at("memory"), state);
  drawRemembered(at("remembered").lastElementChild, state);
  drawChange(at("changed").lastElementChild, state);
  drawAttention(at("attention").lastElementChild, state, page.live ? () => show({ attention: true }) : null);
  drawReadings(at("readings").lastElementChild, state, page.live ? () => show({ read: true }) : null);
  at("python").textContent = state.python;
  drawStates();
  const reply = state.replies.at(-1);
  say(`${state.edits.at(-1) ?? "Everything in view"}. The model says: ${reply.text}`);
}

// What the message says, to be changed into what it says in another conversation.
function offer() {
  const said = page.state.address.messages[at("of").selectedIndex]?.content ?? "";
  if (at("instead").dataset.said !== said) at("instead").value = at("instead").dataset.said = said;
}

function ofLayer() {
  const layer = Number(at("layer").value);
  at("layer-name").textContent = layer < 0 ? "all layers" : `layer ${layer}`;
  page.strip?.remembered(layer);
}

// The states of this conversation and question as a tree: each beneath the one that it was made from.
function drawStates() {
  const here = keyOf(page.address);
  const origin = JSON.stringify([tidy(page.address).messages, page.address.ask]);
  const states = [...known.states.values()]
    .filter(({ address }) => JSON.stringify([tidy(address).messages, address.ask]) === origin)
    .map((state) => ({ state, path: tidy(state.address).edits.map((edit) => JSON.stringify(edit)) }));
  const sorted = states.sort((one, other) => (`${one.path}` < `${other.path}` ? -1 : 1));
  at("states").replaceChildren(...sorted.map(({ state, path }) => {
    const item = make("li", "");
    item.style.setProperty("--depth", path.length);
    const link = make("a", "", item, state.edits.at(-1) ?? "everything in view");
    link.href = fragmentOf(state.address);
    link.addEventListener("click", (event) => {  // in a notebook's frame the link would lead to the notebook
      if (event.ctrlKey || event.metaKey || event.shiftKey) return;
      event.preventDefault();
      go(state.address);
    });
    if (keyOf(state.address) === here) link.setAttribute("aria-current", "page");
    make("span", "soft", item, ` ${state.replies.at(-1).text}`);
    return item;
  }));
}

function chosen() {
  const { segments, slots } = choice;
  const run = slots[1] - slots[0] === 1 ? `slot ${slots[0]}` : `slots ${slots[0]} to ${slots[1] - 1}`;
  const words = segments.length ? segments.join(", ") : slots.length ? run : "";
  at("chosen").textContent = words ? `Chosen: ${words}.` : "Nothing is chosen; damage, quantisation and policies then act on the whole cache.";
  for (const button of document.querySelectorAll("[data-edit]")) {
    const needs = NEED_SLOTS.includes(button.dataset.edit);
    button.disabled = !page.live || (needs && !words) || (button.dataset.edit === "restart" && !segments.length);
  }
}

function edit(kind) {
  const what = choice.segments.length ? "segments" : choice.slots.length ? "slots" : null;
  const where = ["quantise", "policy"].includes(kind) || !what ? {} : { [what]: choice[what] };
  const how = {
    compact: () => ({ then: at("then").value, text: at("request").value.trim() }),
    patch: () => ({ of: at("of").value, text: at("instead").value }),
    damage: () => ({ fault: at("fault").value, rate: Number(at("rate").value) / 100, seed: Number(at("seed").value) }),
    quantise: () => ({ bits: Number(at("bits").value) }),
    policy: () => ({ policy: at("policy").value }),
  }[kind]?.() ?? {};
  choice.segments = [];
  choice.slots = [];
  go(tidy({ ...page.address, edits: [...page.address.edits, { kind, ...where, ...how }] }));
}

// Messages from JSON, or from lines that begin with a role.
function messagesOf(text) {
  if (text.trim().startsWith("[")) return JSON.parse(text).map(({ role, content }) => ({ role: String(role), content: String(content) }));
  const messages = [];
  for (const line of text.split("\n")) {
    const [, role, content] = line.match(/^\s*(system|user|assistant)\s*:\s*(.*)$/) ?? [];
    if (role) messages.push({ role, content });
    else if (line.trim() && messages.length) messages.at(-1).content += `\n${line}`;
  }
  return messages;
}

function undo() {
  if (page.address?.edits.length) go(parentOf(page.address));
}

function wire() {
  saving(at("strip-saving"), "conversation", () => stripPicture(at("strip")));
  for (const [name, label] of Object.entries(JSON.parse(at("faults").textContent))) make("option", "", at("fault"), label).value = name;
  at("fault").value = "zeros";
  for (const [mark, words] of Object.entries(LEGEND)) at("legend").append(make("span", `slot ${mark}`, null, words), " ");
  for (const button of document.querySelectorAll("[data-edit]")) button.addEventListener("click", () => edit(button.dataset.edit));
  at("tools").addEventListener("submit", (event) => {
    event.preventDefault();
    if (page.live) go(tidy({ ...page.address, ask: at("ask").value }));
  });
  at("undo").addEventListener("click", undo);
  addEventListener("keydown", (event) => {
    if (!(event.key === "z" && (event.ctrlKey || event.metaKey)) || event.target.matches("input, textarea")) return;
    event.preventDefault();
    undo();
  });
  at("cancel").addEventListener("click", () => page.stop?.abort());
  at("layer").addEventListener("input", ofLayer);
  at("of").addEventListener("change", offer);
  at("read").addEventListener("click", () => {
    try {
      const messages = messagesOf(at("said").value);
      if (!messages.length) throw new Error("There is no message; write lines such as “user: My name is Ada.”");
      go(tidy({ ...page.address, messages, edits: [] }));
    } catch (error) { say(error.message, true); }
  });
  at("copy").addEventListener("click", async () => {
    getSelection().selectAllChildren(at("python"));
    try { await navigator.clipboard.writeText(at("python").textContent); say("Copied."); } catch { say("The code is marked; copy it with the keyboard."); }
  });
  at("share").addEventListener("click", async () => {
    try {
      const file = await shared({ start: known.start, states: [...known.states.values()], at: page.address });
      const link = Object.assign(document.createElement("a"), { href: URL.createObjectURL(file), download: "kvprobe.html" });
      link.click();
      setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
      say("Saved: the file opens without kvprobe and without a network.");
    } catch (error) { say(error.message, true); }
  });
  addEventListener("hashchange", () => show());
  let width = innerWidth;
  addEventListener("resize", () => {
    if (innerWidth === width) return;
    width = innerWidth;
    ofLayer();
  });
}

async function open() {
  const held = JSON.parse(at("session").textContent);
  page.live = held === null;
  const session = held ?? (await opened());
  known.start = tidy(session.start);
  for (const state of session.states) remember(state);
  wire();
  if (!page.live) {
    document.body.classList.add("offline");
    for (const id of ["share", "other", "ask-button"]) at(id).hidden = true;
    at("ask").readOnly = true;
    at("hint").textContent = "This file holds the states below; it computes none. `kvprobe app` does.";
  }
  if (!new URLSearchParams(fragment().slice(1)).has("at") && session.at) {
    if (page.framed) page.fragment = fragmentOf(session.at);
    else history.replaceState(null, "", fragmentOf(session.at));
  }
  show();
}

open().catch((error) => say(error.message, true));
