"""Engine whose clients are real devices, reached by messages.

courier.py              what carries messages to devices and back
engine.py               rounds over a courier: requests and the fold
exchange.py             the messages of one round, and the fate of each
reply_store.py          accepted replies until they are folded, in memory and on disk
validation.py           reading of replies, and refusal of those that do not follow from requests
evaluation.py           evaluation on the server's samples and on devices
evaluation_exchange.py  requests to evaluate, and validation of the sums in replies
"""
