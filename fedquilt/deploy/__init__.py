"""Models for devices: deployment of a trained federation, and files in several formats.

trained.py       the state of a run that deployment needs
deploy.py        nets within a device's budget, with norm statistics
customizable.py  one module of several sizes that share their weights
export.py        export to a file, which is read back and compared
formats.py       ONNX, torch's .pt2 and safetensors
comparison.py    comparison of an exported model with torch's module
model_file.py    description in a safetensors file, and its checks
load.py          loading of safetensors files
"""
