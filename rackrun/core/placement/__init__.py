"""Assignment of ranks to slots, and of snapshots to the trays that keep copies."""
