"""torchtitan's Trainer under rackrun: a step of its loop as a unit, its data, its logs, its checkpoints."""
