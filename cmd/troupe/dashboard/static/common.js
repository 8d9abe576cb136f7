// What all views share.

// el makes an element. Children may be lists, also of lists. Text is never parsed as HTML.
export function el(tag, props = {}, ...children) {
  const e = document.createElement(tag);
  for (const [k, v] of Object.entries(props)) {
    if (v === undefined || v === false || v === null) continue;
    if (k === "onclick" || k === "onkeydown" || k === "oninput" || k === "onchange") e[k] = v;
    else e.setAttribute(k, v === true ? "" : v);
  }
  for (const c of children.flat(Infinity)) if (c !== null && c !== undefined) e.append(c);
  return e;
}

export const two = (n) => String(n).padStart(2, "0");
export function clock(at) {
  const d = new Date(at);
  return `${two(d.getHours())}:${two(d.getMinutes())}:${two(d.getSeconds())}`;
}
export function seconds(s) {
  if (s < 0.0005) return "0";
  if (s < 1) return `${Math.round(s * 1000)} ms`;
  if (s < 60) return `${s.toFixed(1)} s`;
  if (s < 3600) return `${Math.floor(s / 60)} min ${two(Math.floor(s % 60))} s`;
  return `${Math.floor(s / 3600)} h ${two(Math.floor((s % 3600) / 60))} min`;
}
export function bytes(n) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let i = 0;
  for (; n >= 1024 && i < units.length - 1; i++) n /= 1024;
  return `${n.toFixed(i && n < 10 ? 1 : 0)} ${units[i]}`;
}
export function plural(n, word) { return `${n} ${word}${n === 1 ? "" : "s"}`; }

export async function fetchJSON(path, options) {
  const r = await fetch(path, options);
  if (!r.ok) throw new Error((await r.text()).trim() || r.statusText);
  return r.json();
}
