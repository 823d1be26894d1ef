"""Types that processes exchange: ids, events, commands, wire messages, versions."""
