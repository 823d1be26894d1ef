"""A living worker as its agent sees it: its channel, its process, and whether it hangs."""
