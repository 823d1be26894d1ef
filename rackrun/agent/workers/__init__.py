"""A living worker as its agent sees it, and whether it hangs."""
