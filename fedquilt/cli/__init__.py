"""The command line of fedquilt. Every command is a dataclass, whose fields are its flags.

main.py       the script: arguments, errors and exit status; `COMMANDS` lists all commands
run.py        `fedquilt run`
compare.py    `fedquilt compare`
reproduce.py  `fedquilt reproduce`
report.py     `fedquilt report`
watch.py      `fedquilt watch`
export.py     `fedquilt export`
clients.py    `fedquilt clients`
list.py       `fedquilt list`
data.py       `fedquilt data`
probe.py      `fedquilt probe`
check.py      `fedquilt check`
deployment.py `fedquilt keys`, `serve` and `join`
supernet.py   `fedquilt supernet train`, `show`, `measure` and `import`
search.py     `fedquilt supernet search`
options.py    flags that several commands share
run_loop.py   a run that begins or resumes
study.py      the runs of a study
listing.py    everything that can be chosen by name
output.py     standard output for people or for programs
show.py       lines, JSON and tables
progress.py   progress of rounds and checks
results.py    results of runs, probes, exports and checks
"""
