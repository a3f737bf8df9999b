// The graph of the chosen module: ops, modules inside it, collectives, and where each value lies.
"use strict";

const BOX = { wide: 186, high: 58, gap: 26, layer: 38 };
const MANY = 2;
const BETWEEN = new Set(["main", "once"]);
let size = 1;

// -- what is in it ----------------------------------------------------------------------------------------------

/** Segments that have ops of a module, most time first. */
function segmentsOf(module, half) {
  const found = [];
  for (const segment of data.segments) {
    if (segment.backward !== (half === "backward") || BETWEEN.has(segment.name)) continue;
    const own = segment.nodes.filter((node) => inside(node.module, module));
    if (own.length) found.push([segment, segment.calls * sum(own, (n) => n.compute + n.comm) + 1e-12 * own.length]);
  }
  return found.sort((a, b) => b[1] - a[1]).map((row) => row[0]);
}

const bestSegment = (module, half) => segmentsOf(module, half)[0];

/** Open the graph where an op is. */
function showOp(segment, node) {
  const half = segments.get(segment)?.backward ? "backward" : "forward";
  if (BETWEEN.has(segment)) return choose(node.module, { tab: "collectives" });
  return go({ tab: "graph", module: node.module, half, segment, op: node.outs[0], all: "" });
}

/**
 * Items and edges of a module in some segments. An item: {id, kind: op | talk | module | port | param, segment,
 * node or nodes, ...}. Modules inside are one item each, unless every op is wanted; a call of a repeated layer takes
 * what the call before it gives, which is not drawn.
 */
function contents(drawn, module) {
  const every = state.all === "1";
  const views = state.views === "1";
  const weights = state.weights === "1";
  const names = new Set(drawn.map((segment) => segment.name));
  const items = [];
  const edges = new Map();
  const of = new Map(); // "segment/value" -> the item that makes it
  const stored = new Set(); // weights, and what collectives and views make of them
  const add = (item) => { items.push(Object.assign(item, { id: items.length })); return item; };
  const join = (from, to) => {
    if (from !== to) edges.set(`${from.id} ${to.id}`, { from, to });
  };
  for (const segment of drawn) {
    const place = (value) => `${segment.name}/${value}`;
    const inputs = new Map(segment.inputs.map((input) => [input.name, input]));
    const maker = new Map(segment.nodes.flatMap((node) => node.outs.map((out) => [out, node])));
    for (const input of segment.inputs) if (input.kind === "weight") stored.add(place(input.name));
    /** Items that a value comes from: of an input, what other drawn segments give, or the input itself. */
    const sources = (value) => {
      if (of.has(place(value))) return [of.get(place(value))];
      const input = inputs.get(value);
      const given = input ? input.from.filter(([name]) => name !== segment.name && names.has(name))
        .map(([name, out]) => of.get(`${name}/${out}`)).filter(Boolean) : [];
      if (given.length) return given;
      const node = maker.get(value);
      const item = add({
        kind: stored.has(place(value)) ? "param" : "port", name: value, layout: (input || node)?.layout || "",
        type: (input || node)?.type || "", from: node ? node.module : "", node, segment,
      });
      of.set(place(value), item);
      return [item];
    };
    let run = null;
    for (const node of segment.nodes) {
      const wanted = segment.name === state.segment && node.outs.includes(state.op);
      const fixed = node.refs.length && (node.kind || node.view) && node.refs.every((ref) => stored.has(place(ref)));
      if (fixed) node.outs.forEach((out) => stored.add(place(out)));
      if (!inside(node.module, module)) { run = null; continue; }
      if (fixed && !weights && !wanted) continue;
      const child = every ? "" : childOf(node.module, module);
      if (node.view && !views && !child && !wanted && node.refs.length) {
        // a view is where what it looks at is
        const seen = sources(node.refs[0])[0];
        node.outs.forEach((out) => of.set(place(out), seen));
        continue;
      }
      let item;
      if (child) {
        if (!run || run.path !== child)
          run = add({ kind: "module", path: child, nodes: [], name: child.slice(module ? module.length + 1 : 0), segment });
        item = run;
        item.nodes.push(node);
      } else {
        run = null;
        item = add({ kind: node.kind ? "talk" : "op", node, name: node.outs[0], segment });
      }
      item.layout = node.layout || item.layout || "";
      item.type = node.type || item.type || "";
      for (const ref of node.refs)
        if (weights || !stored.has(place(ref))) for (const source of sources(ref)) join(source, item);
      node.outs.forEach((out) => of.set(place(out), item));
    }
  }
  return together(items, [...edges.values()]);
}

/** Many inputs that go to one item alone (what backward reads of forward, mostly) are drawn as one. */
function together(items, edges) {
  const uses = new Map();
  for (const edge of edges) uses.set(edge.from, [...(uses.get(edge.from) || []), edge]);
  const alone = new Map();
  for (const item of items) {
    const own = uses.get(item) || [];
    if ((item.kind === "port" || item.kind === "param") && own.length === 1)
      alone.set(own[0].to, [...(alone.get(own[0].to) || []), item]);
  }
  const gone = new Set();
  const made = [];
  for (const [target, ports] of alone) {
    if (ports.length <= MANY) continue;
    ports.forEach((port) => gone.add(port));
    const item = { id: items.length + made.length, kind: "port", name: `${ports.length} values`, ports, layout: "", type: "", segment: target.segment };
    made.push(item);
    edges.push({ from: item, to: target });
  }
  return { items: [...made, ...items.filter((item) => !gone.has(item))], edges: edges.filter((edge) => !gone.has(edge.from)) };
}

/** Whether the inside of a module is drawn in place of it: it is made of several segments, and in no layer. */
const seenThrough = (path) => !path.includes("*") && (children.get(path) || []).length > 0
  && segmentsOf(path, state.half).length > 1;

/** The module inside another one that a path is drawn as, "" if as itself. */
function childOf(path, module) {
  let at = module;
  while (path !== at) {
    const words = path.slice(at ? at.length + 1 : 0).split(".");
    // the list of repeated layers is its layer
    const next = (at ? `${at}.` : "") + words.slice(0, words[1] === "*" ? 2 : 1).join(".");
    if (!seenThrough(next)) return next;
    at = next;
  }
  return "";
}

// -- drawing ----------------------------------------------------------------------------------------------------

function drawGraph(before) {
  const found = segmentsOf(state.module, state.half);
  const named = found.find((s) => s.name === state.segment);
  const drawn = named ? [named] : data.segments.filter((s) => found.includes(s));
  const segment = named || (drawn.length === 1 ? drawn[0] : null);
  drawGraphBar(found, segment);
  if (!drawn.length) {
    replace($("canvas"), el("p", { class: "empty" }, `no ops of ${state.module || "the model"} in ${state.half}`));
    return replace($("details"), aboutModule());
  }
  const graph = contents(drawn, state.module);
  if (!graph.items.length) return replace($("canvas"), el("p", { class: "empty" }, "nothing to draw"));
  const { wide, high } = arrange(graph);
  const chosen = state.op ? graph.items.find((item) => item.node && item.node.outs.includes(state.op))
    || graph.items.find((item) => item.kind === "port" && item.name === state.op)
    || graph.items.find((item) => item.nodes?.some((node) => node.outs.includes(state.op))) : null;
  const most = Math.max(...graph.items.map(itemTime), 1e-12);
  const stay = before.module === state.module && before.half === state.half && before.segment === state.segment
    && before.tab === "graph";
  if (!stay) size = Math.min(1, Math.max(0.8, ($("canvas").clientWidth - 16) / wide));
  const drawing = el("svg:svg", { width: wide * size, height: high * size, viewBox: `0 0 ${wide} ${high}`, "data-wide": wide, "data-high": high },
    ...graph.edges.map((edge) => el("svg:path", { class: `edge ${edge.from === chosen || edge.to === chosen ? "near" : ""}`, d: path(edge.way) })),
    ...graph.items.map((item) => drawItem(item, item === chosen, most)));
  const { scrollLeft, scrollTop } = $("canvas");
  replace($("canvas"), drawing);
  if (stay) $("canvas").scrollTo(scrollLeft, scrollTop);
  else if (chosen) centre(chosen);
  else $("canvas").scrollTo(Math.max(0, (wide * size - $("canvas").clientWidth) / 2), 0);
  return replace($("details"), chosen ? aboutItem(chosen) : aboutModule(segment));
}

function centre(item) {
  const box = $("canvas");
  box.scrollTo(item.x * size - box.clientWidth / 2, item.y * size - box.clientHeight / 2);
}

function zoomGraph(factor) {
  size = Math.min(2, Math.max(0.25, size * factor));
  const drawing = $("canvas").querySelector("svg");
  if (!drawing) return;
  drawing.setAttribute("width", drawing.dataset.wide * size);
  drawing.setAttribute("height", drawing.dataset.high * size);
}

function drawGraphBar(found, segment) {
  const words = state.module ? state.module.split(".") : [];
  const crumbs = [el("button", { type: "button", onclick: () => choose("") }, "all")];
  words.forEach((word, k) => {
    const path = words.slice(0, k + 1).join(".");
    const name = last(path);
    crumbs.push(" › ", k === words.length - 1 ? name : el("button", { type: "button", onclick: () => choose(path) }, name));
  });
  const half = (name) => el("button", {
    type: "button", "aria-pressed": state.half === name, title: `key ${name[0]}`,
    onclick: () => go({ half: name, op: "", segment: "" }),
  }, name);
  const box = (key, text, title) => el("label", { title }, el("input", {
    type: "checkbox", checked: state[key] === "1", id: `box-${key}`,
    onchange: (event) => go({ [key]: event.target.checked ? "1" : "" }),
  }), text);
  replace($("graph-bar"),
    el("span", { class: "path" }, ...crumbs),
    el("span", { class: "group" }, half("forward"), half("backward")),
    found.length > 1 ? el("label", {}, "segment", el("select", { onchange: (event) => go({ segment: event.target.value, op: "" }) },
      el("option", { value: "", selected: !segment }, "all"), ...found.map((s) => el("option", { value: s.name, selected: s === segment }, `${s.name} × ${s.calls}`)))) : null,
    box("all", "every op", "open the modules inside"),
    box("weights", "weights", "also parameters, and the collectives that gather them"),
    box("views", "views", "also ops that only look at their input in another way"),
    el("span", { class: "group" },
      el("button", { type: "button", title: "closer (+)", onclick: () => zoomGraph(1.25) }, "+"),
      el("button", { type: "button", title: "farther (−)", onclick: () => zoomGraph(0.8) }, "−"),
      el("button", { type: "button", title: "the whole graph", onclick: fit }, "fit")));
}

function fit() {
  const drawing = $("canvas").querySelector("svg");
  if (!drawing) return;
  size = Math.min(1, Math.max(0.25, Math.min($("canvas").clientWidth / drawing.dataset.wide, $("canvas").clientHeight / drawing.dataset.high)));
  zoomGraph(1);
}

/** Seconds of a step, all calls together. */
const itemTime = (item) => item.segment.runs * onceTime(item);
const onceTime = (item) => (item.nodes ? sum(item.nodes, (n) => n.compute + n.comm) : item.node && item.kind !== "port" ? item.node.compute + item.node.comm : 0);

function path(way) {
  const points = way.map((thing, k) => [thing.x,
    thing.y + (thing.dummy ? 0 : (k ? -BOX.high / 2 : BOX.high / 2))]);
  let d = `M${points[0][0]},${points[0][1]}`;
  for (let k = 1; k < points.length; k++) {
    const [[x0, y0], [x1, y1]] = [points[k - 1], points[k]];
    const middle = (y0 + y1) / 2;
    d += ` C${x0},${middle} ${x1},${middle} ${x1},${y1}`;
  }
  return d;
}

const short = (text, most) => (text.length > most ? `${text.slice(0, most - 1)}…` : text);

/** Whether all that is drawn is called equally often, so that nothing says how often. */
const segmentAlone = () => Boolean(state.segment) || segmentsOf(state.module, state.half).length === 1;

/** A path without its first words, if it is too long. */
function tail(path, most) {
  const words = path.split(".");
  while (words.length > 1 && words.join(".").length + 1 > most) words.shift();
  return short((words.length < path.split(".").length ? "…" : "") + words.join("."), most);
}

/** What a collective changes: tp S(1) → R. */
function moved(node) {
  const [from, to] = [node.before, node.layout].map((layout) => Object.fromEntries(layout.split(" ").map((word) => word.split(":"))));
  return `${node.axis} ${from[node.axis] ?? ""} → ${to[node.axis] ?? ""}`;
}

function drawItem(item, chosen, most) {
  const { wide, high } = { wide: item.wide, high: BOX.high };
  const left = item.x - wide / 2;
  const top = item.y - high / 2;
  const cost = onceTime(item);
  const heat = itemTime(item) / most;
  const talk = item.kind === "talk";
  const titles = {
    op: () => item.node.op.replace(/^autoshard\./, ""), talk: () => `⇄ ${item.node.kind}`, module: () => item.name,
    port: () => item.name, param: () => item.name,
  };
  const seconds_ = cost ? seconds(cost) : "";
  const inner = item.nodes?.filter((node) => node.message).length || 0;
  const second = talk ? moved(item.node) + (item.node.payload ? ` · ${bytes(item.node.payload)}` : " · free")
    : item.kind === "module" ? `${item.nodes.length} op${item.nodes.length > 1 ? "s" : ""}${inner ? ` · ⇄ ${inner}` : ""}${item.segment.calls > 1 && !segmentAlone() ? ` · × ${item.segment.calls}` : ""}`
    : item.ports ? list(item.ports.map((port) => port.name), 2)
    : item.kind === "port" && item.from ? `from ${item.from}` : item.type;
  const open = () => (item.kind === "module" ? choose(item.path) : null);
  return el("svg:g", {
    class: `item ${item.kind} ${chosen ? "chosen" : ""}`, transform: `translate(${left},${top})`, tabindex: 0, role: "button",
    "aria-label": `${titles[item.kind]()} ${item.layout}`, "data-name": item.name,
    onclick: () => go({ op: (item.node || item.nodes?.[item.nodes.length - 1])?.outs[0] || item.name }),
    ondblclick: open,
    onkeydown: (event) => { if (event.key === "Enter") { event.stopPropagation(); (open() ?? event.currentTarget.dispatchEvent(new Event("click"))); } },
  },
  item.kind === "module" ? el("svg:rect", { class: "under", x: 4, y: 4, width: wide, height: high, rx: 6 }) : null,
  el("svg:rect", { class: "box", width: wide, height: high, rx: talk ? high / 2 : 6 }),
  cost && !talk ? el("svg:rect", { class: "warm", x: 8, y: high - 4, width: Math.max(2, (wide - 16) * heat), height: 2.5, opacity: 0.35 + 0.65 * heat }) : null,
  el("svg:text", { class: "op", x: talk ? 18 : 9, y: 18 }, (item.kind === "module" ? tail : short)(titles[item.kind](), seconds_ ? 22 - seconds_.length - 2 * talk : 25)),
  el("svg:text", { class: "small", x: wide - (talk ? 16 : 9), y: 18, "text-anchor": "end" }, seconds_),
  el("svg:text", { class: "small", x: talk ? 18 : 9, y: 33 }, short(second, 30)),
  el("svg:text", { class: "where", x: talk ? 18 : 9, y: 48 }, short(item.layout.replaceAll(":", " "), talk ? 22 : 25)),
  el("svg:title", {}, [item.name, item.type, item.layout, item.node?.source].filter(Boolean).join("\n")));
}

// -- beside it --------------------------------------------------------------------------------------------------

/** A placement in words. */
function words(layout) {
  return layout.split(" ").filter(Boolean).map((word) => {
    const [axis, where] = word.split(":");
    const dim = /^S\((\d+)/.exec(where || "");
    const text = where === "R" ? "Replicate" : dim ? `Shard along dim ${dim[1]}` : "Partial, pending reduction";
    return [axis, where, text];
  });
}

const facts = (rows) => el("dl", {}, ...rows.filter(([, value]) => value !== "" && value !== undefined && value !== null)
  .flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, value)]));

function aboutItem(item) {
  const { node, segment } = item;
  if (item.kind === "module") return aboutChild(item);
  if (item.ports)
    return el("div", {}, el("h3", {}, item.name), el("p", { class: "soft" }, "not used by anything else in this graph"),
      ...item.ports.map((port) => el("p", {}, el("div", {}, port.name), el("div", { class: "soft" }, `${port.type} `, placed(port.layout)))));
  if (!node || item.kind === "port" || item.kind === "param")
    return el("div", {}, el("h3", {}, item.name), el("p", { class: "soft" }, item.from ? `comes from ${item.from}` : "an input of this segment"),
      facts([["type", item.type], ...words(item.layout).map(([axis, where, text]) => [axis, `${where} — ${text}`])]));
  const users = segment.nodes.filter((other) => other.refs.some((ref) => node.outs.includes(ref)));
  return el("div", {},
    el("h3", {}, `${node.outs[0]} = ${node.op}`),
    el("div", { class: "soft" }, node.source || "no line known"),
    facts([
      ["type", node.type],
      ...words(node.layout).map(([axis, where, text]) => [axis, `${where} — ${text}`]),
      ["before", node.kind ? placed(node.before) : ""],
      ["compute", node.compute ? seconds(node.compute) : ""],
      ["communication", node.comm ? `${seconds(node.comm)}, payload ${bytes(node.payload)} per rank` : ""],
      ["runs", `${count(segment.runs)} time${segment.runs > 1 ? "s" : ""} per step`],
      ["module", node.module || "none"],
      ["inputs", list(node.refs)],
      ["used by", list(users.map((other) => other.outs[0]))],
    ]),
    node.why ? el("div", { class: "why" }, el("b", {}, "reason "), node.why) : node.kind
      ? el("div", { class: "why" }, el("b", {}, "reason "), `a reshard: producer and consumer have different placements (${moved(node)})`) : null,
    el("div", { class: "soft" }, "all reasons:"),
    el("div", { class: "command" }, `autoshard explain DIR ${segment.name}/${node.outs[0]}`));
}

const list = (names, most = 6) => (names.length > most ? `${names.slice(0, most).join(", ")} and ${names.length - most} more` : names.join(", "));

function aboutChild(item) {
  const row = modules.get(item.path);
  return el("div", {}, el("h3", {}, item.path),
    row ? facts(moduleFacts(row)) : null,
    el("p", {}, el("a", { href: "#", onclick: (event) => { event.preventDefault(); choose(item.path); } }, "open this module")));
}

const moduleFacts = (row) => [
  ["layers", row.layers > 1 ? row.layers : ""],
  ["forward", seconds(row.forward)], ["backward", seconds(row.backward)],
  ["compute", seconds(row.compute)], ["communication", row.comm ? `${seconds(row.comm)}, payload ${bytes(row.payload)} per rank` : "none"],
  ["of the model", percent(time(row) / (time(total) || 1))],
];

function aboutModule(segment) {
  const row = modules.get(state.module);
  const held = data.parameters.filter((p) => p.kind === "param" && inside(p.module, state.module));
  const talk = data.collectives.filter((c) => inside(c.module, state.module));
  return el("div", {},
    el("h3", {}, state.module || data.title),
    el("div", { class: "soft" }, "per step, sum of all layers and stages"),
    facts([...moduleFacts(row),
      ["collectives", talk.length ? `${count(sum(talk, (c) => c.runs))} per step` : "none"],
      ["drawn", segment ? `${segment.name}, called ${segment.calls} time${segment.calls > 1 ? "s" : ""} per microbatch` : ""]]),
    held.length ? el("div", {}, el("b", {}, "parameters"), ...held.slice(0, 10).map((p) => el("p", {},
      el("div", {}, state.module ? p.name.slice(state.module.length + 1) : p.name, p.count > 1 ? el("span", { class: "soft" }, ` × ${p.count}`) : ""),
      el("div", { class: "soft" }, placed(p.layout)),
      p.alternative ? el("div", { class: "soft" }, "next best ", placed(p.alternative), p.margin > 5e-10 ? ` +${seconds(p.margin)}` : ", the same") : null)),
    held.length > 10 ? el("p", { class: "soft" }, `and ${held.length - 10} more`) : null) : null);
}
