// Line charts of the last minutes, drawn as SVG.

const SVG = "http://www.w3.org/2000/svg";
const [WIDTH, HEIGHT] = [300, 60]; // of the drawing; it is stretched to its element

/** A chart of one line or more over the same seconds. */
export class LineChart {
  /** points: how many fit into the chart. format: of the number at the top of the axis. */
  constructor(figure, classes, points, format) {
    this.points = points;
    this.format = format;
    this.series = classes.map(() => []);
    this.top = Object.assign(document.createElement("span"), { className: "axis top-axis" });
    const svg = document.createElementNS(SVG, "svg");
    svg.setAttribute("viewBox", `0 0 ${WIDTH} ${HEIGHT}`);
    svg.setAttribute("preserveAspectRatio", "none");
    svg.setAttribute("aria-hidden", "true");
    this.area = path(svg, "area");
    this.lines = classes.map((name) => path(svg, `line ${name}`));
    const caption = document.createElement("figcaption");
    caption.className = "axis";
    const first = Object.assign(document.createElement("span"), { textContent: `${points / 60} min ago` });
    const last = Object.assign(document.createElement("span"), { textContent: "now" });
    caption.append(first, last);
    figure.append(this.top, svg, caption);
  }

  /** Add the newest value of each line; null leaves a gap. */
  add(values) {
    values.forEach((value, index) => {
      this.series[index].push(value);
      if (this.series[index].length > this.points) this.series[index].shift();
    });
    this.#draw();
  }

  #draw() {
    const largest = rounded(Math.max(0, ...this.series.flat().filter((value) => value !== null)));
    this.top.textContent = this.format(largest);
    const [front] = this.series;
    const x = (index) => WIDTH * (1 - (front.length - 1 - index) / (this.points - 1));
    const y = (value) => HEIGHT - 1 - ((HEIGHT - 3) * value) / largest;
    this.series.forEach((values, number) => {
      const runs = runsOf(values);
      const drawn = runs.map((run) => "M" + run.map((index) => `${x(index).toFixed(1)},${y(values[index]).toFixed(1)}`).join("L"));
      // A single point is a line without a length, which round ends make visible.
      this.lines[number].setAttribute("d", drawn.map((line) => (line.includes("L") ? line : `${line}h0.01`)).join(""));
      if (number > 0) return;
      const closed = runs.map((run, index) => `${drawn[index]}L${x(run.at(-1)).toFixed(1)},${HEIGHT}L${x(run[0]).toFixed(1)},${HEIGHT}Z`);
      this.area.setAttribute("d", closed.join(""));
    });
  }
}

function path(svg, classes) {
  const made = document.createElementNS(SVG, "path");
  made.setAttribute("class", classes);
  svg.append(made);
  return made;
}

/** Return the indices of neighbouring values that are not null, run by run. */
function runsOf(values) {
  const runs = [];
  values.forEach((value, index) => {
    if (value === null) return;
    if (index > 0 && values[index - 1] !== null) runs.at(-1).push(index);
    else runs.push([index]);
  });
  return runs;
}

/** Return the next of 1, 1.5, 2, 3, 5, 7.5 times a power of ten; 1 for 0. */
function rounded(value) {
  if (value <= 0) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return power * ([1, 1.5, 2, 3, 5, 7.5, 10].find((step) => step * power >= value) ?? 10);
}
