// Replaces the words of every view by a drawing: maps here, attention in attention.js and picture.js, token views by CircuitsVis.
"use strict";
addEventListener("DOMContentLoaded", () => {
  for (const [number, view] of document.querySelectorAll("[data-component]").entries()) {
    const props = JSON.parse(view.nextElementSibling.textContent);
    const words = view.textContent;
    view.classList.add("drawn");
    if (view.dataset.component === "HeatMap") {
      view.replaceChildren(heatMap(props, words));
    } else if (view.dataset.component === "AttentionView") {
      const packed = view.parentElement.querySelectorAll('script[type^="application/octet-stream"]');
      view.replaceChildren(attentionView(props, packed, words, `view-${number}`));
    } else {
      view.id = `view-${number}`;
      CircuitsVis.render(view.id, CircuitsVis[view.dataset.component], props);
    }
  }
});

// Blue above zero and red below, as CircuitsVis and TransformerLens colour; ColorBrewer's RdBu, which readers with any colour vision can distinguish.
function colour(share) {
  if (share === null) return [168, 168, 168];
  const above = [[247, 247, 247], [209, 229, 240], [146, 197, 222], [67, 147, 195], [33, 102, 172], [5, 48, 97]];
  const below = [[247, 247, 247], [253, 219, 199], [244, 165, 130], [214, 96, 77], [178, 24, 43], [103, 0, 31]];
  const stops = share < 0 ? below : above;
  const place = Math.abs(share) * (stops.length - 1);
  const stop = Math.min(Math.floor(place), stops.length - 2);
  return stops[stop].map((from, channel) => from + (stops[stop + 1][channel] - from) * (place - stop));
}

// With `upward` the first row is at the bottom. Fires `pick` with a row and a column when a cell is clicked, or Enter pressed. With a `scale` from outside, the legend is that of all maps.
function heatMap({ rows, columns, values, unit, rowAxis, columnAxis, scale: shared, upward = false, tallest = 480 }, words) {
  const cells = values.flat();
  const scale = shared || cells.reduce((largest, value) => Math.max(largest, Math.abs(value)), 0) || 1;
  const share = (value) => (value === null ? null : value / scale);
  const line = (row) => (upward ? rows.length - 1 - row : row); // where a row is drawn, and which row is drawn there
  const map = make("div", "map");

  const scroll = make("div", "map-scroll", map);
  const rowStep = labels(scroll, "map-rows", rows, tallest / 12, line);
  const frame = make("div", "map-cells", scroll);
  make("div", "map-corner", scroll, `${rowAxis} ↑\n${columnAxis} →`);
  const columnStep = labels(scroll, "map-columns", columns, 72);
  // A label needs 12 pixels, and a cell 3, to be pointed at.
  const [narrowest, lowest] = [Math.max(3, 12 / columnStep), Math.max(3, 12 / rowStep)];
  const width = `min-width: ${narrowest * columns.length}px; max-width: ${48 * columns.length}px`;
  frame.style.cssText = `${width}; height: ${Math.max(lowest, Math.min(20, tallest / rows.length)) * rows.length}px`;
  scroll.firstElementChild.style.height = frame.style.height;
  scroll.lastElementChild.style.cssText += width;

  const canvas = make("canvas", "", frame);
  Object.assign(canvas, { width: columns.length, height: rows.length, tabIndex: 0 });
  canvas.setAttribute("role", "application");
  canvas.setAttribute("aria-label", words);
  const pixels = values.flatMap((_, at) => values[line(at)]).flatMap((value) => [...colour(share(value)), 255]);
  const image = new ImageData(Uint8ClampedArray.from(pixels), columns.length, rows.length);
  canvas.getContext("2d").putImageData(image, 0, 0);

  const cursor = make("div", "map-cursor", frame);
  const tip = make("div", "map-tip", map);
  tip.setAttribute("role", "status");
  const leave = () => { cursor.hidden = tip.hidden = true; };
  leave();

  let at = cells.reduce((best, value, cell) => (Math.abs(value) > Math.abs(cells[best]) ? cell : best), 0);
  function show(row, column) {
    at = row * columns.length + column;
    cursor.hidden = tip.hidden = false;
    const [x, y] = [100 / columns.length, 100 / rows.length];
    cursor.style.cssText = `left: ${column * x}%; top: ${line(row) * y}%; width: ${x}%; height: ${y}%`;
    const value = cells[at] === null ? "no value" : `${signed(cells[at])} ${unit}`;
    tip.textContent = `${rowAxis} ${rows[row]}, ${columnAxis} ${columns[column]}: ${value}`.trim();
    const [around, cell] = [map.getBoundingClientRect(), cursor.getBoundingClientRect()];
    const left = Math.min(cell.left - around.left, around.width - tip.offsetWidth);
    tip.style.left = `${Math.max(0, left)}px`;
    tip.style.top = `${cell.top - around.top - tip.offsetHeight - 8}px`;
  }

  const point = ({ clientX, clientY }) => {
    const box = canvas.getBoundingClientRect();
    const cellAt = (share, count) => Math.max(0, Math.min(count - 1, Math.floor(share * count)));
    show(line(cellAt((clientY - box.top) / box.height, rows.length)), cellAt((clientX - box.left) / box.width, columns.length));
  };
  canvas.addEventListener("pointermove", point);
  canvas.addEventListener("pointerdown", point);
  canvas.addEventListener("pointerleave", leave);
  const pick = () => map.dispatchEvent(new CustomEvent("pick", { detail: [Math.floor(at / columns.length), at % columns.length] }));
  canvas.addEventListener("click", pick);
  canvas.addEventListener("focus", () => show(Math.floor(at / columns.length), at % columns.length));
  canvas.addEventListener("blur", leave);
  canvas.addEventListener("keydown", (event) => {
    const moves = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
    if (event.key === "Escape") leave();
    if (event.key === "Enter") pick();
    if (!(event.key in moves)) return;
    event.preventDefault();
    const [down, right] = cursor.hidden ? [0, 0] : moves[event.key];
    const row = Math.floor(at / columns.length) + (upward ? -down : down);
    const column = (at % columns.length) + right;
    if (row in rows && column in columns) show(row, column);
    cursor.scrollIntoView({ block: "nearest", inline: "nearest" });
  });

  const legend = make("div", "map-legend", map);
  const least = shared || cells.some((value) => value < 0) ? -1 : 0;
  make("span", "", legend, signed(rounded(least * scale)));
  const ticks = Array.from({ length: 21 }, (_, tick) => `rgb(${colour(least + ((1 - least) * tick) / 20).map(Math.round)})`);
  make("i", "", legend).style.background = `linear-gradient(to right, ${ticks})`;
  make("span", "", legend, `${signed(rounded(scale))} ${unit}`);
  if (cells.includes(null)) {
    make("i", "none", legend).style.background = `rgb(${colour(null)})`;
    make("span", "", legend, "no value");
  }
  return map;
}

// Shows every n-th label, so that there are at most `most`; returns n.
function labels(parent, name, texts, most, line = (index) => index) {
  const step = Math.ceil(texts.length / most);
  const axis = make("div", name, parent);
  const [tracks, place] = name === "map-rows" ? ["gridTemplateRows", "gridRow"] : ["gridTemplateColumns", "gridColumn"];
  axis.style[tracks] = `repeat(${texts.length}, minmax(0, 1fr))`;
  for (let index = 0; index < texts.length; index += step) make("span", "", axis, texts[index]).style[place] = line(index) + 1;
  return step;
}

function rounded(value) {
  return Number(value.toPrecision(3));
}

function signed(value) {
  return value > 0 ? `+${value}` : `${value}`;
}

function make(tag, name, parent = null, text = "") {
  const element = document.createElement(tag);
  element.className = name;
  element.textContent = text;
  parent?.append(element);
  return element;
}
