"""Files on disk, which are written atomically. Files from outside are read strictly."""
