// The page's side of the worker: calls of Python, and an end to one that does not come back.

/** Seconds that a call may take, once Python is loaded. */
const LONGEST_CALL = 4;
/** Those of one that runs to the end. */
export const LONGEST_RACE = 30;

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
      const call = { resolve, reject, longest, timer: null };
      this.#calls.set(id, call);
      if (this.#isLoaded) this.#watch(call);
      this.#worker.postMessage({ id, message: JSON.stringify(message) });
    });
  }

  #start() {
    this.#isLoaded = false;
    this.#worker = new Worker(new URL("./worker.js", import.meta.url), { type: "module" });
    this.#worker.onmessage = ({ data: { isLoaded, failure, id, answer } }) => {
      if (isLoaded) {
        this.#isLoaded = true;
        for (const call of this.#calls.values()) this.#watch(call);
      } else if (failure !== undefined) this.#end(`Python has stopped: ${failure}`);
      else this.#take(id, JSON.parse(answer));
    };
    this.#worker.onerror = (event) => this.#end(`Python could not be started here: ${event.message ?? "the browser gives no reason"}.`);
  }

  #take(id, content) {
    const call = this.#calls.get(id);
    if (call === undefined) return;
    this.#calls.delete(id);
    clearTimeout(call.timer);
    if (content.error === undefined) call.resolve(content);
    else call.reject(new Error(content.error));
  }

  #watch(call) {
    const sentence = `The code ran for ${call.longest} seconds without an end, so it was stopped. Is there an endless loop in it?`;
    call.timer = setTimeout(() => this.#end(sentence), 1000 * call.longest);
  }

  /** The next call starts another one. */
  #end(sentence) {
    this.#worker?.terminate();
    this.#worker = null;
    for (const { reject, timer } of this.#calls.values()) {
      clearTimeout(timer);
      reject(new Error(sentence));
    }
    this.#calls.clear();
  }
}
