// Charts as SVG: lines with bands, stacked areas. Colours come from classes k0 to k5.
import { h, s, show, number } from "./dom.js";

const WIDTH = 420, HEIGHT = 150, LEFT = 40, RIGHT = 8, TOP = 8, BOTTOM = 20;

function ticks(low, high, count) {
  const span = high - low || 1;
  const raw = span / count;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].map((factor) => factor * power).find((size) => span / size <= count) ?? 10 * power;
  const found = [];
  for (let value = Math.ceil(low / step - 1e-9) * step; value <= high + step * 1e-6; value += step) found.push(Number(value.toPrecision(10)));
  return found;
}

function smooth(values, span) {
  return values.map((_, at) => {
    const near = values.slice(Math.max(0, at - span), at + span + 1).filter((value) => value !== null);
    return near.length ? near.reduce((a, b) => a + b, 0) / near.length : null;
  });
}

function limits(chart, steps) {
  const all = [];
  if (chart.stacked) steps.forEach((_, at) => all.push(chart.lines.reduce((sum, line) => sum + (line.values[at] ?? 0), 0)));
  else for (const line of chart.lines) for (const list of [line.values, line.low ?? [], line.high ?? []]) for (const value of list) if (value !== null) all.push(value);
  if (chart.bound !== null && chart.bound !== undefined) all.push(chart.bound);
  if (!all.length) return null;
  let low = Math.min(...all), high = Math.max(...all);
  if (chart.from !== undefined) low = Math.min(low, chart.from);
  if (chart.to !== undefined) high = Math.max(high, chart.to);
  if (low === high) { low -= chart.from === undefined ? Math.abs(low) * 0.1 || 0.5 : 0; high += Math.abs(high) * 0.1 || (chart.from === undefined ? 0.5 : 1); }
  const room = chart.from === undefined ? (high - low) * 0.06 : 0;
  return [chart.stacked ? 0 : low - room, high + (high - low) * 0.06];
}

function path(steps, values, x, y) {
  let d = "", open = false;
  values.forEach((value, at) => {
    if (value === null || value === undefined) { open = false; return; }
    d += `${open ? "L" : "M"}${x(steps[at]).toFixed(1)} ${y(value).toFixed(1)}`;
    open = true;
  });
  return d;
}

function area(steps, lows, highs, x, y) {
  const points = steps.map((step, at) => [x(step), lows[at], highs[at]]).filter(([, low, high]) => low !== null && high !== null && low !== undefined && high !== undefined);
  if (points.length < 2) return "";
  const up = points.map(([at, , high]) => `${at.toFixed(1)} ${y(high).toFixed(1)}`), down = points.map(([at, low]) => `${at.toFixed(1)} ${y(low).toFixed(1)}`).reverse();
  return `M${up.join("L")}L${down.join("L")}Z`;
}

// chart: {title, hint, lines: [{name, steps, values, low?, high?, dots?, faint?}], bound?, marks?, stacked?, from?, to?, unit?}
export function drawChart(chart) {
  const lines = chart.lines.filter((line) => line.values.some((value) => value !== null));
  const card = h("section", { class: "card", "aria-label": chart.title }, h("h2", null, chart.title), h("p", { class: "hint" }, chart.hint ?? ""));
  if (!lines.length) { card.append(h("p", { class: "quiet small" }, "not measured")); return card; }
  const steps = lines.reduce((longest, line) => (line.steps.length > longest.length ? line.steps : longest), []);
  const range = limits({ ...chart, lines }, steps);
  const first = Math.min(...lines.map((line) => line.steps[0])), last = Math.max(...lines.map((line) => line.steps.at(-1)), first + 1);
  const x = (step) => LEFT + ((step - first) / (last - first)) * (WIDTH - LEFT - RIGHT);
  const y = (value) => TOP + (1 - (Math.min(value, range[1]) - range[0]) / (range[1] - range[0])) * (HEIGHT - TOP - BOTTOM);
  const latest = lines.map((line) => `${line.name} ${number(line.values.findLast((value) => value !== null))}`).join(", ");
  const picture = s("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": `${chart.title}, steps ${first} to ${last}; last: ${latest}` });
  for (const tick of ticks(range[0], range[1], 4)) {
    picture.append(s("line", { class: "axis", x1: LEFT, x2: WIDTH - RIGHT, y1: y(tick), y2: y(tick) }), s("text", { x: LEFT - 6, y: y(tick) + 4, "text-anchor": "end" }, chart.percent ? `${Math.round(tick * 100)}%` : number(tick, 3)));
  }
  for (const tick of ticks(first, last, 6).filter(Number.isInteger)) picture.append(s("text", { x: x(tick), y: HEIGHT - 4, "text-anchor": "middle" }, number(tick)));
  for (const step of new Set(chart.marks ?? [])) if (step >= first && step <= last) picture.append(s("line", { class: "mark", x1: x(step), x2: x(step), y1: TOP, y2: TOP + 7 }));
  if (chart.bound !== null && chart.bound !== undefined) picture.append(s("line", { class: "bound", x1: LEFT, x2: WIDTH - RIGHT, y1: y(chart.bound), y2: y(chart.bound) }));
  if (chart.stacked) {
    let below = steps.map(() => 0);
    lines.forEach((line, at) => {
      const above = below.map((value, index) => value + (line.values[index] ?? 0));
      picture.append(s("path", { class: `area fill k${at % 6}`, d: area(steps, below, above, x, y) }));
      below = above;
    });
  } else {
    lines.forEach((line, at) => {
      const color = `k${(line.color ?? at) % 6}`;
      if (line.low) picture.append(s("path", { class: `band fill ${color}`, d: area(line.steps, line.low, line.high, x, y) }));
      const noisy = line.values.length >= 60 && !line.dots && !chart.exact;
      if (noisy) picture.append(s("path", { class: `line faint ${color}`, d: path(line.steps, line.values, x, y) }));
      picture.append(s("path", { class: `line ${color}`, d: path(line.steps, noisy ? smooth(line.values, Math.floor(line.values.length / 30)) : line.values, x, y) }));
      if (line.dots || line.values.length === 1) line.values.forEach((value, index) => { if (value !== null) picture.append(s("circle", { class: `fill ${color}`, cx: x(line.steps[index]), cy: y(value), r: 3 })); });
    });
  }
  const legend = h("div", { class: "legend" });
  const tell = (step) => show(legend, lines.map((line, at) => {
    const near = step === null ? line.values.findLastIndex((value) => value !== null) : nearest(line.steps, step);
    const value = line.values[near];
    const interval = line.low && line.low[near] !== null ? ` [${number(line.low[near], 3)}, ${number(line.high[near], 3)}]` : "";
    return h("span", { class: `k${(line.color ?? at) % 6}` }, h("i"), `${line.name} `, h("b", null, number(value), interval));
  }), step === null ? null : h("span", null, `step ${number(steps[nearest(steps, step)])}`));
  tell(null);
  const cursor = s("line", { class: "cursor", y1: TOP, y2: HEIGHT - BOTTOM });
  picture.append(cursor);
  picture.addEventListener("pointermove", (event) => {
    const box = picture.getBoundingClientRect();
    const step = first + ((((event.clientX - box.left) / box.width) * WIDTH - LEFT) / (WIDTH - LEFT - RIGHT)) * (last - first);
    const at = x(steps[nearest(steps, step)]);
    cursor.setAttribute("x1", at);
    cursor.setAttribute("x2", at);
    cursor.style.opacity = 1;
    tell(step);
  });
  picture.addEventListener("pointerleave", () => { cursor.style.opacity = 0; tell(null); });
  card.append(h("div", { class: "chart" }, picture), legend);
  if (chart.open) picture.addEventListener("click", (event) => {
    const box = picture.getBoundingClientRect();
    const step = first + ((((event.clientX - box.left) / box.width) * WIDTH - LEFT) / (WIDTH - LEFT - RIGHT)) * (last - first);
    chart.open(steps[nearest(steps, step)]);
  });
  return card;
}

function nearest(steps, step) {
  let best = 0;
  for (let at = 1; at < steps.length; at += 1) if (Math.abs(steps[at] - step) < Math.abs(steps[best] - step)) best = at;
  return best;
}
