"""Machine: devices, precision, memory and random generators of the process.

- `device.py`: devices by name, and transfers of tensors
- `precision.py`: precision by name
- `process.py`: memory of the machine and of the process
- `generators.py`: global random generators, whose states belong to the user
- `torch_internals.py`: all private functions of torch that fedquilt uses
"""
