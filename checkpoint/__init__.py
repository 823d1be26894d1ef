"""Not built yet: see docs/architecture.md, section 9."""
