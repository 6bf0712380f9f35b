// Python in a worker: it loads Pyodide and minivllm once, and then answers calls, JSON in and out.

import { loadPyodide } from "./pyodide/pyodide.mjs";

const FOLDER = "/package";

const ready = (async () => {
  const [python, files] = await Promise.all([loadPyodide({ indexURL: new URL("./pyodide/", import.meta.url).href }), fetchAll()]);
  python.FS.mkdirTree(FOLDER);
  for (const [name, content] of files) python.unpackArchive(content, name.endsWith(".whl") ? "wheel" : "zip", { extractDir: FOLDER });
  python.runPython(`
import sys, types
sys.path.insert(0, "${FOLDER}")
for name in ("zmq", "psutil"):  # the package imports them, and nothing that runs here uses them
    sys.modules[name] = types.ModuleType(name)
from minivllm.entrypoints.playground.exercise import prepare
from minivllm.entrypoints.playground.session import call
prepare()
`);
  return python.globals.get("call");
})();

async function fetchAll() {
  const names = await (await get("files.json")).json();
  return Promise.all(names.map(async (name) => [name, await (await get(name)).arrayBuffer()]));
}

async function get(name) {
  const response = await fetch(name);
  if (!response.ok) throw new Error(`${name} cannot be loaded (status ${response.status})`);
  return response;
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
