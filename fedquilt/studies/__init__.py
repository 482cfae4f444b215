"""Several runs that belong together: seeds, grids, statistics, tables and stored results.

study.py         `fq.study` and `fq.Study`: plan, tune, run, and read again
plan.py          a study as values: its rows, seeds and grids, and the file `study.toml`
entries.py       rows of a study, their runs and folders
differences.py   differences between the settings of two studies
execute.py       execution of a plan: read, resume or begin each run
workers.py       runs in several processes
result.py        one run as statistics see it
statistics.py    mean and deviation over seeds, paired comparison, cost to a target
comparison.py    runs that are compared, with verdicts and costs
report.py        tables of a comparison
number_text.py   numbers of a comparison as text
plain_values.py  numbers of a comparison as values that JSON can hold
frames.py        numbers of runs as flat rows and data frames
table.py         a table of text cells in several formats
values.py        texts that name a number of a run, for columns of tables
measures.py      numbers of a run that take no training
growth.py        cost of the stages of a growing model
papers.py        tables and figures of papers as presets
reproduce.py     a preset as a study
published.py     the paper's numbers beside the measured ones
stored.py        results that pages report, small and without weights
"""
