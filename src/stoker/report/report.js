/* The sections of the page, each filled from the document. */
const PART_NAMES = { wait: "waiting for data", transfer: "transfer to the device", compute: "computing", rest: "computing and other", other: "other" };
const MEMORY_NAMES = { process_bytes: "main process", device_bytes: "device, reserved", shm_used_bytes: "/dev/shm in use" };
const PALETTE = ["var(--c1)", "var(--c2)", "var(--c3)", "var(--c4)", "var(--c5)", "var(--c6)"];
const colourOf = (part) => `var(--${part})`;
const has = (columns, name) => columns && columns[name] && columns[name].some(known);
const named = (runs, run) => runs.length > 1 ? [el("h3", null, run.label)] : [];

/* The verdict as a headline, and the text after its colon as the paragraph below. */
function headline(run) {
  const line = sentence(run), colon = line.indexOf(": ");
  if (colon < 0 || colon > 90) return [capital(line), null];
  return [`${capital(line.slice(0, colon))}.`, capital(line.slice(colon + 2))];
}
function sentence(run) {
  if (run.verdict && run.verdict.line) return run.verdict.line;
  const share = run.figures.wait_share;
  if (known(share)) return share < 0.005 ? "Data was always ready when a step needed it." : `${percent(share)} of step time is spent waiting for data.`;
  return run.state === "running" ? "Training has started; nothing has been measured yet." : "This run has no measured steps.";
}
function states(run) {
  const f = run.figures, of = known(f.epochs_total) ? ` of ${plain(f.epochs_total)}` : "";
  return el("div", { class: "kicker" }, el("strong", null, run.label), el("span", { class: `pill ${run.state}` }, run.state),
    el("span", null, `${known(f.epochs_done) ? `${plain(f.epochs_done)}${of} epochs, ` : ""}${plain(f.step)} steps`), known(f.left_s) && el("span", null, `${duration(f.left_s)} left`),
    known(f.updated) && el("span", null, el("time", { datetime: new Date(1000 * f.updated).toISOString() }, new Date(1000 * f.updated).toLocaleString("en-GB", { dateStyle: "medium", timeStyle: "short" }))));
}
function figures(run) {
  const f = run.figures;
  const items = [
    [`${f.unit ?? "images"}/s`, plain(f.images_per_second), "", f.images_per_second], ["waiting for data", percent(f.wait_share), "of step time", f.wait_share],
    ["step time", milliseconds(f.step_ms), "", f.step_ms], [`best ${f.metric}`, f.best_text ?? "–", known(f.best_epoch) ? `epoch ${plain(f.best_epoch)}` : "", f.best],
    ["last train/loss", plain(f.last_loss), "", f.last_loss], ["last epoch", duration(f.epoch_s), "", f.epoch_s], ["elapsed", duration(f.elapsed_s), "", f.elapsed_s],
  ];
  return el("dl", { class: "figures" }, items.filter((item) => known(item[3])).map(([name, text, note]) => el("div", null, el("dt", null, name), el("dd", null, text, note && el("small", null, note)))));
}

const sections = {
  top: (doc) => {
    if (doc.runs.length === 1) {
      const run = doc.runs[0];
      const [head, rest] = headline(run);
      return [states(run), el("h1", null, head), rest && el("p", { class: "lead" }, rest), run.ending && soft(`Stopped before the end (${run.ending})`), figures(run)];
    }
    const [a, b] = doc.runs, speed = b.figures.images_per_second / a.figures.images_per_second;
    const [fast, slow, factor] = speed >= 1 ? [b, a, speed] : [a, b, 1 / speed];
    const line = !known(speed) ? `${a.label} and ${b.label}` : factor < 1.02 ? `${a.label} and ${b.label} are equally fast.` : `${fast.label} is ${digits(factor, 3)}× as fast as ${slow.label}.`;
    return [el("div", { class: "kicker" }, el("strong", null, "Two runs")), el("h1", null, line),
      el("div", { class: "pair" }, doc.runs.map((run) => card(states(run), el("p", { class: "lead" }, sentence(run)), figures(run))))];
  },

  goes: (doc) => {
    const runs = doc.runs.filter((run) => Object.values(run.parts).some((seconds) => seconds > 0));
    if (!runs.length) return null;
    const longest = Math.max(...runs.map((run) => run.figures.step_ms || 0));
    return [...heading("goes", "Where a step's time goes"), ...runs.map((run) => {
      const whole = Object.values(run.parts).reduce((sum, seconds) => sum + seconds, 0), step = run.figures.step_ms;
      const parts = Object.entries(run.parts).map(([name, seconds]) => ({ name, share: seconds / whole }));
      const bar = el("div", { class: "bar", role: "img", "aria-label": parts.map((part) => `${PART_NAMES[part.name]} ${percent(part.share)}`).join(", ") },
        parts.map((part) => el("span", { colour: colourOf(part.name), width: `${100 * part.share}%`, title: `${PART_NAMES[part.name]}: ${percent(part.share)}` })));
      if (runs.length > 1 && step) bar.style.width = `${100 * step / longest}%`;
      const besides = Object.entries(run.besides).map(([name, seconds]) => `${{ validation: "validation", saving: "saving checkpoints", epoch_starts: "waiting for the first batch of each epoch" }[name] || name} ${duration(seconds)}`);
      return card(...named(runs, run), bar, el("ul", { class: "keys" }, parts.map((part) =>
        el("li", null, el("i", { class: "swatch", colour: colourOf(part.name) }), PART_NAMES[part.name], el("b", null, percent(part.share)), el("span", { class: "soft" }, milliseconds(part.share * step))))),
      besides.length > 0 && el("p", { class: "soft small" }, `Outside the steps: ${besides.join(", ")}.`));
    })];
  },

  findings: (doc) => [...heading("findings", "What to do"), ...doc.runs.map((run) => {
    const list = run.findings.length ? el("ol", { class: "findings" }, run.findings.map((finding) => el("li", { class: "card" },
      el("div", null, el("div", { class: "what" }, capital(finding.message)), finding.fix && el("code", { class: "fix" }, finding.fix), el("span", { class: "id mono" }, finding.id)),
      finding.speedup && el("div", { class: "gain" }, `${digits(finding.speedup.expected, 3)}×`, el("small", null, `${digits(finding.speedup.low, 3)}–${digits(finding.speedup.high, 3)}`)))))
      : soft(run.verdict ? "The checks found nothing to change." : "No verdict: the checks need the step times that a run records in clock.jsonl.");
    return doc.runs.length > 1 ? el("div", null, el("p", null, el("strong", null, run.label)), list) : list;
  })],

  differences: (doc) => {
    if (!doc.differences) return null;
    const [a, b] = doc.runs, shown = { wait_share: percent, step_ms: milliseconds, epoch_s: duration };
    const figureRows = doc.differences.figures.map((figure) => {
      const format = shown[figure.name] || plain, better = known(figure.ratio) && figure.more_is_better !== null && Math.abs(figure.ratio - 1) > 0.02 ? (figure.ratio > 1) === figure.more_is_better : null;
      return { mark: better === null ? null : better ? "better" : "worse", cells: [figure.label, format(figure.a), format(figure.b), known(figure.ratio) ? `${digits(figure.ratio, 3)}×` : "–"] };
    });
    const rows = (list) => list.map((item) => [el("code", null, item.key), item.in_a === false ? "–" : value(item.a), item.in_b === false ? "–" : value(item.b)]);
    return [...heading("differences", "Differences"), card(table(["figure", a.label, b.label, "ratio"], figureRows, [1, 2, 3])),
      card(el("h3", null, "Config"), doc.differences.config.length ? table(["key", a.label, b.label], rows(doc.differences.config)) : soft("All keys are the same.")),
      doc.differences.machines.length > 0 && card(el("h3", null, "Machine and versions"), table(["", a.label, b.label], rows(doc.differences.machines)))];
  },

  timeline: (doc) => {
    const runs = doc.runs.filter((run) => has(run.timeline, "step"));
    if (!runs.length) return null;
    const names = Object.keys(PART_NAMES);
    const tallest = (run) => run.timeline.step.map((_, index) => names.reduce((sum, name) => sum + ((run.timeline[`${name}_ms`] || [])[index] || 0), 0)).sort((a, b) => a - b);
    const tops = runs.map(tallest), usual = Math.max(...tops.map((list) => list[Math.floor(0.95 * (list.length - 1))])), yMax = Math.max(...tops.map((list) => list[list.length - 1]));
    return [...heading("timeline", "Step time over the run"), el("p", { class: "soft hint" }, "Drag to zoom in, double-click to reset. All charts over steps zoom together."), ...runs.map((run) => {
      const t = run.timeline;
      return card(chart({ id: `timeline-${doc.runs.indexOf(run)}`, title: runs.length > 1 ? run.label : "Step time by part", unit: "milliseconds per step", xLabel: "step", group: "step", stacked: true, format: milliseconds, axis: plain, ...(runs.length > 1 ? { usual, yMax } : {}),
        series: names.filter((name) => has(t, `${name}_ms`)).map((name) => ({ name, label: PART_NAMES[name], colour: colourOf(name), x: t.step, y: t[`${name}_ms`] })),
        more: [{ label: "longest single step", x: t.step, y: t.longest_ms, format: milliseconds }, { label: `${run.figures.unit ?? "images"}/s`, x: t.step, y: t.images_per_second, format: plain }] }));
    })];
  },

  throughput: (doc) => {
    const unit = doc.runs[0].figures.unit ?? "images";
    const lines = curves(doc, "epochs", "epoch", [["images_per_second", `${unit}/s`]]), waits = curves(doc, "epochs", "epoch", [["wait_share", "waiting"]]);
    if (!lines.length) return null;
    return [...heading("throughput", "Throughput by epoch"), el("div", { class: "pair" },
      card(chart({ id: "throughput", title: `${unit[0].toUpperCase()}${unit.slice(1)} per second`, xLabel: "epoch", group: "epoch", fromZero: true, dots: true, series: lines })),
      waits.length > 0 && card(chart({ id: "waits", title: "Time spent waiting for data", unit: "including the first batch of each epoch", xLabel: "epoch", group: "epoch", fromZero: true, dots: true, format: percent, series: waits.map((line, index) => ({ ...line, colour: index ? "var(--c1)" : "var(--wait)" })) })))];
  },

  stages: (doc) => {
    const runs = doc.runs.filter((run) => run.stages.length);
    if (!runs.length) return null;
    const split = ["cpu", "runq", "blocked"], labels = { cpu: "running", runq: "waiting for a core", blocked: "blocked: storage, network, locks" };
    return [...heading("stages", "Worker time per image"), ...runs.map((run) => {
      const longest = Math.max(...run.stages.map((stage) => stage.wall_us)), isSplit = run.stages.some((stage) => known(stage.cpu_us));
      return card(...named(runs, run), ...run.stages.map((stage) => {
        const parts = split.filter((part) => known(stage[`${part}_us`])).map((part) => [part, stage[`${part}_us`]]), shown = parts.length ? parts : [["compute", stage.wall_us]];
        return el("div", { class: "stage" }, el("span", null, stage.name), el("div", { class: "bar thin", role: "img", "aria-label": shown.map(([part, time]) => `${labels[part] || "time"} ${microseconds(time)}`).join(", ") },
          shown.map(([part, time]) => el("span", { colour: colourOf(part), width: `${100 * time / longest}%`, title: `${labels[part] || "time"}: ${microseconds(time)}` }))), el("span", { class: "number" }, microseconds(stage.wall_us)));
      }), isSplit && el("ul", { class: "keys small" }, split.map((part) => el("li", null, el("i", { class: "swatch", colour: colourOf(part) }), labels[part]))),
      el("details", null, el("summary", null, "Show as a table"), table(["stage", "wall time", "running", "waiting for a core", "blocked", "read"], run.stages.map((stage) => [stage.name, microseconds(stage.wall_us), ...split.map((part) => microseconds(stage[`${part}_us`])), bytes(stage.read_bytes)]), [1, 2, 3, 4, 5])),
      run.slowest.length > 0 && el("details", null, el("summary", null, "Slowest samples"), table(["sample", "time", "typical"], run.slowest.map((sample) => [el("code", null, sample.name), milliseconds(sample.ms), milliseconds(sample.typical_ms)]), [1, 2])));
    })];
  },

  preview: (doc) => perRun(doc, "preview", "What the network gets", (run) => {
    const source = pictures[doc.runs.indexOf(run)]?.preview;
    return source && el("img", { class: "sheet", src: source, alt: "Training samples of the first steps and validation samples, each with its class" });
  }),

  learning: (doc) => {
    const charts = [
      { id: "loss", title: "Training loss", xLabel: "step", group: "step", series: curves(doc, "steps", "step", [["train/loss", "train/loss"]]) },
      { id: "losses", title: "Loss by epoch", xLabel: "epoch", group: "epoch", dots: true, series: curves(doc, "epochs", "epoch", [["train/loss", "train/loss"], ["val/loss", "val/loss"]]) },
      { id: "accuracy", title: "Accuracy by epoch", unit: "percent", xLabel: "epoch", group: "epoch", dots: true, series: curves(doc, "epochs", "epoch", [["val/acc1", "val/acc1"], ["val/acc5", "val/acc5"], ["train/acc1", "train/acc1"], ["train/acc5", "train/acc5"]]) },
      { id: "overlap", title: "Overlap by epoch", unit: "percent", xLabel: "epoch", group: "epoch", dots: true, series: curves(doc, "epochs", "epoch", [["val/dice", "val/dice"], ["val/iou", "val/iou"], ["val/surface_dice", "val/surface_dice"]]) },
      { id: "lr", title: "Learning rate", xLabel: "step", group: "step", fromZero: true, series: curves(doc, "steps", "step", [["train/lr", "train/lr"]]) },
    ].filter((options) => options.series.length);
    return charts.length ? [...heading("learning", "Training curves"), el("div", { class: "pair" }, charts.map((options) => card(chart(options))))] : null;
  },

  worst: (doc) => perRun(doc, "worst", "The worst validation volumes", (run) => {
    if (!run.evaluation) return null;
    const { volumes, mean, count, checkpoint } = run.evaluation, hasScore = known(mean.score), source = pictures[doc.runs.indexOf(run)]?.worst;
    const share = (amount) => known(amount) ? `${amount.toFixed(2)}\u00a0%` : "–", cells = (one) => [...(hasScore ? [known(one.score) ? one.score.toFixed(3) : "–"] : []), share(one.dice), share(one.iou), share(one.surface_dice)];
    return [el("p", null, `${plain(count)} ${count === 1 ? "volume" : "volumes"} scored whole with ${checkpoint} by stoker eval; the worst come first.`),
      table(["volume", ...(hasScore ? ["score"] : []), "Dice", "IoU", "surface Dice"], [...volumes.map((one) => [el("code", null, one.id), ...cells(one)]), ["mean of all", ...cells(mean)]], [1, 2, 3, 4]),
      source && el("img", { class: "sheet", src: source, alt: "The worst volumes: image, label, prediction and errors" })];
  }),

  memory: (doc) => {
    const used = curves(doc, "memory", "step", Object.entries(MEMORY_NAMES)), free = curves(doc, "memory", "step", [["available_bytes", "available"]]);
    const options = { xLabel: "step", group: "step", fromZero: true, dots: true, format: bytes };
    return used.length || free.length ? [...heading("memory", "Memory"), el("div", { class: "pair" }, used.length > 0 && card(chart({ ...options, id: "memory", title: "In use", series: used })),
      free.length > 0 && card(chart({ ...options, id: "free", title: "Available on the host", series: free })))] : null;
  },

  needs: (doc) => perRun(doc, "needs", "What the accelerator needs, and what is available", (run) => run.needs.length && table(["", "needed", "available", "covered", "source"], run.needs.map((need) => {
    const format = (amount) => need.unit.startsWith("bytes") ? `${bytes(amount)}/s` : `${plain(amount)} ${need.unit}`;
    return { mark: null, cells: [need.what, format(need.wants), format(need.has), need.wants > 0 ? percent(need.has / need.wants) : "–", need.how] };
  }), [1, 2, 3])),

  predictions: (doc) => perRun(doc, "predictions", "Predicted and measured speed-ups", (run) => run.predictions.length && table(["change", "predicted", "measured", "error"],
    run.predictions.map((item) => [item.label, known(item.expected) ? `${digits(item.expected, 3)}×${known(item.low) && known(item.high) ? ` (${digits(item.low, 3)}–${digits(item.high, 3)})` : ""}` : "–",
      known(item.measured) ? `${digits(item.measured, 3)}×` : "not tried", known(item.error) ? `${item.error > 0 ? "+" : ""}${digits(100 * item.error, 2)}\u00a0%` : "–"]), [1, 2, 3])),

  quarantine: (doc) => perRun(doc, "quarantine", "Samples that could not be read", (run) => run.quarantine.count > 0 && [
    el("p", null, `${plain(run.quarantine.count)} ${run.quarantine.count === 1 ? "sample was" : "samples were"} replaced by others${run.quarantine.count > run.quarantine.samples.length ? `; the first ${run.quarantine.samples.length} are listed here` : ""}.`),
    table(["sample", "reason"], run.quarantine.samples.map((sample) => [el("code", null, sample.name), sample.reason]))]),

  events: (doc) => perRun(doc, "events", "Events", (run) => run.events.length && table(["step", "event", ""], run.events.map((event) => [known(event.step) ? plain(event.step) : "", event.event, event.details]))),

  config: (doc) => doc.differences ? null : perRun(doc, "config", "Config: changes from the defaults", (run) => !run.config ? null : run.config.changed.length
    ? table(["key", "this run", "default"], run.config.changed.map((item) => [el("code", null, item.key), value(item.value), item.known ? value(item.default) : "not a key in this version"])) : soft(Object.keys(run.config.all).length ? "All keys have their default value." : "config.yaml could not be read.")),

  environment: (doc) => perRun(doc, "environment", "Machine and checkpoints", (run) => [
    run.environment.facts && el("div", { class: "wide" }, el("table", { class: "facts" }, el("tbody", null, Object.entries(run.environment.facts).map(([name, text]) => el("tr", null, el("th", { scope: "row" }, name), el("td", null, text)))))),
    run.checkpoints.length > 0 && el("details", { open: run.checkpoints.length < 8 }, el("summary", null, `${run.checkpoints.length} ${run.checkpoints.length === 1 ? "checkpoint" : "checkpoints"}`), table(["checkpoint", "validation", "size"], run.checkpoints.map((item) => [el("code", null, item.name), item.score_text ?? "", bytes(item.bytes)]), [1, 2])),
    run.environment.packages && el("details", null, el("summary", null, `${Object.keys(run.environment.packages).length} installed packages`), el("p", { class: "mono small" }, Object.entries(run.environment.packages).map(([name, version]) => `${name} ${version}`).join(", ")))]),

  missing: (doc) => perRun(doc, "missing", "Not in this report", (run) => run.missing.length && el("ul", null, run.missing.map((text) => el("li", null, text)))),

  foot: (doc) => [`Made by stoker ${doc.stoker} from ${doc.runs.some((run) => run.config) ? "the run's files" : "what the doctor measured"}. This page is self-contained and loads nothing.`],
};

/* Pictures are in the page itself; the document of a live page is fetched without them. */
const pictures = JSON.parse(document.getElementById("pictures").textContent);

function perRun(doc, id, title, make) {
  const made = doc.runs.map((run) => [run, make(run)]).filter(([, content]) => Array.isArray(content) ? content.some(Boolean) : content);
  return made.length ? [...heading(id, title), ...made.map(([run, content]) => card(...named(doc.runs, run), content))] : null;
}
function curves(doc, part, x, names) {
  return doc.runs.flatMap((run, at) => names.filter(([name]) => has(run[part], name)).map(([name, label]) => ({
    name: `${at}-${name}`, label: doc.runs.length > 1 ? `${label}, ${run.label}` : label, dash: at > 0,
    colour: PALETTE[(names.length > 1 ? names.findIndex((pair) => pair[0] === name) : 0) + (doc.runs.length > 1 && names.length === 1 ? at : 0)], x: run[part][x], y: run[part][name] })));
}

start();
