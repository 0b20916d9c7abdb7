// Attention as one SVG picture: a map for each panel, side by side where they fit, and the scale that all share.
"use strict";

// Blue for weights and gains, red for losses, by the square root, so that small weights can be seen; grey for what may not be seen.
const PALETTES = [1, -1].map((sign) => Array.from({ length: 256 }, (_, level) => colour((sign * level) / 255).map(Math.round)));
const HIDDEN = colour(null);
const shade = (weight) => (weight === null ? HIDDEN : PALETTES[weight < 0 ? 1 : 0][Math.min(255, Math.round(255 * Math.sqrt(Math.abs(weight))))]);

const [LEFT, TOP, BOTTOM, GAP, LEGEND] = [104, 46, 96, 24, 34]; // pixels around a map, between panels, and of the scale below

// Each panel has a title, rows of weights that end at the row's own slot, and the slots that are crossed out.
function picture({ panels, rows, columns, bands, rowBreaks, signed: diverging, name }, width) {
  const cell = Math.max(3, Math.min(panels.length > 1 ? 14 : 24, (width - LEFT) / columns.length));
  const tall = Math.max(cell, Math.min(16, 320 / rows.length));
  const [across, down] = [cell * columns.length, tall * rows.length];
  const [wide, high] = [Math.max(LEFT + across, 250), TOP + down + BOTTOM];
  const side = Math.max(1, Math.min(panels.length, Math.floor((width + GAP) / (wide + GAP))));
  const size = [Math.max(340, side * (wide + GAP) - GAP), Math.ceil(panels.length / side) * high + LEGEND];
  const svg = draw("svg", { xmlns: SVG, width: size[0], height: size[1], viewBox: `0 0 ${size.join(" ")}`, "font-family": "system-ui, sans-serif", "font-size": 11, fill: "#1c2024" });
  const hatch = draw("pattern", { id: `${name}-hatch`, width: 6, height: 6, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" }, draw("defs", {}, svg));
  draw("path", { d: "M0 0V6", stroke: "#3a4048", "stroke-width": 1.5 }, hatch);
  draw("rect", { width: "100%", height: "100%", fill: "#ffffff" }, svg);
  const crossed = (box, parent) => draw("rect", { ...box, fill: `url(#${name}-hatch)`, class: "hatch" }, parent);

  const marks = [];
  const origins = panels.map(({ title, rows: weights, gone }, panel) => {
    const origin = [(panel % side) * (wide + GAP) + LEFT, Math.floor(panel / side) * high + TOP];
    const map = draw("g", { transform: `translate(${origin.join(" ")})`, class: "panel" }, svg);
    draw("text", { x: -LEFT + 4, y: 16 - TOP, "font-size": 13, "font-weight": 600 }, map, title);
    draw("image", { width: across, height: down, preserveAspectRatio: "none", "image-rendering": "pixelated", href: pixels(weights, columns.length) }, map);
    for (const [from, to] of runs(gone)) {
      const first = weights.findIndex((row) => row.length > from);
      if (first >= 0) crossed({ x: from * cell, y: first * tall, width: (to - from) * cell, height: (rows.length - first) * tall }, map);
    }
    for (const [number, { label, from, to }] of bands.entries()) {
      const room = (to - from) * cell;
      draw("rect", { x: from * cell, y: -16, width: room, height: 13, fill: number % 2 ? "#dfe3e8" : "#eef1f4" }, map);
      if (room > 20) draw("text", { x: from * cell + 3, y: -6, "font-size": 10 }, map, short(label, room / 5.6 - 1));
      if (from) draw("path", { d: `M${from * cell} -16V${down}`, stroke: "#9aa3ad", "stroke-width": 0.75 }, map);
    }
    for (const at of rowBreaks) draw("path", { d: `M0 ${at * tall}H${across}`, stroke: "#9aa3ad", "stroke-width": 0.75 }, map);
    draw("rect", { width: across, height: down, fill: "none", stroke: "#9aa3ad" }, map);
    for (let row = 0; row < rows.length; row += Math.ceil(11 / tall)) draw("text", { x: -6, y: (row + 0.5) * tall + 4, "text-anchor": "end" }, map, short(rows[row], 16));
    for (let slot = 0; slot < columns.length; slot += Math.ceil(11 / cell)) {
      const place = { transform: `translate(${(slot + 0.5) * cell + 4} ${down + 6}) rotate(-90)`, "text-anchor": "end" };
      if (gone.has(slot)) Object.assign(place, { "text-decoration": "line-through", fill: "#5b6470" });
      draw("text", place, map, short(columns[slot], 13));
    }
    const line = { fill: "none", stroke: "#b3410a", "stroke-width": 1.5, "pointer-events": "none", visibility: "hidden" };
    marks.push([draw("rect", { ...line, width: across, height: tall }, map), draw("rect", { ...line, y: 0, width: cell, height: down }, map)]);
    return origin;
  });
  scale(svg, size[1] - LEGEND + 4, diverging, panels.some(({ gone }) => gone.size) ? crossed : null, name);

  // The row and the slot under the mouse, in any panel.
  function at({ clientX, clientY }) {
    const box = svg.getBoundingClientRect();
    for (const [left, top] of origins) {
      const [slot, row] = [Math.floor((clientX - box.left - left) / cell), Math.floor((clientY - box.top - top) / tall)];
      if (row in rows && slot in columns) return [row, slot];
    }
    return null;
  }
  function mark(row, slot) {
    for (const [line, column] of marks) {
      line.setAttribute("y", row * tall);
      line.setAttribute("visibility", "visible");
      column.setAttribute("x", (slot ?? 0) * cell);
      column.setAttribute("visibility", slot === null ? "hidden" : "visible");
    }
  }
  return { svg, at, mark };
}

function scale(svg, top, diverging, crossed, name) {
  const least = diverging ? -1 : 0;
  const fill = draw("linearGradient", { id: `${name}-scale` }, svg.querySelector("defs"));
  for (let tick = 0; tick <= 20; tick += 1) draw("stop", { offset: `${5 * tick}%`, "stop-color": `rgb(${colour(least + ((1 - least) * tick) / 20).map(Math.round)})` }, fill);
  const bar = draw("g", { transform: `translate(4 ${top})`, class: "scale" }, svg);
  draw("rect", { x: 10, width: 180, height: 10, fill: `url(#${name}-scale)`, stroke: "#9aa3ad", "stroke-width": 0.5 }, bar);
  for (const weight of diverging ? [-1, -0.25, 0, 0.25, 1] : [0, 0.04, 0.25, 1]) {
    const x = 10 + (180 * (Math.sign(weight) * Math.sqrt(Math.abs(weight)) - least)) / (1 - least);
    draw("text", { x, y: 22, "text-anchor": "middle", "font-size": 10 }, bar, diverging ? signed(weight) : `${weight}`);
  }
  if (!crossed) return;
  const box = { x: 206, width: 18, height: 10 };
  draw("rect", { ...box, fill: `rgb(${HIDDEN})` }, bar);
  crossed(box, bar);
  draw("text", { x: 230, y: 9 }, bar, "masked or evicted");
}

// One pixel for each cell; none after a row's own slot.
function pixels(rows, width) {
  const canvas = document.createElement("canvas");
  Object.assign(canvas, { width, height: rows.length });
  paint(canvas, rows);
  return canvas.toDataURL();
}

function paint(canvas, rows) {
  const image = new ImageData(canvas.width, canvas.height);
  for (const [at, row] of rows.entries()) {
    for (const [slot, weight] of row.entries()) image.data.set([...shade(weight), 255], 4 * (at * canvas.width + slot));
  }
  canvas.getContext("2d").putImageData(image, 0, 0);
}

// Runs of successive numbers, each from its first to after its last.
function runs(numbers) {
  const found = [];
  for (const number of [...numbers].sort((a, b) => a - b)) {
    if (found.at(-1)?.[1] === number) found.at(-1)[1] += 1;
    else found.push([number, number + 1]);
  }
  return found;
}

// SVG is XML, which has no place for control characters and halves of pairs.
function short(text, most) {
  const shown = [...text.replace(/[\u0000-\u001f\u007f-\u009f\ud800-\udfff\ufffe\uffff]/gu, "\ufffd")];
  return shown.length > most ? `${shown.slice(0, Math.max(1, most - 1)).join("")}…` : shown.join("");
}

const SVG = "http://www.w3.org/2000/svg";
function draw(tag, attributes, parent = null, text = "") {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) if (name !== "xmlns") element.setAttribute(name, value);
  element.textContent = text;
  parent?.append(element);
  return element;
}

const asText = (svg) => `data:image/svg+xml;charset=utf-8,${encodeURIComponent(new XMLSerializer().serializeToString(svg))}`;

function download(address, file) {
  Object.assign(document.createElement("a"), { href: address, download: file }).click();
}

// Saves the picture as it is on the page; as PNG with two pixels for each of the page's.
async function save(svg, file, kind) {
  if (kind === "SVG") return download(asText(svg), `${file}.svg`);
  const image = new Image();
  image.src = asText(svg);
  await image.decode();
  const canvas = document.createElement("canvas");
  Object.assign(canvas, { width: 2 * svg.width.baseVal.value, height: 2 * svg.height.baseVal.value });
  canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
  download(canvas.toDataURL("image/png"), `${file}.png`);
}
