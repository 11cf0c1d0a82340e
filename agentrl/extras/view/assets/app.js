// Routes, keys and the header. The part of the address after # says what is shown, so each view is a link.
import { h, show, say } from "./dom.js";
import { ask, exported, listen } from "./api.js";
import { runPage } from "./run.js";
import { attemptsPage } from "./attempts.js";
import { attemptPage } from "./attempt.js";
import { comparePage } from "./compare.js";

const main = document.getElementById("main"), bar = document.getElementById("top");
const THEMES = ["auto", "light", "dark"];
let known = null, route = null, live = null;

function remembered(name) {
  try { return localStorage.getItem(name); } catch { return null; }
}

function setTheme(theme) {
  if (theme === "auto") document.documentElement.removeAttribute("data-theme"); else document.documentElement.setAttribute("data-theme", theme);
  try { localStorage.setItem("theme", theme); } catch { /* a file's page may keep nothing */ }
}

function header() {
  const links = [["run", "Run"], ["attempts", "Attempts"], ...(known.sources.length > 1 ? [["compare", "Compare"]] : [])];
  const current = route.page === "attempt" ? "attempts" : route.page;
  const select = known.sources.length > 1 && current !== "compare" ? h("select", { "aria-label": "Run", onchange: (event) => { location.hash = `#/${current}?source=${event.target.value}`; } }, known.sources.map((source, number) => h("option", { value: number, selected: number === route.source }, source.title))) : null;
  const theme = remembered("theme") ?? "auto";
  show(bar, h("div", { class: "bar" },
    h("a", { class: "brand", href: `#/run?source=${route.source}` }, "agentrl ", h("span", null, "view")),
    h("nav", { "aria-label": "Pages" }, links.map(([page, title]) => h("a", { href: `#/${page}?source=${route.source}`, "aria-current": page === current ? "page" : null }, title))),
    h("div", { class: "right" }, select,
      exported ? h("span", { class: "pill" }, "exported") : h("span", { class: "quiet small hide-small", id: "live" }, h("span", { class: `dot ${live === false ? "off" : ""}` }), live === false ? "not connected" : "connected"),
      h("button", { type: "button", class: "plain", "aria-label": `theme: ${theme}`, title: `theme: ${theme}`, onclick: () => { setTheme(THEMES[(THEMES.indexOf(theme) + 1) % 3]); header(); } }, theme === "dark" ? "◐" : theme === "light" ? "○" : "◑"),
      h("button", { type: "button", class: "plain", "aria-label": "help", title: "keys: ?", onclick: help }, "?"))));
}

function help() {
  const keys = [["j k", "next, previous attempt (also arrow keys in the table)"], ["enter", "open the selected attempt"], ["/", "filter"], ["g r", "the run"], ["g a", "the attempts"], ["g c", "compare"], ["1 – 4", "conversation, tokens, group, facts"], ["u", "back to the table"], ["?", "this list"]];
  const columns = known.columns.map((column) => [column.name, column.meaning]);
  const dialog = h("dialog", { "aria-label": "Help" }, h("div", { class: "row spread" }, h("h2", null, "Keys"), h("button", { type: "button", class: "plain", "aria-label": "close", onclick: () => dialog.close() }, "×")),
    h("dl", null, keys.map(([key, what]) => [h("dt", null, key.split(" ").map((one) => [h("kbd", null, one), " "])), h("dd", null, what)])),
    h("h2", { class: "gap" }, "Filters"), h("p", { class: "small quiet" }, "column:value, several together; 3..5 and ..5 are ranges, a,b are choices, other words are searched in the conversation"),
    h("dl", { class: "small" }, columns.map(([name, what]) => [h("dt", { class: "mono" }, name), h("dd", { class: "quiet" }, what)])));
  dialog.addEventListener("close", () => dialog.remove());
  document.body.append(dialog);
  dialog.showModal();
}

function read() {
  const [page, query] = location.hash.replace(/^#\/?/, "").split("?");
  const parameters = new URLSearchParams(query ?? "");
  const source = Math.min(Number(parameters.get("source") ?? 0) || 0, known.sources.length - 1);
  const next = { page: ["run", "attempts", "attempt", "compare"].includes(page) ? page : known.start, parameters, source, list: null };
  next.isCurrent = () => route === next;
  return next;
}

async function draw(isUpdate = false) {
  const place = isUpdate ? main : h("div");
  route = read();
  header();
  if (!isUpdate) { scrollTo(0, 0); }
  try {
    if (route.page === "run") await runPage(place, route);
    else if (route.page === "attempts") await attemptsPage(isUpdate ? place : main, route, known.columns);
    else if (route.page === "attempt") await attemptPage(place, route, known.can_compute);
    else await comparePage(place, route, known);
  } catch (error) {
    if (!route.isCurrent()) return;
    show(place, h("h1", null, "That did not work"), h("p", { class: "note bad gap" }, error.message));
    if (!(error instanceof Error)) throw error;
  }
  if (place !== main && route.page !== "attempts") main.replaceChildren(...place.childNodes);
  main.dataset.drawn = location.hash;
}

let pending = "";
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName) || document.querySelector("dialog[open]")) {
    if (event.key === "Escape") event.target.blur?.();
    return;
  }
  const list = route?.list, both = pending + event.key;
  pending = event.key === "g" ? "g" : "";
  const go = { gr: "run", ga: "attempts", gc: "compare" }[both];
  if (go) location.hash = `#/${go}?source=${route.source}`;
  else if (event.key === "?") help();
  else if (event.key === "/") { event.preventDefault(); const filter = document.getElementById("filter"); if (filter) filter.focus(); else location.hash = `#/attempts?source=${route.source}`; }
  else if (list && (event.key === "j" || event.key === "k")) list.move(event.key === "j" ? 1 : -1);
  else if (list && event.key === "Enter" && !/^(A|BUTTON|SUMMARY)$/.test(event.target.tagName)) list.open();
  else if (route.page === "attempt" && "1234".includes(event.key)) document.querySelectorAll("[role=tab]")[Number(event.key) - 1]?.click();
  else if (route.page === "attempt" && event.key === "u") document.querySelector("main a")?.click();
});

async function update(changed) {
  const parts = changed[String(route.source)] ?? [];
  if (route.page === "run" && parts.length) await draw(true);
  else if (route.page === "attempts" && parts.includes("attempts") && !document.querySelector("#filter:focus")) say("new attempts; press enter in the filter or reload to see them");
}

setTheme(remembered("theme") ?? "auto");
try {
  known = await ask("sources");
  known.start = known.sources[0].kind === "run" || exported ? "run" : "attempts";
  await draw();
  addEventListener("hashchange", () => draw());
  listen(update, (isOn) => { if (live !== isOn) { live = isOn; header(); } });
} catch (error) {
  show(main, h("p", { class: "note bad" }, error.message));
}
