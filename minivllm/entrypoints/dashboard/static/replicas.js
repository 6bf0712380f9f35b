// The replicas side by side: who waits and runs there, how full the cache is, and how fast it generates. A press shows its steps below.

import { ask } from "./events.js";

const STATES = {
  draining: "draining: finishes what it has",
  starting: "another is being started",
  unreachable: "does not answer",
  "given up": "given up: it died too often",
  gone: "gone",
};

export class Replicas {
  #drawn = null;
  #cards = [];

  /** @param onChoose Gets the rank of the replica whose steps are to be shown. */
  constructor(state, onChoose) {
    this.state = state;
    this.onChoose = onChoose;
    this.section = document.getElementById("replicas");
    this.list = document.getElementById("replica-cards");
    this.sum = document.getElementById("replica-sum");
  }

  draw() {
    const { replicas, engine } = this.state;
    if (this.#drawn === replicas) return;
    this.#drawn = replicas;
    this.section.hidden = replicas.length < 2;
    if (this.#cards.length !== replicas.length) this.#make(replicas);
    replicas.forEach((replica, i) => this.#cards[i].show(replica, replica.rank === engine.replica, engine.may_kill));
    const rate = replicas.reduce((sum, replica) => sum + replica.tokens_per_second, 0);
    const { resumed, lost } = this.state.streams;
    const sum = `together ${Math.round(rate)} tokens/s · streams resumed elsewhere: ${resumed} · lost: ${lost}`;
    if (this.sum.textContent !== sum) this.sum.textContent = sum;
  }

  #make(replicas) {
    this.#cards = replicas.map(({ rank }) => new Card(rank, () => this.onChoose(rank)));
    this.list.replaceChildren(...this.#cards.map((card) => card.item));
  }
}

class Card {
  constructor(rank, onPress) {
    this.item = document.createElement("li");
    this.button = document.createElement("button");
    this.button.type = "button";
    this.button.className = "replica";
    this.button.addEventListener("click", onPress);
    this.name = this.#add("strong", `Replica ${rank}`);
    this.rate = this.#add("span");
    this.queues = this.#add("span");
    this.bar = this.#add("span");
    this.bar.className = "blocks";
    this.fill = this.bar.appendChild(document.createElement("span"));
    this.blocks = this.#add("small");
    this.kill = Object.assign(document.createElement("button"), { type: "button", className: "kill", textContent: "Kill" });
    this.kill.setAttribute("aria-label", `Kill replica ${rank}`);
    this.kill.addEventListener("click", () => kill(rank, this.kill));
    this.item.append(this.button, this.kill);
  }

  show(replica, isShown, mayKill) {
    const { state, num_running: running, num_waiting: waiting, num_swapped: swapped } = replica;
    this.button.dataset.state = state;
    this.button.setAttribute("aria-pressed", String(isShown));
    const queues = `running ${running}, waiting ${waiting}${swapped ? `, swapped out ${swapped}` : ""}`;
    const isThere = state === "ready" || state === "draining";
    this.kill.hidden = !mayKill;
    this.kill.disabled = !isThere;
    write(this.rate, isThere ? `${Math.round(replica.tokens_per_second)} tokens/s` : "");
    write(this.queues, state === "ready" ? queues : isThere ? `${queues}, ${STATES[state]}` : STATES[state]);
    const { num_used_blocks: used, num_gpu_blocks: all } = replica;
    this.fill.style.width = `${all ? (100 * used) / all : 0}%`;
    write(this.blocks, `${used} of ${all} blocks`);
  }

  #add(tag, text = "") {
    return this.button.appendChild(Object.assign(document.createElement(tag), { textContent: text }));
  }
}

/** Ask the server to kill a replica. What comes of it, the events tell. */
async function kill(rank, button) {
  button.disabled = true;
  try {
    await ask(`replicas/${rank}/kill`, { method: "POST", headers: { "Content-Type": "application/json" }, body: "{}" });
  } catch (error) {
    button.title = error.message;
    button.disabled = false;
  }
}

function write(element, text) {
  if (element.textContent !== text) element.textContent = text;
}
