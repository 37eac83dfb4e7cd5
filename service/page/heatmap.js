// Attention maps as heat maps: small ones to choose from, and two large ones side by side.

import { make } from "./dom.js";
import { digits } from "./format.js";

const LEVELS = 65535; // stands for 1
const LABEL_PX = 11;

/** The maps of all layers, as /explain sends them. */
export class Maps {
  constructor(layers, length) {
    this.length = length;
    this.layers = layers.map(({ own, reused_heads: reused, given }) => ({
      own: split(own, length),
      reused,
      given: given === null ? [] : split(given, length),
    }));
  }

  get hasRecord() {
    return this.layers.some(({ given }) => given.length > 0);
  }

  own(layer, head) {
    return this.layers[layer].own[head];
  }

  /** Return the record's map of a head, or null if the head is always computed or there is no record. */
  given(layer, head) {
    const { reused, given } = this.layers[layer];
    return given[reused.indexOf(head)] ?? null;
  }

  isReused(layer, head) {
    return this.layers[layer].reused.includes(head);
  }

  /** Return the mean total variation distance of the rows of both maps: 0 equal, 1 disjoint. */
  distance(layer, head) {
    const [own, given] = [this.own(layer, head), this.given(layer, head)];
    if (given === null) return null;
    let sum = 0;
    for (let index = 0; index < own.length; index++) sum += Math.abs(own[index] - given[index]);
    return sum / (2 * LEVELS * this.length);
  }
}

function split(encoded, length) {
  const bytes = Uint8Array.from(atob(encoded), (character) => character.charCodeAt(0));
  const view = new DataView(bytes.buffer);
  const numbers = Uint16Array.from({ length: bytes.length / 2 }, (_, index) => view.getUint16(2 * index, true));
  return Array.from({ length: numbers.length / length ** 2 }, (_, head) => numbers.subarray(head * length ** 2, (head + 1) * length ** 2));
}

/** Draw a map of one pixel per number, without labels. map: null draws nothing. */
export function drawSmall(canvas, map, length) {
  canvas.width = canvas.height = length;
  const context = canvas.getContext("2d");
  const image = context.createImageData(length, length);
  const [low, high] = colours();
  map.forEach((level, index) => {
    const share = Math.sqrt(level / LEVELS);
    for (let part = 0; part < 3; part++) image.data[4 * index + part] = low[part] + share * (high[part] - low[part]);
    image.data[4 * index + 3] = 255;
  });
  context.putImageData(image, 0, 0);
}

/** A large map with its tokens along both axes. The pointer and the arrow keys read single numbers. */
export class LargeMap {
  constructor(title, onPoint) {
    this.canvas = make("canvas", { tabIndex: 0, role: "img" });
    this.title = title;
    this.element = make("figure", { className: "map" }, make("figcaption", { textContent: title }), this.canvas);
    this.onPoint = onPoint;
    this.canvas.addEventListener("pointermove", (event) => this.#pointed(event));
    this.canvas.addEventListener("pointerleave", () => this.onPoint(null));
    this.canvas.addEventListener("focus", () => this.onPoint(this.point ?? [0, 0]));
    this.canvas.addEventListener("blur", () => this.onPoint(null));
    this.canvas.addEventListener("keydown", (event) => this.#moved(event));
    new ResizeObserver(() => this.draw()).observe(this.element);
  }

  /** Show a map; null shows that there is none, and why. */
  set(map, tokens, label, why = "") {
    Object.assign(this, { map, tokens, why });
    this.canvas.setAttribute("aria-label", map === null ? why : label);
    this.draw();
  }

  /** Mark a cell: [row, column] or null. */
  mark(point) {
    this.point = point;
    this.draw();
  }

  draw() {
    const width = this.element.clientWidth;
    if (!this.tokens || width === 0) return;
    const { canvas, tokens } = this;
    const context = canvas.getContext("2d");
    context.font = `${LABEL_PX}px system-ui, sans-serif`;
    const widest = Math.max(...tokens.map((token) => context.measureText(token).width));
    this.margin = Math.ceil(Math.min(widest, 84) + 6);
    this.cell = (width - this.margin - 1) / tokens.length;
    const scale = window.devicePixelRatio || 1;
    const size = this.margin + this.cell * tokens.length + 1;
    canvas.width = canvas.height = Math.round(size * scale);
    canvas.style.height = `${size}px`;
    context.scale(scale, scale);
    this.#axes(context);
    if (this.map === null) this.#nothing(context);
    else this.#cells(context);
  }

  #axes(context) {
    context.font = `${LABEL_PX}px system-ui, sans-serif`;
    context.textBaseline = "middle";
    context.textAlign = "right";
    const step = Math.ceil((LABEL_PX + 1) / this.cell);
    this.tokens.forEach((token, index) => {
      const chosen = (place) => this.point?.[place] === index;
      const middle = this.margin + (index + 0.5) * this.cell;
      const cut = shortened(context, token, this.margin - 6);
      for (const place of [0, 1]) {
        if (index % step !== 0 && !chosen(place)) continue;
        if (this.point && step > 1 && !chosen(place) && Math.abs(index - this.point[place]) < step) continue;
        context.fillStyle = colour(chosen(place) ? "--ink" : "--muted");
        context.save();
        context.translate(place === 0 ? this.margin - 5 : middle, place === 0 ? middle : this.margin - 5);
        if (place === 1) {
          context.rotate(Math.PI / 2);
        }
        context.fillText(cut, 0, 0);
        context.restore();
      }
    });
  }

  #cells(context) {
    const { tokens, cell, margin } = this;
    const [low, high] = colours();
    tokens.forEach((_, row) => tokens.forEach((__, column) => {
      const share = Math.sqrt(this.map[row * tokens.length + column] / LEVELS);
      context.fillStyle = `rgb(${low.map((part, index) => Math.round(part + share * (high[index] - part))).join(",")})`;
      const [left, top] = [column, row].map((index) => Math.round(margin + index * cell));
      const [right, bottom] = [column, row].map((index) => Math.round(margin + (index + 1) * cell));
      context.fillRect(left, top, right - left, bottom - top);
    }));
    if (!this.point) return;
    const [row, column] = this.point;
    context.strokeStyle = colour("--ink");
    context.lineWidth = 1.5;
    context.strokeRect(margin + column * cell, margin + row * cell, cell, cell);
  }

  #nothing(context) {
    const side = this.cell * this.tokens.length;
    context.strokeStyle = colour("--line");
    context.strokeRect(this.margin + 0.5, this.margin + 0.5, side - 1, side - 1);
    context.fillStyle = colour("--muted");
    context.textAlign = "center";
    context.font = "13px system-ui, sans-serif";
    lines(context, this.why, side - 24).forEach((line, index, all) => {
      context.fillText(line, this.margin + side / 2, this.margin + side / 2 + (index - (all.length - 1) / 2) * 18);
    });
  }

  #pointed({ offsetX, offsetY }) {
    const place = (offset) => Math.floor((offset - this.margin) / this.cell);
    const point = [place(offsetY), place(offsetX)];
    this.onPoint(point.every((index) => index >= 0 && index < this.tokens.length) ? point : null);
  }

  #moved(event) {
    const steps = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
    const step = steps[event.key];
    if (!step || !this.point) return;
    event.preventDefault();
    const last = this.tokens.length - 1;
    this.onPoint(this.point.map((index, place) => Math.min(last, Math.max(0, index + step[place]))));
  }
}

/** Return what both maps hold at a point, as a sentence. */
export function reading(tokens, point, own, given) {
  const [row, column] = point;
  const value = (map) => digits(map[row * tokens.length + column] / LEVELS);
  const record = given === null ? "" : `, record ${value(given)}`;
  return `“${tokens[row]}” attends to “${tokens[column]}”: own ${value(own)}${record}`;
}

/** Return the colours of 0 and 1, [red, green, blue] each. */
function colours() {
  return ["--map-0", "--map-1"].map((name) => colour(name).match(/\w\w/g).map((part) => parseInt(part, 16)));
}

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

function shortened(context, text, width) {
  if (context.measureText(text).width <= width) return text;
  let end = text.length - 1;
  while (end > 1 && context.measureText(`${text.slice(0, end)}…`).width > width) end--;
  return `${text.slice(0, end)}…`;
}

function lines(context, text, width) {
  const found = [""];
  for (const word of text.split(" ")) {
    const longer = `${found.at(-1)} ${word}`.trim();
    if (context.measureText(longer).width <= width) found[found.length - 1] = longer;
    else found.push(word);
  }
  return found;
}
