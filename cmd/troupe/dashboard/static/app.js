// The page of a Troupe head. It draws what /api/stream sends; nothing is stored in the browser.

import { el, clock, seconds, bytes, plural, two, fetchJSON } from "./common.js";
import { timelinePage, redrawTimeline, lateText } from "./timeline.js";

const main = document.getElementById("main");
const health = document.getElementById("health");
let snapshot = null;      // the newest
let received = 0;         // when it came, by this clock
let logs = null;          // the open stream of output
const sorts = {};         // by table: {column, descending, order}, see table
const pages = {};         // by list: the page that is shown, from 0
let search = "";
const absent = new Map(); // by role, {at, list}: the ranks that have not begun what the others are in, and when the recorders were asked
let stacks = { key: "", text: "" }; // of the role or rank that is shown
let history = { key: "", points: [] }; // of the role that is shown: how many calls each rank had done at some moments, the oldest first

// A rank is idle, busy, busy for long, starting, failed or silent.
const LONG = 30;
function kind(rank) {
  if (rank.state === "failed") return "bad";
  if (rank.state === "silent" || rank.state === "stopped") return "gone";
  if (rank.state !== "ready") return "wait";
  if (rank.busy_s > LONG) return "long";
  return rank.running > 0 ? "busy" : "idle";
}
const kinds = [["idle", "idle"], ["busy", "in a call"], ["long", `in a call for over ${LONG} s`], ["wait", "starting or stopping"], ["bad", "failed"], ["gone", "silent or stopped"]];
// Ranks that need attention come first. A rank that is busy, or has been for long, keeps its place: it changes with every call.
const urgency = { bad: 1, gone: 2, wait: 3, long: 4, busy: 4, idle: 4 };

function legend() {
  return el("div", { class: "legend" }, kinds.map(([k, text]) => {
    const i = el("i");
    i.style.background = `var(--${k})`;
    return el("span", {}, i, text);
  }));
}

// lagging are the ranks that the others wait for, as the head judges their heartbeats.
const lagging = (r) => r.workers.lagging || [];

// grid draws one cell for each rank on a canvas, so that thousands cost one element. Arrow keys move a cursor.
function grid(role, open) {
  const ranks = role.workers.ranks;
  const canvas = el("canvas", { class: "grid", tabindex: 0, role: "img", "aria-label": `${plural(ranks.length, "rank")} of ${role.name}: ${summary(ranks)}` });
  const size = ranks.length > 1024 ? 6 : ranks.length > 128 ? 10 : 18;
  let columns = 1, cursor = -1;
  const draw = () => {
    const width = canvas.clientWidth || 400;
    columns = Math.max(1, Math.floor(width / (size + 2)));
    const rows = Math.max(1, Math.ceil(ranks.length / columns));
    const scale = window.devicePixelRatio || 1;
    canvas.width = width * scale;
    canvas.height = rows * (size + 2) * scale;
    canvas.style.height = `${rows * (size + 2)}px`;
    const g = canvas.getContext("2d");
    g.scale(scale, scale);
    const style = getComputedStyle(document.documentElement);
    const colours = Object.fromEntries(kinds.map(([k]) => [k, style.getPropertyValue(`--${k}`)]));
    ranks.forEach((r, i) => {
      const x = (i % columns) * (size + 2), y = Math.floor(i / columns) * (size + 2);
      g.fillStyle = colours[kind(r)];
      g.fillRect(x, y, size, size);
      if (i === cursor) {
        g.strokeStyle = style.getPropertyValue("--text");
        g.lineWidth = 2;
        g.strokeRect(x + 1, y + 1, size - 2, size - 2);
      }
    });
  };
  const say = (i) => {
    cursor = i;
    canvas.title = i >= 0 ? describe(ranks[i]) : "";
    canvas.setAttribute("aria-label", i >= 0 ? describe(ranks[i]) : `${plural(ranks.length, "rank")}`);
    draw();
  };
  canvas.addEventListener("mousemove", (e) => {
    const i = Math.floor(e.offsetY / (size + 2)) * columns + Math.floor(e.offsetX / (size + 2));
    if (i !== cursor && i < ranks.length) say(i);
  });
  canvas.onclick = () => open(cursor >= 0 ? ranks[cursor].rank : undefined);
  canvas.onkeydown = (e) => {
    const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: columns, ArrowUp: -columns }[e.key];
    if (step) {
      e.preventDefault();
      say(Math.min(ranks.length - 1, Math.max(0, cursor + step)));
    } else if (e.key === "Enter") open(cursor >= 0 ? ranks[cursor].rank : undefined);
  };
  requestAnimationFrame(draw);
  return canvas;
}

function summary(ranks) {
  const counts = {};
  for (const r of ranks) counts[kind(r)] = (counts[kind(r)] || 0) + 1;
  return kinds.filter(([k]) => counts[k]).map(([k, text]) => `${counts[k]} ${text}`).join(", ") || "no heartbeat yet";
}
function describe(r) {
  const busy = r.running > 0 ? `, ${r.method} for ${seconds(r.busy_s)}` : "";
  return `rank ${r.rank} on ${r.node}: ${r.state}${busy}, ${r.queued} queued, ${r.done} done${r.error ? ", " + r.error : ""}`;
}

// table draws rows of cells, a page of them at a time; a column may be sorted by its button. Rows are known by their key. The values of a live column
// change all the time: its rows keep the order that they had when its button was pressed, so that they do not jump.
const ROWS = 100;
function table(name, columns, rows, key) {
  const chosen = sorts[name];
  if (chosen) {
    const { value, live } = columns[chosen.column];
    if (!live || !chosen.order) {
      rows = [...rows].sort((a, b) => {
        const x = value(a), y = value(b);
        return (x < y ? -1 : x > y ? 1 : 0) * (chosen.descending ? -1 : 1);
      });
      if (live) chosen.order = new Map(rows.map((r, i) => [key(r), i]));
    } else {
      const place = (r) => chosen.order.get(key(r)) ?? rows.length;
      rows = [...rows].sort((a, b) => place(a) - place(b));
    }
  }
  const head = columns.map((c, i) => {
    const sorted = chosen?.column === i;
    const mark = sorted ? (chosen.descending ? " ▾" : " ▴") : "";
    const press = () => { sorts[name] = { column: i, descending: sorted ? !chosen.descending : !!c.number }; draw(); };
    const label = c.value ? el("button", { onclick: press }, c.title + mark) : c.title;
    return el("th", { class: c.number ? "n" : undefined, scope: "col", "aria-sort": sorted ? (chosen.descending ? "descending" : "ascending") : undefined }, label);
  });
  const [shown, turn] = paged(name, rows, ROWS);
  const body = shown.map((r) => el("tr", {}, columns.map((c) => el("td", { class: c.number ? "n" : undefined }, c.cell(r)))));
  return [turn, el("div", { class: "scroll" }, el("table", {}, el("thead", {}, el("tr", {}, head)), el("tbody", {}, body)))];
}

// paged returns the page of a list that is shown, and the buttons that turn it if there is more than one.
function paged(name, list, size) {
  const last = Math.max(0, Math.ceil(list.length / size) - 1), page = Math.min(pages[name] || 0, last), from = page * size;
  const shown = list.slice(from, from + size);
  if (!last) return [shown, null];
  const button = (text, to) => el("button", { class: "act", disabled: to < 0 || to > last, "aria-label": `${text} ${name}`, onclick: () => { pages[name] = to; draw(); } }, text);
  return [shown, el("p", { class: "tools" }, button("Previous", page - 1), `${from + 1} to ${from + shown.length} of ${list.length}`, button("Next", page + 1))];
}

// filter is a box for words and the items of a list that contain all of them. It stays the same element, so that drawing anew does not disturb typing.
function filter(name, hint) {
  const box = el("input", { type: "search", placeholder: hint, "aria-label": `Filter ${name}`, oninput: () => { pages[name] = 0; draw(); } });
  const keep = (list, text) => {
    const words = box.value.toLowerCase().split(/\s+/).filter((w) => w);
    return words.length ? list.filter((x) => { const t = text(x).toLowerCase(); return words.every((w) => t.includes(w)); }) : list;
  };
  return { box, keep };
}
const roleFilter = filter("roles", "filter: words of name, namespace, state, class, creator");
const nodeFilter = filter("nodes", "filter: words of name, state, label, holder");

const roleLink = (r) => `#/role/${encodeURIComponent(r.namespace)}/${encodeURIComponent(r.name)}`;

// The order of roles and nodes changes only when one begins or ceases to need attention.
const byName = new Intl.Collator(undefined, { numeric: true }).compare;
const roleUrgency = (r) => (r.state === "failed" ? 0 : lagging(r).length ? 1 : Math.min(3, r.state === "ready" ? 3 : 2, ...r.workers.ranks.map((x) => (urgency[kind(x)] < 3 ? 1 : 3))));
const nodeState = (n) => (n.rank < 0 ? "away" : n.state || "ready");
const nodeUrgency = (n) => (nodeState(n) !== "ready" && n.rank >= 0 ? 0 : Object.keys(n.unfit || {}).length ? 1 : n.cordons?.length ? 2 : 3);

function urgentFirst(list, urgencyOf, nameOf) {
  return list.map((x) => [urgencyOf(x), nameOf(x), x]).sort((a, b) => a[0] - b[0] || byName(a[1], b[1])).map(([, , x]) => x);
}

// counted is a heading with the number of items, and of those that the filter leaves.
const counted = (title, all, kept) => el("h2", {}, `${title} (${kept.length === all.length ? "" : `${kept.length} of `}${all.length})`);

const CARDS = 24, NODES = 12; // on one page
function overview(s) {
  const out = [el("h1", {}, "Overview")];
  if (s.problem) out.push(el("p", { class: "note bad" }, `Some of this is missing or old: ${s.problem}`));
  if (s.store && s.store.Full) out.push(el("p", { class: "note bad" }, "The head's store takes no writes: its disk is full. Free space on it, or raise --store-limit."));
  const roles = urgentFirst(roleFilter.keep(s.roles, (r) => `${r.namespace}/${r.name} ${r.state} ${r.class} ${r.by} ${r.cause || ""}`), roleUrgency, (r) => `${r.namespace}/${r.name}`);
  const [cards, turnRoles] = paged("roles", roles, CARDS);
  out.push(counted("Roles", s.roles, roles), s.roles.length > CARDS ? roleFilter.box : null, turnRoles);
  if (!s.roles.length) out.push(el("p", { class: "soft" }, "No role runs. A driver creates them."));
  out.push(el("div", { class: "cards" }, cards.map((r) => el("section", { class: "card", "aria-label": r.name },
    el("h3", {}, el("a", { href: roleLink(r) }, r.name), el("span", { class: "soft" }, ` in ${r.namespace}`)),
    el("div", {}, el("span", { class: r.state === "failed" ? "bad" : undefined }, r.state), `, ${plural(r.world, "rank")}`, r.restarts ? `, ${plural(r.restarts, "restart")}` : "", `, by ${r.by}`),
    r.cause ? el("div", { class: "bad" }, r.cause) : null,
    grid(r, (rank) => { location.hash = roleLink(r) + (rank === undefined ? "" : `/${rank}`); }),
    el("div", { class: "soft" }, summary(r.workers.ranks)),
    behind(r).slice(0, 3).map((text) => el("div", { class: "bad" }, text)),
  ))), s.roles.length ? legend() : null);

  out.push(el("h2", {}, `Queue (${s.queue.length})`));
  if (s.queue.length) {
    out.push(table("queue", [
      { title: "Request", cell: (w) => w.id, value: (w) => w.id },
      { title: "Namespace", cell: (w) => w.namespace || "–" },
      { title: "Devices", number: true, cell: (w) => String(w.devices), value: (w) => w.devices },
      { title: "Waiting", number: true, cell: (w) => seconds(w.waited_ms / 1000), value: (w) => w.waited_ms },
      { title: "For", cell: (w) => reason(w.wait) },
    ], s.queue));
  } else out.push(el("p", { class: "soft" }, "No request waits for devices."));

  const holders = holdersOf(s.reservations);
  const nodes = urgentFirst(nodeFilter.keep(s.nodes, (n) => nodeText(n, holders)), nodeUrgency, (n) => n.report.node);
  const [machines, turnNodes] = paged("nodes", nodes, NODES);
  out.push(counted("Nodes", s.nodes, nodes), s.nodes.length > NODES ? nodeFilter.box : null, turnNodes, el("div", { class: "cards" }, machines.map((n) => node(n, holders))));
  out.push(el("h2", {}, "Recent failures"));
  out.push(s.failures.length ? eventTable("failures", s.failures) : el("p", { class: "soft" }, "None in the last day."));
  return out;
}

// reason is the sentence of a wait, whatever shape it has.
function reason(wait) {
  if (!wait) return "–";
  if (typeof wait === "string") return wait;
  return wait.text || wait.why || wait.reason || Object.values(wait).filter((v) => typeof v === "string" && v).join("; ") || JSON.stringify(wait);
}

// holdersOf gives the ranks that hold each device, by its UUID.
function holdersOf(reservations) {
  const holders = {};
  for (const r of reservations) {
    const name = `${r.namespace ? `${r.namespace}/` : ""}${r.holder || r.id}`;
    for (const w of r.workers || []) for (const d of w.slots || []) (holders[d.uuid] ||= []).push(`${name}[${w.rank}]`);
  }
  return holders;
}

function nodeText(n, holders) {
  const labels = Object.entries(n.report.labels || {}).map(([k, v]) => `${k}=${v}`);
  return [n.report.node, nodeState(n), n.cordons?.length ? "cordoned" : "", ...labels, ...(n.report.devices || []).flatMap((d) => holders[d.uuid] || [])].join(" ");
}

function node(n, holders) {
  const state = nodeState(n);
  const rows = (n.report.devices || []).map((d) => {
    const free = d.sample.memory_free;
    const used = free === undefined ? 0 : 1 - free / d.memory_total;
    const bar = (share, text) => {
      const b = el("b");
      b.style.width = `${Math.round(100 * share)}%`;
      return el("div", { class: "level" }, el("div", { class: "bar", "aria-hidden": "true" }, b), text);
    };
    const held = holders[d.uuid] || [];
    return [
      el("span", { title: d.uuid }, `GPU ${d.index}`, held.length ? el("span", { class: "soft" }, ` ${held.join(", ")}`) : null),
      bar(used, free === undefined ? "unknown" : `${bytes(d.memory_total - free)} of ${bytes(d.memory_total)}`),
      bar((d.sample.utilisation || 0) / 100, d.sample.utilisation === undefined ? "unknown" : `${d.sample.utilisation} %`),
      n.unfit?.[d.uuid] ? el("div", { class: "bad whole" }, `GPU ${d.index} is not granted: ${n.unfit[d.uuid].join("; ")}`) : null,
    ];
  });
  return el("section", { class: "card", "aria-label": n.report.node },
    el("h3", {}, n.report.node, el("span", { class: state === "ready" ? "good" : "bad" }, ` ${state}`)),
    n.why ? el("div", { class: "bad" }, n.why) : null,
    (n.cordons || []).map((c) => el("div", { class: "soft" }, `cordoned${c.device ? ` (${c.device})` : ""}${c.by ? ` by ${c.by}` : ""}${c.why ? `: ${c.why}` : ""}`)),
    rows.length ? el("div", { class: "device" }, el("span", { class: "soft" }, "device"), el("span", { class: "soft" }, "memory"), el("span", { class: "soft" }, "utilisation"), rows) : el("div", { class: "soft" }, "no devices"));
}

function eventTable(name, events) {
  return table(name, [
    { title: "Time", cell: (e) => el("time", { datetime: e.at, title: e.at }, clock(e.at)), value: (e) => e.at },
    { title: "Kind", cell: (e) => e.kind, value: (e) => e.kind },
    { title: "Where", cell: (e) => [e.role ? `${e.namespace}/${e.role}${e.rank === undefined ? "" : `[${e.rank}]`}` : e.namespace || "", e.node ? ` on ${e.node}` : ""].join("") || "–" },
    { title: "What", cell: (e) => e.text },
  ], events);
}

// percentile estimates a quantile from the buckets of a method: as if its calls were spread evenly over the bucket.
function percentile(m, q, bounds) {
  const all = m.buckets.reduce((a, b) => a + b, 0);
  if (!all) return "–";
  let i = 0, before = 0;
  while (before + m.buckets[i] < q * all) before += m.buckets[i++];
  if (i === bounds.length) return `> ${bounds.at(-1)} s`;
  const from = i ? bounds[i - 1] : 0, value = from + (bounds[i] - from) * (q * all - before) / m.buckets[i];
  return value < 0.001 ? `${Math.round(value * 1e6)} µs` : seconds(value);
}

function role(s, namespace, name, rank) {
  const r = s.roles.find((x) => x.namespace === namespace && x.name === name);
  if (!r) return [el("h1", {}, name), el("p", { class: "soft" }, `There is no role ${name} in namespace ${namespace} any more.`)];
  const out = [
    el("h1", {}, r.name, el("span", { class: "soft" }, ` in ${r.namespace}`)),
    el("p", {}, el("span", { class: r.state === "failed" ? "bad" : undefined }, r.state), ` since ${clock(r.since)}, class ${r.class}, ${plural(r.world, "rank")}, ${plural(r.restarts || 0, "restart")}, created by ${r.by}`),
  ];
  const failed = r.state === "failed";
  out.push(el("p", { class: "tools" }, el("a", { href: `#/timeline/${encodeURIComponent(r.namespace)}/${encodeURIComponent(r.name)}${failed ? "/failure" : ""}` }, failed ? "Timeline before the failure" : "Timeline"), stacksButton(r, rank)));
  if (r.cause) out.push(el("p", { class: "note bad" }, r.cause));
  for (const text of behind(r).slice(0, 5)) out.push(el("p", { class: "note bad" }, `${text}.`));
  if (stacks.key === stacksKey(r, rank)) out.push(el("pre", { class: "log", tabindex: 0, "aria-label": "stacks" }, stacks.text));
  out.push(grid(r, (n) => { location.hash = roleLink(r) + (n === undefined ? "" : `/${n}`); }), legend());
  const late = new Set(lagging(r).map((x) => x.rank.rank));
  const order = (x) => (late.has(x.rank) ? 0 : urgency[kind(x)]);
  const ranks = rank === undefined ? [...r.workers.ranks].sort((a, b) => order(a) - order(b) || a.rank - b.rank) : r.workers.ranks.filter((x) => x.rank === rank);
  out.push(el("h2", {}, rank === undefined ? `Ranks (${ranks.length})` : `Rank ${rank}`));
  if (rank !== undefined) out.push(el("p", {}, el("a", { href: roleLink(r) }, "All ranks")));
  const rate = rates(r, Date.parse(s.at));
  out.push(table("ranks", [
    { title: "Rank", number: true, cell: (x) => el("a", { href: `${roleLink(r)}/${x.rank}` }, String(x.rank)), value: (x) => x.rank },
    { title: "State", live: true, cell: (x) => el("span", { class: ["bad", "gone"].includes(kind(x)) ? "bad" : undefined }, x.state), value: (x) => x.state },
    { title: "Runs", live: true, cell: (x) => x.method || "–", value: (x) => x.method || "" },
    { title: "For", live: true, number: true, cell: (x) => (x.running ? seconds(x.busy_s) : "–"), value: (x) => x.busy_s },
    { title: "Queued", live: true, number: true, cell: (x) => String(x.queued), value: (x) => x.queued },
    { title: "Done", live: true, number: true, cell: (x) => String(x.done), value: (x) => x.done },
    { title: "Calls/s", live: true, number: true, cell: (x) => rate(x)?.toFixed(1) ?? "–", value: (x) => rate(x) ?? -1 },
    { title: "Restarts", number: true, cell: (x) => String(x.gen), value: (x) => x.gen },
    { title: "Node", cell: (x) => x.node, value: (x) => x.node },
    { title: "Heard", live: true, number: true, cell: (x) => `${seconds(x.silent_s)} ago`, value: (x) => x.silent_s },
    { title: "Error", cell: (x) => x.error || "" },
  ], ranks, (x) => x.rank));
  if (r.workers.methods?.length) { // null before the first call
    out.push(el("h2", {}, "Methods"), table("methods", [
      { title: "Method", cell: (m) => m.method, value: (m) => m.method },
      { title: "Calls", live: true, number: true, cell: (m) => String(m.calls), value: (m) => m.calls },
      { title: "Errors", live: true, number: true, cell: (m) => String(m.errors), value: (m) => m.errors },
      { title: "Mean", live: true, number: true, cell: (m) => seconds(m.seconds / m.calls), value: (m) => m.seconds / m.calls },
      { title: "p50", number: true, cell: (m) => percentile(m, 0.5, s.latency_bounds) },
      { title: "p99", number: true, cell: (m) => percentile(m, 0.99, s.latency_bounds) },
    ], r.workers.methods, (m) => m.method));
  }
  out.push(el("h2", {}, rank === undefined ? "Output" : `Output of rank ${rank}`), output(r, rank));
  return out;
}

// behind describes the ranks that hold the others up, by their heartbeats, or where these tell no difference by the flight recorders.
function behind(r) {
  const late = lagging(r);
  if (late.length) return late.map((x) => `Rank ${x.rank.rank} on ${x.rank.node} holds up the others: ${x.why}; ${x.evidence[0]}`);
  readAbsent(r);
  return (absent.get(roleKey(r))?.list || []).map(lateText);
}

const roleKey = (r) => JSON.stringify([r.namespace, r.name, r.incarnation]);

// readAbsent asks the flight recorders, at most every five seconds, which rank the others wait for, while most ranks have been in one method for
// over five seconds.
async function readAbsent(r) {
  const key = roleKey(r), now = Date.now();
  const long = r.workers.ranks.filter((x) => x.state === "ready" && x.running > 0 && x.busy_s > 5);
  if (r.workers.ranks.length < 3 || long.length * 2 <= r.workers.ranks.length) {
    absent.delete(key);
    return;
  }
  const known = absent.get(key) || { at: 0, list: [] };
  if (now - known.at < 5000) return;
  absent.set(key, { ...known, at: now });
  let list = [];
  try {
    list = (await fetchJSON(`api/timeline?${new URLSearchParams({ namespace: r.namespace, role: r.name, last: "60s", late: "1" })}`)).late;
  } catch { /* it is asked again */ }
  if (!absent.has(key)) return;
  absent.set(key, { at: now, list: list.filter((l) => l.how === "has not begun") });
  draw();
}

// rates returns a function that gives the calls a second of a rank, over the last seconds in which its role was shown.
function rates(r, at) {
  const key = roleKey(r), of = (x) => `${x.rank}.${x.gen}`;
  if (history.key !== key) history = { key, points: [] };
  const points = history.points;
  if (!points.length || points.at(-1).at < at) points.push({ at, done: new Map(r.workers.ranks.map((x) => [of(x), x.done])) });
  while (points.length > 2 && at - points[0].at > 6000) points.shift();
  const passed = (at - points[0].at) / 1000;
  return (x) => (passed < 2 || !points[0].done.has(of(x)) ? undefined : (x.done - points[0].done.get(of(x))) / passed);
}

const stacksKey = (r, rank) => JSON.stringify([r.namespace, r.name, rank]);

// stacksButton shows what the workers are doing, as `troupe stacks` does, until it is pressed again or another role is shown.
function stacksButton(r, rank) {
  const key = stacksKey(r, rank), shown = stacks.key === key;
  return el("button", { class: "act", "aria-label": rank === undefined ? "Stacks of all ranks" : `Stacks of rank ${rank}`, "aria-pressed": String(shown), onclick: async () => {
    if (shown) {
      stacks = { key: "", text: "" };
      draw();
      return;
    }
    stacks = { key, text: "asking…" };
    draw();
    const query = new URLSearchParams({ namespace: r.namespace, role: r.name });
    if (rank !== undefined) query.set("rank", rank);
    let text;
    try {
      text = (await fetchJSON(`api/stacks?${query}`)).text;
    } catch (e) {
      text = e.message;
    }
    if (stacks.key === key) stacks.text = `${clock(Date.now())}\n${text}`;
    draw();
  } }, shown ? "Hide the stacks" : "Stacks");
}

// output keeps one stream of lines open while the same role or rank is shown. Lines are drawn once a frame: each change makes the browser lay out
// all of them, and a role may print thousands a second.
const MOST_LINES = 2000;
function output(r, rank) {
  const key = JSON.stringify([r.namespace, r.name, r.incarnation, rank]);
  if (logs && logs.key === key) return logs.pre;
  closeLogs();
  const pre = el("pre", { class: "log", tabindex: 0, "aria-label": "live output" }, "Nothing was printed yet.");
  const query = new URLSearchParams({ namespace: r.namespace, role: r.name, incarnation: r.incarnation });
  if (rank !== undefined) query.set("rank", rank);
  const source = new EventSource(`api/logs?${query}`);
  logs = { key, pre, source };
  let waiting = [], empty = true;
  const show = () => {
    const end = pre.scrollTop + pre.clientHeight >= pre.scrollHeight - 4;
    if (empty) pre.textContent = "";
    empty = false;
    pre.append(...waiting.slice(-MOST_LINES).map(([bad, text]) => el("span", { class: bad ? "bad" : undefined }, `${text}\n`)));
    waiting = [];
    while (pre.childElementCount > MOST_LINES) pre.firstChild.remove();
    if (end) pre.scrollTop = pre.scrollHeight;
  };
  const add = (bad, text) => {
    if (waiting.push([bad, text]) === 1) requestAnimationFrame(show);
    if (waiting.length > 2 * MOST_LINES) waiting.splice(0, MOST_LINES); // no frame is drawn while the page is hidden
  };
  source.addEventListener("line", (e) => {
    const line = JSON.parse(e.data);
    add(line.stream === "stderr", `${line.name || ""} ${line.text}`);
  });
  source.addEventListener("end", (e) => { add(true, JSON.parse(e.data)); source.close(); });
  return pre;
}

function closeLogs() {
  if (logs) logs.source.close();
  logs = null;
}

let pipelines = { list: [], problem: "" };
async function readPipelines() {
  try {
    pipelines = { list: await fetchJSON("api/pipelines"), problem: "" };
  } catch (e) {
    pipelines.problem = e.message;
  }
}
function pipelineView() {
  const out = [el("h1", {}, "Pipelines")];
  if (pipelines.problem) out.push(el("p", { class: "note bad" }, pipelines.problem));
  if (!pipelines.list.length) out.push(el("p", { class: "soft" }, "No pipeline has stored anything."));
  for (const p of pipelines.list) {
    const st = p.status;
    out.push(el("h2", {}, p.name, el("span", { class: "soft" }, ` in ${p.namespace}`)));
    if (!st) {
      out.push(el("p", { class: "soft" }, `It does not run: ${p.problem}`));
      continue;
    }
    out.push(el("p", {}, `version ${st.version}, run by ${st.by}, ${plural(st.dead, "dead letter")} `,
      st.dead ? el("button", { class: "act", onclick: async () => {
        try {
          await fetchJSON(`api/pipelines/retry?${new URLSearchParams({ namespace: p.namespace, name: p.name })}`, { method: "POST", headers: { "X-Troupe": "1" } });
        } catch (e) { pipelines.problem = e.message; }
        await readPipelines(); draw();
      } }, "Retry them") : null));
    out.push(table(`stages-${p.name}`, [
      { title: "Stage", cell: (x) => x.name }, { title: "Role", cell: (x) => x.role || "–" },
      { title: "Workers", number: true, cell: (x) => String(x.workers) }, { title: "In flight", number: true, cell: (x) => String(x.in_flight) },
      { title: "Waiting", number: true, cell: (x) => String(x.waiting) }, { title: "Handled", number: true, cell: (x) => String(x.handled) },
      { title: "Per s", number: true, cell: (x) => x.per_s.toFixed(1) }, { title: "Retries", number: true, cell: (x) => String(x.retries) },
      { title: "p50", number: true, cell: (x) => seconds(x.p50_us / 1e6) }, { title: "p99", number: true, cell: (x) => seconds(x.p99_us / 1e6) },
    ], st.stages));
    out.push(table(`streams-${p.name}`, [
      { title: "Stream", cell: (x) => x.name }, { title: "Depth", number: true, cell: (x) => `${x.items} of ${x.max_items}` },
      { title: "Bytes", number: true, cell: (x) => bytes(x.bytes) }, { title: "In per s", number: true, cell: (x) => x.in_per_s.toFixed(1) },
      { title: "Out per s", number: true, cell: (x) => x.out_per_s.toFixed(1) }, { title: "Oldest", number: true, cell: (x) => seconds(x.oldest_s) },
      { title: "Blocked puts", number: true, cell: (x) => String(x.blocked) }, { title: "Stale", number: true, cell: (x) => String(x.stale) },
    ], st.streams));
  }
  return out;
}

let found = [];
async function readEvents() {
  try {
    found = await fetchJSON(`api/events?${new URLSearchParams({ q: search, limit: 300 })}`);
  } catch { /* the next second asks again */ }
}
const searchBox = el("input", { type: "search", placeholder: "search: words of kind, role, node, text", "aria-label": "Search events", oninput: async (e) => { search = e.target.value; await readEvents(); draw(); } });
function eventView() {
  return [el("h1", {}, "Events"), searchBox, found.length ? eventTable("events", found) : el("p", { class: "soft" }, search ? `No event of the newest 2,000 contains “${search}”.` : "No event yet.")];
}

function draw() {
  const [view, ...args] = location.hash.replace(/^#\/?/, "").split("/").map(decodeURIComponent);
  for (const a of document.querySelectorAll("nav a")) {
    if (a.dataset.view === (view || "overview")) a.setAttribute("aria-current", "page");
    else a.removeAttribute("aria-current");
  }
  if (!snapshot) return;
  const focus = document.activeElement, focused = focus && focus !== document.body && main.contains(focus) ? [...main.querySelectorAll("a,button,input,canvas,pre")].indexOf(focus) : -1;
  let nodes;
  if (view === "role") nodes = role(snapshot, args[0], args[1], args[2] === undefined ? undefined : Number(args[2]));
  else closeLogs();
  if (view === "timeline") {
    const shown = timelinePage(snapshot, args[0], args[1], args[2] === "failure");
    if (!main.contains(shown)) {
      main.replaceChildren(shown);
      redrawTimeline();
    }
    return;
  }
  if (view === "pipelines") nodes = pipelineView();
  if (view === "events") nodes = eventView();
  main.replaceChildren(...(nodes || overview(snapshot)).flat(Infinity).filter((n) => n));
  document.title = snapshot.roles.some((r) => r.state === "failed") ? "Troupe: a role has failed" : "Troupe";
  if (focused >= 0) { // drawing anew must not take the focus away
    const again = [...main.querySelectorAll("a,button,input,canvas,pre")][focused];
    if (again && again !== document.activeElement) again.focus({ preventScroll: true });
  }
}

function showHealth() {
  const age = (Date.now() - received) / 1000;
  const bad = !snapshot || age > 5 || snapshot.problem;
  health.classList.toggle("bad", !!bad);
  health.textContent = !snapshot ? "connecting…" : age > 5 ? `no news for ${seconds(age)}` : `${snapshot.url || "head"} · ${snapshot.version} · ${clock(snapshot.at)}`;
}

async function refresh() {
  if (location.hash.startsWith("#/pipelines")) await readPipelines();
  if (location.hash.startsWith("#/events")) await readEvents();
  if (!document.hidden) draw();
}

const source = new EventSource("api/stream");
source.addEventListener("snapshot", (e) => { snapshot = JSON.parse(e.data); received = Date.now(); refresh(); showHealth(); });
source.addEventListener("same", (e) => { received = Date.now(); if (snapshot) snapshot.at = JSON.parse(e.data); if (!location.hash.startsWith("#/role")) refresh(); showHealth(); });
setInterval(showHealth, 1000);
window.addEventListener("hashchange", async () => {
  for (const s of Object.values(sorts)) delete s.order; // of another role
  for (const name of Object.keys(pages)) if (name !== "roles" && name !== "nodes") delete pages[name];
  await refresh();
  main.focus({ preventScroll: true });
  window.scrollTo(0, 0);
});
window.addEventListener("resize", () => { draw(); redrawTimeline(); });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { draw(); redrawTimeline(); });
