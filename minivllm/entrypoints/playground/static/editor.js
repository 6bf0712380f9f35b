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
    timer = setTimeout(onChange, PAUSE);
  });
  const label = EditorView.contentAttributes.of({ "aria-label": "Python code" });
  const view = new EditorView({ parent, extensions: [basicSetup, python(), indentUnit.of("    "), watch, label] });
  return {
    getCode: () => view.state.doc.toString(),
    setCode(code) {
      clearTimeout(timer);
      isSetting = true;
      view.dispatch({ changes: { from: 0, to: view.state.doc.length, insert: code } });
      isSetting = false;
      onChange();
    },
  };
}
