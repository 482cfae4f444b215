"""Tables and figures of papers as presets: `PAPER/TABLE.toml`, read by `fedquilt.studies.papers`.

README.md describes the format. Modules here have methods that one table alone needs. A preset names
them as `fedquilt.papers.MODULE:Class`.
"""
