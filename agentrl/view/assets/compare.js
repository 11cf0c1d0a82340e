// Two or more runs, or two evaluations, beside each other.
import { h, show } from "./dom.js";

export async function comparePage(place) {
  show(place, h("h1", null, "Compare"), h("p", { class: "quiet pad" }, "Give two or more runs: agentrl view RUN RUN"));
}
