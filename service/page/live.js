// The live numbers: reads /metrics every second while the page is visible.

import { read, Refused } from "./api.js";
import { LineChart } from "./charts.js";
import { byId, make, show } from "./dom.js";
import { amount, bytes, count, duration, NONE, percent, seconds, short } from "./format.js";
import { percentile, Scrape } from "./metrics.js";

const EVERY_MS = 1000;
const INFO_EVERY_MS = 10_000;
const CHART_POINTS = 180;
const RATE_MS = 5_000;
const LATENCY_MS = 10_000;
const MINUTE_MS = 60_000;

const NAMES = [
  ...["request_seconds_bucket", "request_seconds_count", "requests_total", "sequences_total", "tokens_total"],
  ...["repeated_sequences_total", "queue_sequences", "queue_tokens", "results_bytes", "sessions"],
];
const QUERY = NAMES.map((name) => `name[]=attncache_${name}`).join("&");

// Routes that compute nothing for a client. All others are for inference.
const OPERATORS_ROUTES =
  /^(other|\/health|\/ready|\/info|\/metrics|\/docs|\/openapi\.json|\/v1\/models(\/.*)?|\/explain|\/cache(\/.*)?)$/;
const isInference = ({ route }) => !OPERATORS_ROUTES.test(route);
const hasFailed = (labels) => isInference(labels) && labels.status >= "400";

// What became of a text: the outcome in the metrics, its name here, and what it means.
const OUTCOMES = [
  ["known", "Result known", "the same text was computed before, or for another request at the same time"],
  ["hit", "Hit, recorded text", "took the attention maps of a recorded text"],
  ["prototype_hit", "Hit, prototype", "took the attention maps of a prototype"],
  ["miss", "Miss", "computed in full: no record is near enough"],
  ["unfamiliar", "Unfamiliar", "computed in full: unlike the texts that the budget was measured on"],
  ["cannot_pay", "Does not pay", "computed in full: reuse saves too little at its length"],
  ["cold", "Not in memory", "computed in full: the maps of its record take longer to read than a hit saves"],
  ["not_searched", "Not searched", "computed in full: nothing can be reused, or reuse was declined"],
];

export class Live {
  constructor(onInfo) {
    this.onInfo = onInfo;
    this.scrapes = [];
    this.paused = false;
    this.stopped = false; // until a key is given
    this.timer = null;
    this.infoAt = -Infinity;
    this.info = null;
    const chart = (id, classes, format) => new LineChart(byId(id), classes, CHART_POINTS, format);
    this.charts = {
      texts: chart("chart-texts", ["a"], (value) => `${short(value)}/s`),
      tokens: chart("chart-tokens", ["a", "b"], (value) => `${short(value)}/s`),
      latency: chart("chart-latency", ["a", "b", "c"], duration),
      queue: chart("chart-queue", ["a"], short),
    };
    byId("outcomes").append(...OUTCOMES.map((outcome) => row(...outcome)));
    byId("outcome-bar").append(...OUTCOMES.map(([name]) => make("span", { className: `part ${name}` })));
    document.addEventListener("visibilitychange", () => this.start());
  }

  /** Poll from now on, unless the page is hidden or paused. */
  start() {
    clearTimeout(this.timer);
    this.timer = null;
    if (this.paused || this.stopped || document.hidden) {
      if (this.paused) this.#state("paused", "paused");
      return;
    }
    this.#poll();
  }

  pause(paused) {
    this.paused = paused;
    this.start();
  }

  /** Poll again after a key was given. */
  resume() {
    this.stopped = false;
    this.infoAt = -Infinity;
    this.start();
  }

  async #poll() {
    const started = performance.now();
    try {
      if (started - this.infoAt >= INFO_EVERY_MS) await this.#readInfo(started);
      const response = await read(`/metrics?${QUERY}`);
      this.#take(new Scrape(await response.text(), started));
      this.#state("live", "live");
    } catch (error) {
      this.#fail(error);
    }
    // A request that was sent before the page was hidden or paused begins no further one.
    if (this.paused || this.stopped || document.hidden || this.timer !== null) return;
    this.timer = setTimeout(() => this.start(), Math.max(0, EVERY_MS - (performance.now() - started)));
  }

  async #readInfo(now) {
    try {
      this.info = await (await read("/info")).json();
      this.infoAt = now;
      this.onInfo(this.info);
      this.#stores();
    } catch (error) {
      // While the model is loading, the metrics are there already.
      if (!(error instanceof Refused) || error.status !== 503) throw error;
    }
  }

  #fail(error) {
    const status = error instanceof Refused ? error.status : 0;
    this.stopped = [401, 403, 404].includes(status);
    if (status === 401) this.onKeyNeeded?.();
    const texts = {
      401: "The server asks for an API key.",
      403: "This key may not read the numbers of the server; a key of an operator may. The text box works with every key.",
      404: "The numbers are on the admin port of the server. The text box works here too.",
      0: "The server does not answer. Trying again.",
    };
    this.#state("failed", status === 0 ? "no answer" : "no numbers", texts[status] ?? error.message);
  }

  #state(state, text, notice = "") {
    byId("state").dataset.state = state;
    show("state", text === "live" && this.info === null ? "loading" : text);
    byId("notice").hidden = notice === "";
    show("notice", notice);
  }

  /** Return the newest scrape that is at least this old; the oldest if none is. */
  #before(milliseconds) {
    const newest = this.scrapes.at(-1);
    return this.scrapes.findLast(({ time }) => newest.time - time >= milliseconds - EVERY_MS / 2) ?? this.scrapes[0];
  }

  #take(scrape) {
    const last = this.scrapes.at(-1);
    // A server that was started again counts from zero.
    if (last && total(scrape) < total(last)) this.scrapes = [];
    this.scrapes.push(scrape);
    while (scrape.time - this.scrapes[0].time > MINUTE_MS + EVERY_MS) this.scrapes.shift();
    this.#rates(scrape);
    this.#latency(scrape);
    this.#outcomes(scrape);
    this.#saved(scrape);
    if (this.info) this.#stores();
  }

  #rates(scrape) {
    const window = this.#before(RATE_MS);
    const previous = this.scrapes.at(-2);
    const rate = (of, since) => (since && since !== scrape ? (1000 * (of(scrape) - of(since))) / (scrape.time - since.time) : null);
    show("texts", count(rate(total, window)));
    show("tokens", count(rate(allTokens, window)));
    show("requests", count(rate((one) => one.sum("attncache_request_seconds_count", isInference), window)));
    show("failed", count(rate((one) => one.sum("attncache_requests_total", hasFailed), window)));
    const [all, computed] = [rate(allTokens, window), rate(computedTokens, window)];
    show("computed", all === 0 ? "none" : percent(computed, all));
    const waiting = scrape.sum("attncache_queue_sequences");
    show("queue", count(waiting));
    show("queue-tokens", count(scrape.sum("attncache_queue_tokens")));
    // Two points far apart, as after a pause, say nothing about the seconds between them.
    const since = previous && scrape.time - previous.time < 3 * EVERY_MS ? previous : undefined;
    this.charts.texts.add([rate(total, since)]);
    this.charts.tokens.add([rate(allTokens, since), rate(computedTokens, since)]);
    this.charts.queue.add([waiting]);
  }

  #latency(scrape) {
    const counts = (one) => one.buckets("attncache_request_seconds", isInference);
    const after = counts(scrape);
    const of = (window) => {
      const before = counts(window);
      return [0.5, 0.9, 0.99].map((share) => percentile(before, after, share));
    };
    const [p50, p90, p99] = of(this.#before(LATENCY_MS));
    const [value, unit] = seconds(p50);
    show("p50", value);
    show("p50-unit", unit);
    show("p90", p90 === null ? NONE : seconds(p90).join(" "));
    show("p99", p99 === null ? NONE : seconds(p99).join(" "));
    this.charts.latency.add(of(this.#before(RATE_MS)));
  }

  #outcomes(scrape) {
    const [recent, start] = [countsOf(scrape, this.#before(MINUTE_MS)), countsOf(scrape)];
    const sum = Object.values(recent).reduce((left, right) => left + right, 0);
    const parts = [];
    for (const [name, title] of OUTCOMES) {
      byId(`recent-${name}`).textContent = percent(recent[name], sum);
      byId(`start-${name}`).textContent = short(start[name]);
      const part = byId("outcome-bar").querySelector(`.${name}`);
      part.style.flexGrow = recent[name];
      part.hidden = recent[name] === 0; // it would leave a gap
      if (recent[name] > 0) parts.push(`${title} ${percent(recent[name], sum)}`);
    }
    byId("outcome-bar").classList.toggle("empty", sum === 0);
    byId("outcome-bar").setAttribute("aria-label", parts.length ? `In the last minute: ${parts.join(", ")}` : "No text in the last minute");
  }

  #saved(scrape) {
    const before = this.#before(MINUTE_MS);
    const tokens = (one, state) => one.sum("attncache_tokens_total", (labels) => labels.state === state);
    const repeats = (one, source) => one.sum("attncache_repeated_sequences_total", (labels) => labels.source === source);
    const of = (measure, whole, noun) => {
      const [part, all] = [measure(scrape) - measure(before), whole(scrape) - whole(before)];
      return [percent(part, all), amount(measure(scrape), noun)];
    };
    const shared = (one) => Math.max(0, tokens(one, "asked") - tokens(one, "cached") - tokens(one, "computed"));
    const hits = (one) => one.sum("attncache_sequences_total", ({ outcome }) => /hit$/.test(outcome));
    const rows = [
      ["kept", "Kept results", ...of((one) => repeats(one, "kept"), total, "text")],
      ["in-flight", "Texts in flight", ...of((one) => repeats(one, "in_flight"), total, "text")],
      ["stored", "Stored keys and values", ...of((one) => tokens(one, "cached"), allTokens, "token")],
      ["shared", "Shared prefixes", ...of(shared, allTokens, "token")],
      ["maps", "Attention maps", ...of(hits, total, "text")],
    ];
    byId("saved").replaceChildren(...rows.map(([id, name, recent, start]) => make("tr", {},
      make("th", { scope: "row", textContent: name }),
      make("td", { id: `saved-${id}`, textContent: recent }),
      make("td", { textContent: start }),
    )));
  }

  #stores() {
    const { database, key_values: stored, settings, key_values_off: why } = this.info;
    const scrape = this.scrapes.at(-1);
    const results = scrape?.sum("attncache_results_bytes") ?? 0;
    const stores = [["Kept results", results, settings.result_memory_bytes ?? null]];
    if (stored) {
      stores.push(["Keys and values, memory", stored.memory.bytes, stored.memory.most_bytes]);
      if (stored.disk) stores.push(["Keys and values, disk", stored.disk.bytes, stored.disk.most_bytes]);
    }
    if (database) stores.push(["Attention maps, mapped file", database.bytes, null]);
    byId("stores").replaceChildren(...stores.map(store));
    const remarks = [];
    if (database) remarks.push(`${amount(database.records, "recorded text")} and ${amount(database.prototypes, "prototype")} of ${database.lengths.join(" to ")} tokens.`);
    if (scrape && scrape.sum("attncache_sessions") > 0) remarks.push(`${amount(scrape.sum("attncache_sessions"), "session")}.`);
    if (!stored && why) remarks.push(`Keys and values are not stored: ${why}.`);
    show("stores-remark", remarks.join(" "));
    show("gain", gainText(this.info));
  }
}

function row(name, title, meaning) {
  return make("tr", { title: meaning },
    make("th", { scope: "row" }, make("span", { className: `key ${name}` }), title, make("span", { className: "hidden", textContent: `: ${meaning}` })),
    make("td", { id: `recent-${name}` }),
    make("td", { id: `start-${name}` }),
  );
}

function store([name, used, most]) {
  const share = most ? `${(100 * Math.min(1, used / most)).toFixed(2)}%` : "100%";
  const amount = most ? `${bytes(used)} of ${bytes(most)}` : bytes(used);
  return make("div", { className: "store" },
    make("span", { className: "name", textContent: name }),
    make("span", { className: "amount", textContent: amount }),
    most ? make("span", { className: "meter", "aria-hidden": "true" }, make("span", { style: { width: share } })) : null,
  );
}

function gainText({ gain, database, reuse_off: off, preparing }) {
  if (preparing) return `${preparing[0].toUpperCase()}${preparing.slice(1)}. Until then, texts are computed in full.`;
  if (off.length) return `Attention maps are not reused: ${off.join("; ")}.`;
  if (!database) return "Attention maps are not reused: there is no database.";
  if (!gain) return "What attention maps save was not measured on this machine.";
  const faster = (share) => `${percent(Math.abs(share), 1)} ${share < 0 ? "slower" : "faster"}`;
  const { full_batch: full, full_batch_bound: bound, one_text: single } = gain.together;
  const paying = gain.groups.some(({ reuses }) => reuses);
  const measured = `Reusing attention maps ${paying ? "makes" : "would make"} full batches ${faster(full)} and single texts ${faster(single)}, as measured on this machine.`;
  const certain = `With 95 % confidence, full batches are at ${bound < 0 ? "most" : "least"} ${faster(bound)}, and ${percent(gain.required, 1)} faster is needed (--min-gain ${percent(gain.min_gain, 1)}).`;
  if (!paying) return `${measured} ${certain} So texts are computed in full.`;
  return gain.least_tokens ? `${measured} Batches of less than ${gain.least_tokens} tokens are computed in full.` : measured;
}

const total = (scrape) => scrape.sum("attncache_sequences_total") + scrape.sum("attncache_repeated_sequences_total");
const allTokens = (scrape) => scrape.sum("attncache_tokens_total", ({ state }) => state === "asked" || state === "repeated");
const computedTokens = (scrape) => scrape.sum("attncache_tokens_total", ({ state }) => state === "computed");

function countsOf(scrape, before = null) {
  const since = (of) => of(scrape) - (before ? of(before) : 0);
  const counts = { known: since((one) => one.sum("attncache_repeated_sequences_total")) };
  for (const [name] of OUTCOMES) {
    if (name === "known") continue;
    counts[name] = since((one) => one.sum("attncache_sequences_total", ({ outcome }) => outcome === name));
  }
  return counts;
}
