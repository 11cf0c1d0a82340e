// One attempt: the conversation, its tokens, its group, and what else is known.
import { h, show, add, seen, plain, number, duration, outcomePill, copy, say, tabs } from "./dom.js";
import { ask, exported, isKnown } from "./api.js";
import { attemptLink } from "./attempts.js";

const TABS = { conversation: "Conversation", tokens: "Tokens", group: "Group", facts: "Facts" };
const COLORS = { mask: "sampled or context", logprob: "log-probability", ratio: "importance ratio", lag: "lag", version: "version", turn: "turn", advantage: "advantage" };
const COUNT = 4000;

function text(source, key, shown, where) {
  const place = h("span", { class: "said", dir: "auto" }, seen(shown.text));
  if (shown.text.length >= shown.chars) return place;
  let done = shown.text.length;
  const more = h("button", { type: "button", class: "plain small" }, `show more of ${number(shown.chars)} characters`);
  more.addEventListener("click", async () => {
    const next = await ask("text", { source, key, ...where, start: done });
    add(place, seen(next.text));
    done += next.text.length;
    if (done >= next.chars || !next.text.length) more.remove();
  });
  return [place, " ", exported ? h("span", { class: "quiet small" }, `… ${number(shown.chars)} characters`) : more];
}

function call(source, key, message, one, at) {
  return h("div", { class: "call" }, h("div", null, "calls ", h("b", null, plain(one.name || "?")), one.error ? h("span", { class: "bad" }, ` — ${plain(one.error)}`) : null), one.arguments ? h("pre", null, text(source, key, one.arguments, { message, part: "arguments", call: at })) : null);
}

export function turnElement(source, attempt, message, differs = false) {
  const rewards = attempt.rewards.filter((reward) => message.turn !== null && reward.turn === message.turn);
  const isSampled = message.turn !== null;
  const who = message.role === "tool" ? plain(message.name ?? "") : isSampled ? `turn ${message.turn + 1}` : message.role === "assistant" ? "of the prompt" : "";
  return h("article", { class: `turn ${["system", "user", "assistant", "tool"].includes(message.role) ? message.role : ""} ${differs ? "differs" : ""}` },
    h("div", { class: "who" }, h("b", null, plain(message.role)), who ? h("span", null, ` ${who}`) : null, rewards.map((reward) => h("div", null, h("span", { class: `pill ${reward.value > 0 ? "good" : reward.value < 0 ? "bad" : ""}`, title: `on token ${reward.position}` }, `${plain(reward.name)} ${number(reward.value, 3)}`)))),
    h("div", null,
      message.reasoning.chars ? h("details", { open: message.reasoning.chars < 1200 }, h("summary", null, `thinking, ${number(message.reasoning.chars)} characters`), h("div", { class: "thought" }, text(source, attempt.key, message.reasoning, { message: message.index, part: "reasoning" }))) : null,
      message.content.chars || !(message.calls.length || message.reasoning.chars) ? h("div", null, message.content.chars ? text(source, attempt.key, message.content, { message: message.index, part: "content" }) : h("span", { class: "quiet" }, "(empty)")) : null,
      message.calls.map((one, at) => call(source, attempt.key, message.index, one, at))));
}

function why(attempt) {
  if (!attempt.failure) return null;
  const failure = attempt.failure;
  return h("div", { class: "note bad gap" }, h("b", null, attempt.outcome.replace("_", " "), failure.plugin ? ` in ${plain(failure.plugin)}` : ""), h("p", { class: "said" }, seen(failure.text)), failure.place ? h("p", { class: "mono small" }, plain(failure.place)) : null, failure.traceback ? h("details", null, h("summary", null, "traceback"), h("pre", { class: "small said" }, seen(failure.traceback))) : null);
}

function times(attempt) {
  const parts = [["generation", "generate_s"], ["tools", "tool_s"], ["partner", "interaction_s"], ["reward", "reward_s"]].map(([name, key]) => [name, attempt.metrics[key] ?? 0]).filter(([, seconds]) => seconds > 0);
  const total = parts.reduce((sum, [, seconds]) => sum + seconds, 0);
  if (!total) return null;
  return h("div", { class: "gap", role: "img", "aria-label": `time: ${parts.map(([name, seconds]) => `${name} ${duration(seconds)}`).join(", ")}` }, h("div", { class: "parts" }, parts.map(([, seconds], at) => h("i", { class: `k${at}`, size: { width: `${(100 * seconds) / total}%` } }))), h("div", { class: "legend" }, parts.map(([name, seconds], at) => h("span", { class: `k${at}` }, h("i"), `${name} `, h("b", null, duration(seconds))))));
}

function figures(attempt) {
  const own = attempt.siblings.find((sibling) => sibling.key === attempt.key);
  const found = [
    ["reward", number(attempt.reward, 4), own && own.margin !== null ? `${own.margin >= 0 ? "+" : ""}${number(own.margin, 3)} in its group` : ""],
    ["turns", number(attempt.metrics.num_turns ?? null), attempt.metrics.num_tool_calls ? `${number(attempt.metrics.num_tool_calls)} ${attempt.metrics.num_tool_calls === 1 ? "call" : "calls"}` : ""],
    ["tokens", number(attempt.num_tokens), `${number(attempt.num_sampled)} sampled`],
    ["versions", attempt.versions.join(", ") || "–", attempt.learned_by === null ? "" : `trained by ${attempt.learned_by}`],
  ];
  return h("dl", { class: "figures" }, found.map(([name, value, more]) => h("div", null, h("dt", null, name), h("dd", { title: `${value} ${more}` }, value, more ? h("small", null, ` ${more}`) : null))));
}

function conversation(source, attempt) {
  const names = [...new Set(attempt.messages.map((message) => message.conversation))];
  const heading = (message, at) => message.conversation !== null && message.conversation !== attempt.messages[at - 1]?.conversation ? h("h2", null, `Conversation ${plain(message.conversation)}`) : null;
  const forks = names.length > 1 ? h("p", { class: "note gap" }, `${names.length} conversations: ${names.map(plain).join(", ")}. Segments with turns ${attempt.segments.map((segment) => `${plain(segment.conversation)} ${segment.turns.map((turn) => turn + 1).join(", ")}`).join(" | ")}.`) : attempt.segments.length > 1 ? h("p", { class: "note gap" }, `The history was edited: ${attempt.segments.length} segments, with turns ${attempt.segments.map((segment) => segment.turns.map((turn) => turn + 1).join(", ") || "–").join(" | ")}. Each was trained on as its own row.`) : null;
  return [times(attempt), forks, h("div", { class: "turns" }, attempt.messages.map((message, at) => [heading(message, at), turnElement(source, attempt, message)])), attempt.messages.length ? null : h("p", { class: "quiet pad" }, "Only the report of this failure was kept; it was " + plain(attempt.became ?? "").replace("_", " ") + ".")];
}

// ---------------------------------------------------------------------------------------------------- tokens

function shade(color, tokens, at, context) {
  const value = { mask: tokens.mask[at], logprob: tokens.logprobs[at], ratio: tokens.ratios?.[at], version: tokens.versions[at], turn: tokens.turns[at], advantage: tokens.advantages?.[at] }[color];
  if (!tokens.mask[at]) return "context";
  if (color === "mask") return "m1";
  if (color === "logprob") return `s${Math.min(5, Math.floor(Math.sqrt(-value) * 2.2))}`;
  if (color === "turn") return `v${value % 6}`;
  if (color === "version") return `v${(value - context.versions[0]) % 6}`;
  if (color === "lag") return context.learned_by === null ? "z" : `s${Math.min(5, context.learned_by - tokens.versions[at])}`;
  if (color === "ratio") return ratioShade(value);
  if (value === undefined || value === 0) return "z";
  return `${value > 0 ? "p" : "n"}${Math.min(3, Math.max(1, Math.ceil(Math.abs(value) * 1.5)))}`;
}

function ratioShade(ratio) {
  const far = ratio === null || ratio === undefined ? 0 : Math.abs(Math.log(ratio));
  const level = [0.05, 0.2, 0.69].filter((bound) => far > bound).length;
  return level ? `${ratio > 1 ? "p" : "n"}${level}` : "z";
}

function scale(color, context, hasRatios) {
  const boxes = {
    mask: [["m1", "sampled by the policy"], ["context", "context: prompt, tools, partner"]],
    logprob: [["s0", "p > 0.8"], ["s1", "0.8–0.4"], ["s2", "–0.16"], ["s3", "–0.04"], ["s4", "–0.006"], ["s5", "less"]],
    ratio: [["n3", "below 0.5"], ["n2", "–0.82"], ["n1", "–0.95"], ["z", "about 1, or not learned from"], ["p1", "1.05–1.22"], ["p2", "–2"], ["p3", "above 2"]],
    lag: context.learned_by === null ? [["z", "no step has trained on it"]] : [["s0", "0"], ["s1", "1"], ["s2", "2"], ["s3", "3"], ["s4", "4"], ["s5", "5 or more versions"]],
    version: context.versions.map((version) => [`v${(version - context.versions[0]) % 6}`, String(version)]),
    turn: [["v0", "1"], ["v1", "2"], ["v2", "3"], ["v3", "4"], ["v4", "5"], ["v5", "6"]],
    advantage: [["n3", "below −1.3"], ["n1", "below 0"], ["z", "0"], ["p1", "above 0"], ["p3", "above 1.3"]],
  }[color];
  const note = color === "logprob" ? h("p", { class: "small quiet" }, `Of the server that sampled.${hasRatios ? "" : " A run with tracking.token_ratios=true stores the learner's, too."}`) : null;
  return [h("div", { class: "scale" }, boxes.map(([kind, label]) => h("span", { class: kind }, label))), note];
}

function visibleToken(value) {
  return value.replace(/\n/g, "⏎\n").replace(/\t/g, "⇥\t");
}

async function tokensTab(place, source, attempt, route, canCompute) {
  const state = { color: route.parameters.get("color") ?? "mask", parts: [] };
  const stream = h("div", { class: "tokens", tabindex: 0, role: "group", "aria-label": "Tokens; arrow keys move, numbers are shown beside" });
  const bar = h("div", { class: "row", size: { marginTop: "16px" } });
  const key = h("div", { size: { marginTop: "8px" } });
  const tip = h("div", { class: "tip", hidden: true });
  const rewards = new Map(attempt.rewards.map((reward) => [reward.position, reward]));
  const starts = new Set(attempt.segments.slice(1).map((segment) => segment.start));
  let selected = null;

  const load = async (start, advantages) => ask("tokens", { source, key: attempt.key, start, count: COUNT, advantages: advantages ? 1 : undefined });
  const draw = () => {
    tip.hidden = true;
    selected = null;
    const names = Object.entries(COLORS).filter(([name]) => name === "ratio" ? state.parts[0]?.ratios : name !== "advantage" || (canCompute && !exported) || state.parts[0]?.advantages);
    show(bar, h("span", { class: "quiet small" }, "colour by"), names.map(([name, label]) => h("button", { type: "button", "aria-pressed": String(name === state.color), onclick: () => recolor(name) }, label)), h("button", { type: "button", onclick: prompt }, "the exact prompt"));
    show(key, scale(state.color, attempt, Boolean(state.parts[0]?.ratios)));
    const spans = state.parts.flatMap((part) => part.ids.map((id, at) => {
      const position = part.start + at;
      const kind = [shade(state.color, part, at, attempt), part.special.includes(at) ? "special" : "", rewards.has(position) ? "rewarded" : "", starts.has(position) ? "forked" : ""].join(" ");
      return h("span", { class: kind, "data-at": position }, part.texts ? seen(visibleToken(part.texts[at])) : `${id} `);
    }));
    show(stream, spans);
    const last = state.parts.at(-1), done = last.start + last.ids.length;
    if (done < last.total && exported) stream.append(h("p", { class: "quiet small" }, `… ${number(last.total)} tokens in all`));
    else if (done < last.total) stream.append(h("button", { type: "button", onclick: async () => { state.parts.push(await load(done, state.color === "advantage")); draw(); } }, `show more of ${number(last.total)} tokens`));
  };
  const recolor = async (name) => {
    if (name === "advantage" && !state.parts[0].advantages) {
      say("computing the step's advantages…");
      try { state.parts = [await load(0, true)]; say(""); } catch (error) { say(error.message); return; }
    }
    state.color = name;
    draw();
  };
  const prompt = async () => {
    const found = await ask("prompt", { source, key: attempt.key });
    show(stream, h("p", { class: "quiet small" }, "what the model read before its first turn, special tokens included"), seen(found.text), h("p", null, h("button", { type: "button", onclick: draw }, "back to the tokens")));
  };
  const tell = (element) => {
    if (selected) selected.classList.remove("at");
    selected = element;
    if (!element) { tip.hidden = true; return; }
    element.classList.add("at");
    const position = Number(element.dataset.at), part = state.parts.findLast((one) => one.start <= position), at = position - part.start;
    const logprob = part.logprobs[at], reward = rewards.get(position);
    const facts = [["token", position], ["id", part.ids[at]], ["text", part.texts ? JSON.stringify(plain(part.texts[at])) : "–"], ["kind", part.mask[at] ? `sampled, turn ${part.turns[at] + 1}` : "context"]];
    if (part.mask[at]) facts.push(["log-probability", number(logprob, 5)], ["probability", number(Math.exp(logprob), 4)], ["version", part.versions[at]], ["lag", attempt.learned_by === null ? "not trained on" : attempt.learned_by - part.versions[at]]);
    if (part.advantages && part.mask[at]) facts.push(["advantage", number(part.advantages[at], 4)]);
    if (part.ratios && part.ratios[at] !== null) facts.push(["proximal / behavior", number(part.ratios[at], 4)]);
    if (reward) facts.push([`reward ${plain(reward.name)}`, number(reward.value, 4)]);
    show(tip, h("dl", null, facts.map(([name, value]) => [h("dt", null, name), h("dd", null, value)])));
    tip.hidden = false;
    const box = element.getBoundingClientRect();
    tip.style.left = `${Math.max(8, Math.min(box.left, innerWidth - tip.offsetWidth - 8))}px`;
    tip.style.top = `${box.bottom + 6 + tip.offsetHeight > innerHeight ? box.top - tip.offsetHeight - 6 : box.bottom + 6}px`;
  };
  stream.addEventListener("pointerover", (event) => { const token = event.target.closest?.("[data-at]"); if (token) tell(token); });
  stream.addEventListener("pointerleave", () => tell(null));
  stream.addEventListener("blur", () => tell(null));
  stream.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    event.preventDefault();
    const next = selected ? (step > 0 ? selected.nextElementSibling : selected.previousElementSibling) : stream.firstElementChild;
    if (next?.dataset.at) { tell(next); next.scrollIntoView({ block: "nearest" }); }
  });
  show(place, bar, key, stream, tip);
  if (!attempt.has_tokens) { show(place, h("p", { class: "quiet pad" }, "The tokens of this attempt were not kept.")); return; }
  state.parts = [await load(0, false)];
  if (state.color === "advantage") await recolor("advantage"); else draw();
}

// ----------------------------------------------------------------------------------------------------- group

function outcomeOf(sibling) {
  return [outcomePill(sibling.outcome), sibling.is_greedy ? h("span", { class: "pill accent" }, "greedy") : null];
}

async function groupTab(place, source, attempt, route) {
  if (!attempt.siblings.length) { show(place, h("p", { class: "quiet pad" }, "Its group was not kept.")); return; }
  const rewards = attempt.siblings.map((sibling) => sibling.reward).filter((reward) => reward !== null), best = Math.max(...rewards);
  const spread = rewards.length && Math.min(...rewards) !== best;
  const other = route.parameters.get("beside");
  const side = h("div", { class: "gap" });
  const rows = attempt.siblings.map((sibling) => {
    const isOwn = sibling.key === attempt.key, isHere = isKnown("attempt", { source, key: sibling.key });
    return h("tr", { class: spread && sibling.reward === best ? "won" : null },
      h("td", { class: "num" }, isOwn || !isHere ? h("b", null, sibling.member) : h("a", { href: attemptLink(source, sibling.key, { tab: "group" }) }, sibling.member)),
      h("td", null, outcomeOf(sibling)), h("td", { class: "num" }, number(sibling.reward, 3)),
      h("td", { class: `num ${sibling.margin > 0 ? "good" : sibling.margin < 0 ? "bad" : "quiet"}` }, sibling.margin === null ? "–" : (sibling.margin > 0 ? "+" : "") + number(sibling.margin, 3)),
      h("td", { class: "num" }, number(sibling.num_turns)), h("td", { class: "num" }, number(sibling.num_sampled)),
      h("td", { class: "said quiet" }, seen(sibling.last)),
      h("td", null, isOwn ? h("span", { class: "quiet nowrap" }, "this one") : sibling.differs_at === null ? h("span", { class: "quiet nowrap" }, "the same words") : !isHere ? null : h("button", { type: "button", class: "small", "aria-pressed": String(other === sibling.key), onclick: () => beside(sibling) }, "beside")));
  });
  show(place, h("p", { class: "small quiet gap" }, spread ? "A group is compared with itself: the policy learns from what is above and below its mean. The best are marked." : "All rewards of this group are equal, so an estimator that compares within groups learns nothing from it."),
    h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "The group", size: { marginTop: "8px" } }, h("table", null, h("thead", null, h("tr", null, ["member", "outcome", "reward", "± group", "turns", "tokens", "last words", ""].map((name, at) => h("th", { class: [0, 2, 3, 4, 5].includes(at) ? "num" : null }, name)))), h("tbody", null, rows))), side);
  async function beside(sibling) {
    const found = await ask("attempt", { source, key: sibling.key });
    const column = (one, title) => h("div", null, h("h2", null, title, " ", outcomePill(one.outcome), ` ${number(one.reward, 3)}`), h("div", { class: "turns" }, one.messages.map((message) => turnElement(source, one, message, message.index === sibling.differs_at))));
    show(side, h("p", { class: "small quiet" }, `They differ from message ${sibling.differs_at + 1} on.`), h("div", { class: "beside", size: { marginTop: "8px" } }, column(attempt, `member ${attempt.member}`), column(found, `member ${found.member}`)));
  }
  const chosen = attempt.siblings.find((sibling) => sibling.key === other) ?? attempt.siblings.find((sibling) => sibling.differs_at !== null && sibling.reward !== null && sibling.reward !== attempt.reward && isKnown("attempt", { source, key: sibling.key }));
  if (chosen && chosen.differs_at !== null) await beside(chosen);
}

async function factsTab(place, source, attempt) {
  const rows = [["task", attempt.task], ["data source", attempt.source], ["agent", attempt.agent], ["group", attempt.group], ["member", attempt.member], ["file", attempt.key], ["step", attempt.step]];
  const metrics = Object.entries(attempt.metrics).sort(([a], [b]) => (a < b ? -1 : 1));
  const box = h("div");
  show(place, h("div", { class: "grid" },
    h("section", { class: "card" }, h("h2", null, "Which attempt"), h("table", null, h("tbody", null, rows.map(([name, value]) => h("tr", null, h("td", { class: "quiet" }, name), h("td", { class: "said" }, plain(value ?? "–"))))))),
    h("section", { class: "card" }, h("h2", null, "Metrics"), h("table", null, h("tbody", null, metrics.map(([name, value]) => h("tr", null, h("td", { class: "quiet" }, plain(name)), h("td", { class: "num" }, number(value))))))),
    h("section", { class: "card" }, h("h2", null, "Row and reward details"), h("pre", { class: "box small", tabindex: 0 }, seen(attempt.extra)))), box);
  if (exported || !attempt.has_tokens) return;
  const found = await ask("script", { source, key: attempt.key });
  show(box, h("div", { class: "grid" }, [["Play it again", "agentrl play CONFIG --row N --model turns.yaml", found.script, "script"], ["As a test", "a file for pytest", found.test, "test"]].map(([title, hint, code, what]) => h("section", { class: "card" }, h("div", { class: "row spread" }, h("h2", null, title), h("button", { type: "button", class: "small", onclick: () => copy(code, what) }, "Copy")), h("p", { class: "hint" }, hint), h("pre", { class: "box small", tabindex: 0 }, seen(code))))));
}

export async function attemptPage(place, route, canCompute) {
  const source = route.source, key = route.parameters.get("key") ?? "";
  const attempt = await ask("attempt", { source, key });
  if (!route.isCurrent()) return;
  document.title = `${plain(attempt.task)} · agentrl view`;
  const at = Number(route.parameters.get("at") ?? NaN);
  const query = () => Object.fromEntries([...route.parameters].filter(([name]) => name.startsWith("f.") || name === "sort"));
  const step = async (by) => {
    if (Number.isNaN(at) || at + by < 0 || exported) return;
    const page = await ask("attempts", { source, ...query(), offset: at + by, limit: 1 });
    if (page.rows.length) location.hash = attemptLink(source, page.rows[0].key, { ...query(), at: at + by, ...(route.parameters.get("tab") ? { tab: route.parameters.get("tab") } : {}) });
  };
  route.list = { move: step, open: () => {} };
  const back = new URLSearchParams({ source, ...query(), ...(at >= 50 ? { offset: Math.floor(at / 50) * 50 } : {}) });
  const current = route.parameters.get("tab") ?? "conversation";
  const body = h("div", { role: "tabpanel", "aria-labelledby": `tab-${current}` });
  const choose = (name) => { const next = new URLSearchParams(route.parameters); next.set("tab", name); location.hash = `#/attempt?${next}`; };
  const where = [attempt.step === null ? null : `step ${attempt.step}`, attempt.policy ? `${attempt.set} of ${plain(attempt.policy)}` : attempt.set, plain(attempt.source), plain(attempt.agent), `group ${attempt.group}, member ${attempt.member}`].filter(Boolean).join(" · ");
  show(place,
    h("div", { class: "row spread" }, h("a", { href: `#/attempts?${back}`, class: "small" }, "← Attempts"), Number.isNaN(at) || exported ? null : h("span", { class: "row small" }, h("button", { type: "button", class: "plain", "aria-label": "previous attempt", title: "previous attempt (key k)", onclick: () => step(-1) }, "↑ previous"), h("button", { type: "button", class: "plain", "aria-label": "next attempt", title: "next attempt (key j)", onclick: () => step(1) }, "↓ next"))),
    h("div", { class: "row", size: { marginTop: "6px" } }, h("h1", null, plain(attempt.task)), outcomePill(attempt.outcome), attempt.is_greedy ? h("span", { class: "pill accent" }, "greedy") : null),
    h("p", { class: "quiet small" }, where), why(attempt), attempt.has_tokens ? figures(attempt) : null,
    tabs(TABS, current, choose, "Views of the attempt"), body);
  if (current === "tokens") await tokensTab(body, source, attempt, route, canCompute && attempt.set === "training");
  else if (current === "group") await groupTab(body, source, attempt, route);
  else if (current === "facts") await factsTab(body, source, attempt);
  else show(body, conversation(source, attempt));
}
