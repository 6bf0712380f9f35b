// The last minute as curves, in the colours and dashes of minivllm/viz/curves.py: six small charts with axes and units.

import { QUEUE_COLORS, currentTheme } from "./palette.js";
import { BIN, WINDOW } from "./state.js";

const MARGIN = { left: 50, right: 8, top: 8, bottom: 18 };
/** Milliseconds between two drawings, at least. */
const SHORTEST_WAIT = 100;
const HEIGHT = 84;
const TICKS = { number: (value) => String(Math.round(value)), percent: (value) => `${Math.round(value)} %`, seconds: inSeconds };

/** Of each chart: its words, what it is measured in, and its lines. A line's `of` gives a point of a bin, or null for none. */
const CHARTS = [
  {
    title: "Tokens generated per second",
    ticks: "number",
    least: 10,
    lines: [{ of: (bin) => bin.generated / BIN, otherwise: 0, isFilled: true, isRate: true }],
  },
  {
    title: "Sequences",
    ticks: "number",
    least: 4,
    lines: ["running", "waiting", "swapped"].map((queue) => ({ name: queue, queue, of: (bin) => bin[queue], otherwise: "last", isStep: true })),
  },
  {
    title: "Cache in use",
    ticks: "percent",
    least: 100,
    lines: [{ of: (bin) => 100 * bin.used, otherwise: "last", isFilled: true, isStep: true }],
  },
  {
    title: "Length of a step",
    ticks: "seconds",
    least: 0.01,
    lines: [
      { name: "decode", of: (bin) => mean(bin.decodeSeconds, bin.decodeSteps) },
      { name: "prefill", of: (bin) => mean(bin.prefillSeconds, bin.prefillSteps), isDotted: true },
    ],
  },
  {
    title: "Time to first token, in the engine",
    ticks: "seconds",
    least: 0.01,
    lines: [{ isFirstTokens: true }],
  },
  {
    title: "Between two tokens",
    ticks: "seconds",
    least: 0.01,
    lines: [
      { name: "mean", of: (bin) => mean(bin.gapSeconds, bin.gaps) },
      { name: "longest", of: (bin) => (bin.gaps ? bin.longestGap : null), isDashed: true },
    ],
  },
];

export class Curves {
  #charts;
  #schedule;
  #timer = null;
  #drawnAt = -Infinity;

  constructor(state, schedule) {
    this.state = state;
    this.#schedule = schedule;
    const home = document.getElementById("charts");
    const redraw = () => {
      this.#drawnAt = -Infinity;
      schedule();
    };
    this.#charts = CHARTS.map((chart) => new Chart(chart, home, redraw));
  }

  /** Draw them as they were at a moment of the engine's clock, in seconds; null if it is not known. Soon, if they have just been drawn. */
  draw(now) {
    const wait = this.#drawnAt + SHORTEST_WAIT - performance.now();
    if (wait > 0) {
      this.#timer ??= setTimeout(() => {
        this.#timer = null;
        this.#schedule();
      }, wait);
      return;
    }
    this.#drawnAt = performance.now();
    for (const chart of this.#charts) chart.draw(this.state, now);
  }
}

class Chart {
  #width = 0;

  constructor(chart, home, schedule) {
    this.chart = chart;
    const figure = document.createElement("figure");
    const caption = document.createElement("figcaption");
    const title = document.createElement("span");
    title.textContent = chart.title;
    this.value = document.createElement("output");
    this.value.setAttribute("aria-live", "off");
    caption.append(title, this.value);
    this.canvas = document.createElement("canvas");
    this.canvas.setAttribute("role", "img");
    figure.append(caption, this.canvas);
    home.append(figure);
    this.context = this.canvas.getContext("2d");
    new ResizeObserver(([entry]) => {
      const scale = window.devicePixelRatio || 1;
      this.#width = Math.floor(entry.contentRect.width);
      this.canvas.width = Math.round(this.#width * scale);
      this.canvas.height = Math.round(HEIGHT * scale);
      this.context.setTransform(scale, 0, 0, scale, 0, 0);
      schedule();
    }).observe(figure);
  }

  draw(state, now) {
    const { chart, context } = this;
    if (!this.#width) return;
    context.clearRect(0, 0, this.#width, HEIGHT);
    const lines = chart.lines
      .map((line) => ({ ...line, points: now === null ? [] : pointsOf(line, state, now) }))
      .filter(({ queue, points }) => queue !== "swapped" || points.some(([, count]) => count > 0));
    const highest = Math.max(chart.least, ...lines.flatMap(({ points }) => points.map(([, value]) => value ?? 0)));
    const top = chart.ticks === "percent" ? 100 : roundUp(highest);
    const box = { left: MARGIN.left, right: this.#width - MARGIN.right, top: MARGIN.top, bottom: HEIGHT - MARGIN.bottom };
    const scale = {
      x: (ago) => box.right - (ago / WINDOW) * (box.right - box.left),
      y: (value) => box.bottom - (value / top) * (box.bottom - box.top),
    };
    this.#drawAxes(box, scale, top);
    for (const line of lines) this.#drawLine(line, box, scale);
    const text = lines.map((line) => say(line, chart.ticks)).filter(Boolean).join(", ");
    if (this.value.textContent !== text) this.value.textContent = text;
    const label = `${chart.title}, in the last minute: ${lines.map((line) => describe(line, chart.ticks)).join("; ")}`;
    if (this.canvas.getAttribute("aria-label") !== label) this.canvas.setAttribute("aria-label", label);
  }

  #drawAxes(box, scale, top) {
    const { context } = this;
    const theme = currentTheme();
    context.font = "11px system-ui, sans-serif";
    context.lineWidth = 1;
    context.textBaseline = "middle";
    context.textAlign = "right";
    for (const value of [0, top / 2, top]) {
      const y = Math.round(scale.y(value)) + 0.5;
      context.strokeStyle = value ? theme.pale : theme.soft;
      context.globalAlpha = value ? 0.45 : 1;
      context.beginPath();
      context.moveTo(box.left, y);
      context.lineTo(box.right, y);
      context.stroke();
      context.globalAlpha = 1;
      context.fillStyle = theme.soft;
      context.fillText(TICKS[this.chart.ticks](value), box.left - 5, y);
    }
    context.textBaseline = "alphabetic";
    for (const [ago, text, align] of [[60, "60 s ago", "left"], [30, "30 s", "center"], [0, "now", "right"]]) {
      context.textAlign = align;
      context.fillText(text, scale.x(ago), HEIGHT - 4);
    }
  }

  #drawLine(line, box, scale) {
    const { context } = this;
    const theme = currentTheme();
    const color = line.queue ? queueColor(line.queue) : theme.ink;
    context.strokeStyle = color;
    context.fillStyle = color;
    if (line.isFirstTokens || line.isDotted) {
      for (const [ago, value] of line.points) {
        if (value === null) continue;
        context.beginPath();
        context.arc(scale.x(ago), scale.y(value), 2.4, 0, 2 * Math.PI);
        if (line.isDotted) context.stroke();
        else context.fill();
      }
      return;
    }
    context.setLineDash(line.isDashed || line.queue === "waiting" ? [5, 3] : line.queue === "swapped" ? [1.5, 2.5] : []);
    context.lineWidth = line.queue === "running" || line.isFilled ? 2 : 1.5;
    for (const run of runsOf(line.points)) {
      const path = new Path2D();
      const [first, ...others] = run.map(([ago, value]) => [Math.max(box.left, scale.x(ago)), scale.y(value)]);
      let last = first;
      path.moveTo(...first);
      for (const point of others) {
        if (line.isStep) path.lineTo(point[0], last[1]);
        path.lineTo(...point);
        last = point;
      }
      context.stroke(path);
      if (!line.isFilled) continue;
      path.lineTo(last[0], box.bottom);
      path.lineTo(first[0], box.bottom);
      context.globalAlpha = 0.14;
      context.fill(path);
      context.globalAlpha = 1;
    }
    context.setLineDash([]);
  }
}

/** The stretches of points between gaps. */
function runsOf(points) {
  const runs = [[]];
  for (const point of points) {
    if (point[1] !== null) runs.at(-1).push(point);
    else if (runs.at(-1).length) runs.push([]);
  }
  return runs.filter((run) => run.length);
}

/** [seconds ago, value] from the oldest to the newest; null where the page did not follow. */
export function pointsOf(line, state, now) {
  if (line.isFirstTokens) return state.firstTokens.map(([time, value]) => [now - time, value]).filter(([ago]) => ago < WINDOW);
  const points = [];
  const newest = Math.floor(now / BIN) - (line.isRate ? 1 : 0); // what is still being counted is no rate yet
  const oldest = newest - WINDOW / BIN;
  const known = [...state.bins.keys()];
  const before = state.bins.get(Math.max(...known.filter((number) => number < oldest)));
  let isKnown = before !== undefined && !before.isGap;
  let last = isKnown ? line.of(before) : null;
  for (let number = Math.max(oldest, Math.min(...known)); number <= newest; number += 1) {
    const bin = state.bins.get(number);
    if (bin !== undefined) isKnown = !bin.isGap;
    let value = bin === undefined || !isKnown ? null : line.of(bin);
    if (value === null && isKnown && line.otherwise === "last") value = last;
    if (value === null && isKnown && line.otherwise === 0) value = 0;
    last = value;
    points.push([Math.max(0, now - (number + (line.isStep ? 0 : 0.5)) * BIN), value]);
  }
  if (line.isStep && last !== null) points.push([0, last]);
  return points;
}

function say(line, ticks) {
  const value = line.points.findLast(([ago, value]) => value !== null && ago < 5)?.[1];
  if (value === undefined) return "";
  return line.name ? `${TICKS[ticks](value)} ${line.name}` : TICKS[ticks](value);
}

/** A line in words. */
function describe(line, ticks) {
  const values = line.points.map(([, value]) => value).filter((value) => value !== null);
  const name = line.name ? `${line.name} ` : "";
  if (!values.length) return `${name}no values`;
  return `${name}last ${TICKS[ticks](values.at(-1))}, between ${TICKS[ticks](Math.min(...values))} and ${TICKS[ticks](Math.max(...values))}`;
}

function mean(sum, count) {
  return count ? sum / count : null;
}

function queueColor(queue) {
  return QUEUE_COLORS[queue];
}

/** The next of 1, 2, 4, 6, 8, 10, 20, 40, ...: half of it is a round number too. */
function roundUp(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return power * [1, 2, 4, 6, 8, 10].find((step) => step * power >= value * 0.999);
}

function inSeconds(value) {
  if (value === 0) return "0";
  if (value >= 1) return `${Number(value.toPrecision(3))} s`;
  return `${Number((1000 * value).toPrecision(2))} ms`;
}
