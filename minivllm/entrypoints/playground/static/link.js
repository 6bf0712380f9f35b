// Settings and code as the fragment of an address, and back.

/** Whether this page is in a book, whose pages are in the folder above. */
export const isInBook = new URL("..", location.href).pathname !== new URL(".", location.href).pathname;

/** Bytes that a link may unfold to. */
const LONGEST = 2 ** 20;

/** A fragment with settings and code. */
export async function writeLink(settings, code) {
  const stream = new Blob([JSON.stringify({ settings, code })]).stream().pipeThrough(new CompressionStream("deflate-raw"));
  const bytes = new Uint8Array(await new Response(stream).arrayBuffer());
  let text = "";
  for (const byte of bytes) text += String.fromCharCode(byte);
  return btoa(text).replaceAll("+", "-").replaceAll("/", "_").replaceAll("=", "");
}

/** Settings and code from a fragment, or those of a situation by its number; what is missing or has another type is as in `defaults`. */
export async function readLink(fragment, defaults, presets) {
  const text = fragment.slice(1);
  if (text === "") return { settings: {}, code: "" };
  if (/^\d{1,3}$/.test(text)) return { settings: presets[Number(text)]?.settings ?? {}, code: "" };
  try {
    const bytes = Uint8Array.from(atob(text.replaceAll("-", "+").replaceAll("_", "/")), (letter) => letter.charCodeAt(0));
    const { settings, code } = JSON.parse(await unfold(bytes));
    const known = Object.keys(defaults).filter((name) => typeof settings?.[name] === typeof defaults[name]);
    return { settings: Object.fromEntries(known.map((name) => [name, settings[name]])), code: typeof code === "string" ? code : "" };
  } catch {
    return { settings: {}, code: "", problem: "The link is damaged, so the settings are the usual ones." };
  }
}

async function unfold(bytes) {
  const reader = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate-raw")).getReader();
  const decoder = new TextDecoder();
  let text = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return text + decoder.decode();
    text += decoder.decode(value, { stream: true });
    if (text.length > LONGEST) throw new Error("too long");
  }
}
