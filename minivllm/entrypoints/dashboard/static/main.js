// The page: events of /live change the state, and the panels draw it in the browser's next frame.

import { Batch } from "./batch.js";
import { BlockMap } from "./block_map.js";
import { Curves } from "./curves.js";
import { Feed } from "./feed.js";
import { LiveState } from "./state.js";
import { onThemeChange } from "./palette.js";
import { PromptBox } from "./prompt.js";
import { Queues } from "./queues.js";
import { Replicas } from "./replicas.js";

/** The time axis moves on so often, in milliseconds, when nothing else does. */
const TICK = 500;

const state = new LiveState();
const status = document.getElementById("status");
const facts = document.getElementById("facts");
const pause = document.getElementById("pause");
let isScheduled = false;
let isPaused = false;
/** The engine's time at which the curves stand still, because the page does not follow; null while it does. */
let stoppedAt = null;

const blockMap = new BlockMap(state, schedule);
const replicas = new Replicas(state, choose);
const queues = new Queues(state, schedule, highlight);
const batch = new Batch(state, schedule, highlight);
const curves = new Curves(state, schedule);
const promptBox = new PromptBox(state);
const feed = new Feed(takeEvent, tellLoss);

function schedule() {
  if (isScheduled) return;
  isScheduled = true;
  requestAnimationFrame(() => {
    isScheduled = false;
    for (const panel of [replicas, blockMap, queues, batch, promptBox]) panel.draw();
    curves.draw(stoppedAt ?? state.now());
  });
}

function highlight(number) {
  blockMap.highlight(number);
  schedule();
}

/** Follow another replica. */
function choose(rank) {
  if (feed.replica === rank) return;
  feed.stop();
  feed.replica = rank;
  state.showReplica(rank);
  followIfSeen();
  schedule();
}

function takeEvent(name, content) {
  state.apply(name, content);
  if (name !== "dead") stoppedAt = null;
  if (name === "engine") describeEngine(content);
  if (name === "engine") tell("idle", "connected");
  if (name === "idle") tell("idle", "idle: nothing to do");
  if (name === "steps") tell("live", "live: the engine is stepping");
  if (name === "busy") tell("live", "live: no step has ended for a while");
  if (name !== "dead") schedule();
}

function tellLoss(reason, seconds) {
  stoppedAt ??= state.now();
  tell("lost", `${reason} Trying again in ${seconds} s.`);
}

function tell(kind, sentence) {
  if (status.textContent === sentence) return;
  status.dataset.kind = kind;
  status.textContent = sentence;
}

function describeEngine(engine) {
  document.getElementById("model").textContent = engine.model;
  document.title = `${engine.model} – minivllm`;
  const policy = `${engine.policy}${engine.enable_chunked_prefill ? ", chunked prefill" : ""}`;
  const known = [
    ["cache", `${engine.num_gpu_blocks} blocks of ${engine.block_size} tokens${engine.num_engines > 1 ? " in each replica" : ""}`],
    ["a step", `at most ${engine.max_num_seqs} sequences, ${engine.max_num_batched_tokens} tokens`],
    ["a sequence", `at most ${engine.max_model_len} tokens`],
    ["scheduling", `${policy}, preemption by ${engine.preemption_mode}`],
    ["prefix caching", engine.enable_prefix_caching ? "on" : "off"],
  ];
  facts.replaceChildren(
    ...known.map(([name, value]) => {
      const fact = document.createElement("div");
      fact.append(Object.assign(document.createElement("dt"), { textContent: name }));
      fact.append(Object.assign(document.createElement("dd"), { textContent: value }));
      return fact;
    }),
  );
  for (const item of document.querySelectorAll(".legend .prefix")) item.hidden = !engine.enable_prefix_caching;
  document.getElementById("max-tokens").max = engine.max_model_len;
}

pause.addEventListener("click", () => {
  isPaused = !isPaused;
  pause.textContent = isPaused ? "Resume" : "Pause";
  followIfSeen();
  if (!isPaused) return;
  stoppedAt ??= state.now();
  tell("held", "paused: the engine goes on, the picture does not");
});

/** A hidden page follows nothing: it costs the server nothing, and none of the few connections that a browser has. */
function followIfSeen() {
  if (document.hidden || isPaused) feed.stop();
  else feed.start();
}

document.addEventListener("visibilitychange", followIfSeen);
onThemeChange(() => {
  for (const panel of [blockMap, queues, batch]) panel.repaint();
  schedule();
});
setInterval(() => {
  if (!document.hidden) schedule();
}, TICK);
followIfSeen();
