// In a page of the book, the playground is light or dark as the reader has chosen for the book.

const book = parent.document.body;
const rules = [...document.styleSheets].flatMap((sheet) => [...sheet.cssRules]);
const dark = rules.filter((rule) => rule.media?.mediaText === "(prefers-color-scheme: dark)");

function follow() {
  const { theme } = book.dataset; // "light", "dark" or "auto"
  const media = { light: "not all", dark: "all" }[theme] ?? "(prefers-color-scheme: dark)";
  for (const rule of dark) rule.media.mediaText = media;
  document.documentElement.style.colorScheme = theme === "light" || theme === "dark" ? theme : "";
  document.dispatchEvent(new Event("theme"));
}

follow();
new MutationObserver(follow).observe(book, { attributeFilter: ["data-theme"] });
