"""Pictures of racks and placements, for terminals and pages."""
