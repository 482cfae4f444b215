"""Tracing: from a run of a module on fake tensors to its named axes."""
