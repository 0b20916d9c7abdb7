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
// Of edits: the faults and policies that are offered, and which edits act on the whole cache, on messages alone, or anywhere.
const EDITS = JSON.parse(at("edits").textContent);
// `state` is drawn, and the page is at its address; `wanted` is on its way.
const page = { live: false, started: false, state: null, wanted: null, strip: null, stop: null, framed: location.protocol === "about:" };

function say(text, wrong = false) {
  at("status").textContent = text;
  at("status").classList.toggle("wrong", wrong);
}

// What the next edit is added to.
const base = () => page.wanted ?? page.state?.address;

// The address of what is drawn; a notebook's frame has none of its own.
function placed(how = "replaceState") {
  const to = page.state && fragmentOf(page.state.address);
  if (to && !page.framed && to !== location.hash) history[how](null, "", to);
}

// The page stays at what is drawn, or goes where it starts, and says why.
async function stay(words, wrong = false) {
  if (!page.state) {
    const [first] = known.states.values();
    const start = known.states.get(keyOf(known.start)) ?? (page.live ? null : first);
    if (start) drawState(start);
    else if (page.live && !page.started) {
      page.started = true; // once: the start may be refused, too
      await show(known.start, {}, "replaceState");
    }
  }
  placed();
  say(words, wrong);
}

// Shows the state of an address, which is then that of the page; `more` is what to measure beside: `attention`, or what
// probes `read`; and `how` it gets into the browser's history.
async function show(address, more = {}, how = "pushState") {
  page.stop?.abort();
  page.stop = page.wanted = null;
  const found = known.states.get(keyOf(address));
  const measured = { attention: found?.attention || found?.attention_left_out, read: found?.readings || found?.readings_left_out };
  const asked = Object.fromEntries(Object.entries(measured).map(([name, had]) => [name, Boolean(more[name] || had)]));
  if (found && !Object.keys(more).some((name) => !measured[name])) { drawn(found, how); return; }
  if (!page.live) { stay("This state is not in this file.", true); return; }
  const stop = new AbortController();
  Object.assign(page, { stop, wanted: address });
  document.body.setAttribute("aria-busy", "true");
  at("cancel").hidden = false;
  try {
    const state = await compute(address, asked, (step) => page.stop === stop && say(`${step} …`), stop.signal);
    if (state) remember(state);
    if (page.stop !== stop) return;
    if (state) drawn(state, how);
    else stay("Cancelled.");
  } catch (error) {
    if (page.stop === stop) stay(error.message, true);
  } finally {
    if (page.stop === stop) idle();
  }
}

function idle() {
  page.stop = page.wanted = null;
  at("cancel").hidden = true;
  document.body.removeAttribute("aria-busy");
}

function drawn(state, how) {
  idle();
  if (page.state && keyOf(state.address) !== keyOf(page.state.address)) Object.assign(choice, { segments: [], slots: [] });
  drawState(state);
  placed(how);
}

// Shows what the address of the page says.
function follow() {
  try { show(addressOf(location.hash), {}, "replaceState"); } catch (error) { stay(error.message, true); }
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
  offerEdits();
  chosen();
  const layer = at("layer");
  layer.max = `${state.model.layers - 1}`;
  at("layer-choice").hidden = !state.contamination;
  ofLayer();
  drawReplies(at("replies"), state);
  at("notes").replaceChildren(...state.notes.map((note) => make("p", "note", null, note)));
  drawMemory(at("memory"), state);
  drawRemembered(at("remembered").lastElementChild, state);
  drawChange(at("changed").lastElementChild, state);
  drawAttention(at("attention").lastElementChild, state, page.live ? () => show(state.address, { attention: true }) : null);
  drawReadings(at("readings").lastElementChild, state, page.live ? () => show(state.address, { read: true }) : null);
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
  const { address: now } = page.state;
  const here = keyOf(now);
  const origin = JSON.stringify([tidy(now).messages, now.ask]);
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
      show(state.address);
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
  for (const row of document.querySelectorAll("#tools [role=group]")) {
    const buttons = [...row.querySelectorAll("[data-edit]")];
    for (const button of buttons) {
      const { edit: kind } = button.dataset;
      const everywhere = EDITS.whole.includes(kind) || EDITS.anywhere.includes(kind);
      button.title = page.live ? whyNot(kind) : "";
      button.disabled = !page.live || Boolean(button.title) || !(words || everywhere);
    }
    row.querySelector(".why").textContent = [...new Set(buttons.map(({ title }) => title).filter(Boolean))].join(" ");
  }
}

// Why an edit cannot be done to what is chosen, as it is set; empty where it can.
function whyNot(kind) {
  const { refused, slots: { segment, position } } = page.state;
  const isChosen = (slot) => choice.segments.includes(segment[slot]) || (slot >= choice.slots[0] && slot < choice.slots[1]);
  const slots = EDITS.whole.includes(kind) ? [] : [...segment.keys()].filter(isChosen);
  if (slots.length && slots.every((slot) => position[slot] === null)) return "What is chosen is no longer in the cache.";
  if (EDITS.messages.includes(kind) && choice.slots.length) return "A restart reads whole messages again; choose messages.";
  const set = { damage: at("fault").value, policy: at("policy").value }[kind] ?? "";
  const fits = (rule) => rule.kind === kind && (!rule.what || rule.what === set || set.includes(`${rule.what}(`));
  return refused.find((rule) => fits(rule) && (!rule.slots.length || rule.slots.some((slot) => slots.includes(slot))))?.why ?? "";
}

// Faults and policies that are not refused in this state.
function offerEdits() {
  const free = (kind, name) => !page.state.refused.some((rule) => rule.kind === kind && !rule.slots.length && (rule.what === name || name.startsWith(`${rule.what}(`)));
  for (const option of at("fault").options) option.disabled = !free("damage", option.value);
  const policies = EDITS.policies.filter((text) => free("policy", text));
  at("policies").replaceChildren(...policies.map((text) => make("option", "", null, text)));
  if (!at("policy").value || EDITS.policies.includes(at("policy").value)) at("policy").value = policies.includes(at("policy").value) ? at("policy").value : policies[0] ?? "";
}

function edit(kind) {
  const what = choice.segments.length ? "segments" : choice.slots.length ? "slots" : null;
  const where = EDITS.whole.includes(kind) || !what ? {} : { [what]: choice[what] };
  const how = {
    compact: () => ({ then: at("then").value, text: at("request").value.trim() }),
    patch: () => ({ of: at("of").value, text: at("instead").value }),
    damage: () => ({ fault: at("fault").value, rate: Number(at("rate").value) / 100, seed: Number(at("seed").value) }),
    quantise: () => ({ bits: Number(at("bits").value) }),
    policy: () => ({ policy: at("policy").value }),
  }[kind]?.() ?? {};
  show(tidy({ ...base(), edits: [...base().edits, { kind, ...where, ...how }] }));
}

// Messages from JSON, or from lines that begin with a role.
function messagesOf(text) {
  if (text.trim().startsWith("[")) {
    let said = [null];
    try { said = JSON.parse(text); } catch { /* refused below */ }
    if (said.some((one) => typeof one?.role !== "string" || typeof one.content !== "string")) throw new Error("This is no list of messages in JSON; write [{\"role\": \"user\", \"content\": \"…\"}, …].");
    return said.map(({ role, content }) => ({ role, content }));
  }
  const messages = [];
  for (const line of text.trim().split("\n")) {
    const [, role, content] = line.match(/^\s*(system|user|assistant)\s*:\s*(.*)$/i) ?? [];
    if (role) messages.push({ role: role.toLowerCase(), content });
    else if (messages.length) messages.at(-1).content += `\n${line}`;
    else throw new Error("There is no message; write lines such as “user: My name is Ada.”");
  }
  return messages.map(({ role, content }) => ({ role, content: content.trimEnd() }));
}

function undo() {
  if (base()?.edits.length) show(parentOf(base()));
}

function wire() {
  saving(at("strip-saving"), "conversation", () => stripPicture(at("strip")));
  for (const [name, label] of Object.entries(EDITS.faults)) make("option", "", at("fault"), label).value = name;
  at("fault").value = "zeros";
  for (const [mark, words] of Object.entries(LEGEND)) at("legend").append(make("span", `slot ${mark}`, null, words), " ");
  for (const button of document.querySelectorAll("[data-edit]")) button.addEventListener("click", () => edit(button.dataset.edit));
  at("tools").addEventListener("submit", (event) => {
    event.preventDefault();
    if (page.live && base()) show(tidy({ ...base(), ask: at("ask").value }));
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
  for (const id of ["fault", "policy"]) at(id).addEventListener("input", () => page.state && chosen());
  at("read").addEventListener("click", () => {
    try {
      const messages = messagesOf(at("said").value);
      show(tidy({ ...(base() ?? known.start), messages, edits: [] }));
    } catch (error) { say(error.message, true); }
  });
  at("copy").addEventListener("click", async () => {
    getSelection().selectAllChildren(at("python"));
    try { await navigator.clipboard.writeText(at("python").textContent); say("Copied."); } catch { say("The code is marked; copy it with the keyboard."); }
  });
  at("share").addEventListener("click", async () => {
    try {
      const file = await shared({ start: known.start, states: [...known.states.values()], at: page.state?.address ?? known.start });
      const link = Object.assign(document.createElement("a"), { href: URL.createObjectURL(file), download: "kvprobe.html" });
      link.click();
      setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
      say("Saved: the file opens without kvprobe and without a network.");
    } catch (error) { say(error.message, true); }
  });
  addEventListener("hashchange", follow);
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
  const asked = !page.framed && new URLSearchParams(location.hash.slice(1)).has("at");
  if (asked || !session.at) follow();
  else show(tidy(session.at), {}, "replaceState");
}

open().catch((error) => say(error.message, true));
