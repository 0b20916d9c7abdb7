// What later messages know of hidden ones: what probes read there beside chance, and whether the reply needs it.
import { offered } from "./maps.js";

const percent = (share) => `${(100 * share).toFixed(0)} %`;
const COLUMNS = ["probe", "reads", "probability", "chance", "without the hidden", "leak from", "verdict"];
// The probability that no reading without a leak should reach; 1 where none can be a leak.
const bandOf = ({ restart_probability: without, gain }) => (gain === null ? 1 : Math.min(1, without * 2 ** gain));
const WORDS = [
  "Each exchange after the hidden messages, held against the same text read without them. Readable: a published probe finds a",
  "class so much likelier than without them that nine of ten such readings were right in its training conversations; in",
  "others the class may be wrong, though the slots differ. The grey band beneath a probability ends where a leak begins.",
  "Used: with what the exchange holds of the hidden messages taken out (its slots exchanged), the model says something",
  "else. One reply; near ties turn easily, so see how far it moves.",
];

export function drawReadings(place, state, ask) {
  if (!offered(place, state.readings, state.readings_left_out, ask, "Ask probes what is readable and used", "show-readings")) return;
  const { exchanges, left_out: leftOut } = state.readings;
  place.replaceChildren(make("p", "soft", null, WORDS.join(" ")));
  if (leftOut) make("p", "soft", place, `No probe was asked: ${leftOut}`);
  for (const [number, { segments, probes, readable, kl, reply, used }] of exchanges.entries()) {
    const box = make("article", "exchange", place);
    const whole = number === exchanges.length - 1 && number > 0;
    make("h4", "", box, whole ? "all of these at once" : segments.join(" + "));
    const neither = !readable && !used;
    const lights = neither ? ["neither readable nor used"] : [readable && "readable", used && "used"].filter(Boolean);
    if (neither && readable === null) lights[0] = "not used; no probe is for this";
    for (const word of lights) make("span", `light ${neither ? "off" : "on"}`, box, word);
    make("span", "soft", box, ` Taken out, the reply moves by ${kl.toFixed(3)} nats per token${used ? `: “${reply}”` : "."}`);
    if (!probes.length) continue;
    const details = make("details", "", box);
    details.open = readable;
    make("summary", "", details, `${probes.length} readings`);
    const table = make("table", "readings", make("div", "scroll", details));
    const head = make("tr", "", make("thead", "", table));
    for (const name of COLUMNS) make("th", "", head, name);
    const body = make("tbody", "", table);
    for (const row of probes) {
      const line = make("tr", row.verdict === "leak" ? "leak" : "", body);
      const band = bandOf(row);
      const shares = [row.probability, row.base_rate, row.restart_probability].map(percent);
      const cells = [`${row.probe} ${row.place}`, row.reads, ...shares, band < 1 ? percent(band) : "–", row.verdict];
      const [, , read] = cells.map((cell) => make("td", "", line, cell));
      read.className = "band";
      read.style.setProperty("--chance", band);
      read.style.setProperty("--read", row.probability);
    }
  }
}
