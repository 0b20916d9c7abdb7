// The replies side by side, token by token, with KL and log-probability where they part.

const MEANING = { full: "Everything in view", now: "With the cache as it is now" };
const shown = (token) => token.replaceAll("\n", "↵").replaceAll("\t", "⇥");

export function drawReplies(place, { replies, expected }) {
  const [full, now] = replies;
  const list = make("div", "replies");
  for (const reply of replies) {
    const box = make("article", "reply", list);
    box.dataset.arm = reply.arm;
    make("h4", "", box, MEANING[reply.arm] ?? reply.arm);
    const text = make("p", "reply-text", box);
    text.dir = "auto";
    const parts = now ? partsAt(full.tokens, now.tokens) : -1;
    for (const [at, token] of reply.tokens.entries()) {
      const span = make("span", now && parts >= 0 && at >= parts ? "parted" : "", text, token);
      span.title = `log-probability ${reply.own_logprobs[at].toFixed(2)}`;
    }
    if (!reply.tokens.length) text.textContent = reply.text;
  }
  place.replaceChildren(list);
  if (!now) return make("p", "soft", place, "Nothing was done to the cache yet.");
  const parts = partsAt(full.tokens, now.tokens);
  const words = parts < 0 ? "Both replies are the same." : `They part at token ${parts + 1}: ${quoted(full.tokens[parts])} with everything in view, ${quoted(now.tokens[parts])} now.`;
  make("p", "summary", place, `${words} KL ${now.kl.toFixed(3)} nats per token; the first reply is ${less(full, now)}.`);
  const details = make("details", "tokens", place);
  details.open = true;
  make("summary", "", details, "Token by token");
  make("p", "soft", details, "The reply with everything in view: below each token how far the distribution is from that with everything in view (KL, nats), and the log-probability then and now.");
  const cells = make("div", "cells", details);
  for (const [at, token] of expected.entries()) {
    const cell = make("div", "cell", cells);
    cell.style.setProperty("--kl", Math.min(1, Math.sqrt(now.kls[at] / 4)));
    make("b", "", cell, shown(token));
    make("span", "", cell, `KL ${now.kls[at].toFixed(2)}`);
    make("small", "", cell, `${full.logprobs[at].toFixed(1)} → ${now.logprobs[at].toFixed(1)}`);
  }
}

function partsAt(one, other) {
  const at = Array.from({ length: Math.max(one.length, other.length) }, (_, place) => place).find((place) => one[place] !== other[place]);
  return at ?? -1;
}

const quoted = (token) => (token === undefined ? "the end" : `“${shown(token)}”`);

function less(full, now) {
  const [before, after] = [full, now].map(({ logprobs }) => logprobs.reduce((sum, value) => sum + value, 0) / logprobs.length);
  return `${Math.abs(before - after).toFixed(2)} nats per token ${after <= before ? "less" : "more"} likely than it was`;
}
