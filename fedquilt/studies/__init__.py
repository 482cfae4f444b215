"""Several runs that belong together: seeds, grids, statistics, tables and stored results.

measures.py    numbers of a run that take no training
papers.py      tables and figures of papers as presets
published.py   the paper's numbers beside the measured ones
result.py      one run as statistics see it
statistics.py  mean and deviation over seeds, paired comparison, cost to a target
table.py       a table of text cells in several formats
report.py      the tables of a comparison, and its numbers as plain values and data frames
values.py      what a column of a table shows, written as text
"""
