// The step in time: actions of the pipeline ranks, ops of one microbatch, and memory, on canvases.
"use strict";

const WORDS = { F: "forward", B: "backward", I: "input gradient", W: "weight gradient" };
const SIDE = 92;
const view = { from: 0, to: 1, stream: 0 };

function drawTimeline() {
  const { timeline, streams, memory } = data;
  const shown = timeline.spans.length;
  const legend = [...new Set(timeline.spans.flatMap((row) => row.filter((_, k) => k % 5 === 0)))].sort()
    .map((k) => timeline.kinds[k]);
  const part = streams[view.stream];
  const gantt = el("canvas", { id: "gantt", role: "img", "aria-label": `schedule ${timeline.name}, ${timeline.ranks} ranks` });
  const curve = el("canvas", { id: "memory", role: "img", "aria-label": "bytes that ranks hold over a step" });
  const ops = el("canvas", { id: "ops", role: "img", "aria-label": "ops of one microbatch" });
  replace($("timeline"),
    el("h2", {}, `${timeline.name} `, el("span", { class: "note" },
      `${seconds(timeline.seconds)} a step${timeline.ranks > 1 ? `, ranks wait ${percent(timeline.bubble)} of it` : ""}`)),
    el("div", { class: "legend" },
      ...legend.map((kind) => el("span", {}, el("span", { class: "swatch", style: `background:var(--${kind})` }), WORDS[kind])),
      timeline.update.some((x) => x > 0) ? el("span", {}, el("span", { class: "swatch", style: "background:var(--update)" }), "update") : "",
      el("span", {}, el("span", { class: "swatch", style: "background:var(--idle)" }), "idle"),
      timeline.owner.length > timeline.ranks ? el("span", {}, "later stages of a rank are paler") : "",
      shown < timeline.ranks ? el("span", {}, `the first ${shown} of ${timeline.ranks} ranks`) : "",
      el("span", { class: "zoom" },
        el("button", { type: "button", title: "closer (+)", onclick: () => zoom(1.25) }, "+"),
        el("button", { type: "button", title: "farther (−)", onclick: () => zoom(0.8) }, "−"),
        el("button", { type: "button", onclick: () => { Object.assign(view, { from: 0, to: 1 }); paint(); } }, "whole"))),
    el("div", { class: "plot" }, gantt),
    el("h2", {}, "memory ", el("span", { class: "note" },
      `lines: held as an action begins${timeline.ranks > 1 ? `, rank ${memory.rank} thick` : ""}; pale: the most it reaches inside the action`)),
    el("div", { class: "plot" }, curve),
    part ? el("h2", {}, "one microbatch ", el("span", { class: "note" }, "computing and one stream per mesh axis, as simulated")) : null,
    part ? el("div", { class: "legend" },
      el("select", { "aria-label": "stage and phase", onchange: (event) => { view.stream = Number(event.target.value); drawTimeline(); } },
        ...streams.map((s, k) => el("option", { value: k, selected: k === view.stream },
          `${data.timeline.owner.length > 1 ? `stage ${s.stage}, ` : ""}${s.phase}: ${seconds(s.seconds)}`))),
      el("span", { class: "soft" }, "Ctrl and scroll to zoom, drag to move")) : null,
    part ? el("div", { class: "plot" }, ops) : null,
    el("h2", {}, "stages"),
    el("table", {}, el("tr", {}, ...["stage", "rank", "layers", "forward", "backward", "in flight", "kept each"].map((name, k) =>
      el("th", { class: k === 2 ? null : "number" }, name))),
    ...memory.stages.map((row) => el("tr", {},
      ...[[row.stage, 1], [row.rank, 1], [row.layers, 0], [seconds(row.forward), 1], [seconds(row.backward), 1],
          [row.in_flight, 1], [bytes(row.saved_bytes), 1]].map(([text, number]) =>
        el("td", { class: number ? "number" : null }, String(text)))))));
  movable(gantt);
  movable(curve);
  paint();
  if (part) showOps(ops, part);
}

/** A canvas as sharp as the screen; the context in CSS pixels. */
function surface(canvas, height) {
  const wide = canvas.parentElement.clientWidth;
  const ratio = devicePixelRatio || 1;
  canvas.width = wide * ratio;
  canvas.height = height * ratio;
  canvas.style.height = `${height}px`;
  const context = canvas.getContext("2d");
  context.scale(ratio, ratio);
  context.font = `11px ${getComputedStyle(document.body).fontFamily}`;
  context.textBaseline = "middle";
  return [context, wide, height];
}

function paint() {
  if (!$("gantt")) return;
  paintGantt();
  paintMemory();
}

const across = (wide) => {
  const scale = (wide - SIDE) / (view.to - view.from);
  return (share) => SIDE + (share - view.from) * scale;
};

function paler(name, share) {
  const [r, g, b] = colour(name).match(/\w\w/g).map((hex) => parseInt(hex, 16));
  const ground = document.documentElement.dataset.theme === "dark" ? 21 : 255;
  return `rgb(${[r, g, b].map((c) => Math.round(c + (ground - c) * share)).join(",")})`;
}

function paintGantt() {
  const { timeline } = data;
  const rows = timeline.spans.length;
  const high = rows > 24 ? 12 : rows > 8 ? 18 : 26;
  const [context, wide, height] = surface($("gantt"), rows * (high + 3) + 24);
  const x = across(wide);
  const steps = 1e6;
  timeline.spans.forEach((flat, rank) => {
    const y = rank * (high + 3);
    context.fillStyle = colour("soft");
    if (high > 12 || rank % 2 === 0) context.fillText(`rank ${rank}`, 0, y + high / 2);
    context.save();
    context.beginPath();
    context.rect(SIDE, y, wide - SIDE, high);
    context.clip();
    context.fillStyle = colour("idle");
    context.fillRect(SIDE, y, wide - SIDE, high);
    const stages = timeline.owner.map((owner, k) => [owner, k]).filter(([owner]) => owner === rank).map(([, k]) => k);
    for (let k = 0; k < flat.length; k += 5) {
      const [kind, stage, microbatch, start, length] = flat.slice(k, k + 5);
      const [left, right] = [x(start / steps), x((start + length) / steps)];
      if (right < SIDE || left > wide) continue;
      const shade = stages.length > 1 ? 0.6 * stages.indexOf(stage) / (stages.length - 1) : 0;
      context.fillStyle = paler(timeline.kinds[kind], shade);
      context.fillRect(left, y, Math.max(right - left - (right - left > 4 ? 1 : 0), 0.6), high);
      const label = String(microbatch);
      if (right - left > 8 + 7 * label.length && high > 12) {
        context.fillStyle = timeline.kinds[kind] === "F" && !shade ? "#fff" : "#000";
        context.fillText(label, (left + right) / 2 - 3.2 * label.length, y + high / 2);
      }
    }
    const update = timeline.update[rank] || 0;
    if (update && flat.length) {
      const start = flat[flat.length - 2] + flat[flat.length - 1];
      context.fillStyle = colour("update");
      context.fillRect(x(start / steps), y, Math.max(x((start + update) / steps) - x(start / steps), 1), high);
    }
    context.restore();
  });
  axis(context, x, wide, height - 20, timeline.seconds);
  $("gantt").onmousemove = (event) => {
    const rank = Math.floor(event.offsetY / (high + 3));
    const at = (view.from + (event.offsetX - SIDE) / (wide - SIDE) * (view.to - view.from)) * steps;
    tip(event, event.buttons ? "" : actionAt(rank, at));
  };
  $("gantt").onmouseleave = (event) => tip(event, "");
}

function actionAt(rank, at) {
  const { timeline } = data;
  const flat = timeline.spans[rank];
  if (!flat || at < 0) return "";
  for (let k = 0; k < flat.length; k += 5) {
    const [kind, stage, microbatch, start, length] = flat.slice(k, k + 5);
    if (start <= at && at < start + length)
      return `${WORDS[timeline.kinds[kind]]} of microbatch ${microbatch}, stage ${stage}\n` +
        `${seconds(start * timeline.unit)} to ${seconds((start + length) * timeline.unit)} (${seconds(length * timeline.unit)})`;
  }
  return `rank ${rank} waits, or updates`;
}

/** Round times below a plot. */
function axis(context, x, wide, y, whole) {
  const length = (view.to - view.from) * whole;
  const power = 10 ** (Math.floor(Math.log10(length)) - 1);
  const step = [1, 2, 5, 10, 20, 50].map((n) => n * power).find((n) => length / n <= 9);
  context.fillStyle = colour("soft");
  context.strokeStyle = colour("line");
  for (let k = Math.ceil(view.from * whole / step - 1e-9); k * step <= view.to * whole * (1 + 1e-9); k++) {
    const at = x(k * step / whole);
    context.fillRect(at, y, 1, 5);
    const label = k ? seconds(k * step) : "0";
    const half = context.measureText(label).width / 2;
    context.fillText(label, Math.min(Math.max(at - half, 0), wide - 2 * half), y + 13);
  }
}

/** Actions of a rank with what it holds: [start, end, held, peak], shares of the step and bytes. */
function levels(rank) {
  const flat = data.timeline.levels[rank];
  const rows = [];
  for (let k = 0; k < flat.length; k += 4)
    rows.push([flat[k] / 1e6, (flat[k] + flat[k + 1]) / 1e6, flat[k + 2], flat[k + 3]]);
  return rows;
}

function paintMemory() {
  const { timeline, memory } = data;
  const [context, wide, height] = surface($("memory"), 190);
  const x = across(wide);
  const curves = timeline.levels.map((_, rank) => levels(rank));
  const limit = memory.capacity <= 2.5 * memory.peak ? memory.capacity : 0;
  const step = [1, 2, 5, 10, 20, 25, 50, 100, 200, 250, 500].map((n) => n * 1024 ** Math.floor(Math.log(memory.peak) / Math.log(1024)))
    .find((n) => memory.peak / n <= 5) || memory.peak / 4;
  const most = Math.max(memory.peak, limit) * 1.1 || 1;
  const y = (n) => 4 + (height - 30) * (1 - n / most);
  for (let n = 0; n <= most; n += step) {
    context.fillStyle = colour("line");
    context.fillRect(SIDE, Math.round(y(n)), wide - SIDE, 1);
    context.fillStyle = colour("soft");
    context.fillText(bytes(n), 0, Math.max(y(n), 7));
  }
  context.save();
  context.beginPath();
  context.rect(SIDE, 0, wide - SIDE, height - 24);
  context.clip();
  const fullest = curves[memory.rank] ? memory.rank : 0;
  context.fillStyle = colour("memory");
  context.globalAlpha = 0.35;
  for (const [start, end, held, peak] of curves[fullest])
    context.fillRect(x(start), y(peak), Math.max(x(end) - x(start), 1), y(held) - y(peak));
  context.globalAlpha = 1;
  curves.forEach((curve, rank) => {
    context.beginPath();
    context.moveTo(x(0), y(curve[0][2]));
    curve.forEach(([, end, held], k) => {
      context.lineTo(x(end), y(held));
      if (k + 1 < curve.length) context.lineTo(x(end), y(curve[k + 1][2]));
    });
    context.strokeStyle = rank === fullest ? colour("accent") : colour("faint");
    context.globalAlpha = rank === fullest ? 1 : 0.6;
    context.lineWidth = rank === fullest ? 2 : 1;
    context.stroke();
    context.globalAlpha = 1;
  });
  const rule = (n, name, text) => {
    context.fillStyle = colour(name);
    for (let at = SIDE; at < wide; at += 8) context.fillRect(at, y(n), 5, 1.5);
    const label = `${text} ${bytes(n)}`;
    context.fillText(label, wide - context.measureText(label).width - 4, y(n) - 8 > 6 ? y(n) - 8 : y(n) + 10);
  };
  rule(memory.peak, "talk", `peak of rank ${memory.rank}`);
  if (limit) rule(limit, "removed-ink", "the device has");
  context.restore();
  axis(context, x, wide, height - 20, timeline.seconds);
  $("memory").onmousemove = (event) => {
    const share = view.from + (event.offsetX - SIDE) / (wide - SIDE) * (view.to - view.from);
    if (share < 0 || share > 1 || event.buttons) return tip(event, "");
    const rows = curves.slice(0, 12).map((curve, rank) => {
      const here = curve.filter(([start]) => start <= share).pop() || curve[0];
      return `rank ${rank}: ${bytes(here[2])}${share <= here[1] ? `, up to ${bytes(here[3])} inside the action` : ""}`;
    });
    return tip(event, [`at ${seconds(share * timeline.seconds)}`, ...rows].join("\n"));
  };
  $("memory").onmouseleave = (event) => tip(event, "");
}

/** Ops of one part, zoomed on their own. */
function showOps(canvas, part) {
  const own = { from: 0, to: 1 };
  const high = 24;
  const steps = 1e6;
  const rows = part.streams.map(() => []);
  for (let k = 0; k < part.spans.length; k += 4) rows[part.spans[k]].push(k);
  const paintOps = () => {
    const [context, wide] = surface(canvas, part.streams.length * (high + 4) + 4);
    const scale = (wide - SIDE) / (own.to - own.from);
    part.streams.forEach((name, row) => {
      const y = row * (high + 4);
      context.fillStyle = colour("soft");
      context.fillText(row ? `over ${name}` : name, 0, y + high / 2);
      context.fillStyle = colour("idle");
      context.fillRect(SIDE, y, wide - SIDE, high);
      context.save();
      context.beginPath();
      context.rect(SIDE, y, wide - SIDE, high);
      context.clip();
      let drawn = -1;
      for (const k of rows[row]) {
        const left = SIDE + (part.spans[k + 2] / steps - own.from) * scale;
        const right = left + Math.max(part.spans[k + 3] / steps * scale, 0.7);
        if (right < SIDE || left > wide || right - drawn < 0.35) continue;
        drawn = right;
        context.fillStyle = colour(row ? "B" : "F");
        context.fillRect(left, y, right - left - (right - left > 3 ? 0.6 : 0), high);
        const label = part.ops[part.spans[k + 1]].split(" ")[0];
        if (right - left > 14 && right - left > context.measureText(label).width + 8) {
          context.fillStyle = row ? "#000" : "#fff";
          context.fillText(label, left + 4, y + high / 2);
        }
      }
      context.restore();
    });
  };
  movable(canvas, own, paintOps);
  canvas.onmousemove = (event) => {
    const wide = canvas.clientWidth;
    const row = Math.floor(event.offsetY / (high + 4));
    const at = (own.from + (event.offsetX - SIDE) / (wide - SIDE) * (own.to - own.from)) * steps;
    const slack = (own.to - own.from) * steps / (wide - SIDE);
    const k = (rows[row] || []).find((n) => part.spans[n + 2] <= at + slack && at - slack < part.spans[n + 2] + part.spans[n + 3]);
    tip(event, k === undefined || event.buttons ? "" : `${part.ops[part.spans[k + 1]]}\n${seconds(part.spans[k + 3] * part.unit)}`);
  };
  canvas.onmouseleave = (event) => tip(event, "");
  paintOps();
}

/** Zoom by the wheel with Ctrl or Shift held (a pinch on a touchpad), move by dragging. */
function movable(canvas, window = view, again = paint) {
  canvas.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && !event.shiftKey) return; // the page scrolls
    event.preventDefault();
    const at = Math.min(1, Math.max(0, (event.offsetX - SIDE) / (canvas.clientWidth - SIDE)));
    zoomWindow(window, (event.deltaY || event.deltaX) < 0 ? 1.25 : 0.8, at);
    again();
  }, { passive: false });
  canvas.addEventListener("mousemove", (event) => {
    if (!(event.buttons & 1)) return;
    const by = -event.movementX / (canvas.clientWidth - SIDE) * (window.to - window.from);
    const moved = Math.min(Math.max(by, -window.from), 1 - window.to);
    window.from += moved;
    window.to += moved;
    again();
  });
}

function zoomWindow(window, factor, at) {
  const length = Math.min(1, (window.to - window.from) / factor);
  const centre = window.from + at * (window.to - window.from);
  window.from = Math.min(Math.max(0, centre - at * length), 1 - length);
  window.to = window.from + length;
}

/** Closer or farther, whatever is shown. */
function zoom(factor) {
  if (state.tab === "graph") return zoomGraph(factor);
  if (state.tab !== "timeline") return undefined;
  zoomWindow(view, factor, 0.5);
  return paint();
}
