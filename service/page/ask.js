// The text box: embeds or classifies one text, and shows why it reused something or not.

import { post, Refused } from "./api.js";
import { byId, make } from "./dom.js";
import { count, digits, percent, seconds } from "./format.js";
import { explanation } from "./explanation.js";

const SHOWN_HEADERS = [
  ["X-AttnCache-Hits", "reused attention maps"],
  ["X-AttnCache-Prototype-Hits", "of a prototype"],
  ["X-AttnCache-Cached-Tokens", "tokens from the prefix store"],
  ["X-AttnCache-Truncated", "too long, and cut"],
];

export class Ask {
  constructor(onKeyNeeded) {
    this.onKeyNeeded = onKeyNeeded;
    this.info = null;
    this.form = byId("form");
    this.form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.#send();
    });
    byId("text").addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) this.form.requestSubmit();
    });
    byId("tasks").addEventListener("change", () => this.#fields());
  }

  /** Offer what the served model can do. */
  describe(info) {
    this.info = info;
    const embeds = info.task === "embed";
    byId("tasks").hidden = !embeds;
    if (!embeds) this.form.elements.task.value = "classify";
    this.#fields();
  }

  get #task() {
    return this.form.elements.task.value;
  }

  #fields() {
    const own = this.info?.labels ?? [];
    byId("labels-field").hidden = this.#task !== "classify";
    byId("labels").required = this.#task === "classify" && own.length === 0;
    byId("labels-optional").textContent = own.length ? `(optional: the model has ${own.length})` : "";
  }

  async #send() {
    const text = byId("text").value;
    byId("send").disabled = true;
    byId("problem").hidden = true;
    byId("explanation").replaceChildren();
    byId("answer").replaceChildren();
    try {
      // First, because the answer to the request below may be kept.
      const explained = this.info?.settings.admin ? await explain(text) : withoutAdmin();
      byId("answer").replaceChildren(...(await this.#answer(text)));
      byId("explanation").replaceChildren(explained);
    } catch (error) {
      byId("problem").hidden = false;
      byId("problem").textContent = error instanceof Refused ? error.message : "The server does not answer.";
      if (error instanceof Refused && error.status === 401) this.onKeyNeeded();
    } finally {
      byId("send").disabled = false;
    }
  }

  async #answer(text) {
    const started = performance.now();
    const labels = byId("labels").value.split(",").map((label) => label.trim()).filter(Boolean);
    const classifies = this.#task === "classify";
    const response = classifies
      ? await post("/classify", { inputs: text, labels: labels.length ? labels : null })
      : await post("/embed", { inputs: text });
    const [result] = await response.json();
    const took = seconds((performance.now() - started) / 1000).join(" ");
    const headers = SHOWN_HEADERS.flatMap(([name, meaning]) => {
      const value = response.headers.get(name);
      return value === null ? [] : [make("span", { title: name }, make("b", { textContent: value }), ` ${meaning}`)];
    });
    return [
      classifies ? scores(result) : embedding(result),
      make("p", { className: "facts" }, make("span", {}, make("b", { textContent: took }), " in this browser"), ...headers),
    ];
  }
}

function embedding(numbers) {
  const largest = Math.max(...numbers.map(Math.abs));
  const canvas = make("canvas", {
    className: "vector", width: numbers.length, height: 41, role: "img",
    "aria-label": `The embedding: ${numbers.length} numbers from ${digits(Math.min(...numbers))} to ${digits(Math.max(...numbers))}`,
  });
  const context = canvas.getContext("2d");
  const style = getComputedStyle(document.documentElement);
  numbers.forEach((number, index) => {
    context.fillStyle = style.getPropertyValue(number < 0 ? "--muted" : "--accent");
    const height = (20 * Math.abs(number)) / largest;
    context.fillRect(index, number < 0 ? 20 : 20 - height, 1, height);
  });
  const shown = numbers.slice(0, 4).map((number) => number.toFixed(4)).join(", ");
  return make("div", {},
    make("h3", { textContent: `Embedding of ${count(numbers.length)} dimensions` }),
    canvas,
    make("p", { className: "remark mono", textContent: `[${shown}, …]` }),
  );
}

function scores(classes) {
  return make("div", {},
    make("h3", { textContent: "Classes, best first" }),
    make("table", { className: "scores" }, make("tbody", {}, ...classes.slice(0, 10).map(({ label, score }) => make("tr", {},
      make("th", { scope: "row", textContent: label }),
      make("td", { className: "bar" }, make("span", { className: "meter" }, make("span", { style: { width: `${100 * score}%` } }))),
      make("td", { textContent: percent(score, 1) }),
    )))),
  );
}

/** Explain the text. A refusal, such as of a key without the word admin, is a remark: the text is answered all the same. */
async function explain(text) {
  try {
    return explanation(await (await post("/explain", { input: text })).json());
  } catch (error) {
    if (!(error instanceof Refused) || error.status === 401) throw error;
    return make("p", { className: "remark", textContent: `No explanation: ${error.message}` });
  }
}

function withoutAdmin() {
  return make("p", { className: "remark" }, "A server that was started with ", make("code", { textContent: "--admin" }), " also explains here why a text reuses something or not, with both attention maps.");
}
