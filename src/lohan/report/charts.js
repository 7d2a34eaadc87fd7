"use strict";
// Draws every element with data-chart from the JSON block of the same page, as SVG, again whenever its width changes.
const data = JSON.parse(document.getElementById("data").textContent);
const NS = "http://www.w3.org/2000/svg";
const KIND_NAMES = {
  read_weights: "weights from SSD", to_gpu: "weights to the device", read_state: "state from SSD", write: "weights and state to SSD",
  gradient: "gradient to RAM", spill: "gradient to SSD", read_gradient: "gradient from SSD", act_out: "activations to RAM",
  act_write: "activations to SSD", act_read: "activations from SSD", act_in: "activations to the device",
};

// ---- small parts

function add(parent, tag, attributes = {}, text) {
  const made = parent.namespaceURI === NS || tag === "svg" ? document.createElementNS(NS, tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (text !== undefined) made.textContent = text;
  return parent.appendChild(made);
}

function number(value) {
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size >= 1e5) return value.toLocaleString("en", { maximumFractionDigits: 0 });
  if (size >= 1000) return value.toLocaleString("en", { maximumFractionDigits: 1 });
  return size < 1e-3 ? value.toExponential(2).replace(/\.?0+e/, "e") : String(+value.toPrecision(4));
}

function bytes(value) {
  for (const unit of ["B", "kB", "MB", "GB", "TB", "PB"]) {
    if (Math.abs(value) < 999.5 || unit === "PB") return `${+value.toPrecision(3)} ${unit}`;
    value /= 1000;
  }
}

function seconds(value) {
  const size = Math.abs(value);
  if (size === 0) return "0 s";
  if (size < 1e-3) return `${+(value * 1e6).toPrecision(3)} µs`;
  if (size < 1) return `${+(value * 1e3).toPrecision(3)} ms`;
  return `${+value.toPrecision(3)} s`;
}

function ticks(low, high, count) {
  const rough = (high - low) / Math.max(1, count), unit = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map(times => times * unit).find(size => size >= rough * 0.999);
  const made = [];
  for (let at = Math.ceil(low / step - 1e-9); at * step <= high + step * 1e-9; at++) made.push(+(at * step).toPrecision(12));
  return made;
}

function byteTicks(low, high, count) {
  const power = 1000 ** Math.max(0, Math.floor(Math.log10(Math.max(high, 1)) / 3));
  return ticks(low / power, high / power, count).map(value => value * power);
}

function key(host, entries) {
  const list = add(host, "div", { class: "key" });
  for (const [name, colour] of entries) {
    const entry = add(list, "span");
    add(entry, "i", { style: `background:${colour}` });
    entry.append(name);
  }
}

function canvas(host, height, label) {
  const width = Math.max(260, host.clientWidth);
  const svg = add(host, "svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": label });
  return { svg, width };
}

function tip(host) {
  const box = add(host, "div", { class: "tip", role: "status", "aria-live": "polite" });
  return {
    show(text, x, y) {
      box.textContent = text;
      box.style.left = `${Math.max(0, Math.min(x + 14, host.clientWidth - box.offsetWidth))}px`;
      box.style.top = `${Math.max(0, y - box.offsetHeight - 10)}px`;
    },
    hide() { box.textContent = ""; },
  };
}

function table(host, heads, rows) {
  const details = add(host, "details");
  add(details, "summary", {}, "As a table");
  const made = add(details, "table", { class: "figures" });
  const head = add(add(made, "thead"), "tr");
  heads.forEach((name, at) => add(head, at ? "th" : "td", at ? { scope: "col" } : {}, name));
  const body = add(made, "tbody");
  for (const row of rows) {
    const line = add(body, "tr");
    row.forEach((cell, at) => add(line, at ? "td" : "th", at ? {} : { scope: "row" }, cell));
  }
}

// Axes of a plot: scales from values to pixels, grid lines, labels.
function axes(svg, box, { x, y, xTicks, yTicks, xName, xText = number, yText = number, log = false }) {
  const [x0, x1] = x, [y0, y1] = y;
  const up = value => log ? Math.log(value) : value;
  const px = value => box.left + (value - x0) / (x1 - x0 || 1) * (box.right - box.left);
  const py = value => box.bottom - (up(value) - up(y0)) / (up(y1) - up(y0) || 1) * (box.bottom - box.top);
  for (const value of yTicks) {
    add(svg, "line", { class: "grid-line", x1: box.left, x2: box.right, y1: py(value), y2: py(value) });
    add(svg, "text", { x: box.left - 8, y: py(value) + 4, "text-anchor": "end" }, yText(value));
  }
  for (const value of xTicks) add(svg, "text", { x: px(value), y: box.bottom + 17, "text-anchor": "middle" }, xText(value));
  add(svg, "line", { class: "axis", x1: box.left, x2: box.right, y1: box.bottom, y2: box.bottom });
  add(svg, "text", { x: box.right, y: box.bottom + 33, "text-anchor": "end" }, xName);
  return { px, py };
}

const path = (points, px, py) => points.map(([x, y], at) => `${at ? "L" : "M"}${px(x).toFixed(1)} ${py(y).toFixed(1)}`).join("");

// Moves a cross over points by pointer or arrow keys; `tell` says what stands at one.
function explore(svg, host, box, places, tell) {
  const cross = add(svg, "line", { class: "cross", y1: box.top, y2: box.bottom, visibility: "hidden" });
  const words = tip(host);
  let at = places.length - 1;
  svg.setAttribute("tabindex", "0");
  const show = () => {
    const [x, y] = places[at];
    cross.setAttribute("x1", x); cross.setAttribute("x2", x); cross.setAttribute("visibility", "visible");
    words.show(tell(at), x, svg.getBoundingClientRect().top - host.getBoundingClientRect().top + y);
  };
  const hide = () => { cross.setAttribute("visibility", "hidden"); words.hide(); };
  svg.addEventListener("pointermove", event => {
    const x = event.clientX - svg.getBoundingClientRect().left;
    at = places.reduce((best, [px], i) => Math.abs(px - x) < Math.abs(places[best][0] - x) ? i : best, 0);
    show();
  });
  svg.addEventListener("pointerleave", hide);
  svg.addEventListener("blur", hide);
  svg.addEventListener("keydown", event => {
    const by = { ArrowLeft: -1, ArrowRight: 1, Home: -places.length, End: places.length }[event.key];
    if (event.key === "Escape") hide();
    if (by === undefined) return;
    event.preventDefault();
    at = Math.max(0, Math.min(places.length - 1, at + by));
    show();
  });
}

// ---- curves over steps

function curve(host, chart, name) {
  const colours = ["var(--measured)", "var(--accent)"];
  const all = chart.lines.flatMap(line => [...line.points.map(p => p[1]), ...(line.band || []).flatMap(p => [p[1], p[2]])]);
  const xs = chart.lines.flatMap(line => line.points.map(p => p[0]));
  const x = [Math.min(...xs), Math.max(...xs)];
  if (x[0] === x[1]) { x[0] -= 0.5; x[1] += 0.5; }
  let low = Math.min(...all), high = Math.max(...all);
  const pad = (high - low || Math.abs(high) || 1) * 0.06;
  const y = chart.log ? [low / 1.15, high * 1.15] : [chart.zero || low >= 0 && low < 0.35 * high ? 0 : low - pad, high + pad];
  if (chart.lines.length > 1) key(host, chart.lines.map((line, at) => [line.name, colours[at]]));
  const main = chart.lines[0];
  const told = chart.lines.map(line => `${line.name} ${number(line.points[0][1])} at step ${number(line.points[0][0])}, ` +
    `${number(line.points[line.points.length - 1][1])} at step ${number(line.points[line.points.length - 1][0])}`).join("; ");
  const height = 230, { svg, width } = canvas(host, height, `${name}: ${told}. Arrow keys read values.`);
  const yTicks = chart.log ? logTicks(...y) : ticks(...y, 5);
  const wide = Math.max(...yTicks.map(value => number(value).length)) * 6.6 + 14;
  const box = { left: wide, right: width - 10, top: 8, bottom: height - 38 };
  const steps = ticks(x[0], x[1], Math.min(8, (box.right - box.left) / 70)).filter(Number.isInteger);
  const { px, py } = axes(svg, box, { x, y, xTicks: steps, yTicks, xName: "step", log: chart.log });
  chart.lines.forEach((line, at) => {
    if (line.band) {
      const edge = [...line.band.map(p => [p[0], p[2]]), ...line.band.slice().reverse().map(p => [p[0], p[1]])];
      add(svg, "path", { class: "mark", d: path(edge, px, py) + "Z", fill: colours[at], opacity: 0.15 });
    }
    const raw = line.smooth ? "var(--thin)" : colours[at];
    add(svg, "path", { class: line.smooth ? "curve raw mark" : "curve mark", d: path(line.points, px, py), stroke: raw });
    if (line.smooth) {
      add(svg, "path", { class: "curve mark", d: path(line.points.map((p, i) => [p[0], line.smooth[i]]), px, py), stroke: colours[at] });
    }
    if (line.dots || line.points.length === 1) {
      for (const [sx, sy] of line.points) add(svg, "circle", { class: "mark", cx: px(sx), cy: py(sy), r: 3, fill: colours[at] });
    }
  });
  explore(svg, host, box, main.points.map(p => [px(p[0]), py(p[1])]), at => {
    const step = main.points[at][0];
    const lines = [`step ${number(step)}`, `${main.name}: ${number(main.points[at][1])}`];
    if (main.smooth) lines.push(`around it: ${number(main.smooth[at])}`);
    for (const other of chart.lines.slice(1)) {
      const near = other.points.filter(p => p[0] <= step).pop();
      if (near) lines.push(`${other.name}: ${number(near[1])} (step ${number(near[0])})`);
    }
    return lines.join("\n");
  });
}

function logTicks(low, high) {
  const made = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power++) {
    for (const times of high / low > 100 ? [1] : [1, 2, 5]) {
      const value = +(times * 10 ** power).toPrecision(6);
      if (value >= low && value <= high) made.push(value);
    }
  }
  return made;
}

// ---- lanes of one step

function timeline(host, chart) {
  const shown = [["predicted", chart.predicted], ["measured", chart.measured]].filter(([, side]) => side);
  key(host, chart.groups.map((name, at) => [name, `var(--g${at})`]).filter((_, at) =>
    shown.some(([, side]) => Object.values(side.lanes).flat().some(span => chart.group[span[0]] === at))));
  let from = 0, to = chart.seconds;
  const place = add(host, "div"), words = tip(host);
  const draw = () => {
    place.textContent = "";
    const narrow = host.clientWidth < 620, row = 15, between = narrow ? 26 : 14;
    const lane = shown.length * (row + 2) + between, top = 36;
    const height = top + lane * chart.lanes.length + 24;
    const ends = shown.map(([name, side]) => `${name} ${seconds(side.seconds)}`).join(", ");
    const { svg, width } = canvas(place, height, `Lanes of one step: ${ends}. Plus and minus zoom, arrow keys move, 0 shows all.`);
    svg.setAttribute("tabindex", "0");
    svg.style.cursor = "crosshair";
    const left = narrow ? 34 : 172, right = width - 8;
    const px = time => left + (time - from) / (to - from) * (right - left);
    const timeAt = x => from + (x - left) / (right - left) * (to - from);
    for (const value of ticks(from, to, (right - left) / 90)) {
      add(svg, "line", { class: "grid-line", x1: px(value), x2: px(value), y1: top - 6, y2: height - 20 });
      add(svg, "text", { x: px(value), y: height - 6, "text-anchor": "middle" }, seconds(value));
    }
    const rows = [];
    chart.lanes.forEach(([id, title], index) => {
      const y = top + index * lane + (narrow ? 14 : 0);
      add(svg, "text", { class: "name", x: 0, y: narrow ? y - 4 : y + shown.length * (row + 2) / 2 + 4 }, title);
      shown.forEach(([name, side], part) => {
        const at = y + part * (row + 2);
        add(svg, "text", { x: left - 8, y: at + 11.5, "text-anchor": "end" }, narrow ? name.slice(0, 4) : name);
        add(svg, "rect", { x: left, y: at, width: right - left, height: row, fill: "var(--grid)", opacity: 0.6 });
        rows.push({ at, name, title, spans: side.lanes[id] || [] });
        const drawn = new Map();
        for (const [kind, start, length] of side.lanes[id] || []) {
          const a = start / 1e6, b = (start + length) / 1e6;
          if (b < from || a > to) continue;
          const x = Math.max(px(a), left), w = Math.max(0.7, Math.min(px(b), right) - x - 0.25), group = chart.group[kind];
          drawn.set(group, (drawn.get(group) || "") + `M${x.toFixed(2)} ${at}h${w.toFixed(2)}v${row}h-${w.toFixed(2)}z`);
        }
        for (const [group, d] of drawn) add(svg, "path", { class: "mark", d, fill: `var(--g${group})`, "data-side": name });
      });
    });
    shown.forEach(([name, side], part) => {
      if (side.seconds < from || side.seconds > to) return;
      const colour = name === "predicted" ? "var(--predicted)" : "var(--measured)", x = px(side.seconds);
      add(svg, "line", { x1: x, x2: x, y1: 8 + part * 14, y2: height - 20, stroke: colour, "stroke-width": 1.5, "stroke-dasharray": "4 3" });
      add(svg, "text", { x: x - 5, y: 12 + part * 14, "text-anchor": "end", style: `fill:${colour}` }, `${name} ${seconds(side.seconds)}`);
    });
    const band = add(svg, "rect", { y: top - 6, height: height - top - 14, fill: "var(--measured)", opacity: 0.15, visibility: "hidden" });
    let began = null;
    const xOf = event => Math.max(left, Math.min(right, event.clientX - svg.getBoundingClientRect().left));
    svg.addEventListener("pointerdown", event => { if (event.pointerType === "mouse") { began = xOf(event); svg.setPointerCapture(event.pointerId); } });
    svg.addEventListener("pointerup", event => {
      const a = began, b = xOf(event);
      began = null;
      band.setAttribute("visibility", "hidden");
      if (a !== null && Math.abs(b - a) > 6) view(timeAt(Math.min(a, b)), timeAt(Math.max(a, b)));
    });
    svg.addEventListener("dblclick", () => view(0, chart.seconds));
    svg.addEventListener("pointermove", event => {
      const x = xOf(event), y = event.clientY - svg.getBoundingClientRect().top, time = timeAt(x) * 1e6;
      if (began !== null) {
        band.setAttribute("x", Math.min(x, began)); band.setAttribute("width", Math.abs(x - began)); band.setAttribute("visibility", "visible");
        return;
      }
      const here = rows.find(one => y >= one.at && y <= one.at + row);
      const slack = (to - from) * 1e6 / (right - left);
      const under = here ? here.spans.filter(s => s[1] - slack <= time && time <= s[1] + s[2] + slack).slice(0, 4) : [];
      if (!under.length) { words.hide(); return; }
      const lines = under.map(([kind, start, length, unit]) => {
        const what = (KIND_NAMES[chart.kinds[kind]] || chart.kinds[kind]) + (unit >= 0 ? ` of part ${unit}` : "");
        return `${what}: ${seconds(length / 1e6)}, from ${seconds(start / 1e6)}`;
      });
      words.show([`${here.title}, ${here.name}`, ...lines].join("\n"), x, place.offsetTop + here.at);
    });
    svg.addEventListener("pointerleave", () => words.hide());
    svg.addEventListener("keydown", event => {
      const span = to - from, by = { ArrowLeft: -0.2, ArrowRight: 0.2 }[event.key];
      if (by) view(from + by * span, to + by * span);
      else if (event.key === "+" || event.key === "=") zoom(0.5);
      else if (event.key === "-") zoom(2);
      else if (event.key === "0") view(0, chart.seconds);
      else return;
      event.preventDefault();
      place.firstChild.focus();
    });
  };
  const view = (a, b) => {
    const span = Math.max(chart.seconds * 1e-4, Math.min(b - a, chart.seconds));
    from = Math.max(0, Math.min(a, chart.seconds - span)); to = from + span;
    words.hide();
    draw();
  };
  const zoom = times => { const middle = (from + to) / 2, half = (to - from) / 2 * times; view(middle - half, middle + half); };
  draw();
  const tools = add(host, "div", { class: "tools" });
  for (const [name, act] of [["Zoom in", () => zoom(0.5)], ["Zoom out", () => zoom(2)], ["Whole step", () => view(0, chart.seconds)]]) {
    add(tools, "button", { type: "button" }, name).addEventListener("click", act);
  }
  const step = chart.measured ? `Measured: step ${number(chart.measured.step)}. ` : "No step has been measured yet. ";
  const note = chart.predicted ? "" : "Nothing was predicted: there is no machine profile. ";
  const turns = chart.shared_cores ? "Computing and updating share the cores: measured bars hold the wait for a turn, too. " : "";
  add(tools, "span", {}, `${step}${note}${turns}Drag over a stretch to see it closer.`);
}

// ---- bars

function bars(host, rows, { text, label, describe }) {
  const named = { predicted: "var(--predicted)", measured: "var(--measured)" };
  const sides = Object.keys(named).filter(side => rows.some(row => row[side] != null));
  key(host, sides.map(side => [side, named[side]]));
  const narrow = host.clientWidth < 520, bar = 13, head = narrow ? 18 : 0;
  const lane = sides.length * (bar + 2) + 12 + head, height = lane * rows.length + 2;
  const { svg, width } = canvas(host, height, label);
  const left = narrow ? 0 : 170, right = width - 92, words = tip(host);
  rows.forEach((row, index) => {
    const y = index * lane + head + 2, scale = (right - left) / row.scale;
    add(svg, "text", { class: "name", x: 0, y: narrow ? y - 5 : y + sides.length * (bar + 2) / 2 + 3 }, row.name);
    sides.forEach((side, part) => {
      const at = y + part * (bar + 2);
      add(svg, "rect", { x: left, y: at, width: right - left, height: bar, rx: 2, fill: "var(--grid)", opacity: 0.6 });
      if (row[side] == null) { add(svg, "text", { x: left + 6, y: at + 10.5 }, "not known"); return; }
      let reached = left;
      const parts = side === "predicted" && row.parts ? row.parts : [[null, row[side]]];
      parts.forEach(([name, size], number) => {
        const wide = Math.max(size * scale, 0.7);
        const drawn = add(svg, "rect", { class: "mark", x: reached, y: at, width: Math.max(0.7, wide - (parts.length > 1 ? 1 : 0)), height: bar,
          rx: 2, fill: named[side], opacity: 1 - 0.62 * number / Math.max(parts.length, 4), "data-side": side });
        drawn.addEventListener("pointermove", event => words.show(describe(row, side, name, size),
          event.clientX - host.getBoundingClientRect().left, svg.offsetTop + svg.getBoundingClientRect().top - host.getBoundingClientRect().top + at));
        drawn.addEventListener("pointerleave", () => words.hide());
        reached += wide;
      });
      add(svg, "text", { x: right + 6, y: at + 10.5 }, text(row[side]));
    });
    if (row.budget) {
      const x = left + row.budget * scale;
      add(svg, "line", { x1: x, x2: x, y1: y - 3, y2: y + sides.length * (bar + 2) + 1, stroke: "var(--accent)", "stroke-width": 2 });
    }
  });
}

function laneBars(host, chart) {
  const most = Math.max(...chart.rows.flatMap(row => [row.predicted || 0, row.measured || 0])) || 1;
  const rows = chart.rows.map(row => ({ ...row, scale: most }));
  const told = row => ["predicted", "measured"].map(side => row[side] == null ? "not known" : seconds(row[side]));
  bars(host, rows, {
    text: seconds,
    label: "Seconds of a step by lane. " + rows.map(row => `${row.name}: ${told(row).join(" predicted, ")} measured`).join("; "),
    describe: (row, side, _, size) => `${row.name}\n${side}: ${seconds(size)}, ${Math.round(100 * size / (rows[0][side] || size))} % of the step`,
  });
  table(host, ["", "predicted", "measured"], rows.map(row => [row.name, ...told(row)]));
}

function tierBars(host, chart) {
  const rows = chart.rows.map(row => {
    const predicted = row.parts.length ? row.parts.reduce((sum, part) => sum + part[1], 0) : null;
    return { ...row, predicted, scale: Math.max(row.budget || 0, predicted || 0, row.measured || 0) || 1 };
  });
  const told = row => [row.predicted, row.measured, row.budget].map(size => size == null ? "" : bytes(size));
  bars(host, rows, {
    text: bytes,
    label: "Bytes by tier. " + rows.map(row => `${row.name}: ${told(row).map((size, at) => `${["predicted", "used", "allowed"][at]} ${size || "not known"}`).join(", ")}`).join("; "),
    describe: (row, side, name, size) => `${row.name}, ${side}${name && name !== "predicted" ? `: ${name}` : ""}\n${bytes(size)}` +
      (row.budget ? `, ${Math.round(100 * size / row.budget)} % of the budget` : ""),
  });
  if (rows.some(row => row.budget)) add(host, "p", { class: "missing", style: "font-size:.8rem" }, "The upright line is the budget.");
  table(host, ["", "predicted", "used", "budget"], rows.flatMap(row => [[row.name, ...told(row)],
    ...(row.parts.length > 1 ? row.parts.map(([name, size]) => [`– ${name}`, bytes(size), "", ""]) : [])]));
}

// ---- the activation curve

function activations(host, chart) {
  const points = chart.points, chosen = chart.chosen, guessed = points.filter(point => point.simulated != null);
  key(host, [["time model", "var(--predicted)"], ...(guessed.length ? [["simulated step", "var(--measured)"]] : []), ["chosen", "var(--accent)"]]);
  const every = [...points, chosen], ys = every.flatMap(point => [point.y, ...(point.simulated != null ? [point.simulated] : [])]);
  const low = Math.min(...ys), high = Math.max(...ys), pad = (high - low || high) * 0.12;
  const x = [Math.min(...every.map(p => p.x)), Math.max(...every.map(p => p.x))];
  if (x[0] === x[1]) x[1] = x[0] + 1;
  const height = 290;
  const best = chosen.simulated != null ? chosen.simulated : chosen.y;
  const { svg, width } = canvas(host, height, `Predicted seconds over bytes ${chart.x}: ${seconds(points[0].y)} with ${bytes(points[0].x)}, ` +
    `${seconds(points[points.length - 1].y)} with ${bytes(points[points.length - 1].x)}; chosen ${bytes(chosen.x)}, ${seconds(best)}. Arrow keys read values.`);
  const y = [Math.max(0, low - pad), high + pad], yTicks = ticks(...y, 5);
  const box = { left: Math.max(...yTicks.map(value => seconds(value).length)) * 6.6 + 14, right: width - 18, top: 10, bottom: height - 40 };
  const { px, py } = axes(svg, box, { x, y, xTicks: byteTicks(...x, (box.right - box.left) / 90), yTicks, xName: `bytes ${chart.x} in a step`, xText: bytes, yText: seconds });
  add(svg, "path", { class: "curve mark", d: path(points.map(p => [p.x, p.y]), px, py), stroke: "var(--predicted)" });
  if (points.length === 1) add(svg, "circle", { class: "mark", cx: px(points[0].x), cy: py(points[0].y), r: 3, fill: "var(--predicted)" });
  for (const point of guessed) add(svg, "circle", { class: "mark", cx: px(point.x), cy: py(point.simulated), r: 3.5, fill: "var(--panel)", stroke: "var(--measured)", "stroke-width": 1.8 });
  add(svg, "line", { class: "cross", x1: px(chosen.x), x2: px(chosen.x), y1: py(best), y2: box.bottom, style: "stroke:var(--accent)" });
  add(svg, "circle", { class: "mark chosen", cx: px(chosen.x), cy: py(best), r: 6, fill: "var(--accent)" });
  const end = px(chosen.x) > (box.left + box.right) / 2;
  add(svg, "text", { class: "big", x: px(chosen.x) + (end ? -11 : 11), y: py(best) - 10, "text-anchor": end ? "end" : "start" }, `chosen: ${bytes(chosen.x)}, ${seconds(best)}`);
  explore(svg, host, box, points.map(p => [px(p.x), py(p.y)]), at => {
    const point = points[at], { device, host: ram, ssd } = point.tiers;
    const where = [[device, "device"], [ram, "RAM"], [ssd, "SSD"]].filter(([size]) => size).map(([size, name]) => `${bytes(size)} ${name}`);
    return [`${bytes(point.x)} ${chart.x}`, `${point.operators} operators' outputs kept`, where.join(", "), `time model: ${seconds(point.y)}`,
      ...(point.simulated != null ? [`simulated: ${seconds(point.simulated)}`] : [])].filter(Boolean).join("\n");
  });
}

// ---- all of them

const DRAW = { loss: curve, rate: curve, norm: curve, learning_rate: curve, timeline, lanes: laneBars, tiers: tierBars, activations };

for (const host of document.querySelectorAll("[data-chart]")) {
  const name = host.dataset.chart, caption = host.closest("figure").querySelector("figcaption").textContent;
  let width = 0;
  new ResizeObserver(() => {
    if (host.clientWidth === width) return;
    width = host.clientWidth;
    const open = host.querySelector("details[open]") !== null;
    host.textContent = "";
    DRAW[name](host, data[name], caption);
    const details = host.querySelector("details");
    if (open && details) details.open = true;
  }).observe(host);
}
