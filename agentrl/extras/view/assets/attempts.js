// The table of attempts: a line of filters, distributions to click on, pages of rows.
import { h, show, number, plain, outcomePill } from "./dom.js";
import { ask, exported } from "./api.js";

export const PAGE = 50;
const SHOWN = ["step", "task", "outcome", "reward", "margin", "turns", "calls", "sampled", "lag", "agent", "set", "failure"];
const FACETS = ["set", "outcome", "reward", "step", "agent", "source", "tool", "turns", "sampled", "lag"];
const TITLES = { margin: "± group", sampled: "tokens", calls: "calls", failure: "failure", policy: "policy" };

// "step:40 outcome:truncated reward:0..0.5 some words" -> conditions by column
export function parseFilters(line, kinds) {
  const found = {}, words = [];
  for (const part of line.match(/[a-z]+:"[^"]*"|"[^"]*"|\S+/g) ?? []) {
    const [, name, value] = /^([a-z]+):(.*)$/s.exec(part) ?? [];
    if (name && name in kinds && value) found[name] = value.replace(/^"|"$/g, "");
    else words.push(part.replace(/^"|"$/g, ""));
  }
  if (words.length) found.text = words.join(" ");
  return found;
}

export function writeFilters(filters) {
  return Object.entries(filters).filter(([, value]) => value).map(([name, value]) => (name === "text" ? value : `${name}:${/\s/.test(value) ? `"${value}"` : value}`)).join(" ");
}

export function filtersOf(route) {
  return Object.fromEntries([...route.parameters].filter(([name]) => name.startsWith("f.")).map(([name, value]) => [name.slice(2), value]));
}

function asked(route) {
  const own = { source: route.source, sort: route.parameters.get("sort") ?? "" };
  for (const [name, value] of Object.entries(filtersOf(route))) own[`f.${name}`] = value;
  return own;
}

export function attemptLink(source, key, extra = {}) {
  return `#/attempt?${new URLSearchParams({ source, key, ...extra })}`;
}

export function attemptsLink(source, filters) {
  return `#/attempts?${new URLSearchParams({ source, ...Object.fromEntries(Object.entries(filters).map(([name, value]) => [`f.${name}`, value])) })}`;
}

function cell(name, row) {
  const value = row[name];
  if (name === "outcome") return h("td", null, outcomePill(value));
  if (name === "task") return h("td", null, h("a", { href: attemptLink(row.source_number, row.key), tabindex: -1 }, plain(value)));
  if (name === "failure") return h("td", { class: "wide", title: value ? plain(value) : null }, value ? plain(value.slice(0, 200)) : "");
  if (name === "set") return h("td", { class: "quiet" }, plain(row.became ? row.became.replace("_", " ") : row.policy ? `${value}: ${row.policy}` : value));
  if (name === "margin") return h("td", { class: `num ${value > 0 ? "good" : value < 0 ? "bad" : "quiet"}` }, value === null ? "–" : (value > 0 ? "+" : "") + number(value, 3));
  if (typeof value === "number" || value === null) return h("td", { class: "num" }, number(value));
  return h("td", { class: "quiet" }, plain(value));
}

export async function attemptsPage(place, route, columns) {
  const kinds = Object.fromEntries(columns.map((column) => [column.name, column.kind]));
  const meanings = Object.fromEntries(columns.map((column) => [column.name, column.meaning]));
  const sort = route.parameters.get("sort") ?? "";
  const offset = Number(route.parameters.get("offset") ?? 0);
  const filters = filtersOf(route);
  document.title = "Attempts · agentrl view";

  const go = (changes) => {
    const next = new URLSearchParams(route.parameters);
    for (const [name, value] of Object.entries(changes)) if (value === "" || value === null) next.delete(name); else next.set(name, value);
    location.hash = `#/attempts?${next}`;
  };
  const setFilters = (next) => {
    const parameters = new URLSearchParams({ source: route.source });
    if (sort) parameters.set("sort", sort);
    for (const [name, value] of Object.entries(next)) if (value) parameters.set(`f.${name}`, value);
    location.hash = `#/attempts?${parameters}`;
  };

  const line = h("input", { type: "search", id: "filter", "aria-label": "Filter attempts", placeholder: "outcome:truncated step:10..20 reward:..0.5 words in the conversation", value: writeFilters(filters), autocomplete: "off", spellcheck: "false" });
  line.addEventListener("keydown", (event) => { if (event.key === "Enter") { setFilters(parseFilters(line.value, kinds)); line.blur(); } });
  line.addEventListener("search", () => setFilters(parseFilters(line.value, kinds)));
  const count = h("p", { class: "quiet small", "aria-live": "polite", id: "count" }, "searching…");
  const body = h("tbody");
  const pager = h("div", { class: "row" });
  const head = h("tr", null, SHOWN.map((name) => {
    const isNumber = kinds[name] === "number";
    const direction = sort === name ? "ascending" : sort === `-${name}` ? "descending" : null;
    const title = TITLES[name] ?? name;
    return h("th", { class: isNumber ? "num" : null, "aria-sort": direction, scope: "col", title: meanings[name] }, isNumber && !exported ? h("button", { type: "button", onclick: () => go({ sort: direction === "descending" ? name : direction === "ascending" ? "" : `-${name}`, offset: "" }) }, title, direction === "ascending" ? " ↑" : direction === "descending" ? " ↓" : "") : title);
  }));
  const facets = h("div", { class: "facets" });
  const sidebar = h("details", { class: "filters", open: matchMedia("(min-width: 901px)").matches }, h("summary", null, "Distributions"), facets);
  const table = h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Attempts" }, h("table", { class: "rows" }, h("thead", null, head), body));
  show(place, h("div", { class: "row spread" }, h("h1", null, "Attempts"), count), exported ? null : h("div", { size: { marginTop: "12px" } }, line), exported ? h("div", { class: "gap" }, table, pager) : h("div", { class: "explore" }, sidebar, h("div", null, table, pager)));

  const list = { place: body, rows: [], at: -1 };
  route.list = list;
  list.move = (by) => {
    if (list.at + by >= list.rows.length && more()) return go({ offset: offset + PAGE });
    if (list.at + by < 0 && offset) return go({ offset: Math.max(0, offset - PAGE) });
    list.select(Math.min(list.rows.length - 1, Math.max(0, list.at + by)));
  };
  list.select = (at) => {
    list.at = at;
    [...body.children].forEach((row, index) => row.setAttribute("aria-selected", String(index === at)));
    body.children[at]?.scrollIntoView({ block: "nearest" });
  };
  list.open = () => { if (list.rows[list.at]) location.hash = linkOf(list.at); };
  const linkOf = (at) => attemptLink(route.source, list.rows[at].key, { ...Object.fromEntries(Object.entries(filters).map(([name, value]) => [`f.${name}`, value])), ...(sort ? { sort } : {}), at: offset + at });
  let total = 0;
  const more = () => offset + PAGE < total;

  const draw = (page) => {
    total = page.total;
    list.rows = page.rows;
    const range = page.rows.length ? `${number(offset + 1)}–${number(offset + page.rows.length)} of ` : "";
    count.textContent = `${range}${number(page.total)} attempts${page.is_complete ? "" : `, searched ${Math.round((100 * page.searched) / Math.max(1, page.of))} %`}`;
    show(body, page.rows.map((row, at) => h("tr", { "aria-selected": "false", onclick: (event) => { event.preventDefault(); list.at = at; list.open(); } }, SHOWN.map((name) => cell(name, { ...row, source_number: route.source })))));
    if (!page.rows.length) show(body, h("tr", null, h("td", { colspan: SHOWN.length, class: "quiet" }, page.is_complete ? "no attempt passes these filters" : "nothing found yet")));
    show(pager, offset || more() ? [h("button", { type: "button", disabled: !offset, onclick: () => go({ offset: Math.max(0, offset - PAGE) || "" }) }, "← Previous"), h("button", { type: "button", disabled: !more(), onclick: () => go({ offset: offset + PAGE }) }, "Next →")] : null);
    pager.style.marginTop = "12px";
    if (list.at >= 0) list.select(Math.min(list.at, page.rows.length - 1));
  };

  let page;
  do {
    page = await ask("attempts", { ...asked(route), offset, limit: PAGE });
    if (!route.isCurrent()) return;
    draw(page);
  } while (!page.is_complete);
  if (exported) return;
  if (matchMedia("(min-width: 901px)").matches) await drawFacets(); else sidebar.addEventListener("toggle", () => { if (sidebar.open) drawFacets(); }, { once: true });

  async function drawFacets() {
    for (const name of FACETS) {
      let found, before;
      do {
        before = found?.num_rows ?? -1;
        found = await ask("histogram", { ...asked(route), sort: "", column: name });
        if (!route.isCurrent()) return;
      } while (found.num_rows < total && found.num_rows > before);
      const facet = found.labels.length ? choices(name, found) : found.edges.length > 2 ? bars(name, found) : null;
      if (facet) facets.append(facet);
    }
  }

  function choices(name, found) {
    const chosen = (filters[name] ?? "").split(",").filter(Boolean), most = Math.max(...found.counts);
    if (found.labels.length < 2 && !chosen.length && name !== "tool") return null;
    return h("section", { class: "facet" }, h("h3", { title: meanings[name] }, name), found.labels.slice(0, 8).map((label, at) => h("button", { type: "button", class: "choice", "aria-pressed": String(chosen.includes(label)), onclick: () => setFilters({ ...filters, [name]: chosen.includes(label) ? chosen.filter((one) => one !== label).join(",") : [...chosen, label].join(",") }) }, h("span", { title: plain(label) }, plain(label).replaceAll("_", " ")), h("span", { class: "num quiet" }, number(found.counts[at])), h("i", { class: "share", size: { width: `calc(${(found.counts[at] / most) * 100}% - 12px)` } }))));
  }

  function bars(name, found) {
    const most = Math.max(...found.counts), isWhole = found.edges.every((edge) => Math.abs((edge % 1) - 0.5) < 1e-6 || Math.abs((edge % 1) + 0.5) < 1e-6);
    const range = (at) => (isWhole ? [found.edges[at] + 0.5, found.edges[at + 1] - 0.5] : [found.edges[at], found.edges[at + 1]]).map((edge) => Number(edge.toPrecision(6)));
    const text = (at) => { const [low, high] = range(at); return low === high ? String(low) : `${low}..${high}`; };
    return h("section", { class: "facet" }, h("h3", { title: meanings[name] }, TITLES[name] ?? name), h("div", { class: "histogram" }, found.counts.map((many, at) => h("button", { type: "button", "aria-label": `${name} ${text(at)}: ${many} attempts`, title: `${text(at)}: ${number(many)}`, "aria-pressed": String(filters[name] === text(at)), onclick: () => setFilters({ ...filters, [name]: filters[name] === text(at) ? "" : text(at) }) }, h("i", { size: { height: `${many ? Math.max(4, (many / most) * 100) : 0}%` } })))), h("div", { class: "ends" }, h("span", null, number(range(0)[0])), h("span", null, number(range(found.counts.length - 1)[1]))));
  }
}
