"use strict";
/* SVG charts with hover, zoom by dragging, legends that toggle series, and a table of the same numbers. No text is ever parsed as HTML. */
const SVG = "http://www.w3.org/2000/svg";

function fill(node, attributes, children = []) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "on") for (const [event, handler] of Object.entries(value)) node.addEventListener(event, handler);
    else if (name === "colour") node.style.background = value;
    else if (name === "width" && !(node instanceof SVGElement)) node.style.width = value;
    else node.setAttribute(name, value === true ? "" : value);
  }
  for (const child of children.flat(9)) if (child !== null && child !== undefined && child !== false) node.append(child);
  return node;
}
const el = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);
const svg = (tag, attributes, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);

const known = (value) => typeof value === "number" && Number.isFinite(value);
const digits = (value, count) => value.toLocaleString("en-GB", { maximumSignificantDigits: count });
function plain(value) {
  if (!known(value)) return "–";
  const size = Math.abs(value);
  if (size >= 1000) return Math.round(value).toLocaleString("en-GB");
  if (size !== 0 && size < 0.001) return value.toExponential(1);
  return digits(value, 3);
}
const percent = (value) => !known(value) ? "–" : value > 0 && value < 0.01 ? `${digits(100 * value, 1)}\u00a0%` : `${digits(100 * value, value < 0.1 ? 2 : 3)}\u00a0%`;
function milliseconds(value) { return !known(value) ? "–" : value >= 10000 ? `${digits(value / 1000, 3)}\u00a0s` : `${digits(value, 3)}\u00a0ms`; }
function microseconds(value) { return !known(value) ? "–" : value >= 1000 ? `${digits(value / 1000, 3)}\u00a0ms` : `${digits(value, 3)}\u00a0µs`; }
function bytes(value) {
  if (!known(value)) return "–";
  const names = ["B", "kB", "MB", "GB", "TB", "PB"];
  let at = 0;
  while (Math.abs(value) >= 999.5 && at < names.length - 1) { value /= 1000; at += 1; }
  return `${digits(value, 3)} ${names[at]}`;
}
function duration(seconds) {
  if (!known(seconds)) return "–";
  if (seconds < 90) return `${digits(seconds, seconds < 10 ? 2 : 3)}\u00a0s`;
  const minutes = Math.round(seconds / 60);
  if (minutes < 90) return `${minutes}\u00a0min`;
  if (minutes < 60 * 48) return `${Math.floor(minutes / 60)} h ${minutes % 60}\u00a0min`;
  return `${digits(minutes / 1440, 3)} days`;
}

/* The reader's choices survive a redraw: zoom by group, hidden series and open tables by chart. */
const chosen = { zoom: new Map(), hidden: new Map(), open: new Set() };
const drawn = new Map();
let dragging = false;

const tip = {
  node: null,
  show(x, y, title, lines) {
    this.node = this.node || document.getElementById("tip");
    this.node.replaceChildren(el("b", null, title), ...lines.map((line) =>
      el("div", null, el("i", { class: line.dash ? "swatch dash" : "swatch", colour: line.dash ? "none" : line.colour }), el("span", null, line.label), el("span", null, line.value))));
    this.node.hidden = false;
    const box = this.node.getBoundingClientRect();
    const left = x + 16 + box.width > innerWidth - 8 ? x - 16 - box.width : x + 16;
    this.node.style.left = `${Math.max(8, Math.min(left, innerWidth - box.width - 8))}px`;
    this.node.style.top = `${Math.max(8, Math.min(y - box.height / 2, innerHeight - box.height - 8))}px`;
  },
  hide() { if (this.node) this.node.hidden = true; },
};

function ticks(low, high, count) {
  const span = high - low;
  if (!(span > 0)) return [low];
  const rough = span / Math.max(1, count), power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((factor) => factor * power).find((size) => size >= rough) || rough;
  const found = [];
  for (let at = Math.ceil(low / step) * step; at <= high + step * 1e-6; at += step) found.push(Math.abs(at) < step * 1e-6 ? 0 : at);
  return found;
}

/* One chart. options: id, title, unit, xLabel, group, stacked, fromZero, yMax and usual (shared by the stacks of two runs), format, series: [{name, label, colour, dash, x, y}].
   A stack's series share one x: each value holds from the x before it to its own. */
function chart(options) {
  const hidden = chosen.hidden.get(options.id) || new Set();
  chosen.hidden.set(options.id, hidden);
  const group = options.group || options.id;
  const format = options.format || plain;
  const xs = [...new Set(options.series.flatMap((series) => series.x))].filter(known).sort((a, b) => a - b);
  const lowest = options.stacked ? Math.min(0, ...xs.slice(0, 1)) : xs[0], highest = xs[xs.length - 1];
  const plot = svg("svg", { class: "plot", role: "img", tabindex: 0, "aria-label": `${options.title}: ${summary()}. Use the arrow keys to read values.` });
  const reset = el("button", { type: "button", class: "reset", hidden: true, on: { click: () => zoomTo(null) } }, "Reset zoom");
  const legend = el("div", { class: "legend" }, options.series.length > 1 && options.series.map((series) =>
    el("button", { type: "button", "aria-pressed": String(!hidden.has(series.name)), on: { click: toggle(series.name) } }, swatch(series), series.label)), reset);
  const figure = el("figure", { "data-chart": options.id }, el("figcaption", null, el("h3", null, options.title), el("span", { class: "unit" }, options.unit || "")), legend, plot, tableOf());
  let at = null, view = null;

  function swatch(series) {
    const node = el("i", { class: series.dash ? "swatch dash" : "swatch", "aria-hidden": "true" });
    if (series.dash) node.style.borderColor = series.colour; else node.style.background = series.colour;
    return node;
  }
  function summary() {
    return options.series.map((series) => {
      const values = series.y.filter(known);
      return values.length ? `${series.label} from ${format(Math.min(...values))} to ${format(Math.max(...values))}` : `${series.label} not measured`;
    }).join(", ");
  }
  function toggle(name) {
    return (event) => {
      if (hidden.has(name)) hidden.delete(name); else hidden.add(name);
      event.currentTarget.setAttribute("aria-pressed", String(!hidden.has(name)));
      draw();
    };
  }
  function tableOf() {
    const body = el("div", { class: "wide" });
    const details = el("details", { on: { toggle: () => {
      if (details.open) { chosen.open.add(options.id); body.replaceChildren(numbers()); } else chosen.open.delete(options.id);
    } } }, el("summary", null, "Show as a table"), body);
    details.open = chosen.open.has(options.id);
    return details;
  }
  function numbers() {
    const stride = Math.ceil(xs.length / 200), rows = xs.filter((_, index) => index % stride === 0 || index === xs.length - 1);
    const places = options.series.map((series) => new Map(series.x.map((x, index) => [x, series.y[index]])));
    return el("table", null,
      el("thead", null, el("tr", null, el("th", { scope: "col" }, options.xLabel), options.series.map((series) => el("th", { scope: "col", class: "number" }, series.label)))),
      el("tbody", null, rows.map((x) => el("tr", null, el("td", null, plain(x)), places.map((place) => el("td", { class: "number" }, format(place.get(x))))))));
  }
  function zoomTo(range) {
    if (range) chosen.zoom.set(group, range); else chosen.zoom.delete(group);
    for (const other of drawn.values()) if (other.group === group) other.draw();
  }

  function draw() {
    const width = Math.max(200, plot.clientWidth || figure.clientWidth || 600), height = width < 480 ? 190 : 230;
    const box = { left: 50, right: width - 10, top: 10, bottom: height - 34 };
    const zoom = chosen.zoom.get(group);
    let [x0, x1] = zoom || [lowest, highest];
    if (!(x1 > x0)) { x0 -= 0.5; x1 += 0.5; }
    reset.hidden = !zoom;
    const shown = options.series.filter((series) => !hidden.has(series.name));
    const layers = options.stacked ? stack(shown) : shown.map((series) => ({ series, top: series.y, base: null }));
    const [y0, y1, cut] = range(layers, x0, x1);
    const X = (x) => box.left + (x - x0) / (x1 - x0) * (box.right - box.left);
    const Y = (y) => box.bottom - (y - y0) / (y1 - y0) * (box.bottom - box.top);
    view = { X, Y, box, x0, x1, shown, back: (px) => x0 + (px - box.left) / (box.right - box.left) * (x1 - x0) };
    const clip = `clip-${options.id}`;
    const marks = cut === null ? [] : over(layers, cut, x0, x1, X, box);
    plot.setAttribute("viewBox", `0 0 ${width} ${height}`);
    plot.setAttribute("height", height);
    plot.replaceChildren(
      svg("defs", null, svg("clipPath", { id: clip }, svg("rect", { x: box.left - (options.stacked ? 0 : 4), y: box.top - 4, width: box.right - box.left + (options.stacked ? 0 : 8), height: box.bottom - box.top + (options.stacked ? 4 : 8) }))),
      ...ticks(y0, y1, 4).map((y) => [svg("line", { class: "grid", x1: box.left, x2: box.right, y1: Y(y), y2: Y(y) }), svg("text", { x: box.left - 7, y: Y(y) + 4, "text-anchor": "end" }, (options.axis || format)(y))]).flat(),
      svg("line", { class: "axis", x1: box.left, x2: box.right, y1: box.bottom, y2: box.bottom }),
      ...ticks(x0, x1, Math.min(8, Math.floor(width / 90))).filter((x) => Number.isInteger(x) || x1 - x0 < 2).map((x) => svg("text", { x: X(x), y: box.bottom + 15, "text-anchor": X(x) > box.right - 14 ? "end" : "middle" }, plain(x))),
      svg("text", { x: box.right, y: box.bottom + 30, "text-anchor": "end" }, options.xLabel),
      svg("g", { "clip-path": `url(#${clip})` }, layers.map((layer) => options.stacked ? area(layer, X, Y) : line(layer, X, Y))),
      ...marks,
      svg("line", { class: "cursor", y1: box.top, y2: box.bottom, visibility: "hidden" }),
      svg("rect", { class: "selection", y: box.top, height: box.bottom - box.top, visibility: "hidden" }));
  }
  function stack(shown) {
    let base = null;
    return shown.map((series) => {
      const bottom = base || series.y.map(() => 0), top = series.y.map((y, index) => bottom[index] + (known(y) ? y : 0));
      base = top;
      return { series, top, base: bottom };
    });
  }
  function range(layers, x0, x1) {
    const values = [];
    for (const { series, top } of layers) top.forEach((y, index) => { if (known(y) && series.x[index] >= x0 && series.x[index] <= x1) values.push(y); });
    if (!values.length) return [0, 1, null];
    values.sort((a, b) => a - b);
    let low = options.fromZero || options.stacked ? 0 : values[0], high = values[values.length - 1], cut = null;
    if (options.stacked) {
      // One step that compiled for minutes must not flatten the rest: steps far above the usual time are cut off and marked.
      const tops = layers.length ? layers[layers.length - 1].top.filter(known).slice().sort((a, b) => a - b) : [];
      const usual = Math.max(options.usual || 0, tops[Math.floor(0.95 * (tops.length - 1))] || 0);
      if (options.yMax && x0 === lowest && x1 === highest) high = Math.max(high, options.yMax);
      if (usual > 0 && tops.length > 8 && high > 3 * usual) { high = 1.5 * usual; cut = high; }
    }
    if (!(high > low)) { const pad = Math.abs(high) * 0.1 || 1; low = options.fromZero || options.stacked ? 0 : low - pad; high += pad; }
    const pad = (high - low) * 0.06;
    return [options.fromZero || options.stacked ? low : low - pad, high + pad, cut];
  }
  function over(layers, cut, x0, x1, X, box) {
    const { series, top } = layers[layers.length - 1];
    return top.map((y, index) => known(y) && y > cut && series.x[index] >= x0 && series.x[index] <= x1
      ? svg("path", { class: "over", d: `M${X(series.x[index])} ${box.top - 7}l4 6h-8z` }, svg("title", null, format(y))) : null).filter(Boolean);
  }
  function area({ series, top, base }, X, Y) {
    let ahead = "", back = "";
    series.x.forEach((x, index) => {
      const before = X(index ? series.x[index - 1] : lowest), here = X(x);
      ahead += `${index ? "L" : "M"}${before.toFixed(1)} ${Y(top[index]).toFixed(1)}H${here.toFixed(1)}`;
      back = `L${here.toFixed(1)} ${Y(base[index]).toFixed(1)}H${before.toFixed(1)}` + back;
    });
    return svg("path", { d: ahead + back + "Z", fill: series.colour, "data-series": series.name });
  }
  function line({ series }, X, Y) {
    let path = "", pen = false;
    const dots = [];
    series.x.forEach((x, index) => {
      const y = series.y[index];
      if (!known(x) || !known(y)) { pen = false; return; }
      const alone = !pen && !known(series.y[index + 1]);
      path += `${pen ? "L" : "M"}${X(x).toFixed(1)} ${Y(y).toFixed(1)}`;
      if (alone || (options.dots && series.x.length <= 40)) dots.push(svg("circle", { cx: X(x), cy: Y(y), r: 2.6, fill: series.colour }));
      pen = true;
    });
    return [svg("path", { d: path, fill: "none", stroke: series.colour, "stroke-width": 1.9, "stroke-linejoin": "round", "stroke-dasharray": series.dash ? "6 4" : null, "data-series": series.name }), dots];
  }

  function nearest(x) {
    let best = null;
    const inside = options.stacked ? xs.find((candidate) => candidate >= x) : undefined;
    if (inside !== undefined) return inside;
    for (const candidate of xs) if (candidate >= view.x0 && candidate <= view.x1 && (best === null || Math.abs(candidate - x) < Math.abs(best - x))) best = candidate;
    return best;
  }
  function point(x, clientX, clientY) {
    at = x;
    if (x === null || x === undefined) return;
    const cursor = plot.querySelector(".cursor");
    for (const name of ["x1", "x2"]) cursor.setAttribute(name, view.X(x));
    cursor.setAttribute("visibility", "visible");
    const lines = view.shown.map((series) => ({ ...series, value: series.y[series.x.indexOf(x)] })).filter((line) => known(line.value)).map((line) => ({ ...line, value: format(line.value) }));
    if (options.stacked) {
      lines.reverse();
      lines.push({ label: "total", colour: "none", value: format(view.shown.reduce((sum, series) => sum + (series.y[series.x.indexOf(x)] || 0), 0)) });
    }
    for (const more of options.more || []) { const value = more.y && more.y[more.x.indexOf(x)]; if (known(value)) lines.push({ label: more.label, colour: "none", value: more.format(value) }); }
    tip.show(clientX, clientY, `${options.xLabel} ${plain(x)}`, lines);
  }
  function leave() { const cursor = plot.querySelector(".cursor"); if (cursor) cursor.setAttribute("visibility", "hidden"); tip.hide(); }
  let from = null;
  const place = (event) => { const box = plot.getBoundingClientRect(); return Math.min(view.box.right, Math.max(view.box.left, event.clientX - box.left)); };
  function select(a, b) {
    const selection = plot.querySelector(".selection");
    selection.setAttribute("visibility", Math.abs(b - a) > 5 ? "visible" : "hidden");
    selection.setAttribute("x", Math.min(a, b));
    selection.setAttribute("width", Math.abs(b - a));
  }
  fill(plot, { on: {
    pointerdown: (event) => { if (event.button === 0) { from = place(event); dragging = true; if (event.isTrusted) plot.setPointerCapture(event.pointerId); } },
    pointermove: (event) => { const here = place(event); if (from !== null) select(from, here); point(nearest(view.back(here)), event.clientX, event.clientY); },
    pointerup: (event) => {
      if (from === null) return;
      const here = place(event), start = from;
      from = null; dragging = false;
      if (Math.abs(here - start) > 5) { leave(); zoomTo([view.back(Math.min(start, here)), view.back(Math.max(start, here))]); }
    },
    pointercancel: () => { from = null; dragging = false; select(0, 0); leave(); },
    pointerleave: () => { if (from === null) leave(); },
    dblclick: () => zoomTo(null),
    blur: leave,
    keydown: (event) => {
      const visible = xs.filter((x) => x >= view.x0 && x <= view.x1), index = at === null ? -1 : visible.indexOf(at);
      const moves = { ArrowRight: index + 1, ArrowLeft: index < 0 ? visible.length - 1 : index - 1, Home: 0, End: visible.length - 1 };
      if (event.key in moves) {
        const x = visible[Math.max(0, Math.min(visible.length - 1, moves[event.key]))], box = plot.getBoundingClientRect();
        if (x !== undefined) point(x, box.left + view.X(x), box.top + box.height / 2);
      } else if (event.key === "+" || event.key === "-") {
        const middle = at === null ? (view.x0 + view.x1) / 2 : at, half = (view.x1 - view.x0) * (event.key === "+" ? 0.25 : 1);
        zoomTo(event.key === "-" && half * 2 >= highest - lowest ? null : [Math.max(lowest, middle - half), Math.min(highest, middle + half)]);
      } else if (event.key === "Escape") { leave(); zoomTo(null); } else return;
      event.preventDefault();
    },
  } });
  drawn.set(options.id, { group, draw, plot });
  resized.observe(figure);
  return figure;
}

const resized = new ResizeObserver((entries) => {
  for (const entry of entries) { const found = drawn.get(entry.target.dataset.chart); if (found && found.plot.isConnected) found.draw(); }
});
