"""Engine whose clients are real devices, reached by messages.

courier.py              what carries messages to devices and back
engine.py               rounds over a courier: requests, validation of replies, and the fold
evaluation.py           evaluation on the server's samples and on devices
evaluation_exchange.py  requests to evaluate, and validation of the sums in replies
"""
