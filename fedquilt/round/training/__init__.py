"""Local training as pure functions: what a client minimizes, what may move, and one step of it.

A learner is a list of phases, an optimizer, and filters for what is sent and kept. Everything here
is a frozen value, so that clients that train alike compare equal and are trained as one stack. The
same functions run for one client and, under vmap, for many.
"""
