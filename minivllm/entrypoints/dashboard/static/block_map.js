// The map of the cache: a cell for every block, in the looks of minivllm/viz/cells.py, on a canvas.
//
// The lower part of a cell shows how many of its slots hold tokens, the upper one its number and whose it is. In cells too small for
// that, the bar takes all of it; cells of a few pixels are one dot of an image. Only cells that have changed are drawn again.

import { ALLOCATED, currentTheme, edgeOf, parts, requestColor, tint } from "./palette.js";

const GUTTER = 44;
const BAR = 0.36;
const LID = 0.1;
const LARGEST = { width: 62, height: 36 };
const SMALLEST_DRAWN = 5;
const MOST_STRIPES = 4;

export class BlockMap {
  #canvas;
  #frame;
  #cursor;
  #detail;
  #say;
  #context;
  #width = 0;
  #layout = null;
  #looks = new Int32Array(0);
  #pointed = -1;
  #colors = new Map();
  #dots = null;
  #highlighted = null;
  #isNew = true;

  /** `root` has the elements: the document, or a shadow tree. */
  constructor(state, schedule, root = document) {
    this.state = state;
    this.#canvas = root.getElementById("map-canvas");
    this.#frame = root.getElementById("map-frame");
    this.#cursor = root.getElementById("map-cursor");
    this.#detail = root.getElementById("map-detail");
    this.#say = root.getElementById("map-say");
    this.#context = this.#canvas.getContext("2d", { alpha: false });
    new ResizeObserver(([entry]) => {
      this.#width = Math.floor(entry.contentRect.width);
      this.repaint();
      schedule();
    }).observe(this.#frame);
    this.#canvas.addEventListener("pointermove", (event) => this.#point(this.#blockAt(event.offsetX, event.offsetY)));
    this.#canvas.addEventListener("pointerleave", () => this.#point(-1));
    this.#canvas.addEventListener("blur", () => this.#point(-1));
    this.#canvas.addEventListener("focus", () => this.#point(Math.max(this.#pointed, 0), true));
    this.#canvas.addEventListener("keydown", (event) => this.#move(event));
  }

  /** Draw everything again, in the next frame. */
  repaint() {
    this.#isNew = true;
    this.#colors.clear();
    this.#dots = null;
  }

  /** Make the other requests pale; null for none. */
  highlight(number) {
    this.#highlighted = number;
  }

  draw() {
    const count = this.state.numBlocks;
    if (!count || !this.#width) return;
    if (this.#isNew || this.#looks.length !== count) this.#arrange(count);
    const blocks = this.#read(count);
    if (this.#layout.height < SMALLEST_DRAWN) this.#drawDots(blocks);
    else this.#drawCells(blocks);
    this.#describe();
  }

  // -- what the blocks hold ---------------------------------------------------------------------------------------------------------

  /** The requests that have each block in a table, the first in `first` (-1: none) and all of them in `several`; the tokens in it. */
  #read(count) {
    const size = this.state.engine.block_size;
    const first = new Int32Array(count).fill(-1);
    const held = new Uint32Array(count);
    const several = new Map();
    for (const { place, number, blocks, context_len: length } of this.state.sequences) {
      if (place !== "running") continue;
      for (let i = 0; i < blocks.length; i += 1) {
        const block = blocks[i];
        if (block < 0) continue; // freed behind a sliding window
        const tokens = length === null ? size : Math.min(size, Math.max(0, length - i * size));
        if (tokens > held[block]) held[block] = tokens;
        if (first[block] === -1) first[block] = number;
        else if (first[block] !== number) {
          const owners = several.get(block) ?? [first[block]];
          if (!owners.includes(number)) several.set(block, [...owners, number]);
        }
      }
    }
    return { count, size, first, held, several };
  }

  /** A number that differs where a block looks different. */
  #look({ size, first, held, several }, block) {
    let look = (first[block] + 1) * (size + 1) + held[block];
    for (const owner of several.get(block) ?? []) look = Math.imul(look, 31) + owner + 7;
    look = Math.imul(look, 31) + (this.state.shared.get(block) ?? 0);
    look = Math.imul(look, 4) + (this.state.cached.has(block) ? 1 : 0);
    return look + (this.#isPale(first[block], several.get(block)) ? 2 : 0);
  }

  #isPale(owner, owners) {
    return this.#highlighted !== null && owner !== -1 && owner !== this.#highlighted && !owners?.includes(this.#highlighted);
  }

  // -- where they are ---------------------------------------------------------------------------------------------------------------

  #arrange(count) {
    const width = this.#width - GUTTER;
    const room = count > 8000 ? 420 : 240;
    let columns = 0;
    let height = LARGEST.height;
    for (; height >= SMALLEST_DRAWN; height -= 1) {
      const ideal = height >= 16 ? Math.min(LARGEST.width, 1.5 * height) : height;
      columns = roundColumns(Math.floor(width / ideal), count);
      if (Math.ceil(count / columns) * height <= room) break;
    }
    let cellWidth;
    if (height < SMALLEST_DRAWN) {
      columns = Math.max(8, Math.ceil(Math.sqrt((count * width) / room) / 8) * 8);
      cellWidth = width / columns;
      height = Math.min(cellWidth, room / Math.ceil(count / columns));
    } else {
      height = Math.min(LARGEST.height, Math.floor(room / Math.ceil(count / columns)));
      cellWidth = Math.floor(Math.min(width / columns, LARGEST.width, 2.2 * height));
      height = Math.min(height, Math.round(1.15 * cellWidth));
    }
    const rows = Math.ceil(count / columns);
    const total = Math.ceil(rows * height) + 1;
    const scale = window.devicePixelRatio || 1;
    this.#canvas.width = Math.round(this.#width * scale);
    this.#canvas.height = Math.round(total * scale);
    this.#canvas.style.height = `${total}px`;
    this.#layout = { columns, rows, width: cellWidth, height, count };
    this.#looks = new Int32Array(count).fill(-1);
    this.#isNew = false;
    const context = this.#context;
    context.setTransform(scale, 0, 0, scale, 0, 0);
    context.fillStyle = currentTheme().surface;
    context.fillRect(0, 0, this.#width, total);
    context.fillStyle = currentTheme().soft;
    context.font = "11px system-ui, sans-serif";
    context.textAlign = "right";
    context.textBaseline = "middle";
    const every = Math.ceil(16 / height);
    for (let row = 0; row < rows; row += every) {
      if (rows - row >= every || row === 0) context.fillText(String(row * columns), GUTTER - 6, (row + 0.5) * height);
    }
    context.font = `${Math.max(9, Math.min(12, Math.floor(height * 0.42)))}px system-ui, sans-serif`;
    const longest = context.measureText(String(count - 1)).width;
    this.#layout.withNumbers = height >= 19 && longest + 5 <= cellWidth;
    this.#layout.withNames = this.#layout.withNumbers && longest + context.measureText("000").width + 10 <= cellWidth;
  }

  #place(block) {
    const { columns, width, height } = this.#layout;
    return [GUTTER + (block % columns) * width, Math.floor(block / columns) * height];
  }

  #blockAt(x, y) {
    if (this.#layout === null) return -1;
    const { columns, rows, width, height, count } = this.#layout;
    const column = Math.floor((x - GUTTER) / width);
    const row = Math.floor(y / height);
    const block = row * columns + column;
    return column < 0 || column >= columns || row < 0 || row >= rows || block >= count ? -1 : block;
  }

  // -- cells ------------------------------------------------------------------------------------------------------------------------

  #drawCells(blocks) {
    for (let block = 0; block < blocks.count; block += 1) {
      const look = this.#look(blocks, block);
      if (look === this.#looks[block]) continue;
      this.#looks[block] = look;
      this.#drawCell(blocks, block);
    }
  }

  #drawCell(blocks, block) {
    const { width: fullWidth, height: fullHeight, withNumbers, withNames } = this.#layout;
    const [left, top] = this.#place(block);
    const gap = fullHeight >= 8 ? 1 : 0.5;
    const [x, y, width, height] = [left + gap, top + gap, fullWidth - 2 * gap, fullHeight - 2 * gap];
    const context = this.#context;
    const theme = currentTheme();
    const owner = blocks.first[block];
    const isCached = this.state.cached.has(block);
    const references = this.state.shared.get(block) ?? 1;
    const bar = withNumbers ? height * BAR : height * (1 - LID);
    context.fillStyle = theme.surface;
    context.fillRect(left, top, fullWidth, fullHeight);
    if (owner !== -1) {
      const owners = (blocks.several.get(block) ?? [owner]).slice(0, MOST_STRIPES);
      const isPale = this.#isPale(owner, blocks.several.get(block));
      context.globalAlpha = isPale ? 0.25 : 1;
      const end = (width * blocks.held[block]) / blocks.size;
      owners.forEach((number, i) => {
        const share = 1 / owners.length;
        context.fillStyle = this.#color(number).allocated;
        context.fillRect(x + width * i * share, y, width * share, height);
      });
      owners.forEach((number, i) => {
        const share = bar / owners.length;
        context.fillStyle = this.#color(number).full;
        context.fillRect(x, y + height - share * (i + 1), end, share);
      });
      this.#outline(x, y, width, height, references > 1 ? theme.ink : this.#color(owner).edge, references > 1 ? (height > 14 ? 2 : 1.5) : 1);
    } else if (isCached) {
      context.fillStyle = tint(theme.neutral, 0.88);
      context.fillRect(x, y, width, height);
      context.fillStyle = this.#dotPattern();
      context.fillRect(x, y + height - bar, width, bar);
      this.#outline(x, y, width, height, theme.neutral, 1);
    } else {
      this.#outline(x, y, width, height, theme.pale, 1);
    }
    if (isCached) {
      context.fillStyle = theme.ink;
      context.fillRect(x, y, width, Math.max(2, height * LID));
    }
    if (withNumbers) this.#write(block, owner, references, withNames, x, y + (height - bar) * 0.55, width);
    context.globalAlpha = 1;
  }

  #write(block, owner, references, withNames, x, middle, width) {
    const context = this.#context;
    const theme = currentTheme();
    context.fillStyle = owner === -1 ? theme.soft : theme.ink;
    context.textAlign = "left";
    context.fillText(String(block), x + 3, middle);
    if (owner === -1 || !withNames) return;
    context.textAlign = "right";
    context.fillText(references > 1 ? `×${references}` : `#${owner}`, x + width - 3, middle);
  }

  #outline(x, y, width, height, color, thickness) {
    if (this.#layout.height < 8 && thickness === 1) return;
    const context = this.#context;
    context.strokeStyle = color;
    context.lineWidth = thickness;
    context.strokeRect(x + thickness / 2, y + thickness / 2, width - thickness, height - thickness);
  }

  #color(number) {
    let color = this.#colors.get(number);
    if (color === undefined) {
      const full = requestColor(number);
      color = { full, allocated: tint(full, ALLOCATED), edge: edgeOf(full) };
      this.#colors.set(number, color);
    }
    return color;
  }

  #dotPattern() {
    if (this.#dots === null) {
      const tile = new OffscreenCanvas(4, 4);
      const context = tile.getContext("2d");
      context.fillStyle = tint(currentTheme().neutral, 0.8);
      context.fillRect(0, 0, 4, 4);
      context.fillStyle = tint(currentTheme().neutral, 0.3);
      context.fillRect(1, 1, 1.4, 1.4);
      this.#dots = this.#context.createPattern(tile, "repeat");
    }
    return this.#dots;
  }

  /** Every block as one dot of an image. */
  #drawDots(blocks) {
    const { columns, rows, width, height, count } = this.#layout;
    const image = new ImageData(columns, rows);
    const pixels = new Uint32Array(image.data.buffer);
    const theme = currentTheme();
    const plain = { free: dot(tint(theme.pale, 0.6)), cached: dot(theme.neutral), shared: dot(theme.ink) };
    const pale = (number) => dot(this.#color(number).allocated);
    for (let block = 0; block < count; block += 1) {
      const owner = blocks.first[block];
      if (owner === -1) pixels[block] = this.state.cached.has(block) ? plain.cached : plain.free;
      else if (this.state.shared.has(block)) pixels[block] = plain.shared;
      else if (!blocks.held[block] || this.#isPale(owner, blocks.several.get(block))) pixels[block] = pale(owner);
      else pixels[block] = dot(this.#color(owner).full);
    }
    const small = new OffscreenCanvas(columns, rows);
    small.getContext("2d").putImageData(image, 0, 0);
    this.#context.imageSmoothingEnabled = false;
    this.#context.drawImage(small, GUTTER, 0, columns * width, rows * height);
  }

  // -- one block in words -----------------------------------------------------------------------------------------------------------

  #point(block, aloud = false) {
    this.#pointed = block;
    this.#cursor.hidden = block === -1;
    if (block !== -1 && this.#layout !== null) {
      const [x, y] = this.#place(block);
      const { width, height } = this.#layout;
      this.#cursor.style.width = `${Math.max(width, 6)}px`;
      this.#cursor.style.height = `${Math.max(height, 6)}px`;
      this.#cursor.style.transform = `translate(${x}px, ${y}px)`;
    }
    this.#describe();
    if (aloud) this.#say.textContent = this.#detail.textContent;
  }

  #move(event) {
    if (this.#layout === null) return;
    const { columns, count } = this.#layout;
    const steps = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: columns, ArrowUp: -columns, Home: -count, End: count };
    if (!(event.key in steps)) return;
    event.preventDefault();
    const goal = Math.max(this.#pointed, 0) + steps[event.key];
    const isOutside = goal < 0 || goal >= count;
    if (isOutside && event.key.startsWith("Arrow")) return;
    this.#point(Math.min(Math.max(goal, 0), count - 1), true);
  }

  #describe() {
    const text = this.#pointed === -1 || this.#layout === null ? this.#summary() : this.#sentence(this.#pointed);
    if (this.#detail.textContent !== text) this.#detail.textContent = text;
  }

  #summary() {
    const { numBlocks, numUsedBlocks, engine } = this.state;
    if (!numBlocks) return "";
    const share = Math.round((100 * numUsedBlocks) / numBlocks);
    return `${numUsedBlocks} of ${numBlocks} blocks in use (${share} %), ${engine.block_size} tokens in a block. Point at a block to see what it holds.`;
  }

  #sentence(block) {
    const size = this.state.engine.block_size;
    const holders = [];
    for (const { place, number, index, blocks, context_len: length, num_prompt_tokens: prompt } of this.state.sequences) {
      const at = place === "running" ? blocks.indexOf(block) : -1;
      if (at === -1) continue;
      const from = at * size;
      const to = length === null ? from + size : Math.min(from + size, length);
      const name = index ? `#${number} (sequence ${index})` : `#${number}`;
      if (to <= from) holders.push(`${name}, allocated and still empty`);
      else {
        const kind = prompt === null ? "" : to <= prompt ? " of the prompt" : from >= prompt ? " of the answer" : " of prompt and answer";
        holders.push(`${name}, tokens ${from} to ${to - 1}${kind} (${to - from} of ${size} slots)`);
      }
    }
    const known = this.state.cached.has(block) ? " The prefix cache knows its contents." : "";
    if (!holders.length) return `Block ${block}: free.${known}`;
    const count = this.state.shared.get(block) ?? 1;
    const more = holders.length > 3 ? ` and ${holders.length - 3} more` : "";
    const shared = count > 1 ? ` Shared: ${count} references.` : "";
    return `Block ${block}: request ${holders.slice(0, 3).join("; ")}${more}.${shared}${known}`;
  }
}

/** A round number of columns, and one that fills all rows if there is one. */
function roundColumns(columns, count) {
  const most = Math.max(1, Math.min(columns, count));
  if (most > 128) return most - (most % 10);
  const round = [100, 80, 64, 50, 40, 32, 25, 20, 16, 12, 10, 8, 6, 5, 4, 2, 1].filter((number) => number <= most);
  return round.find((number) => count % number === 0 && number > most / 2) ?? round[0];
}

/** A colour as one pixel of an image (bytes in the order red, green, blue, alpha). */
function dot(color) {
  const [red, green, blue] = parts(color);
  return ((255 << 24) | (blue << 16) | (green << 8) | red) >>> 0;
}
