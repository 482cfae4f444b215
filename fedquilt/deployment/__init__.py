"""A federation of real devices.

terms.py       method, link and task as the settings of a request
device.py      a device: it answers requests with its own samples and its own state
states.py      versions of a device's state on its disk
in_process.py  devices in one process, reached by bytes, with faults on demand
"""
