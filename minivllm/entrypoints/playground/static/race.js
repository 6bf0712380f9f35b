// A race at one moment of the engine's clock: both runs side by side, each drawn by the live page's panels in a shadow tree of its own.

import { Batch } from "./batch.js";
import { BlockMap } from "./block_map.js";
import { LiveState } from "./state.js";
import { LONGEST_RACE } from "./python.js";
import { Queues } from "./queues.js";

const PANELS = ["queues", "map", "batch"];
const STYLES = ["style.css", "playground.css"];
const NOTHING = { num_running: 0, num_waiting: 0, num_swapped: 0, num_used_blocks: 0 };

const find = (id) => document.getElementById(`race-${id}`);

export class RaceView {
  /** Made by the first race. */
  #views = [];
  #moments = [];
  #first = null;
  /** The numbers of the moment that is drawn, and of the one that the reader wants to see. */
  #shown = -1;
  #wanted = 0;
  #isAsking = false;
  #isPlaying = false;
  /** The number of the race, under which Python has its runs: an answer about another one does not count any more. */
  #race = 0;

  constructor(python, stepsPerSecond, tellProblem) {
    this.python = python;
    this.stepsPerSecond = stepsPerSecond;
    this.tellProblem = tellProblem;
    const turn = (change) => () => {
      this.pause();
      this.#go(change());
    };
    find("back").addEventListener("click", turn(() => this.#wanted - 1));
    find("step").addEventListener("click", turn(() => this.#wanted + 1));
    find("first").addEventListener("click", turn(() => this.#first));
    find("moment").addEventListener("input", turn(() => Number(find("moment").value)));
    find("play").addEventListener("click", () => (this.#isPlaying ? this.pause() : this.#play()));
  }

  /** Show a race: its number, its runs as they were asked for, all its moments in seconds, and the number of the one where the runs part, or null. */
  begin(race, runs, moments, first) {
    this.pause();
    if (!this.#views.length) {
      const highlight = (number) => this.#views.forEach((view) => view.highlight(number));
      this.#views = [...find("runs").children].map((home) => new RunView(home, highlight));
    }
    this.#race = race;
    this.#moments = moments;
    this.#first = first;
    this.#shown = -1;
    this.#views.forEach((view, i) => view.begin(runs[i]));
    find("moment").max = String(moments.length - 1);
    find("first").disabled = first === null;
    return this.#go(first ?? 0);
  }

  repaint() {
    for (const view of this.#views) view.repaint();
  }

  pause() {
    this.#isPlaying = false;
    find("play").textContent = "Play both";
    find("clock").setAttribute("aria-live", "polite");
  }

  #play() {
    this.#isPlaying = true;
    find("play").textContent = "Pause";
    find("clock").setAttribute("aria-live", "off");
    if (this.#wanted === this.#moments.length - 1) this.#go(0);
    let last = performance.now();
    let due = 0;
    const frame = (time) => {
      if (!this.#isPlaying) return;
      due = Math.min(64, due + ((time - last) / 1000) * this.stepsPerSecond());
      last = time;
      if (due >= 1 && !this.#isAsking) {
        this.#go(this.#wanted + Math.floor(due));
        due -= Math.floor(due);
      }
      if (this.#wanted === this.#moments.length - 1) this.pause();
      requestAnimationFrame(frame);
    };
    requestAnimationFrame(frame);
  }

  /** Show a moment. While Python is at one, only the latest of those that are asked for waits. */
  async #go(number) {
    this.#wanted = Math.max(0, Math.min(number, this.#moments.length - 1));
    find("moment").value = String(this.#wanted);
    const seconds = `${this.#moments[this.#wanted].toFixed(3)} s`;
    find("moment").setAttribute("aria-valuetext", seconds);
    find("clock").textContent = `${seconds}${this.#wanted === this.#first ? ": here they part" : ""}`;
    find("back").disabled = this.#wanted === 0;
    find("step").disabled = this.#wanted === this.#moments.length - 1;
    if (this.#isAsking) return;
    this.#isAsking = true;
    while (this.#shown !== this.#wanted) {
      const [race, asked] = [this.#race, this.#wanted];
      try {
        const { runs } = await this.python.call({ look: asked, number: race }, LONGEST_RACE);
        if (race !== this.#race) continue;
        this.#views.forEach((view, i) => view.show(runs[i]));
      } catch (error) {
        if (race !== this.#race) continue;
        this.pause();
        this.tellProblem(error.message);
      }
      this.#shown = asked;
    }
    this.#isAsking = false;
  }
}

/** One run: its name, how far it is, and the panels. */
class RunView {
  #state = new LiveState();
  #panels;
  #isScheduled = false;

  constructor(home, highlight) {
    [this.name, this.progress] = home.children;
    const root = home.lastElementChild.attachShadow({ mode: "open" });
    for (const href of STYLES) root.append(Object.assign(document.createElement("link"), { rel: "stylesheet", href }));
    for (const id of PANELS) root.append(document.getElementById(id).cloneNode(true));
    root.getElementById("step-sentence").ariaLive = null; // the clock is said
    this.#state.now = () => null;
    const schedule = () => this.#schedule();
    this.#panels = {
      map: new BlockMap(this.#state, schedule, root),
      queues: new Queues(this.#state, schedule, highlight, root),
      batch: new Batch(this.#state, schedule, highlight, root),
    };
  }

  begin({ name, settings }) {
    this.name.textContent = name;
    this.#state.apply("engine", { ...settings, num_engines: 1, replica: 0 });
    this.#startOver();
    this.repaint();
  }

  show({ num_steps: steps, num_steps_of_run: all, report, is_new: isNew, is_idle: isIdle }) {
    if (isNew) this.#startOver();
    if (report !== null) this.#state.apply("steps", report);
    if (isIdle) this.#state.apply("idle", NOTHING);
    this.progress.textContent = steps === 0 ? "not yet begun" : isIdle && steps === all ? `all requests have ended, after ${all} steps` : `step ${steps - 1}; the last is ${all - 1}`;
    this.#schedule();
  }

  highlight(number) {
    this.#panels.map.highlight(number);
    this.#schedule();
  }

  repaint() {
    for (const panel of Object.values(this.#panels)) panel.repaint();
    this.#schedule();
  }

  #startOver() {
    this.#state.apply("idle", NOTHING);
    this.#state.showReplica(0);
  }

  #schedule() {
    if (this.#isScheduled) return;
    this.#isScheduled = true;
    requestAnimationFrame(() => {
      this.#isScheduled = false;
      for (const panel of Object.values(this.#panels)) panel.draw();
    });
  }
}
