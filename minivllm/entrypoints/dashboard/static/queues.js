// The queues: who waits, who runs, who is swapped out, and who ended last, as numbers and as chips.

import { paint } from "./palette.js";

const MOST_CHIPS = 24;
/** Pixels between two chips, as in style.css. */
const GAP = 3;
/** By so much, positions in whole pixels may be wrong. */
const ROUNDING = 2;

export class Queues {
  #drawn = -1;

  constructor(state, schedule, onHighlight, root = document) {
    this.state = state;
    this.preempted = root.getElementById("preempted");
    const repaint = () => {
      this.#drawn = -1;
      schedule();
    };
    this.lists = Object.fromEntries(["waiting", "running", "swapped", "ended"].map((name) => [name, new ChipList(name, onHighlight, repaint, root)]));
  }

  /** Make all chips again, in the next frame. */
  repaint() {
    this.#drawn = -1;
    for (const list of Object.values(this.lists)) list.forget();
  }

  draw() {
    const { state, lists } = this;
    if (this.#drawn === state.version) return;
    this.#drawn = state.version;
    const at = (place) => state.sequences.filter((sequence) => sequence.place === place);
    lists.waiting.show(state.counts.waiting, state.waiting);
    lists.running.show(state.counts.running, at("running"));
    lists.swapped.show(state.counts.swapped, at("swapped"));
    lists.ended.show(state.numEnded, state.ended, true);
    const fits = Object.values(lists).map((list) => list.measure()); // all at once, since a change in between would cost another layout
    Object.values(lists).forEach((list, i) => list.cut(fits[i]));
    const preempted = state.numPreempted ? `preemptions seen: ${state.numPreempted}` : "";
    if (this.preempted.textContent !== preempted) this.preempted.textContent = preempted;
  }
}

class ChipList {
  #shown = "";
  #width = 0;
  /** Chips that are not measured yet; null if there are none. */
  #chips = null;
  /** How many sequences there are, shown or not. */
  #count = 0;
  #more = null;

  constructor(name, onHighlight, onResize, root) {
    this.count = root.getElementById(`${name}-count`);
    this.list = root.getElementById(`${name}-chips`);
    this.list.addEventListener("pointerover", (event) => onHighlight(numberOf(event.target)));
    this.list.addEventListener("pointerleave", () => onHighlight(null));
    new ResizeObserver(([entry]) => {
      this.#width = entry.contentRect.width;
      onResize();
    }).observe(this.list);
  }

  forget() {
    this.#shown = "";
  }

  /** Show how many there are, and the first of them; of those that ended, more are counted than known. */
  show(count, items, isPast = false) {
    if (this.count.textContent !== String(count)) this.count.textContent = String(count);
    const shown = items.slice(0, MOST_CHIPS);
    const signature = `${count} ${this.#width} ${shown.map(({ number, index, why, was_preempted }) => `${number}/${index}/${why ?? ""}${was_preempted ? "x" : ""}`).join(" ")}`;
    if (signature === this.#shown) return;
    this.#shown = signature;
    const chips = shown.map((item) => makeChip(item, isPast));
    this.#more = isPast ? null : makeMore(count);
    this.list.replaceChildren(...chips, ...(isPast || !count ? [] : [this.#more]));
    this.#chips = isPast || !count ? null : chips;
    this.#count = count;
  }

  /** How many chips have room: all, or as many as leave room for how many are not shown. Null if nothing has changed. */
  measure() {
    if (this.#chips === null) return null;
    const bottom = this.list.offsetTop + this.list.clientHeight + 1;
    const ends = this.#chips.map((chip) => ({ right: chip.offsetLeft + chip.offsetWidth, bottom: chip.offsetTop + chip.offsetHeight }));
    const over = ends.findIndex((end) => end.bottom > bottom);
    let fit = over === -1 ? ends.length : over;
    if (fit === this.#count) return fit;
    const lastRow = ends[fit - 1]?.bottom;
    const room = this.list.offsetLeft + this.list.clientWidth - GAP - this.#more.offsetWidth - ROUNDING;
    const isFull = lastRow + ends[0]?.bottom - this.list.offsetTop > bottom; // no row has room below the last one
    while (fit && isFull && ends[fit - 1].bottom === lastRow && ends[fit - 1].right > room) fit -= 1;
    return fit;
  }

  /** Take away the chips that have no room, and say how many they are. */
  cut(fit) {
    if (fit === null) return;
    for (const chip of this.#chips.slice(fit)) chip.remove();
    if (fit === this.#count) this.#more.remove();
    else this.#more.textContent = sayMore(this.#count - fit);
    this.#chips = null;
  }
}

function makeChip({ number, index, request_id: id, why, was_preempted: isPreempted, num_generated: tokens, seconds }, isPast) {
  const chip = document.createElement("li");
  chip.className = why ? `chip ${why}` : isPreempted ? "chip preempted" : "chip";
  chip.textContent = `#${number}${index ? `/${index}` : ""}`;
  chip.dataset.number = String(number);
  paint(chip, number);
  chip.title = isPast ? `${id}: ${describeEnd(why, tokens, seconds)}` : isPreempted ? `${id}: preempted, to be recomputed` : id;
  return chip;
}

function describeEnd(why, tokens, seconds) {
  const got = tokens === null ? "" : `, ${tokens} tokens`;
  return `ended (${why})${got}${seconds === null ? "" : `, after ${seconds.toFixed(1)} s`}`;
}

function makeMore(count) {
  const chip = document.createElement("li");
  chip.className = "more";
  chip.textContent = sayMore(count);
  return chip;
}

function sayMore(count) {
  return `and ${count} more`;
}

/** The number of the request that a chip or a row stands for; null if it stands for none. */
export function numberOf(element) {
  const number = element.closest?.("[data-number]")?.dataset.number;
  return number === undefined ? null : Number(number);
}
