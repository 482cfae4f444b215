"""Files that survive a kill and are read strictly.

files.py          files that are written completely or not at all, and tensors in them
tensor_files.py   the strict reader of safetensors files
"""
