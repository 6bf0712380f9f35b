// The box to send prompts: each is a request of its own to the same /v1 that other clients use, and its answer streams.

import { ask, readEvents } from "./events.js";
import { paint } from "./palette.js";

const AT_ONCE = 8;
const MOST_ANSWERS = 24;

export class PromptBox {
  #form = document.getElementById("prompt-form");
  #answers = document.getElementById("answers");
  #stop = document.getElementById("stop");
  #status = document.getElementById("prompt-status");
  #running = new Set();
  #shown = [];

  constructor(state) {
    this.state = state;
    this.#form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.#send(event.submitter?.value === "several" ? AT_ONCE : 1);
    });
    this.#form.prompt.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) this.#form.requestSubmit();
    });
    this.#stop.addEventListener("click", () => {
      for (const controller of this.#running) controller.abort();
    });
  }

  /** Give the answers the colours of their requests, when the engine has told them. */
  draw() {
    for (const answer of this.#shown) if (answer.number === null) answer.number = numberOfRequest(this.state, answer);
  }

  async #send(count) {
    const text = this.#form.prompt.value;
    const isChat = this.#form.kind.value === "chat";
    const options = { max_tokens: this.#form.max_tokens.valueAsNumber, temperature: this.#form.temperature.valueAsNumber };
    const controller = new AbortController();
    this.#running.add(controller);
    this.#update();
    const answers = this.#addAnswers(text, count);
    try {
      const model = await findModel(controller.signal);
      const [path, body] = await makeRequest(model, text, isChat, count, controller.signal);
      const began = performance.now();
      const stream = streamAnswers(path, { model, ...body, ...options }, controller.signal);
      for await (const { id, choices } of stream) {
        for (const choice of choices) {
          const answer = answers[choice.index];
          answer.id = id;
          answer.index = choice.index;
          answer.add(isChat && count === 1 ? choice.delta?.content : choice.text, performance.now() - began);
          if (choice.finish_reason) answer.end(choice.finish_reason, performance.now() - began);
        }
      }
      this.#say(count === 1 ? "The answer is complete." : `All ${count} answers are complete.`);
    } catch (error) {
      const reason = error.name === "AbortError" ? "Stopped." : error.message;
      for (const answer of answers) answer.fail(reason, error.name === "AbortError");
      this.#say(reason);
    } finally {
      this.#running.delete(controller);
      this.#update();
    }
  }

  #addAnswers(text, count) {
    const answers = Array.from({ length: count }, () => new Answer(text, count > 1));
    this.#shown.unshift(...answers);
    this.#answers.prepend(...answers.map(({ element }) => element));
    for (const old of this.#shown.splice(MOST_ANSWERS)) old.element.remove();
    return answers;
  }

  #update() {
    this.#stop.disabled = this.#running.size === 0;
    if (this.#running.size) this.#say("Answers stream …");
  }

  #say(sentence) {
    this.#status.textContent = sentence;
  }
}

class Answer {
  id = null;
  index = 0;
  #number = null;
  #pieces = 0;
  #first = null;
  #ended = false;

  constructor(prompt, isOfMany) {
    this.element = document.createElement("li");
    this.element.className = isOfMany ? "answer many" : "answer";
    const head = document.createElement("p");
    head.className = "asked";
    this.chip = document.createElement("span");
    this.chip.className = "chip";
    this.chip.hidden = true;
    const asked = document.createElement("span");
    asked.textContent = prompt;
    head.append(this.chip, asked);
    const body = document.createElement("p");
    body.className = "answered";
    this.text = document.createTextNode("");
    body.append(this.text);
    this.note = document.createElement("p");
    this.note.className = "note";
    this.note.textContent = "waiting for the first token …";
    this.element.append(head, body, this.note);
  }

  get number() {
    return this.#number;
  }

  set number(number) {
    if (number === null) return;
    this.#number = number;
    this.chip.textContent = `#${number}`;
    this.chip.hidden = false;
    this.element.dataset.number = String(number);
    paint(this.element, number);
  }

  add(piece, elapsed) {
    if (!piece) return;
    this.#first ??= elapsed;
    this.#pieces += 1;
    this.text.appendData(piece);
    this.note.textContent = `first token after ${inSeconds(this.#first)}`;
  }

  end(reason, elapsed) {
    this.#ended = true;
    const first = this.#first === null ? "" : `first token after ${inSeconds(this.#first)}, `;
    this.note.textContent = `${first}all after ${inSeconds(elapsed)}; ended: ${reason}`;
  }

  fail(reason, isStopped) {
    if (this.#ended) return;
    this.#ended = true;
    this.note.textContent = reason;
    this.note.classList.toggle("failed", !isStopped);
  }
}

async function findModel(signal) {
  const response = await ask("v1/models", { signal });
  const { data } = await response.json();
  return data[0].id;
}

/** Path and body. Several prompts are one request with a list, because a browser keeps no more than six connections to a server. */
async function makeRequest(model, text, isChat, count, signal) {
  const messages = [{ role: "user", content: text }];
  if (isChat && count === 1) return ["v1/chat/completions", { messages }];
  let prompt = text;
  if (isChat) {
    const response = await ask("tokenize", post({ model, messages, add_generation_prompt: true }, signal));
    prompt = (await response.json()).tokens;
  }
  return ["v1/completions", { prompt: count === 1 ? prompt : Array(count).fill(prompt) }];
}

async function* streamAnswers(path, body, signal) {
  const response = await ask(path, post({ ...body, stream: true }, signal));
  let isComplete = false;
  for await (const { data } of readEvents(response)) {
    isComplete = data === "[DONE]";
    const chunk = isComplete ? { choices: [] } : JSON.parse(data);
    if (chunk.error) throw new Error(chunk.error.message);
    yield chunk;
  }
  if (!isComplete) throw new Error("The server broke off before the end of the answer.");
}

function post(body, signal) {
  return { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body), signal };
}

/** The number of an answer's request in the engine. One of a list of prompts has its place in the list at the end of its id. */
function numberOfRequest(state, { id, index }) {
  if (id === null) return null;
  const names = [id, `${id}-${index}`];
  const found = [...state.sequences, ...state.waiting, ...state.ended].find(({ request_id: name }) => names.includes(name));
  return found?.number ?? null;
}

function inSeconds(milliseconds) {
  return milliseconds < 1000 ? `${Math.round(milliseconds)} ms` : `${(milliseconds / 1000).toFixed(1)} s`;
}
