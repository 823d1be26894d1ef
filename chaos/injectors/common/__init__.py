"""The interface of all injectors."""
