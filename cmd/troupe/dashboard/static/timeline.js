// The timeline view: one lane for each rank and each calling process, drawn on a canvas from api/timeline.

import { el, seconds, plural, fetchJSON, clock } from "./common.js";

const ROW = 15, GAP = 5, AXIS = 22, MAX_ROWS = 6, PROCESS_ROWS = 18, MAX_ARROWS = 1500;
const LASTS = [["10s", "10 s"], ["30s", "30 s"], ["60s", "1 min"], ["5m", "5 min"]];
const colours = { call: "--busy", part: "--idle", run: "--good", span: "--long", upload: "--wait", download: "--wait", restart: "--bad" };

let page = null; // the view that is shown: its elements, its data and what part of it is visible

// timelinePage is the view of a role. The same element is returned as long as the same role is shown, so that it keeps its place.
export function timelinePage(snapshot, namespace, name, failure) {
  const key = JSON.stringify([namespace, name, failure]);
  if (!page || page.key !== key) page = open(key, namespace, name, failure);
  listRoles(snapshot);
  return page.root;
}

export function redrawTimeline() { if (page) paint(); }

function open(key, namespace, name, failure) {
  const p = { key, namespace, name, failure, data: null, lanes: [], arrows: [], height: 0, from: 0, to: 1, begin: 0, end: 1, lane: -1, event: null, problem: "", roles: "" };
  p.picker = el("select", { "aria-label": "Role", onchange: (e) => { location.hash = e.target.value; } });
  p.last = el("select", { "aria-label": "How far back", onchange: () => read() }, LASTS.map(([v, text]) => el("option", { value: v }, text)));
  p.canvas = el("canvas", { tabindex: 0, role: "img", "aria-label": "timeline", "aria-describedby": "timeline-said" });
  p.inner = el("div", { class: "lanes-inner" }, p.canvas);
  p.lanesBox = el("div", { class: "lanes" }, p.inner);
  p.said = el("p", { class: "soft", id: "timeline-said", role: "status" });
  p.notes = el("div");
  const act = (text, label, f) => el("button", { class: "act", "aria-label": label, onclick: f }, text);
  p.root = el("div", { class: "timeline" },
    el("h1", {}, "Timeline"),
    el("p", { class: "tools" }, p.picker, failure ? null : p.last, act("Refresh", "Read it again", () => read()), act("+", "Zoom in", () => zoom(0.5)), act("−", "Zoom out", () => zoom(2)), act("All", "Show everything", () => all())),
    p.notes, p.lanesBox, p.said, legend(),
    el("p", { class: "soft" }, "Drag or arrow keys move, wheel or + and − zoom, 0 shows everything; up and down choose a lane, n and p its next and previous block."));
  listen(p);
  page = p;
  read();
  return p;
}

function legend() {
  return el("div", { class: "legend" }, Object.entries(colours).filter(([k]) => k !== "download").map(([k, colour]) => {
    const i = el("i");
    i.style.background = `var(${colour})`;
    return el("span", {}, i, k === "upload" ? "transfer" : k);
  }), el("span", {}, "dashed: failed"), el("span", {}, "open end: running"));
}

// listRoles fills the picker when the roles have changed.
function listRoles(snapshot) {
  const p = page, link = (n, r, f) => `#/timeline/${encodeURIComponent(n)}/${encodeURIComponent(r)}${f ? "/failure" : ""}`;
  const options = snapshot.roles.map((r) => [link(r.namespace, r.name, r.state === "failed"), `${r.name} in ${r.namespace}${r.state === "failed" ? " (failure)" : ""}`]);
  const current = p.name ? link(p.namespace, p.name, p.failure) : "";
  if (p.name && !options.some(([v]) => v === current)) options.unshift([current, `${p.name} in ${p.namespace}${p.failure ? " (failure)" : ""}`]);
  if (!p.name) options.unshift(["", options.length ? "choose a role" : "no role runs"]);
  const text = JSON.stringify(options);
  if (text === p.roles) return;
  p.roles = text;
  p.picker.replaceChildren(...options.map(([v, t]) => el("option", { value: v, selected: v === current }, t)));
}

async function read() {
  const p = page;
  if (!p.name) return;
  p.said.textContent = "asking all ranks…";
  const query = new URLSearchParams({ namespace: p.namespace, role: p.name, last: p.last.value });
  if (p.failure) query.set("failure", "1");
  try {
    p.data = await fetchJSON(`api/timeline?${query}`);
    p.problem = "";
  } catch (e) {
    p.problem = e.message;
  }
  if (page !== p) return;
  arrange(p);
  all();
}

// arrange places the events of each lane in rows: what happens inside of something else is below it.
function arrange(p) {
  const d = p.data;
  p.lanes = [];
  let from = Infinity, to = -Infinity, y = 0;
  const runs = new Map(); // by call
  for (const l of d ? d.lanes : []) {
    const ends = [], blocks = [];
    for (const e of l.events) {
      const block = { e, begin: e.begin_ns / 1e6, end: e.end_ns / 1e6 };
      let row = ends.findIndex((end) => end <= block.begin);
      if (row < 0) row = Math.min(ends.length, (l.role ? MAX_ROWS : PROCESS_ROWS) - 1);
      ends[row] = Math.max(ends[row] || 0, block.end);
      block.row = row;
      blocks.push(block);
      from = Math.min(from, block.begin);
      to = Math.max(to, block.end);
      if (e.kind === "run" && e.call) runs.set(`${e.call} ${l.role} ${l.rank}`, [p.lanes.length, block]);
    }
    const rows = Math.max(1, ends.length);
    p.lanes.push({ name: l.role ? `${l.role}[${l.rank}]` : `${l.process.program} ${l.process.pid}`, lane: l, blocks, y, height: rows * ROW + GAP });
    y += rows * ROW + GAP;
  }
  p.height = y;
  p.from = from === Infinity ? 0 : from;
  p.to = to === -Infinity ? 1 : Math.max(to, p.from + 0.001);
  p.arrows = arrows(p, runs);
  p.lane = -1;
  p.event = null;
  p.inner.style.height = `${Math.max(y + AXIS, 60)}px`;
  p.notes.replaceChildren(...notes(p));
  say(d ? `${plural(p.lanes.reduce((n, l) => n + l.blocks.length, 0), "event")} of ${plural(p.lanes.length, "lane")}, taken ${clock(d.taken)}` : "");
}

// arrows go from the block of a call, or of its part, to the runs that it caused.
function arrows(p, runs) {
  const out = [];
  p.lanes.forEach((l, i) => {
    const parts = new Set(l.blocks.filter((b) => b.e.kind === "part").map((b) => b.e.call));
    for (const b of l.blocks) {
      if (!b.e.call || (b.e.kind !== "part" && b.e.kind !== "call") || (b.e.kind === "call" && parts.has(b.e.call))) continue;
      const ranks = b.e.to_rank >= 0 ? [b.e.to_rank] : p.lanes.filter((x) => x.lane.role === b.e.to).map((x) => x.lane.rank);
      for (const rank of ranks) {
        const run = runs.get(`${b.e.call} ${b.e.to} ${rank}`);
        if (run) out.push([i, b, ...run]);
      }
    }
  });
  return out;
}

function notes(p) {
  const d = p.data, out = [];
  const note = (text, bad) => out.push(el("p", { class: bad ? "note bad" : "note" }, text));
  if (p.problem) note(p.problem, true);
  if (!d) return out;
  if (d.failure) note(`Failure: ${d.failure}`, true);
  for (const l of d.late.slice(0, 5)) note(lateText(l), true);
  for (const s of d.silent.slice(0, 5)) note(`${s.role}[${s.rank}] did not answer: ${s.error}`, true);
  if (!d.late.length && !d.silent.length && p.lanes.length) out.push(el("p", { class: "good" }, "No rank held the others up."));
  if (d.omitted_lanes) note(`${plural(d.omitted_lanes, "lane")} not shown`);
  if (d.omitted_events) note(`${plural(d.omitted_events, "older event")} not shown; ask for less, or use troupe timeline -o`);
  return out;
}

// lateText says how a rank held the others up, as `troupe timeline` does.
export function lateText(l) {
  const what = `${l.kind} ${l.name}`, by = seconds(l.late_s), before = l.before ? `; meanwhile: ${l.before}` : "";
  const how = l.how === "took longer" ? `in ${what}: ${by} more than the median of ${l.ranks} ranks`
    : l.how === "has not begun" ? `${what}, in which ${l.ranks} ranks have been for ${by}` : `${what}: ${by} after the median of ${l.ranks} ranks`;
  return `${l.role}[${l.rank}] ${l.how} ${how}${before}`;
}

function say(text) { page.said.textContent = text; page.canvas.setAttribute("aria-label", text || "timeline"); }

// What is visible: begin to end, in milliseconds.
function show(begin, end) {
  const p = page, span = Math.min(Math.max(end - begin, 0.002), (p.to - p.from) * 1.1);
  const left = p.from - (p.to - p.from) * 0.05, right = p.to + (p.to - p.from) * 0.05;
  p.begin = Math.min(Math.max(begin, left), right - span);
  p.end = p.begin + span;
  schedule();
}
function all() { const p = page; show(p.from - (p.to - p.from) * 0.02, p.to + (p.to - p.from) * 0.02); }
function zoom(factor, at) {
  const p = page, middle = at === undefined ? (p.begin + p.end) / 2 : at;
  show(middle - (middle - p.begin) * factor, middle + (p.end - middle) * factor);
}
function pan(share) { const p = page, d = (p.end - p.begin) * share; show(p.begin + d, p.end + d); }

let scheduled = false;
function schedule() {
  if (scheduled) return;
  scheduled = true;
  requestAnimationFrame(() => { scheduled = false; paint(); });
}

const labels = () => Math.min(150, Math.max(70, page.lanesBox.clientWidth * 0.2));
const width = () => Math.max(50, page.lanesBox.clientWidth - labels());
const xOf = (ms) => labels() + ((ms - page.begin) / (page.end - page.begin)) * width();
const timeAt = (x) => page.begin + ((x - labels()) / width()) * (page.end - page.begin);

function paint() {
  const p = page;
  if (!p || !p.canvas.isConnected) return;
  const w = p.lanesBox.clientWidth, h = Math.min(p.lanesBox.clientHeight || 300, Math.max(p.height + AXIS, 60)), scale = window.devicePixelRatio || 1;
  p.canvas.width = w * scale;
  p.canvas.height = h * scale;
  p.canvas.style.height = `${h}px`;
  const g = p.canvas.getContext("2d"), style = getComputedStyle(document.documentElement), colour = (name) => style.getPropertyValue(name);
  g.scale(scale, scale);
  g.font = "11px system-ui, sans-serif";
  g.textBaseline = "middle";
  const top = AXIS - p.lanesBox.scrollTop, left = labels();
  const seen = p.lanes.filter((l) => top + l.y + l.height > AXIS && top + l.y < h);
  g.save();
  g.beginPath();
  g.rect(left, AXIS, w - left, h - AXIS);
  g.clip();
  for (const l of seen) {
    let drawnTo = []; // by row: blocks narrower than a pixel are drawn once
    for (const b of l.blocks) {
      if (b.end < p.begin || b.begin > p.end) continue;
      const x = xOf(b.begin), wide = Math.max(1, xOf(b.end) - x), y = top + l.y + b.row * ROW;
      if (wide <= 1 && drawnTo[b.row] === Math.round(x)) continue;
      drawnTo[b.row] = Math.round(x);
      block(g, b, x, y, wide, colour);
    }
  }
  drawArrows(g, top, h, colour);
  g.restore();
  g.fillStyle = colour("--text");
  for (const l of seen) {
    const y = top + l.y + (l.height - GAP) / 2;
    if (y < AXIS) continue;
    g.fillStyle = colour(p.lanes[p.lane] === l ? "--link" : "--text");
    g.fillText(l.name, 4, y, left - 8);
    g.strokeStyle = colour("--line");
    g.strokeRect(0, top + l.y + l.height - GAP / 2, w, 0.01);
  }
  axis(g, w, left, colour);
  p.canvas.dataset.drawn = String(Number(p.canvas.dataset.drawn || 0) + 1);
  p.canvas.dataset.view = `${p.begin} ${p.end}`;
}

function block(g, b, x, y, wide, colour) {
  const left = Math.max(x, labels()), right = Math.min(x + wide, labels() + width());
  g.fillStyle = colour(colours[b.e.kind] || "--idle");
  g.fillRect(x, y, wide, ROW - 2);
  if (b.e.open) { // it goes on
    g.fillRect(x + wide, y + 3, 6, ROW - 8);
  }
  if (b.e.failed) {
    g.strokeStyle = colour("--bad");
    g.lineWidth = 2;
    g.setLineDash([4, 2]);
    g.strokeRect(x + 1, y + 1, Math.max(0, wide - 2), ROW - 4);
    g.setLineDash([]);
  }
  if (b === page.event) {
    g.strokeStyle = colour("--text");
    g.lineWidth = 2;
    g.strokeRect(x, y, wide, ROW - 2);
  }
  if (right - left > 24) {
    g.fillStyle = colour(b.e.kind === "part" ? "--text" : "--bg");
    g.save();
    g.beginPath();
    g.rect(left, y, right - left - 2, ROW);
    g.clip();
    g.fillText(`${b.e.name}${b.e.kind === "part" ? ` [${b.e.to_rank}]` : ""}${b.e.open ? " …" : ""}`, left + 3, y + ROW / 2 - 0.5);
    g.restore();
  }
}

function drawArrows(g, top, h, colour) {
  const p = page;
  g.strokeStyle = g.fillStyle = colour("--soft");
  g.lineWidth = 1;
  g.globalAlpha = 0.7;
  let n = 0;
  for (const [i, from, j, to] of p.arrows) {
    if (to.begin < p.begin || from.begin > p.end) continue;
    const y1 = top + p.lanes[i].y + from.row * ROW + ROW / 2, y2 = top + p.lanes[j].y + to.row * ROW + ROW / 2;
    if (Math.max(y1, y2) < AXIS || Math.min(y1, y2) > h || ++n > MAX_ARROWS) continue;
    const x1 = xOf(from.begin), x2 = xOf(to.begin);
    g.beginPath();
    g.moveTo(x1, y1);
    g.bezierCurveTo(x1 + 12, y1, x2 - 12, y2, x2, y2);
    g.stroke();
    g.beginPath();
    g.moveTo(x2, y2);
    g.lineTo(x2 - 5, y2 - 3);
    g.lineTo(x2 - 5, y2 + 3);
    g.fill();
  }
  g.globalAlpha = 1;
  p.canvas.dataset.arrows = String(n);
}

// axis draws the time since the first event.
function axis(g, w, left, colour) {
  const p = page, span = p.end - p.begin;
  let step = 10 ** Math.floor(Math.log10(span / 4));
  for (const m of [5, 2]) if (span / (step * m) >= 3) { step *= m; break; }
  g.fillStyle = colour("--bg");
  g.fillRect(0, 0, w, AXIS);
  g.fillStyle = colour("--soft");
  g.strokeStyle = colour("--line");
  g.lineWidth = 1;
  for (let t = Math.ceil((p.begin - p.from) / step) * step; t <= p.end - p.from; t += step) {
    const x = xOf(p.from + t);
    if (x < left) continue;
    g.fillText(time(t, step), x + 3, AXIS / 2);
    g.strokeRect(x, 4, 0.01, AXIS - 8);
  }
}
function time(ms, step) {
  if (step >= 1000) return `${(ms / 1000).toFixed(0)} s`;
  if (step >= 100) return `${(ms / 1000).toFixed(1)} s`;
  if (step >= 1) return `${ms.toFixed(0)} ms`;
  return `${ms.toFixed(3)} ms`;
}

function describe(l, b) {
  const e = b.e;
  const parts = [`${l.name} on ${l.lane.process.host}: ${e.kind} ${e.name}${e.to ? ` to ${e.to}${e.to_rank >= 0 ? `[${e.to_rank}]` : ""}` : ""}`,
    `begins at ${time(b.begin - page.from, 0.1)}`, e.open ? `has been running for ${exact(b.end - b.begin)}` : `takes ${exact(b.end - b.begin)}`];
  if (e.queued_ns) parts.push(`waited ${exact(e.queued_ns / 1e6)} before`);
  if (e.bytes) parts.push(`${e.bytes} bytes`);
  if (e.failed) parts.push("failed");
  return `${parts.join(", ")} (clock ± ${(l.lane.process.uncertainty_s * 1e3).toFixed(3)} ms)`;
}
function exact(ms) { return ms < 10 ? `${ms.toFixed(3)} ms` : seconds(ms / 1000); }

// at finds the lane and the block at a place of the canvas.
function at(x, y) {
  const p = page, ms = timeAt(x), line = y - AXIS + p.lanesBox.scrollTop;
  if (y < AXIS || x < labels()) return [-1, null];
  const i = p.lanes.findIndex((l) => line >= l.y && line < l.y + l.height);
  if (i < 0) return [-1, null];
  const slack = ((p.end - p.begin) / width()) * 2, row = Math.floor((line - p.lanes[i].y) / ROW);
  return [i, p.lanes[i].blocks.findLast((b) => b.row === row && b.begin - slack <= ms && b.end + slack >= ms) || null];
}

function choose(i, b) {
  page.lane = i;
  page.event = b;
  if (i >= 0) say(b ? describe(page.lanes[i], b) : page.lanes[i].name);
  schedule();
}

// step chooses the next or previous block of the lane, and brings it into view.
function step(d) {
  const p = page;
  if (p.lane < 0) p.lane = 0;
  const l = p.lanes[p.lane];
  if (!l || !l.blocks.length) return;
  const i = p.event ? l.blocks.indexOf(p.event) + d : d > 0 ? 0 : l.blocks.length - 1;
  const b = l.blocks[Math.min(Math.max(i, 0), l.blocks.length - 1)];
  choose(p.lane, b);
  if (b.end < p.begin || b.begin > p.end) { const half = (p.end - p.begin) / 2; show(b.begin - half, b.begin + half); }
}

function listen(p) {
  const c = p.canvas;
  const keys = {
    ArrowLeft: () => pan(-0.2), ArrowRight: () => pan(0.2), "+": () => zoom(0.5), "=": () => zoom(0.5), "-": () => zoom(2), "0": all, Home: all,
    ArrowUp: () => lane(-1), ArrowDown: () => lane(1), n: () => step(1), p: () => step(-1),
  };
  const lane = (d) => {
    const i = Math.min(Math.max(p.lane + d, 0), p.lanes.length - 1), l = p.lanes[i];
    if (!l) return;
    choose(i, null);
    if (l.y < p.lanesBox.scrollTop) p.lanesBox.scrollTop = l.y;
    const room = p.lanesBox.clientHeight - AXIS;
    if (l.y + l.height > p.lanesBox.scrollTop + room) p.lanesBox.scrollTop = l.y + l.height - room;
  };
  c.addEventListener("keydown", (e) => {
    if (!keys[e.key] || e.ctrlKey || e.metaKey || e.altKey) return;
    e.preventDefault();
    keys[e.key]();
  });
  c.addEventListener("wheel", (e) => {
    if (e.shiftKey) return; // scrolls the lanes
    e.preventDefault();
    zoom(e.deltaY > 0 ? 1.25 : 0.8, timeAt(e.offsetX));
  }, { passive: false });
  const pointers = new Map(); // by id: the place; two of them pinch
  c.addEventListener("pointerdown", (e) => { pointers.set(e.pointerId, e.offsetX); c.setPointerCapture(e.pointerId); });
  for (const end of ["pointerup", "pointercancel"]) c.addEventListener(end, (e) => pointers.delete(e.pointerId));
  c.addEventListener("pointermove", (e) => {
    const before = pointers.get(e.pointerId);
    if (before === undefined) {
      const [i, b] = at(e.offsetX, e.offsetY);
      if (b !== p.event || i !== p.lane) choose(i, b);
      return;
    }
    const other = [...pointers].find(([id]) => id !== e.pointerId);
    pointers.set(e.pointerId, e.offsetX);
    if (other) {
      const was = Math.abs(before - other[1]), is = Math.abs(e.offsetX - other[1]);
      if (was > 5 && is > 5) zoom(was / is, timeAt((e.offsetX + other[1]) / 2));
    } else pan((before - e.offsetX) / width());
  });
  c.addEventListener("click", (e) => { const [i, b] = at(e.offsetX, e.offsetY); choose(i, b); });
  p.lanesBox.addEventListener("scroll", schedule);
}
