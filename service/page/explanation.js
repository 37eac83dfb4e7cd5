// Why a text reused something or not: the checks in their order, what reuse changes, and both maps.

import { make } from "./dom.js";
import { amount, count, digits, percent } from "./format.js";
import { drawSmall, LargeMap, Maps, reading } from "./heatmap.js";

const KINDS = ["recorded text", "prototype", "mean of the length"];
const NEVER = 1; // no similarity is above 1

const VERDICTS = {
  hit: ["Reused", "The text took the attention maps of a recorded text."],
  prototype_hit: ["Reused", "The text took the attention maps of a prototype: the mean of similar recorded texts."],
  miss: ["Computed in full", "No record is near enough."],
  unfamiliar: ["Computed in full", "The text does not resemble the texts that the quality budget was measured on."],
  cannot_pay: ["Computed in full", "Reuse saves too little time at this length on this machine."],
  cold: ["Computed in full", "The attention maps of its record are not in memory, and take longer to read than a hit saves."],
  not_searched: ["Computed in full", "No attention maps can be reused for this text."],
};
const PREFIX = ["Reused", "Keys and values of the first tokens come from the prefix store."];

/** Return an element that explains a text, from the JSON of /explain. */
export function explanation(explained) {
  const tokens = explained.tokens.map(readable);
  const [verdict, why] = explained.cached_tokens ? PREFIX : VERDICTS[explained.outcome];
  const element = make("section", { className: "explanation", "aria-label": "Why" },
    make("h3", { className: "verdict" }, make("span", { className: `badge ${explained.outcome}`, textContent: explained.outcome.replace("_", " ") }), `${verdict}. `, make("span", { className: "because", textContent: why })),
    tokenLine(tokens, explained.cached_tokens ?? 0),
    make("ol", { className: "checks" }, ...checks(explained)),
    make("div", { className: "details" },
      make("dl", { className: "found" }, ...facts(explained)),
      explained.candidates.length ? records(explained) : null,
    ),
  );
  if (explained.layers) element.append(maps(explained, tokens));
  else element.append(make("p", { className: "remark", textContent: `Attention maps are shown for texts of at most ${explained.most_tokens_with_maps} tokens.` }));
  return element;
}

/** Return a token without the space before it, or the mark that it continues a word. */
function readable(token) {
  return token.replace(/^##/, "").trim() || "␣";
}

function tokenLine(tokens, cached) {
  const title = cached ? `${amount(tokens.length, "token")}, the first ${count(cached)} from the prefix store` : amount(tokens.length, "token");
  return make("div", { className: "tokens" },
    make("p", { className: "remark", textContent: title }),
    make("p", { className: "chips" }, ...tokens.map((token, index) => make("span", { className: index < cached ? "chip cached" : "chip", textContent: token }))),
  );
}

function checks({ candidates, chosen, gain, min_gain: least, length_group: group, outcome, searched, strangeness, strangeness_limit: limit, tokens }) {
  const length = tokens.length;
  if (group === null) return [check(null, "Database", "No database of attention maps is open.")];
  const has = candidates.length > 0;
  const found = [check(has, "Records of this length", has ? `There are records of ${amount(length, "token")}.` : `There is no usable record of ${amount(length, "token")}.`)];
  if (outcome === "cannot_pay" || gain !== null) {
    const pays = outcome !== "cannot_pay";
    const measured = gain === null ? "The gain of this length was not measured." : `Full batches of texts of ${group} tokens become at ${gain < 0 ? "most" : "least"} ${percent(Math.abs(gain), 1)} ${gain < 0 ? "slower" : "faster"} with reuse, with 95 % confidence${least === null ? "" : `; at least ${percent(least, 1)} is asked for`}.`;
    found.push(check(pays, "Reuse pays", measured, gain === null || least === null ? null : [gain, least, "up"]));
  }
  if (strangeness !== null && limit !== null) {
    const familiar = strangeness <= limit;
    found.push(check(familiar, "Familiar", `Strangeness ${digits(strangeness)}, limit ${digits(limit)}: the loss to expect from the words alone.`, [strangeness, limit, "down"]));
  }
  if (chosen) found.push(nearest(chosen, searched));
  return found;
}

function nearest({ kind, similarity, threshold }, searched) {
  if (!searched && kind === 2 && threshold <= NEVER) return check(true, "Near enough", "Texts of this length take the mean maps without a search.");
  const near = similarity >= threshold;
  if (similarity === 1) return check(true, "Near enough", "This very text is recorded: similarity 1.");
  const limit = threshold > NEVER ? "no record of this kind may serve" : `θ is ${threshold.toFixed(4)}`;
  return check(near, "Near enough", `The nearest ${KINDS[kind]} has similarity ${similarity.toFixed(4)}; ${limit}.`, threshold > NEVER ? null : [similarity, threshold, "up"]);
}

/** holds: true, false, or null if the check does not apply. meter: [value, limit, better direction]. */
function check(holds, name, text, meter = null) {
  const [mark, word] = holds === null ? ["–", "does not apply"] : holds ? ["✓", "yes"] : ["✕", "no"];
  return make("li", { className: holds === null ? "" : holds ? "yes" : "no" },
    make("span", { className: "mark", "aria-hidden": "true", textContent: mark }),
    make("span", { className: "hidden", textContent: `${word}: ` }),
    make("span", { className: "name", textContent: name }),
    make("span", { className: "text", textContent: text }),
    meter && gauge(...meter),
  );
}

/** A bar with a mark at the limit. Both are drawn relative to the larger one. */
function gauge(value, limit, better) {
  const most = Math.max(value, limit, 1e-12) * 1.1;
  const at = (number) => `${(100 * Math.max(0, number)) / most}%`;
  const good = better === "up" ? value >= limit : value <= limit;
  return make("span", { className: `gauge ${good ? "good" : "bad"}`, "aria-hidden": "true" },
    make("span", { className: "filled", style: { width: at(value) } }),
    make("span", { className: "limit", style: { left: at(limit) } }),
  );
}

/** The nearest record of each kind, beside its threshold. */
function records({ candidates, chosen }) {
  const heads = ["Nearest record", "similarity", "θ", "expected cosine"];
  const rows = candidates.map(({ kind, similarity, threshold, expected_damage: damage }) => make("tr", { className: kind === chosen?.kind ? "chosen" : "" },
    make("th", { scope: "row" }, KINDS[kind], kind === chosen?.kind ? make("span", { className: "hidden", textContent: ", compared below" }) : null),
    make("td", { textContent: similarity.toFixed(4) }),
    make("td", { textContent: threshold > NEVER ? "never serves" : threshold.toFixed(4) }),
    make("td", { textContent: (1 - damage).toFixed(4) }),
  ));
  return make("table", { className: "numbers records" },
    make("thead", {}, make("tr", {}, ...heads.map((head) => make("th", { scope: "col", textContent: head })))),
    make("tbody", {}, ...rows));
}

function facts({ cached_tokens: cached, chosen, cosine, outcome, tokens, was_kept: kept }) {
  const hit = outcome === "hit" || outcome === "prototype_hit";
  const found = [];
  if (chosen) {
    found.push(["Nearest record", `${KINDS[chosen.kind]}, number ${count(chosen.record)} among those of ${amount(tokens.length, "token")}`]);
    if (chosen.kind === 0) found.push(["Its text", "Not kept. Databases hold no texts, only maps, features and keyed digests."]);
    found.push([hit ? "Loss by reuse" : "Loss if it served", `cosine ${cosine.toFixed(5)} to the full output; ${(1 - chosen.expected_damage).toFixed(5)} was expected`]);
  }
  if (cached !== null) found.push(["Prefix store", `${count(cached)} of ${amount(tokens.length, "token")} were stored before`]);
  found.push(["Kept result", kept ? "Yes: the answer was known before, without any computation." : hit ? "No, and approximate results are not kept." : "Not before this request."]);
  return found.flatMap(([name, text]) => [make("dt", { textContent: name }), make("dd", { textContent: text })]);
}

function maps({ chosen, layers }, tokens) {
  const all = new Maps(layers, tokens.length);
  const readout = make("p", { className: "readout", "aria-live": "polite" });
  const point = (chosenPoint) => {
    own.mark(chosenPoint);
    record.mark(chosenPoint);
    const [layer, head] = selected;
    readout.textContent = chosenPoint ? reading(tokens, chosenPoint, all.own(layer, head), all.given(layer, head)) : summary();
  };
  const own = new LargeMap("The text’s own map", point);
  const record = new LargeMap(chosen ? `Map of the nearest record (${KINDS[chosen.kind]})` : "Map of a record", point);
  const heading = make("h4", {});
  let selected = [0, 0];
  const summary = () => {
    const distance = all.distance(...selected);
    return distance === null ? "" : `Rows differ by ${percent(distance, 1)} on average (total variation). Point at a map, or use the arrow keys, to read single numbers.`;
  };
  const why = () => {
    if (!chosen) return "There is no record to compare with.";
    return all.isReused(...selected) ? "" : "This head is computed for every text.";
  };
  const overview = make("div", { className: "overview" });
  const select = ([layer, head]) => {
    selected = [layer, head];
    heading.textContent = `Layer ${layer + 1}, head ${head + 1}`;
    own.set(all.own(layer, head), tokens, `Attention map of the text in layer ${layer + 1}, head ${head + 1}`);
    record.set(all.given(layer, head), tokens, `Attention map of the record in layer ${layer + 1}, head ${head + 1}`, why());
    for (const button of overview.querySelectorAll("button")) {
      const isChosen = button.dataset.layer === String(layer) && button.dataset.head === String(head);
      button.setAttribute("aria-pressed", String(isChosen));
      button.tabIndex = isChosen ? 0 : -1;
    }
    readout.textContent = summary();
  };
  all.layers.forEach((layer, number) => {
    const buttons = layer.own.map((_, head) => thumbnail(all, number, head, select));
    overview.append(make("div", { className: "layer", role: "group", "aria-label": `Layer ${number + 1}` }, make("span", { className: "name", textContent: `${number + 1}` }), make("span", { className: "heads" }, ...buttons)));
  });
  overview.addEventListener("keydown", (event) => moveFocus(event, overview, select));
  const redraw = () => {
    own.draw();
    record.draw();
    for (const button of overview.querySelectorAll("button")) drawThumbnail(all, button);
  };
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  select(mostDifferent(all));
  return make("div", { className: "maps" },
    make("h3", { textContent: "Attention maps" }),
    make("p", { className: "remark", textContent: chosen ? "Rows are layers, columns are heads: the text’s own map on the left, and on the right the record’s map, if the head is reused." : "Rows are layers, columns are heads. Each shows the text’s own map." }),
    overview, heading, make("div", { className: "pair" }, own.element, record.element), readout, legend(),
  );
}

function thumbnail(all, layer, head, select) {
  const button = make("button", { type: "button", className: "thumbnail", title: `Layer ${layer + 1}, head ${head + 1}` },
    make("canvas", { "aria-hidden": "true" }), make("canvas", { "aria-hidden": "true" }));
  const reused = all.isReused(layer, head);
  button.setAttribute("aria-label", `Layer ${layer + 1}, head ${head + 1}${reused ? ", reused" : ", computed"}`);
  Object.assign(button.dataset, { layer, head });
  drawThumbnail(all, button);
  button.addEventListener("click", () => select([layer, head]));
  return button;
}

function drawThumbnail(all, button) {
  const place = [Number(button.dataset.layer), Number(button.dataset.head)];
  const [own, record] = button.children;
  const given = all.given(...place);
  drawSmall(own, all.own(...place), all.length);
  record.hidden = !all.hasRecord;
  if (given !== null) drawSmall(record, given, all.length);
}

/** Return the [layer, head] whose maps differ most; the first one without a record. */
function mostDifferent(all) {
  let [best, largest] = [[0, 0], -1];
  all.layers.forEach(({ reused }, layer) => {
    for (const head of reused) {
      const distance = all.distance(layer, head) ?? -1;
      if (distance > largest) [best, largest] = [[layer, head], distance];
    }
  });
  return best;
}

function moveFocus(event, overview, select) {
  const { layer, head } = event.target.dataset;
  const steps = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
  if (layer === undefined || !steps[event.key]) return;
  event.preventDefault();
  const place = [Number(layer), Number(head)].map((index, part) => index + steps[event.key][part]);
  const next = overview.querySelector(`[data-layer="${place[0]}"][data-head="${place[1]}"]`);
  if (!next) return;
  select(place);
  next.focus();
}

function legend() {
  return make("p", { className: "scale" }, make("span", { textContent: "0" }), make("span", { className: "ramp", "aria-hidden": "true" }), make("span", { textContent: "1" }), make("span", { textContent: "attention, on a square-root scale" }));
}
