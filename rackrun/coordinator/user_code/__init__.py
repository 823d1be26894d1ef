"""Users' policies and providers, each in a process of its own."""
