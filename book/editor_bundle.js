export { EditorView, basicSetup } from "codemirror"; export { python } from "@codemirror/lang-python"; export { indentUnit } from "@codemirror/language";
