// An exercise: its text, the cells to write, and its checks, which Python runs in a worker. Code and points are kept in this browser.

import { makeEditor } from "./editor.js";
import { isInBook } from "./link.js";
import { LONGEST_RACE, Python } from "./python.js";

const number = /^#(\d\d)$/.exec(location.hash)?.[1] ?? "04";
const python = new Python();
const key = `minivllm exercise ${number}`;
const home = document.getElementById("cells");
/** What is kept: `code` by the name of a cell, `passed` by that of a check, each with its points. */
let kept = { code: {}, passed: {} };

function load() {
  try {
    kept = { ...kept, ...JSON.parse(localStorage.getItem(key) ?? "{}") };
  } catch {
    // nothing usable is kept: it begins anew
  }
}

function save() {
  try {
    localStorage.setItem(key, JSON.stringify(kept));
  } catch {
    // the browser keeps nothing: code and points last as long as the page
  }
}

function make(tag, className, text = "") {
  return Object.assign(document.createElement(tag), { className, textContent: text });
}

function points(count) {
  return `${count} point${count === 1 ? "" : "s"}`;
}

/** Where the code of each cell comes from, in order. */
const sources = [];

function show({ cells, title }) {
  document.title = `${title} – minivllm`;
  const most = cells.reduce((sum, cell) => sum + (cell.points && !cell.needs_model ? cell.points : 0), 0);
  const missing = cells.reduce((sum, cell) => sum + (cell.points && cell.needs_model ? cell.points : 0), 0);
  const tell = () => {
    const got = cells.reduce((sum, cell) => sum + (kept.passed[cell.name] && !cell.needs_model ? cell.points : 0), 0);
    const more = missing ? ` (${missing} more in Jupyter, with the real model)` : "";
    document.getElementById("points").textContent = `${got} of ${points(most)}${more}`;
  };
  for (const cell of cells) {
    if (cell.kind === "text") {
      const text = make("section", "cell text");
      text.innerHTML = cell.html;
      if (!isInBook) for (const link of text.querySelectorAll('a[href^="../"]')) link.replaceWith(...link.childNodes);
      home.append(text);
    } else if (cell.kind === "given") {
      home.append(make("pre", "cell given", cell.source));
      home.lastChild.tabIndex = 0;
      sources.push({ name: cell.name, getCode: () => cell.source });
    } else if (cell.kind === "answer") {
      const frame = make("div", "cell answer");
      home.append(frame);
      const editor = makeEditor(frame, () => {
        kept.code[cell.name] = editor.getCode();
        save();
      });
      const start = kept.code[cell.name] ?? cell.source;
      editor.setCode(start, false);
      sources.push({ name: cell.name, getCode: editor.getCode, reset: () => editor.setCode(cell.source), settle: editor.settle });
    } else addCheck(cell, sources.length, tell);
  }
  tell();
  document.getElementById("forget").addEventListener("click", () => {
    if (!confirm("Forget your code and your points of this exercise?")) return;
    kept = { code: {}, passed: {} };
    save();
    for (const source of sources) source.reset?.();
    for (const box of document.querySelectorAll(".check")) {
      delete box.dataset.passed;
      box.querySelector(".said")?.replaceChildren();
    }
    tell();
  });
}

function addCheck(cell, numSources, tell) {
  const box = make("section", "cell check");
  const line = make("p", "");
  const button = Object.assign(make("button", "", "Check"), { type: "button", disabled: cell.needs_model });
  const name = make("span", "name", `${cell.title} (${points(cell.points)})`);
  button.setAttribute("aria-label", `Check that ${cell.title}`);
  line.append(button, name);
  const said = make("pre", "said", cell.needs_model ? "This check runs the real model: do it in Jupyter." : "");
  said.setAttribute("role", "status");
  box.append(line, said);
  if (kept.passed[cell.name]) box.dataset.passed = "true";
  button.addEventListener("click", async () => {
    button.disabled = true;
    said.textContent = "…";
    for (const source of sources) source.settle?.();
    const cells = sources.slice(0, numSources).map(({ name: of, getCode }) => [of, getCode()]);
    try {
      const { passed, text } = await python.call({ check: [...cells, [cell.name, cell.source]] }, LONGEST_RACE);
      said.textContent = text.trim();
      box.dataset.passed = String(passed);
      if (passed) kept.passed[cell.name] = cell.points;
      else delete kept.passed[cell.name];
      save();
    } catch (error) {
      said.textContent = error.message;
      box.dataset.passed = "false";
    }
    button.disabled = false;
    tell();
  });
  home.append(box);
}

load();
const response = await fetch(`exercise_${number}.json`);
if (response.ok) show(await response.json());
else home.append(make("p", "", `There is no exercise ${number} here: those of lessons 04, 07 and 10 can be done in the browser.`));
document.body.dataset.ready = "true";
