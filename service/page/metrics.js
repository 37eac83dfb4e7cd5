// Reads /metrics: Prometheus' text format, counters as differences, histograms as percentiles.

const LINE = /^(\w+)(?:\{(.*)\})? (\S+)$/;
const LABEL = /(\w+)="((?:[^"\\]|\\.)*)"/g;

/** All samples that were read at one time. */
export class Scrape {
  constructor(text, time) {
    this.time = time; // ms
    this.samples = new Map(); // name -> [{labels, value}]
    for (const line of text.split("\n")) {
      const [, name, labels = "", value] = LINE.exec(line) ?? [];
      if (name === undefined) continue;
      const named = Object.fromEntries(Array.from(labels.matchAll(LABEL), ([, label, own]) => [label, own]));
      if (!this.samples.has(name)) this.samples.set(name, []);
      this.samples.get(name).push({ labels: named, value: Number(value) });
    }
  }

  /** Return the sum of the samples of a metric, of all or of those whose labels `where` accepts. */
  sum(name, where = () => true) {
    let sum = 0;
    for (const { labels, value } of this.samples.get(name) ?? []) if (where(labels)) sum += value;
    return sum;
  }

  /** Return the cumulative counts of a histogram by upper bound, as a Map in rising order. */
  buckets(name, where) {
    const counts = new Map();
    for (const { labels, value } of this.samples.get(`${name}_bucket`) ?? []) {
      if (!where(labels)) continue;
      const bound = labels.le === "+Inf" ? Infinity : Number(labels.le);
      counts.set(bound, (counts.get(bound) ?? 0) + value);
    }
    return new Map([...counts].sort(([a], [b]) => a - b));
  }
}

/** Return the value below which a share of the observations between two scrapes lies; null without any. */
export function percentile(before, after, share) {
  const bounds = [...after.keys()];
  const counts = bounds.map((bound) => after.get(bound) - (before.get(bound) ?? 0));
  const wanted = share * (counts.at(-1) ?? 0);
  if (!(wanted > 0)) return null;
  const index = counts.findIndex((count) => count >= wanted);
  const low = index > 0 ? bounds[index - 1] : 0;
  if (bounds[index] === Infinity) return low;
  const below = index > 0 ? counts[index - 1] : 0;
  return low + ((bounds[index] - low) * (wanted - below)) / (counts[index] - below);
}
