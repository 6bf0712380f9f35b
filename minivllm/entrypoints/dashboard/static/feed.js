// Follows /live, and comes back after a failure: the server, or its engine, may have been started again.

import { ask, readEvents } from "./events.js";

const FIRST_PAUSE = 1;
const LONGEST_PAUSE = 30;

export class Feed {
  /** The replica whose steps to follow. */
  replica = 0;
  #stop = null;

  /**
   * @param onEvent Gets the name and the content of each event.
   * @param onLost Gets a sentence, and the seconds until the next attempt.
   */
  constructor(onEvent, onLost) {
    this.onEvent = onEvent;
    this.onLost = onLost;
  }

  start() {
    if (this.#stop === null) {
      this.#stop = new AbortController();
      this.#follow(this.#stop.signal);
    }
  }

  stop() {
    this.#stop?.abort();
    this.#stop = null;
  }

  async #follow(signal) {
    let pause = FIRST_PAUSE;
    while (!signal.aborted) {
      let reason = "The server has closed the connection.";
      try {
        const response = await ask(`live?replica=${this.replica}`, { signal, headers: { Accept: "text/event-stream" } });
        for await (const { event, data } of readEvents(response)) {
          if (signal.aborted) return;
          const content = JSON.parse(data);
          if (event === "dead") reason = content.message;
          if (event === "steps" || event === "idle") pause = FIRST_PAUSE;
          this.onEvent(event, content);
        }
      } catch (error) {
        if (signal.aborted) return;
        reason = error.message;
        if (error.status === 400) this.replica = 0; // the server was started again with fewer
      }
      this.onLost(reason, pause);
      await new Promise((resolve) => setTimeout(resolve, 1000 * pause));
      pause = Math.min(2 * pause, LONGEST_PAUSE);
    }
  }
}
