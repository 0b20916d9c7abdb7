/* Explore the findings of a run: choose which key runs along, which are lines and panels, and hold the others. The data
   of a run is a script beside its settings, fetched when it is chosen, so that the page works from a folder. */
const COLOURS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#777777", "#999933"]
const PANEL = { width: 420, height: 260, left: 64, right: 12, top: 24, bottom: 44 }
const SLANTED = 124 /* more height for labels that have no room side by side */
const SVG = "http://www.w3.org/2000/svg"

function made(tag, attributes = {}, ...children) {
  const node = document.createElement(tag)
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value)
  node.append(...children)
  return node
}

function drawn(tag, attributes, text) {
  const node = document.createElementNS(SVG, tag)
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value)
  if (text !== undefined) node.textContent = text
  return node
}

const shown = (value) =>
  typeof value !== "number" ? String(value) : value === 0 || (Math.abs(value) >= 1e-3 && Math.abs(value) < 1e5)
    ? String(+value.toPrecision(4)) : value.toExponential(2)

const byOrder = (one, other) =>
  typeof one === "number" && typeof other === "number" ? one - other : String(one).localeCompare(String(other), "en", { numeric: true })

/* The distinct values of each key of some findings, in order. */
function valuesOf(findings) {
  const values = {}
  for (const { keys } of findings) {
    for (const [key, value] of Object.entries(keys)) (values[key] ??= new Set()).add(value)
  }
  return Object.fromEntries(Object.entries(values).map(([key, set]) => [key, [...set].sort(byOrder)]))
}

/* Which key runs along (the one with most values, numbers first), which is a line, and what the others are held at. */
function usual(values) {
  const keys = Object.keys(values).filter((key) => values[key].length > 1)
  const numbers = (key) => values[key].every((value) => typeof value === "number")
  keys.sort((one, other) => numbers(other) - numbers(one) || values[other].length - values[one].length)
  const along = keys[0] ?? Object.keys(values)[0] ?? ""
  const line = keys.slice(1).find((key) => values[key].length <= COLOURS.length) ?? ""
  const held = {}
  for (const key of Object.keys(values)) if (key !== along && key !== line) held[key] = String(values[key][0])
  return { along, line, panel: "", held }
}

function chosen(findings, state) {
  const held = Object.entries(state.held)
  return findings.filter(({ keys }) => held.every(([key, value]) => String(keys[key]) === value))
}

/* Positions between two ends; on a log scale only what is above 0. */
function scale(numbers, from, to, log) {
  const of = log ? Math.log10 : (value) => value
  const kept = numbers.filter((value) => Number.isFinite(of(value))).map(of)
  let [low, high] = [Math.min(...kept), Math.max(...kept)]
  if (!kept.length) [low, high] = [0, 1]
  if (low === high) [low, high] = [low - 0.5, high + 0.5]
  const at = (value) => from + ((of(value) - low) / (high - low)) * (to - from)
  const ticks = []
  if (log && high - low > 1) {
    const step = Math.ceil((high - low) / 5)
    for (let power = Math.ceil(low); power <= high; power += step) ticks.push(10 ** power)
  } else {
    const [first, last] = log ? [10 ** low, 10 ** high] : [low, high]
    const unit = 10 ** Math.floor(Math.log10((last - first) / 4))
    const step = unit * [1, 2, 5, 10].find((times) => (last - first) / (unit * times) <= 5)
    for (let number = Math.ceil(first / step - 1e-9); number * step <= last + 1e-9 * step; number++) ticks.push(+(number * step).toPrecision(12))
  }
  return { at, ticks, holds: (value) => Number.isFinite(of(value)) }
}

/* One panel: a line for each value of `line`, with intervals as whiskers. */
function panelOf(title, findings, values, state, y) {
  const { width, left, right, top } = PANEL
  const along = values[state.along] ?? [""]
  const numbers = along.length > 1 && along.every((value) => typeof value === "number")
  const room = (width - left - right) / along.length
  const slanted = !numbers && along.some((value) => 5.2 * shown(value).length > room)
  const [height, bottom] = [PANEL.height, PANEL.bottom].map((size) => size + SLANTED * slanted)
  const svg = drawn("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img", xmlns: SVG, "aria-label": title })
  svg.append(drawn("rect", { x: 0, y: 0, width, height, fill: "#ffffff" }))
  svg.append(drawn("text", { x: left, y: 14, "font-size": 12, "font-weight": "bold", fill: "#222222" }, title))
  const x = numbers
    ? scale(along, left + 10, width - right - 10, along.every((value) => value > 0) && along.at(-1) / along[0] > 50)
    : { at: (value) => left + ((along.indexOf(value) + 0.5) / along.length) * (width - left - right), ticks: along }
  const skip = Math.ceil(x.ticks.length / (slanted ? 28 : 8))
  x.ticks.forEach((tick, number) => {
    if (number % skip) return
    const text = slanted ? shown(tick).replace(/^(.{13}).{4,}(.{15})$/, "$1…$2") : shown(tick)
    const [at, under] = [x.at(tick), height - bottom + (slanted ? 10 : 16)]
    const turned = slanted ? { "text-anchor": "end", transform: `rotate(-60 ${at} ${under})` } : { "text-anchor": "middle" }
    const below = { x: at, y: under, "font-size": 10, fill: "#444444", ...turned }
    svg.append(drawn("text", below, text))
  })
  for (const tick of y.ticks) {
    svg.append(drawn("line", { x1: left, x2: width - right, y1: y.at(tick), y2: y.at(tick), stroke: "#dddddd" }))
    svg.append(drawn("text", { x: left - 6, y: y.at(tick) + 3, "font-size": 10, "text-anchor": "end", fill: "#444444" }, shown(tick)))
  }
  svg.append(drawn("text", { x: (left + width - right) / 2, y: height - 8, "font-size": 11, "text-anchor": "middle", fill: "#222222" }, state.along))
  const lines = state.line ? values[state.line] : [undefined]
  lines.forEach((line, number) => {
    const colour = COLOURS[number % COLOURS.length]
    const shift = numbers ? 0 : (number - (lines.length - 1) / 2) * Math.min(8, 60 / lines.length)
    const own = findings.filter(({ keys }) => line === undefined || keys[state.line] === line)
    const points = own.filter((finding) => y.holds(finding.mean))
    points.sort((one, other) => byOrder(one.keys[state.along], other.keys[state.along]))
    const place = (finding) => x.at(finding.keys[state.along] ?? "") + shift
    const path = points.map((finding, at) => `${at ? "L" : "M"}${place(finding)} ${y.at(finding.mean)}`).join("")
    if (numbers) svg.append(drawn("path", { d: path, fill: "none", stroke: colour, "stroke-width": 1.5 }))
    for (const finding of points) {
      const mark = drawn("g", { stroke: colour, fill: colour })
      const ends = [finding.low, finding.high].map((end, lower) => (y.holds(end) ? y.at(end) : lower ? top : height - bottom))
      if (finding.low !== null) mark.append(drawn("line", { x1: place(finding), x2: place(finding), y1: ends[0], y2: ends[1] }))
      mark.append(drawn("circle", { cx: place(finding), cy: y.at(finding.mean), r: 3 }))
      mark.append(drawn("title", {}, said(finding)))
      svg.append(mark)
    }
  })
  return svg
}

/* What a mark says: its keys, number, interval, unit, and what these rest on. */
function said(finding) {
  const keys = Object.entries(finding.keys).map(([key, value]) => `${key} ${shown(value)}`).join(", ")
  const parts = [`${shown(finding.mean)}${interval(finding, " (", ")")} ${finding.unit}`.trim()]
  if (finding.clusters) parts.push(`n = ${finding.clusters}`)
  if (finding.comparisons > 1) parts.push(`together over ${finding.comparisons} claims`)
  return `${keys}: ${parts.join(", ")}`
}

const interval = ({ low, high }, before = "", after = "") =>
  low === null ? "" : `${before}${shown(low)} to ${shown(high)}${after}`

class Explorer {
  constructor(place, runs) {
    this.place = place
    this.runs = runs
    this.known = new Map()
    addEventListener("hashchange", () => this.open())
    this.open()
  }

  /* What the address says: run, finding, log, and the roles of keys. */
  open() {
    if (location.hash === this.written) return
    const asked = new URLSearchParams(location.hash.slice(1))
    const run = this.runs.includes(asked.get("run")) ? asked.get("run") : this.runs[0]
    fetchRun(this.place.dataset.runs, run, this.known, (findings) => {
      const names = [...new Set(findings.map(({ name }) => name))]
      const many = names.find((name) => findings.filter((finding) => finding.name === name).length > 3)
      const name = names.includes(asked.get("finding")) ? asked.get("finding") : (many ?? names[0])
      this.take(run, name, findings)
      for (const role of ["along", "line", "panel"]) {
        if (asked.has(role) && (asked.get(role) === "" || asked.get(role) in this.values)) this.state[role] = asked.get(role)
      }
      for (const [key, value] of asked) if (key.startsWith("at.") && key.slice(3) in this.values) this.state.held[key.slice(3)] = value
      this.log = asked.get("log") === "1"
      this.show()
    })
  }

  take(run, name, findings) {
    Object.assign(this, { run, name, findings, log: false })
    this.own = findings.filter((finding) => finding.name === name && finding.mean !== null)
    this.values = valuesOf(this.own)
    this.state = usual(this.values)
  }

  show() {
    const { state, values } = this
    for (const role of ["along", "line", "panel"]) delete state.held[state[role]]
    for (const key of Object.keys(values)) {
      if (![state.along, state.line, state.panel].includes(key)) state.held[key] ??= String(values[key][0])
    }
    const address = new URLSearchParams({ run: this.run, finding: this.name, along: state.along, line: state.line, panel: state.panel })
    for (const [key, value] of Object.entries(state.held)) address.set(`at.${key}`, value)
    if (this.log) address.set("log", "1")
    this.written = `#${address}`
    history.replaceState(null, "", this.written)
    const some = chosen(this.own, state)
    const numbers = some.flatMap(({ mean, low, high }) => [mean, low, high]).filter((value) => value !== null)
    const y = scale(numbers, PANEL.height - PANEL.bottom, PANEL.top + 8, this.log)
    const panels = state.panel ? values[state.panel] : [undefined]
    const figure = made("div", { class: "explore-figure" })
    for (const panel of panels) {
      const inside = some.filter(({ keys }) => panel === undefined || keys[state.panel] === panel)
      const title = panel === undefined ? this.name : `${state.panel} ${shown(panel)}`
      figure.append(panelOf(title, inside, values, state, y))
    }
    const unit = some.find((finding) => finding.unit)?.unit
    const count = `${some.length} of ${this.own.length} findings${unit ? `, in ${unit}` : ""}. Whiskers: intervals at 95 %; `
    const note = made("p", {}, `${count}a mark says its own when the pointer rests on it.`)
    this.place.replaceChildren(this.choices(), figure, this.legend(), note, tableOf(some))
  }

  legend() {
    const legend = made("p", { class: "explore-legend" })
    if (this.state.line) this.values[this.state.line].forEach((line, number) => {
      legend.append(made("span", { style: `color:${COLOURS[number % COLOURS.length]}` }, "● "), `${shown(line)}  `)
    })
    return legend
  }

  choices() {
    const { state, values } = this
    const again = (change) => (event) => { change(event.target.value); this.show() }
    const keys = Object.keys(values)
    const box = made("div", { class: "explore-choices" })
    box.append(
      choice("run", this.runs, this.run, ({ target }) => { location.hash = `run=${encodeURIComponent(target.value)}` }),
      choice("finding", [...new Set(this.findings.map(({ name }) => name))], this.name, again((name) => this.take(this.run, name, this.findings))),
      choice("along", keys, state.along, again((key) => { this.role("along", key) })),
      choice("lines", ["", ...keys], state.line, again((key) => { this.role("line", key) })),
      choice("panels", ["", ...keys], state.panel, again((key) => { this.role("panel", key) })),
      ...Object.entries(state.held).filter(([key]) => values[key].length > 1).map(([key, value]) =>
        choice(key, values[key].map(String), value, again((other) => { state.held[key] = other }))),
      choice("scale", ["linear", "log"], this.log ? "log" : "linear", again((kind) => { this.log = kind === "log" })),
    )
    const save = made("button", { type: "button" }, "Save as SVG")
    save.addEventListener("click", () => this.save())
    box.append(save)
    return box
  }

  /* A key has one role at a time. */
  role(role, key) {
    for (const other of ["along", "line", "panel"]) if (other !== role && this.state[other] === key && key) this.state[other] = this.state[role]
    this.state[role] = key
  }

  save() {
    const panels = [...this.place.querySelectorAll("svg")]
    const { width, height } = PANEL
    const whole = drawn("svg", { xmlns: SVG, width, height: height * panels.length, viewBox: `0 0 ${width} ${height * panels.length}`, "font-family": "sans-serif" })
    panels.forEach((panel, number) => {
      const group = drawn("g", { transform: `translate(0 ${number * height})` })
      group.append(...[...panel.childNodes].map((node) => node.cloneNode(true)))
      whole.append(group)
    })
    const link = made("a", { download: `${this.run}-${this.name}.svg` })
    link.href = URL.createObjectURL(new Blob([new XMLSerializer().serializeToString(whole)], { type: "image/svg+xml" }))
    link.click()
  }
}

function choice(name, options, value, changed) {
  const select = made("select", { name }, ...options.map((option) => made("option", { value: option }, option || "–")))
  select.value = value
  select.addEventListener("change", changed)
  return made("label", {}, `${name} `, select)
}

function tableOf(findings) {
  const keys = Object.keys(valuesOf(findings))
  const row = (cells, tag) => made("tr", {}, ...cells.map((cell) => made(tag, {}, cell)))
  const body = findings.slice(0, 400).map((finding) => {
    const place = keys.map((key) => shown(finding.keys[key] ?? ""))
    return row([...place, shown(finding.mean), interval(finding), finding.clusters || ""], "td")
  })
  return made("details", {}, made("summary", {}, "Numbers"), made("table", {}, row([...keys, "mean", "interval", "n"], "th"), ...body))
}

/* The script of a run calls `kvprobeRun`; a page opened from a folder may not fetch data. */
function fetchRun(folder, run, known, then) {
  if (known.has(run)) return then(known.get(run))
  window.kvprobeRun = (name, findings) => known.set(name, findings)
  const script = document.createElement("script")
  script.src = `${folder}/${encodeURIComponent(run)}/findings.js`
  script.addEventListener("load", () => then(known.get(run)))
  document.head.append(script)
}

const place = document.getElementById("explore")
if (place) new Explorer(place, JSON.parse(place.dataset.names))
