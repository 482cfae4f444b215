"""Metrics of outputs, computed from sums that add over batches, or from all outputs at once.

base.py      `Metric`, `SumMetric` and `CollectedMetric`, from which all metrics are derived
classes.py   accuracy, top-k and perplexity: one class for each target
masks.py     Dice and intersection over union of masks
labels.py    F1 and accuracy of labels
numbers.py   errors of real numbers
loss.py      mean of the task's loss
ranking.py   average precision and AUROC, which need all outputs at once
registry.py  `METRICS` and `find_metric`: metrics by name
"""
