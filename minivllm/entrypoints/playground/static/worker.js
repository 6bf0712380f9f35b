// Python in a worker: it loads Pyodide and minivllm once, and then answers calls, JSON in and out.

import { boot } from "./boot.mjs";
import { loadPyodide } from "./pyodide/pyodide.mjs";

const ready = boot(loadPyodide, { indexURL: new URL("./pyodide/", import.meta.url).href }, read).then((python) => python.globals.get("call"));

async function read(name) {
  const response = await fetch(name);
  if (!response.ok) throw new Error(`${name} cannot be loaded (status ${response.status})`);
  return response.arrayBuffer();
}

function lastLine(error) {
  return String(error.message ?? error).trim().split("\n").at(-1);
}

ready.then(
  () => self.postMessage({ isLoaded: true }),
  (error) => self.postMessage({ failure: lastLine(error) }),
);

self.onmessage = async ({ data: { id, message } }) => {
  const call = await ready;
  try {
    self.postMessage({ id, answer: call(message) });
  } catch (error) {
    self.postMessage({ failure: lastLine(error) });
  }
};
