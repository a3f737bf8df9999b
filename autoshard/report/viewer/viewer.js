// The report page: state in the address, one function that draws what the address says. Text from the program is
// only ever set as text, never as markup.
"use strict";

const data = JSON.parse(document.getElementById("data").textContent);
const TABS = ["overview", "graph", "passes", "timeline", "collectives", "parameters"];
const $ = (id) => document.getElementById(id);

// -- elements and numbers ---------------------------------------------------------------------------------------

/** An element: attributes (on...: listeners, class, text) and children (strings become text). */
function el(tag, attributes = {}, ...children) {
  const made = tag.startsWith("svg:")
    ? document.createElementNS("http://www.w3.org/2000/svg", tag.slice(4))
    : document.createElement(tag);
  for (const [key, value] of Object.entries(attributes)) {
    if (value === undefined || value === null) continue;
    if (key.startsWith("aria-")) made.setAttribute(key, String(value));
    else if (value === false) continue;
    else if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else if (key === "text") made.textContent = value;
    else if (key === "style") made.style.cssText = value;
    else made.setAttribute(key, value === true ? "" : value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined && child !== ""));
  return made;
}

const replace = (place, ...children) => place.replaceChildren(...children.filter((child) => child));

function scaled(value, steps) {
  for (const [size, unit] of steps) {
    if (value >= size) {
      const n = value / size;
      return `${n.toFixed(n >= 100 ? 0 : n >= 10 ? 1 : 2)} ${unit}`;
    }
  }
  return "0";
}

const bytes = (n) => (n < 1024 ? `${Math.round(n)} B`
  : scaled(n, [[2 ** 50, "PiB"], [2 ** 40, "TiB"], [2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"]]));
const seconds = (s) => (s < 1e-9 ? "0" : scaled(s, [[1, "s"], [1e-3, "ms"], [1e-6, "µs"], [1e-9, "ns"]]));
const count = (n) => Math.round(n).toLocaleString("en-US");
const percent = (share) => `${(100 * share).toFixed(1)} %`;
const sum = (list, of = (x) => x) => list.reduce((total, item) => total + of(item), 0);
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

/** A layout such as "dp:S(0) tp:R" with its axes set apart. */
function placed(layout) {
  const words = layout.match(/used as|ZeRO-\d|[^\s,(]+(?:\([^)]*\))?/g) || [];
  const made = el("span", { class: "placed" });
  words.forEach((word, k) => {
    const [axis, ...rest] = word.split(":");
    if (k) made.append(" ");
    if (rest.length) made.append(el("b", {}, `${axis} `), rest.join(":"));
    else made.append(el("span", { class: "soft" }, word));
  });
  return made;
}

// -- the document, looked up ------------------------------------------------------------------------------------

const modules = new Map(data.modules.map((row) => [row.path, row]));
const children = new Map();
for (const row of data.modules) {
  if (!row.path) continue;
  const parent = row.path.split(".").slice(0, -1).join(".");
  if (!children.has(parent)) children.set(parent, []);
  children.get(parent).push(row.path);
}
const segments = new Map(data.segments.map((segment) => [segment.name, segment]));
const total = modules.get("");
const inside = (path, module) => !module || path === module || path.startsWith(`${module}.`);
const time = (row) => row.compute + row.comm;

/** The path in the tree that a module of one layer stands for: model.layers.7.mlp is model.layers.*.mlp. */
function known(path) {
  if (modules.has(path)) return path;
  const words = path.split(".");
  for (const row of data.modules) {
    const own = row.path.split(".");
    if (own.length === words.length && own.every((word, k) => word === words[k] || (word === "*" && /^\d+$/.test(words[k]))))
      return row.path;
  }
  return null;
}

/** Labels of all layers: model.layers.0, ... */
const labels = [...new Set(data.segments.flatMap((segment) => segment.layers))];

/** The last word of a path for reading; of repeated layers, their numbers: 0 – 95. */
function last(path) {
  const word = path.split(".").pop() || data.title;
  if (word !== "*") return word;
  const head = path.slice(0, -1);
  const numbers = labels.filter((label) => label.startsWith(head)).map((label) => Number(label.slice(head.length)))
    .filter(Number.isInteger);
  return numbers.length ? `${Math.min(...numbers)} – ${Math.max(...numbers)}` : word;
}

// -- state, which is the address --------------------------------------------------------------------------------

const first = { tab: "overview", module: "", half: "forward", segment: "", op: "", pass: "", all: "", views: "", weights: "" };
let state = { ...first };

function read() {
  const found = Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
  const next = { ...first, ...found };
  if (!TABS.includes(next.tab)) next.tab = first.tab;
  next.module = known(next.module) ?? "";
  if (next.half !== "backward") next.half = "forward";
  return next;
}

/** Change the address, and with it the page. */
function go(change) {
  const next = { ...state, ...change };
  const words = Object.entries(next).filter(([key, value]) => value && value !== first[key]);
  const hash = new URLSearchParams(words).toString();
  if (`#${hash}` === location.hash || (!hash && !location.hash)) draw();
  else location.hash = hash;
}

/** Choose a module; what was chosen inside another one is forgotten. */
const choose = (path, change = {}) => go({ module: path, op: "", segment: "", ...change });

function draw() {
  const before = state;
  state = read();
  drawTree(before);
  drawTabs();
  for (const tab of TABS) $(tab).hidden = tab !== state.tab;
  ({ overview: drawOverview, graph: drawGraph, passes: drawPasses, timeline: drawTimeline,
     collectives: drawCollectives, parameters: drawParameters })[state.tab](before);
}

// -- head -------------------------------------------------------------------------------------------------------

function drawHead() {
  document.documentElement.dataset.theme = theme();
  $("title").textContent = data.title;
  replace($("mesh"), ...data.axes.map((axis) =>
    el("span", { class: "chip", title: axis.meaning }, el("b", {}, axis.name), ` ${axis.size}`)));
  const { step, memory } = data;
  const share = memory.peak / memory.capacity;
  const figures = [
    ["step", seconds(step.seconds), "predicted"],
    [`${step.items}/s`, count(step.items_per_second), ""],
    ["model FLOP utilisation", percent(step.mfu), ""],
    ["peak memory per rank", bytes(memory.peak), `of ${bytes(memory.capacity)}, ${percent(share)}`],
    ["ranks", count(data.ranks), `${data.device}, cost model of ${data.cluster}`],
    ["microbatches", count(data.microbatches), ""],
  ];
  replace($("figures"), ...figures.map(([name, value, note]) => el("div", { class: "figure" },
    el("div", { class: "name" }, name),
    el("div", { class: "value" }, value, note && el("span", { class: "note" }, note)))));
}

function theme() {
  const kept = sessionStorageOr("theme");
  return kept || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
}

/** Storage is denied to pages from a file in some browsers: then the choice lasts as long as the page. */
function sessionStorageOr(key, value) {
  try {
    if (value !== undefined) sessionStorage.setItem(key, value);
    return sessionStorage.getItem(key);
  } catch {
    return value;
  }
}

function switchTheme() {
  const next = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
  sessionStorageOr("theme", next);
  document.documentElement.dataset.theme = next;
  draw();
}

// -- tree -------------------------------------------------------------------------------------------------------

const open = new Set(data.modules.filter((row) => row.path.split(".").length <= 3).map((row) => row.path));

function visible() {
  const found = [];
  const walk = (path, depth) => {
    found.push([path, depth]);
    if (open.has(path)) for (const child of children.get(path) || []) walk(child, depth + 1);
  };
  walk("", 0);
  return found;
}

function drawTree(before) {
  if (before.module !== state.module || !$("tree").children.length) {
    const words = state.module.split(".");
    for (let k = 0; k < words.length; k++) open.add(words.slice(0, k).join("."));
  }
  const most = Math.max(...data.modules.filter((row) => row.path).map(time), 0) || 1;
  replace($("tree"), ...visible().map(([path, depth]) => {
    const row = modules.get(path);
    const inner = (children.get(path) || []).length > 0;
    const wide = path ? time(row) / most : 1;
    const chosen = path === state.module;
    return el("div", {
      class: "row", role: "treeitem", "aria-level": depth + 1, "aria-selected": chosen, "data-path": path,
      "aria-expanded": inner ? open.has(path) : null, style: `padding-left:${6 + 12 * depth}px`,
      title: `${path || "the model"}, all layers and stages\ncompute ${seconds(row.compute)}, communication ${seconds(row.comm)}`,
      onclick: () => choose(path, state.tab === "overview" ? { tab: "graph" } : {}),
    },
    el("span", { class: "fold", onclick: (event) => { event.stopPropagation(); fold(path); } },
      inner ? (open.has(path) ? "▼" : "▶") : ""),
    el("span", { class: "name" }, last(path), row.layers > 1 && path.endsWith("*") ? el("span", { class: "times" }, `× ${row.layers}`) : ""),
    el("span", { class: "heat" },
      el("i", { style: `width:${100 * wide * row.compute / (time(row) || 1)}%;background:rgba(${colour("heat")},${0.35 + 0.65 * wide})` }),
      el("i", { style: `width:${100 * wide * row.comm / (time(row) || 1)}%;background:${colour("B")}` })),
    el("span", { class: "cost" }, time(row) ? seconds(time(row)) : "–"));
  }));
  if (before.module !== state.module)
    $("tree").querySelector('[aria-selected="true"]')?.scrollIntoView({ block: "nearest" });
}

function fold(path) {
  if (open.has(path)) open.delete(path); else open.add(path);
  drawTree(state);
}

function moveInTree(by) {
  const rows = visible().map(([path]) => path);
  const at = rows.indexOf(state.module);
  const next = rows[Math.min(rows.length - 1, Math.max(0, at + by))];
  if (next !== undefined && next !== state.module) choose(next);
}

// -- tabs -------------------------------------------------------------------------------------------------------

function drawTabs() {
  replace($("tabs"), ...TABS.map((tab, k) => el("button", {
    type: "button", role: "tab", "aria-selected": tab === state.tab, "aria-controls": tab, title: `key ${k + 1}`,
    "data-tab": tab, onclick: () => go({ tab }),
  }, tab === "timeline" ? "timeline and memory" : tab)));
}

// -- search -----------------------------------------------------------------------------------------------------

const entries = [
  ...data.modules.filter((row) => row.path).map((row) => ({
    kind: "module", name: row.path, more: seconds(time(row)), open: () => choose(row.path, { tab: "graph" }),
  })),
  ...data.parameters.map((row) => ({
    kind: row.kind === "param" ? "parameter" : row.kind, name: row.name, more: row.type,
    open: () => choose(known(row.module) ?? "", { tab: "parameters" }),
  })),
  ...data.segments.flatMap((segment) => segment.nodes.map((node) => ({
    kind: node.message ? "collective" : "op", name: `${segment.name}/${node.outs[0]}`, more: node.op,
    open: () => showOp(segment.name, node),
  }))),
  ...data.passes.map((pass) => ({
    kind: "pass", name: pass.name, more: "", open: () => go({ tab: "passes", pass: pass.name }),
  })),
];
let hits = [];
let hit = 0;

/** Layers are named with *: a query with a number finds the layers that are alike. */
function search(text) {
  const words = text.toLowerCase().split(/\s+/).filter(Boolean);
  if (!words.length) return [];
  const plain = words.map((word) => word.replace(/\.\d+(?=\.|$)/g, ".*"));
  const found = [];
  for (const entry of entries) {
    const name = entry.name.toLowerCase();
    const whole = `${name} ${entry.more} ${entry.kind}`.toLowerCase();
    if (words.every((word, k) => whole.includes(word) || whole.includes(plain[k]))) {
      const at = Math.min(...words.map((word, k) => {
        const here = [name.indexOf(word), name.indexOf(plain[k])].filter((n) => n >= 0);
        return here.length ? Math.min(...here) : 500;
      }));
      const rank = { module: 0, parameter: 1, param: 1, input: 1, buffer: 2, pass: 2, collective: 3, op: 4 }[entry.kind];
      found.push([name.endsWith(plain[0]) ? 0 : 1, rank, name.length + at, entry]);
    }
  }
  return found.sort((a, b) => a[0] - b[0] || a[1] - b[1] || a[2] - b[2]).slice(0, 14).map((row) => row[3]);
}

function drawHits() {
  const box = $("found");
  box.hidden = !$("search").value.trim();
  $("search").setAttribute("aria-expanded", !box.hidden);
  replace(box, ...(hits.length ? hits.map((entry, k) => el("li", {
    role: "option", "aria-selected": k === hit, onmousedown: (event) => { event.preventDefault(); take(entry); },
  }, el("span", { class: "kind" }, entry.kind), el("span", { class: "name", title: entry.name }, entry.name),
     el("span", { class: "more" }, entry.more))) : [el("li", {}, el("span", { class: "soft" }, "nothing has that name"))]));
  box.querySelector('[aria-selected="true"]')?.scrollIntoView({ block: "nearest" });
}

function take(entry) {
  $("search").value = "";
  $("found").hidden = true;
  $("search").blur();
  entry.open();
}

function listenToSearch() {
  $("search").addEventListener("input", () => { hits = search($("search").value); hit = 0; drawHits(); });
  $("search").addEventListener("blur", () => { $("found").hidden = true; });
  $("search").addEventListener("focus", drawHits);
  $("search").addEventListener("keydown", (event) => {
    if (event.key === "ArrowDown") hit = Math.min(hits.length - 1, hit + 1);
    else if (event.key === "ArrowUp") hit = Math.max(0, hit - 1);
    else if (event.key === "Enter" && hits[hit]) return take(hits[hit]);
    else if (event.key === "Escape") { $("search").value = ""; $("search").blur(); return undefined; }
    else return undefined;
    event.preventDefault();
    drawHits();
    return undefined;
  });
}

// -- overview ---------------------------------------------------------------------------------------------------

const PARTS = { compute: "F", "exposed communication, p2p": "I", bubble: "faint", optimizer: "update", "optimizer state": "update",
                parameters: "F", gradients: "B", "saved for backward": "W", temporaries: "memory" };
const AXES = ["B", "W", "memory", "talk"];

function stack(title, parts, value, text, whole) {
  const shown = parts.filter((part) => part[value] > 0);
  let axis = 0;
  const coloured = shown.map((part) => [part, PARTS[part.name] || AXES[axis++ % AXES.length]]);
  return el("div", {},
    el("h2", {}, title),
    el("div", { class: "stack", role: "img", "aria-label": shown.map((p) => `${p.name} ${text(p[value])}`).join(", ") },
      ...coloured.map(([part, name]) =>
        el("i", { style: `width:${100 * part[value] / whole}%;background:var(--${name})`, title: `${part.name} ${text(part[value])}` }))),
    el("table", {}, ...coloured.map(([part, name]) => el("tr", {},
      el("td", {}, el("span", { class: "swatch", style: `background:var(--${name})` }), part.name),
      el("td", { class: "number" }, text(part[value])),
      el("td", { class: "number soft" }, percent(part[value] / whole))))));
}

function drawOverview() {
  const { plan, step, memory } = data;
  const recompute = plan.recompute.map((row) => `${row.policy} for ${row.calls} calls of ${row.segment}`).join(", ");
  const pipe = plan.pipeline;
  const facts = [
    ["mesh", data.mesh + (plan.mesh_reason ? ` — ${plan.mesh_reason}` : "")],
    ["batch", plan.batch ? `${count(plan.batch * data.microbatches)} sequences a step` +
      (data.microbatches > 1 ? `: ${data.microbatches} microbatches of ${plan.batch}` : "") : "none"],
    ["pipeline", pipe ? `${pipe.schedule}, ${pipe.ranks} ranks, ${pipe.chunks} stage${pipe.chunks > 1 ? "s" : ""} each` : "none"],
    ["recompute", recompute || "nothing"],
    ["optimality", plan.optimality.gap < 1e-9 ? "optimal, by the cost model of the search"
      : `gap at most ${(100 * plan.optimality.gap).toFixed(2)} %, by the cost model of the search`],
    ["search", `${count(plan.decisions)} decisions, ${count(plan.states)} states`],
  ];
  const costly = data.modules.filter((row) => row.path && !(children.get(row.path) || []).length)
    .sort((a, b) => time(b) - time(a)).slice(0, 8);
  const weighty = weightiest(8);
  replace($("overview"),
    ...plan.warnings.map((text) => el("p", { class: "warning" }, text)),
    el("div", { class: "columns" },
      stack("step time", step.parts, "seconds", seconds, sum(step.parts, (p) => p.seconds) || 1),
      stack(`peak memory of rank ${memory.rank}`, memory.parts, "bytes", bytes, memory.peak || 1),
      el("div", {}, el("h2", {}, "model-wide decisions"),
        el("table", { class: "facts" }, ...facts.map(([name, text]) => el("tr", {}, el("td", {}, name), el("td", {}, text))))),
      el("div", {}, el("h2", {}, "slowest modules"),
        el("table", {}, ...costly.map((row) => el("tr", { class: "link", onclick: () => choose(row.path, { tab: "graph" }) },
          el("td", {}, row.path, row.layers > 1 ? el("span", { class: "soft" }, ` × ${row.layers}`) : ""),
          el("td", { class: "number" }, seconds(time(row))),
          el("td", { class: "number soft" }, percent(time(row) / (time(total) || 1)))))))),
    weighty.length ? el("h2", {}, "decisions with the largest margins ",
      el("span", { class: "note" }, "what the next best choice adds to a step")) : null,
    weighty.length ? el("table", {},
      el("tr", {}, ...["op", "in", "placement", "next best", "adds"].map((name, k) => el("th", { class: k === 4 ? "number" : null }, name))),
      ...weighty.map(({ segment, node, next, more }) => el("tr", { class: "link", onclick: () => showOp(segment.name, node) },
        el("td", {}, node.op, more ? el("span", { class: "soft" }, ` and ${more} more`) : ""), el("td", {}, node.module || segment.name, segment.backward ? el("span", { class: "soft" }, " backward") : ""),
        el("td", {}, placed(node.layout)), el("td", {}, placed(next.other)),
        el("td", { class: "number" }, `+${seconds(next.micro * 1e-6)}`)))) : null);
}

/** Ops with the largest margins; ops of a module with equal margins are one row. */
function weightiest(most) {
  const found = new Map();
  for (const segment of data.segments) {
    for (const node of segment.nodes) {
      const next = margin(node.why);
      const key = `${segment.name} ${node.module} ${next.micro}`;
      if (found.has(key)) found.get(key).more += 1;
      else if (next.micro > 0) found.set(key, { segment, node, next, more: 0 });
    }
  }
  return [...found.values()].sort((a, b) => b.next.micro - a.next.micro).slice(0, most);
}

/** The next best choice that a reason names, and the microseconds that it adds. */
function margin(why) {
  const found = /next best (.+) \+(\d+) us/.exec(why);
  return found ? { other: found[1], micro: Number(found[2]) } : { other: "", micro: 0 };
}

// -- keys -------------------------------------------------------------------------------------------------------

const KEYS = [
  ["/", "search"], ["1 – 6", "tabs"], ["j k or ↓ ↑", "next and previous module"], ["h l or ← →", "close and open a module"],
  ["f b", "forward and backward in the graph"], ["[ ]", "previous and next pass"], ["+ −", "zoom"], ["t", "light or dark"],
  ["Esc", "leave"], ["?", "this list"],
];

function showKeys() {
  replace($("keys"), el("h2", {}, "keys"), el("table", {}, ...KEYS.map(([key, what]) =>
    el("tr", {}, el("td", {}, el("kbd", {}, key)), el("td", {}, what)))));
  $("keys").showModal();
}

function listenToKeys() {
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || $("keys").open) return;
    if (["INPUT", "SELECT"].includes(event.target.tagName) && event.target.type !== "range") return;
    const inTree = !event.target.closest("#code, #canvas");
    const key = event.key;
    const actions = {
      "/": () => $("search").focus(), "?": showKeys, t: switchTheme,
      j: () => moveInTree(1), k: () => moveInTree(-1),
      l: () => { if (!open.has(state.module)) fold(state.module); }, h: closeOrLeave,
      f: () => go({ half: "forward", op: "", segment: "" }), b: () => go({ half: "backward", op: "", segment: "" }),
      "[": () => stepPass(-1), "]": () => stepPass(1), "+": () => zoom(1.25), "=": () => zoom(1.25), "-": () => zoom(0.8),
      Escape: () => go({ op: "" }),
    };
    if (inTree && event.target.type !== "range")
      Object.assign(actions, { ArrowDown: actions.j, ArrowUp: actions.k, ArrowRight: actions.l, ArrowLeft: actions.h });
    const tab = TABS[Number(key) - 1];
    const action = tab ? () => go({ tab }) : actions[key];
    if (action) {
      event.preventDefault();
      action();
    }
  });
}

function closeOrLeave() {
  if (open.has(state.module) && (children.get(state.module) || []).length) fold(state.module);
  else if (state.module) choose(state.module.split(".").slice(0, -1).join("."));
}

/** What the pointer is on, beside it. */
function tip(event, text) {
  const box = $("tip");
  box.hidden = !text;
  if (!text) return;
  box.textContent = text;
  const { width, height } = box.getBoundingClientRect();
  box.style.left = `${Math.min(event.clientX + 14, innerWidth - width - 8)}px`;
  box.style.top = `${Math.min(event.clientY + 16, innerHeight - height - 8)}px`;
}

// -- start ------------------------------------------------------------------------------------------------------

/** Called once all scripts are there. */
function start() {
  drawHead();
  listenToSearch();
  listenToKeys();
  addEventListener("hashchange", draw);
  addEventListener("resize", () => { if (state.tab === "timeline") drawTimeline(); });
  $("theme").addEventListener("click", switchTheme);
  $("help").addEventListener("click", showKeys);
  draw();
  document.documentElement.dataset.ready = String(Math.round(performance.now()));
}
