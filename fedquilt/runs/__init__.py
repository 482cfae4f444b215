"""One run of a federation: training, its folder, checkpoints, client states and trackers."""
