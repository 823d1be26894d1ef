"""The table of all faults, and the checks that follow from it."""
