"""What crosses a border between processes: ids, events, commands, messages, versions."""
