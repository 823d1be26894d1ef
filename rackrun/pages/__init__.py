"""Pages and pictures for people: templates, one style sheet, and plots as SVG.

A page is a template that extends ``page.html.j2`` and lies beside the code that fills it. `templates.render` makes the
text of it, and escapes every value. A page is one file: it needs no network, and has no scripts.

==================  ================================================================
`templates`         renders a template, or writes it into a file
`plots`             the geometry of line charts and of bars made of parts
``page.html.j2``    what every page has: head, style sheet, banner
``parts.html.j2``   macros: verdicts, tables, lists
``plots.html.j2``   macros: figures, line charts, bars, squares
``page.css``        the style sheet, for light and for dark screens
==================  ================================================================
"""
