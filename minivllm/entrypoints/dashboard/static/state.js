// How things stand, as the events tell it. Panels read it; nobody but this file writes it.

/** Seconds that the curves show. */
export const WINDOW = 60;
/** Seconds in one of their points. */
export const BIN = 0.5;
/** Seconds by which the page's clock may fall behind the engine's from one report to the next: they drift apart over hours. */
const DRIFT = 0.001;
/** Stands where the page did not follow: nothing is known from here to the next point. */
const GAP = Object.freeze({ isGap: true });
const MOST_ENDED = 40;
const MOST_DOTS = 600;

export class LiveState {
  engine = null;
  /** The newest step; null before the first one, and when the engine has nothing to do. */
  step = null;
  isIdle = true;
  /** Sequences that hold blocks, in the order in which they came; each with its block table. */
  sequences = [];
  waiting = [];
  counts = { running: 0, waiting: 0, swapped: 0 };
  /** Those that ended last, the newest first. */
  ended = [];
  numEnded = 0;
  numPreempted = 0;
  numUsedBlocks = 0;
  cached = new Set();
  shared = new Map();
  error = null;
  /** All replicas at a glance; empty if there is only one. Another list with every event. */
  replicas = [];
  /** How many requests have gone on elsewhere when their replica was lost, and how many were lost with it. */
  streams = { resumed: 0, lost: 0 };
  /** Point number of the curves → what the steps in it add up to. Of those before the window, the last one is there too. */
  bins = new Map();
  /** [engine's time, seconds] for each first token. */
  firstTokens = [];
  /** Changes with every event: what has been drawn of an old version is out of date. */
  version = 0;
  /** The page's clock minus the engine's, in seconds. */
  #offset = null;
  #isNewClock = true;
  #newestBin = -1;
  #tables = new Map();
  #isNew = true;

  /** Take in an event of /live. */
  apply(event, content) {
    this.version += 1;
    if (event === "engine") this.#begin(content);
    if (event === "replicas") {
      this.replicas = content.replicas;
      this.streams = { resumed: content.streams_resumed, lost: content.streams_lost };
    }
    if (event === "steps") this.#takeSteps(content);
    if (event === "idle") this.#clear();
    if (event === "busy") this.isIdle = false;
    if (event === "idle" || event === "busy") this.#takeStats(content);
  }

  /** Another replica is shown from now on: of the last one nothing is known any more. */
  showReplica(rank) {
    this.version += 1;
    if (this.engine) this.engine.replica = rank;
    this.replicas = [...this.replicas];
    this.#clear();
    this.#isNew = true;
    this.#forgetCached();
    this.ended = [];
    this.numEnded = 0;
    this.numPreempted = 0;
    this.error = null;
    this.#offset = null;
    this.#forgetTimes();
  }

  /** The engine's time now, in seconds; null before it has told any. */
  now() {
    return this.#offset === null ? null : performance.now() / 1000 - this.#offset;
  }

  get numBlocks() {
    return this.engine?.num_gpu_blocks ?? 0;
  }

  /** The old picture stays until there is a new one; what follows tells everything again. */
  #begin(engine) {
    this.engine = engine;
    if (engine.num_engines === 1) this.replicas = [];
    this.#tables.clear();
    this.#isNewClock = true;
    this.#isNew = true;
    if (this.#newestBin >= 0) this.bins.set(this.#newestBin + 1, GAP);
  }

  #forgetCached() {
    if (this.#isNew) this.cached.clear();
    this.#isNew = false;
  }

  #clear() {
    this.step = null;
    this.sequences = [];
    this.waiting = [];
    this.shared.clear();
    this.#tables.clear();
    this.counts = { running: 0, waiting: 0, swapped: 0 };
    this.numUsedBlocks = 0;
    this.isIdle = true;
  }

  #takeSteps(report) {
    this.step = report;
    this.isIdle = false;
    this.error = report.error;
    this.counts = { running: report.num_running, waiting: report.num_waiting, swapped: report.num_swapped };
    this.numUsedBlocks = this.numBlocks - report.num_free_blocks;
    this.waiting = report.waiting;
    const tables = new Map();
    for (const sequence of report.sequences) {
      const key = JSON.stringify([sequence.request_id, sequence.index]);
      const known = this.#tables.get(key) ?? [];
      known.length = sequence.keep;
      for (const block of sequence.blocks) known.push(block);
      sequence.blocks = known;
      sequence.key = key;
      tables.set(key, known);
    }
    this.#tables = tables;
    this.sequences = report.sequences.sort(byNumber);
    this.waiting.sort(byNumber);
    this.#forgetCached();
    for (const block of report.uncached) this.cached.delete(block);
    for (const block of report.cached) this.cached.add(block);
    this.shared = new Map(Object.entries(report.shared).map(([block, count]) => [Number(block), count]));
    for (const happening of report.happenings) {
      if (happening.what === "preempted") this.numPreempted += 1;
      else this.ended.unshift(happening);
    }
    this.numEnded += report.happenings.filter(({ what }) => what === "ended").length;
    this.ended.length = Math.min(this.ended.length, MOST_ENDED);
    this.#takeTimes(report);
  }

  #takeStats(stats) {
    this.#forgetCached();
    this.counts = { running: stats.num_running, waiting: stats.num_waiting, swapped: stats.num_swapped };
    this.numUsedBlocks = stats.num_used_blocks;
    const now = this.now();
    if (now === null) return;
    Object.assign(this.#bin(now), this.counts, { used: stats.num_used_blocks / this.numBlocks });
  }

  #takeTimes(report) {
    const offset = performance.now() / 1000 - report.end;
    // What comes quickest shows best how the clocks differ.
    this.#offset = this.#isNewClock ? offset : Math.min(offset, this.#offset + DRIFT);
    this.#isNewClock = false;
    if (Math.floor(report.end / BIN) < this.#newestBin - WINDOW / BIN) this.#forgetTimes();
    const { curve } = report;
    for (let i = 0; i < curve.end.length; i += 1) {
      const bin = this.#bin(curve.end[i]);
      bin.generated += curve.num_generated[i];
      bin.running = curve.num_running[i];
      bin.waiting = curve.num_waiting[i];
      bin.swapped = curve.num_swapped[i];
      bin.used = 1 - curve.num_free_blocks[i] / this.numBlocks;
      const kind = curve.phase[i] === "decode" ? "decode" : "prefill";
      bin[`${kind}Seconds`] += curve.length[i];
      bin[`${kind}Steps`] += 1;
      if (curve.mean_gap[i] !== null) {
        bin.gapSeconds += curve.mean_gap[i];
        bin.gaps += 1;
        bin.longestGap = Math.max(bin.longestGap, curve.max_gap[i]);
      }
    }
    this.firstTokens.push(...report.first_tokens);
    const oldest = report.end - WINDOW;
    this.firstTokens = this.firstTokens.filter(([time]) => time > oldest).slice(-MOST_DOTS);
  }

  #bin(time) {
    const number = Math.floor(time / BIN);
    let bin = this.bins.get(number);
    if (bin === undefined || bin.isGap) {
      bin = { generated: 0, running: 0, waiting: 0, swapped: 0, used: 0, decodeSeconds: 0, decodeSteps: 0 };
      Object.assign(bin, { prefillSeconds: 0, prefillSteps: 0, gapSeconds: 0, gaps: 0, longestGap: 0 });
      this.bins.set(number, bin);
      this.#newestBin = Math.max(this.#newestBin, number);
      const old = [...this.bins.keys()].filter((other) => other < this.#newestBin - WINDOW / BIN - 2);
      const latest = Math.max(...old);
      for (const other of old) if (other !== latest) this.bins.delete(other);
    }
    return bin;
  }

  #forgetTimes() {
    this.bins.clear();
    this.firstTokens = [];
    this.#newestBin = -1;
  }
}

function byNumber(one, other) {
  return one.number - other.number || one.index - other.index;
}
