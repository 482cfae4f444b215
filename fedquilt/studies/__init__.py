"""Several runs that belong together: seeds, grids, statistics, tables and stored results.

plan.py        a study as values: its entries, seeds, grids and folders
execute.py     execution of a plan: read, resume or begin each run
workers.py     runs in several processes
study.py       `fq.study` and `fq.Study`: plan, tune, run, and read again
result.py      one run as statistics see it
statistics.py  mean and deviation over seeds, paired comparison, cost to a target
report.py      the tables of a comparison, and its numbers as plain values
frames.py      numbers of runs as flat rows and data frames
table.py       a table of text cells in several formats
values.py      texts that name a number of a run, for columns of tables
measures.py    numbers of a run that take no training
papers.py      tables and figures of papers as presets
reproduce.py   a preset as a study
published.py   the paper's numbers beside the measured ones
stored.py      results that pages report, small and without weights
"""
