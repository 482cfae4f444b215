"""Local training as pure functions: what a client minimizes, what may move, and one step of it.

A learner is a list of phases, an optimizer, and filters for what is sent and kept. Everything here
is a frozen value, so that clients that train alike compare equal and are trained as one stack. The
same functions run for one client and, under vmap, for many.

- `local.py`: settings that all methods have. `optimizers.py`, `schedules.py`, `augmentation.py` and
  `attacks.py` are parts of them.
- `learner.py`: all that a client does in a round, in `regions.py` (weights that may change),
  `filters.py` (weights that are sent and kept), `passes.py` (passes without steps) and `state.py`
  (further state of a method).
- `objectives.py`, `adversarial.py`, `distillation.py`, `mutual.py`: losses. `view.py` is the batch
  as they see it, and `check.py` tries a user's objective before a run.
- `batches.py`, `step.py`: the batches of a client, and one training step.
- `public.py`, `server.py`: public samples, and settings of the server's training.
"""
