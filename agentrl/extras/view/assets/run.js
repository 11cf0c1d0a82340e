// The page of a run: its state, its curves, and what went wrong.
import { h, show, number, duration, bytes, plain } from "./dom.js";
import { ask } from "./api.js";
import { drawChart } from "./charts.js";

export const PANELS = [
  { title: "Reward", hint: "mean of the batch; dots: validation", names: [["rollout/reward_mean", "batch"]], validation: [["val/reward_mean", "validation"]] },
  { title: "Accuracy by agent", hint: "of the batch", prefix: "rollout/accuracy/", percent: true, from: 0, to: 1 },
  { title: "Accuracy of validations", hint: "mean over problems, with its 95 % interval", validationInterval: "val/mean@", percent: true, from: 0, to: 1 },
  { title: "Accuracy by data source", hint: "of the batch", between: ["rollout/source/", "/accuracy"], percent: true, from: 0, to: 1 },
  { title: "Tool use", hint: "share of attempts with a call", names: [["rollout/tool_use", "all rows"], ["rollout/tool_use/needs_tool", "rows that need a tool"]], percent: true, from: 0, to: 1 },
  { title: "Lag of trained tokens", hint: "versions behind the learner, with range; bound dashed", names: [["rollout/lag/mean", "mean"], ["rollout/lag/max", "largest"]], isLag: true, from: 0, exact: true },
  { title: "Seconds of a step", hint: "by phase", phases: true },
  { title: "Idle", hint: "share of the step in which they waited", names: [["idle/learner", "learner"], ["idle/servers", "servers"]], percent: true, from: 0 },
  { title: "Speed", hint: "tokens sampled per second", names: [["speed/sampled_tokens_per_s", "tokens/s"], ["speed/action_tokens_per_s", "tokens/s"]], from: 0 },
  { title: "Entropy", hint: "nats per token", names: [["learner/entropy", "entropy"]], from: 0 },
  { title: "KL, behavior to proximal", hint: "how far the sampler was from the learner", names: [["learner/correction/kl_k3", "k3"]] },
  { title: "Gradient norm", hint: "before clipping", names: [["learner/grad_norm", "norm"]], from: 0 },
  { title: "Outcomes of all attempts", hint: "shares of the attempts that ended", outcomes: true, percent: true },
  { title: "Failures", hint: "attempts of a step without a score", names: [["attempts/failed", "failed"], ["rollout/dropped_groups", "groups dropped"]], from: 0, exact: true },
  { title: "Length", hint: "tokens after the prompt", names: [["rollout/response_tokens/mean", "mean"], ["rollout/response_tokens/max", "longest"]], from: 0 },
];
const OUTCOMES = ["completed", "truncated", "turn_limit", "timeout", "tool_error", "environment_error", "model_error", "reward_error", "aborted"];
const NOT_PHASES = ["time/step_s", "time/validate_s", "time/save_s"];

// Stacks and bands have one value per window of steps: single steps of a long run are noise, and in some no attempt ends.
const MOST_WINDOWS = 60;

function windowed(lines, steps, reduce) {
  const size = Math.max(1, Math.ceil(steps.length / MOST_WINDOWS)), starts = steps.map((_, at) => at).filter((at) => at % size === 0);
  const found = starts.map((at) => lines.map((line) => reduce(line.values.slice(at, at + size).filter((value) => value !== null && value !== undefined))));
  const kept = starts.map((_, at) => at).filter((at) => found[at].some((value) => value));
  return lines.map((line, index) => ({ ...line, steps: kept.map((at) => steps[starts[at]]), values: kept.map((at) => found[at][index]) }));
}

const sum = (values) => values.reduce((a, b) => a + b, 0);
const median = (values) => [...values].sort((a, b) => a - b)[Math.floor(values.length / 2)] ?? 0;

function banded([mean, largest], steps) {
  const [low] = windowed([mean], steps, (values) => (values.length ? Math.min(...values) : null));
  const [high] = windowed([largest], steps, (values) => (values.length ? Math.max(...values) : null));
  const [middle] = windowed([mean], steps, (values) => (values.length ? sum(values) / values.length : null));
  const at = (line) => middle.steps.map((step) => line.values[line.steps.indexOf(step)] ?? null);
  return [{ ...middle, low: at(low), high: at(high) }];
}

function wanted(panel, names) {
  if (panel.names) return panel.names.filter(([name]) => names.includes(name));
  if (panel.prefix) return names.filter((name) => name.startsWith(panel.prefix) && !name.slice(panel.prefix.length).includes("/")).map((name) => [name, name.slice(panel.prefix.length)]);
  if (panel.between) return names.filter((name) => name.startsWith(panel.between[0]) && name.endsWith(panel.between[1])).map((name) => [name, name.slice(panel.between[0].length, -panel.between[1].length)]).filter(([, label], _, all) => !label.includes("/reward") && all.length > 1);
  if (panel.phases) return names.filter((name) => /^time\/[^/]+_s$/.test(name) && !NOT_PHASES.includes(name)).map((name) => [name, name.slice(5, -2)]);
  if (panel.outcomes) return OUTCOMES.filter((name) => names.includes(`attempts/${name}`)).map((name) => [`attempts/${name}`, name]);
  return [];
}

function intervals(names) {
  const found = names.filter((name) => /^val\/mean@\d+$/.test(name));
  return found.slice(0, 1);
}

export function namesOf(overview) {
  const train = new Set(), validation = new Set();
  for (const panel of PANELS) {
    for (const [name] of wanted(panel, overview.names)) train.add(name);
    for (const [name] of panel.validation ?? []) if (overview.validation_names.includes(name)) validation.add(name);
    if (panel.validationInterval) for (const name of intervals(overview.validation_names)) [name, `${name}/low`, `${name}/high`].forEach((one) => validation.add(one));
  }
  return { train: [...train].sort(), validation: [...validation].sort() };
}

export async function curvesOf(source, overview) {
  const names = namesOf(overview);
  const [train, validation] = await Promise.all([
    ask("series", { source, kind: "train", names: names.train.join(",") }),
    ask("series", { source, kind: "validation", names: names.validation.join(",") }),
  ]);
  return { train, validation };
}

export function charts(overview, curves, open) {
  const marks = overview.alarms.filter((alarm) => alarm.event === "raised").map((alarm) => alarm.step);
  return PANELS.map((panel) => {
    let lines = wanted(panel, overview.names).map(([name, label]) => ({ name: label, steps: curves.train.steps, values: curves.train.values[name] ?? [] }));
    if (panel.phases || panel.outcomes) {
      const sums = lines.map((line) => line.values.reduce((sum, value) => sum + (value ?? 0), 0)), total = sums.reduce((a, b) => a + b, 0);
      lines = lines.filter((_, at) => sums[at] > total * 0.005).sort((a, b) => sums[lines.indexOf(b)] - sums[lines.indexOf(a)]).slice(0, 6);
    }
    if (panel.phases) lines = windowed(lines, curves.train.steps, median);
    if (panel.outcomes) {
      lines = windowed(lines, curves.train.steps, sum);
      const totals = (lines[0]?.values ?? []).map((_, at) => sum(lines.map((line) => line.values[at])));
      lines = lines.map((line) => ({ ...line, values: line.values.map((value, at) => value / totals[at]) }));
    }
    if (panel.isLag && lines.length === 2) lines = banded(lines, curves.train.steps);
    for (const [name, label] of panel.validation ?? []) if (curves.validation.values[name]) lines.push({ name: label, steps: curves.validation.steps, values: curves.validation.values[name], dots: true });
    if (panel.validationInterval) for (const name of intervals(overview.validation_names)) {
      const of = (end) => curves.validation.values[`${name}${end}`];
      lines.push({ name: name.slice(4), steps: curves.validation.steps, values: of("") ?? [], low: of("/low"), high: of("/high"), dots: true });
    }
    return { ...panel, lines, marks, open, stacked: Boolean(panel.phases || panel.outcomes), bound: panel.isLag ? overview.max_staleness : null };
  }).filter((chart) => chart.lines.some((line) => line.values.some((value) => value !== null)));
}

function figure(name, value, more) {
  return h("div", null, h("dt", null, name), h("dd", { title: `${value}` }, value, more ? h("small", null, ` ${more}`) : null));
}

function figures(overview) {
  const latest = overview.latest, found = [];
  const of = (name) => latest[name] ?? null;
  const isRun = overview.kind === "run";
  if (isRun) found.push(figure("step", number(overview.step), overview.steps ? `of ${number(overview.steps)}` : ""));
  const rewards = of("rollout/reward_mean") ?? of("val/reward_mean");
  if (rewards !== null) found.push(figure("reward", number(rewards, 3)));
  const accuracy = of("rollout/accuracy") ?? of("val/accuracy");
  if (accuracy !== null) found.push(figure("accuracy", `${(accuracy * 100).toFixed(1)} %`));
  if (of("rollout/lag/mean") !== null) found.push(figure("lag", number(of("rollout/lag/mean"), 3), overview.max_staleness === null ? "" : `bound ${overview.max_staleness}`));
  if (overview.version !== null) found.push(figure("version", number(overview.version)));
  if (isRun) found.push(figure("running time", duration(overview.wall_s)));
  if (overview.eta_s !== null) found.push(figure("time left", duration(overview.eta_s)));
  if (overview.publish.seconds !== undefined) found.push(figure("a publish", duration(overview.publish.seconds), [overview.publish.share === undefined ? "" : `${Math.round(overview.publish.share * 100)} % of time`, overview.publish.bytes ? bytes(overview.publish.bytes) : ""].filter(Boolean)[0]));
  return found.length ? h("dl", { class: "figures" }, found) : null;
}

function ledger(overview) {
  const order = ["queued", "leased", "ready", "consumed"];
  const states = order.filter((name) => name in overview.ledger).map((name) => [name, overview.ledger[name]]);
  if (!states.length) return null;
  const words = { queued: "wait to be played again", leased: "are being played", ready: "wait for a batch", consumed: "were trained on" };
  const dropped = Object.entries(overview.dropped).sort((a, b) => b[1] - a[1]);
  const rows = [...states.map(([name, count]) => [name, words[name], count]), ...dropped.map(([reason, count]) => [`dropped`, `because of ${plain(reason).replaceAll("_", " ")}`, count])];
  return h("section", { class: "card" }, h("h2", null, "Groups in the ledger"), h("p", { class: "hint" }, `${number(overview.ledger.drawn ?? 0)} drawn, at the last recorded step`), h("table", null, h("tbody", null, rows.map(([name, what, count]) => h("tr", null, h("td", null, name), h("td", { class: "quiet" }, what), h("td", { class: "num" }, number(count)))))));
}

function servers(overview) {
  if (!overview.servers.length) return null;
  const isOver = overview.state !== "running" && overview.state !== "starting";
  const seen = !isOver ? `as of ${duration(Math.max(0, Date.now() / 1000 - overview.servers_time))} ago` : "as the run last saw them";
  return h("section", { class: "card" }, h("h2", null, "Servers"), h("p", { class: "hint" }, `${seen}; ${number(overview.latest["rollout/in_flight"] ?? null)} attempts at once`), h("div", { class: "wide-table" }, h("table", null, h("thead", null, h("tr", null, ["server", "state", "tokens asked", "restarts"].map((name, at) => h("th", { class: at > 1 ? "num" : null }, name)))), h("tbody", null, overview.servers.map((server) => h("tr", null, h("td", null, plain(server.name), h("div", { class: "quiet small" }, plain(server.message || server.kind))), h("td", null, h("span", { class: `pill ${isOver ? "" : server.state === "ready" ? "good" : "warn"}` }, isOver ? "ended" : server.state)), h("td", { class: "num" }, number(server.outstanding_tokens)), h("td", { class: "num" }, number(server.restarts))))))));
}

function actors(overview) {
  if (!overview.actors.length) return null;
  const isOver = overview.state !== "running" && overview.state !== "starting";
  return h("section", { class: "card" }, h("h2", null, "Rollout actors"), h("p", { class: "hint" }, "by their reports at the last step"), h("div", { class: "wide-table" }, h("table", null, h("thead", null, h("tr", null, ["actor", "state", "in flight", "finished", "restarts"].map((name, at) => h("th", { class: at > 1 ? "num" : null }, name)))), h("tbody", null, overview.actors.map((actor) => h("tr", null, h("td", null, plain(actor.name)), h("td", null, h("span", { class: `pill ${isOver ? "" : actor.state === "playing" ? "good" : "warn"}` }, isOver ? "ended" : plain(actor.state))), h("td", { class: "num" }, number(actor.in_flight)), h("td", { class: "num" }, number(actor.finished)), h("td", { class: "num" }, number(actor.restarts))))))));
}

function problems(source, overview) {
  const found = [];
  if (overview.alarms.length) found.push(h("section", { class: "card" }, h("h2", null, "Alarms"), h("p", { class: "hint" }, "also ticks at the top of each curve"), h("table", null, h("thead", null, h("tr", null, ["step", "alarm", "value"].map((name, at) => h("th", { class: at === 1 ? null : "num" }, name)))), h("tbody", null, overview.alarms.slice(-14).reverse().map((alarm) => h("tr", null, h("td", { class: "num" }, h("a", { href: `#/attempts?source=${source}&f.step=${alarm.step}` }, number(alarm.step))), h("td", null, h("span", { class: `pill ${alarm.event === "raised" ? "warn" : "good"}` }, alarm.event), ` ${plain(alarm.metric)}`, h("div", { class: "quiet small" }, alarm.event === "raised" ? plain(alarm.advice) : null)), h("td", { class: "num" }, number(alarm.value, 3))))))));
  if (overview.failures.length) found.push(h("section", { class: "card" }, h("h2", null, `Failures: ${number(overview.num_failures)}`), h("p", { class: "hint" }, "equal ones together, the most frequent first"), h("table", null, h("tbody", null, overview.failures.map((kind) => h("tr", null, h("td", { class: "num" }, number(kind.count)), h("td", null, h("a", { href: `#/attempts?source=${source}&f.failure=${encodeURIComponent(kind.text.slice(0, 60))}` }, plain(kind.text.slice(0, 180))), h("div", { class: "quiet small" }, [kind.outcome.replace("_", " "), plain(kind.place), Object.entries(kind.became).map(([name, count]) => `${count} ${name.replace("_", " ")}`).join(", "), `steps ${kind.first_step} to ${kind.last_step}`].filter(Boolean).join(" · ")))))))));
  return found;
}

function closing(overview) {
  if (overview.table.length < 2) return null;
  const isNarrow = matchMedia("(max-width: 600px)").matches;
  const [head, ...rows] = isNarrow ? overview.table[0].map((_, at) => overview.table.map((cells) => cells[at])) : overview.table;
  return h("section", { class: "gap" }, h("h2", null, "Validations"), h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Validations", size: { marginTop: "8px" } }, h("table", null, h("thead", null, h("tr", null, head.map((name, at) => h("th", { class: at ? "num" : null }, plain(name))))), h("tbody", null, rows.map((cells) => h("tr", null, cells.map((cell, at) => h("td", { class: at ? "num" : null }, plain(cell)))))))));
}

const STATES = { running: "running", starting: "starting", ended: "ended", stopped: "stopped: the same command resumes it" };

export function drawRun(place, source, overview, curves) {
  const done = overview.steps ? Math.min(1, overview.step / overview.steps) : null;
  const isLive = overview.state === "running" || overview.state === "starting";
  show(place,
    h("div", { class: "row spread" }, h("h1", null, plain(overview.title)), h("span", { class: "quiet" }, h("span", { class: `dot ${isLive ? "on" : ""}` }), overview.kind === "run" ? STATES[overview.state] : overview.kind === "evaluation" ? "evaluation" : "attempts")),
    done === null ? null : h("div", { class: "progress", role: "progressbar", "aria-label": "steps done", "aria-valuenow": Math.round(done * 100), "aria-valuemin": 0, "aria-valuemax": 100 }, h("i", { size: { width: `${done * 100}%` } })),
    figures(overview),
    closing(overview),
    curves.train.steps.length || curves.validation.steps.length ? h("div", { class: "grid" }, charts(overview, curves, (step) => { location.hash = `#/attempts?source=${source}&f.step=${step}`; }).map(drawChart)) : h("p", { class: "quiet pad" }, overview.kind === "run" ? "No step is recorded yet. This page updates by itself." : "Its attempts are under Attempts."),
    h("div", { class: "grid" }, problems(source, overview), ledger(overview), servers(overview), actors(overview)));
}

export async function runPage(place, route) {
  const source = route.source;
  const overview = await ask("overview", { source });
  const curves = await curvesOf(source, overview);
  if (!route.isCurrent()) return;
  document.title = `${overview.title} · agentrl view`;
  drawRun(place, source, overview, curves);
}
