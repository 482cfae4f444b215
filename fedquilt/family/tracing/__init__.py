"""Tracing: from a run of a module on tensors without data to its named axes.

tracer        the steps of tracing, in order: `trace_layout` and `trace_runs`
run           the record of a run: tensors, ATen calls, and executions of modules
recorder      the context that writes this record
record        run a copy of a module under a recorder
variant_runs  runs of every variant of a module, in evaluation and in training
atoms         dimensions as products of unknown axes, and how they are unified
rules/        one rule per ATen operation: how its outputs follow from its inputs
sizes         sizes that Python reads in `forward`, with the dimensions they come from
attributes    numbers that a module keeps in its attributes
solver        the dimensions whose sizes attributes hold
pinning       which dimensions may be cut
naming        names of axes, and dimensions as expressions of them
selection     axes, layers and weights that the user names
traced        the result: a layout, and the runs it was derived from
check         members are built and run, and compared with what the axes predict
compare       two runs, compared call by call
cutpoints     layers after which a model can be cut into stages
"""
