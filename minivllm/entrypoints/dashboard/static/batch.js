// The running batch: a row for each sequence that holds blocks, what the step does with it, its tokens, and its block table.

import { numberOf } from "./queues.js";
import { paint } from "./palette.js";

const MOST_ROWS = 64;
/** Pixels that a row needs besides its block table, and for a block of it. */
const BESIDE_TABLE = 335;
const BLOCK_WIDTH = 31;
/** Milliseconds without a new step, after which rows that are out of sight are drawn, too. */
const QUIET = 200;

export class Batch {
  #rows = new Map();
  #drawn = -1;
  #body;
  #sentence;
  #more;
  #empty;
  #frame;
  #mostBlocks = 6;
  #sight;
  #timer = null;

  constructor(state, schedule, onHighlight, root = document) {
    this.state = state;
    this.#body = root.getElementById("batch-rows");
    this.#sentence = root.getElementById("step-sentence");
    this.#more = root.getElementById("batch-more");
    this.#empty = root.getElementById("batch-empty");
    this.#frame = root.getElementById("batch-frame");
    new ResizeObserver(([entry]) => {
      const { width } = entry.contentRect;
      this.#mostBlocks = Math.max(4, Math.floor((width > 450 ? width - BESIDE_TABLE : width - 60) / BLOCK_WIDTH));
      this.repaint();
      schedule();
    }).observe(this.#frame);
    this.#sight = new IntersectionObserver(
      (entries) => {
        for (const { target, isIntersecting } of entries) {
          const row = this.#rows.get(target.dataset.key);
          if (row?.element !== target) continue;
          row.isInSight = isIntersecting;
          if (isIntersecting) row.showNow();
        }
      },
      { root: this.#frame, rootMargin: "40px" },
    );
    this.#body.addEventListener("pointerover", (event) => onHighlight(numberOf(event.target)));
    this.#body.addEventListener("pointerleave", () => onHighlight(null));
  }

  /** Make all rows again, in the next frame. */
  repaint() {
    this.#drawn = -1;
    this.#rows.clear();
    this.#sight.disconnect();
    this.#body.replaceChildren();
  }

  draw() {
    const { state } = this;
    if (this.#drawn === state.version) return;
    this.#drawn = state.version;
    set(this.#sentence, describeStep(state));
    const shown = state.sequences.slice(0, MOST_ROWS);
    const keys = new Set(shown.map(({ key }) => key));
    for (const [key, row] of this.#rows) {
      if (keys.has(key)) continue;
      this.#sight.unobserve(row.element);
      row.element.remove();
      this.#rows.delete(key);
    }
    const longest = Math.max(64, ...shown.map(lengthOf));
    const scale = 2 ** Math.ceil(Math.log2(longest));
    shown.forEach((sequence, place) => {
      let row = this.#rows.get(sequence.key);
      if (row === undefined) {
        row = new Row(sequence);
        this.#rows.set(sequence.key, row);
        this.#sight.observe(row.element);
      }
      if (this.#body.children[place] !== row.element) this.#body.insertBefore(row.element, this.#body.children[place] ?? null);
      row.show(sequence, scale, state.engine.block_size, this.#mostBlocks);
    });
    clearTimeout(this.#timer);
    this.#timer = setTimeout(() => {
      for (const row of this.#rows.values()) row.showNow();
    }, QUIET);
    const hidden = state.sequences.length - shown.length;
    set(this.#more, hidden ? `and ${hidden} more sequences` : "");
    this.#empty.hidden = shown.length > 0;
    this.#frame.hidden = shown.length === 0;
  }
}

class Row {
  isInSight = true;
  #strip = [];
  /** What it does not show yet, because it is out of sight. */
  #later = null;

  constructor({ key, number, index, request_id: id }) {
    this.element = make("tr", "sequence");
    this.element.setAttribute("role", "row");
    this.element.dataset.number = String(number);
    this.element.dataset.key = key;
    paint(this.element, number);
    const name = this.#cell("name");
    name.append(make("span", "chip", index ? `#${number}/${index}` : `#${number}`));
    name.title = id;
    const action = this.#cell("action");
    this.swatch = make("span", "swatch");
    this.action = make("span", "");
    action.append(this.swatch, this.action);
    const tokens = this.#cell("tokens");
    this.tokens = make("span", "count");
    this.bar = make("span", "bar");
    this.prompt = make("span", "prompt");
    this.generated = make("span", "generated");
    this.bar.append(this.prompt, this.generated);
    tokens.append(this.tokens, this.bar);
    const table = this.#cell("table");
    this.before = make("span", "before");
    this.blocks = make("span", "strip");
    table.append(this.before, this.blocks);
  }

  /** Show a sequence: now, or later if the row is out of sight. What is out of date is not drawn. */
  show(...what) {
    this.#later = what;
    if (this.isInSight) this.showNow();
    else this.element.classList.add("late");
  }

  showNow() {
    if (this.#later !== null) this.#show(...this.#later);
    this.#later = null;
    this.element.classList.remove("late");
  }

  #show(sequence, scale, blockSize, mostBlocks) {
    const { num_prompt_tokens: prompt, num_generated: generated, context_len: length } = sequence;
    const action = sequence.place === "swapped" ? "swapped" : sequence.action;
    if (this.swatch.dataset.state !== action) this.swatch.dataset.state = action;
    set(this.action, describeAction(sequence));
    set(this.tokens, describeTokens(sequence));
    const total = lengthOf(sequence);
    const part = prompt === null || generated === null ? (sequence.num_generated === 0 ? total : 0) : prompt;
    setWidth(this.prompt, part / scale);
    setWidth(this.generated, (total - part) / scale);
    this.#showTable(sequence.blocks, length, blockSize, mostBlocks);
  }

  #showTable(blocks, length, blockSize, mostBlocks) {
    const first = Math.max(0, blocks.length - mostBlocks);
    set(this.before, first ? `${first} … ` : "");
    while (this.#strip.length > blocks.length - first) this.#strip.pop().remove();
    for (let i = first; i < blocks.length; i += 1) {
      let cell = this.#strip[i - first];
      if (cell === undefined) {
        cell = make("span", "block");
        this.#strip.push(cell);
        this.blocks.append(cell);
      }
      const isFreed = blocks[i] < 0; // behind a sliding window
      set(cell, isFreed ? "" : String(blocks[i]));
      const held = isFreed ? 0 : length === null ? blockSize : Math.min(blockSize, Math.max(0, length - i * blockSize));
      const fill = `${Math.round((100 * held) / blockSize)}%`;
      if (cell.dataset.fill !== fill) {
        cell.dataset.fill = fill;
        cell.style.setProperty("--fill", fill);
      }
    }
  }

  #cell(name) {
    const cell = make("td", name);
    cell.setAttribute("role", "cell");
    this.element.append(cell);
    return cell;
  }
}

/** The tokens of a sequence, as far as they are known. */
function lengthOf({ context_len: length, num_prompt_tokens: prompt, num_generated: generated }) {
  return prompt === null || generated === null ? (length ?? 0) : prompt + generated;
}

function describeStep({ step, error, isIdle, numBlocks }) {
  if (isIdle) return "No step: the engine has nothing to do.";
  if (step === null) return "No step has ended yet.";
  if (error) return `The model failed in this step: ${error}`;
  const count = step.sequences.filter(({ action }) => action !== "stalled").length;
  const lost = step.sequences.length - count ? `, ${step.sequences.length - count} not in it` : "";
  return `${step.phase} of ${many(count, "sequence")}, ${many(step.num_tokens, "token")}, ${milliseconds(step)}${lost}; ${step.num_free_blocks} of ${numBlocks} blocks free`;
}

function milliseconds({ start, end }) {
  return `${(1000 * (end - start)).toFixed(0)} ms`;
}

function describeAction({ place, action, num_tokens: tokens, num_drafts: drafts, num_accepted: accepted }) {
  if (place === "swapped") return "swapped out";
  if (action === "stalled") return "stalled";
  const guesses = drafts ? `, ${accepted} of ${drafts} guesses right` : "";
  return `${action} ${many(tokens, "token")}${guesses}`;
}

function describeTokens({ context_len: length, num_prompt_tokens: prompt, num_generated: generated, num_cached_tokens: cached }) {
  const spared = cached ? ` (${cached} cached)` : "";
  if (prompt === null || generated === null) return `${length ?? "?"} so far${spared}`;
  return `${prompt} + ${generated}${spared}`;
}

function many(count, thing) {
  return `${count} ${thing}${count === 1 ? "" : "s"}`;
}

function make(tag, className, text = "") {
  const element = document.createElement(tag);
  element.className = className;
  element.textContent = text;
  return element;
}

function setWidth(element, share) {
  const width = `${Math.round(1000 * share) / 10}%`;
  if (element.style.width !== width) element.style.width = width;
}

function set(element, text) {
  if (element.textContent !== text) element.textContent = text;
}
