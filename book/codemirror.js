// What the playground uses of CodeMirror; bundled into one module.

export { python } from "@codemirror/lang-python";
export { indentUnit } from "@codemirror/language";
export { EditorView, basicSetup } from "codemirror";
