"""Dataclasses as plain values and back, with all problems of the settings in one error.

schema.py     fields, type hints and names of dataclasses and factories
tables.py     classes that settings select by name, and problems of settings
choice.py     `Choice`: a factory by its name, with its options
variants.py   the variants that a name selects from
reading.py    `read`: plain values into dataclasses
writing.py    `write`: dataclasses into plain values
resolve.py    one error for all problems
wording.py    words for these problems
listing.py    descriptions of all settings, for `fedquilt list`
toml.py       TOML text, dotted paths and assignments such as `a.b=v`
"""
