"""Reports of a run with faults, made from what it has left in its folder, as often as wanted.

==============================  ===========================================================================
`analysis.journal_timeline`     a job's journal, on the clock of the harness
`analysis.slot_occupancy`       which worker was in which slot, and when
`analysis.recovery_chains`      strike -> noticed -> decided -> planned -> resumed -> first step afterwards
`analysis.report_data`          everything that a report is made of
`analysis.downsample`           less of everything of which there is too much
`plots`                         what the plots show
`chrome_trace`                  trace.json, for Perfetto
`html_page`                     report.html
`run_text`                      one line, and Markdown
`write_reports`                 all of these, in the folder of a run
==============================  ===========================================================================

The page of a campaign is made by `rackrun.chaos.cli.campaign_page`.
"""
