"""The vectorized engine: clients of equal shape trained as one."""
