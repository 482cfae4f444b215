"""Checks that the author of a method runs before others use it (`fedquilt check`).

method.py     `check_method`: run all checks, and return a finding for each
checks.py     the checks, one function each
case.py       the small federation that methods are checked on
compare.py    comparison of two runs
failures.py   exceptions with which a check ends
"""
