// Tables that can be sorted: collectives and parameters, of the chosen module.
"use strict";

/** A table; columns: [title, text or element of a row, number to sort by or null]. */
function sortable(place, id, columns, rows, onrow) {
  const order = sortable.orders[id] || (sortable.orders[id] = { column: -1, down: true });
  const sorted = [...rows];
  if (order.column >= 0) {
    const by = columns[order.column][2] || ((row) => String(columns[order.column][1](row)));
    sorted.sort((a, b) => {
      const [x, y] = [by(a), by(b)];
      const way = typeof x === "number" ? x - y : x < y ? -1 : x > y ? 1 : 0;
      return order.down ? -way : way;
    });
  }
  const head = columns.map(([title, , by], k) => el("th", {
    "data-key": k, class: by ? "number" : null, tabindex: 0,
    "aria-sort": order.column === k ? (order.down ? "descending" : "ascending") : null,
    onclick: () => {
      order.down = order.column === k ? !order.down : Boolean(by);
      order.column = k;
      sortable(place, id, columns, rows, onrow);
    },
    onkeydown: (event) => { if (event.key === "Enter") event.currentTarget.click(); },
  }, title, order.column === k ? (order.down ? " ▾" : " ▴") : ""));
  replace(place, el("table", {}, el("thead", {}, el("tr", {}, ...head)),
    el("tbody", {}, ...sorted.map((row) => el("tr", { class: onrow ? "link" : null, onclick: onrow && (() => onrow(row)) },
      ...columns.map(([, cell, by]) => el("td", { class: by ? "number" : null }, cell(row))))))));
}
sortable.orders = {};

const scope = (what) => el("p", { class: "soft" }, state.module
  ? el("span", {}, what, ", in ", el("b", {}, state.module), " · ",
    el("a", { href: "#", onclick: (event) => { event.preventDefault(); choose(""); } }, "show all"))
  : what);

/** What a collective does to a placement on its axis: S(1) → R. */
function changed(row) {
  const [from, to] = [row.before, row.after].map((layout) => layout.split(" ").find((word) => word.startsWith(`${row.axis}:`)) || "");
  return `${from.slice(row.axis.length + 1)} → ${to.slice(row.axis.length + 1)}`;
}

function drawCollectives() {
  const rows = data.collectives.filter((row) => inside(row.module, state.module));
  const place = el("div");
  replace($("collectives"), scope(`${rows.length} collectives, ${bytes(sum(rows, (r) => r.payload * r.runs))} of payload per step and rank, sum of all stages`), place);
  if (!rows.length) return replace(place, el("p", { class: "empty" }, "no collectives here"));
  return sortable(place, "collectives", [
    ["collective", (r) => el("b", {}, r.kind), null],
    ["placement", (r) => el("span", { class: "placed" }, el("b", {}, r.axis), ` ${changed(r)}`), null],
    ["payload/rank", (r) => bytes(r.payload), (r) => r.payload],
    ["time", (r) => seconds(r.seconds), (r) => r.seconds],
    ["calls", (r) => count(r.runs), (r) => r.runs],
    ["total time", (r) => seconds(r.seconds * r.runs), (r) => r.seconds * r.runs],
    ["value", (r) => el("span", {}, el("code", {}, `${r.segment}/${r.value}`), r.values > 1 ? el("span", { class: "soft" }, ` and ${r.values - 1} more`) : ""), null],
    ["module", (r) => el("span", { title: r.source }, r.module), null],
  ], rows, (row) => showOp(row.segment, segments.get(row.segment).nodes[row.node]));
}

function drawParameters() {
  const rows = data.parameters.filter((row) => inside(row.module, state.module));
  const place = el("div");
  const held = bytes(sum(rows.filter((r) => r.kind === "param"), (r) => r.rank_bytes));
  const ranks = data.timeline.owner.length > 1 ? `${held} per rank, sum of all stages` : `${held} per rank`;
  replace($("parameters"), scope(`${rows.length} kinds of parameters, buffers and inputs (${ranks})`), place);
  if (!rows.length) return replace(place, el("p", { class: "empty" }, "this module has no parameters"));
  return sortable(place, "parameters", [
    ["name", (r) => el("span", {}, r.name, r.kind === "param" ? "" : el("span", { class: "soft" }, ` ${r.kind}`)), null],
    ["count", (r) => count(r.count), (r) => r.count],
    ["type", (r) => el("code", {}, r.type), null],
    ["placement, and the next best", (r) => el("span", {}, placed(r.layout), el("div", { class: "soft" },
      ...(r.alternative ? [placed(r.alternative), r.margin > 5e-10 ? ` +${seconds(r.margin)} per step` : ", the same"] : [r.reason]))), null],
    ["per rank", (r) => bytes(r.rank_bytes), (r) => r.rank_bytes],
    ["global", (r) => bytes(r.global_bytes), (r) => r.global_bytes],
  ], rows, (row) => choose(known(row.module) ?? "", { tab: "graph" }));
}
