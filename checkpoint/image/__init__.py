"""A rank's state as bytes: the header, boxes of tensors, the plain part."""
