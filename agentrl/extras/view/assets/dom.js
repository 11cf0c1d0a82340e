// Elements are made of names and texts only: nothing that a model wrote is ever parsed as HTML.

const SVG = "http://www.w3.org/2000/svg";
// Control characters, marks that reorder text, and characters without width: shown by their numbers.
const UNSEEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ufff9-\ufffb]/g;

export function h(name, options, ...children) {
  return fill(document.createElement(name), options, children);
}

export function s(name, options, ...children) {
  return fill(document.createElementNS(SVG, name), options, children);
}

function fill(element, options, children) {
  for (const [key, value] of Object.entries(options ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else if (key === "size") Object.assign(element.style, value);
    else element.setAttribute(key, value === true ? "" : String(value));
  }
  add(element, children);
  return element;
}

export function add(element, children) {
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    element.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
  return element;
}

export function show(element, ...children) {
  element.replaceChildren();
  return add(element, children);
}

export function seen(text) {
  const parts = [];
  let done = 0;
  for (const found of text.matchAll(UNSEEN)) {
    if (found.index > done) parts.push(text.slice(done, found.index));
    const code = found[0].charCodeAt(0);
    const digits = code.toString(16).padStart(code < 256 ? 2 : 4, "0");
    parts.push(h("span", { class: "ctl", title: "a character that is not shown" }, (code < 256 ? "\\x" : "\\u") + digits));
    done = found.index + 1;
    if (parts.length > 4000) break;
  }
  if (done < text.length) parts.push(text.slice(done));
  return parts;
}

export function plain(text) {
  return String(text).replace(UNSEEN, (found) => "\\u" + found.charCodeAt(0).toString(16).padStart(4, "0"));
}

export function number(value, digits = 4) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (Number.isInteger(value)) return value.toLocaleString("en-US");
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-4 || size >= 1e7)) return value.toExponential(2);
  return String(Number(value.toPrecision(digits)));
}

export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 1) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 60) return `${seconds < 10 ? seconds.toFixed(1) : Math.round(seconds)} s`;
  const minutes = Math.floor(seconds / 60);
  if (minutes < 60) return `${minutes} min ${Math.round(seconds % 60)} s`;
  return minutes < 2880 ? `${Math.floor(minutes / 60)} h ${minutes % 60} min` : `${Math.floor(minutes / 1440)} d ${Math.floor((minutes % 1440) / 60)} h`;
}

export function bytes(count) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let unit = 0;
  while (count >= 1000 && unit < units.length - 1) { count /= 1000; unit += 1; }
  return `${unit && count < 10 ? count.toFixed(1) : Math.round(count)} ${units[unit]}`;
}

export function outcomePill(outcome) {
  const kind = outcome === "completed" ? "good" : outcome === "truncated" || outcome === "turn_limit" ? "warn" : "bad";
  return h("span", { class: `pill ${kind}` }, String(outcome ?? "–").replace("_", " "));
}

export function say(text) {
  const place = document.getElementById("status");
  place.textContent = text;
  clearTimeout(say.timer);
  say.timer = setTimeout(() => { place.textContent = ""; }, 2600);
}

export async function copy(text, what) {
  try {
    await navigator.clipboard.writeText(text);
    say(`${what} copied`);
  } catch {
    say("the browser does not allow copying; select the text");
  }
}

export function tabs(names, current, choose, label) {
  const buttons = Object.entries(names).map(([name, text]) => h("button", { role: "tab", id: `tab-${name}`, type: "button", "aria-selected": String(name === current), tabindex: name === current ? 0 : -1, onclick: () => choose(name) }, text));
  const list = h("div", { class: "tabs", role: "tablist", "aria-label": label }, buttons);
  list.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    const next = buttons[(buttons.indexOf(document.activeElement) + step + buttons.length) % buttons.length];
    next.focus();
    next.click();
  });
  return list;
}
