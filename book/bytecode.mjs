// Compile what the playground's Python loads, so that browsers need not: node bytecode.mjs FOLDER, the folder of a playground.
//
// Bytecode is for one version of Python alone, so Pyodide itself compiles, in Node.

import { readFile, writeFile } from "node:fs/promises";
import { resolve } from "node:path";
import { pathToFileURL } from "node:url";

const folder = pathToFileURL(`${resolve(process.argv[2])}/`);
const read = async (name) => new Uint8Array(await readFile(new URL(name, folder)));
/** Changed: the standard library, and the package. */
const ARCHIVES = ["pyodide/python_stdlib.zip", "minivllm.zip"];

async function main() {
  const { boot, FOLDER } = await import(new URL("boot.mjs", folder));
  const { loadPyodide } = await import(new URL("pyodide/pyodide.mjs", folder));
  const python = await boot(loadPyodide, {}, read);
  const copies = ARCHIVES.map((name, i) => `/archive${i}.zip`);
  for (const [i, name] of ARCHIVES.entries()) python.FS.writeFile(copies[i], await read(name));
  python.runPython(await readFile(new URL("bytecode.py", import.meta.url), "utf8"));
  python.globals.get("compile_all")(...copies, FOLDER);
  for (const [i, name] of ARCHIVES.entries()) await writeFile(new URL(name, folder), python.FS.readFile(copies[i]));
}

main().catch((error) => {
  console.error(error.message); // its stack has the whole of Pyodide in it
  process.exitCode = 1;
});
