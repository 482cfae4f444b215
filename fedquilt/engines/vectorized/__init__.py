"""The vectorized engine: clients of equal shape trained as one.

A round passes through these modules in this order:

- `engine.py`: the engine, which trains a cohort in waves of stacks
- `waves.py`: which jobs form a stack, and which stacks train at the same time
- `stack.py`: a stack, with the starting state and the batches of its clients
- `passes.py`: passes before and after training, and the state of the method
- `stacked_step.py`: one training step of several clients, without capture
- `sending.py`: updates that are checked, sent and added to the fold
- `failures.py`: errors that occur only because clients are stacked

Client groups keep tensors at fixed addresses, so that a step can be captured as a CUDA graph:

- `groups.py`: a client group, which is loaded with a stack and replays its step
- `group_step.py`: the step, as actions that can be captured
- `group_tensors.py`: the tensors at fixed addresses
- `step_buffers.py`: tensors through which the actions of a step exchange data
- `group_store.py`: idle groups, and the choice of their layout
- `layout_check.py`: whether nets side by side give the outputs of stacked nets
- `cuda_graph.py`: the capture of an action
- `lines.py`, `line_cache.py`: weights of a client in one row, its masks and nested nets
- `stacking.py`: functions of tensors with clients in the first dimension

Evaluation:

- `evaluator.py`: evaluation and norm statistics of many nets
- `totals.py`: sums of metrics and stored outputs
- `captured.py`: a captured forward pass over many batches
"""
