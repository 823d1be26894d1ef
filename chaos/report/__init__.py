"""What people are shown of a run with faults: made from what it has left in its folder, as often as they like.

::

    reading    a job's journal, on the clock of the harness
    seats      who sat in which slot, and when
    chains     strike -> noticed -> decided -> planned -> resumed -> first step afterwards
    material   all that a report is made of
    thin       less, where there is too much of it
    figures    what the plots show
    trace      trace.json, for Perfetto
    page       report.html
    words      one line, and Markdown
    overview   many runs, on one page
    write      all of these, in the folder of a run
"""
