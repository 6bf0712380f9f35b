// The editor of the reader's code: CodeMirror.

import { EditorView, basicSetup, indentUnit, python } from "./codemirror.js";

/** Milliseconds after the last change until it counts. */
const PAUSE = 600;

/** An editor in an element. `onChange` is called once the reader has stopped typing for a moment, and at once when code is set. */
export function makeEditor(parent, onChange) {
  let timer = null;
  let isSetting = false;
  let isTyped = false;
  const settle = () => {
    if (timer === null) return;
    clearTimeout(timer);
    timer = null;
    onChange();
  };
  const watch = EditorView.updateListener.of((update) => {
    if (!update.docChanged || isSetting) return;
    isTyped = true;
    clearTimeout(timer);
    timer = setTimeout(settle, PAUSE);
  });
  const label = EditorView.contentAttributes.of({ "aria-label": "Python code" });
  const view = new EditorView({ parent, extensions: [basicSetup, python(), indentUnit.of("    "), watch, label] });
  view.scrollDOM.tabIndex = 0; // the keyboard scrolls it
  return {
    /** What was typed counts from now on. */
    settle,
    getCode: () => view.state.doc.toString(),
    /** Whether the reader has typed since the code was set. */
    isTyped: () => isTyped,
    setCode(code, isChange = true) {
      clearTimeout(timer);
      timer = null;
      isSetting = true;
      view.dispatch({ changes: { from: 0, to: view.state.doc.length, insert: code } });
      isSetting = false;
      isTyped = false;
      if (isChange) onChange();
    },
  };
}
