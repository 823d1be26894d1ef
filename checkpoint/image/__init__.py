"""A rank's state as bytes: the safetensors image, the boxes of its tensors, and its plain part."""
