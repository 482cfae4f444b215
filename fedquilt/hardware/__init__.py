"""Machine: devices, precision, memory and random generators of the process."""
