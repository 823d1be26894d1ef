"""File operations of the durable tier, on a disk or in an object store."""
