"""Trays, slots and workers of a rack: what each is fit for, what is spare, what is quarantined."""
