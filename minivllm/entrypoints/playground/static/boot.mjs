// Python with minivllm in it: in the playground's worker, and in Node, where book/bytecode.mjs compiles what is loaded here.

export const FOLDER = "/package";

/** Start Python, and import what answers calls. `read` gives the content of one of the playground's files. */
export async function boot(loadPyodide, options, read) {
  const [python, files] = await Promise.all([loadPyodide(options), readAll(read)]);
  python.FS.mkdirTree(FOLDER);
  for (const [name, content] of files) python.unpackArchive(content, name.endsWith(".whl") ? "wheel" : "zip", { extractDir: FOLDER });
  python.runPython(`
import sys, types
sys.dont_write_bytecode = True  # the file system is gone with the page
sys.path.insert(0, "${FOLDER}")
for name in ("zmq", "psutil"):  # the package imports them, and nothing that runs here uses them
    sys.modules[name] = types.ModuleType(name)
from minivllm.entrypoints.playground.exercise import prepare
from minivllm.entrypoints.playground.session import call
prepare()
`);
  return python;
}

async function readAll(read) {
  const names = JSON.parse(new TextDecoder().decode(await read("files.json")));
  return Promise.all(names.map(async (name) => [name, await read(name)]));
}
