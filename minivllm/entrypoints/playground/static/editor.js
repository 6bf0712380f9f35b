// The editor of the reader's code: CodeMirror.

import { EditorView, basicSetup, indentUnit, python } from "./codemirror.js";

/** Milliseconds after the last change until it counts. */
const PAUSE = 600;

/** An editor in an element. `onChange` is called once the reader has stopped typing for a moment, and at once when code is set. */
export function makeEditor(parent, onChange) {
  let timer = null;
  let isSetting = false;
  const watch = EditorView.updateListener.of((update) => {
    if (!update.docChanged || isSetting) return;
    clearTimeout(timer);
    timer = setTimeout(settle, PAUSE);
  });
  const settle = () => {
    if (timer === null) return;
    clearTimeout(timer);
    timer = null;
    onChange();
  };
  const label = EditorView.contentAttributes.of({ "aria-label": "Python code" });
  const view = new EditorView({ parent, extensions: [basicSetup, python(), indentUnit.of("    "), watch, label] });
  return {
    /** What was typed counts from now on. */
    settle,
    getCode: () => view.state.doc.toString(),
    setCode(code) {
      clearTimeout(timer);
      timer = null;
      isSetting = true;
      view.dispatch({ changes: { from: 0, to: view.state.doc.length, insert: code } });
      isSetting = false;
      onChange();
    },
  };
}
