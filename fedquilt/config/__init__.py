"""Settings: dataclasses from plain values and back, with all problems reported at once."""
