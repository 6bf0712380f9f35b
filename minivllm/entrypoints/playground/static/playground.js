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

const find = (id) => document.getElementById(id);
const form = find("settings");
const problem = find("problem");
const python = new Python();
const state = new LiveState();
let isScheduled = false;
let isPlaying = false;
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

function showPreset() {
  const { text, settings } = PRESETS[find("preset").selectedIndex];
  find("preset-text").textContent = text;
  writeSettings(settings);
}

/** Settings or code are others: what is shown is out of date. */
function changed() {
  setPlaying(false);
  return begin();
}

// -- Python --------------------------------------------------------------------------------------------------------------------------

/** Calls of Python, one after another. */
let lane = Promise.resolve();
/** Counts the beginnings: what was asked before the latest one is not done any more. */
let generation = 0;
let numPending = 0;

function ask(message, take) {
  const asked = generation;
  numPending += 1;
  lane = lane.then(async () => {
    try {
      if (asked === generation && !isDone) take(await python.call(message()));
    } catch (error) {
      tell(error.message);
      isDone = true;
      setPlaying(false);
    }
    numPending -= 1;
  });
  return lane;
}

function begin() {
  generation += 1;
  isDone = false;
  return ask(
    () => {
      tell(null);
      const invalid = form.querySelector(":invalid");
      if (invalid !== null) throw new Error(`${invalid.parentElement.firstChild.textContent.trim()}: ${invalid.validationMessage}`);
      return { begin: readSettings(), code: editor.getCode() };
    },
    ({ engine }) => startOver(engine),
  );
}

function advance(numSteps) {
  return ask(
    () => ({ advance: numSteps }),
    ({ report, num_steps: steps, now: seconds, done, starving }) => {
      now = seconds;
      if (report !== null) state.apply("steps", report);
      find("clock").textContent = `${many(steps, "step")}, ${seconds.toFixed(2)} s${done ? ": all requests have ended" : ""}`;
      tell(starving.slice(0, 3).join("\n") || null);
      if (done) {
        isDone = true;
        setPlaying(false);
        state.apply("idle", { num_running: 0, num_waiting: 0, num_swapped: 0, num_used_blocks: 0 });
      }
      schedule();
    },
  );
}

function many(count, thing) {
  return `${count.toLocaleString("en")} ${thing}${count === 1 ? "" : "s"}`;
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

function tell(sentence) {
  problem.hidden = sentence === null;
  if (problem.textContent !== (sentence ?? "")) problem.textContent = sentence ?? "";
}

// -- playing -------------------------------------------------------------------------------------------------------------------------

const stepsPerSecond = () => 2 ** Number(find("speed").value);
let lastFrame = 0;
let due = 0;

function setPlaying(playing) {
  isPlaying = playing;
  find("play").textContent = playing ? "Pause" : "Play";
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
  advance(1);
});
find("play").addEventListener("click", () => {
  editor.settle();
  if (!isPlaying && isDone) begin();
  setPlaying(!isPlaying);
});
find("restart").addEventListener("click", changed);
find("speed").addEventListener("input", () => {
  find("speed-value").textContent = String(stepsPerSecond());
});
form.addEventListener("change", (event) => {
  if (event.target.id === "preset") showPreset();
  changed();
});
form.addEventListener("submit", (event) => event.preventDefault());
for (const button of document.querySelectorAll("[data-code]")) {
  button.addEventListener("click", async () => {
    const name = button.dataset.code;
    editor.setCode(name ? await (await fetch(`code/${name}.py`)).text() : "");
  });
}

// -- a race --------------------------------------------------------------------------------------------------------------------------

let kept = null;
let racePage = "";

/** The run as it is set now. Its name says what it is. */
function thisRun(letter) {
  const settings = readSettings();
  const own = editor.getCode().trim() ? ", your code" : "";
  const more = [settings.enable_chunked_prefill && "chunked prefill", settings.enable_prefix_caching && "prefix caching"].filter(Boolean);
  return { name: `${letter}: ${[settings.scheduler, ...more].join(", ")}${own}`, settings, code: editor.getCode() };
}

find("keep").addEventListener("click", () => {
  kept = thisRun("A");
  find("race").disabled = false;
  find("race").title = `Against ${kept.name}`;
  tell("This run is kept as A. Change settings or code, and press “Race against it”.");
});
find("race").addEventListener("click", async () => {
  editor.settle();
  setPlaying(false);
  await lane;
  try {
    const { html, page } = await python.call({ race: [kept, thisRun("B")] }, LONGEST_RACE);
    racePage = page;
    find("race-html").innerHTML = html;
    find("race-result").hidden = false;
    find("race-result").scrollIntoView({ block: "nearest" });
    tell(null);
  } catch (error) {
    tell(error.message);
  }
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
  const content = JSON.stringify({ settings: readSettings(), code: editor.getCode() });
  const bytes = await new Response(new Blob([content]).stream().pipeThrough(new CompressionStream("deflate-raw"))).arrayBuffer();
  const text = btoa(String.fromCharCode(...new Uint8Array(bytes))).replaceAll("+", "-").replaceAll("/", "_").replaceAll("=", "");
  location.hash = text;
  await navigator.clipboard?.writeText(location.href).catch(() => {});
  find("share").textContent = "Copied";
  setTimeout(() => (find("share").textContent = "Copy the link"), 2000);
});

/** Settings and code from the address, or the number of a situation; null if it has none. */
async function readLink() {
  if (location.hash.length < 2) return null;
  if (/^#\d+$/.test(location.hash)) return { preset: Number(location.hash.slice(1)) };
  try {
    const bytes = Uint8Array.from(atob(location.hash.slice(1).replaceAll("-", "+").replaceAll("_", "/")), (c) => c.charCodeAt(0));
    return JSON.parse(await new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate-raw"))).text());
  } catch {
    tell("The link is damaged, so the settings are the usual ones.");
    return null;
  }
}

onThemeChange(() => {
  panels.blockMap.repaint();
  panels.batch.repaint();
  schedule();
});
for (const { name } of PRESETS) find("preset").append(Object.assign(document.createElement("option"), { textContent: name }));
showPreset();
const linked = await readLink();
if (PRESETS[linked?.preset] !== undefined) {
  find("preset").selectedIndex = linked.preset;
  showPreset();
} else if (linked?.settings) {
  writeSettings(linked.settings);
  if (linked.code) {
    find("code").open = true;
    editor.setCode(linked.code);
  }
}
await begin();
document.body.dataset.ready = "true";
