// The colours of minivllm/viz/palette.py: one request has the same one in every panel, and colour-blind readers can tell them apart.
// A colour says whose something is; lightness, hatching and height say what it is. What is pale is mixed with the page's own surface,
// so that it is pale on a light page and dim on a dark one.

export const REQUEST_COLORS = ["#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#7F7F7F", "#B8A900"];

/** How many different colours there are: each is also darkened and lightened. */
const NUM_COLORS = 3 * REQUEST_COLORS.length;

/** Of the queues, in the curves. */
export const QUEUE_COLORS = { running: REQUEST_COLORS[0], waiting: REQUEST_COLORS[5], swapped: REQUEST_COLORS[2] };

/** The part of a cell that is above its bar is so pale. */
export const ALLOCATED = 0.72;

const darkPage = window.matchMedia("(prefers-color-scheme: dark)");
let theme = null;
/** What `paint` gives an element, for each colour of a request. */
let styles = [];

/** The colours that depend on the page being light or dark: ink, pale, neutral, surface. */
export function currentTheme() {
  if (theme === null) {
    const style = getComputedStyle(document.documentElement);
    const read = (name) => style.getPropertyValue(`--${name}`).trim();
    theme = { ink: read("ink"), pale: read("pale"), neutral: read("neutral"), surface: read("surface"), soft: read("soft") };
  }
  return theme;
}

/** Call back whenever the page has become light or dark: as the system does, or by the page's own event "theme". */
export function onThemeChange(callback) {
  const change = () => {
    theme = null;
    styles = [];
    callback();
  };
  darkPage.addEventListener("change", change);
  document.addEventListener("theme", change);
}

/** The colour of a request by its number: one of eight; for the next eight one of them darkened, for the next lightened. */
export function requestColor(number) {
  const color = REQUEST_COLORS[number % REQUEST_COLORS.length];
  const shade = Math.floor(number / REQUEST_COLORS.length) % 3;
  if (shade === 1) return mix(color, "#000000", 0.4);
  return shade === 2 ? mix(color, "#FFFFFF", 0.4) : color;
}

/** A colour mixed with so much of the page's surface: 0 leaves it as it is. */
export function tint(color, paleness) {
  return mix(color, currentTheme().surface, paleness);
}

/** Of the outline of what has a request's colour: it can be told from the page, be the colour dark or light. */
export function edgeOf(color) {
  return mix(color, currentTheme().ink, 0.35);
}

/** Give an element, and what is in it, the colours of a request. */
export function paint(element, number) {
  const place = number % NUM_COLORS;
  styles[place] ??= makeStyle(requestColor(place));
  element.style.cssText = styles[place];
}

function makeStyle(color) {
  const colors = { color, edge: edgeOf(color), "on-color": inkOn(color), allocated: tint(color, ALLOCATED) };
  return Object.entries(colors).map(([name, value]) => `--${name}: ${value}`).join("; ");
}

/** Black or white, whichever is easier to read on a colour. */
export function inkOn(color) {
  const [red, green, blue] = parts(color);
  return 0.299 * red + 0.587 * green + 0.114 * blue > 127.5 ? "#000000" : "#FFFFFF";
}

/** Red, green and blue of "#RRGGBB", 0 to 255. */
export function parts(color) {
  return [1, 3, 5].map((place) => parseInt(color.slice(place, place + 2), 16));
}

function mix(color, other, share) {
  const goal = parts(other);
  const mixed = parts(color).map((part, i) => Math.round(part + (goal[i] - part) * share));
  return "#" + mixed.map((part) => part.toString(16).padStart(2, "0")).join("");
}
