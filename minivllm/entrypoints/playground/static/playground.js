// The playground: settings and code go to Python, its reports to the live page's panels.

import { Batch } from "./batch.js";
import { BlockMap } from "./block_map.js";
import { Curves } from "./curves.js";
import { makeEditor } from "./editor.js";
import { DEFAULTS, PRESETS } from "./presets.js";
import { LONGEST_RACE, Python } from "./python.js";
import { LiveState } from "./state.js";
import { onThemeChange } from "./palette.js";
import { Queues } from "./queues.js";
import { RaceView } from "./race.js";
import { isInBook, readLink, writeLink } from "./link.js";

const find = (id) => document.getElementById(id);
const form = find("settings");
const python = new Python();
const state = new LiveState();
state.now = () => null; // the engine's clock is its own, not the page's
let isScheduled = false;
let isPlaying = false;
/** Whether a run has begun with the settings and the code as they are. */
let hasBegun = false;
/** Whether all requests have ended, or the run has. */
let isDone = false;
let now = 0;

const panels = { blockMap: new BlockMap(state, schedule), queues: new Queues(state, schedule, highlight), batch: new Batch(state, schedule, highlight) };
const curves = new Curves(state, schedule);
const editor = makeEditor(find("editor"), changed);

function schedule() {
  if (isScheduled) return;
  isScheduled = true;
  requestAnimationFrame(() => {
    isScheduled = false;
    for (const panel of Object.values(panels)) panel.draw();
    curves.draw(now);
  });
}

function highlight(number) {
  panels.blockMap.highlight(number);
  schedule();
}

/** A sentence about what is wrong; null for nothing. */
function tellProblem(sentence) {
  tell("problem", sentence);
}

/** A sentence about what has happened; null for none. */
function tellNews(sentence) {
  tell("news", sentence);
}

function tell(id, sentence) {
  find(id).hidden = sentence === null;
  if (find(id).textContent !== (sentence ?? "")) find(id).textContent = sentence ?? "";
}

function many(count, thing) {
  return `${count.toLocaleString("en")} ${thing}${count === 1 ? "" : "s"}`;
}

// -- settings -----------------------------------------------------------------------------------------------------------------------

function readSettings() {
  const settings = {};
  for (const name of Object.keys(DEFAULTS)) {
    const field = form.elements[name];
    settings[name] = field.type === "checkbox" ? field.checked : field.type === "number" ? Number(field.value) : field.value;
  }
  return settings;
}

function writeSettings(settings) {
  for (const [name, value] of Object.entries({ ...DEFAULTS, ...settings })) {
    const field = form.elements[name];
    if (field.type === "checkbox") field.checked = value;
    else field.value = value;
  }
}

/** Select the situation that the settings are, or the one that stands for all others. */
function namePreset() {
  const settings = readSettings();
  const place = PRESETS.findIndex((preset) => Object.keys(DEFAULTS).every((name) => settings[name] === { ...DEFAULTS, ...preset.settings }[name]));
  find("preset").selectedIndex = place === -1 ? PRESETS.length : place;
  find("preset-text").textContent = PRESETS[place]?.text ?? "";
}

function choosePreset() {
  writeSettings(PRESETS[find("preset").selectedIndex]?.settings ?? readSettings());
  namePreset();
}

function checkSettings() {
  const invalid = form.querySelector(":invalid");
  if (invalid !== null) throw new Error(`${invalid.parentElement.firstChild.textContent.trim()}: ${invalid.validationMessage}`);
}

// -- Python --------------------------------------------------------------------------------------------------------------------------

/** Calls of Python, one after another. */
let lane = Promise.resolve();
/** Counts the beginnings: what was asked before the latest one does not count any more. */
let generation = 0;
let numPending = 0;

/** Make a message when its turn has come, and take Python's answer, unless a run has begun since. */
function ask(makeMessage, take, longest) {
  const asked = generation;
  numPending += 1;
  lane = lane.then(async () => {
    try {
      if (asked !== generation || isDone) return;
      const answer = await python.call(makeMessage(), longest);
      if (asked === generation) take(answer);
    } catch (error) {
      if (asked !== generation) return;
      tellProblem(error.message);
      isDone = true;
      setPlaying(false);
    } finally {
      numPending -= 1;
    }
  });
  return lane;
}

/** Settings or code have changed: what is shown is out of date. */
function changed() {
  setPlaying(false);
  return begin();
}

function begin() {
  generation += 1;
  isDone = false;
  hasBegun = true;
  return ask(
    () => {
      tellProblem(null);
      checkSettings();
      return { begin: readSettings(), code: editor.getCode() };
    },
    ({ engine, printed }) => {
      startOver(engine);
      printedSoFar = "";
      showPrinted(printed);
    },
  );
}

function startOver(engine) {
  state.apply("engine", engine);
  state.apply("idle", { num_running: 0, num_waiting: 0, num_swapped: 0, num_used_blocks: 0 });
  state.showReplica(0);
  for (const item of document.querySelectorAll(".legend .prefix")) item.hidden = !engine.enable_prefix_caching;
  panels.blockMap.repaint();
  panels.batch.repaint();
  now = 0;
  find("clock").textContent = "0 steps, 0.00 s";
  schedule();
}

function advance(numSteps) {
  return ask(
    () => ({ advance: numSteps }),
    ({ report, num_steps: steps, now: seconds, done, starving, printed }) => {
      now = seconds;
      if (report !== null) state.apply("steps", report);
      find("clock").textContent = `${many(steps, "step")}, ${seconds.toFixed(2)} s${done ? ": all requests have ended" : ""}`;
      tellProblem(starving.slice(0, 3).join("\n") || null);
      showPrinted(printed);
      if (done) {
        isDone = true;
        setPlaying(false);
        state.apply("idle", { num_running: 0, num_waiting: 0, num_swapped: 0, num_used_blocks: 0 });
      }
      schedule();
    },
  );
}

const MOST_PRINTED = 2000;
let printedSoFar = "";

/** The last of what the reader's code has printed since the run began. */
function showPrinted(text) {
  printedSoFar = (printedSoFar + text).slice(-MOST_PRINTED);
  tell("printed", printedSoFar || null);
}

// -- playing -------------------------------------------------------------------------------------------------------------------------

const stepsPerSecond = () => 2 ** Number(find("speed").value);
let lastFrame = 0;
let due = 0;

function setPlaying(playing) {
  isPlaying = playing;
  find("play").textContent = playing ? "Pause" : "Play";
  find("step-sentence").setAttribute("aria-live", playing ? "off" : "polite");
  if (playing) {
    lastFrame = performance.now();
    due = 1;
    requestAnimationFrame(frame);
  }
}

function frame(time) {
  if (!isPlaying) return;
  due = Math.min(64, due + ((time - lastFrame) / 1000) * stepsPerSecond());
  lastFrame = time;
  if (due >= 1 && numPending === 0) {
    advance(Math.floor(due));
    due -= Math.floor(due);
  }
  requestAnimationFrame(frame);
}

find("step").addEventListener("click", () => {
  editor.settle();
  setPlaying(false);
  if (!hasBegun) begin();
  advance(1);
});
find("play").addEventListener("click", () => {
  const playing = !isPlaying;
  editor.settle();
  if (playing && (isDone || !hasBegun)) begin();
  setPlaying(playing);
});
find("restart").addEventListener("click", changed);
find("speed").addEventListener("input", showSpeed);

function showSpeed() {
  find("speed-value").textContent = String(stepsPerSecond());
  find("speed").setAttribute("aria-valuetext", many(stepsPerSecond(), "step"));
}

form.addEventListener("change", (event) => {
  if (event.target.id === "preset") choosePreset();
  else namePreset();
  changed();
});
form.addEventListener("submit", (event) => event.preventDefault());
for (const button of document.querySelectorAll("[data-code]")) {
  button.addEventListener("click", async () => {
    const name = button.dataset.code;
    if (editor.isTyped() && !confirm("Replace the code in the editor?")) return;
    editor.setCode(name ? await (await fetch(`code/${name}.py`)).text() : "");
  });
}

// -- a race --------------------------------------------------------------------------------------------------------------------------

/** Stands before a page that the reader's code may have had a hand in: no script in it runs. */
const NO_SCRIPTS = `<!doctype html><meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">`;
let kept = null;
let numRaces = 0;
let racePage = "";
const raceView = new RaceView(python, stepsPerSecond, tellProblem);
const raceFrame = find("race-frame");

/** The frame is as high as its page. No script runs in it, so that this one may look. */
const raceHeight = new ResizeObserver(([entry]) => {
  raceFrame.style.height = `${Math.min(4000, entry.target.offsetHeight)}px`;
});
raceFrame.addEventListener("load", () => {
  raceHeight.disconnect();
  raceHeight.observe(raceFrame.contentDocument.documentElement);
});

/** The run as it is set now. Its name says what it is. */
function thisRun(letter) {
  const settings = readSettings();
  const code = editor.getCode();
  const scheduler = /^class Scheduler\b/m.test(code) ? "your scheduler" : settings.scheduler;
  const blocks = /^class BlockSpaceManager\b/m.test(code) && "your block manager";
  const more = [blocks, settings.enable_chunked_prefill && "chunked prefill", settings.enable_prefix_caching && "prefix caching"].filter(Boolean);
  return { name: `${letter}: ${[scheduler, ...more].join(", ")}`, settings, code };
}

find("keep").addEventListener("click", () => {
  editor.settle();
  try {
    checkSettings();
  } catch (error) {
    tellProblem(error.message);
    return;
  }
  kept = thisRun("A");
  find("race").disabled = false;
  find("race").title = `Against ${kept.name}`;
  tellNews("This run is kept as A. Change settings or code, and press “Race against it”.");
});
find("race").addEventListener("click", async () => {
  editor.settle();
  setPlaying(false);
  raceView.pause();
  generation += 1; // steps that wait for their turn are not needed
  isDone = false;
  find("race").disabled = true;
  tellNews("The race is running.");
  const race = (numRaces += 1);
  let runs;
  await ask(
    () => {
      checkSettings();
      runs = [kept, thisRun("B")];
      return { race: runs, number: race };
    },
    ({ page, moments, first, printed }) => {
      racePage = NO_SCRIPTS + page;
      raceFrame.srcdoc = racePage;
      raceView.begin(race, runs, moments, first);
      printedSoFar = "";
      showPrinted(printed);
      find("race-result").hidden = false;
      find("race-result").scrollIntoView({ block: "nearest" });
      tellProblem(null);
    },
    LONGEST_RACE,
  );
  tellNews(null);
  find("race").disabled = false;
  hasBegun = false; // the run that is shown may have ended with the worker
});
find("race-save").addEventListener("click", () => {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([racePage], { type: "text/html" }));
  link.download = "race.html";
  link.click();
  URL.revokeObjectURL(link.href);
});

// -- a link ---------------------------------------------------------------------------------------------------------------------------

find("share").addEventListener("click", async () => {
  history.replaceState(null, "", `#${await writeLink(readSettings(), editor.getCode())}`);
  const isCopied = await (navigator.clipboard?.writeText(location.href).then(() => true, () => false) ?? false);
  tellNews(isCopied ? "The link is copied. It has these settings and this code." : "The link is in the address bar. It has these settings and this code.");
});
window.addEventListener("hashchange", () => location.reload());
find("book").hidden = !isInBook;

onThemeChange(() => {
  for (const panel of Object.values(panels)) panel.repaint();
  raceView.repaint();
  schedule();
});
for (const name of [...PRESETS.map((preset) => preset.name), "settings of your own"]) {
  find("preset").append(Object.assign(document.createElement("option"), { textContent: name }));
}
const linked = await readLink(location.hash, DEFAULTS, PRESETS);
writeSettings(linked.settings);
namePreset();
showSpeed();
if (linked.code) {
  find("code").open = true;
  editor.setCode(linked.code, false);
  find("clock").textContent = "";
  tellNews("This link brings code of its own. Read it; Play or One step runs it in this browser.");
} else await begin();
if (linked.problem) tellProblem(linked.problem);
document.body.dataset.ready = "true";
