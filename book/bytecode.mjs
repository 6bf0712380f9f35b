// Compile what the playground's Python loads, so that browsers need not: node bytecode.mjs FOLDER, the folder of a playground.
//
// Bytecode is for one version of Python alone, so Pyodide itself compiles, in Node.

import { readFile, writeFile } from "node:fs/promises";
import { resolve } from "node:path";
import { pathToFileURL } from "node:url";

const folder = pathToFileURL(`${resolve(process.argv[2])}/`);
const read = async (name) => new Uint8Array(await readFile(new URL(name, folder)));

async function main() {
  const { boot, FOLDER } = await import(new URL("boot.mjs", folder));
  const { loadPyodide } = await import(new URL("pyodide/pyodide.mjs", folder));
  const python = await boot(loadPyodide, {}, read);
  python.FS.writeFile("/library.zip", await read("pyodide/python_stdlib.zip"));
  python.runPython(await readFile(new URL("bytecode.py", import.meta.url), "utf8"));
  python.globals.get("compile_all")("/library.zip", FOLDER, "/bytecode.zip");
  await writeFile(new URL("pyodide/python_stdlib.zip", folder), python.FS.readFile("/library.zip"));
  await writeFile(new URL("bytecode.zip", folder), python.FS.readFile("/bytecode.zip"));
  const names = JSON.parse(new TextDecoder().decode(await read("files.json")));
  await writeFile(new URL("files.json", folder), JSON.stringify([...names, "bytecode.zip"]));
}

main().catch((error) => {
  console.error(error.message); // its stack has the whole of Pyodide in it
  process.exitCode = 1;
});
