"""Chaos plans: their values, how plans are drawn and made smaller, and when each fault is due."""
