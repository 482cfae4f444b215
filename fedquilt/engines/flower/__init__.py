"""Engine whose clients are real devices, reached by messages.

courier.py  what carries messages to devices and back
engine.py   rounds over a courier: requests, validation of replies, and the fold
"""
