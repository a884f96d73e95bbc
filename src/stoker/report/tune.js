/* The sections of the page about a search of `stoker tune`. Names, reasons and output of scripts are only ever text. */
const ROW = 30, LABEL_WIDTH = 250;
const DECISION_COLOURS = { kept: "var(--good)", confirmed: "var(--good)", baseline: "var(--compute)" };
const changed = (step) => step.change.length ? step.change.map((pair) => `${pair.key} ${pair.value}`).join(", ") : step.decision === "baseline" ? "as given" : "all changes together";
const ratio = (amount) => known(amount) ? `${digits(amount, 3)}×` : "–";
const cost = (before, after, unit) => known(before) && known(after) ? `${plain(before)} → ${plain(after)} ${unit}` : null;

function topLine(tune) {
  const f = tune.figures;
  if (tune.what === "ablation") return tune.state === "running" ? "Switching off one optimisation at a time." : "Where the speed comes from.";
  if (tune.state === "running") return known(f.speedup) && f.speedup > 1.005 ? `${ratio(f.speedup)} so far.` : "Looking for faster settings.";
  if (!known(f.speedup)) return "Nothing was measured.";
  return tune.changes.length && f.speedup > 1.005 ? `${ratio(f.speedup)} as fast as before.` : "The settings were already the fastest found.";
}

/* One bar for each trial: the mean, a line from its slowest to its fastest part, and the ceiling as a dashed line. */
function search(tune) {
  const steps = tune.steps.filter((step) => known(step.rate) || step.failed), f = tune.figures;
  if (!steps.length) return null;
  const most = Math.max(...steps.flatMap((step) => [step.rate || 0, step.high || 0]), f.ceiling || 0);
  const plot = svg("svg", { class: "plot", role: "img", "aria-label": `Speed of each trial: ${steps.map((step) => `${changed(step)} ${known(step.rate) ? `${plain(step.rate)} ${f.unit}/s` : step.result}`).join("; ")}` });
  const figure = el("figure", { "data-chart": "search" }, el("figcaption", null, el("h3", null, `${f.unit} per second`), el("span", { class: "unit" }, "the thin line spans the parts of a trial")), plot);
  function draw() {
    const width = Math.max(280, plot.clientWidth || figure.clientWidth || 600), narrow = width < 560, left = narrow ? 8 : LABEL_WIDTH, right = width - 70;
    const row = narrow ? ROW + 18 : ROW, height = steps.length * row + 12, X = (rate) => left + rate / most * (right - left);
    plot.setAttribute("viewBox", `0 0 ${width} ${height}`);
    plot.setAttribute("height", height);
    const fits = (text, size) => text.length > size ? `${text.slice(0, size - 1)}…` : text;
    plot.replaceChildren(...steps.flatMap((step, at) => {
      const top = at * row + (narrow ? 22 : 6), colour = DECISION_COLOURS[step.decision] || "var(--other)", label = `${known(step.number) ? `${step.number}. ` : ""}${changed(step)}`;
      return [svg("text", narrow ? { x: left, y: top - 6 } : { x: left - 10, y: top + 14, "text-anchor": "end" }, fits(label, narrow ? Math.floor(width / 7) : 38), svg("title", null, label)),
        known(step.rate) && svg("rect", { x: left, y: top, width: Math.max(1, X(step.rate) - left), height: 18, rx: 3, fill: colour }, svg("title", null, `${label}: ${plain(step.rate)} ${f.unit}/s, ${step.decision}`)),
        known(step.low) && known(step.high) && svg("line", { class: "spread", x1: X(step.low), x2: X(step.high), y1: top + 9, y2: top + 9 }),
        svg("text", { x: known(step.rate) ? Math.max(X(step.rate), X(step.high || 0)) + 6 : left + 4, y: top + 14 }, known(step.rate) ? plain(step.rate) : step.result)];
    }).filter(Boolean), known(f.ceiling) && svg("line", { class: "cursor", x1: X(f.ceiling), x2: X(f.ceiling), y1: 0, y2: height }, svg("title", null, `ceiling ${plain(f.ceiling)} ${f.unit}/s`)) || "");
  }
  drawn.set("search", { group: "search", draw, plot });
  resized.observe(figure);
  return figure;
}

function stepTable(steps, unit) {
  const predicted = (one) => one && known(one.expected) ? `${ratio(one.expected)}${known(one.low) && known(one.high) ? ` (${digits(one.low, 3)}–${digits(one.high, 3)})` : ""}` : "–";
  return table(["", "what", "why", "predicted", "measured", `${unit}/s`, "decision"], steps.map((step) => ({
    mark: ["kept", "confirmed"].includes(step.decision) ? "better" : step.failed ? "worse" : null,
    cells: [known(step.number) ? plain(step.number) : "", step.change.length ? el("code", null, changed(step)) : changed(step), step.why, predicted(step.predicted), ratio(step.speedup),
      known(step.rate) ? plain(step.rate) : step.result || "–",
      [step.decision, step.reason && `: ${step.reason}`, step.detail && el("details", null, el("summary", null, "what it said"), el("code", { class: "fix" }, step.detail))]] })), [0, 3, 4, 5]);
}

const sections = {
  top: ({ tune }) => {
    const f = tune.figures;
    const items = [[`${f.unit}/s before`, f.before], [`${f.unit}/s after`, f.after], ["ceiling", f.ceiling], ["trials", f.trials]].filter(([, amount]) => known(amount)).map(([name, amount]) => [name, plain(amount)]);
    for (const [name, text] of [["took", known(f.took_s) && duration(f.took_s)], ["whole run", cost(f.hours_before, f.hours_after, "h")], ["cost", cost(f.cost_before, f.cost_after, "at the given price")]]) if (text) items.push([name, text]);
    return [el("div", { class: "kicker" }, el("strong", null, tune.name), el("span", { class: `pill ${tune.state}` }, tune.state), el("span", null, `tuned for ${f.objective}`)),
      el("h1", null, topLine(tune)), tune.ending && el("p", { class: "lead" }, `Ended: ${tune.ending}`),
      el("dl", { class: "figures" }, items.map(([name, text]) => el("div", null, el("dt", null, name), el("dd", null, text))))];
  },
  changes: ({ tune }) => tune.changes.length || tune.command || tune.notes.length ? [...heading("changes", tune.state === "running" ? "The best so far" : "What to change"), card(
    tune.changes.length > 0 && table(["setting", "was", "now", ""], tune.changes.map((change) => [el("code", null, change.key), change.from, change.to, change.reason])),
    tune.command && el("code", { class: "fix" }, tune.command), tune.notes.map((note) => soft(note)))] : null,
  search: ({ tune }) => { const picture = search(tune); return picture && [...heading("search", "The trials, one change at a time"), card(picture)]; },
  sources: ({ tune }) => tune.sources.length ? [...heading("sources", "Speed-up by source"), soft("How much faster training is with each optimisation than without it, everything else unchanged."), card(table(["optimisation", "without it", "speed-up", "± spread", ""],
    tune.sources.map((one) => [one.label, one.change.map((pair) => `${pair.key} ${pair.value}`).join(", "), ratio(one.factor), known(one.spread) ? percent(one.spread) : "–", [one.verdict, one.note && `${one.verdict ? "; " : ""}${one.note}`]]), [2, 3]))] : null,
  trials: ({ tune }) => tune.steps.length ? [...heading("trials", "What was tried, and why"), card(stepTable(tune.steps, tune.figures.unit))] : null,
  other: ({ tune }) => tune.other.length ? [...heading("other", "Faster, but a different training"), card(stepTable(tune.other, tune.figures.unit))] : null,
  setup: ({ tune }) => Object.keys(tune.setup).length ? [...heading("setup", "Where and how it was measured"), card(el("div", { class: "wide" }, el("table", { class: "facts" }, el("tbody", null,
    Object.entries(tune.setup).map(([name, text]) => el("tr", null, el("th", { scope: "row" }, name), el("td", null, text)))))))] : null,
  missing: ({ tune }) => tune.missing.length ? [...heading("missing", "Not in this report"), card(el("ul", null, tune.missing.map((text) => el("li", null, text))))] : null,
  foot: (doc) => [`Made by stoker ${doc.stoker} from the journal of stoker tune. This page is self-contained and loads nothing.`],
};

start();
