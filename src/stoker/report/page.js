/* What all pages share: building blocks, filling the sections, and asking a live page's server for news. */
const heading = (id, text, ...more) => [el("h2", { id: `${id}-title` }, text), ...more];
const soft = (...children) => el("p", { class: "soft" }, ...children);
const card = (...children) => el("div", { class: "card" }, ...children);
/* A key such as num_workers at the start of a sentence keeps its spelling. */
const capital = (text) => /^[a-z]+\s/.test(text) ? text[0].toUpperCase() + text.slice(1) : text;
const value = (item) => item === null || item === undefined ? "null" : Array.isArray(item) ? `[${item.map(value).join(", ")}]` : String(item);

function table(header, rows, numbers = []) {
  const kind = (index) => numbers.includes(index) ? "number" : null;
  return el("div", { class: "wide" }, el("table", null,
    el("thead", null, el("tr", null, header.map((text, index) => el("th", { scope: "col", class: kind(index) }, text)))),
    el("tbody", null, rows.map((row) => el("tr", { class: row.mark || null }, (row.cells || row).map((cell, index) => el("td", { class: kind(index) }, cell)))))));
}

function show(doc) {
  for (const [id, make] of Object.entries(sections)) {
    const node = document.getElementById(id), content = make(doc);
    node.replaceChildren(...(content || []).flat(9).filter(Boolean));
  }
  for (const [id, entry] of drawn) if (!entry.plot.isConnected) drawn.delete(id); else entry.draw();
}

let shownText = "", failures = 0;
async function ask() {
  let pause = 1000;
  try {
    const answer = await fetch("data.json", { cache: "no-store" });
    if (!answer.ok) throw new Error(`status ${answer.status}`);
    const text = await answer.text();
    failures = 0;
    document.documentElement.dataset.stale = "no";
    if (text !== shownText && !dragging) {
      const open = [...document.querySelectorAll("details")].map((details) => details.open), y = scrollY;
      shownText = text;
      show(JSON.parse(text));
      document.querySelectorAll("details").forEach((details, index) => { if (open[index] !== undefined) details.open = open[index]; });
      scrollTo(0, y);
    }
  } catch (error) {
    failures += 1;
    pause = 5000;
    document.documentElement.dataset.stale = "yes";
    document.getElementById("foot").replaceChildren("`stoker watch` has ended; this is its last update.");
  }
  if (failures < 20) setTimeout(ask, pause);
}

/* Called at the end of the script that defines the sections. */
function start() {
  show(JSON.parse(document.getElementById("data").textContent));
  if (document.documentElement.dataset.live === "true") setTimeout(ask, 1000);
  addEventListener("beforeprint", () => { for (const entry of drawn.values()) entry.draw(); });
}
