// The page's side of the worker: one call after another, and an end to one that does not come back.

/** Seconds that a call may take. Loading Python takes some more. */
const LONGEST_CALL = 4;
/** Those of one that runs to the end. */
export const LONGEST_RACE = 30;
const LONGEST_LOADING = 60;

export class Python {
  #worker = null;
  #calls = new Map();
  #next = 0;
  #isLoaded = false;

  /** Call Python with an object, and get its answer. Rejects with an Error whose message is a sentence. */
  call(message, longest = LONGEST_CALL) {
    if (this.#worker === null) this.#start();
    const id = this.#next;
    this.#next += 1;
    return new Promise((resolve, reject) => {
      const seconds = this.#isLoaded ? longest : LONGEST_LOADING + longest;
      const timer = setTimeout(() => this.#stop(seconds), 1000 * seconds);
      this.#calls.set(id, { resolve, reject, timer });
      this.#worker.postMessage({ id, message: JSON.stringify(message) });
    });
  }

  #start() {
    this.#isLoaded = false;
    this.#worker = new Worker(new URL("./worker.js", import.meta.url), { type: "module" });
    this.#worker.onmessage = ({ data: { id, answer, failure } }) => {
      this.#isLoaded = true;
      const call = this.#calls.get(id);
      if (call === undefined) return;
      this.#calls.delete(id);
      clearTimeout(call.timer);
      if (failure !== undefined) {
        call.reject(new Error(`Python has stopped: ${failure}`));
        return;
      }
      const content = JSON.parse(answer);
      if (content.error === undefined) call.resolve(content);
      else call.reject(new Error(content.error));
    };
    this.#worker.onerror = (event) => this.#end(`Python could not be started here: ${event.message ?? "the browser gives no reason"}.`);
  }

  #stop(seconds) {
    const loading = "Python has not been loaded after a minute: load the page again.";
    this.#end(this.#isLoaded ? `The code ran for ${seconds} seconds without an end, so it was stopped. Is there an endless loop in it?` : loading);
  }

  #end(sentence) {
    this.#worker.terminate();
    this.#worker = null;
    for (const { reject, timer } of this.#calls.values()) {
      clearTimeout(timer);
      reject(new Error(sentence));
    }
    this.#calls.clear();
  }
}
