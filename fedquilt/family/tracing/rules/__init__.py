"""Rules of ATen operations: one small function per operation describes its dimensions.

A rule unifies dimensions that must be cut together, pins those that must not be cut, and returns
the dimensions of the outputs. All operations that torch tags as point-wise share one rule. An
operation without a rule pins all dimensions of its inputs and outputs.

dispatch     find the rule of an operation, and apply it to a call
registry     the decorator `rule`, which registers a rule for operations
operands     what rules share: arguments of a call, and dimensions of its operands
elementwise  operations on every element alone: arithmetic, activations, dropout, copies
views        operations that rearrange, cut or join tensors without computing
products     matrix products, attention, einsum, convolutions and embeddings
norms        batch, layer, group and weight norms
reductions   operations along a dimension: softmax, sums, sorting
spatial      pooling, upsampling and sampling of the last dimensions
lookups      operations that read or write at positions that a tensor has
creation     operations that make a new tensor
"""
