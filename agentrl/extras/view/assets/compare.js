// Two or more runs beside each other, or two evaluations problem by problem.
import { h, show, number, plain } from "./dom.js";
import { ask, exported } from "./api.js";
import { drawChart } from "./charts.js";
import { attemptsLink } from "./attempts.js";

const COMPARED = {
  "rollout/reward_mean": { title: "Reward", hint: "mean of the batch" },
  "val/reward_mean": { title: "Reward of validations", hint: "mean", dots: true },
  "rollout/accuracy": { title: "Accuracy", hint: "of the batch", percent: true, from: 0, to: 1 },
  "val/accuracy": { title: "Accuracy of validations", hint: "of scored attempts", percent: true, from: 0, to: 1, dots: true },
  "rollout/response_tokens/mean": { title: "Length", hint: "tokens after the prompt", from: 0 },
  "learner/entropy": { title: "Entropy", hint: "nats per token", from: 0 },
  "learner/grad_norm": { title: "Gradient norm", hint: "before clipping", from: 0 },
  "rollout/lag/mean": { title: "Lag", hint: "versions, mean", from: 0 },
  "time/step_s": { title: "Seconds of a step", hint: "", from: 0 },
  "attempts/failed_share": { title: "Failed attempts", hint: "share", percent: true, from: 0 },
};

function wideTable(label, head, rows) {
  return h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": label, size: { marginTop: "8px" } }, h("table", null, h("thead", null, h("tr", null, head)), h("tbody", null, rows)));
}

function best(values, isLow) {
  const known = values.filter((value) => value !== null);
  if (known.length < 2 || Math.min(...known) === Math.max(...known)) return null;
  return isLow ? Math.min(...known) : Math.max(...known);
}

function numbers(label, found, heads) {
  if (!found.length) return null;
  const isLow = (name) => /seconds|failed|idle|^lag$/.test(name);
  return h("section", { class: "gap" }, h("h2", null, label), wideTable(label, [h("th", null, ""), heads("num")], found.map(([name, values]) => h("tr", null, h("td", null, plain(name.replace(/^val\//, ""))), values.map((value) => h("td", { class: "num" }, value !== null && value === best(values, isLow(name)) ? h("b", null, number(value)) : number(value)))))));
}

async function runsBeside(place, route, known, chosen) {
  const found = await ask("compare", { sources: chosen.join(",") });
  if (!route.isCurrent()) return;
  const names = found.families.map((family) => found.titles.filter((_, at) => found.families[at] === family).join(", "));
  const heads = (kind) => found.titles.map((title, at) => h("th", { class: kind ?? null }, h("span", { class: `legend k${found.families[at] % 6}`, size: { display: "inline", margin: 0 } }, h("i")), plain(title)));
  const family = (number) => { const at = found.families.indexOf(number); const many = found.families.filter((one) => one === number).length; return many > 1 ? `${names[at]} (${many} runs)` : names[at]; };
  const charts = Object.entries(COMPARED).filter(([name]) => found.curves[name]).map(([name, panel]) => drawChart({ ...panel, lines: found.curves[name].map((curve) => ({ name: family(curve.family), color: curve.family, steps: curve.steps, values: curve.mean, dots: panel.dots, ...(found.families.filter((one) => one === curve.family).length > 1 ? { low: curve.low, high: curve.high } : {}) })) }));
  const differences = found.differences.length
    ? wideTable("Differences of the configs", [h("th", null, "key"), heads()], found.differences.map((one) => h("tr", null, h("td", { class: "mono" }, plain(one.key)), one.values.map((value) => h("td", { class: "mono" }, value === null ? h("span", { class: "quiet" }, "–") : plain(value))))))
    : h("p", { class: "quiet" }, "The configs are the same.");
  show(place, h("section", { class: "gap" }, h("h2", null, "Differences of the configs"), differences), numbers("The last validation", found.final, heads),
    charts.length ? h("div", { class: "grid" }, charts) : null, numbers("Throughput, means over all steps", found.throughput, heads),
    h("p", { class: "small quiet gap" }, "Runs that differ only in seed and place are one line with the spread of its runs."));
}

async function problemsBeside(place, route, chosen) {
  const found = await ask("problems", { sources: chosen.join(",") });
  if (!route.isCurrent()) return;
  const interval = (one) => `[${number(one.low, 3)}, ${number(one.high, 3)}]`;
  const shown = found.sources.length > 1 ? [...found.sources, found.overall] : found.sources;
  const verdict = found.overall.p_value < 0.05 ? "a significant difference" : "no significant difference";
  const list = (title, pairs, count, kind) => h("section", { class: "card" }, h("h2", null, `${title}: ${number(count)}`), h("p", { class: "hint" }, "largest difference first"), pairs.length ? h("div", { class: "wide-table" }, h("table", null, h("thead", null, h("tr", null, ["problem", "A", "B"].map((name, at) => h("th", { class: at ? "num" : null }, name)))), h("tbody", null, pairs.slice(0, 100).map((pair) => h("tr", null, h("td", null, h("a", { href: attemptsLink(chosen[1], { task: pair.problem }) }, plain(pair.problem)), h("div", { class: "quiet small" }, plain(pair.source))), h("td", { class: "num" }, `${number(pair.accuracy_a, 3)}`), h("td", { class: `num ${kind}` }, `${number(pair.accuracy_b, 3)}`)))))) : h("p", { class: "quiet small" }, "none"));
  show(place, h("p", { class: "gap" }, h("b", null, `B − A = ${found.overall.difference.value > 0 ? "+" : ""}${number(found.overall.difference.value, 3)} ${interval(found.overall.difference)}`), `, p = ${number(found.overall.p_value, 3)}: ${verdict}`),
    found.notes.map((note) => h("p", { class: "small quiet" }, plain(note))),
    wideTable("By data source", ["source", "A", "B", "B − A", "95 %", "p", "won", "lost", "of"].map((name, at) => h("th", { class: at ? "num" : null }, name)), shown.map((one) => h("tr", null, h("td", null, plain(one.name)), [number(one.accuracy_a.value, 3), number(one.accuracy_b.value, 3), number(one.difference.value, 3), interval(one.difference), number(one.p_value, 3), one.num_won, one.num_lost, one.num_problems].map((value) => h("td", { class: "num" }, value))))),
    h("div", { class: "grid" }, list("Won by B", found.won, found.num_won, "good"), list("Lost by B", found.lost, found.num_lost, "bad")));
}

export async function comparePage(place, route, known) {
  document.title = "Compare · agentrl view";
  const kinds = known.sources.map((source) => source.kind);
  const runs = kinds.flatMap((kind, at) => (kind === "run" ? [at] : [])), others = kinds.flatMap((kind, at) => (kind === "run" ? [] : [at]));
  const asked = (route.parameters.get("runs") ?? "").split(",").filter(Boolean).map(Number);
  const chosen = asked.length ? asked : runs.length > 1 ? runs : others.slice(0, 2);
  const body = h("div");
  const toggle = (at) => { const next = chosen.includes(at) ? chosen.filter((one) => one !== at) : [...chosen, at].sort((a, b) => a - b); location.hash = `#/compare?${new URLSearchParams({ source: route.source, runs: next.join(",") })}`; };
  const letters = chosen.every((at) => kinds[at] !== "run");
  show(place, h("h1", null, "Compare"), h("div", { class: "row", size: { marginTop: "10px" } }, known.sources.map((source, at) => h("button", { type: "button", disabled: Boolean(exported), "aria-pressed": String(chosen.includes(at)), onclick: () => toggle(at) }, letters && chosen.includes(at) ? `${"AB"[chosen.indexOf(at)] ?? "?"}: ` : "", plain(source.title)))), body);
  if (chosen.length < 2) show(body, h("p", { class: "quiet pad" }, "Choose two or more runs, or two evaluations."));
  else if (letters) { if (chosen.length === 2) await problemsBeside(body, route, chosen); else show(body, h("p", { class: "quiet pad" }, "Choose two evaluations.")); } else await runsBeside(body, route, known, chosen.filter((at) => kinds[at] === "run"));
}
