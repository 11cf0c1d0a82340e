// Questions to the server; in an exported file, answers that it contains.

const held = document.getElementById("answers");
export const exported = held ? JSON.parse(held.textContent) : null;

export class Refused extends Error {}

export function question(name, parameters = {}) {
  const kept = Object.entries(parameters).filter(([, value]) => value !== undefined && value !== null && value !== "");
  kept.sort(([a], [b]) => (a < b ? -1 : a > b ? 1 : 0));
  return `${name}?${new URLSearchParams(kept.map(([key, value]) => [key, String(value)]))}`;
}

export async function ask(name, parameters = {}, signal = undefined) {
  const asked = question(name, exported && name === "series" ? { ...parameters, names: undefined } : parameters);
  if (exported) {
    if (asked in exported.answers) return exported.answers[asked];
    throw new Refused("this exported file does not contain that");
  }
  let reply;
  try {
    reply = await fetch(`api/${asked}`, { signal, cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refused("the command that serves this page has ended; start it again");
  }
  const answer = await reply.json();
  if (!reply.ok) throw new Refused(answer.error ?? `the server answered ${reply.status}`);
  return answer;
}

export function isKnown(name, parameters) {
  return !exported || question(name, parameters) in exported.answers;
}

export function listen(changed, connected) {
  if (exported) return;
  const events = new EventSource("api/events");
  events.addEventListener("hello", () => connected(true));
  events.addEventListener("changed", (event) => changed(JSON.parse(event.data)));
  events.addEventListener("error", () => connected(false));
}
