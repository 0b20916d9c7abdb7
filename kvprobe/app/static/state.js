// Addresses: a conversation, a question and what was done, in the fragment of the page's address. States are kept by them.

const DEFAULTS = { segments: [], slots: [], fault: "", rate: 1, seed: 0, bits: 4, policy: "", text: "", of: "", then: "evict" };

// What is known: the conversation that the page begins with, and the states that were computed.
export const known = { start: null, states: new Map() };

const slim = (edit) => Object.fromEntries(Object.entries(edit).filter(([name, value]) => name === "kind" || JSON.stringify(value) !== JSON.stringify(DEFAULTS[name])));
const said = ({ role, content, segment }, at) => (segment && segment !== `m${at}` ? { role, content, segment } : { role, content });
const same = (one, other) => JSON.stringify(one) === JSON.stringify(other);

// An address with nothing in it that is a default, so that equal ones are written alike.
export function tidy({ messages, ask, edits = [], new: most = 24 }) {
  return { messages: messages.map(said), ask, edits: edits.map(slim), new: most };
}

export const keyOf = (address) => JSON.stringify(tidy(address));

// States of another model, such as the example's, are forgotten: one tree holds those of one model.
export function remember(state) {
  for (const [key, other] of known.states) if (!same(other.model, state.model)) known.states.delete(key);
  known.states.set(keyOf(state.address), state);
}

// As a fragment; what the page begins with is left out.
export function fragmentOf(address) {
  const { messages, ask, edits, new: most } = tidy(address);
  const at = {};
  if (!same(messages, known.start.messages)) at.messages = messages;
  if (ask !== known.start.ask) at.ask = ask;
  if (most !== known.start.new) at.new = most;
  if (edits.length) at.edits = edits;
  return `#${new URLSearchParams({ at: JSON.stringify(at) })}`;
}

// The address of a fragment; what cannot be read is refused. The server checks it again.
export function addressOf(fragment) {
  const text = new URLSearchParams(fragment.slice(1)).get("at");
  if (text === null) return known.start;
  let at = null;
  try { at = JSON.parse(text); } catch { /* refused below */ }
  if (typeof at !== "object" || at === null || Array.isArray(at)) throw new Error("The address of this page cannot be read.");
  const { messages = known.start.messages, ask = known.start.ask, edits = [], new: most = known.start.new } = at;
  const texts = Array.isArray(messages) && messages.every((message) => typeof message?.role === "string" && typeof message.content === "string");
  if (!texts || typeof ask !== "string" || !Array.isArray(edits) || !edits.every((edit) => typeof edit?.kind === "string")) throw new Error("The address of this page is not one of a conversation.");
  return tidy({ messages, ask, edits, new: most });
}

export const parentOf = (address) => ({ ...address, edits: address.edits.slice(0, -1) });
