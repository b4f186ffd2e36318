"""The draft as a TensorRT network: the torch decoder over slot memory, layer by layer."""
