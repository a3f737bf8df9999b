// The text of a segment after each pass, with what the pass changed.
"use strict";

const NUMBERS = data.passes.map((pass) => pass.name);

/** The segment that is shown: the one chosen, or where the chosen module takes longest. */
function shownSegment(pass) {
  const names = Object.keys(pass.segments);
  const wanted = state.segment || bestSegment(state.module, state.half)?.name || "";
  const part = names.filter((name) => wanted && name.startsWith(wanted));
  return originOf(wanted, pass) || part[0] || names[0] || "";
}

/** What a segment was in a pass: passes cut segments in parts, whose names begin with its own. */
function originOf(name, pass) {
  const names = Object.keys(pass.segments).filter((known) => name === known || name.startsWith(`${known}_`));
  return names.sort((a, b) => b.length - a.length)[0] || "";
}

/** The pass that is shown, by its name or how that begins; the last one if none is named. */
function passAt() {
  const at = NUMBERS.findIndex((name) => state.pass && name.startsWith(state.pass));
  return at < 0 ? NUMBERS.length - 1 : at;
}

function stepPass(by) {
  const at = passAt();
  const next = NUMBERS[Math.min(NUMBERS.length - 1, Math.max(0, at + by))];
  go({ tab: "passes", pass: next });
}

function drawPasses() {
  if (!data.passes.length) return replace($("code"), el("p", { class: "empty" }, "the program holds no dumps of its passes"));
  const at = passAt();
  const pass = data.passes[at];
  const name = shownSegment(pass);
  const now = (pass.segments[name] || []).map((k) => data.lines[k]);
  const before = at ? data.passes[at - 1].segments[originOf(name, data.passes[at - 1])] : null;
  const rows = before ? paired(differences(before.map((k) => data.lines[k]), now)) : now.map((text) => [at ? "+" : " ", text]);
  const [added, removed, other] = ["+", "-", "~"].map((sign) => rows.filter((row) => row[0] === sign).length);
  const slider = el("input", {
    type: "range", min: 0, max: NUMBERS.length - 1, value: at, "aria-label": "pass", "aria-valuetext": pass.name, id: "slider",
    oninput: (event) => go({ pass: NUMBERS[Number(event.target.value)] }),
  });
  const focused = document.activeElement?.id === "slider";
  replace($("passes-bar"),
    el("button", { type: "button", title: "previous pass ([)", onclick: () => stepPass(-1) }, "◀"), slider,
    el("button", { type: "button", title: "next pass (])", onclick: () => stepPass(1) }, "▶"),
    el("span", { class: "pass" }, pass.name),
    el("span", { class: "count soft" }, at && before
      ? added + removed + other ? `${added} added, ${removed} removed, ${other} changed` : "nothing changed here" : at ? "a new segment" : "the first pass"),
    el("label", {}, "segment", el("select", { onchange: (event) => go({ segment: event.target.value }) },
      ...Object.keys(pass.segments).map((s) => el("option", { value: s, selected: s === name }, s)))));
  if (focused) $("slider").focus();
  let number = 0;
  replace($("code"), ...rows.map(([sign, text, old]) => {
    if (sign !== "-") number += 1;
    const [code, note] = split(text);
    const kind = { "+": "added", "-": "removed", "~": "changed" }[sign] || "";
    return el("div", { class: `line ${kind}`, "data-sign": sign },
      el("span", { class: "number" }, sign === "-" ? "" : String(number)),
      el("span", { class: "sign", "aria-label": kind || null }, sign === "-" ? "−" : sign.trim()),
      el("span", { class: "text" }, ...(old === undefined ? [el("span", { class: text.startsWith("    # ---") ? "head" : null }, code)]
        : inline(split(old)[0].trimEnd(), code.trimEnd(), code)), note && el("span", { class: "note" }, note)));
  }));
  const change = $("code").querySelector(".added, .removed, .changed");
  if (change && added + removed + other < rows.length) change.scrollIntoView({ block: "center" });
  return undefined;
}

/** Within a run of changes, a line that goes and one that comes for the same value are one that changes ("~"). */
function paired(rows) {
  const found = [];
  for (let k = 0; k < rows.length;) {
    let end = k;
    while (end < rows.length && rows[end][0] !== " ") end += 1;
    if (end === k) { found.push(rows[k]); k += 1; continue; }
    const gone = rows.slice(k, end).filter((row) => row[0] === "-");
    let next = 0;
    for (const [, text] of rows.slice(k, end).filter((row) => row[0] === "+")) {
      const at = gone.findIndex((row, n) => n >= next && key(row[1]) && key(row[1]) === key(text));
      if (at < 0) { found.push(["+", text]); continue; }
      found.push(...gone.slice(next, at), ["~", text, gone[at][1]]);
      next = at + 1;
    }
    found.push(...gone.slice(next));
    k = end;
  }
  return found;
}

/** What a line gives a value to, or that it returns. */
const key = (text) => (/^\s+([\w, ]+?)\s*(?::|=)|^\s+(return) /.exec(text) || []).slice(1).find(Boolean) || "";

/** The new line with what was taken out and put in, word by word. */
function inline(old, now, whole) {
  const [a, b] = [old, now].map((text) => text.split(/(?<=[\s"(),=])|(?=[\s"(),=])/));
  const made = [];
  for (const [sign, word] of differences(a, b)) {
    if (made.length && made[made.length - 1][0] === sign) made[made.length - 1][1] += word;
    else made.push([sign, word]);
  }
  const parts = made.map(([sign, text]) => (sign === " " ? text : el(sign === "-" ? "del" : "ins", {}, text)));
  return [...parts, " ".repeat(whole.length - now.length)];
}

/** A line and the reason behind it. */
function split(text) {
  const at = text.lastIndexOf("  # ");
  return at < 0 || text.startsWith("    # ---") ? [text, ""] : [text.slice(0, at), text.slice(at)];
}

/** Lines that stay (" "), go ("-") and come ("+"), from the longest common subsequence. */
function differences(before, now) {
  let start = 0;
  while (start < before.length && start < now.length && before[start] === now[start]) start += 1;
  let end = 0;
  while (end < before.length - start && end < now.length - start
         && before[before.length - 1 - end] === now[now.length - 1 - end]) end += 1;
  const a = before.slice(start, before.length - end);
  const b = now.slice(start, now.length - end);
  const wide = b.length + 1;
  const table = new Uint16Array((a.length + 1) * wide);
  for (let i = a.length - 1; i >= 0; i--)
    for (let j = b.length - 1; j >= 0; j--)
      table[i * wide + j] = a[i] === b[j] ? table[(i + 1) * wide + j + 1] + 1
        : Math.max(table[(i + 1) * wide + j], table[i * wide + j + 1]);
  const rows = before.slice(0, start).map((text) => [" ", text]);
  let [i, j] = [0, 0];
  while (i < a.length || j < b.length) {
    if (i < a.length && j < b.length && a[i] === b[j]) { rows.push([" ", a[i]]); i += 1; j += 1; }
    else if (i < a.length && (j === b.length || table[(i + 1) * wide + j] >= table[i * wide + j + 1])) { rows.push(["-", a[i]]); i += 1; }
    else { rows.push(["+", b[j]]); j += 1; }
  }
  return [...rows, ...now.slice(now.length - end).map((text) => [" ", text])];
}
