// A button over the picture of a widget puts the playground in its place, and back. Nothing of the playground is fetched before.

/** Pixels that the playground needs in a column of text, until it can be measured. */
const USUAL_HEIGHT = 760;

/** A frame with the playground, as high as what is in it. */
function makeFrame(address) {
  const frame = document.createElement("iframe");
  frame.className = "playground";
  frame.title = "The engine, to play with";
  frame.src = address.replace("index.html", "embedded.html");
  frame.style.height = `${USUAL_HEIGHT}px`;
  frame.addEventListener("load", () => {
    const content = frame.contentDocument.body;
    new ResizeObserver(() => (frame.style.height = `${Math.ceil(content.getBoundingClientRect().height)}px`)).observe(content);
  });
  return frame;
}

// Without a web server Python cannot be loaded.
const bars = location.protocol.startsWith("http") ? document.querySelectorAll(".play-here") : [];
for (const bar of bars) {
  const picture = bar.closest(".cell_output").querySelector("img");
  const button = bar.querySelector("button");
  let frame = null;
  bar.hidden = false;
  button.addEventListener("click", () => {
    if (frame === null) picture.before((frame = makeFrame(bar.querySelector("a").href)));
    else {
      frame.remove();
      frame = null;
    }
    picture.hidden = frame !== null;
    button.textContent = frame === null ? "Play with it here" : "Back to the picture";
  });
}
