"""Models taken out of a run: plain modules, exported files, and one module of several sizes."""
