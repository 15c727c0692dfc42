"""A report as Markdown, LaTeX or HTML text."""

import html
import re
import textwrap

from lra.cells import Cell
from lra.report import Heading, Notes, Part, Table, document

FORMATS = ("md", "csv", "latex", "html")
TEXT_WIDTH = 108
"""Columns of a terminal that notes are wrapped to."""


def render_cells(cells: list[Cell], published: list[dict[str, str]], fmt: str) -> str:
    """The report of ``cells`` as ``md``, ``latex`` or ``html``."""
    return {"md": _markdown, "latex": _latex, "html": _html}[fmt](document(cells, published))


def _markdown(parts: list[Part]) -> str:
    blocks = []
    for part in parts:
        if isinstance(part, Heading):
            blocks.append(f"{'#' * part.level} {part.text}")
        elif isinstance(part, Table):
            blocks += [f"**{part.caption}**", _markdown_table(part)]
        else:
            blocks.append("\n".join(
                textwrap.fill(item, TEXT_WIDTH, initial_indent="- ", subsequent_indent="  ",
                              break_long_words=False, break_on_hyphens=False)
                for item in part.items
            ))  # fmt: skip
    return "\n\n".join(blocks) + "\n"


def _markdown_table(table: Table) -> str:
    """Padded so that it reads as a table on a terminal too."""
    lines = [[cell.replace("|", "\\|") for cell in line] for line in (table.header, *table.rows)]
    widths = [max(3, *map(len, column)) for column in zip(*lines, strict=True)]

    def pad(line: list[str]) -> str:
        cells = (
            cell.ljust(width) if at in table.text_columns else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        return f"| {' | '.join(cells)} |"

    rule = ["-" * w if at in table.text_columns else "-" * (w - 1) + ":" for at, w in enumerate(widths)]
    return "\n".join([pad(lines[0]), f"| {' | '.join(rule)} |", *map(pad, lines[1:])])


LATEX = {"\\": r"\textbackslash{}", "±": r"$\pm$", "×": r"$\times$", "–": "--", "†": r"$\dagger$",
         "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}", ">": r"\textgreater{}",
         **{char: f"\\{char}" for char in "&%$#_{}"}}  # fmt: skip


def _tex(text: str) -> str:
    return "".join(LATEX.get(char, char) for char in text)


def _latex(parts: list[Part]) -> str:
    """A standalone document; a table can be copied out of it wherever booktabs is loaded."""
    lines = [
        r"\documentclass{article}",
        r"\usepackage{booktabs}",
        r"\usepackage[margin=2cm,landscape]{geometry}",
        r"\setlength{\parindent}{0pt}",
        r"\begin{document}",
    ]
    for part in parts:
        if isinstance(part, Heading):
            lines += ["", rf"\section*{{{_tex(part.text)}}}"]
        elif isinstance(part, Table):
            lines += ["", *_latex_table(part)]
        else:
            lines += [
                "",
                r"\begin{itemize}\small",
                *(rf"\item {_tex(item)}" for item in part.items),
                r"\end{itemize}",
            ]
    return "\n".join([*lines, "", r"\end{document}"]) + "\n"


def _latex_table(table: Table) -> list[str]:
    align = "".join("l" if at in table.text_columns else "r" for at in range(len(table.header)))
    body = [" & ".join(map(_tex, line)) + r" \\" for line in table.rows]
    return [
        rf"\textbf{{{_tex(table.caption)}}}\par\smallskip",
        rf"\begin{{tabular}}{{{align}}}",
        r"\toprule",
        " & ".join(map(_tex, table.header)) + r" \\",
        r"\midrule",
        *body,
        r"\bottomrule",
        r"\end{tabular}\par\bigskip",
    ]


STYLE = """
:root { color-scheme: light dark; --line: #8884; --soft: #8881; --warn: #c2410c; }
body { font: 15px/1.5 system-ui, sans-serif; margin: 2.5rem auto; max-width: 76rem; padding: 0 1.25rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2.5rem; border-bottom: 1px solid var(--line); }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; margin: 1.25rem 0; font-variant-numeric: tabular-nums; }
caption { text-align: left; font-weight: 600; padding: .25rem 0; }
th, td { padding: .3rem .75rem; text-align: right; white-space: nowrap; }
th { border-top: 2px solid; border-bottom: 1px solid; }
tbody tr:nth-child(even) { background: var(--soft); } tbody tr:last-child td { border-bottom: 2px solid; }
.word { text-align: left; } .mark { color: var(--warn); font-weight: 600; }
ul { color: color-mix(in srgb, currentColor 75%, transparent); font-size: .875rem; padding-left: 1.1rem; }
"""


def _html(parts: list[Part]) -> str:
    """One file that needs nothing from the network."""
    body = []
    for part in parts:
        if isinstance(part, Heading):
            body.append(f"<h{part.level}>{html.escape(part.text)}</h{part.level}>")
        elif isinstance(part, Notes):
            body.append("<ul>\n" + "\n".join(f"<li>{_html_text(item)}</li>" for item in part.items) + "\n</ul>")
        else:
            body.append(_html_table(part))
    head = f'<meta charset="utf-8">\n<title>{html.escape(parts[0].text)}</title>\n<style>{STYLE}</style>'
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n{head}\n</head>\n<body>\n'
        + "\n".join(body)
        + "\n</body>\n</html>\n"
    )


def _html_table(table: Table) -> str:
    def line(cells: list[str], tag: str) -> str:
        texts = (
            f'<{tag} class="word">{_html_text(cell)}</{tag}>' if at in table.text_columns
            else f"<{tag}>{_html_text(cell)}</{tag}>"
            for at, cell in enumerate(cells)
        )  # fmt: skip
        return f"<tr>{''.join(texts)}</tr>"

    rows = "\n".join(line(row, "td") for row in table.rows)
    head = f"<caption>{html.escape(table.caption)}</caption>\n<thead>{line(table.header, 'th')}</thead>"
    return f'<div class="scroll"><table>\n{head}\n<tbody>\n{rows}\n</tbody>\n</table></div>'


def _html_text(text: str) -> str:
    """Escaped, with the marks of what went wrong standing out."""
    return re.sub(r"\b(FAIL|OOM|STUCK|INT)\b|^!", r'<span class="mark">\g<0></span>', html.escape(text))
