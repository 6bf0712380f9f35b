"""Reports grades: CSV for the teacher's spreadsheet, JUnit XML for machines, and a web page for each learner.

Text from learners is untrusted: it must not become a formula in a spreadsheet, make the XML invalid, or run as a script in a page.
"""

from __future__ import annotations

import csv
import html
import io
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from minivllm.course.grading.grader import Grade
from minivllm.course.grading.untrusted_text import csv_text, plain, plain_but_coloured
from minivllm.course.results import count_points

_MOST_SOURCE = 100_000
_MOST_HTML = 300_000
_TAGS = frozenset(
    ["b", "br", "code", "div", "em", "hr", "i", "li", "ol", "p", "pre", "small", "span", "strong", "sub", "sup", "u", "ul"]
)
_TAGS |= {"caption", "col", "colgroup", "table", "tbody", "td", "tfoot", "th", "thead", "tr", "h1", "h2", "h3", "h4", "h5", "h6"}
_STOPPED = ("slow", "loud", "deaf", "dead", "memory", "disk", "late")
_SHOWN = ("text/plain", "image/png", "image/jpeg", "text/html")
_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; font-src data:; form-action 'none'; base-uri 'none'"
_STYLE = """
.grade { font-family: sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; line-height: 1.45; }
.grade table { border-collapse: collapse; width: 100%; }
.grade th, .grade td { border-bottom: 1px solid #ccc; padding: 0.45rem 0.6rem; text-align: left; vertical-align: top; }
.grade td.points { white-space: nowrap; text-align: right; }
.grade th.points { text-align: right; }
.grade td.reason { white-space: pre-wrap; overflow-wrap: anywhere; }
.grade .passed { color: #1a7f37; } .grade .failed { color: #b3261e; }
"""


def write_csv(grades: Sequence[Grade], path: Path, sandboxed: bool = False) -> None:
    """Write `grades.csv`: for each submission its score, the points of each check, and why points are missing.

    The file is replaced as a whole: a grader that is killed leaves the last complete one.

    The columns of checks are named for the check, preceded by the lesson if there are several.
    """
    lessons = {grade.submission.lesson.name: grade.submission.lesson for grade in grades}
    columns = [(lesson.name, check.cell_id) for lesson in lessons.values() for check in lesson.checks]
    titles = [
        check.name if len(lessons) == 1 else f"{lesson.name}: {check.name}"
        for lesson in lessons.values()
        for check in lesson.checks
    ]
    made = path.with_suffix(".new")
    with made.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["learner", "notebook", "score", "max", "sandbox", *map(csv_text, titles), "reason"])
        for grade in grades:
            submission = grade.submission
            points = {(submission.lesson.name, result.check.cell_id): f"{result.points:g}" for result in grade.results}
            row = [csv_text(submission.learner), csv_text(submission.lesson.name), f"{grade.score:g}", f"{grade.most:g}"]
            row.append("yes" if sandboxed else "no")
            writer.writerow([*row, *(points.get(column, "") for column in columns), csv_text(grade.reason)])
    made.replace(path)


def write_junit(grades: Sequence[Grade], path: Path) -> None:
    """Write `junit.xml`: a test suite per submission, a test case per check."""
    root = ElementTree.Element("testsuites")
    for grade in grades:
        submission = grade.submission
        name = plain(f"{submission.learner}/{submission.lesson.name}")
        failed = sum(not result.passed for result in grade.results)
        suite = ElementTree.SubElement(
            root, "testsuite", name=name, tests=str(len(grade.results)), failures=str(failed), errors="0", skipped="0"
        )
        for result in grade.results:
            case = ElementTree.SubElement(suite, "testcase", classname=name, name=plain(result.check.name))
            if not result.passed:
                reason = plain(result.reason or grade.reason)
                lost = f"0 of {count_points(result.check.points)}"
                ElementTree.SubElement(case, "failure", message=lost).text = reason
        if grade.notes:
            ElementTree.SubElement(suite, "system-out").text = plain("\n".join(grade.notes))
    ElementTree.indent(root)
    ElementTree.ElementTree(root).write(path, encoding="utf-8", xml_declaration=True)


class FeedbackWriter:
    """Writes the learners' pages into a folder, each under a unique name.

    Args:
        folder: Where they go.
        taken: Names of existing pages, which stay.
    """

    def __init__(self, folder: Path, taken: Iterable[str] = ()) -> None:
        from nbconvert import HTMLExporter

        self._folder = folder
        self._exporter = HTMLExporter(template_name="lab")
        self._names = {Path(name).stem.lower() for name in taken}

    def write(self, grade: Grade) -> Path:
        """Write the page of one submission and return its path."""
        path = self._folder / self._name(grade)
        path.write_text(self._page(grade), encoding="utf-8", errors="replace")
        return path

    def _name(self, grade: Grade) -> str:
        learner = re.sub(r"[^\w-]", "_", plain(grade.submission.learner))[:40] or "_"
        base = f"{learner}_{grade.submission.lesson.name}"
        name, number = base, 2
        while name.lower() in self._names:
            name, number = f"{base}_{number}", number + 1
        self._names.add(name.lower())
        return f"{name}.html"

    def _page(self, grade: Grade) -> str:
        try:
            page, _ = self._exporter.from_notebook_node(_executed(grade))
        except Exception as error:  # the exporter cannot handle the learner's text or output
            why = html.escape(plain(f"The notebook itself cannot be shown ({type(error).__name__})."))
            page = f"<!DOCTYPE html><html><head></head><body><p class='grade'>{why}</p></body></html>"
        policy = f'<meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        title = html.escape(plain(f"{grade.submission.learner}: {grade.submission.lesson.name}"))
        page = re.sub(r"<title>.*?</title>", "", page, count=1, flags=re.DOTALL)
        page = re.sub(r"<script\b[^>]*>.*?</script>", "", page, flags=re.DOTALL | re.IGNORECASE)
        head = f"{policy}<title>{title}</title><style>{_STYLE}</style>"
        page = re.sub(r"<head>", lambda match: match[0] + head, page, count=1)
        return re.sub(r"<body[^>]*>", lambda match: match[0] + format_table(grade), page, count=1)


def format_table(grade: Grade) -> str:
    """The checks of a submission with points and reasons, as an HTML table."""
    rows = []
    for result in grade.results:
        mark = ("passed", "✓") if result.passed else ("failed", "✗")
        rows.append(
            f'<tr><td class="{mark[0]}">{mark[1]}</td><td>{_escaped(result.check.name)}</td>'
            f'<td class="points">{result.points:g} of {result.check.points:g}</td>'
            f'<td class="reason">{_escaped(result.reason)}</td></tr>'
        )
    notes = "".join(f"<li>{_escaped(note)}</li>" for note in grade.notes)
    submission = grade.submission
    return (
        f'<div class="grade"><h1>{_escaped(submission.learner)}</h1>'
        f"<p>{_escaped(submission.lesson.name)}: <strong>{grade.score:g} of {count_points(grade.most)}</strong></p>"
        + (f"<ul>{notes}</ul>" if notes else "")
        + '<table><thead><tr><th></th><th>check</th><th class="points">points</th><th>why</th></tr></thead>'
        + f"<tbody>{''.join(rows)}</tbody></table>"
        + ("<p>Below is your notebook as it was run. Cell numbers refer to its In [ ].</p>" if grade.cells else "")
        + "</div>"
    )


def _escaped(text: str) -> str:
    return html.escape(plain(text))


def _executed(grade: Grade) -> Any:
    """The notebook with its outputs."""
    import nbformat

    cells, number = [], 0
    for index, cell in enumerate(grade.cells):
        source = plain(cell.source)
        if len(source) > _MOST_SOURCE:
            source = source[:_MOST_SOURCE] + "\n… (the rest of this cell is not shown)"
        if cell.cell_type == "code":
            number += 1
            run = grade.runs.get(index)
            outputs = [output for found in (run.outputs if run else []) if (output := _shown(found)) is not None]
            said = [cell.note, *grade.remarks.get(index, [])] if run is None or run.status in _STOPPED else [cell.note]
            if any(said):
                text = plain("\n".join(filter(None, said)))
                outputs.append(nbformat.v4.new_output("stream", name="stderr", text=text))
            cells.append(nbformat.v4.new_code_cell(source, execution_count=number, outputs=outputs))
        elif cell.kind == "own":  # shown verbatim: it could contain HTML
            cells.append(_text(source))
        else:
            cells.append(nbformat.v4.new_markdown_cell(source))
    return nbformat.v4.new_notebook(cells=cells, metadata={"language_info": {"name": "python", "pygments_lexer": "ipython3"}})


def _text(source: str) -> Any:
    """A learner's own text, shown verbatim."""
    import nbformat

    fence = "`" * max([3, *(len(run) + 1 for run in re.findall("`+", source))])
    return nbformat.v4.new_markdown_cell(f"{fence}text\n{source}\n{fence}")


def _shown(output: dict[str, Any]) -> Any:
    """An output as a notebook stores it, or None if it is not shown."""
    import nbformat

    kind = output["output_type"]
    if kind == "stream":
        return nbformat.v4.new_output("stream", name="stdout", text=plain_but_coloured(str(output.get("text", ""))))
    if kind == "error":
        lines = output.get("traceback")
        lines = [plain_but_coloured(str(line)) for line in lines] if isinstance(lines, list) else []
        return nbformat.v4.new_output(
            "error", ename=plain(str(output.get("ename"))), evalue=plain(str(output.get("evalue"))), traceback=lines
        )
    data = output.get("data")
    kept = {}
    for mime in _SHOWN:
        value = data.get(mime) if isinstance(data, dict) else None
        if isinstance(value, str) and mime == "text/html":
            if len(value) <= _MOST_HTML:
                kept[mime] = _harmless(plain(value))
        elif isinstance(value, str):
            kept[mime] = value if mime.startswith("image/") else plain(value)
    for mime in ("image/png", "image/jpeg"):
        if mime in kept and not re.fullmatch(r"[A-Za-z0-9+/=\s]*", kept[mime]):
            del kept[mime]
    return nbformat.v4.new_output("display_data", data=kept) if kept else None


def _harmless(text: str) -> str:
    """HTML reduced to tables and coloured text: nothing that runs, loads or links."""
    import bleach
    from bleach.css_sanitizer import CSSSanitizer

    attributes = {"*": ["class", "style", "title"], "td": ["colspan", "rowspan"], "th": ["colspan", "rowspan"]}
    return bleach.clean(text, tags=_TAGS, attributes=attributes, css_sanitizer=CSSSanitizer(), strip=True)


def format_summary(grades: Iterable[Grade], most_width: int = 100) -> str:
    """The table printed after grading."""
    rows = [("learner", "notebook", "points", "")]
    for grade in grades:
        submission = grade.submission
        points = f"{grade.score:g} of {grade.most:g}"
        rows.append((_one_line(submission.learner, 24), _one_line(submission.lesson.name, 30), points, grade.reason))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    text = io.StringIO()
    for learner, notebook, points, reason in rows:
        line = f"{learner:<{widths[0]}}  {notebook:<{widths[1]}}  {points:>{widths[2]}}  "
        text.write((line + _one_line(reason, max(30, most_width - len(line)))).rstrip() + "\n")
    return text.getvalue().rstrip()


def _one_line(text: str, width: int) -> str:
    """A text in one line, without control characters."""
    text = " ".join("".join(letter if letter.isprintable() else " " for letter in plain(text)).split())
    return text if len(text) <= width else text[: width - 1] + "…"
