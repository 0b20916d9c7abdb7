// Pictures of the strip and of maps, as SVG or PNG, to be saved.

const FONT = { "font-family": "system-ui, sans-serif", fill: "#1c2024" };
const sheet = (width, height) => {
  const svg = draw("svg", { xmlns: SVG, width, height, viewBox: `0 0 ${width} ${height}`, ...FONT, "font-size": 12 });
  draw("rect", { width: "100%", height: "100%", fill: "#ffffff" }, svg);
  return svg;
};

// Two buttons that save what `makes` draws.
export function saving(place, file, makes) {
  const row = make("div", "row saving", place);
  for (const kind of ["SVG", "PNG"]) {
    const button = make("button", "", row, `Save ${kind}`);
    button.type = "button";
    button.addEventListener("click", () => save(makes(), file, kind));
  }
}

// A layer × slot map as the page shows it, with a legend; every token is named that has room.
export function mapPicture({ slots: { text, segment } }, values, title) {
  const [left, top, cell] = [44, 30, Math.max(6, Math.min(14, 1100 / text.length))];
  const tall = Math.max(5, Math.min(12, 320 / values.length));
  const [across, down] = [cell * text.length, tall * values.length];
  const most = Math.max(...values.flat().map((value) => value ?? 0)) || 1;
  const svg = sheet(Math.max(420, left + across + 10), top + down + 150);
  draw("text", { x: 4, y: 16, "font-size": 13, "font-weight": 600 }, svg, title);
  for (const [layer, row] of values.entries()) {
    const y = top + down - (layer + 1) * tall;
    for (const [slot, value] of row.entries()) {
      const [red, green, blue] = colour(value === null ? null : value / most).map(Math.round);
      draw("rect", { x: left + slot * cell, y, width: cell, height: tall, fill: `rgb(${red},${green},${blue})` }, svg);
    }
    if (layer % Math.ceil(12 / tall) === 0) draw("text", { x: left - 6, y: y + tall, "text-anchor": "end", "font-size": 9 }, svg, `${layer}`);
  }
  for (let slot = 0; slot < text.length; slot += Math.ceil(10 / cell)) {
    const at = `translate(${left + (slot + 0.7) * cell} ${top + down + 6}) rotate(90)`;
    draw("text", { transform: at, "font-size": 9 }, svg, short(`${slot} ${text[slot].replaceAll("\n", "↵")} (${segment[slot]})`, 22));
  }
  draw("text", { x: left, y: top + down + 142, fill: "#5b6470" }, svg, `layer ↑ slot →; white 0, darkest ${rounded(most)}; grey: no value`);
  return svg;
}

// The strip as it is on the page: each slot where it stands, in its colours.
export function stripPicture(strip) {
  const box = strip.getBoundingClientRect();
  const svg = sheet(Math.ceil(box.width) + 8, Math.ceil(box.height) + 8);
  svg.setAttribute("font-size", 15);
  const placed = ({ left, top }) => ({ x: left - box.left + 4, y: top - box.top + 4 });
  for (const part of strip.querySelectorAll(".turn-name, .slot")) {
    const look = getComputedStyle(part);
    const gone = part.matches(".hidden");
    const rects = [...part.getClientRects()].filter(({ width, height }) => width && height);
    for (const rect of part.matches(".slot") ? rects : []) {
      const shape = { ...placed(rect), width: rect.width, height: rect.height };
      draw("rect", { ...shape, fill: gone ? "#ffffff" : look.backgroundColor, stroke: part.matches(".damaged, .patched") ? look.outlineColor : "none" }, svg);
    }
    if (!rects.length) continue;
    const widest = rects.reduce((best, rect) => (rect.width > best.width ? rect : best)); // of a slot that is broken in two
    const [{ x, y }, style] = [placed(widest), { fill: "#1c2024", "text-decoration": gone ? "line-through" : "none" }];
    const words = part.textContent.replaceAll("\n", "");
    const bold = part.matches(".turn-name") ? { "font-weight": 600 } : {};
    draw("text", { x, y: y + widest.height * 0.75, "xml:space": "preserve", ...style, ...bold }, svg, short(widest === rects[0] ? words : words.trimStart(), 400));
  }
  return svg;
}
